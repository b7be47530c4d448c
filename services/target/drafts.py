"""The drafts that a target asks by itself: links to them, and the sessions driven there.

Rounds run on the worker's thread, links on the event loop. A `DraftSession` stands between them:
`ask` is called on the worker's thread, its answer comes back there.
"""

import asyncio
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from outrider.errors import (
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    OutriderError,
    Unsupported,
)
from outrider.remote.link import Listener, WorkerLink
from outrider.remote.session import NOTHING_SPENT, RemoteSession, Routing, Spent
from outrider.rpc.channel import ChannelSecurity
from outrider.telemetry.context import TraceContext
from outrider.token_log import Tail, TokenLog
from outrider.types import EMPTY_PREFIX_HASH, Fence, GenerationSpec
from outrider.v1 import worker_pb2
from outrider.worker.handover import Handover
from outrider.worker.sessions import Key, key_of
from outrider.worker.worker import Host
from services.target.fan_out import Shared

logger = logging.getLogger(__name__)

_MAX_LINKS = 64
_MAX_SESSIONS = 4096
_RETRY_AFTER_S = 1.0
"""A draft that has failed is left alone for so long, unless its link comes back."""
_NUMBERS_AN_ENTRY = 1 << 20
"""Numbers of entries that a verification's entry may use on the draft: those after its own number
times this. So numbers grow there too when a session moves from one target to another."""

Owner = tuple[int, int, str]
"""Epoch and nonce of a session's owner, and the draft's address."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What is wanted of a draft for a base: the proposal after it, with `num_alternatives` beside
    each guess, or with `fan_out` the proposals after the outcomes of verifying `pending` on it, one
    of which may `run_ahead` (as in AheadOptions of worker.proto)."""

    num_tokens: int
    pending: tuple[int, ...] = ()
    fan_out: tuple[int, ...] = ()
    num_alternatives: int = 0
    run_ahead: bool = False

    def fill(self, entry: worker_pb2.Entry, delta: worker_pb2.TokenDelta) -> None:
        """Make an entry ask for it."""
        entry.propose.delta.CopyFrom(delta)
        entry.propose.num_speculative_tokens = self.num_tokens
        entry.propose.alternatives = self.num_alternatives
        if self.fan_out:
            entry.propose.ahead.pending.token_ids.extend(self.pending)
            entry.propose.ahead.fan_out.extend(self.fan_out)
            entry.propose.ahead.run_ahead = self.run_ahead


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of it: proposals as the draft sent them, or why there are none."""

    proposed: worker_pb2.Proposed | None = None
    spent: Spent = NOTHING_SPENT
    trip_us: int = 0
    """From asking to the answer, on the event loop's side."""
    error: OutriderError | None = None


@dataclass(slots=True)
class Asked:
    """A question to a draft. The event loop sets `answer` as soon as it has come, for any thread to
    see: whether it came before a pass was over cannot wait for the worker's next turn."""

    ask: Ask
    answer: Answer | None = None


class DraftSession:
    """A session on a draft. One question at a time: a new one cancels the last."""

    def __init__(
        self, pool: "DraftPool", header: worker_pb2.EntryHeader, spec: GenerationSpec, address: str
    ) -> None:
        self._pool = pool
        self._header = header
        self._spec = spec
        self._address = address
        self._given = (0, EMPTY_PREFIX_HASH)
        """Length and hash of what `_log` has been given; the worker's thread alone knows."""
        self._log = TokenLog()
        """The base as the event loop knows it."""
        self._link: WorkerLink | None = None
        self._remote: RemoteSession | None = None
        self._asking: asyncio.Task[None] | None = None
        self._not_before = 0.0
        self._heals = False
        """The last failure was the link's: it is over once the link is up."""
        self._unfit = False

    @property
    def usable(self) -> bool:
        """Whether asking is of any use now."""
        if self._unfit:
            return False
        healed = self._heals and self._link is not None and self._link.up
        return healed or time.monotonic() >= self._not_before

    def ask(
        self, log: TokenLog, asked: Asked, timeout_s: float, on_answer: Callable[[], None]
    ) -> None:
        """From the worker's thread; `on_answer` is called there once the answer has been set,
        unless it was cancelled before."""
        start = self._given[0] if log.matches(*self._given) else 0
        self._given = len(log), log.prefix_hash(len(log))
        tail = log.tail(start)
        self._pool.on_loop(lambda: self._start(tail, asked, timeout_s, on_answer))

    def cancel(self) -> None:
        """From the worker's thread: what was asked is not wanted any more."""
        self._pool.on_loop(self._stop)

    # --- on the event loop --------------------------------------------------------------------

    def _start(
        self, tail: Tail, asked: Asked, timeout_s: float, on_answer: Callable[[], None]
    ) -> None:
        self._stop()
        self._log.take(tail)
        started = time.monotonic()
        deadline = started + timeout_s

        def answer(result: worker_pb2.Reply | OutriderError | None) -> None:
            if result is None:
                self._asking = asyncio.create_task(self._run(asked.ask, deadline, answer))
                return
            if isinstance(result, OutriderError):
                self._note(result)
            asked.answer = _answer(result, int((time.monotonic() - started) * 1e6))
            self._pool.on_worker(on_answer)

        remote = self._remote
        if remote is None or not remote.start(fill_for(remote, asked.ask), timeout_s, answer):
            answer(None)

    def _stop(self) -> None:
        if self._asking is not None:
            self._asking.cancel()  # Which cancels the entry on the draft.
            self._asking = None
        if self._remote is not None:
            self._remote.stop()

    async def _run(self, ask: Ask, deadline: float, answer: Listener) -> None:
        """The long way: connect, open, send what is missing."""
        try:
            remote = self._remote or await self._connect(deadline)
            answer(await remote.call(fill_for(remote, ask), deadline))
        except OutriderError as error:
            answer(error)
        except Exception as error:
            logger.exception("asking a draft failed")
            self._unfit = True
            answer(InternalError(f"asking failed: {type(error).__name__}"))

    async def _connect(self, deadline: float) -> RemoteSession:
        link = self._link = self._pool.link(self._address)
        await link.wait_up(max(deadline - time.monotonic(), 0.0))
        info = link.info
        if info is None or info.tokenizer_fingerprint != self._pool.tokenizer:
            raise Unsupported("draft and target must share a tokenizer")
        header = self._header
        self._remote = RemoteSession(
            link,
            Fence(header.session_id, header.epoch, header.owner_nonce, header.completion),
            self._spec.for_draft(info.vocab_size),
            self._pool.routing(header),
            self._log,
            itertools.count(header.number * _NUMBERS_AN_ENTRY),
        )
        return self._remote

    def _note(self, error: OutriderError) -> None:
        """Whether, and when, to ask again."""
        logger.debug("decoding plainly: %s", error)
        # One that cannot serve this session never will: its context is full, say.
        self._unfit = isinstance(error, FailedPrecondition | InvalidArgument | Unsupported)
        self._heals = self._link is not None and not self._link.up
        self._not_before = time.monotonic() + _RETRY_AFTER_S


def fill_for(
    remote: RemoteSession, ask: Ask
) -> Callable[[worker_pb2.Entry, worker_pb2.TokenDelta], None]:
    """What makes an entry ask a draft, for no more than it knows of."""
    return ask.fill if remote.offers("run_ahead") else replace(ask, run_ahead=False).fill


def _answer(result: worker_pb2.Reply | OutriderError, trip_us: int) -> Answer:
    if isinstance(result, OutriderError):
        return Answer(error=result)
    if not result.HasField("proposed"):
        return Answer(error=InternalError("the draft's reply holds no proposal"))
    return Answer(result.proposed, Spent.of(result, result.proposed.timing), trip_us)


class DraftPool:
    """Links to drafts by address, and sessions on them. Make it on the event loop; `session` is
    called on the worker's thread."""

    def __init__(self, security: ChannelSecurity, *, traced: bool = False) -> None:
        """`traced`: this target has spans of its own, which those of drafts are below."""
        self._traced = traced
        self.tokenizer = ""
        self.vocab_size = 0
        self._security = security
        self._loop = asyncio.get_running_loop()
        self._host: Host | None = None
        self._links: OrderedDict[str, WorkerLink] = OrderedDict()
        self._sessions: OrderedDict[Key, tuple[Owner, DraftSession]] = OrderedDict()
        self._seen: dict[str, Shared] = {}
        self._for_loop = Handover(self._loop, _run_guarded)
        self._for_worker: list[Callable[[], None]] = []
        self._closing: set[asyncio.Task[None]] = set()

    def serve(self, *, tokenizer: str, vocab_size: int) -> None:
        """What drafts must fit: the target's tokenizer (fingerprint) and vocabulary."""
        self.tokenizer, self.vocab_size = tokenizer, vocab_size

    def attach(self, host: Host) -> None:
        """Whose thread asks."""
        self._host = host

    def session(
        self, header: worker_pb2.EntryHeader, spec: GenerationSpec, address: str
    ) -> DraftSession:
        """The session that an entry names, on the draft at an address."""
        key, owner = key_of(header), (header.epoch, header.owner_nonce, address)
        known, session = self._sessions.get(key, (None, None))
        if session is None or known != owner:
            session = DraftSession(self, header, spec, address)
        self._sessions[key] = owner, session
        self._sessions.move_to_end(key)
        while len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return session

    def forget(self, key: Key) -> None:
        """A session is gone; on the worker's thread."""
        self._sessions.pop(key, None)

    def routing(self, header: worker_pb2.EntryHeader) -> Routing:
        """What entries for a draft say, of the session that an orchestrator's entry names."""
        trace = TraceContext.parse(header.traceparent) if self._traced else None
        return Routing(
            header.request_id,
            header.tenant,
            model="",
            traceparent=str(trace.below()) if trace is not None else header.traceparent,
            trace_every=header.trace_every,
        )

    @property
    def links(self) -> tuple[WorkerLink, ...]:
        return tuple(self._links.values())

    def seen(self, address: str) -> Shared:
        """What all sessions of a draft have seen; on the worker's thread."""
        if len(self._seen) > _MAX_LINKS:
            self._seen.clear()
        return self._seen.setdefault(address, Shared())

    def on_loop(self, action: Callable[[], None]) -> None:
        """From the worker's thread. Threads wake each other once for all that is there: the
        sessions of a batch ask, and are answered, together."""
        self._for_loop.put(action)

    def on_worker(self, action: Callable[[], None]) -> None:
        """From the event loop."""
        self._for_worker.append(action)
        if len(self._for_worker) == 1:
            self._loop.call_soon(self._run_on_worker)

    def _run_on_worker(self) -> None:
        actions, self._for_worker = self._for_worker, []
        if self._host is not None:
            self._host.post(lambda: _run_all(actions))

    def link(self, address: str) -> WorkerLink:
        """The link to an address; the one used least recently goes when there are too many."""
        if address not in self._links:
            self._links[address] = WorkerLink(address, "draft", self._security)
            self._links[address].start()
        self._links.move_to_end(address)
        if len(self._links) > _MAX_LINKS:
            _, unused = self._links.popitem(last=False)
            self._closing.add(asyncio.create_task(unused.close()))
        return self._links[address]

    async def close(self) -> None:
        """Hang up."""
        await asyncio.gather(*self._closing, *(link.close() for link in self._links.values()))


def _run_all(actions: list[Callable[[], None]]) -> None:
    for action in actions:
        _run_guarded(action)


def _run_guarded(action: Callable[[], None]) -> None:
    """One session's fault stays its own."""
    try:
        action()
    except Exception:
        logger.exception("a draft session failed")
