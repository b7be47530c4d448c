"""Questions to a draft: what a session wants of it now, and what comes of that.

Whoever verifies, or follows who does, asks on a thread of its own or on the event loop itself; the
draft's link is on the event loop. A `DraftSession` stands between them.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from outrider.errors import (
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    OutriderError,
    Unsupported,
)
from outrider.remote.link import WorkerLink
from outrider.remote.replies import Listener
from outrider.remote.session import NOTHING_SPENT, RemoteSession, Spent
from outrider.token_log import Tail, TokenLog
from outrider.types import EMPTY_PREFIX_HASH
from outrider.v1 import worker_pb2

logger = logging.getLogger(__name__)

_RETRY_AFTER_S = 1.0
"""A draft that has failed is left alone for so long, unless its link comes back."""

Post = Callable[[Callable[[], None]], object]
"""Has something run on another thread, or a moment later on this one; in order."""


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
        propose = entry.propose
        propose.delta.CopyFrom(delta)
        propose.num_speculative_tokens = self.num_tokens
        propose.alternatives = self.num_alternatives
        if self.fan_out:
            ahead = propose.ahead
            ahead.pending.token_ids.extend(self.pending)
            ahead.fan_out.extend(self.fan_out)
            ahead.run_ahead = self.run_ahead


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
    """A session on a draft. One question at a time: a new one cancels the last.

    Its owner is the thread that asks; answers come back there.
    """

    def __init__(
        self,
        log: TokenLog,
        find_link: Callable[[], WorkerLink],
        open_session: Callable[[WorkerLink], RemoteSession],
        *,
        to_loop: Post,
        to_owner: Post,
    ) -> None:
        """`log` is empty, and that of the session that `open_session` gives: the base of the
        question under way, which the owner's log has left behind by the time of the answer. Both
        functions are called on the event loop, the first time that something is asked."""
        self._log = log
        self._find_link = find_link
        self._open_session = open_session
        self._to_loop = to_loop
        self._to_owner = to_owner
        self._given = (0, EMPTY_PREFIX_HASH)
        """Length and hash of what `_log` has been given; the owner alone knows."""
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
        """From the owner's thread; `on_answer` is called there once the answer has been set,
        unless it was cancelled before."""
        start = self._given[0] if log.matches(*self._given) else 0
        self._given = len(log), log.prefix_hash(len(log))
        tail = log.tail(start)
        self._to_loop(lambda: self._start(tail, asked, timeout_s, on_answer))

    def cancel(self) -> None:
        """From the owner's thread: what was asked is not wanted any more."""
        self._to_loop(self._stop)

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
            self._to_owner(on_answer)

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
        link = self._link = self._find_link()
        await link.wait_up(max(deadline - time.monotonic(), 0.0))
        self._remote = self._open_session(link)
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
    if ask.run_ahead and not remote.offers("run_ahead"):
        ask = replace(ask, run_ahead=False)
    return ask.fill


def _answer(result: worker_pb2.Reply | OutriderError, trip_us: int) -> Answer:
    if isinstance(result, OutriderError):
        return Answer(error=result)
    if not result.HasField("proposed"):
        return Answer(error=InternalError("the draft's reply holds no proposal"))
    return Answer(result.proposed, Spent.of(result, result.proposed.timing), trip_us)
