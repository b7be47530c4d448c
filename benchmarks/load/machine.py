"""The processes of a load run: store, workers, orchestrators, each as it is deployed."""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from outrider.cli.process import Child
from outrider.cli.store import answers, free_port, store_command, store_program
from outrider.rpc.channel import open_channel
from outrider.v1 import draft_pb2_grpc, target_pb2_grpc, worker_pb2

ROOT = Path(__file__).resolve().parents[2]
START_S = 180.0
WATCH_MS = 100
CHURN_S = 4.0


@dataclass
class Used:
    """Of one worker: its sessions and share of time in passes, each time that it told."""

    sessions: list[int] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)


class Machine:
    """All processes of the run, in a folder of their own."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args = args
        self.folder = folder
        self.children: dict[str, Child] = {}
        self.used: dict[str, Used] = {}
        self.left: dict[str, int] = {}
        self.came: dict[str, int] = {}
        """How often workers were stopped meanwhile, and were there again."""
        self._watchers: list[asyncio.Task[None]] = []
        self.store_url = ""
        self.targets = [f"target-{n}" for n in range(args.targets)]
        self.drafts = [f"draft-{n}" for n in range(args.drafts)]
        self.orchestrators = [f"orchestrator-{n}" for n in range(args.orchestrators)]

    def address(self, name: str) -> str:
        """As its ready file has it: workers on Unix sockets, orchestrators where k6 can reach."""
        found: str = json.loads((self.folder / f"{name}.ready").read_text())["address"]
        return found

    async def start(self) -> None:
        models = make_models(self.folder)
        await self._start_store()
        workers = [*self.targets, *self.drafts]
        await asyncio.gather(*(self.start_worker(name, models) for name in workers))
        await asyncio.gather(*(self._start_orchestrator(n) for n in self.orchestrators))
        self._watchers = [asyncio.create_task(self._watch(name)) for name in workers]

    async def start_worker(self, name: str, models: dict[str, Path] | None = None) -> None:
        tier = name.split("-")[0]
        models = models or {"target": self.folder / "target", "draft": self.folder / "draft"}
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.folder / f"{name}.sock")
        flags = ["--model", str(models[tier]), "--dtype", "float32", "--threads", "1"]
        flags += ["--kv-memory", self.args.kv_memory, "--drain-s", "60"]
        await self._serve(name, [sys.executable, "-m", f"services.{tier}"], flags)

    async def _start_orchestrator(self, name: str) -> None:
        flags = ["--store-url", self.store_url, "--drain-s", "5"]
        flags += ["--num-speculative-tokens", str(self.args.k)]
        for worker in self.targets:
            flags += ["--targets", self.address(worker)]
        for worker in self.drafts:
            flags += ["--drafts", self.address(worker)]
        if self.args.max_target_sessions:
            flags += ["--max-target-sessions", str(self.args.max_target_sessions)]
        flags += ["--max-waiting", str(self.args.max_waiting)]
        flags += ["--audit", "refused", "--audit-file", str(self._audit(name))]
        program = [sys.executable]
        if self.args.profile and name == self.orchestrators[0]:
            program += ["-m", "cProfile", "-o", str(self.args.profile.absolute())]
        await self._serve(name, [*program, "-m", "services.orchestrator"], flags)

    async def _serve(self, name: str, program: Sequence[str], flags: Sequence[str]) -> None:
        ready = self.folder / f"{name}.ready"
        ready.unlink(missing_ok=True)
        socket = ["--socket", f"{self.folder}/{name}.sock"]
        listen = ["--port", "0"] if name in self.orchestrators else socket
        env = {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
        log = self.folder / f"{name}.log"
        child = await Child.start(
            name, [*program, *listen, "--ready-file", str(ready), *flags], log, env
        )
        self.children[name] = child
        deadline = time.monotonic() + START_S
        while not ready.exists():
            if child.returncode is not None or time.monotonic() > deadline:
                sys.exit(f"{name} did not start:\n{child.log_tail()}")
            await asyncio.sleep(0.05)

    async def _start_store(self) -> None:
        port = free_port()
        command = store_command((store_program(),), port, self.folder, persist=False)
        child = await Child.start("store", command, self.folder / "store.log")
        self.children["store"] = child
        while not await answers(port, child.pid):
            if child.returncode is not None:
                sys.exit(f"the store did not start:\n{child.log_tail()}")
            await asyncio.sleep(0.05)
        self.store_url = f"redis://127.0.0.1:{port}/0"

    async def _watch(self, name: str) -> None:
        """Note how a worker is used, in all its lives."""
        used = self.used[name] = Used()
        stub: Any = (
            target_pb2_grpc.TargetServiceStub
            if name.startswith("target")
            else draft_pb2_grpc.DraftServiceStub
        )
        async with open_channel(f"unix:{self.folder}/{name}.sock") as channel:
            while True:
                with contextlib.suppress(Exception):
                    request = worker_pb2.WatchRequest(interval_ms=WATCH_MS)
                    async for vitals in stub(channel).Watch(request):
                        used.sessions.append(vitals.sessions)
                        used.busy.append(vitals.busy)
                await asyncio.sleep(0.2)

    async def churn(self) -> None:
        """The last target drains and comes back, the last draft dies and comes back, over and
        over."""
        async with asyncio.TaskGroup() as both:
            both.create_task(self._come_and_go(self.targets[-1], signal.SIGTERM))
            both.create_task(self._come_and_go(self.drafts[-1], signal.SIGKILL))

    async def _come_and_go(self, name: str, number: signal.Signals) -> None:
        while True:
            await asyncio.sleep(CHURN_S)
            child = self.children[name]
            os.kill(child.pid, number)
            self.left[name] = self.left.get(name, 0) + 1
            await child.wait()
            await self.start_worker(name)
            self.came[name] = self.came.get(name, 0) + 1

    async def mend(self) -> None:
        """Start those again that were being changed when it ended."""
        for name in (self.targets[-1], self.drafts[-1]):
            if self.children[name].returncode is not None:
                await self.start_worker(name)

    def forget_use(self) -> None:
        """How workers were used before the run is of no interest."""
        for used in self.used.values():
            used.sessions.clear()
            used.busy.clear()

    def cpu_s(self, names: Sequence[str]) -> float:
        """That these processes have computed so far."""
        times = [psutil.Process(self.children[name].pid).cpu_times() for name in names]
        return sum(one.user + one.system for one in times)

    def memory(self) -> dict[str, float]:
        """MiB of each process."""
        sizes = {}
        for name, child in self.children.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                sizes[name] = round(psutil.Process(child.pid).memory_info().rss / (1 << 20), 1)
        return sizes

    def _audit(self, name: str) -> Path:
        return self.folder / f"{name}.audit"

    def forget_refusals(self) -> None:
        """Requests that were refused before are of no interest."""
        for name in self.orchestrators:
            os.truncate(self._audit(name), 0)

    def refused_within_ms(self) -> dict[str, float]:
        """How long refused requests were within the orchestrators, by their own clocks; of very
        many in a second not all are written down."""
        lines = [
            line for n in self.orchestrators for line in self._audit(n).read_text().split("\n")
        ]
        took_ms = sorted(json.loads(line)["duration_ms"] for line in lines if line) or [0.0]
        return {
            "requests": len(took_ms),
            **{f"p{p}": took_ms[min(p * len(took_ms) // 100, len(took_ms) - 1)] for p in (50, 99)},
            "max": took_ms[-1],
        }

    async def stop(self) -> None:
        for task in self._watchers:
            task.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        for tier in (self.orchestrators, [*self.targets, *self.drafts], ["store"]):
            await asyncio.gather(*(self.children[n].stop(20) for n in tier if n in self.children))


def make_models(folder: Path) -> dict[str, Path]:
    sys.path.insert(0, str(ROOT / "tests"))
    from tiny import make_model

    target = make_model(folder / "target")
    return {"target": target, "draft": make_model(folder / "draft", noise=0.02)}
