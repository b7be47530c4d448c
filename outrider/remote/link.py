"""Connections to workers: one stream each, shared by all sessions, mended when it breaks."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import grpc.aio

from outrider.errors import FailedPrecondition, OutriderError, Unavailable
from outrider.remote.closes import Closes, ReplyKey, key_of
from outrider.remote.protocol import check_protocol
from outrider.remote.replies import Replies
from outrider.remote.silence import Silence
from outrider.remote.timeouts import Timeouts
from outrider.rpc.channel import ChannelSecurity, open_channel
from outrider.rpc.status import error_from_rpc
from outrider.trips import measure
from outrider.v1 import draft_pb2_grpc, facts_pb2, target_pb2, target_pb2_grpc, worker_pb2

logger = logging.getLogger(__name__)

MAX_TOKENIZER_BYTES = 64 << 20
_MAX_BATCH = 256
_INFO_TIMEOUT_S = 5.0
_RECONNECT_S = (0.1, 0.2, 0.5, 1.0, 2.0)
_HANG_UP_S = 2.0
_WATCH_AGAIN_S = 1.0


class WorkerStub(Protocol):
    """What both services offer."""

    Run: Any
    Bulk: Any
    Info: Any
    Watch: Any
    Probe: Any


@dataclass(slots=True)
class LinkCounters:
    """What went by on a link."""

    entries: int = 0
    replies: int = 0
    late_replies: int = 0
    reconnects: int = 0


class WorkerLink:
    """A worker at an address. `send` needs `info`, which is None while the worker is away.

    Replies are matched by session, completion, epoch and number; what nobody waits for any more
    is dropped and counted.
    """

    def __init__(
        self,
        address: str,
        tier: str,
        security: ChannelSecurity,
        *,
        watch: bool = False,
        silence: Silence | None = None,
    ) -> None:
        """With `watch` the worker is asked to tell how it is doing (`vitals`), and taken as away
        when it says nothing any more (`silence`)."""
        self.address = address
        self.tier = tier
        self.info: worker_pb2.InfoResponse | None = None
        self.incarnation = 0
        """That is there, or was when the worker went away; 0: it never came."""
        self.refused: OutriderError | None = None
        self.counters = LinkCounters()
        self.draining = False
        """The worker takes no new sessions: it is about to go."""
        self.vitals: worker_pb2.WatchResponse | None = None
        """How it said that it is doing, None while it does not say."""
        self.vitals_at = 0.0
        """When it said so, on the monotonic clock."""
        self._watch = watch
        self._silence = silence or Silence()
        self._security = security
        self._open_channel()
        self._former: set[asyncio.Task[None]] = set()
        """Connections that were given up, as they are closed."""
        self._closes = Closes()
        self._bulks: set[Any] = set()
        """Calls of `send_bulk` under way."""
        self._waiting: dict[ReplyKey, Replies] = {}
        self._outbox: asyncio.Queue[worker_pb2.Entry | None] = asyncio.Queue()
        self._closing = False
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self.timeouts = Timeouts()
        """Of who waits for replies."""

    @property
    def up(self) -> bool:
        return self.info is not None

    @property
    def num_awaited(self) -> int:
        """Entries that somebody awaits replies to."""
        return len(self._waiting)

    @property
    def changed(self) -> asyncio.Event:
        """Set at the next change of anything that is told here; another one after that."""
        return self._changed

    def start(self) -> None:
        """Connect, and reconnect for ever; `wait_up` tells when."""
        self._task = asyncio.create_task(self._maintain(), name=f"link-{self.address}")

    async def close(self) -> None:
        """Send what was posted, sessions to be closed say, and hang up."""
        self._closing = True
        self._outbox.put_nowait(None)
        if self._task:
            if self.up:
                await asyncio.wait([self._task], timeout=_HANG_UP_S)
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await asyncio.gather(self._channel.close(), *self._former)

    async def wait_up(self, timeout_s: float) -> None:
        """Until the worker answers; Unavailable after the timeout, or why it was refused."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.up:
                    if self.refused:
                        raise self.refused
                    await self._changed.wait()
        except TimeoutError:
            raise Unavailable(f"the {self.tier} at {self.address} does not answer") from None

    def post(self, entry: worker_pb2.Entry) -> None:
        """Send without waiting for a reply."""
        if self.up:
            self.counters.entries += 1
            self._outbox.put_nowait(entry)

    def close_session(self, entry: worker_pb2.Entry, incarnation: int) -> None:
        """Have this incarnation close a session, as soon as it is there (again)."""
        if incarnation == self.incarnation:
            self._closes.add(entry)
            self.post(entry)

    def send(self, entry: worker_pb2.Entry) -> Replies:
        """Send; the replies are to be closed in the end. Raises Unavailable."""
        if not self.up:
            raise Unavailable(f"the {self.tier} at {self.address} is away")
        key = key_of(entry.header)
        replies = Replies(lambda: self._waiting.pop(key, None), self.timeouts)
        self._waiting[key] = replies
        self.counters.entries += 1
        self._outbox.put_nowait(entry)
        return replies

    async def send_bulk(
        self, requests: list[worker_pb2.BulkRequest], timeout_s: float
    ) -> worker_pb2.BulkResponse:
        """Send pieces one after the other; the last answer, or the first that is not `held`."""
        call = self._stub.Bulk(timeout=timeout_s)
        self._bulks.add(call)
        try:
            with self._explaining():
                answer = worker_pb2.BulkResponse()
                for request in requests:
                    await call.write(request)
                    answer = await call.read()
                    if not isinstance(answer, worker_pb2.BulkResponse):
                        raise Unavailable(
                            f"the {self.tier} at {self.address} ended the bulk stream"
                        )
                    if not answer.HasField("held"):
                        break
                await call.done_writing()
        finally:
            self._bulks.discard(call)
        return answer

    async def fetch_tokenizer(self, timeout_s: float) -> bytes:
        """The target's tokenizer as JSON."""
        stub: Any = self._stub
        data = bytearray()
        call = stub.GetTokenizer(target_pb2.GetTokenizerRequest(), timeout=timeout_s)
        try:
            with self._explaining():
                async for part in call:
                    data += part.data
                    if len(data) > MAX_TOKENIZER_BYTES:
                        raise FailedPrecondition(
                            f"the tokenizer of {self.address} has more than {MAX_TOKENIZER_BYTES} "
                            "bytes"
                        )
        finally:
            call.cancel()
        return bytes(data)

    async def measure(self, samples: int, *, within_s: float) -> facts_pb2.RoundTrips:
        """Calls and back, beside the stream. Raises OutriderError."""

        async def call() -> None:
            await self._stub.Info(worker_pb2.InfoRequest(), timeout=within_s)

        with self._explaining():
            return await measure(call, samples, within_s=within_s)

    async def probe(
        self, request: worker_pb2.ProbeRequest, timeout_s: float
    ) -> worker_pb2.ProbeResponse:
        """What the worker finds when it looks at itself. Raises OutriderError; Unsupported where it
        cannot, being of an older release."""
        with self._explaining():
            found: worker_pb2.ProbeResponse = await self._stub.Probe(request, timeout=timeout_s)
        return found

    def _open_channel(self) -> None:
        self._channel = open_channel(self.address, self._security)
        self._stub: WorkerStub = (
            draft_pb2_grpc.DraftServiceStub(self._channel)  # type: ignore[no-untyped-call]
            if self.tier == "draft"
            else target_pb2_grpc.TargetServiceStub(self._channel)  # type: ignore[no-untyped-call]
        )

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Why a call has failed as an OutriderError."""
        with self._unless_given_up():
            try:
                yield
            except grpc.aio.AioRpcError as error:
                raise error_from_rpc(error) from error

    @contextlib.contextmanager
    def _unless_given_up(self) -> Iterator[None]:
        """Unavailable where a call ends with its connection; gRPC makes a cancellation of that."""
        task = asyncio.current_task()
        try:
            yield
        except asyncio.CancelledError:
            if task is None or task.cancelling():
                raise
            raise self._gone() from None

    def _gone(self) -> Unavailable:
        return Unavailable(f"the {self.tier} at {self.address} went away")

    async def _maintain(self) -> None:
        attempt = 0
        while True:
            try:
                info = await self._stub.Info(worker_pb2.InfoRequest(), timeout=_INFO_TIMEOUT_S)
                check_protocol(info, self.address)
                attempt = 0
                await self._run_stream(info)
            except grpc.aio.AioRpcError as error:
                if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                    self.refused = error_from_rpc(error)
                logger.debug("link %s: %s", self.address, error.details())
            except Unavailable as error:
                logger.debug("link %s: %s", self.address, error)
            except OutriderError as error:
                self.refused = error
                logger.error("worker refused", extra={"address": self.address, "why": str(error)})
            self._set_info(None)
            if self._closing:
                return
            await asyncio.sleep(_RECONNECT_S[min(attempt, len(_RECONNECT_S) - 1)])
            attempt += 1

    async def _run_stream(self, info: worker_pb2.InfoResponse) -> None:
        self._outbox = asyncio.Queue()
        call = self._stub.Run(self._batches(self._outbox))
        self.refused = None
        self.draining = info.draining
        self.incarnation = info.incarnation
        self._set_info(info)
        for entry in self._closes.begin(info.incarnation):
            self.post(entry)
        logger.info("worker up", extra={"tier": self.tier, "address": self.address})
        minding = asyncio.create_task(self._mind(call)) if self._watch else None
        try:
            with self._unless_given_up():
                async for response in call:
                    self._silence.heard()
                    for reply in response.replies:
                        self._deliver(reply)
        finally:
            call.cancel()
            if minding is not None:
                minding.cancel()
                await asyncio.wait([minding])
            self.vitals = None
            self._set_info(None)
            self.counters.reconnects += 1
            for replies in list(self._waiting.values()):
                replies.break_off(self._gone())

    async def _mind(self, run: Any) -> None:
        """Hear how the worker is doing, and break its stream off when it says nothing any more."""
        watching = asyncio.create_task(self._keep_watching())
        lost = asyncio.create_task(self._silence.lasts())
        try:
            await asyncio.wait({watching, lost}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():  # It is one that cannot tell.
                return
            logger.warning("worker silent", extra={"tier": self.tier, "address": self.address})
            self._give_up_connection(run)
        finally:
            watching.cancel()
            lost.cancel()
            await asyncio.wait({watching, lost})

    def _give_up_connection(self, run: Any) -> None:
        """All that is under way ends; what comes next goes over a new one. The old one may be open
        at this end only, for as long as gRPC waits for a sign of life."""
        former = self._channel
        self._open_channel()
        for call in (run, *self._bulks):
            call.cancel()
        closing = asyncio.create_task(former.close())
        self._former.add(closing)
        closing.add_done_callback(self._former.discard)

    async def _keep_watching(self) -> None:
        """For as long as the stream lasts; a worker that cannot tell is not asked again."""
        while True:
            try:
                async for vitals in self._stub.Watch(worker_pb2.WatchRequest()):
                    self._silence.heard()
                    self.vitals, self.vitals_at = vitals, time.monotonic()
                    if vitals.draining and not self.draining:
                        logger.info("worker drains", extra={"address": self.address})
                        self.draining = True
                    self.tell()
            except grpc.aio.AioRpcError as error:
                if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                    return
                self._silence.heard()  # Of whatever kind, it is an answer.
                logger.debug("watching %s: %s", self.address, error.details())
            await asyncio.sleep(_WATCH_AGAIN_S)

    def _deliver(self, reply: worker_pb2.Reply) -> None:
        self.counters.replies += 1
        key = key_of(reply.header)
        self._closes.answered(key)
        replies = self._waiting.get(key)
        if replies is None:
            # Nobody waits until a session is closed.
            self.counters.late_replies += not reply.HasField("closed")
        else:
            replies.deliver(reply)

    @staticmethod
    async def _batches(
        outbox: "asyncio.Queue[worker_pb2.Entry | None]",
    ) -> AsyncIterator[worker_pb2.RunRequest]:
        """What is in the outbox, until a None."""
        while (entry := await outbox.get()) is not None:
            batch = [entry]
            while not outbox.empty() and len(batch) < _MAX_BATCH:
                if (entry := outbox.get_nowait()) is None:
                    yield worker_pb2.RunRequest(entries=batch)
                    return
                batch.append(entry)
            yield worker_pb2.RunRequest(entries=batch)

    def _set_info(self, info: worker_pb2.InfoResponse | None) -> None:
        if self.info is not None and info is None:
            logger.warning("worker away", extra={"tier": self.tier, "address": self.address})
        self.info = info
        self.tell()

    def tell(self) -> None:
        """Let those who wait for a change look."""
        self._changed.set()
        self._changed = asyncio.Event()
