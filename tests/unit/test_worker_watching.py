"""How a worker is doing, as those hear it who watch it."""

import asyncio
import dataclasses
import time

import grpc
import pytest
from test_worker_streams import TIMEOUT_S, exchange, target
from worker_harness import Owner, random_tokens

from outrider.errors import InvalidArgument
from outrider.v1 import worker_pb2
from outrider.worker.watching import DEFAULT_INTERVAL_S, Vitals, Watching, interval_of

IDLE = Vitals(
    draining=False,
    sessions=0,
    running=0,
    queued=0,
    queue_s=0.0,
    kv_blocks_free=9,
    pass_s=0.0,
    busy_s=0.0,
)


@pytest.fixture
def folder(tiny_models):
    return tiny_models["target"]


class Told:
    """A watcher of something whose vitals the test sets."""

    def __init__(self, interval_ms: int) -> None:
        self.vitals = IDLE
        self.watching = Watching(7, lambda: self.vitals)
        request = worker_pb2.WatchRequest(interval_ms=interval_ms)
        self.responses = self.watching.responses(request)

    async def next(self) -> worker_pb2.WatchResponse:
        return await asyncio.wait_for(anext(self.responses), 5)


async def test_the_first_word_comes_at_once_and_others_at_intervals():
    told = Told(50)
    started = time.monotonic()
    first = await told.next()
    assert time.monotonic() - started < 0.04
    assert (first.incarnation, first.kv_blocks_free, first.draining) == (7, 9, False)
    told.vitals = dataclasses.replace(
        IDLE,
        sessions=3,
        running=2,
        queued=1,
        queue_s=0.5,
        kv_blocks_free=4,
        pass_s=0.01,
        busy_s=0.02,
    )
    second = await told.next()
    elapsed = time.monotonic() - started
    assert elapsed >= 0.05
    assert (second.sessions, second.running, second.queued, second.kv_blocks_free) == (3, 2, 1, 4)
    assert (second.queue_us, second.pass_us) == (500_000, 10_000)
    assert 0.02 / elapsed / 1.5 < second.busy <= 0.02 / 0.05 * 1.01
    assert (await told.next()).busy == 0.0, "since the word before"


async def test_draining_is_told_at_once_and_the_end_ends_it():
    told = Told(60_000)
    await told.next()
    waiting = asyncio.create_task(told.next())
    await asyncio.sleep(0)
    told.vitals = dataclasses.replace(IDLE, draining=True)
    told.watching.tell()
    assert (await waiting).draining
    told.watching.end()
    assert [response async for response in told.responses] == []


def test_intervals_are_checked():
    assert interval_of(worker_pb2.WatchRequest()) == DEFAULT_INTERVAL_S
    assert interval_of(worker_pb2.WatchRequest(interval_ms=20)) == 0.02
    for wrong in (1, 19, 60_001):
        with pytest.raises(InvalidArgument) as refused:
            interval_of(worker_pb2.WatchRequest(interval_ms=wrong))
        assert refused.value.field == "interval_ms"


async def test_a_real_worker_tells_of_its_work_and_that_it_drains(folder):
    async with target(folder, num_blocks=64) as (bench, stub, servicer):
        watch = stub.Watch(worker_pb2.WatchRequest(interval_ms=20), timeout=TIMEOUT_S)
        first = await watch.read()
        assert (first.incarnation, first.sessions, first.kv_blocks_free) == (77, 0, 64)
        call = stub.Run()
        owner = Owner(bench, random_tokens(20))
        await exchange(call, [owner.open_entry(), owner.verify_entry()])
        async with asyncio.timeout(TIMEOUT_S):
            while (now := await watch.read()).kv_blocks_free == 64:
                pass
        assert (now.sessions, now.running, now.queued, now.queue_us) == (1, 0, 0, 0)
        assert now.pass_us > 0
        seldom = stub.Watch(worker_pb2.WatchRequest(interval_ms=60_000), timeout=TIMEOUT_S)
        assert not (await seldom.read()).draining
        draining = asyncio.create_task(servicer.drain(30.0))
        assert (await asyncio.wait_for(seldom.read(), TIMEOUT_S)).draining
        assert not draining.done(), "long before it has drained"
        await asyncio.wait_for(draining, TIMEOUT_S)
        async with asyncio.timeout(TIMEOUT_S):
            while await watch.read() is not grpc.aio.EOF:
                pass


async def test_a_watch_that_asks_for_too_much_is_refused(folder):
    async with target(folder) as (_, stub, _servicer):
        watch = stub.Watch(worker_pb2.WatchRequest(interval_ms=1), timeout=TIMEOUT_S)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await watch.read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
