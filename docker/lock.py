"""Pin what the images are made of: `make lock` writes docker/locks/*.txt, with hashes, for all
platforms and Pythons that the images may have.

orchestrator.txt  the dependencies, without numpy, the model hub's client, and what the asyncio
                  half of Kubernetes' client needs
worker.txt        those of a worker, torch itself excepted: the images' argument TORCH names it
cuda.txt          what CUDA adds to that
build.txt         what makes the wheel of Outrider
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "docker" / "locks"
TORCH = "torch==2.13.0"
PYTHON = "3.11"
BUILD = ("pip", "setuptools", "wheel")

# The tokenizers package asks for the hub's client, which it needs to download a tokenizer by name
# and for nothing else; an orchestrator has its tokenizers from the targets. What needs numpy are
# workers, and the commands that measure and predict. Half of Kubernetes' client is for asyncio; it
# is cut out of the image (cut_kubernetes.py), so that nobody imports aiohttp.
LEFT_OUT = "".join(
    f"{name}; sys_platform == 'never'\n"
    for name in ("huggingface-hub", "numpy", "aiohttp", "aiohttp-retry")
)
CUDA = re.compile(r"nvidia-|cuda-|triton\b|humming-kernels|apache-tvm-ffi")

HEADER = "# Written by `make lock`.\n"


def main() -> None:
    LOCKS.mkdir(exist_ok=True)
    service = [str(ROOT / "pyproject.toml"), "--extra", "telemetry", "--extra", "jwt"]
    orchestrator = [*service, "--extra", "kubernetes"]
    write("orchestrator.txt", resolve(orchestrator, overrides=LEFT_OUT))
    worker = [*service, "--extra", "worker", "--extra", "quantised"]
    packages = resolve(worker, constraints=TORCH)
    cuda = {name: text for name, text in packages.items() if CUDA.match(name)}
    rest = {name: packages[name] for name in packages if name not in cuda}
    write("cuda.txt", cuda)
    write("worker.txt", {name: text for name, text in rest.items() if not is_torch(name)})
    write("build.txt", resolve(["-"], requirements="\n".join(BUILD)))


def is_torch(name: str) -> bool:
    return name.split("==")[0] == "torch"


def resolve(
    sources: list[str], *, overrides: str = "", constraints: str = "", requirements: str = ""
) -> dict[str, str]:
    """Each pinned package's first line, and all of its lines."""
    command = [sys.executable, "-m", "uv", "pip", "compile", *sources, "--quiet", "--universal"]
    command += ["--python-version", PYTHON, "--generate-hashes", "--no-annotate", "--no-header"]
    for flag, text in (("--overrides", overrides), ("--constraints", constraints)):
        if text:
            path = LOCKS / f".{flag.strip('-')}"
            path.write_text(text)
            command += [flag, str(path)]
    try:
        result = subprocess.run(command, input=requirements, capture_output=True, text=True)
    finally:
        for path in LOCKS.glob(".*"):
            path.unlink()
    if result.returncode != 0:
        sys.exit(result.stderr)
    blocks = re.split(r"^(?=\w)", result.stdout, flags=re.MULTILINE)
    blocks = [block for block in blocks if block.strip() and "'never'" not in block]
    return {block.splitlines()[0]: block for block in blocks}


def write(name: str, packages: dict[str, str]) -> None:
    (LOCKS / name).write_text(HEADER + "".join(packages.values()))
    print(f"docker/locks/{name}: {len(packages)} packages")


if __name__ == "__main__":
    main()
