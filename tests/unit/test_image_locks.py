"""What images are made of is pinned, and is what pyproject.toml asks for."""

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINNED = re.compile(r"^(?P<name>[a-z0-9][a-z0-9.-]*)==(?P<version>[^ ;\\]+)", re.MULTILINE)


def pinned(*names: str) -> dict[str, set[str]]:
    """Versions by package; there are several where Pythons need different ones."""
    found: dict[str, set[str]] = {}
    for name in names:
        for match in PINNED.finditer((ROOT / "docker" / "locks" / name).read_text()):
            found.setdefault(match["name"], set()).add(match["version"])
    return found


def asked(*extras: str) -> list[Requirement]:
    texts = [*PROJECT["dependencies"]]
    for extra in extras:
        texts += PROJECT["optional-dependencies"][extra]
    return [Requirement(text) for text in texts]


@pytest.mark.parametrize(
    ("extras", "locks"),
    [
        (("kubernetes",), ("orchestrator.txt",)),
        (("worker", "quantised"), ("worker.txt", "cuda.txt")),
    ],
    ids=["orchestrator", "worker"],
)
def test_every_dependency_is_pinned_as_asked_for(
    extras: tuple[str, ...], locks: tuple[str, ...]
) -> None:
    """After a change of dependencies: `make lock`."""
    found = pinned(*locks)
    for requirement in asked(*extras):
        if requirement.name == "torch":  # An argument of the images.
            continue
        if requirement.name == "numpy" and "orchestrator.txt" in locks:  # See below.
            continue
        versions = found.get(requirement.name, set())
        assert versions, f"{requirement.name} is missing; run `make lock`"
        assert all(requirement.specifier.contains(version) for version in versions), requirement


def test_the_torch_of_the_images_is_the_one_that_the_rest_was_pinned_for() -> None:
    (wanted,) = re.findall(r'^TORCH = "(.+)"', (ROOT / "docker/lock.py").read_text(), re.MULTILINE)
    for tier in ("draft", "target"):
        text = (ROOT / "docker" / f"{tier}.Dockerfile").read_text()
        assert f"ARG TORCH={wanted}\n" in text
    torch = next(r for r in asked("worker") if r.name == "torch")
    assert torch.specifier.contains(wanted.partition("==")[2])


def test_nothing_of_a_model_hub_or_of_torch_is_in_the_orchestrator() -> None:
    unwanted = {"numpy", "huggingface-hub", "hf-xet", "torch", "transformers", "triton", "fsspec"}
    assert not unwanted & pinned("orchestrator.txt").keys()


def test_kubernetes_client_is_the_orchestrators_alone_and_without_its_asyncio_half() -> None:
    assert "kubernetes" not in pinned("worker.txt")
    assert not {"aiohttp", "aiohttp-retry", "yarl", "multidict"} & pinned("orchestrator.txt").keys()


WITHOUT_NUMPY = """
import importlib.util
import sys

LEFT_OUT = ("numpy", "torch", "transformers", "huggingface_hub")
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in LEFT_OUT else real(name, *rest)

class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in LEFT_OUT:
            raise ImportError(name)

sys.meta_path.insert(0, Without())
import outrider.cli.__main__, services.orchestrator.__main__, services.orchestrator.service
import outrider.telemetry.exporting
outrider.cli.__main__.build_parser().parse_args(["generate", "x"])
"""


def test_orchestrator_and_command_run_without_what_its_image_has_not() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_NUMPY], check=True, cwd=ROOT, timeout=60)


WITH_A_CUT_CLIENT = """
import asyncio
import contextlib
import sys
import threading

import services.orchestrator.__main__
from kube_server import KubeServer, endpoint, endpoint_slice
from services.orchestrator.discovery.kube_api import KubeAccess, SliceApi
from services.orchestrator.discovery.kubernetes import KubernetesSource

imported_by = []

class Notice:
    def find_spec(self, name, path=None, target=None):
        if name == "kubernetes":
            imported_by.append(threading.current_thread().name)

sys.meta_path.insert(0, Notice())

async def main(server):
    source = KubernetesSource(KubeAccess(server.url), "targets", "", "")
    server.put(endpoint_slice("one", endpoint("10.0.0.1")))
    assert "kubernetes" not in sys.modules
    async with contextlib.aclosing(source.watch()) as news:
        assert len(await anext(news)) == 1
        server.put(endpoint_slice("two", endpoint("10.0.0.2")))
        assert len(await anext(news)) == 2
        server.refuse = 403
        server.disconnect()
        while not source.counters["failures"]:
            await asyncio.sleep(0.01)
        server.refuse = 0
        server.remove("one")
        assert len(await anext(news)) == 1
        server.bookmark()
        while source.counters["events"] < 2:
            await asyncio.sleep(0.01)
        server.silent = True
        server.disconnect()
        num_asked = len(server.requests)
        while len(server.requests) == num_asked:
            await asyncio.sleep(0.01)
        SliceApi.hang_up = lambda self: None

with KubeServer() as server:
    asyncio.run(main(server))
import kubernetes
assert kubernetes.__file__.startswith(sys.argv[1]), kubernetes.__file__
assert imported_by == ["outrider-kubernetes"], imported_by
assert any(thread.name == "outrider-kubernetes" for thread in threading.enumerate())
"""


def test_discovery_works_with_the_client_as_the_image_has_it(tmp_path: Path) -> None:
    """It is imported on discovery's thread, and a call that hangs does not hold up the end."""
    whole = Path(importlib.util.find_spec("kubernetes").origin).parent
    cut = tmp_path / "kubernetes"
    shutil.copytree(
        whole, cut, copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__")
    )
    run = functools.partial(subprocess.run, check=True, cwd=tmp_path, timeout=60)
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    script = str(ROOT / "docker" / "cut_kubernetes.py")
    run([sys.executable, "-B", script, str(cut)], env=os.environ | {"PYTHONPATH": path})
    assert len(list(cut.rglob("*.py"))) < 100
    path = os.pathsep.join((str(tmp_path), path))
    command = [sys.executable, "-B", "-c", WITH_A_CUT_CLIENT, str(tmp_path)]
    run(command, env=os.environ | {"PYTHONPATH": path})


def test_every_pin_has_a_hash() -> None:
    for path in (ROOT / "docker" / "locks").glob("*.txt"):
        for block in re.split(r"^(?=[a-z0-9])", path.read_text(), flags=re.MULTILINE)[1:]:
            assert "--hash=sha256:" in block, (path.name, block.splitlines()[0])
