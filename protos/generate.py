"""Generate the Python code of the protos into the folder given (normally outrider/v1)."""

import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parent


def generate(target: Path) -> None:
    """Write *_pb2.py, *_pb2.pyi and *_pb2_grpc.py; other files in `target` stay as they are."""
    sources = sorted(str(path) for path in (ROOT / "outrider" / "v1").glob("*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        outputs = [f"--{kind}={scratch}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
        if protoc.main(["protoc", f"-I{ROOT}", *outputs, *sources]) != 0:
            raise SystemExit("protoc failed")
        for path in sorted(Path(scratch, "outrider", "v1").iterdir()):
            # A proto without a service needs no gRPC module.
            text = path.read_text()
            if path.name.endswith("_pb2_grpc.py") and "Stub" not in text:
                continue
            (target / path.name).write_text(text)


if __name__ == "__main__":
    generate(Path(sys.argv[1]))
