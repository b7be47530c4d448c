"""Asking the index who holds a prefix: right hashes, in nobody's way, and left alone when away."""

import asyncio
import time
from types import SimpleNamespace

import pytest
from seat_fakes import Clock, FakeRegistry, demand, worker

from outrider.kv_store.index import index_salt
from outrider.token_log import TokenLog
from outrider.types import chain_hash
from services.orchestrator.prefix_holders import MAX_TOKENS, NOBODY, PrefixHolders
from services.orchestrator.prompt_threads import PromptThreads
from services.orchestrator.seating import Room, Seating

MODEL = SimpleNamespace(info=SimpleNamespace(kv_block_tokens=16, model_fingerprint="f00d"))


class FakeIndex:
    """Holders that a test names; `delay_s` late, or failing."""

    def __init__(self) -> None:
        self.failures = 0
        self.fails = False
        self.delay_s = 0.0
        self.found: dict[int, int] = {}
        self.asked: list[tuple[str, list[int]]] = []
        self.closed = False

    async def holders(self, salt, hashes):
        self.asked.append((salt, list(hashes)))
        await asyncio.sleep(self.delay_s)
        self.failures += self.fails
        return {} if self.fails else self.found

    async def close(self):
        self.closed = True


@pytest.fixture
async def scene():
    index, clock = FakeIndex(), Clock()
    holders = PrefixHolders(index, PromptThreads(), wait_s=0.05, now=clock)
    yield index, clock, holders
    await holders.close()
    assert index.closed


async def test_hashes_are_those_that_workers_tell(scene):
    index, _, holders = scene
    index.found = {7: 6, 8: 1}
    tokens = list(range(1000, 1100))
    assert await holders.of(MODEL, "alice", TokenLog(tokens[:40]), tokens[40:]) == {7: 3, 8: 0}
    [(salt, hashes)] = index.asked
    assert salt == index_salt("f00d", "", "alice")
    assert hashes == [chain_hash(0, tokens[: 16 * n]) for n in range(1, 7)]
    log = TokenLog(tokens)
    await holders.of(MODEL, "bob", log, ())
    assert index.asked[1] == (index_salt("f00d", "", "bob"), hashes)
    assert len(log) == 100  # It is the session's, and left as it was.


async def test_nobody_is_asked_where_nothing_can_be_known(scene):
    index, _, holders = scene
    assert await holders.of(MODEL, "alice", TokenLog(), [1] * 15) is NOBODY
    untold = SimpleNamespace(info=SimpleNamespace(kv_block_tokens=0, model_fingerprint="f00d"))
    assert await holders.of(untold, "alice", TokenLog(), [1] * 99) is NOBODY
    assert not index.asked
    await holders.of(MODEL, "alice", TokenLog(), [1] * (MAX_TOKENS + 999))
    assert len(index.asked[0][1]) == MAX_TOKENS // 16


async def test_a_late_answer_is_not_waited_for_and_nobody_else_asks_meanwhile(scene):
    index, _, holders = scene
    index.delay_s = 0.3
    started = time.monotonic()
    assert await holders.of(MODEL, "alice", TokenLog(), [1] * 99) is NOBODY
    assert await holders.of(MODEL, "alice", TokenLog(), [1] * 99) is NOBODY
    assert time.monotonic() - started < 0.25 and len(index.asked) == 1
    assert holders.counters == {"late": 1}
    await asyncio.sleep(0.4)
    index.delay_s, index.found = 0.0, {7: 2}
    assert await holders.of(MODEL, "alice", TokenLog(), [1] * 99) == {7: 1}


async def test_a_store_that_is_away_is_left_alone_longer_each_time(scene):
    index, clock, holders = scene
    index.fails = True
    for pause_s in (1.0, 2.0, 4.0):
        for _ in range(3):
            assert not await holders.of(MODEL, "alice", TokenLog(), [1] * 99)
        clock.now += pause_s * 0.9
        assert not await holders.of(MODEL, "alice", TokenLog(), [1] * 99)
        clock.now += pause_s * 0.2
    assert len(index.asked) == 3
    index.fails, index.found = False, {7: 2}
    assert await holders.of(MODEL, "alice", TokenLog(), [1] * 99) == {7: 1}


def test_what_the_index_knows_counts_like_what_was_placed_here():
    registry = FakeRegistry()
    registry.targets.workers = [worker(f"t{n}", 100 + n) for n in range(3)]
    seating = Seating(registry, Room())
    blocks = tuple(range(50, 58))
    for key in (100, 101, 102):
        seat = seating.try_seat(demand(blocks=blocks[:4] + (key,) * 4, holders={key: 8}))
        assert seat is not None and seat.target is not None
        assert seat.target.incarnation == key
        seat.leave()
    assert seating.counters["index"] == 3
    # One that is not here any more is nobody.
    seat = seating.try_seat(demand(blocks=(1, 2), holders={999: 2}))
    assert seat is not None and seating.counters["index"] == 3


def test_the_index_is_asked_only_where_there_is_a_choice():
    registry = FakeRegistry()
    registry.targets.workers = [worker("t0", 100)]
    seating = Seating(registry, Room())
    assert not seating.may_choose(demand().model, "s")
    registry.targets.workers.append(worker("t1", 101))
    assert seating.may_choose(demand().model, "s")
    seat = seating.try_seat(demand())
    seat.leave(keep=True)
    assert not seating.may_choose(demand().model, seat.demand.session_id)
