"""One session on one worker: opened when needed, given the tokens it lacks, fenced throughout."""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from outrider import errors
from outrider.remote.link import WorkerLink
from outrider.remote.replies import Replies
from outrider.remote.timeouts import Timeout
from outrider.token_log import TokenLog
from outrider.types import Fence, GenerationSpec
from outrider.v1 import worker_pb2
from outrider.wire import spec_to_proto

INLINE_TOKENS = 4096
"""Missing tokens up to this many travel in the entry itself, more on the bulk stream."""

_BULK_TOKENS = 12_000
"""Tokens of one bulk message: at most 5 bytes each keeps it under 64 KiB."""

_MAX_ATTEMPTS = 4
_LAST_NUMBER = (1 << 64) - 1
"""Above those of any entry, whoever sent it."""

_REFUSALS: dict[int, type[errors.OutriderError]] = {
    worker_pb2.REFUSAL_REASON_STALE_EPOCH: errors.Fenced,
    worker_pb2.REFUSAL_REASON_NONCE_MISMATCH: errors.Fenced,
    worker_pb2.REFUSAL_REASON_STALE_NUMBER: errors.Fenced,
    worker_pb2.REFUSAL_REASON_INVALID_ARGUMENT: errors.InvalidArgument,
    worker_pb2.REFUSAL_REASON_RESOURCE_EXHAUSTED: errors.ResourceExhausted,
    worker_pb2.REFUSAL_REASON_DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    worker_pb2.REFUSAL_REASON_CANCELLED: errors.Cancelled,
    worker_pb2.REFUSAL_REASON_DRAINING: errors.Unavailable,
    worker_pb2.REFUSAL_REASON_CONTEXT_EXCEEDED: errors.FailedPrecondition,
    worker_pb2.REFUSAL_REASON_UNSUPPORTED: errors.Unsupported,
}


@dataclass(frozen=True, slots=True)
class Routing:
    """What every entry of a generation says about where it comes from and goes to."""

    request_id: str
    tenant: str
    model: str
    adapter: str = ""
    traceparent: str = ""
    trace_every: int = 0
    """Of a traced request: which rounds are traced, as in worker.proto."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Microseconds that an entry took on a worker, computing and in all; the rows of the last
    pass that it was in, and those of its passes that brought no logits, others' included."""

    compute_us: int = 0
    worker_us: int = 0
    batch_rows: int = 0
    prompt_rows: int = 0

    @classmethod
    def of(cls, reply: worker_pb2.Reply, timing: worker_pb2.WorkTiming) -> "Spent":
        return cls(
            timing.compute_us, reply.header.elapsed_us, timing.batch_rows, timing.prompt_rows
        )


NOTHING_SPENT = Spent()


class RemoteSession:
    """A session's presence on one worker. One call at a time; `log` is the orchestrator's."""

    def __init__(
        self,
        link: WorkerLink,
        fence: Fence,
        spec: GenerationSpec,
        routing: Routing,
        log: TokenLog,
        numbers: Iterator[int] | None = None,
    ) -> None:
        """`numbers` are those of the entries. Whoever may come back to a worker under the same
        fence, after a broken link say, goes on with the same ones."""
        self.link = link
        self._header = worker_pb2.EntryHeader(
            session_id=fence.session_id,
            completion=fence.completion,
            epoch=fence.epoch,
            owner_nonce=fence.owner_nonce,
            traceparent=routing.traceparent,
            request_id=routing.request_id,
            tenant=routing.tenant,
            model=routing.model,
            adapter=routing.adapter,
            trace_every=routing.trace_every,
        )
        """What the headers of all entries have in common."""
        self._spec = spec
        self._log = log
        self._numbers = numbers or itertools.count(1)
        self._more: Replies | None = None
        """Where further replies to the last entry come in, if it asked for several."""
        self._started: tuple[Replies, Timeout] | None = None
        """Where the reply to the entry that was started comes in, and what ends the wait."""
        self._incarnation = 0
        self._asked = 0
        """Incarnation that an Open went to, answered or not: it may hold the session."""
        self._held = 0
        """Tokens of the log that the worker is thought to hold; it says so when it does not."""
        self._is_fresh = False
        """Opened for this generation, and nothing done yet."""
        self.reused = 0
        """Tokens whose KV it held when the session was opened for this generation."""

    async def call(
        self, set_op: Callable[[worker_pb2.Entry, worker_pb2.TokenDelta], None], deadline: float
    ) -> worker_pb2.Reply:
        """Carry out an entry on the whole log; `set_op` fills in its op, the delta included.

        Further replies, if it asked for them, come by `next_replies`. `deadline` is on the
        monotonic clock. Raises the OutriderError that a refusal stands
        for, Unavailable when the worker goes away, DeadlineExceeded.
        """
        self.settle()
        for _ in range(_MAX_ATTEMPTS):
            if not await self._ensure_open(deadline):
                continue
            reply = await self._attempt(set_op, deadline)
            if reply is not None:
                self._held = len(self._log)
                return reply
        raise errors.Unavailable(f"the {self.link.tier} keeps losing the session")

    def start(
        self,
        set_op: Callable[[worker_pb2.Entry, worker_pb2.TokenDelta], None],
        timeout_s: float,
        on_end: Callable[[worker_pb2.Reply | errors.OutriderError | None], None],
    ) -> bool:
        """Like `call`, but without a task: for entries that come many times a second.

        False, and nothing done, where that needs more than one message: `call` then. `on_end` gets
        the reply, why there is none, or None where it takes another try, by `call` too.
        """
        if not self._is_open or len(self._log) - self._held > INLINE_TOKENS:
            return False
        self.settle()
        base_len = len(self._log)
        entry = self._entry(timeout_s)
        missing = self._log.tokens[self._held :]
        set_op(entry, worker_pb2.TokenDelta(start=self._held, token_ids=missing))
        replies = self.link.send(entry)

        def end(result: worker_pb2.Reply | errors.OutriderError) -> None:
            self._drop_started()
            if isinstance(result, errors.OutriderError):
                on_end(result)
                return
            try:
                reply = self._carried_out(result)
            except errors.OutriderError as error:
                on_end(error)
                return
            if reply is not None:
                self._held = base_len
            on_end(reply)

        def expire() -> None:
            self.stop()
            on_end(self._too_late())

        replies.listen(end)
        self._started = replies, self.link.timeouts.start(timeout_s, expire)
        return True

    def stop(self) -> None:
        """Drop what was started, there too; nothing comes of it any more."""
        if self._drop_started():
            self.cancel()

    def _drop_started(self) -> bool:
        if self._started is None:
            return False
        replies, timeout = self._started
        self._started = None
        replies.close()
        timeout.cancel()
        return True

    def _too_late(self) -> errors.DeadlineExceeded:
        return errors.DeadlineExceeded(
            f"the {self.link.tier} at {self.link.address} did not answer in time"
        )

    def offers(self, capability: str) -> bool:
        info = self.link.info
        return info is not None and capability in info.capabilities

    @property
    def has_more(self) -> bool:
        """Further replies to the last entry are on their way."""
        return self._more is not None

    async def next_replies(self, deadline: float) -> list[worker_pb2.Reply]:
        """Further replies to the last entry, which `has_more`: all that are there.

        Waits for one. None are left where the worker ends them by a refusal: ask anew. Raises
        Unavailable when the worker goes away, DeadlineExceeded.
        """
        if self._more is None:
            raise errors.InternalError("no further replies are to come")
        replies = self._more
        found = [await self._receive(replies, deadline)]
        if found[-1].header.more:
            found += replies.drain()
            self._keep(replies, more=found[-1].header.more)
        self._held = len(self._log)
        return [reply for reply in found if not reply.HasField("refused")]

    def tune(self, num_speculative_tokens: int, fan_out: int) -> None:
        """Change the plan of the entry that further replies come to."""
        if self.has_more and self._is_open:
            entry = self._entry(timeout_s=10.0)
            entry.tune.num_speculative_tokens = num_speculative_tokens
            entry.tune.fan_out = fan_out
            self.link.post(entry)

    def extend(self, until_len: int) -> None:
        """Have the entry that further replies come to go on until the log has this length."""
        if self.has_more and self._is_open:
            entry = self._entry(timeout_s=10.0)
            entry.extend.until_len = until_len
            self.link.post(entry)

    def settle(self) -> None:
        """Want no further replies to the last entry."""
        if self._more is not None:
            self._more.close()
            self._more = None
            self.cancel()

    def cancel(self) -> None:
        """Drop whatever is under way there."""
        if self._is_open:
            entry = self._entry(timeout_s=10.0)
            entry.cancel.through_number = entry.header.number - 1
            self.link.post(entry)

    def close(self, *, opened_by_others: bool = False) -> None:
        """Free the session's KV there, at once or when the worker is back from wherever it is;
        `opened_by_others` also if a target has opened it."""
        there = self.link.incarnation
        if there and (opened_by_others or self._asked == there):
            entry = self._entry(timeout_s=10.0)
            entry.close.SetInParent()
            if opened_by_others:
                entry.header.number = _LAST_NUMBER
            self.link.close_session(entry, there)
        self._incarnation = self._asked = 0

    @property
    def _is_open(self) -> bool:
        info = self.link.info
        return info is not None and self._incarnation == info.incarnation

    async def _ensure_open(self, deadline: float) -> bool:
        """Open the session there unless it is; False if the worker has just changed."""
        if self._is_open:
            return True
        info = self.link.info
        if info is None:
            raise errors.Unavailable(f"the {self.link.tier} at {self.link.address} is away")
        entry = self._entry(_left(deadline))
        entry.open.spec.CopyFrom(spec_to_proto(self._spec))
        self._asked = info.incarnation
        reply = await self._send(entry, deadline)
        if reply.refused.reason == worker_pb2.REFUSAL_REASON_DRAINING:
            self.link.draining = True  # Look for another one.
        if not reply.HasField("opened"):
            raise _error(reply)
        self._incarnation = info.incarnation
        self._held = min(reply.opened.have_len, len(self._log))
        self._is_fresh = True
        return self._is_open

    async def _attempt(
        self, set_op: Callable[[worker_pb2.Entry, worker_pb2.TokenDelta], None], deadline: float
    ) -> worker_pb2.Reply | None:
        """One try; None when it has to be tried again with other tokens or a new Open."""
        if len(self._log) - self._held > INLINE_TOKENS:
            if not await self._send_bulk(deadline):
                return None
        entry = self._entry(_left(deadline))
        missing = self._log.tokens[self._held :]
        set_op(entry, worker_pb2.TokenDelta(start=self._held, token_ids=missing))
        return self._carried_out(await self._send(entry, deadline))

    def _carried_out(self, reply: worker_pb2.Reply) -> worker_pb2.Reply | None:
        """The reply if the entry was carried out; None when it has to be tried again."""
        if reply.HasField("need_tokens"):
            self._held = min(getattr(reply.need_tokens, "from"), len(self._log))
            return None
        if reply.HasField("refused"):
            if reply.refused.reason == worker_pb2.REFUSAL_REASON_UNKNOWN_SESSION:
                self._incarnation = 0
                return None
            raise _error(reply)
        if self._is_fresh:
            self._is_fresh = False
            self.reused = getattr(reply, reply.WhichOneof("result")).timing.cached_tokens
        return reply

    async def _send_bulk(self, deadline: float) -> bool:
        answer = await self.link.send_bulk(list(self._pieces(deadline)), _left(deadline))
        if answer.HasField("held"):
            self._held = len(self._log)
            return True
        if answer.HasField("need_tokens"):
            self._held = min(getattr(answer.need_tokens, "from"), len(self._log))
            return False
        if answer.refused.reason == worker_pb2.REFUSAL_REASON_UNKNOWN_SESSION:
            self._incarnation = 0
            return False
        raise _refusal(answer.refused)

    def _pieces(self, deadline: float) -> Iterator[worker_pb2.BulkRequest]:
        for start in range(self._held, len(self._log), _BULK_TOKENS):
            stop = min(start + _BULK_TOKENS, len(self._log))
            request = worker_pb2.BulkRequest()
            self._fill_header(request.header, stop, _left(deadline))
            request.delta.start = start
            request.delta.token_ids.extend(self._log.tokens[start:stop])
            yield request

    async def _send(self, entry: worker_pb2.Entry, deadline: float) -> worker_pb2.Reply:
        return await self._receive(self.link.send(entry), deadline)

    async def _receive(self, replies: Replies, deadline: float) -> worker_pb2.Reply:
        more = False
        try:
            reply = await replies.next(_left(deadline))
            more = reply.header.more
            return reply
        except TimeoutError:
            self.cancel()
            raise self._too_late() from None
        except BaseException:
            self.cancel()
            raise
        finally:
            self._keep(replies, more=more)

    def _keep(self, replies: Replies, *, more: bool) -> None:
        """Go on listening while more replies are to come."""
        self._more = replies if more else None
        if not more:
            replies.close()

    def _entry(self, timeout_s: float) -> worker_pb2.Entry:
        entry = worker_pb2.Entry()
        self._fill_header(entry.header, len(self._log), timeout_s)
        return entry

    def _fill_header(self, header: worker_pb2.EntryHeader, base_len: int, timeout_s: float) -> None:
        header.CopyFrom(self._header)
        header.number = next(self._numbers)
        header.base_len = base_len
        header.base_hash = self._log.prefix_hash(base_len)
        header.timeout_ms = max(int(timeout_s * 1000), 1)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise errors.DeadlineExceeded("the request's time is over")
    return left


def _error(reply: worker_pb2.Reply) -> errors.OutriderError:
    if reply.HasField("refused"):
        return _refusal(reply.refused)
    return errors.InternalError(f"unexpected reply {reply.WhichOneof('result')}")


def _refusal(refused: worker_pb2.Refused) -> errors.OutriderError:
    cls = _REFUSALS.get(refused.reason, errors.InternalError)
    return cls(refused.message, field=refused.field)
