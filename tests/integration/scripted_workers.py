"""The stack in tests: rigs of real processes, and a draft worker that does what a test tells it.

A `Rig` is an orchestrator with a client. `Parts` starts single services. `ScriptedDraft` speaks
the worker protocol from within the test, so that every answer can be planned: right, wrong, late,
twice, to somebody else, or never.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
from redis.asyncio import Redis

from outrider.cli.process import Child
from outrider.cli.stack import PROGRAMS
from outrider.client import (
    Completion,
    GenerationChunk,
    GenerationOptions,
    OutriderClient,
    Prompt,
    ResumePolicy,
    collect,
)
from outrider.errors import OutriderError
from outrider.rpc.channel import ChannelSecurity, open_channel
from outrider.token_log import TokenLog
from outrider.types import Proposal, SpeculationStats, new_nonce
from outrider.v1 import common_pb2, draft_pb2_grpc, worker_pb2
from outrider.v1.generation_pb2_grpc import GenerationServiceStub
from outrider.wire import proposal_to_proto
from outrider.worker.sessions import TokensMissing, advance_base

START_S = 90.0
LINGER_S = 1
"""Life of a session that is not kept after its end, in all stacks here unless a test says."""


async def until(condition: Callable[[], Awaitable[bool]], what: str, timeout_s: float = 10) -> None:
    """Wait for a condition; AssertionError says what did not come about."""
    deadline = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(0.03)


@dataclass(frozen=True)
class Held:
    """What a system holds of sessions that have not ended; the same before and after: no leak."""

    keys: int
    sessions: tuple[int, ...]
    blocks_used: tuple[int, ...]

    def is_within(self, other: "Held") -> bool:
        pairs = [
            (self.keys, other.keys),
            *zip(self.sessions, other.sessions, strict=True),
            *zip(self.blocks_used, other.blocks_used, strict=True),
        ]
        return all(own <= others for own, others in pairs)


@dataclass
class Rig:
    """An orchestrator, a client of it, and what stands behind it."""

    address: str
    client: OutriderClient
    store_url: str
    targets: tuple[str, ...]
    drafts: tuple[str, ...] = ()
    pids: tuple[int, ...] = ()
    log: Path = Path()
    process: Child | None = None
    _channels: dict[str, Any] = field(default_factory=dict)

    @property
    def stub(self) -> Any:
        """The public API without the client, for requests that the client would not send."""
        return GenerationServiceStub(self._channel(self.address))

    async def chunks(self, prompt: Prompt, **options: Any) -> list[GenerationChunk]:
        """A whole stream; each chunk is one round."""
        timeout_s = options.pop("timeout_s", 60.0)
        stream = self.client.generate(prompt, GenerationOptions(**options), timeout_s=timeout_s)
        return [chunk async for chunk in stream]

    async def complete(self, prompt: Prompt, **options: Any) -> Completion:
        return collect(await self.chunks(prompt, **options))

    async def streams(
        self,
        prompts: Sequence[Prompt],
        *,
        concurrency: int = 8,
        seeds: bool = False,
        **options: Any,
    ) -> list[list[GenerationChunk]]:
        """All prompts, several at once; with `seeds` each has its number for a seed."""
        gate = asyncio.Semaphore(concurrency)

        async def one(number: int, prompt: Prompt) -> list[GenerationChunk]:
            async with gate:
                seed = {"seed": number} if seeds else {}
                return await self.chunks(prompt, **seed, **options)

        return await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts)))

    async def complete_all(self, prompts: Sequence[Prompt], **options: Any) -> list[Completion]:
        return [collect(chunks) for chunks in await self.streams(prompts, **options)]

    async def info(self, address: str) -> worker_pb2.InfoResponse:
        """What a worker says of itself; both tiers name the call alike."""
        service = "TargetService" if address in self.targets else "DraftService"
        call = self._channel(address).unary_unary(
            f"/outrider.v1.{service}/Info",
            request_serializer=worker_pb2.InfoRequest.SerializeToString,
            response_deserializer=worker_pb2.InfoResponse.FromString,
        )
        info: worker_pb2.InfoResponse = await call(worker_pb2.InfoRequest(), timeout=20)
        return info

    async def keys(self, *, lasting: bool = False) -> set[bytes]:
        """Keys of sessions; `lasting`: without those of ended ones that are about to go."""
        async with Redis.from_url(self.store_url) as redis:
            keys = await redis.keys("outrider:{*")
            lives_ms = [await redis.pttl(key) for key in keys]  # -2: gone, -1: for ever
        ended = range(LINGER_S * 1000 + 1)
        return {
            key
            for key, life_ms in zip(keys, lives_ms, strict=True)
            if life_ms != -2 and not (lasting and life_ms in ended)
        }

    async def held(self) -> Held:
        infos = [await self.info(address) for address in (*self.targets, *self.drafts)]
        return Held(
            keys=len(await self.keys(lasting=True)),
            sessions=tuple(info.sessions for info in infos),
            blocks_used=tuple(info.kv_blocks_total - info.kv_blocks_free for info in infos),
        )

    async def returns_to(self, before: Held, timeout_s: float = 15) -> None:
        """No more is held than before, of KV on both tiers and of keys in the store."""

        deadline = time.monotonic() + timeout_s
        while not (now := await self.held()).is_within(before):
            if time.monotonic() > deadline:
                raise AssertionError(f"held is {now}, before it was {before}")
            await asyncio.sleep(0.03)

    async def cpu_s(self) -> float:
        """Seconds that the processes have computed so far."""
        times = [psutil.Process(pid).cpu_times() for pid in self.pids]
        return sum(t.user + t.system for t in times)

    def _channel(self, address: str) -> Any:
        if address not in self._channels:
            self._channels[address] = open_channel(address)
        return self._channels[address]

    async def close(self) -> None:
        await self.client.close()
        for channel in self._channels.values():
            await channel.close()


def only_child_of(parent: Child) -> psutil.Process:
    """Where a service has started one process: rank 1 of a group of two."""
    (process,) = psutil.Process(parent.pid).children()
    return process


class Parts:
    """Starts single services; each ends with its `async with`, whatever has become of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0

    @contextlib.asynccontextmanager
    async def process(
        self,
        role: str,
        *flags: str,
        wait: bool = True,
        environ: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> AsyncIterator[tuple[Child, str]]:
        """A service and its address ("" where `wait` is False: it may not get to serve)."""
        self._number += 1
        name = f"{role}-{self._number}"
        ready = self._folder / f"{name}.ready"
        prefix = f"OUTRIDER_{role.upper()}_"
        env = {prefix + key.upper(): str(value) for key, value in settings.items()}
        command = (*PROGRAMS[role], "--ready-file", str(ready), *flags)
        env |= environ or {}
        child = await Child.start(name, command, self._folder / f"{name}.log", env)
        try:
            deadline = time.monotonic() + START_S
            while wait and not ready.exists():
                assert child.returncode is None, child.log_tail()
                assert time.monotonic() < deadline, child.log_tail()
                await asyncio.sleep(0.02)
            yield child, json.loads(ready.read_text())["address"] if wait else ""
        finally:
            await child.stop(10)

    def worker(self, role: str, model: Path, **settings: Any) -> Any:
        """`async with parts.worker("draft", folder) as (child, address)`."""
        values = {"dtype": "float32", "threads": 1, "kv_memory": "8MiB", "drain_s": 1, **settings}
        return self.process(role, "--model", str(model), **values)

    @contextlib.asynccontextmanager
    async def orchestrator(
        self,
        store_url: str,
        *,
        targets: Iterable[str],
        drafts: Iterable[str] = (),
        client_token_file: str = "",
        resume: ResumePolicy | None = None,
        **settings: Any,
    ) -> AsyncIterator[Rig]:
        """With a client that does not resume unless told how: tests see what ended a stream."""
        targets, drafts = tuple(targets), tuple(drafts)
        flags = [flag for address in targets for flag in ("--targets", address)]
        flags += [flag for address in drafts for flag in ("--drafts", address)]
        values = {
            "store_url": store_url,
            "session_linger_s": LINGER_S,
            "drain_s": 10,
            "num_speculative_tokens": 3,  # What tests count on where they give no number.
            **settings,
        }
        async with self.process("orchestrator", *flags, **values) as (child, address):
            client = await OutriderClient.connect(
                address=address,
                security=ChannelSecurity(token_file=client_token_file),
                resume=resume,
            )
            rig = Rig(address, client, store_url, targets, drafts, (child.pid,), child.log, child)
            try:
                yield rig
            finally:
                await rig.close()


def total(completions: Iterable[Completion]) -> SpeculationStats:
    return sum((done.stats for done in completions), SpeculationStats())


class Stream:
    """A generation that is read in the background, so that a test can act in its midst."""

    def __init__(self, rig: Rig, prompt: str, **options: Any) -> None:
        self.chunks: list[GenerationChunk] = []
        self._rig = rig
        self._prompt = prompt
        self._options = GenerationOptions(**options)
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for chunk in self._rig.client.generate(self._prompt, self._options, timeout_s=60):
            self.chunks.append(chunk)

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    async def reaches(self, num_tokens: int) -> "Stream":
        async def there() -> bool:
            return self.num_tokens >= num_tokens or self._task.done()

        await until(there, f"{num_tokens} tokens")
        assert not self._task.done(), "it ended before anything could be done to it"
        return self

    async def end(self) -> Completion:
        await self._task
        return collect(self.chunks)

    async def error(self) -> OutriderError:
        """What ended it."""
        try:
            await self._task
        except OutriderError as error:
            return error
        raise AssertionError("it ended well")


Say = Callable[[worker_pb2.Reply], None]


@dataclass(frozen=True)
class Ask:
    """A ProposeEntry: guesses wanted after `tokens`, of which `prompt_len` are the prompt, and
    `alternatives` beside each. Of one that asks ahead, `tokens` are those after its `outcome` that
    will come about: so many guesses accepted, then this token."""

    header: worker_pb2.EntryHeader
    tokens: tuple[int, ...]
    prompt_len: int
    wanted: int
    seed: int
    alternatives: int = 0
    outcome: tuple[int, int] | None = None

    @property
    def position(self) -> int:
        """Generated tokens so far."""
        return len(self.tokens) - self.prompt_len

    def reply(self, proposal: Proposal) -> worker_pb2.Reply:
        """The right answer with these guesses."""
        return self.raw(proposal_to_proto(proposal))

    def raw(self, proposal: common_pb2.Proposal) -> worker_pb2.Reply:
        proposed = worker_pb2.Proposed()
        if self.outcome is None:
            proposed.proposal.CopyFrom(proposal)
        else:
            accepted, token_id = self.outcome
            proposed.outcomes.add(num_accepted=accepted, token_id=token_id, proposal=proposal)
        return _answer(self.header, worker_pb2.Reply(proposed=proposed))


Script = Callable[[Ask, Say], Awaitable[None]]


@dataclass
class _Session:
    log: TokenLog = field(default_factory=TokenLog)
    spec: worker_pb2.GenerationSpec = field(default_factory=worker_pb2.GenerationSpec)


class ScriptedDraft(draft_pb2_grpc.DraftServiceServicer):
    """A draft worker on a port; what it answers to an ask is up to `script`, which may be changed.

    It keeps its sessions' logs as a worker must. `asks` are those that came; `closed` the
    sessions that were closed. `stop` breaks all streams; `start` comes back, at the same port and
    as another incarnation. With the `truth` it can be asked ahead, and has a device of its own: it
    knows which outcome will come about, and prepares for no other.
    """

    def __init__(
        self, target: worker_pb2.InfoResponse, script: Script, truth: "Truth | None" = None
    ) -> None:
        self.script = script
        self._truth = truth
        self.asks: list[Ask] = []
        self.closed: set[str] = set()
        self.cancelled = 0
        self.address = ""
        self.sessions: dict[str, _Session] = {}
        self._info = worker_pb2.InfoResponse()
        self._info.CopyFrom(target)
        self._info.model = "scripted"
        self._info.capabilities.append("alternatives")
        if truth is not None:
            self._info.capabilities.append("ahead")
            self._info.device_id = "scripted"
        self._server: grpc.aio.Server
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "ScriptedDraft":
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.stop()

    async def start(self) -> None:
        self.sessions.clear()
        self._info.incarnation = new_nonce()
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(self.address or "127.0.0.1:0")
        self.address = f"127.0.0.1:{port}"
        await self._server.start()

    @property
    def capabilities(self) -> Any:
        """What it offers, from the next `start` on."""
        return self._info.capabilities

    async def stop(self) -> None:
        await self._server.stop(None)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def Info(self, request: Any, context: Any) -> worker_pb2.InfoResponse:
        return self._info

    async def Run(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        outbox: asyncio.Queue[worker_pb2.Reply | None] = asyncio.Queue()

        async def read() -> None:
            async for request in request_iterator:
                for entry in request.entries:
                    self._handle(entry, outbox.put_nowait)
            outbox.put_nowait(None)

        reader = asyncio.create_task(read())
        try:
            while (reply := await outbox.get()) is not None:
                yield worker_pb2.RunResponse(replies=[reply])
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    def _handle(self, entry: worker_pb2.Entry, say: Say) -> None:
        header = entry.header
        op = entry.WhichOneof("op")
        if op == "open":
            session = self.sessions.setdefault(header.session_id, _Session())
            session.spec = entry.open.spec
            opened = worker_pb2.Opened(have_len=len(session.log))
            say(_answer(header, worker_pb2.Reply(opened=opened)))
        elif op == "close":
            self.sessions.pop(header.session_id, None)
            self.closed.add(header.session_id)
            say(_answer(header, worker_pb2.Reply(closed=worker_pb2.Closed())))
        elif op == "cancel":
            self.cancelled += 1
        else:
            self._propose(entry, say)

    def _propose(self, entry: worker_pb2.Entry, say: Say) -> None:
        session = self.sessions.get(entry.header.session_id)
        if session is None:
            refused = worker_pb2.Refused(reason=worker_pb2.REFUSAL_REASON_UNKNOWN_SESSION)
            say(_answer(entry.header, worker_pb2.Reply(refused=refused)))
            return
        try:
            advance_base(session.log, entry.header, entry.propose.delta)
        except TokensMissing as missing:
            need = worker_pb2.NeedTokens(**{"from": missing.start})
            say(_answer(entry.header, worker_pb2.Reply(need_tokens=need)))
            return
        tokens, prompt_len, outcome = tuple(session.log.tokens), session.spec.prompt_len, None
        if entry.propose.HasField("ahead"):
            assert self._truth is not None and sum(entry.propose.ahead.fan_out) > 0
            pending = tuple(entry.propose.ahead.pending.token_ids)
            outcome = self._truth.outcome(tokens, prompt_len, pending)
            tokens = (*tokens, *pending[: outcome[0]], outcome[1])
        ask = Ask(
            header=entry.header,
            tokens=tokens,
            prompt_len=prompt_len,
            wanted=entry.propose.num_speculative_tokens,
            seed=session.spec.sampling.seed,
            alternatives=entry.propose.alternatives,
            outcome=outcome,
        )
        self.asks.append(ask)
        task = asyncio.ensure_future(self.script(ask, say))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _answer(header: worker_pb2.EntryHeader, reply: worker_pb2.Reply) -> worker_pb2.Reply:
    for name in ("session_id", "completion", "epoch", "number", "owner_nonce"):
        setattr(reply.header, name, getattr(header, name))
    return reply


class Truth:
    """Plain outputs by prompt: where scripts take right guesses from."""

    def __init__(self) -> None:
        self._outputs: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._numbers: dict[tuple[int, ...], int] = {}
        self._known: dict[str, list[Completion]] = {}

    async def learn(self, rig: Rig, prompts: Sequence[str], **options: Any) -> list[Completion]:
        """Decode the prompts plainly and remember what comes."""
        key = repr((prompts, sorted(options.items())))
        if key not in self._known:
            self._known[key] = await rig.complete_all(prompts, num_speculative_tokens=0, **options)
        plain = self._known[key]
        for number, (prompt, done) in enumerate(zip(prompts, plain, strict=True)):
            prompt_ids = await rig.client.tokenize(prompt)
            self._outputs[prompt_ids] = done.token_ids
            self._numbers[prompt_ids] = number
        return plain

    def number(self, ask: Ask) -> int:
        """Which of the prompts it is, as numbered when they were learnt."""
        return self._numbers[ask.tokens[: ask.prompt_len]]

    def outcome(
        self, base: tuple[int, ...], prompt_len: int, pending: tuple[int, ...]
    ) -> tuple[int, int]:
        """How the verification of guesses on a base ends: so many accepted, then this token. Of
        what was not learnt (sampled by distributions, say) anything."""
        output = self._outputs.get(base[:prompt_len], ())[len(base) - prompt_len :]
        accepted = 0
        while accepted < min(len(pending), len(output)) and pending[accepted] == output[accepted]:
            accepted += 1
        return accepted, output[accepted] if accepted < len(output) else 0

    def after(self, ask: Ask) -> list[int]:
        """The right guesses; fewer than wanted where the output ends."""
        output = self._outputs[ask.tokens[: ask.prompt_len]]
        return list(output[ask.position : ask.position + ask.wanted])


@dataclass
class Guessing:
    """An orchestrator whose only draft is scripted; `ahead`: it is asked while rounds run."""

    rig: Rig
    draft: ScriptedDraft
    truth: Truth
    ahead: bool = False
