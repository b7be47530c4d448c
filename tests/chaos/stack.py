"""A whole Outrider over several hosts: two orchestrators, targets and drafts, and a store.

A target may be a group of ranks: rank 0 is the service's process, the others are children of it.
Each part is a process on a host of its own (link.py); it comes back at the same address. The store
is valkey with every commit on disk before it is acknowledged, so that it may be killed, too.
"""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from redis.asyncio import Redis
from redis.exceptions import RedisError

from outrider.cli.store import store_program
from outrider.rpc.channel import open_channel
from outrider.v1 import generation_pb2, worker_pb2
from outrider.v1.generation_pb2_grpc import GenerationServiceStub

from .link import HERE, Network
from .nursery import Nursery, Process
from .points import ORDERS
from .serve import EXEC

ORCHESTRATORS = ("orchestrator-0", "orchestrator-1")
TARGETS = ("target-0", "target-1")
DRAFTS = ("draft-0", "draft-1")
STORE = "store"
RANKS: Mapping[str, int] = {"target-1": 2}
"""Targets that are groups where schedules of faults run."""
PARTS = (STORE, *TARGETS, *DRAFTS, *ORCHESTRATORS)
_PORTS = {"orchestrator": 50051, "draft": 50052, "target": 50053, STORE: 6379}
_START_S = 60.0
_START_AGAIN_S = 0.3
_ENDS = (0, -signal.SIGKILL, -signal.SIGTERM)
"""How processes end that were told to."""
_LOST = 1
"""How the service of a group ends that has lost a rank."""
GROUP: Mapping[str, object] = {"group_timeout_s": 2, "group_start_s": 40}
_GROUP_ENDS_S = 4.0
"""After which a group that had a rank killed or asleep has noticed, or never will."""

WORKER: Mapping[str, object] = {
    "dtype": "float32",
    "threads": 1,
    "kv_memory": "8MiB",
    "drain_s": 2,
    "session_idle_s": 20,
}
ORCHESTRATOR: Mapping[str, object] = {
    "lease_s": 3,
    "session_linger_s": 20,
    "session_resume_s": 15,
    "store_timeout_s": 0.7,
    "store_retry_s": 8,
    "store_wait_s": 0.3,
    "draft_timeout_s": 0.5,
    "draft_start_timeout_s": 0.5,
    "drain_s": 2,
}
"""Times a few times shorter than the defaults, so that faults of seconds reach beyond them."""


def role_of(name: str) -> str:
    return name.partition("-")[0]


@dataclass(frozen=True, kw_only=True)
class StackSettings:
    """What to run: model folders (or names), and settings by role; {} leaves all as they are."""

    target: str
    draft: str
    orchestrator_settings: Mapping[str, object] = field(default_factory=lambda: ORCHESTRATOR)
    worker_settings: Mapping[str, object] = field(default_factory=lambda: WORKER)
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Of targets that are groups."""


class Stack:
    """Enter it in the event loop that uses it; `folder` gets logs and the store's data."""

    def __init__(self, settings: StackSettings, folder: Path, *, seed: int = 0) -> None:
        self.folder = folder
        self.network = Network(PARTS, seed=seed)
        self.processes: dict[str, Process] = {}
        self.deaths: list[str] = []
        """How processes ended that nobody had ended."""
        self._settings = settings
        self._nursery = Nursery()
        self._channels: dict[str, Any] = {}
        self._condemned: set[int] = set()
        """Pids of processes that somebody has told to end."""
        self._may_be_lost: set[int] = set()
        """Pids of groups of which a rank was killed or asleep."""
        self._serving: set[int] = set()
        """Pids of processes that have got to serve."""
        self._watchers: set[asyncio.Task[None]] = set()
        self._launching: dict[str, asyncio.Lock] = {}

    async def __aenter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.network.__enter__()
        try:
            await self._nursery.__aenter__()
            await self.start(STORE, *TARGETS, *DRAFTS)
            await self.start(*ORCHESTRATORS)
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        self._condemned.update(process.pid for process in self.processes.values())
        for channel in self._channels.values():
            await channel.close()
        with contextlib.suppress(AssertionError):
            await self._nursery.__aexit__(None, None, None)
        self.network.close()
        for watcher in self._watchers:
            watcher.cancel()

    # --- processes ----------------------------------------------------------------------------

    async def start(self, *names: str) -> None:
        """Start parts that do not run, and wait until they serve."""
        await asyncio.gather(*(self._ensure(name) for name in names))
        await asyncio.gather(*(self.wait_serving(name) for name in names))

    async def _ensure(self, name: str) -> None:
        """Start a part unless it runs; several faults may ask for it at the same moment."""
        async with self._launching.setdefault(name, asyncio.Lock()):
            if not self.lives(name):
                await self._launch(name)

    async def _launch(self, name: str) -> None:
        self._ready_file(name).unlink(missing_ok=True)
        role = role_of(name)
        prefix = f"OUTRIDER_{role.upper()}_"
        env = {prefix + key.upper(): str(v) for key, v in self._settings_of(name).items()}
        env[ORDERS] = str(self._orders_file(name))
        process = await self._nursery.start(
            name,
            EXEC if name == STORE else role,
            self._argv(name),
            namespace=self.network.namespace(name),
            log=self.folder / f"{name}.log",
            env=env,
        )
        self.processes[name] = process
        watcher = asyncio.create_task(self._watch(process))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def wait_serving(self, name: str, timeout_s: float = _START_S) -> None:
        """Whoever ends at the start, for lack of a store say, is started again, as Kubernetes
        does. Raises RuntimeError."""
        deadline = time.monotonic() + timeout_s
        while not await self._serves(name):
            process = self.processes[name]
            if time.monotonic() > deadline:
                raise RuntimeError(f"{name} does not serve: {process.log}:\n{_tail(process.log)}")
            if process.lives:
                await asyncio.sleep(0.02)
            else:
                await asyncio.sleep(_START_AGAIN_S)
                await self._ensure(name)
        self._serving.add(self.processes[name].pid)

    def lives(self, name: str) -> bool:
        process = self.processes.get(name)
        return process is not None and process.lives

    def rank_pids(self, name: str) -> list[int]:
        """Processes of a group's ranks but rank 0, as far as they are there."""
        process = self.processes[name]
        if name not in self._settings.ranks or not process.lives:
            return []
        try:
            path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            return [int(pid) for pid in path.read_text().split()]
        except OSError:
            return []

    def pid_of(self, part: str) -> int:
        """Of a part, or of a rank of it ("target-1 rank 1"); 0 where it is not there."""
        name, _, rank = part.partition(" rank ")
        if rank:
            return next(iter(self.rank_pids(name)[int(rank) - 1 :]), 0)
        process = self.processes.get(name)
        return process.pid if process is not None else 0

    def send_rank(self, name: str, rank: int, number: signal.Signals) -> None:
        """Signal one rank of a group, which may be lost by it."""
        if not rank:
            self.send(name, number)
        for pid in self.rank_pids(name)[rank - 1 : rank] if rank else ():
            self.may_lose(name)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def may_lose(self, name: str) -> None:
        """A rank of this group, if it is one, is killed or falls asleep."""
        if name in self._settings.ranks:
            self._may_be_lost.add(self.processes[name].pid)

    async def settle(self, name: str) -> None:
        """Until a group that may be lost is, and serves again; or is not."""
        process = self.processes[name]
        if process.pid in self._may_be_lost:
            if await process.wait(_GROUP_ENDS_S) is not None:
                await self.start(name)

    def send(self, name: str, number: signal.Signals) -> None:
        process = self.processes[name]
        if number is signal.SIGSTOP:
            self.may_lose(name)
        if number in (signal.SIGKILL, signal.SIGTERM):
            self._condemned.add(process.pid)
        process.signal(number)

    def order(self, name: str, order: Mapping[str, object]) -> None:
        """Tell a service something for its named points (points.py)."""
        path = self._orders_file(name)
        scratch = path.with_suffix(".new")
        scratch.write_text(json.dumps(order))
        scratch.rename(path)
        self.processes[name].signal(signal.SIGUSR1)

    def arm(self, name: str, *, point: str, passage: int, action: str) -> None:
        self._fired_file(name).unlink(missing_ok=True)
        self.order(name, {"point": point, "passage": passage, "action": action})

    def write_stacks(self, name: str) -> None:
        """Have all services write down where their tasks are."""
        for part in (*TARGETS, *DRAFTS, *ORCHESTRATORS):
            if self.lives(part):
                self.order(part, {"stacks": str(self.folder / f"{name}-{part}.stacks")})

    def has_fired(self, name: str) -> bool:
        """Whether what was armed has happened."""
        return self._fired_file(name).exists()

    def _orders_file(self, name: str) -> Path:
        return self.folder / f"{name}.orders"

    def _fired_file(self, name: str) -> Path:
        return self.folder / f"{name}.orders.fired"

    def expect_end(self, name: str) -> None:
        """It is about to end itself, at a named point."""
        self._condemned.add(self.processes[name].pid)

    def expect_life(self, name: str) -> None:
        """It is not, after all."""
        self._condemned.discard(self.processes[name].pid)

    async def _watch(self, process: Process) -> None:
        await process.ended.wait()
        told = process.pid in self._condemned and process.status in _ENDS
        told |= process.pid in self._may_be_lost and process.status == _LOST
        if process.pid in self._serving and not told:
            self.deaths.append(f"{process.name} ended with {process.status}; see {process.log}")

    def _ready_file(self, name: str) -> Path:
        return self.folder / f"{name}.ready"

    async def _serves(self, name: str) -> bool:
        if name != STORE:
            return self._ready_file(name).exists()
        try:
            async with asyncio.timeout(1), Redis.from_url(self.store_url) as redis:
                return bool(await redis.ping())
        except (RedisError, OSError, TimeoutError):
            return False

    def _settings_of(self, name: str) -> Mapping[str, object]:
        role, settings = role_of(name), self._settings
        if role == STORE:
            return {}
        if name in settings.ranks:
            group = {"tensor_parallel": settings.ranks[name], **GROUP}
            return {**settings.worker_settings, **group}
        if role == "orchestrator":
            return settings.orchestrator_settings
        return settings.worker_settings

    def _argv(self, name: str) -> list[str]:
        role, host = role_of(name), self.network.address(name)
        port = _PORTS[role]
        if name == STORE:
            (self.folder / "data").mkdir(exist_ok=True)
            return [
                store_program(),
                *("--port", str(port), "--bind", host, "--protected-mode", "no"),
                *("--dir", str(self.folder / "data"), "--save", "", "--appendonly", "yes"),
                *("--appendfsync", "always"),
            ]
        argv = ["--host", host, "--port", str(port), "--ready-file", str(self._ready_file(name))]
        if role != "orchestrator":
            model = self._settings.target if role == "target" else self._settings.draft
            return [*argv, "--model", model]
        argv += ["--store-url", self.store_url]
        for tier in (TARGETS, DRAFTS):
            argv += [f for n in tier for f in (f"--{role_of(n)}s", self.address(n))]
        return argv

    # --- how to reach them --------------------------------------------------------------------

    def address(self, name: str) -> str:
        return f"{self.network.address(name)}:{_PORTS[role_of(name)]}"

    @property
    def store_url(self) -> str:
        return f"redis://{self.address(STORE)}/0"

    def channel(self, name: str) -> Any:
        """A connection of the harness's own to a service."""
        if name not in self._channels:
            self._channels[name] = open_channel(self.address(name), keepalive_s=2)
        return self._channels[name]

    async def poke(self, name: str) -> None:
        """Ask an orchestrator for its models: gRPC's server keeps the last call until the next one
        comes, and with an error all that its traceback names."""
        stub: Any = GenerationServiceStub(self.channel(name))  # type: ignore[no-untyped-call]
        await stub.ListModels(generation_pb2.ListModelsRequest(), timeout=10, wait_for_ready=True)

    async def info(self, name: str) -> worker_pb2.InfoResponse:
        """What a worker says of itself. Raises AioRpcError."""
        service = {"target": "TargetService", "draft": "DraftService"}[role_of(name)]
        call = self.channel(name).unary_unary(
            f"/outrider.v1.{service}/Info",
            request_serializer=worker_pb2.InfoRequest.SerializeToString,
            response_deserializer=worker_pb2.InfoResponse.FromString,
        )
        info: worker_pb2.InfoResponse = await call(
            worker_pb2.InfoRequest(), timeout=10, wait_for_ready=True
        )
        return info

    # --- back to normal -----------------------------------------------------------------------

    async def mend(self) -> None:
        """All links whole, nobody asleep, everybody there."""
        self.network.heal_all()
        for name in PARTS:
            if self.lives(name):
                self.send(name, signal.SIGCONT)
                for pid in self.rank_pids(name):
                    os.kill(pid, signal.SIGCONT)
        for name in PARTS:  # What was told to end and has not yet, does now.
            process = self.processes[name]
            if process.lives and process.pid in self._condemned:
                if await process.wait(6.0) is None:
                    self.send(name, signal.SIGKILL)
                    await process.wait(5.0)
        await self.start(*(name for name in PARTS if name not in ORCHESTRATORS))
        await self.start(*ORCHESTRATORS)


def links() -> tuple[tuple[str, str], ...]:
    """Pairs of hosts that talk to each other."""
    pairs: list[tuple[str, str]] = []
    for orchestrator in ORCHESTRATORS:
        pairs += [(HERE, orchestrator), (orchestrator, STORE)]
        pairs += [(orchestrator, worker) for worker in (*TARGETS, *DRAFTS)]
    pairs += [(target, draft) for target in TARGETS for draft in DRAFTS]
    return tuple(pairs)


def _tail(log: Path, lines: int = 15) -> str:
    with contextlib.suppress(OSError):
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    return ""
