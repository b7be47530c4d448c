"""Which rows run next, who waits for memory, and who loses KV."""

import random

import pytest

from outrider.engine.block_manager import BlockManager
from outrider.engine.scheduler import Scheduler, Work
from outrider.engine.sequence import Sequence


class Pool:
    """A scheduler over small blocks, and passes that compute nothing."""

    def __init__(self, num_blocks=8, max_rows=64):
        self.idle: list[Sequence] = []
        self.blocks = BlockManager(num_blocks, 4)
        self.scheduler = Scheduler(self.blocks, max_rows=max_rows, find_idle=lambda: self.idle)

    def submit(self, tokens, *, num_logits=1, reserve=None, sequence=None, start=0):
        work = Work(
            sequence=sequence or Sequence(),
            tokens=list(range(start, start + tokens)),
            num_logits=num_logits,
            reserve=reserve or tokens,
            deadline=float("inf"),
        )
        self.scheduler.submit(work)
        return work

    def run(self):
        """One pass; the (work, rows) of it. Completed work is finished."""
        batch = self.scheduler.next_batch()
        rows = []
        for chunk in batch:
            work = chunk.work
            completes = chunk.completes
            stop = work.computed + chunk.count
            work.sequence.wrote(work.computed, work.tokens[work.computed : stop])
            work.computed = stop
            rows.append((work, chunk.count))
            if completes:
                self.scheduler.finish(work)
        return rows

    def run_all(self):
        order = []
        for _ in range(1000):
            if not self.scheduler.works:
                return order
            before = self.scheduler.works
            self.run()
            order += [work for work in before if work not in self.scheduler.works]
        raise AssertionError("work is left over")


def test_work_waits_until_its_worst_case_fits():
    pool = Pool(num_blocks=4)
    first, second = pool.submit(4, reserve=12), pool.submit(4, reserve=8)
    assert pool.scheduler.next_batch()[0].work is first
    assert list(pool.scheduler.waiting) == [second] and second.started is None
    assert pool.blocks.num_free == 1
    pool.scheduler.finish(first)
    assert [chunk.work for chunk in pool.scheduler.next_batch()] == [second]


def test_first_in_the_queue_is_not_overtaken_by_smaller_work():
    pool = Pool(num_blocks=4)
    running, large, small = pool.submit(12), pool.submit(16), pool.submit(4)
    assert [work for work, _ in pool.run()] == [running]
    # A session of its own keeps the blocks of what ran, as idle KV.
    pool.idle = [running.sequence]
    assert [work for work, _ in pool.run()] == [large]
    pool.idle = [large.sequence]
    assert [work for work, _ in pool.run()] == [small]


def test_idle_kv_goes_first_and_only_as_much_as_is_needed():
    pool = Pool(num_blocks=8)
    old, young = pool.submit(8), pool.submit(8)
    pool.run()
    pool.idle = [old.sequence, young.sequence]
    late = pool.submit(24)
    assert (late, 24) in pool.run()
    assert not old.sequence.cached and not old.sequence.blocks
    assert young.sequence.cached == list(range(8)) and len(young.sequence.blocks) == 2
    assert pool.scheduler.preemptions == 1


def test_queued_work_loses_its_kv_after_idle_ones_and_last_come_first():
    pool = Pool(num_blocks=8)
    works = [pool.submit(8) for _ in range(4)]
    pool.run()
    idle, *sequences = [work.sequence for work in works]
    pool.idle = [idle]
    first, second, third = (
        pool.submit(32 if n == 0 else 9, sequence=sequence) for n, sequence in enumerate(sequences)
    )
    needs = pool.scheduler.next_batch()
    assert [chunk.work for chunk in needs] == [first]
    assert [s.cached for s in (idle, second.sequence, third.sequence)] == [[], [], []]
    pool.scheduler.finish(first)
    # Nothing is lost: what was preempted is computed again from its tokens.
    pool.idle = [first.sequence]
    assert pool.run_all() == [second, third]
    assert second.sequence.cached == third.sequence.cached == list(range(9))


def test_preemption_takes_no_more_of_the_queue_than_needed():
    pool = Pool(num_blocks=8)
    held = [pool.submit(8) for _ in range(3)]
    pool.run()
    pool.submit(16)
    second, third = (pool.submit(8, sequence=work.sequence) for work in held[1:])
    pool.idle = [held[0].sequence]
    pool.scheduler.next_batch()
    assert held[0].sequence.cached == []
    assert second.sequence.cached and third.sequence.cached


def test_the_last_of_the_queue_is_preempted_first():
    pool = Pool(num_blocks=8)
    held = [pool.submit(8) for _ in range(3)]
    pool.run()
    pool.scheduler.release(held[0].sequence)
    # The last one's two blocks and the four that are free are enough.
    pool.submit(24)
    second, third = (pool.submit(9, sequence=work.sequence) for work in held[1:])
    pool.scheduler.next_batch()
    assert second.sequence.cached == list(range(8)) and third.sequence.cached == []


def test_running_work_never_loses_its_kv():
    pool = Pool(num_blocks=4, max_rows=4)
    long = pool.submit(16)
    pool.run()
    pool.submit(16)
    for _ in range(3):
        assert [work for work, _ in pool.run()] == [long]
    assert long.sequence.cached == list(range(16))


def test_long_prompts_run_in_chunks_and_short_work_goes_first():
    pool = Pool(num_blocks=64, max_rows=16)
    long = pool.submit(40)
    assert pool.run() == [(long, 16)]
    verify, decode = pool.submit(5, num_logits=5), pool.submit(1)
    assert pool.run() == [(decode, 1), (verify, 5), (long, 10)]
    assert pool.run() == [(long, 14)]
    assert not pool.scheduler.works


def test_rows_of_a_pass_never_exceed_the_budget():
    pool = Pool(num_blocks=400, max_rows=16)
    rng = random.Random(0)
    for _ in range(40):
        pool.submit(rng.randrange(1, 40))
    while pool.scheduler.works:
        assert 1 <= sum(count for _, count in pool.run()) <= 16


def test_rows_whose_logits_are_wanted_stay_together():
    """A pass hands out logits of its own rows only, so the wanted ones come in one pass."""
    rng = random.Random(1)
    pool = Pool(num_blocks=4000, max_rows=16)
    for _ in range(200):
        tokens = rng.randrange(1, 40)
        pool.submit(tokens, num_logits=min(tokens, rng.randrange(1, 10)))
    split = 0
    while pool.scheduler.works:
        batch = pool.scheduler.next_batch()
        assert sum(chunk.count for chunk in batch) <= 16
        for chunk in batch:
            left = chunk.work.pending - chunk.count
            assert left == 0 or left >= chunk.work.num_logits
            assert chunk.count >= chunk.work.num_logits or not chunk.completes
            split += not chunk.completes
        pool.run()
    assert split > 20


def test_more_wanted_rows_than_the_budget_still_run():
    pool = Pool(num_blocks=64, max_rows=8)
    wide, narrow = pool.submit(30, num_logits=20), pool.submit(3)
    assert pool.run_all() == [narrow, wide]


def test_a_long_prompt_ends_however_much_short_work_comes():
    pool = Pool(num_blocks=4000, max_rows=16)
    long = pool.submit(40)
    passes = 0
    while long in pool.scheduler.works and passes < 20:
        for _ in range(20):
            pool.submit(1)
        pool.run()
        passes += 1
    assert 2 < passes <= 10 and long.sequence.cached == list(range(40))


def test_reuse_starts_behind_the_common_prefix():
    pool = Pool()
    first = pool.submit(8)
    pool.run()
    again = pool.submit(12, sequence=first.sequence)
    assert pool.run() == [(again, 4)]
    other = pool.submit(12, sequence=first.sequence, start=1)
    assert pool.run() == [(other, 12)]


def test_finished_work_gives_back_what_it_did_not_fill():
    pool = Pool(num_blocks=8)
    work = pool.submit(5, reserve=30)
    pool.scheduler.next_batch()
    assert pool.blocks.num_free == 0
    pool.run()
    assert pool.blocks.num_free == 6 and len(work.sequence.blocks) == 2


@pytest.mark.parametrize("running", [True, False])
def test_dropped_work_gives_back_its_reserve(running):
    pool = Pool(num_blocks=8, max_rows=4)
    blocker = pool.submit(32) if not running else None
    dead, alive = pool.submit(10, reserve=30), pool.submit(3)
    pool.run()
    assert pool.scheduler.drop(lambda work: work is dead) == [dead]
    assert dead not in pool.scheduler.works and alive in pool.scheduler.works
    assert len(dead.sequence.blocks) == pool.blocks.blocks_for(len(dead.sequence.cached))
    pool.scheduler.release(dead.sequence)
    if blocker:
        pool.scheduler.drop(lambda work: work is blocker)
        pool.scheduler.release(blocker.sequence)
    assert pool.run_all() == [alive]
    pool.scheduler.release(alive.sequence)
    assert pool.blocks.num_free == 8


def test_everything_submitted_ends_and_blocks_return_over_random_mixes():
    rng = random.Random(5)
    pool = Pool(num_blocks=12, max_rows=8)
    sequences = [Sequence() for _ in range(10)]
    busy: dict[int, Work] = {}
    done = dropped = 0
    for _ in range(3000):
        idle = [s for s in sequences if id(s) not in busy]
        pool.idle = idle
        roll = rng.random()
        if idle and roll < 0.4:
            sequence = rng.choice(idle)
            tokens = rng.randrange(1, 45)
            work = pool.submit(
                tokens,
                sequence=sequence,
                start=rng.randrange(2),
                num_logits=min(tokens, rng.randrange(1, 6)),
                reserve=min(tokens + rng.randrange(4), 48),
            )
            busy[id(sequence)] = work
        elif idle and roll < 0.5:
            pool.scheduler.release(rng.choice(idle))
        elif busy and roll < 0.55:
            dead = rng.choice(list(busy.values()))
            dropped += len(pool.scheduler.drop(lambda work, dead=dead: work is dead))
            del busy[id(dead.sequence)]
        pool.idle = [s for s in sequences if id(s) not in busy]
        pool.run()
        for key, work in list(busy.items()):
            if work not in pool.scheduler.works:
                assert work.sequence.cached == work.tokens
                del busy[key]
                done += 1
        held = [block for s in sequences for block in s.blocks]
        assert len(held) == len(set(held)) == 12 - pool.blocks.num_free
        for s in sequences:
            assert len(s.blocks) * 4 >= len(s.cached)
    assert done > 500 and dropped > 30 and pool.scheduler.preemptions > 100
    while pool.scheduler.works:
        pool.idle = [s for s in sequences if all(w.sequence is not s for w in pool.scheduler.works)]
        pool.run()
    for sequence in sequences:
        pool.scheduler.release(sequence)
    assert pool.blocks.num_free == 12
