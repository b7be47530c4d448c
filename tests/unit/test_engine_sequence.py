"""What a sequence knows of its KV: as if all tokens were compared each time, at the price of those
that have changed."""

import random
from collections import Counter

import pytest

from outrider.engine import sequence as module
from outrider.engine.block_manager import BlockManager, Chain
from outrider.engine.scheduler import Scheduler, Work
from outrider.engine.sequence import Sequence
from outrider.token_log import TokenLog

BLOCK = 4


def shared(one, other):
    """The definition: all tokens compared, from the first on."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


class Course:
    """Random changes of a sequence, and its KV as a list of its own."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.sequence = Sequence()
        self.cached = []
        self.tokens = self.sequence.line()
        self.seen = Counter()

    def ids(self):
        return self.rng.choices(range(2), k=self.rng.randrange(6))

    def change(self):
        kinds = [self.append, self.cut, self.replace, self.take, self.stand, self.write]
        kinds += [self.compute, self.compute, self.forget]
        change = self.rng.choice(kinds) if self.rng.random() > 0.02 else self.let_go
        change()
        self.seen[change.__name__] += 1

    def append(self):
        self.sequence.log.append(self.ids())

    def cut(self):
        log = self.sequence.log
        log.cut(self.rng.randrange(max(len(log) - 6, 0), len(log) + 2))

    def replace(self):
        """As an entry does that brings another base."""
        log, ids = self.sequence.log, self.ids()
        start = self.rng.randrange(len(log) + 1)
        base = TokenLog([*log.tokens[:start], *ids])
        assert log.replace_tail(start, ids, len(base), base.prefix_hash(len(base)))

    def take(self):
        log = self.sequence.log
        start = self.rng.randrange(len(log) + 1)
        log.take(TokenLog([*log.tokens[:start], *self.ids()]).tail(start))

    def stand(self):
        """A work begins."""
        guesses = self.ids()
        self.tokens = self.sequence.line(guesses)
        assert self.tokens == [*self.sequence.log.tokens, *guesses]

    def write(self):
        """KV of anything, as of a draft's guesses."""
        start, ids = self.rng.randrange(len(self.cached) + 1), self.ids()
        self.sequence.wrote(start, ids)
        self.cached[start:] = ids

    def compute(self):
        """A pass over what the work lacks."""
        start = shared(self.cached, self.tokens)
        stop = self.rng.randrange(start, len(self.tokens) + 1)
        self.sequence.wrote(start, self.tokens[start:stop])
        self.cached[start:] = self.tokens[start:stop]

    def forget(self):
        start = self.rng.randrange(len(self.cached) + 1)
        self.sequence.forget(start)
        del self.cached[start:]

    def let_go(self):
        before = list(self.tokens)
        self.sequence.let_go()
        assert self.tokens == before, "a work that waits still has its tokens"
        self.cached = []

    def check(self):
        """What is asked for changes what is known, so not all is asked each time."""
        sequence, log = self.sequence, self.sequence.log.tokens
        assert sequence.cached == self.cached
        in_log, in_line = shared(self.cached, log), shared(self.cached, self.tokens)
        if self.rng.random() < 0.5:
            assert sequence.committed_kv() == in_log
        if self.rng.random() < 0.5:
            assert sequence.usable_kv(self.tokens, 0) == in_line
        if self.rng.random() < 0.1:
            assert sequence.usable_kv(list(self.tokens), 0) == in_line
        self.seen["parts from the log"] += 0 < in_log < min(len(self.cached), len(log))
        self.seen["parts from the line"] += 0 < in_line < min(len(self.cached), len(self.tokens))
        self.seen["goes on as the log"] += in_log > in_line > 0


@pytest.mark.parametrize("seed", range(4))
def test_what_is_shared_is_what_comparing_all_tokens_says(seed):
    course = Course(seed)
    for _ in range(4000):
        course.change()
        course.check()
    assert min(course.seen.values()) >= 40, course.seen


@pytest.fixture
def looked_at(monkeypatch):
    """Tokens that have been compared, counted."""
    counts = Counter()
    compare = module.common_prefix

    def counted(one, other, known=0):
        counts["tokens"] += min(len(one), len(other)) - known
        return compare(one, other, known)

    monkeypatch.setattr(module, "common_prefix", counted)
    return counts


class Passes:
    """A scheduler, and passes that compute everything."""

    def __init__(self, num_blocks):
        self.blocks = BlockManager(num_blocks, BLOCK)
        self.scheduler = Scheduler(self.blocks, max_rows=4096, find_idle=lambda: ())

    def round(self, sequence, guesses, drawn=()):
        tokens = sequence.line(guesses)
        work = Work(sequence, tokens, len(guesses) + 1, len(tokens) + len(drawn), float("inf"))
        self.scheduler.submit(work)
        (chunk,) = self.scheduler.next_batch()
        start = work.computed
        sequence.wrote(start, work.tokens[start:])
        work.computed = len(work.tokens)
        sequence.wrote(work.computed, drawn)
        self.scheduler.finish(work)
        return chunk.count


@pytest.mark.parametrize("drawn", [(), (3, 3)])
def test_a_round_compares_what_is_new_whatever_the_context(looked_at, drawn):
    passes, context, rounds = Passes(4096), 4000, 200
    sequence = Sequence(log=TokenLog(range(context)))
    assert passes.round(sequence, [1]) == context + 1
    looked_at.clear()
    rng = random.Random(0)
    for _ in range(rounds):
        guesses = rng.choices(range(2), k=3)
        accepted = rng.randrange(4)
        rows = passes.round(sequence, guesses, drawn)
        assert rows <= 3 + len(guesses) + 1
        sequence.log.append([*guesses[:accepted], 5])
    assert looked_at["tokens"] < 40 * rounds


class Asked(dict):
    """What blocks hold; how often that was asked is counted."""

    times = 0

    def get(self, *args):
        self.times += 1
        return super().get(*args)


def test_blocks_of_a_long_prefix_are_not_looked_up_again_with_each_new_one():
    passes, context, new = Passes(4096), 2000, 200
    sequence = Sequence(log=TokenLog(range(context)))
    passes.round(sequence, [])
    passes.blocks._contents = asked = Asked(passes.blocks._contents)
    for _ in range(new):
        sequence.log.append([1])
        passes.round(sequence, [])
    assert new // BLOCK <= asked.times <= 4 * new // BLOCK
    assert len(passes.blocks.find("", sequence.log, 550)) == 550


def test_a_sequence_that_turns_back_offers_what_it_then_has():
    """Its first blocks stay as they are, the others are those of another text."""
    passes, sequence = Passes(64), Sequence(log=TokenLog(range(40)))
    passes.round(sequence, [])
    for length in (21, 9):
        sequence.log.cut(length)
        passes.round(sequence, [])
        assert sequence.offered == len(sequence.chain) == length // BLOCK
        sequence.log.append([7] * 12)
        passes.round(sequence, [])
        full = len(sequence.log) // BLOCK
        assert passes.blocks.find("", sequence.log, full) == list(sequence.blocks[:full])


def offers(manager, log):
    """Blocks that hold a log's whole blocks and are offered, and what is known of them."""
    blocks, chain = [], Chain()
    assert manager.extend(blocks, len(log))
    manager.register("", log, blocks, len(log) // BLOCK, chain)
    return blocks, chain


def test_searching_on_finds_what_searching_from_the_start_does():
    rng, found_on, restarted = random.Random(5), 0, 0
    manager, held = BlockManager(60, BLOCK), []
    for _ in range(3000):
        if held and (len(held) > 5 or rng.random() < 0.4):
            log, blocks, chain = held.pop(rng.randrange(len(held)))
            chain = chain.start(rng.randrange(len(chain) + 1))
            known, most = list(chain.serials), len(log) // BLOCK
            if rng.random() < 0.5:
                log.append(rng.choices(range(2), k=rng.randrange(12)))
            if rng.random() < 0.5:
                manager.truncate(blocks, 0)
            whole = manager.find("", log, most)
            rest = manager.find("", log, most, chain)
            if len(chain) > len(rest):
                assert chain.serials[: len(known)] == known
                assert [*whole[: len(known)], *rest] == whole
                found_on += len(rest) > 0
            else:
                assert rest == whole
                restarted += len(known) > 0
            manager.truncate(blocks, 0)
        else:
            log = TokenLog(rng.choices(range(2), k=rng.randrange(1, 40)))
            if manager.blocks_for(len(log)) <= manager.num_free:
                held.append((log, *offers(manager, log)))
    assert found_on > 100 and restarted > 20, (found_on, restarted)


def test_a_prefix_that_was_pushed_out_is_offered_again():
    """What another sequence had registered is gone; the blocks of this one hold the same."""
    manager, log = BlockManager(12, BLOCK), TokenLog(range(12))
    first, _ = offers(manager, TokenLog(log.tokens[:8]))
    blocks, chain = offers(manager, log)
    assert manager.find("", log, 3) == [*first, blocks[2]]
    manager.truncate(first, 0)
    wanted = []
    assert manager.extend(wanted, 9 * BLOCK) and set(first) <= set(wanted)
    assert manager.find("", log, 3) == []
    manager.truncate(wanted, BLOCK)
    log.append(range(4))
    manager.extend(blocks, 16)
    manager.register("", log, blocks, 4, chain)
    assert manager.find("", log, 4) == blocks and len(chain) == 4
    assert manager.find("", log, 4, chain) == [] and len(chain) == 4


def test_a_longer_prefix_of_others_is_added_to_what_a_sequence_has():
    passes = Passes(64)
    one = Sequence(log=TokenLog(range(22)))
    passes.round(one, [])
    other = Sequence(log=TokenLog(range(40)))
    passes.round(other, [])
    one.log.append(range(22, 41))
    own = list(one.blocks)
    assert passes.round(one, []) == 1  # All but the last token were there.
    assert list(one.blocks[:5]) == own[:5] and list(one.blocks[5:10]) == list(other.blocks[5:10])
    assert len(one.blocks) == 11
    assert one.cached == list(range(41)) and one.offered == len(one.chain) == 10
