"""The worker protocol over gRPC: streams of batches on one side, a `Worker` on the other."""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio

import outrider
from outrider.engine.loaded_model import LoadedModel
from outrider.errors import OutriderError
from outrider.rpc.status import abort_with
from outrider.trips import MAX_SAMPLES, unix_us
from outrider.types import MAX_PROPOSAL_TOKENS
from outrider.v1 import worker_pb2
from outrider.wire import require
from outrider.worker.handover import Handover
from outrider.worker.kv_blocks import KvBlocks
from outrider.worker.probing import look_at_kv_store, look_at_machine
from outrider.worker.watching import Vitals, Watching
from outrider.worker.worker import Worker

PROTOCOL_VERSION = 1
_MAX_BATCH = 1024
_MAX_PROBED = 32
_MAX_UNREAD = 4096
"""Replies that nobody has read, or messages that wait for the worker, at which a stream is read no
further: who floods it waits."""
_UNREAD_CHECK_S = 0.01
_QUIET_S = 1.0
"""Between two rounds of a generation there is less than this."""
_FAIL_S = 2.0
_FLUSH_S = 0.1
"""For the status of streams that have ended to leave."""

T = TypeVar("T")
Context = grpc.aio.ServicerContext
Outbox = asyncio.Queue[tuple[worker_pb2.Reply, float] | None]
"""Replies and when they came about; None ends the stream."""


class WorkerServicer:
    """Run, Bulk, Info and Watch of both tiers; the services add what is their own."""

    def __init__(
        self,
        worker: Worker,
        loaded: LoadedModel,
        *,
        incarnation: int,
        capabilities: tuple[str, ...],
        kv_store: KvBlocks | None = None,
    ) -> None:
        self._worker = worker
        self.loaded = loaded
        self._incarnation = incarnation
        self._capabilities = capabilities
        self._kv_store = kv_store
        self._outboxes: set[Outbox] = set()
        self._failure = ""
        self._watching = Watching(incarnation, self._vitals)

    async def Run(
        self,
        request_iterator: AsyncIterator[worker_pb2.RunRequest],
        context: "Context[worker_pb2.RunRequest, worker_pb2.RunResponse]",
    ) -> AsyncIterator[worker_pb2.RunResponse]:
        """Entries in, replies out, until the orchestrator ends the stream."""
        await self._check_lives(context)
        outbox: Outbox = asyncio.Queue()
        self._outboxes.add(outbox)
        ready = Handover(asyncio.get_running_loop(), outbox.put_nowait)

        def sink(reply: worker_pb2.Reply) -> None:
            ready.put((reply, time.monotonic()))

        async def read() -> None:
            try:
                async for request in request_iterator:
                    _check_batch(request)
                    while max(outbox.qsize(), self._worker.num_unread) > _MAX_UNREAD:
                        await asyncio.sleep(_UNREAD_CHECK_S)
                    self._worker.submit(request.entries, sink)
            finally:
                outbox.put_nowait(None)

        reader = asyncio.create_task(read())
        try:
            while (batch := await _next_batch(outbox)) is not None:
                yield worker_pb2.RunResponse(replies=batch)
            if reader.done():
                await reader
            await self._check_lives(context)
        except OutriderError as error:
            await abort_with(context, error)
        finally:
            self._outboxes.discard(outbox)
            reader.cancel()
            self._worker.abandon(sink)
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.BaseError, OutriderError):
                await reader

    async def Bulk(
        self,
        request_iterator: AsyncIterator[worker_pb2.BulkRequest],
        context: "Context[worker_pb2.BulkRequest, worker_pb2.BulkResponse]",
    ) -> AsyncIterator[worker_pb2.BulkResponse]:
        """One response for each piece, in order; the sender waits for it before the next."""
        loop = asyncio.get_running_loop()
        async for request in request_iterator:
            answer: asyncio.Future[worker_pb2.BulkResponse] = loop.create_future()

            def sink(
                response: worker_pb2.BulkResponse,
                answer: "asyncio.Future[worker_pb2.BulkResponse]" = answer,
            ) -> None:
                loop.call_soon_threadsafe(_resolve, answer, response)

            self._worker.submit_bulk(request, sink)
            yield await answer

    async def Info(
        self,
        request: worker_pb2.InfoRequest,
        context: "Context[worker_pb2.InfoRequest, worker_pb2.InfoResponse]",
    ) -> worker_pb2.InfoResponse:
        await self._check_lives(context)
        return self.info()

    async def Watch(
        self,
        request: worker_pb2.WatchRequest,
        context: "Context[worker_pb2.WatchRequest, worker_pb2.WatchResponse]",
    ) -> AsyncIterator[worker_pb2.WatchResponse]:
        """How the worker is doing, until the watcher goes away or the worker has drained."""
        try:
            async for response in self._watching.responses(request):
                yield response
        except OutriderError as error:
            await abort_with(context, error)

    async def Probe(
        self,
        request: worker_pb2.ProbeRequest,
        context: "Context[worker_pb2.ProbeRequest, worker_pb2.ProbeResponse]",
    ) -> worker_pb2.ProbeResponse:
        found = worker_pb2.ProbeResponse(received_unix_us=unix_us())
        samples = min(request.samples, MAX_SAMPLES)
        if samples:
            found.machine.CopyFrom(await asyncio.to_thread(look_at_machine, self.loaded))
            if self._kv_store is not None:
                found.kv_store.CopyFrom(await look_at_kv_store(self._kv_store, samples))
            addresses = request.draft_addresses[:_MAX_PROBED]
            found.drafts.extend(await self.look_at_drafts(addresses, samples))
        found.sent_unix_us = unix_us()
        return found

    async def look_at_drafts(
        self, addresses: Sequence[str], samples: int
    ) -> list[worker_pb2.DraftFacts]:
        """The way to each; a worker that asks no drafts knows none."""
        return []

    def info(self) -> worker_pb2.InfoResponse:
        """What the worker is, now."""
        loaded, limits, load = self.loaded, self._worker.limits, self._worker.load
        return worker_pb2.InfoResponse(
            model=loaded.name,
            model_fingerprint=loaded.fingerprint,
            tokenizer_fingerprint=loaded.tokenizer.fingerprint,
            vocab_size=loaded.vocab_size,
            context_length=limits.context_length,
            dtype=loaded.dtype_name,
            device=str(loaded.device),
            incarnation=self._incarnation,
            protocol_min=PROTOCOL_VERSION,
            protocol_max=PROTOCOL_VERSION,
            capabilities=self._capabilities,
            kv_blocks_total=limits.num_blocks,
            kv_blocks_free=load.blocks_free,
            kv_block_tokens=self._worker.block_tokens,
            sessions=load.sessions,
            max_proposal_tokens=MAX_PROPOSAL_TOKENS,
            eos_token_ids=loaded.eos_token_ids,
            version=outrider.__version__,
            draining=self._worker.draining,
            max_rows=limits.max_rows,
            preemptions=load.preemptions,
            prefix_tokens=load.prefix_tokens,
            prefix_hit_tokens=load.prefix_hit_tokens,
            device_id=loaded.device_id,
            other_device_ids=loaded.other_device_ids,
            tensor_parallel=loaded.ranks,
            kv_store=self._kv_store.info() if self._kv_store else None,
        )

    async def fail(self, reason: str) -> None:
        """The worker can do nothing any more: all streams end with UNAVAILABLE."""
        self._failure = reason
        for outbox in self._outboxes:
            outbox.put_nowait(None)
        deadline = time.monotonic() + _FAIL_S
        while self._outboxes and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        await asyncio.sleep(_FLUSH_S)

    async def _check_lives(self, context: "Context[Any, Any]") -> None:
        if self._failure:
            await context.abort(grpc.StatusCode.UNAVAILABLE, self._failure)

    async def drain(self, timeout_s: float) -> None:
        """Take no new sessions; end the streams when no round has come for a while, or the time
        is over."""
        self._worker.draining = True
        self._watching.tell()
        now = asyncio.get_running_loop().time
        deadline = now() + timeout_s
        quiet_since = now()
        while now() < min(deadline, quiet_since + _QUIET_S):
            if self._worker.load.queued:
                quiet_since = now()
            await asyncio.sleep(0.02)
        for outbox in self._outboxes:
            outbox.put_nowait(None)
        self._watching.end()

    def _vitals(self) -> Vitals:
        load = self._worker.load
        return Vitals(
            draining=self._worker.draining,
            sessions=load.sessions,
            running=load.queued,
            queued=load.lacking_kv,
            queue_s=load.lacking_kv_s,
            kv_blocks_free=load.blocks_free,
            pass_s=load.pass_s,
            busy_s=load.busy_s,
        )


def _check_batch(request: worker_pb2.RunRequest) -> None:
    count = len(request.entries)
    require(1 <= count <= _MAX_BATCH, f"{count} entries; 1 to {_MAX_BATCH} are allowed", "entries")


async def _next_batch(outbox: Outbox) -> list[worker_pb2.Reply] | None:
    """Everything that is ready, at least one reply; None at the end of the stream."""
    item = await outbox.get()
    batch = []
    while item is not None:
        reply, done = item
        if not reply.header.more:  # Else the next round runs meanwhile, and counts the time.
            reply.header.elapsed_us += int((time.monotonic() - done) * 1e6)
        batch.append(reply)
        if outbox.empty() or len(batch) == _MAX_BATCH:
            return batch
        item = outbox.get_nowait()
    if batch:
        outbox.put_nowait(None)
    return batch or None


def _resolve(answer: "asyncio.Future[T]", value: T) -> None:
    if not answer.done():
        answer.set_result(value)


def chunks(data: bytes, size: int = 60 * 1024) -> list[bytes]:
    """Pieces of `data` that keep their message under 64 KiB."""
    return [data[i * size : (i + 1) * size] for i in range(math.ceil(len(data) / size))]
