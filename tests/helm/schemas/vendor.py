"""Makes the JSON schemas of this folder, from the TypeScript models of custom resources in the npm
packages @kubernetes-models/* (MIT, see LICENSE): `python tests/helm/schemas/vendor.py`.

They are strict: a field that a resource does not have is refused. leaderworkerset.json is written
by hand, after the types of leaderworkerset.x-k8s.io/v1; its pods are Kubernetes' own.
"""

import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
GENERATOR = "ts-json-schema-generator@2"
PACKAGES = {"keda": "2.0.0", "cert-manager": "6.0.0", "gateway-api": "2.0.0",
            "prometheus-operator": "6.0.0"}  # fmt: skip
KINDS = {
    "ScaledObject": "keda/keda.sh/v1alpha1",
    "Certificate": "cert-manager/cert-manager.io/v1",
    "Issuer": "cert-manager/cert-manager.io/v1",
    "GRPCRoute": "gateway-api/gateway.networking.k8s.io/v1",
    "HTTPRoute": "gateway-api/gateway.networking.k8s.io/v1",
    "BackendTLSPolicy": "gateway-api/gateway.networking.k8s.io/v1",
    "PodMonitor": "prometheus-operator/monitoring.coreos.com/v1",
    "ServiceMonitor": "prometheus-operator/monitoring.coreos.com/v1",
    "PrometheusRule": "prometheus-operator/monitoring.coreos.com/v1",
}
OPTIONS = {"module": "nodenext", "moduleResolution": "nodenext", "target": "esnext",
           "skipLibCheck": True, "strict": True}  # fmt: skip


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        install(folder)
        models = folder / "node_modules" / "@kubernetes-models"
        for kind, place in KINDS.items():
            schema = generate(folder, models / place / f"{kind}.d.ts", kind)
            (HERE / f"{kind.lower()}.json").write_text(json.dumps(schema, sort_keys=True) + "\n")
        shutil.copy(models / "keda" / "LICENSE", HERE / "LICENSE")


def install(folder: Path) -> None:
    (folder / "tsconfig.json").write_text(json.dumps({"compilerOptions": OPTIONS}))
    (folder / "package.json").write_text('{"private": true}')
    names = [f"@kubernetes-models/{name}@{version}" for name, version in PACKAGES.items()]
    # --force: they ask for a newer Node.js to run on than it takes to read their types.
    command = [
        "npm",
        "install",
        "--silent",
        "--ignore-scripts",
        "--no-audit",
        "--no-fund",
        "--force",
    ]
    subprocess.run([*command, GENERATOR, *names], cwd=folder, check=True)


def generate(folder: Path, source: Path, kind: str) -> dict[str, Any]:
    command = [folder / "node_modules" / ".bin" / "ts-json-schema-generator"]
    command += ["--tsconfig", "tsconfig.json", "--no-type-check", "--jsDoc", "none"]
    command += ["--expose", "none", "--no-top-ref", "--path", source, "--type", f"I{kind}"]
    result = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    schema: dict[str, Any] = json.loads(result.stdout)
    # What a controller writes, and solvers of public CAs: the chart has neither.
    schema["properties"].pop("status", None)
    schema["properties"]["spec"].get("properties", {}).pop("acme", None)
    return schema


if __name__ == "__main__":
    main()
