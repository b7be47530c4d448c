"""Rendering the chart, and validating what comes out; the tests of this folder import it."""

import copy
import functools
import json
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema_rs
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "outrider"
TOOLS = ROOT / ".tools"
PROFILES = ("demo", "gpu", "70b")
VERSIONS = tuple(f"1.{minor}" for minor in range(30, 38))
"""Of Kubernetes."""

NOT_YET: frozenset[str] = frozenset()
"""Settings that the chart makes and the services do not have yet."""

Values = Mapping[str, Any]
Manifest = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """Values of an installation; `since` is the oldest Kubernetes that has what it uses, `apis` are
    those that its cluster has besides Kubernetes' own."""

    name: str
    values: Values = field(default_factory=dict)
    profile: str = ""
    since: str = VERSIONS[0]
    apis: tuple[str, ...] = ()

    def versions(self) -> tuple[str, ...]:
        return VERSIONS[VERSIONS.index(self.since) :]


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(TOOLS / "helm"), *arguments], capture_output=True, text=True, timeout=60
    )


def template(case: Case, *more: str) -> subprocess.CompletedProcess[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(dict(case.values), file)
        file.flush()
        return helm(*_command(case), "--values", file.name, *more)


def _command(case: Case) -> list[str]:
    command = ["template", "demo", str(CHART), "--namespace", "outrider"]
    if case.profile:
        command += ["--values", str(CHART / f"values-{case.profile}.yaml")]
    return [*command, *(f"--api-versions={api}" for api in case.apis)]


def rendered_text(case: Case) -> str:
    result = template(case)
    assert result.returncode == 0, result.stderr
    return result.stdout


def render(case: Case) -> list[Manifest]:
    """The objects of an installation."""
    return copy.deepcopy(_rendered(case.name, case.profile, json.dumps(case.values), case.apis))


@functools.cache
def _rendered(name: str, profile: str, values: str, apis: tuple[str, ...]) -> list[Manifest]:
    text = rendered_text(Case(name, json.loads(values), profile, apis=apis))
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [manifest for manifest in yaml.load_all(text, Loader=loader) if manifest]


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] in kinds]


def named(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = (m for m in of_kind(manifests, kind) if m["metadata"]["name"] == name)
    return found


def pods(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Each pod's template, with what it is of."""
    for manifest in manifests:
        name = f"{manifest['kind']}/{manifest['metadata']['name']}"
        spec = manifest.get("spec", {})
        if manifest["kind"] == "Pod":
            yield name, manifest
        elif manifest["kind"] == "LeaderWorkerSet":
            yield f"{name} leader", spec["leaderWorkerTemplate"]["leaderTemplate"]
            yield f"{name} worker", spec["leaderWorkerTemplate"]["workerTemplate"]
        elif "template" in spec:
            yield name, spec["template"]


class Schemas:
    """The schemas of one Kubernetes, and of the custom resources that the chart may make."""

    def __init__(self, version: str) -> None:
        self._folder = f"kubernetes_validate/kubernetes-json-schema/v{version}.0-local-strict"
        self._archive = zipfile.ZipFile(TOOLS / "schemas.whl")
        definitions = self._read("_definitions.json")
        self._registry = jsonschema_rs.Registry([(definitions["$id"], definitions)])
        self._validators: dict[tuple[str, str], jsonschema_rs.Validator] = {}
        self._seen: set[str] = set()

    def faults(self, manifest: Manifest) -> list[str]:
        """What the API server would refuse, a line each."""
        text = json.dumps(manifest, sort_keys=True)
        if text in self._seen:
            return []
        validator = self._validator(manifest["apiVersion"], manifest["kind"])
        name = f"{manifest['kind']}/{manifest['metadata']['name']}"
        found = [
            f"{name} {'.'.join(map(str, error.instance_path))}: {error.message[:300]}"
            for error in validator.iter_errors(manifest)
        ]
        if not found:
            self._seen.add(text)
        return found

    def _validator(self, api_version: str, kind: str) -> jsonschema_rs.Validator:
        if (api_version, kind) not in self._validators:
            own = Path(__file__).parent / "schemas" / f"{kind.lower()}.json"
            if own.is_file():
                schema = json.loads(own.read_text())
                # Each schema knows the version that it is of.
                assert schema["properties"]["apiVersion"]["const"] == api_version
            else:
                group, _, version = api_version.rpartition("/")
                group = group.split(".")[0]
                name = "-".join(part for part in (kind.lower(), group, version) if part)
                schema = self._read(f"{name}.json")
            self._validators[api_version, kind] = jsonschema_rs.validator_for(
                schema, registry=self._registry
            )
        return self._validators[api_version, kind]

    def _read(self, name: str) -> dict[str, Any]:
        schema: dict[str, Any] = json.loads(self._archive.read(f"{self._folder}/{name}"))
        return schema
