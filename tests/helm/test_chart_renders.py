"""Lint, the schemas of every Kubernetes that is supported, refused values, and golden files."""

import re
from pathlib import Path

import pytest

from cases import MATRIX, PROFILE_CASES, REFUSED
from charts import CHART, PROFILES, VERSIONS, Case, Schemas, helm, render, rendered_text, template

pytestmark = pytest.mark.chart

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def schemas() -> dict[str, Schemas]:
    return {version: Schemas(version) for version in VERSIONS}


@pytest.mark.parametrize("profile", ["", *PROFILES])
def test_lint_finds_nothing(profile: str) -> None:
    values = ["--values", str(CHART / f"values-{profile}.yaml")] if profile else []
    result = helm("lint", "--strict", str(CHART), *values)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("case", [*PROFILE_CASES, *MATRIX], ids=lambda case: case.name)
def test_every_kubernetes_takes_it(case: Case, schemas: dict[str, Schemas]) -> None:
    manifests = render(case)
    faults = [
        f"{version}: {fault}"
        for version in case.versions()
        for manifest in manifests
        for fault in schemas[version].faults(manifest)
    ]
    assert not faults, "\n".join(faults)


def test_the_schemas_refuse_what_kubernetes_would(schemas: dict[str, Schemas]) -> None:
    """The check above can fail: on fields at the top, in pods, and in custom resources."""
    for case, kind, spoil in (
        (Case("defaults"), "Deployment", lambda spec: spec.update(replica=1)),
        (Case("defaults"), "StatefulSet", lambda spec: _container(spec).update(probe={})),
        (Case("gpu", profile="gpu"), "ScaledObject", lambda spec: spec.update(maxReplicas=1)),
        (Case("gpu", profile="gpu"), "Certificate", lambda spec: spec.pop("issuerRef")),
        (Case("gpu", profile="gpu"), "PodMonitor", lambda spec: spec.update(endpoints=[])),
        (Case("70b", profile="70b"), "LeaderWorkerSet", _spoil_leader),
    ):
        spoilt = next(m for m in render(case) if m["kind"] == kind)
        spoil(spoilt["spec"])
        for version in VERSIONS:
            assert schemas[version].faults(spoilt), (kind, version)


def _container(spec: dict) -> dict:
    return spec["template"]["spec"]["containers"][0]


def _spoil_leader(spec: dict) -> None:
    spec["leaderWorkerTemplate"]["leaderTemplate"]["spec"]["container"] = []


@pytest.mark.parametrize(("why", "values", "said"), REFUSED, ids=[why for why, *_ in REFUSED])
def test_values_that_make_no_sense_are_refused_by_name(why: str, values: dict, said: str) -> None:
    result = template(Case(why, values))
    assert result.returncode != 0 and said in result.stderr, result.stderr


def test_an_older_kubernetes_is_refused() -> None:
    result = template(Case("defaults"), "--kube-version", "1.29.5")
    assert result.returncode != 0 and "kubeVersion" in result.stderr
    assert template(Case("defaults"), "--kube-version", "1.30.0").returncode == 0


DRAWN = re.compile(r"^(  (?:token|tokens|password|ca\.crt|tls\.crt|tls\.key): ).+$", re.MULTILINE)
DASHBOARD = re.compile(r"^(  outrider\.json: \|).*?(?=^---)", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("case", PROFILE_CASES, ids=lambda case: case.name)
def test_what_profiles_render_is_what_was_agreed_on(
    case: Case, request: pytest.FixtureRequest
) -> None:
    """After a change that is meant: `make golden`, and look at the difference."""
    text = rendered_text(case)
    # Drawn anew each time; a file of its own.
    text = DASHBOARD.sub(r"\1 files/dashboard.json\n", DRAWN.sub(r"\1DRAWN", text))
    path = GOLDEN / f"{case.name}.yaml"
    if request.config.getoption("--update-golden", default=False):
        path.write_text(text, encoding="utf-8")
    assert path.is_file() and text == path.read_text(encoding="utf-8"), "run `make golden`"
