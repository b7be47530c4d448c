"""The worker: entries in, replies out, one thread that owns sessions, KV and model.

Both tiers run this class. What differs, making a proposal or verifying one, is a `Tier`.
"""

import enum
import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from outrider.engine.engine import Engine, Runner, StepResult
from outrider.engine.scheduler import Work
from outrider.engine.sequence import Sequence
from outrider.errors import InvalidArgument, OutriderError, Unsupported
from outrider.telemetry.context import TraceContext, within_trace
from outrider.types import GenerationSpec, WorkTiming
from outrider.v1 import worker_pb2
from outrider.wire import require, spec_from_proto
from outrider.worker.gathering import DEFAULT_MAX_PASSES, ReturnWindow
from outrider.worker.sessions import (
    Key,
    Refusal,
    Session,
    SessionTable,
    TokensMissing,
    advance_base,
    check_header,
    check_names,
    key_of,
)

logger = logging.getLogger(__name__)

ReplySink = Callable[[worker_pb2.Reply], None]

Made = Callable[[], worker_pb2.Reply]
"""Makes the reply (without its header) of a round that is over, whatever its work has become."""

_SILENT = ("cancel", "tune", "extend")
"""What has no reply of its own."""
_IDLE_CHECK_S = 1.0
_LET_GO_S = 0.0002
"""The worker lets go of the interpreter for so long, for messages to get out: replies before it
works ahead, questions to who is waited for before a pass."""
_MAX_TIMEOUT_MS = 86_400_000
_MAX_INLINE_TOKENS = 8192
_MAX_BULK_BYTES = 64 * 1024


class Next(enum.Enum):
    """What becomes of a work that has been answered."""

    NONE = enum.auto()
    """Nothing: its entry is done."""
    NOW = enum.auto()
    """It has its next round."""
    LATER = enum.auto()
    """It gets its next round by `Host.resume`."""
    LATER_BESIDE = enum.auto()
    """The same; who is waited for computes on this device."""


_LATER = (Next.LATER, Next.LATER_BESIDE)


class Host(Protocol):
    """What a tier may ask of its worker."""

    def post(self, action: Callable[[], None]) -> None:
        """Run this on the worker's thread, from any thread."""

    def resume(self, work: Work, *, asked: bool = False) -> None:
        """A work that was to go on later can go on; on the worker's thread. `asked`: something was
        asked of another worker meanwhile, which is to leave before a pass begins."""

    @property
    def under_way(self) -> int:
        """Works that are not over, those that go on later included."""


class Traces(Protocol):
    """Who is told of the rounds of traced requests; on the worker's thread."""

    def context_of(self, header: worker_pb2.EntryHeader) -> TraceContext | None:
        """The trace of an entry; None where nothing is to be told."""

    def tell(self, context: TraceContext, work: Work, reply: worker_pb2.Reply) -> None:
        """A round of the entry is over; its verdict is not in the log yet."""


class Tier(Protocol):
    """What a tier does with a session's base. Called on the worker's thread only."""

    def attach(self, host: Host) -> None:
        """Before anything else."""

    def begin(self, entry: worker_pb2.Entry, sequence: Sequence, spec: GenerationSpec) -> Work:
        """The work for an entry, its `context` the tier's own. Raises Refusal or
        OutriderError when the entry is not for this tier or out of range."""

    def advance(self, ready: Tokens[tuple[Work, Tensor]]) -> list[Made]:
        """Bring each work to its result, from what was drawn for it and its logits
        [num_logits, vocab]. What is asked of others comes before the replies."""

    def go_on(self, work: Work) -> Next:
        """Make a work that has just been answered the next one that its entry asks for."""

    def end(self, work: Work) -> None:
        """The work is over, answered for the last time or dropped."""

    def tune(self, work: Work, entry: worker_pb2.TuneEntry) -> None:
        """Change how a work goes on. Raises Refusal or OutriderError as `begin` does."""

    def extend(self, work: Work, entry: worker_pb2.ExtendEntry) -> None:
        """Let a work go on for longer. Raises Refusal or OutriderError as `begin` does."""

    def forget(self, key: Key) -> None:
        """A session is gone; all of its works are over."""


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What a worker takes on at most."""

    num_blocks: int
    max_rows: int = 512
    max_sessions: int = 4096
    max_queued: int = 4096
    context_length: int = 8192
    session_idle_s: float = 3600.0
    gather_passes: float = DEFAULT_MAX_PASSES


@dataclass(slots=True)
class _Task:
    """What the worker keeps about a work under way."""

    entry: worker_pb2.Entry
    key: Key
    session: Session
    sink: ReplySink
    trace: TraceContext | None = None


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A snapshot for Info and Watch; may be a moment old."""

    sessions: int
    blocks_free: int
    blocks_cached: int
    """Of the free ones, those that hold a prefix."""
    queued: int
    waiting: int
    running: int
    parked: int
    lacking_kv: int
    """Of those queued, those that wait for KV."""
    lacking_kv_s: float
    """How long the first of them has waited."""
    pass_s: float
    busy_s: float
    preemptions: int
    prefix_tokens: int
    prefix_hit_tokens: int


class Worker:
    """`submit` and `call` may be used from any thread; the rest happens on the worker's own."""

    def __init__(
        self, runner: Runner, tier: Tier, limits: WorkerLimits, *, vocab_size: int
    ) -> None:
        self.limits = limits
        self.counters: Counter[str] = Counter()
        self.draining = False
        self.on_pass: Callable[[float, int], None] | None = None
        """Called after each pass with its seconds and rows."""
        self.traces: Traces | None = None
        self._vocab_size = vocab_size
        self._tier = tier
        self._sessions = SessionTable(limits.max_sessions)
        self._engine = Engine(
            runner,
            num_blocks=limits.num_blocks,
            max_rows=limits.max_rows,
            find_idle=self._idle_sequences,
        )
        self._parked: dict[Key, Work] = {}
        """Work that waits for its next round."""
        self._asked = False
        """Something was asked that is to leave before the next pass."""
        self._inbox: queue.SimpleQueue[tuple[Callable[[], None], float] | None] = (
            queue.SimpleQueue()
        )
        """What is to be done, and when it came."""
        self._extensions: deque[worker_pb2.Entry] = deque()
        """Entries that let works go on for longer: these do not end a stream of passes."""
        self._came = 0.0
        """When what is being done came; a pass may have run since."""
        self._thread = threading.Thread(target=self.run, name="outrider-worker", daemon=True)
        self._queued = 0
        self._window = ReturnWindow(limits.gather_passes)
        tier.attach(self)

    def start(self) -> None:
        """Run on a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """End `run` after the pass that is running."""
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, entries: Tokens[worker_pb2.Entry], sink: ReplySink) -> None:
        """Hand in entries that came together; `sink` gets the reply to each, on the worker's
        thread."""
        extends = [entry for entry in entries if entry.HasField("extend")]
        if extends:
            self._extensions.extend(extends)
            entries = [entry for entry in entries if not entry.HasField("extend")]

        def handle() -> None:
            for entry in entries:
                self._handle(entry, sink, self._came)

        if entries:
            self.post(handle)

    def submit_bulk(
        self, request: worker_pb2.BulkRequest, sink: Callable[[worker_pb2.BulkResponse], None]
    ) -> None:
        """Hand in a piece of a long prompt; `sink` gets the answer, on the worker's thread."""
        self.post(lambda: self._handle_bulk(request, sink))

    def abandon(self, sink: ReplySink) -> None:
        """Drop the work whose replies would go to `sink`: its stream has ended."""
        self.post(lambda: self._drop_work(lambda task: task.sink == sink))

    def post(self, action: Callable[[], None]) -> None:
        """Run this on the worker's thread, from any thread."""
        self._inbox.put((action, time.monotonic()))

    @property
    def num_unread(self) -> int:
        """Messages that were handed in and wait for the pass under way to end."""
        return self._inbox.qsize() + len(self._extensions)

    @property
    def under_way(self) -> int:
        return self._queued

    @property
    def num_waiting(self) -> int:
        """Works that wait for KV."""
        return len(self._engine.scheduler.waiting)

    @property
    def engine(self) -> Engine:
        """For who works with it on the worker's thread, or before that runs."""
        return self._engine

    @property
    def block_tokens(self) -> int:
        return self._engine.blocks.block_tokens

    @property
    def load(self) -> WorkerLoad:
        scheduler = self._engine.scheduler
        waiting = list(scheduler.waiting)  # In one step: the worker's thread may change it.
        return WorkerLoad(
            sessions=len(self._sessions),
            blocks_free=scheduler.blocks.num_free,
            blocks_cached=scheduler.blocks.num_kept,
            queued=self._queued,
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            parked=len(self._parked),
            lacking_kv=len(waiting),
            lacking_kv_s=time.monotonic() - waiting[0].arrived if waiting else 0.0,
            pass_s=self._window.pass_s,
            busy_s=self._window.busy_s,
            preemptions=scheduler.preemptions,
            prefix_tokens=scheduler.prefix.asked,
            prefix_hit_tokens=scheduler.prefix.found,
        )

    # --- the worker's thread ------------------------------------------------------------------

    def run(self) -> None:
        """Work until `stop`; the calling thread is the worker's thread."""
        next_sweep = time.monotonic() + _IDLE_CHECK_S
        while self._read_inbox(self._patience_s()):
            self._extend()
            if not self._engine.scheduler.works:
                self._engine.prepare()
            else:
                if not self._gather():
                    return
                self._drop_expired()
                self._let_go()
                self._step()
            if time.monotonic() >= next_sweep:
                self._drop_expired()
                self._close_idle()
                next_sweep = time.monotonic() + _IDLE_CHECK_S

    def _let_go(self) -> None:
        if self._asked:
            self._asked = False
            time.sleep(_LET_GO_S)

    def _patience_s(self) -> float:
        """How long to wait for entries."""
        if self._engine.scheduler.works:
            return min(self._engine.scheduler.patience_s(), _IDLE_CHECK_S)
        return _LET_GO_S if self._engine.can_prepare else _IDLE_CHECK_S

    def _gather(self) -> bool:
        """Let those come back who are about to; False when the worker is to stop."""
        while (wait_s := self._window.wait_s(time.monotonic())) > 0:
            if not self._read_inbox(wait_s):
                return False
        self._window.close()
        return True

    def _read_inbox(self, timeout_s: float) -> bool:
        """Handle what is there or comes in time; False when the worker is to stop."""
        try:
            item = self._inbox.get(block=timeout_s > 0, timeout=timeout_s or None)
            while item is not None:
                action, self._came = item
                action()
                item = self._inbox.get_nowait()
        except queue.Empty:
            return True
        return False

    def _handle(self, entry: worker_pb2.Entry, sink: ReplySink, arrived: float) -> None:
        reply: worker_pb2.Reply | None
        try:
            reply = self._carry_out(entry, sink, arrived)
        except TokensMissing as missing:
            reply = worker_pb2.Reply(need_tokens=self._need_tokens(missing))
        except Exception as error:
            with within_trace(entry.header.traceparent):
                reply = worker_pb2.Reply(refused=self._refused(error))
        if reply is not None and entry.WhichOneof("op") not in _SILENT:
            _send(entry.header, reply, sink, arrived)

    def _handle_bulk(
        self, request: worker_pb2.BulkRequest, sink: Callable[[worker_pb2.BulkResponse], None]
    ) -> None:
        response = worker_pb2.BulkResponse()
        _answers(response.header, request.header)
        try:
            size = request.ByteSize()
            require(size <= _MAX_BULK_BYTES, f"{size} bytes; at most {_MAX_BULK_BYTES}", "delta")
            check_names(request.header)
            session = self._sessions.get(request.header)
            self._check_room(request.header)
            self._check_ids(request.delta)
            advance_base(session.sequence.log, request.header, request.delta)
            # Its owner has another base in mind than that of what is under way.
            self._drop_work(lambda task: task.session is session)
            response.held.have_len = len(session.sequence.log)
        except TokensMissing as missing:
            response.need_tokens.CopyFrom(self._need_tokens(missing))
        except Exception as error:
            response.refused.CopyFrom(self._refused(error))
        sink(response)

    def _carry_out(
        self, entry: worker_pb2.Entry, sink: ReplySink, arrived: float
    ) -> worker_pb2.Reply | None:
        check_names(entry.header)
        op = entry.WhichOneof("op")
        if op == "cancel":
            self._cancel(entry.header, entry.cancel.through_number)
            return None
        if op == "tune":
            self._tune(entry.header, entry.tune)
            return None
        if op == "close":
            return self._close(entry.header)
        if op == "open":
            return self._open(entry)
        if op is None:
            raise InvalidArgument("an entry must say what to do", field="op")
        self._begin(entry, sink, arrived)
        return None

    def _open(self, entry: worker_pb2.Entry) -> worker_pb2.Reply:
        spec = spec_from_proto(entry.open.spec, vocab_size=self._vocab_size)
        check_header(entry.header)
        if key_of(entry.header) not in self._sessions:
            self._make_room()
        session = self._sessions.open(entry.header)
        self._window.gone(key_of(entry.header))  # Another generation: what was before is no trip.
        self._drop_work(
            lambda task: task.session is session and task.entry.header.epoch < session.epoch
        )
        if session.sequence.salt != entry.header.tenant:
            self._drop_work(lambda task: task.session is session)
            self._engine.scheduler.release(session.sequence)
            session.sequence.salt = entry.header.tenant
        session.sequence.spec = spec
        return worker_pb2.Reply(
            opened=worker_pb2.Opened(
                have_len=len(session.sequence.log), cached_len=session.sequence.committed_kv()
            )
        )

    def _make_room(self) -> None:
        if self.draining:
            raise Refusal(worker_pb2.REFUSAL_REASON_DRAINING, "the worker is about to stop")
        if len(self._sessions) < self.limits.max_sessions:
            return
        for key, _ in self._sessions.idle():
            self._forget(key)
            self.counters["sessions_evicted"] += 1
            return
        raise Refusal(
            worker_pb2.REFUSAL_REASON_RESOURCE_EXHAUSTED,
            f"{self.limits.max_sessions} sessions are busy; retry later",
        )

    def _begin(self, entry: worker_pb2.Entry, sink: ReplySink, arrived: float) -> None:
        header = entry.header
        session = self._sessions.get(header)
        sequence = session.sequence
        spec = sequence.spec
        if spec is None:
            raise Refusal(worker_pb2.REFUSAL_REASON_UNKNOWN_SESSION, "the session is not open")
        if self._queued >= self.limits.max_queued:
            raise Refusal(worker_pb2.REFUSAL_REASON_RESOURCE_EXHAUSTED, "the queue is full")
        if session.works:
            raise Refusal(
                worker_pb2.REFUSAL_REASON_INVALID_ARGUMENT,
                "an earlier entry of the session is still under way; cancel it first",
            )
        self._check_room(header)
        delta = entry.verify.delta if entry.HasField("verify") else entry.propose.delta
        count = len(delta.token_ids)
        if count > _MAX_INLINE_TOKENS:
            raise InvalidArgument(
                f"{count} ids; at most {_MAX_INLINE_TOKENS}, more as bulk", field="delta.token_ids"
            )
        self._check_ids(delta)
        advance_base(sequence.log, header, delta)
        work = self._tier.begin(entry, sequence, spec)
        self._check_fits(work)
        # Time spent in the inbox, while a pass ran, is the request's time too.
        work.deadline -= work.arrived - arrived
        work.arrived = arrived
        trace = self.traces.context_of(header) if self.traces else None
        task = work.owner = _Task(entry, key_of(header), session, sink, trace)
        session.works += 1
        self._window.returned(task.key, arrived)
        self._queued += 1
        self._engine.scheduler.submit(work)

    def _check_room(self, header: worker_pb2.EntryHeader) -> None:
        if header.base_len >= self.limits.context_length:
            raise Refusal(
                worker_pb2.REFUSAL_REASON_CONTEXT_EXCEEDED,
                f"a base of {header.base_len} tokens leaves no room in a context of "
                f"{self.limits.context_length}",
                field="base_len",
            )

    def _check_fits(self, work: Work) -> None:
        needed, capacity = work.reserve, self._engine.capacity_tokens
        if work.draw is not None and work.draw.branches:
            needed += work.draw.scratch_blocks(self.block_tokens) * self.block_tokens
        if needed > capacity:
            raise Refusal(
                worker_pb2.REFUSAL_REASON_RESOURCE_EXHAUSTED,
                f"{needed} tokens do not fit into KV for {capacity}",
            )

    def _check_ids(self, delta: worker_pb2.TokenDelta) -> None:
        worst = max(delta.token_ids[:], default=0)
        if worst >= self._vocab_size:
            raise InvalidArgument(
                f"token id {worst} is not below the vocabulary's {self._vocab_size}",
                field="delta.token_ids",
            )

    def _step(self) -> None:
        started = time.monotonic()
        for result in self._engine.steps(stop=lambda: not self._inbox.empty()):
            seconds = time.monotonic() - started
            self._window.passed(seconds)
            if self.on_pass is not None:
                self.on_pass(seconds, self._engine.batch_rows)
            self._extend()
            self._handle_result(result)
            started = time.monotonic()

    def _handle_result(self, result: StepResult) -> None:
        for work, error in result.failed:
            with within_trace(work.owner.entry.header.traceparent):
                reply = worker_pb2.Reply(refused=self._refused(error))
            self._trace(work, reply)
            self._finish(work, reply)
        if not result.ready:
            return
        rounds = self._advance(result.ready)
        works = [work for work, _ in result.ready]
        # First all that others are asked, which is waited for: it leaves together, before replies
        # are made.
        fates = [self._fate(work, done) for work, done in zip(works, rounds, strict=True)]
        if all(then in _LATER for then in fates):
            time.sleep(_LET_GO_S)
        for work, done, then in zip(works, rounds, fates, strict=True):
            try:
                reply = done if isinstance(done, worker_pb2.Reply) else done()
            except Exception as error:
                reply, then = worker_pb2.Reply(refused=self._refused(error)), Next.NONE
            if self._goes_on(work, then):
                reply.header.more = True
                _send(work.owner.entry.header, reply, work.owner.sink, work.arrived)
                work.arrived = work.started = time.monotonic()
            else:
                self._finish(work, reply)

    def _trace(self, work: Work, reply: worker_pb2.Reply) -> None:
        """Tell of a round, before its work goes on."""
        task: _Task = work.owner
        if self.traces is not None and task.trace is not None:
            self.traces.tell(task.trace, work, reply)

    def _fate(self, work: Work, done: Made | worker_pb2.Reply) -> Next:
        return Next.NONE if _is_refused(done) else self._tier.go_on(work)

    def _goes_on(self, work: Work, then: Next) -> bool:
        if then in _LATER:
            self._engine.scheduler.finish(work)
            key: Key = work.owner.key
            self._parked[key] = work
            self._window.answered(key, time.monotonic(), beside=then is Next.LATER_BESIDE)
            return True
        return then is Next.NOW and self._engine.scheduler.go_on(work)

    def resume(self, work: Work, *, asked: bool = False) -> None:
        """A parked work has its next round; on the worker's thread."""
        self._asked = self._asked or asked
        key: Key = work.owner.key
        if self._parked.pop(key, None) is None:
            return
        self._window.returned(key, self._came)
        try:
            self._check_fits(work)
        except Refusal as refusal:
            self._account(work)
            reply = worker_pb2.Reply(refused=self._refused(refusal))
            _send(work.owner.entry.header, reply, work.owner.sink, work.arrived)
            return
        work.looked_up = True  # What others have of its tokens was looked for before.
        self._engine.scheduler.submit(work)

    @property
    def _works(self) -> list[Work]:
        """All that are not over, those that wait for their next round included."""
        return [*self._engine.scheduler.works, *self._parked.values()]

    def _tune(self, header: worker_pb2.EntryHeader, entry: worker_pb2.TuneEntry) -> None:
        session = self._sessions.get(header)
        for work in self._works:
            if work.owner.session is session:
                self._tier.tune(work, entry)

    def _extend(self) -> None:
        """Let those go on for longer that somebody has said so of."""
        if not self._extensions:
            return
        work_of = {id(work.owner.session): work for work in self._works}
        while self._extensions:
            entry = self._extensions.popleft()
            try:
                check_names(entry.header)
                work = work_of.get(id(self._sessions.find(entry.header)))
                # Others may have overtaken it: the work that it is about may be over.
                if work is not None and entry.header.number > work.owner.entry.header.number:
                    self._tier.extend(work, entry.extend)
            except (Refusal, OutriderError) as error:
                self._refused(error)

    def _advance(self, ready: Tokens[tuple[Work, Tensor]]) -> list[Made | worker_pb2.Reply]:
        """The replies to come; those that are told of to a trace, and refusals, are there."""
        try:
            rounds = self._tier.advance(ready)
            return [self._told(work, done) for (work, _), done in zip(ready, rounds, strict=True)]
        except Exception as error:
            if len(ready) == 1:
                return [worker_pb2.Reply(refused=self._refused(error))]
            logger.exception("%d sessions could not go on together; one by one", len(ready))
            return [done for item in ready for done in self._advance((item,))]

    def _told(self, work: Work, done: Made) -> Made | worker_pb2.Reply:
        if work.owner.trace is None:
            return done
        reply = done()
        self._trace(work, reply)
        return reply

    def _finish(self, work: Work, reply: worker_pb2.Reply) -> None:
        self._engine.scheduler.finish(work)
        self._account(work)
        self._window.answered(work.owner.key, time.monotonic())
        # Last: the thread that sends it needs the interpreter.
        _send(work.owner.entry.header, reply, work.owner.sink, work.arrived)

    def _account(self, work: Work) -> None:
        """A work is over."""
        self._tier.end(work)
        task: _Task = work.owner
        task.session.works -= 1
        task.session.sequence.last_used = time.monotonic()
        self._queued -= 1

    def _drop_work(
        self,
        is_dead: Callable[[_Task], bool],
        reason: "worker_pb2.RefusalReason" = worker_pb2.REFUSAL_REASON_CANCELLED,
    ) -> None:
        parked = [key for key, work in self._parked.items() if is_dead(work.owner)]
        dropped = [self._parked.pop(key) for key in parked]
        dropped += self._engine.scheduler.drop(lambda work: is_dead(work.owner))
        for work in dropped:
            self._account(work)
            refused = self._refused(Refusal(reason, "dropped before it was done"))
            reply = worker_pb2.Reply(refused=refused)
            _send(work.owner.entry.header, reply, work.owner.sink, work.arrived)

    def _drop_expired(self) -> None:
        now = time.monotonic()
        late = {id(work.owner) for work in self._works if work.deadline <= now}
        if late:
            self._drop_work(
                lambda task: id(task) in late, worker_pb2.REFUSAL_REASON_DEADLINE_EXCEEDED
            )

    def _cancel(self, header: worker_pb2.EntryHeader, through_number: int) -> None:
        session = self._sessions.get(header)
        self.counters["cancelled"] += 1
        self._drop_work(
            lambda task: task.session is session and task.entry.header.number <= through_number
        )

    def _close(self, header: worker_pb2.EntryHeader) -> worker_pb2.Reply:
        session = self._sessions.take_over(header)
        if session:
            self._drop_work(lambda task: task.session is session)
            self._forget(key_of(header))
        self._sessions.end_epoch(header)
        return worker_pb2.Reply(closed=worker_pb2.Closed())

    def _forget(self, key: Key) -> None:
        session = self._sessions.close(key)
        self._window.gone(key)
        self._tier.forget(key)
        if session:
            self._engine.scheduler.release(session.sequence)

    def _close_idle(self) -> None:
        limit = time.monotonic() - self.limits.session_idle_s
        for key, session in self._sessions.idle():
            if session.sequence.last_used > limit:
                return
            self._forget(key)
            self.counters["sessions_expired"] += 1

    def _idle_sequences(self) -> Iterator[Sequence]:
        for _, session in self._sessions.idle():
            if session.sequence.blocks:
                self.counters["kv_evicted"] += 1
                yield session.sequence

    def _need_tokens(self, missing: TokensMissing) -> worker_pb2.NeedTokens:
        self.counters["need_tokens"] += 1
        return worker_pb2.NeedTokens(**{"from": missing.start})

    def _refused(self, error: Exception) -> worker_pb2.Refused:
        """Why an entry was not carried out, counted; faults of ours are logged as well."""
        reason, message, field = worker_pb2.REFUSAL_REASON_INTERNAL, str(error), ""
        if isinstance(error, Refusal):
            reason, message, field = error.reason, error.message, error.field
        elif isinstance(error, OutriderError):
            reason = worker_pb2.REFUSAL_REASON_INVALID_ARGUMENT
            if isinstance(error, Unsupported):
                reason = worker_pb2.REFUSAL_REASON_UNSUPPORTED
            message, field = error.message, error.field
        else:
            logger.error("an entry failed", exc_info=error)
        name = worker_pb2.RefusalReason.Name(reason).removeprefix("REFUSAL_REASON_").lower()
        self.counters[f"refused_{name}"] += 1
        return worker_pb2.Refused(reason=reason, message=message[:1024], field=field)


def timing_of(work: Work) -> WorkTiming:
    """Where the time of a work went, as of now."""
    now = time.monotonic()
    started = work.started or now
    return WorkTiming(
        queue_us=int((started - work.arrived) * 1e6),
        compute_us=int((now - started) * 1e6),
        batch_rows=work.batch_rows,
        cached_tokens=work.reused,
        prompt_rows=work.prompt_rows,
    )


def deadline_of(header: worker_pb2.EntryHeader) -> float:
    """The entry's deadline on this machine's monotonic clock; one is always there."""
    timeout_ms = header.timeout_ms
    if not 1 <= timeout_ms <= _MAX_TIMEOUT_MS:
        raise InvalidArgument(f"{timeout_ms} is not in [1, {_MAX_TIMEOUT_MS}]", field="timeout_ms")
    return time.monotonic() + timeout_ms / 1000


def _is_refused(done: Made | worker_pb2.Reply) -> bool:
    return isinstance(done, worker_pb2.Reply) and done.HasField("refused")


def _answers(reply: worker_pb2.ReplyHeader, entry: worker_pb2.EntryHeader) -> None:
    """Make a reply name the entry that it answers."""
    reply.session_id = entry.session_id
    reply.completion = entry.completion
    reply.epoch = entry.epoch
    reply.number = entry.number
    reply.owner_nonce = entry.owner_nonce


def _send(
    header: worker_pb2.EntryHeader, reply: worker_pb2.Reply, sink: ReplySink, arrived: float
) -> None:
    answering = reply.header
    _answers(answering, header)
    answering.elapsed_us = int((time.monotonic() - arrived) * 1e6)
    sink(reply)
