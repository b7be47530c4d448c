"""The machine that a part runs on, as far as it matters for how it runs."""

import os
import platform
import resource
from pathlib import Path

from outrider.v1 import facts_pb2

_DRIVER = Path("/proc/driver/nvidia/version")


def machine_facts(*, torch: str = "", accelerator: str = "") -> facts_pb2.MachineFacts:
    """`torch` is its version, `accelerator` a GPU's name, where there are any."""
    return facts_pb2.MachineFacts(
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=torch,
        accelerator=accelerator,
        driver=_driver() if accelerator else "",
        cores=_cores(),
        max_open_files=max(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 0),
        shared_memory_bytes=_shared_memory(),
    )


def _driver() -> str:
    """Of "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue …" the number."""
    try:
        words = _DRIVER.read_text().split("\n", 1)[0].split()
    except OSError:
        return ""
    return next((word for word in words if word[0].isdigit() and "." in word), "")


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 0


def _shared_memory() -> int:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return found.f_blocks * found.f_frsize
