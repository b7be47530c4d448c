"""Workers that say nothing any more, and those that only seem so."""

import asyncio
import contextlib
import time

import pytest
from test_discovery_sources import until
from worker_fakes import FakeWorker

from outrider.errors import Unavailable
from outrider.remote.link import WorkerLink
from outrider.remote.silence import Silence
from outrider.rpc.channel import ChannelSecurity
from outrider.v1 import worker_pb2

LIMIT_S = 0.4


@contextlib.asynccontextmanager
async def linked(worker: FakeWorker):
    async with worker:
        silence = Silence(LIMIT_S, turn_s=0.05)
        link = WorkerLink(worker.address, "target", ChannelSecurity(), watch=True, silence=silence)
        link.start()
        try:
            await link.wait_up(5)
            yield link
        finally:
            worker.asleep = False
            await link.close()


async def test_a_worker_that_says_nothing_is_away_until_it_speaks_again():
    """Its connection is as open as ever. What waits for it is told at once."""
    async with linked(worker := FakeWorker()) as link:
        first = link.info
        worker.asleep = True
        started = time.monotonic()
        reply = asyncio.create_task(link.send(worker_pb2.Entry()).next(10))
        piece = asyncio.create_task(link.send_bulk([worker_pb2.BulkRequest()], 10))
        probe = asyncio.create_task(link.measure(1, within_s=10))
        for waiting in (reply, piece, probe):
            with pytest.raises(Unavailable, match="went away"):
                await waiting
        assert LIMIT_S * 0.8 < time.monotonic() - started < 3 and not link.up
        with pytest.raises(Unavailable):
            link.send(worker_pb2.Entry())
        await asyncio.sleep(0.3)
        assert not link.up, "whoever merely takes connections is not there"
        worker.asleep = False
        await link.wait_up(5)
        assert link.info is not first and link.info == first
        assert (await link.send_bulk([worker_pb2.BulkRequest()], 5)).HasField("held")


def a_close(session_id: str) -> worker_pb2.Entry:
    entry = worker_pb2.Entry()
    entry.header.session_id, entry.header.number = session_id, 7
    entry.close.SetInParent()
    return entry


async def test_what_ends_meanwhile_is_closed_there_when_it_is_back():
    """What was on its way to it, and what ended while it was away; not in its next life."""
    async with linked(worker := FakeWorker()) as link:
        first = link.incarnation
        link.close_session(a_close("before"), first)
        await until(lambda: worker.closed == ["before"])
        worker.asleep = True
        link.close_session(a_close("on its way"), first)
        await until(lambda: not link.up)
        link.close_session(a_close("away"), first)
        worker.asleep = False
        await link.wait_up(5)
        await until(lambda: worker.closed == ["before", "on its way", "away"])
        await until(lambda: not link._closes)

        await worker.stop()
        await until(lambda: not link.up)
        link.close_session(a_close("last life"), first)
        await worker.start()
        await link.wait_up(10)
        link.close_session(a_close("last life"), first)
        link.close_session(a_close("this life"), link.incarnation)
        await until(lambda: worker.closed[3:] == ["this life"])


async def test_a_worker_that_only_computes_for_long_is_there():
    """It answers no entry, and goes on telling how it is doing."""
    async with linked(FakeWorker()) as link:
        first = link.info
        waiting = asyncio.create_task(link.send(worker_pb2.Entry()).next(10))
        await asyncio.sleep(4 * LIMIT_S)
        assert link.info is first and not waiting.done()
        waiting.cancel()


async def test_a_worker_that_cannot_tell_is_not_asked_to():
    async with linked(FakeWorker(watches=False)) as link:
        first = link.info
        await asyncio.sleep(3 * LIMIT_S)
        assert link.info is first


async def test_who_slept_himself_accuses_nobody():
    """A process that was stopped has heard nothing, which is not the fault of those who spoke: it
    has yet to read what they said."""
    silence = Silence(LIMIT_S, turn_s=0.05)
    lasts = asyncio.create_task(silence.lasts())
    for _ in range(3):
        await asyncio.sleep(0.08)
        time.sleep(2 * LIMIT_S)
        await asyncio.sleep(0.01)
        assert not lasts.done()
        silence.heard()
    await asyncio.wait_for(lasts, 3)


async def test_orchestrators_place_nothing_with_a_silent_worker():
    from test_registry_workers import registry_of, static, there

    async with FakeWorker() as one, FakeWorker() as other:
        async with registry_of(static(one, other)) as registry:
            for worker in registry.targets.workers:
                worker.link._silence.limit_s = LIMIT_S
            one.asleep = True
            await until(lambda: there(registry) == [other.address])
            one.asleep = False
            await until(lambda: len(there(registry)) == 2)
