"""The engine's CPU kernels: compiled once by the machine's C++ compiler, then loaded from a cache.

`load` makes `torch.ops.outrider_cpu` available. Attention over paged KV and RMS norm are here
because theirs are the results whose bits would otherwise depend on what else is in a pass.
"""

import contextlib
import fcntl
import hashlib
import logging
import platform
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import torch

from outrider.engine.model_files import default_cache_dir
from outrider.errors import FailedPrecondition

logger = logging.getLogger(__name__)

BLOCK_SIZES = (8, 32)
"""Tokens of a KV block that the kernels are made for."""

_LIBRARY = "outrider_cpu.so"

_FLAGS = ("-O3", "-march=native", "-ffast-math", "-fno-finite-math-only", "-fopenmp")


def load(cache_dir: Path | None = None) -> float:
    """Compile the kernels unless they are in `cache_dir`; seconds that it took.

    A process that has them does nothing. Raises FailedPrecondition where there is no C++ compiler.
    """
    started = time.monotonic()
    if not _is_loaded():
        folder = (cache_dir or default_cache_dir()) / f"kernels-{_fingerprint()}"
        library = folder / _LIBRARY
        if library.exists() or not _compile(folder):
            torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    return time.monotonic() - started


def identity() -> str:
    """The same where the kernels compute the same bits: equal code, compiler's flags, torch and
    processor."""
    return _fingerprint()


def _is_loaded() -> bool:
    return hasattr(torch.ops.outrider_cpu, "paged_attention")


def _sources(pattern: str = "cpu_*.cpp") -> list[Path]:
    return sorted(Path(str(resources.files("outrider.engine"))).glob(pattern))


def _fingerprint() -> str:
    """What a compiled library depends on: source, flags, torch and the processor."""
    code = (source.read_text() for source in (*_sources(), *_sources("cpu_*.h")))
    parts = (*code, *_FLAGS, torch.__version__, platform.machine(), _processor())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return line
    return platform.processor()


def _compile(folder: Path) -> bool:
    """Compile and load; False if another process has compiled them meanwhile.

    The library is in its place when it is whole, whoever is killed under way.
    """
    from torch.utils import cpp_extension

    build = folder / "build"
    build.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        if (folder / _LIBRARY).exists():
            return False
        logger.info("compiling the CPU kernels; this happens once")
        # torch's own lock is a file, which a process that was killed leaves behind.
        (build / "lock").unlink(missing_ok=True)
        try:
            cpp_extension.load(
                "outrider_cpu",
                [str(source) for source in _sources()],
                extra_cflags=list(_FLAGS),
                extra_ldflags=["-lmvec"] if platform.machine() == "x86_64" else [],
                build_directory=str(build),
                is_python_module=False,
            )
        except (RuntimeError, OSError) as error:
            raise FailedPrecondition(
                f"the CPU kernels need a C++ compiler (install g++ or gcc-c++): {error}"
            ) from error
        (build / _LIBRARY).replace(folder / _LIBRARY)
    return True


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process of this machine at a time; a lock that ends with the process that holds it."""
    with (folder / "compiling").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
