"""KV blocks: runs, growth in place, the scattered fallback, and nothing lost or given twice."""

import itertools
import random

import pytest

from outrider.engine.block_manager import BlockManager
from outrider.engine.sequence import Sequence


def is_run(blocks):
    return all(after == before + 1 for before, after in itertools.pairwise(blocks))


def test_a_sequence_lies_in_one_piece_and_grows_in_place():
    manager = BlockManager(32, 4)
    blocks = []
    assert manager.extend(blocks, 10) and len(blocks) == 3 and is_run(blocks)
    assert manager.extend(blocks, 12) and len(blocks) == 3
    assert manager.extend(blocks, 13) and len(blocks) == 4 and is_run(blocks)
    assert manager.num_free == 28


def test_a_new_sequence_leaves_others_room_to_grow():
    manager = BlockManager(64, 4)
    sequences = [[] for _ in range(4)]
    for blocks in sequences:
        assert manager.extend(blocks, 8)
    for tokens in range(9, 25):
        assert all(manager.extend(blocks, tokens) for blocks in sequences)
    assert all(is_run(blocks) for blocks in sequences)


def test_blocks_elsewhere_are_taken_where_a_run_cannot_grow():
    manager = BlockManager(6, 4)
    whole = []
    manager.extend(whole, 24)
    first, wall, rest = [whole[0]], [whole[1]], whole[2:]
    manager.truncate(rest, 0)
    assert manager.extend(first, 20) and first == [0, 2, 3, 4, 5]
    assert not is_run(first) and wall == [1] and manager.num_free == 0


def test_growth_that_does_not_fit_changes_nothing():
    manager = BlockManager(4, 4)
    blocks = []
    manager.extend(blocks, 8)
    before = list(blocks)
    assert not manager.extend(blocks, 17)
    assert blocks == before and manager.num_free == 2
    assert manager.extend(blocks, 16) and manager.num_free == 0


def test_shrinking_gives_back_whole_blocks_only():
    manager = BlockManager(8, 4)
    blocks = []
    manager.extend(blocks, 16)
    manager.truncate(blocks, 9)
    assert len(blocks) == 3 and manager.num_free == 5
    manager.truncate(blocks, 12)
    assert len(blocks) == 3
    manager.truncate(blocks, 0)
    assert blocks == [] and manager.num_free == 8


def test_a_block_freed_twice_is_an_error():
    manager = BlockManager(4, 4)
    blocks = []
    manager.extend(blocks, 8)
    copy = list(blocks)
    manager.truncate(blocks, 0)
    with pytest.raises(RuntimeError, match="freed twice"):
        manager.truncate(copy, 0)
    assert manager.num_free == 4


def test_blocks_are_never_shared_or_lost_over_thousands_of_random_steps():
    rng = random.Random(7)
    manager = BlockManager(40, 4)
    sequences = [[] for _ in range(9)]
    scattered = refused = 0
    for _ in range(6000):
        blocks = rng.choice(sequences)
        before, tokens = list(blocks), rng.randrange(70)
        free = 40 - sum(map(len, sequences))
        if rng.random() < 0.6:
            needed = max(-(-tokens // 4) - len(before), 0)
            grown = manager.extend(blocks, tokens)
            assert grown == (needed <= free)
            assert len(blocks) == len(before) + (needed if grown else 0)
            assert blocks[: len(before)] == before
            refused += not grown
        else:
            manager.truncate(blocks, tokens)
            assert blocks == before[: -(-tokens // 4)]
        held = [block for other in sequences for block in other]
        assert len(held) == len(set(held)) and set(held) <= set(range(40))
        assert manager.num_free == 40 - len(held)
        scattered += not is_run(blocks)
    assert scattered > 100 and refused > 100
    for blocks in sequences:
        manager.truncate(blocks, 0)
    assert manager.num_free == 40
    assert manager.extend(whole := [], 160) and sorted(whole) == list(range(40))


@pytest.mark.parametrize(
    ("cached", "tokens", "num_logits", "usable"),
    [
        ([], [1, 2], 1, 0),
        ([1, 2, 3], [1, 2, 3, 4], 1, 3),
        ([1, 2, 3], [1, 2, 3], 1, 2),  # The last token's logits are wanted.
        ([1, 2, 3, 8, 9], [1, 2, 3, 4], 1, 3),  # Rejected guesses are rolled back.
        ([1, 2, 3, 4, 9], [1, 2, 3, 4, 5], 1, 4),  # An accepted guess's KV is kept.
        ([1, 2, 3, 4, 5, 6], [1, 2, 3], 1, 2),
        ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7], 4, 3),
        ([9, 2, 3], [1, 2, 3], 1, 0),
    ],
)
def test_kv_is_used_up_to_the_longest_common_prefix(cached, tokens, num_logits, usable):
    assert Sequence(cached=cached).usable_kv(tokens, num_logits) == usable


def test_longest_common_prefix_equals_a_naive_one():
    rng = random.Random(3)
    for _ in range(3000):
        cached = rng.choices(range(2), k=rng.randrange(12))
        tokens = rng.choices(range(2), k=rng.randrange(1, 12))
        logits = rng.randrange(1, len(tokens) + 1)
        common = 0
        while common < min(len(cached), len(tokens)) and cached[common] == tokens[common]:
            common += 1
        usable = Sequence(cached=cached).usable_kv(tokens, logits)
        assert usable == min(common, len(tokens) - logits)
