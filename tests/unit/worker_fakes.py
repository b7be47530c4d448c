"""Workers that serve the worker protocol as far as being found goes: Info, Watch, tokenizer."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from outrider.trips import unix_us
from outrider.types import new_nonce
from outrider.v1 import draft_pb2_grpc, target_pb2, target_pb2_grpc, worker_pb2
from tiny import make_tokenizer

TOKENIZER = json.dumps(
    {
        "tokenizer": make_tokenizer().to_str(),
        "chat_template": None,
        "bos_token": None,
        "eos_token": None,
    }
).encode()


class FakeWorker(target_pb2_grpc.TargetServiceServicer, draft_pb2_grpc.DraftServiceServicer):
    """A worker of either tier on a port. `tell` changes what Watch says."""

    def __init__(self, tier: str = "target", *, watches: bool = True, **info: Any) -> None:
        self.tier = tier
        self.address = ""
        self.info = worker_pb2.InfoResponse(
            **{
                "model": "m",
                "model_fingerprint": "f1",
                "tokenizer_fingerprint": "t1",
                "vocab_size": 258,
                "context_length": 512,
                "protocol_min": 1,
                "protocol_max": 1,
                "kv_blocks_total": 100,
                "kv_block_tokens": 32,
                "max_rows": 64,
                **info,
            }
        )
        self.watches = watches
        self.ahead_us = 0
        """How far its clock is ahead."""
        self.probes = True
        self.asleep = False
        """It says nothing, like a process that was stopped."""
        self.closed: list[str] = []
        """Sessions that it was asked to close."""
        self.watchers = 0
        self.tokenizers = 0
        self._vitals = worker_pb2.WatchResponse(pass_us=1000)
        self._news = asyncio.Event()
        self._server: grpc.aio.Server

    async def __aenter__(self) -> "FakeWorker":
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Serve, as another incarnation, at the port of the last time if there was one."""
        self.info.incarnation = new_nonce()
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        add: Any = (
            target_pb2_grpc.add_TargetServiceServicer_to_server
            if self.tier == "target"
            else draft_pb2_grpc.add_DraftServiceServicer_to_server
        )
        add(self, self._server)
        port = self._server.add_insecure_port(self.address or "127.0.0.1:0")
        self.address = f"127.0.0.1:{port}"
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)

    def tell(self, **vitals: Any) -> None:
        self._vitals = worker_pb2.WatchResponse(**vitals)
        self._news.set()
        self._news = asyncio.Event()

    async def Info(self, request: Any, context: Any) -> worker_pb2.InfoResponse:
        await self._wakes()
        return self.info

    async def Run(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async for request in request_iterator:
            for entry in request.entries:
                if self.asleep or not entry.HasField("close"):
                    continue
                self.closed.append(entry.header.session_id)
                reply = worker_pb2.Reply(closed=worker_pb2.Closed())
                reply.header.session_id = entry.header.session_id
                reply.header.number = entry.header.number
                yield worker_pb2.RunResponse(replies=[reply])

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        if not self.watches:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "an older worker")
        self.watchers += 1
        while True:
            news = self._news
            await self._wakes()
            yield self._vitals
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), 0.1)

    async def Bulk(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async for _ in request_iterator:
            await self._wakes()
            yield worker_pb2.BulkResponse(held=worker_pb2.Opened())

    async def _wakes(self) -> None:
        while self.asleep:
            await asyncio.sleep(0.01)

    async def Probe(self, request: Any, context: Any) -> worker_pb2.ProbeResponse:
        if not self.probes:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "an older worker")
        now = unix_us() + self.ahead_us
        found = worker_pb2.ProbeResponse(received_unix_us=now, sent_unix_us=now)
        if request.samples:
            found.machine.max_open_files = 1 << 20
            for address in request.draft_addresses:
                draft = found.drafts.add(address=address)
                draft.round_trips.samples, draft.round_trips.p50_us = request.samples, 300
        return found

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.tokenizers += 1
        yield target_pb2.GetTokenizerResponse(data=TOKENIZER)
