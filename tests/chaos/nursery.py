"""Starts the processes of the stack, signals them, and knows how each has ended."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parents[2]
_READY_S = 120.0


@dataclass
class Process:
    """One process; `status` is None while it lives, then its exit code or minus its signal."""

    name: str
    pid: int
    log: Path
    status: int | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def lives(self) -> bool:
        return self.status is None

    def signal(self, number: signal.Signals) -> None:
        if self.lives:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def wait(self, timeout_s: float) -> int | None:
        """Its status; None where it is still there after the time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.ended.wait()
        return self.status


class Nursery:
    """The process that forks services (serve.py); they die with it, and it with this one."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._ids = itertools.count(1)
        self._asked: dict[int, asyncio.Future[int]] = {}
        self._children: dict[int, Process] = {}
        self._early: dict[int, int] = {}
        """Statuses of processes that ended before anyone here knew of them."""

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            f"{__package__}.serve",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
            env=_environment(),
            start_new_session=True,
        )
        async with asyncio.timeout(_READY_S):
            first = await self._read_line()
        if "ready" not in first:
            raise RuntimeError("the process that forks services did not start")
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        assert self._process is not None
        for child in self._children.values():
            child.signal(signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        if self._reader is not None:
            await asyncio.wait([self._reader])

    async def start(
        self,
        name: str,
        role: str,
        argv: Sequence[str],
        *,
        namespace: str,
        log: Path,
        env: Mapping[str, str] | None = None,
    ) -> Process:
        assert self._process is not None and self._process.stdin is not None
        number = next(self._ids)
        order = {
            "id": number,
            "role": role,
            "argv": list(argv),
            "env": dict(env or {}),
            "namespace": namespace,
            "log": str(log),
        }
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        pid = await answer
        process = Process(name, pid, log)
        if pid in self._early:
            self._end(process, self._early.pop(pid))
        else:
            self._children[pid] = process
        return process

    async def _read(self) -> None:
        while line := await self._read_line():
            if "id" in line:
                self._asked.pop(line["id"]).set_result(line["pid"])
            elif line["pid"] in self._children:
                self._end(self._children.pop(line["pid"]), line["status"])
            else:
                self._early[line["pid"]] = line["status"]

    async def _read_line(self) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        line = await self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {}
        return answer

    @staticmethod
    def _end(process: Process, status: int) -> None:
        process.status = status
        process.ended.set()


def _environment() -> dict[str, str]:
    """That of all services. Proxies are out of their reach; threads of numerical libraries would
    not survive a fork, and each worker computes on one anyway."""
    own = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    paths = [str(ROOT), str(ROOT / "tests"), own.get("PYTHONPATH", "")]
    return {
        **own,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "GOMP_SPINCOUNT": "20000",
    }
