"""The worker protocol over real gRPC: batches both ways, bulk, Info, and streams that end."""

import asyncio
import contextlib
import functools
import json
import time

import grpc
import grpc.aio
import pytest
from worker_harness import Owner, load, plain_greedy, random_tokens, refusal, serving, verdict_of

from outrider.errors import FailedPrecondition, InvalidArgument
from outrider.remote.link import WorkerLink
from outrider.rpc.channel import ChannelSecurity, open_channel
from outrider.rpc.server import Server, ServerConfig
from outrider.v1 import target_pb2, target_pb2_grpc, worker_pb2
from outrider.worker.service import WorkerConfig, _build
from outrider.worker.servicer import chunks
from services.target.service import CAPABILITIES, TargetConfig, TargetServicer, _make_tier

TIMEOUT_S = 20.0
SERVICE = "outrider.v1.TargetService"


@pytest.fixture(scope="module")
def folder(tiny_models):
    return tiny_models["target"]


@contextlib.asynccontextmanager
async def target(folder, **limits):
    """(worker bench, stub, servicer) of a target service in this process."""
    with serving(folder, **limits) as bench:
        servicer = TargetServicer(
            bench.worker, load(folder), incarnation=77, capabilities=CAPABILITIES
        )
        server = Server(ServerConfig(), [SERVICE])
        target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server.grpc)
        await server.start()
        try:
            async with open_channel(server.address) as channel:
                yield bench, target_pb2_grpc.TargetServiceStub(channel), servicer
        finally:
            await server.grpc.stop(None)


async def exchange(call, entries, count=None):
    """Send entries in one message; the replies in the order in which they come."""
    await call.write(worker_pb2.RunRequest(entries=entries))
    replies = []
    while len(replies) < (len(entries) if count is None else count):
        response = await asyncio.wait_for(call.read(), TIMEOUT_S)
        assert 1 <= len(response.replies) <= 1024
        replies += response.replies
    return replies


async def test_entries_of_many_sessions_travel_in_one_batch(folder):
    async with target(folder) as (bench, stub, _):
        call = stub.Run()
        owners = [Owner(bench, random_tokens(5 + n, seed=n)) for n in range(20)]
        opened = await exchange(call, [owner.open_entry() for owner in owners])
        assert all(reply.HasField("opened") for reply in opened)
        replies = await exchange(call, [owner.verify_entry() for owner in owners])
        by_session = {reply.header.session_id: reply for reply in replies}
        for owner in owners:
            verdict = verdict_of(by_session[owner.session_id])
            assert list(verdict.token_ids) == plain_greedy(folder, owner.tokens, 1)
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


async def test_no_entry_of_a_large_message_goes_without_an_answer(folder):
    async with target(folder) as (bench, stub, _):
        owner = Owner(bench, [1, 2])
        entries = [owner.open_entry()]
        for _ in range(1023):
            entry = owner.entry()
            entry.open.spec.CopyFrom(entries[0].open.spec)
            entries.append(entry)
        replies = await exchange(stub.Run(), entries)
        assert [reply.header.number for reply in replies] == list(range(1, 1025))


@pytest.mark.parametrize("count", [0, 1025])
async def test_a_message_of_too_many_entries_or_none_ends_its_stream(folder, count):
    async with target(folder) as (bench, stub, _):
        owner = Owner(bench, [1, 2])
        call = stub.Run()
        await call.write(worker_pb2.RunRequest(entries=[owner.open_entry()] * count))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "1 to 1024" in refused.value.details() and bench.worker.load.sessions == 0
        assert (await exchange(stub.Run(), [owner.open_entry()]))[0].HasField("opened")


async def test_who_sends_without_reading_is_read_no_further(folder, monkeypatch):
    """Else what it asked for, and nobody fetches, would pile up here."""
    monkeypatch.setattr("outrider.worker.servicer._MAX_UNREAD", 100)
    async with target(folder) as (bench, stub, _):
        call = stub.Run()
        sent = 0

        async def flood():
            nonlocal sent
            for _ in range(400):
                entries = unknown_entries(bench, 256)
                await call.write(worker_pb2.RunRequest(entries=entries))
                sent += len(entries)

        flooding = asyncio.create_task(flood())
        seen = -1
        async with asyncio.timeout(TIMEOUT_S):
            while seen != sent:  # until nothing moves any more
                seen = sent
                await asyncio.sleep(0.3)
        assert 0 < sent < 400 * 256
        answered = bench.worker.counters["refused_unknown_session"]
        assert answered < sent
        flooding.cancel()
        call.cancel()


def unknown_entries(bench, count):
    owner = Owner(bench, [1, 2])
    owner.session_id = "U" * 22
    return [owner.verify_entry(request_id="r" * 100) for _ in range(count)]


async def test_work_stops_when_its_stream_ends_and_the_session_stays(folder):
    async with target(folder, max_rows=4) as (bench, stub, _):
        owner = Owner(bench, random_tokens(300))
        call = stub.Run()
        await exchange(call, [owner.open_entry()])
        forward = bench.runner.forward
        started = asyncio.Event()
        loop = asyncio.get_running_loop()

        def slow(batch):
            loop.call_soon_threadsafe(started.set)
            time.sleep(0.005)
            return forward(batch)

        bench.runner.forward = slow
        await call.write(worker_pb2.RunRequest(entries=[owner.verify_entry()]))
        await asyncio.wait_for(started.wait(), TIMEOUT_S)
        call.cancel()
        async with asyncio.timeout(TIMEOUT_S):
            while bench.worker.load.queued:
                await asyncio.sleep(0.01)
        assert len(owner.cached) < 300 and bench.worker.load.sessions == 1
        bench.runner.forward = forward
        # The next stream goes on where the last one was cut.
        (reply,) = await exchange(stub.Run(), [owner.verify_entry(delta=())])
        verdict = verdict_of(reply)
        assert list(verdict.token_ids) == plain_greedy(folder, owner.tokens, 1)


async def test_long_prompts_travel_beside_the_rounds(folder):
    async with target(folder) as (bench, stub, _):
        owner = Owner(bench, random_tokens(400, seed=3))
        run, bulk = stub.Run(), stub.Bulk()
        await exchange(run, [owner.open_entry()])
        for start, stop in ((0, 150), (150, 300), (300, 400)):
            await bulk.write(owner.bulk_request(start, stop))
            answer = await asyncio.wait_for(bulk.read(), TIMEOUT_S)
            assert answer.held.have_len == stop
        await bulk.write(owner.bulk_request(200, 250, base_hash=1))
        answer = await asyncio.wait_for(bulk.read(), TIMEOUT_S)
        assert getattr(answer.need_tokens, "from") == 0
        (reply,) = await exchange(run, [owner.verify_entry(delta=())])
        verdict = verdict_of(reply)
        assert list(verdict.token_ids) == plain_greedy(folder, owner.tokens, 1)


async def test_info_tells_what_the_worker_is_now(folder):
    async with target(folder, num_blocks=64, context_length=100) as (bench, stub, _):
        info = await stub.Info(worker_pb2.InfoRequest(), timeout=TIMEOUT_S)
        loaded = load(folder)
        assert (info.model, info.incarnation) == ("target", 77)
        assert info.model_fingerprint == loaded.fingerprint
        assert info.tokenizer_fingerprint == loaded.tokenizer.fingerprint
        assert (info.vocab_size, info.context_length) == (258, 100)
        assert (info.dtype, info.device) == ("float32", "cpu")
        assert (info.protocol_min, info.protocol_max) == (1, 1)
        assert {"chain", "coupled", "rejection", "bulk"} <= set(info.capabilities)
        assert (info.kv_blocks_total, info.kv_blocks_free, info.kv_block_tokens) == (64, 64, 8)
        assert (info.sessions, list(info.eos_token_ids), info.draining) == (0, [257], False)
        owner = Owner(bench, random_tokens(20)).opened()
        verdict_of(owner.verify())
        info = await stub.Info(worker_pb2.InfoRequest(), timeout=TIMEOUT_S)
        assert (info.sessions, info.kv_blocks_free) == (1, 61)


async def test_draining_waits_for_work_and_takes_no_new_sessions(folder):
    async with target(folder) as (bench, stub, servicer):
        call = stub.Run()
        owner = Owner(bench, random_tokens(9))
        await exchange(call, [owner.open_entry()])
        draining = asyncio.create_task(servicer.drain(30.0))
        await asyncio.sleep(0)
        info = await stub.Info(worker_pb2.InfoRequest(), timeout=TIMEOUT_S)
        assert info.draining
        (reply,) = await exchange(call, [Owner(bench, [1]).open_entry()])
        assert refusal(reply)[0] == "draining"
        (reply,) = await exchange(call, [owner.verify_entry()])
        verdict_of(reply)
        # Once no round has come for a while, drain ends the idle stream and itself.
        await asyncio.wait_for(draining, TIMEOUT_S)
        assert await asyncio.wait_for(call.read(), TIMEOUT_S) is grpc.aio.EOF


async def test_the_tokenizer_arrives_in_pieces(folder):
    async with target(folder) as (_, stub, _):
        request = target_pb2.GetTokenizerRequest()
        pieces = [part.data async for part in stub.GetTokenizer(request, timeout=TIMEOUT_S)]
    content = json.loads(b"".join(pieces))
    assert content["tokenizer"] == json.loads((folder / "tokenizer.json").read_text())
    assert content["eos_token"] == "<|im_end|>" and "message" in content["chat_template"]


async def test_a_tokenizer_without_an_end_is_not_read_to_it(folder, monkeypatch):
    async with target(folder) as (_, _, servicer):
        monkeypatch.setattr("outrider.remote.link.MAX_TOKENIZER_BYTES", 3000)
        sent = 0

        async def endless(self, request, context):
            nonlocal sent
            while True:
                sent += 1000
                yield target_pb2.GetTokenizerResponse(data=b"x" * 1000)

        monkeypatch.setattr(TargetServicer, "GetTokenizer", endless)
        server = Server(ServerConfig(), [SERVICE])
        target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server.grpc)
        await server.start()
        link = WorkerLink(server.address, "target", ChannelSecurity())
        with pytest.raises(FailedPrecondition, match="more than 3000 bytes"):
            await link.fetch_tokenizer(TIMEOUT_S)
        await link.close()
        await server.grpc.stop(None)
        assert sent < 50_000_000


def test_pieces_keep_under_the_limit_and_lose_nothing():
    for size in (0, 1, 60 * 1024, 60 * 1024 + 1, 500_000):
        data = bytes(size % 251 for size in range(size))
        pieces = chunks(data)
        assert b"".join(pieces) == data and all(0 < len(p) < 64 * 1024 - 100 for p in pieces)


def build(config):
    make_tier = functools.partial(_make_tier, config=TargetConfig())
    return asyncio.to_thread(_build, config, "target", make_tier)


async def test_a_worker_is_built_from_its_settings(folder):
    config = WorkerConfig(
        model=str(folder),
        model_name="served",
        dtype="float32",
        device="cpu",
        threads=1,
        kv_memory="256KiB",
        context_length=100,
        max_rows=9,
    )
    worker, loaded = await build(config)
    # Two layers of keys and values, two KV heads of 16 floats, 32 tokens a block.
    assert worker.limits.num_blocks == (256 << 10) // (2 * 2 * 2 * 16 * 4 * 32)
    assert (worker.limits.context_length, worker.limits.max_rows) == (100, 9)
    assert (loaded.name, worker.block_tokens) == ("served", 32)
    small = WorkerConfig(model=str(folder), dtype="float32", threads=1, kv_memory="1KiB")
    with pytest.raises(InvalidArgument, match="too little"):
        await build(small)
