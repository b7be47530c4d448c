"""Work that waits for KV from a store: it has its place, and stands in nobody's way."""

import time

import pytest

from outrider.engine.block_manager import BlockManager
from outrider.engine.scheduler import Scheduler, Work
from outrider.engine.sequence import Sequence
from outrider.token_log import TokenLog

SIZE = 4


class Store:
    """Restores what tests say; remembers what it was offered."""

    def __init__(self):
        self.until = time.monotonic() + 60
        self.offers = []

    def begin(self, work):
        return self.until if work.pending > 8 else None

    def offer(self, work, num_blocks):
        self.offers.append((work, num_blocks))


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def scheduler(store):
    made = Scheduler(BlockManager(16, SIZE), max_rows=64, find_idle=list)
    made.store = store
    return made


def submit(scheduler, count, *, first=0):
    tokens = list(range(first, first + count))
    sequence = Sequence(log=TokenLog(tokens))
    work = Work(sequence, tokens, num_logits=1, reserve=count, deadline=float("inf"))
    scheduler.submit(work)
    return work


def compute(scheduler, chunk):
    work = chunk.work
    stop = work.computed + chunk.count
    work.sequence.wrote(work.computed, work.tokens[work.computed : stop])
    work.computed = stop


def batch_of(scheduler):
    return [(chunk.work, chunk.count) for chunk in scheduler.next_batch()]


def test_others_go_on_while_one_waits(scheduler):
    long, short = submit(scheduler, 20), submit(scheduler, 5, first=50)
    assert batch_of(scheduler) == [(short, 5)]
    assert list(scheduler.restoring) == [long] and scheduler.works == [short, long]
    assert len(long.sequence.blocks) == 5  # It has its place.


def test_what_was_brought_is_not_computed(scheduler, store):
    work = submit(scheduler, 20)
    assert batch_of(scheduler) == []
    scheduler.restored(work, 8)
    scheduler.restored(work, 16)
    scheduler.end_restore(work)
    assert work.sequence.cached == list(range(16)) and work.reused == 16
    assert batch_of(scheduler) == [(work, 4)]
    # Others share it from now on, and the store hears of it.
    assert store.offers == [(work, 4)]
    assert len(scheduler.blocks.find("", work.sequence.log, 5)) == 4


def test_what_was_not_brought_in_time_is_computed(scheduler, store):
    store.until = time.monotonic() - 1
    work = submit(scheduler, 20)
    assert batch_of(scheduler) == []
    scheduler.restored(work, 8)
    assert batch_of(scheduler) == [(work, 12)] and not scheduler.restoring
    scheduler.end_restore(work)  # The store's word comes late.
    assert scheduler.running == [work]


def test_it_is_known_how_long_there_is_nothing_to_do(scheduler, store):
    submit(scheduler, 20)
    assert scheduler.patience_s() == 0
    scheduler.next_batch()
    assert 50 < scheduler.patience_s() <= 60
    short = submit(scheduler, 5, first=50)
    assert scheduler.patience_s() == 0  # It has not been looked at.
    scheduler.next_batch()
    assert scheduler.patience_s() == 0
    for chunk in scheduler.next_batch():
        compute(scheduler, chunk)
    scheduler.finish(short)
    assert scheduler.patience_s() > 50


def test_one_without_a_place_gets_it_as_soon_as_there_may_be_one(scheduler):
    submit(scheduler, 44)
    short = submit(scheduler, 8, first=50)
    blocked = submit(scheduler, 24, first=70)
    [chunk] = scheduler.next_batch()
    assert chunk.work is short and list(scheduler.waiting) == [blocked]
    compute(scheduler, chunk)
    scheduler.finish(short)
    assert scheduler.patience_s() == 0  # Something has become free.
    assert scheduler.next_batch() == []
    assert list(scheduler.waiting) == [blocked] and scheduler.patience_s() > 50
    for work in scheduler.drop(lambda work: work is not blocked):
        scheduler.release(work.sequence)
    scheduler.next_batch()
    assert list(scheduler.restoring) == [blocked]


def test_dropped_work_gives_its_place_back_and_keeps_what_was_brought(scheduler):
    work = submit(scheduler, 20)
    scheduler.next_batch()
    scheduler.restored(work, 8)
    assert scheduler.drop(lambda dead: dead is work) == [work]
    assert not scheduler.works and len(work.sequence.blocks) == 2
    scheduler.end_restore(work)
    assert not scheduler.works
    scheduler.release(work.sequence)
    assert scheduler.blocks.num_free == 16


def test_a_running_work_offers_its_blocks_as_they_fill(scheduler, store):
    work = submit(scheduler, 7)
    [chunk] = scheduler.next_batch()
    compute(scheduler, chunk)
    for token in range(100, 106):
        work.sequence.log.append([token])
        work.tokens.append(token)
        work.reserve = len(work.tokens)
        assert scheduler.go_on(work)
        [chunk] = scheduler.next_batch()
        compute(scheduler, chunk)
    scheduler.finish(work)
    assert [blocks for _, blocks in store.offers] == [1, 2, 3]
    assert len(scheduler.blocks.find("", work.sequence.log, 3)) == 3
