"""Secrets that the chart draws are drawn once: an upgrade finds them in the cluster."""

import base64
import http.server
import json
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
import yaml

from charts import Case, Manifest, named, of_kind, render, template
from test_chart_rules import certificate, names_in

pytestmark = pytest.mark.chart

KINDS = {
    "v1": ("Secret", "ConfigMap", "Service", "ServiceAccount", "Pod"),
    "apps/v1": ("Deployment", "StatefulSet"),
    "networking.k8s.io/v1": ("NetworkPolicy",),
}
NOT_FOUND = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound",
             "code": 404}  # fmt: skip


def discovery() -> dict[str, Manifest]:
    """What an API server says of itself, by path."""
    found: dict[str, Manifest] = {
        "/version": {"major": "1", "minor": "36", "gitVersion": "v1.36.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
    }
    groups = []
    for api_version, kinds in KINDS.items():
        group, _, version = api_version.rpartition("/")
        if group:
            entry = {"groupVersion": api_version, "version": version}
            groups.append({"name": group, "versions": [entry], "preferredVersion": entry})
        found[f"/{'apis' if group else 'api'}/{api_version}"] = {
            "kind": "APIResourceList",
            "groupVersion": api_version,
            "resources": [
                {"name": plural(kind), "singularName": kind.lower(), "namespaced": True,
                 "kind": kind, "verbs": ["get", "list"]} for kind in kinds
            ],
        }  # fmt: skip
    found["/apis"] = {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    return found


def plural(kind: str) -> str:
    return kind.lower().removesuffix("y") + ("ies" if kind.endswith("y") else "s")


API = discovery()


class Cluster(http.server.ThreadingHTTPServer):
    """An API server that holds secrets, as far as helm's `lookup` asks for it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.secrets: list[Manifest] = []

    def answer(self, path: str) -> Manifest | None:
        for secret in self.secrets:
            name, namespace = secret["metadata"]["name"], secret["metadata"]["namespace"]
            if path == f"/api/v1/namespaces/{namespace}/secrets/{name}":
                return {**secret, "metadata": _installed(secret["metadata"])}
        return API.get(path)

    def upgrade(self, case: Case) -> list[Manifest]:
        result = template(
            case,
            "--dry-run=server",
            f"--kube-apiserver=http://127.0.0.1:{self.server_port}",
            "--disable-openapi-validation",
        )
        assert result.returncode == 0, result.stderr
        return [manifest for manifest in yaml.safe_load_all(result.stdout) if manifest]


def _installed(metadata: Manifest) -> Manifest:
    """As helm leaves it in a cluster."""
    owner = {
        "meta.helm.sh/release-name": "demo",
        "meta.helm.sh/release-namespace": metadata["namespace"],
    }
    return {**metadata, "annotations": metadata.get("annotations", {}) | owner}


class Handler(http.server.BaseHTTPRequestHandler):
    server: Cluster

    def do_GET(self) -> None:
        found = self.server.answer(urlsplit(self.path).path)
        body = json.dumps(found or NOT_FOUND).encode()
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


DEMO = Case("demo", profile="demo")


def test_an_upgrade_keeps_passwords_tokens_and_certificates(cluster: Cluster) -> None:
    cluster.secrets = of_kind(render(DEMO), "Secret")
    assert len(cluster.secrets) == 8
    again = of_kind(cluster.upgrade(DEMO), "Secret")
    assert {s["metadata"]["name"]: s["data"] for s in again} == {
        s["metadata"]["name"]: s["data"] for s in cluster.secrets
    }


def test_a_name_more_makes_one_certificate_anew_of_the_same_ca(cluster: Cluster) -> None:
    cluster.secrets = of_kind(render(DEMO), "Secret")
    ca = certificate(named(cluster.secrets, "Secret", "demo-outrider-ca"))
    more = Case("more", {"tls": {"extraNames": ["llm.example.com"]}}, "demo")
    upgraded = cluster.upgrade(more)
    changed = {
        secret["metadata"]["name"]
        for secret in cluster.secrets
        if named(upgraded, "Secret", secret["metadata"]["name"])["data"] != secret["data"]
    }
    assert changed == {"demo-outrider-orchestrator-tls"}
    anew = named(upgraded, "Secret", "demo-outrider-orchestrator-tls")
    assert "llm.example.com" in names_in(anew)
    certificate(anew).verify_directly_issued_by(ca)
    assert certificate(named(upgraded, "Secret", "demo-outrider-ca")) == ca


def test_a_secret_that_is_gone_is_drawn_anew(cluster: Cluster) -> None:
    cluster.secrets = [
        s for s in of_kind(render(DEMO), "Secret") if s["metadata"]["name"] != "demo-outrider-redis"
    ]
    drawn = named(cluster.upgrade(DEMO), "Secret", "demo-outrider-redis")
    assert len(base64.b64decode(drawn["data"]["password"])) == 43
