"""checkov finds nothing in the profiles and the Dockerfiles but what is explained here."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from cases import PROFILE_CASES
from charts import ROOT, TOOLS, Manifest, pods, render

pytestmark = pytest.mark.chart

EXPLAINED = {
    ("CKV_K8S_43", "*"): "digests are for those who publish images; image.digest pins each",
    ("CKV_K8S_15", "*"): "tags of releases do not move, and image.pullPolicy is a value",
    ("CKV_K8S_8", "Pod"): "the pod of `helm test` answers once and ends",
    ("CKV_K8S_9", "Pod"): "likewise, and nothing calls it",
    ("CKV_K8S_38", "Deployment"): "an orchestrator watches EndpointSlices by its token",
    ("CKV_DOCKER_2", "*"): "Kubernetes has its own probes and ignores HEALTHCHECK",
    ("CKV_DOCKER_7", "*"): "the base is an argument, whose default has a tag",
}
"""Why a check does not hold, by check and kind."""


def test_checkov_finds_nothing_that_is_not_explained(tmp_path: Path) -> None:
    for case in PROFILE_CASES:
        manifests = render(case)
        with (tmp_path / f"{case.name}.yaml").open("w") as file:
            yaml.safe_dump_all([*manifests, *_groups_as_pods(manifests)], file)
    for dockerfile in (ROOT / "docker").glob("*.Dockerfile"):
        shutil.copy(dockerfile, tmp_path)
    found = _failures(tmp_path)
    explained = {(check, kind) for check, kind in found if (check, "*") in EXPLAINED}
    unexplained = {key: found[key] for key in found.keys() - explained - EXPLAINED.keys()}
    assert not unexplained, json.dumps({" ".join(k): v for k, v in unexplained.items()}, indent=1)
    # An explanation of what does not happen is one of something else.
    used = {(check, "*") for check, _ in explained} | (found.keys() & EXPLAINED.keys())
    assert used == EXPLAINED.keys()


def _groups_as_pods(manifests: list[Manifest]) -> list[Manifest]:
    """Pods of custom resources, which checkov does not know."""
    return [
        {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": {
                "name": name.split("/")[1].replace(" ", "-"),
                "namespace": "outrider",
                "labels": pod["metadata"]["labels"],
            },
            "spec": {
                "serviceName": "x",
                "selector": {"matchLabels": pod["metadata"]["labels"]},
                "template": pod,
            },
        }
        for name, pod in pods(manifests)
        if name.endswith(" leader")
    ]


def _failures(folder: Path) -> dict[tuple[str, str], list[str]]:
    """By check and kind, its name and where it fails."""
    command = [TOOLS / "checkov" / "bin" / "checkov", "--directory", folder, "--framework"]
    command += ["kubernetes", "dockerfile", "--skip-download", "--quiet", "--output", "json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    reports: list[dict[str, Any]] = json.loads(result.stdout)
    assert {report["check_type"] for report in reports} == {"kubernetes", "dockerfile"}
    assert all(report["summary"]["passed"] > 20 for report in reports)
    assert not any(report["summary"]["parsing_errors"] for report in reports)
    found: dict[tuple[str, str], list[str]] = {}
    for failure in (f for report in reports for f in report["results"]["failed_checks"]):
        kind = failure["resource"].split(".")[0]
        places = found.setdefault((failure["check_id"], kind), [failure["check_name"]])
        places.append(f"{failure['file_path']} {failure['resource']}")
    return found
