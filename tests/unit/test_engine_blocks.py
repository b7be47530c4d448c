"""KV blocks: references, shared prefixes, eviction, and nothing lost or given twice."""

import random

import pytest

from outrider.engine.block_manager import BlockManager
from outrider.engine.sequence import Sequence
from outrider.token_log import TokenLog


def holding(manager, tokens, salt="a"):
    """Blocks that hold and offer the whole blocks of `tokens`, as after a pass."""
    log, blocks = TokenLog(tokens), []
    assert manager.extend(blocks, len(tokens))
    manager.register(salt, log, blocks, len(tokens) // manager.block_tokens)
    return blocks


def find(manager, tokens, salt="a"):
    return manager.find(salt, TokenLog(tokens), len(tokens) // manager.block_tokens)


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


def test_a_prefix_is_found_up_to_the_first_other_token():
    manager = BlockManager(16, 4)
    blocks = holding(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert find(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9]) == blocks[:2]
    assert find(manager, [1, 2, 3, 4, 5, 6, 7, 0]) == blocks[:1]
    assert find(manager, [0, 2, 3, 4, 5, 6, 7, 8]) == []
    assert find(manager, [1, 2, 3]) == []


def test_another_tenant_finds_nothing():
    manager = BlockManager(8, 4)
    holding(manager, [1, 2, 3, 4], salt="a")
    assert find(manager, [1, 2, 3, 4], salt="b") == []


def test_equal_hashes_are_not_taken_for_equal_tokens(monkeypatch):
    monkeypatch.setattr(TokenLog, "prefix_hash", lambda self, length: length)
    manager = BlockManager(16, 4)
    first = holding(manager, [1, 2, 3, 4, 5, 6, 7, 8])
    assert find(manager, [1, 2, 3, 9, 5, 6, 7, 8]) == []
    assert find(manager, [1, 2, 3, 4, 5, 6, 7, 9]) == first[:1]


def test_equal_tokens_behind_another_prefix_are_not_taken(monkeypatch):
    monkeypatch.setattr(TokenLog, "prefix_hash", lambda self, length: length)
    manager = BlockManager(16, 4)
    first = holding(manager, [9, 9, 9, 9, 5, 6, 7, 8])
    manager.own(first, 0)  # The second block stays registered without the first.
    other = holding(manager, [1, 2, 3, 4])
    assert find(manager, [1, 2, 3, 4, 5, 6, 7, 8]) == other


def test_a_prefix_outlives_its_sequence_until_its_place_is_needed():
    manager = BlockManager(4, 4)
    blocks = holding(manager, [1, 2, 3, 4, 5, 6, 7, 8])
    kept = list(blocks)
    manager.truncate(blocks, 0)
    assert manager.num_free == 4 and manager.num_kept == 2
    shared = manager.share(find(manager, [1, 2, 3, 4, 5, 6, 7, 8]))
    assert shared == kept and manager.num_free == 2 and manager.num_kept == 0
    manager.truncate(shared, 0)
    other = []
    assert manager.extend(other, 12)
    assert find(manager, [1, 2, 3, 4, 5, 6, 7, 8]) == kept[:1]  # What follows goes first.
    assert manager.extend(other, 16) and manager.num_kept == 0
    assert find(manager, [1, 2, 3, 4]) == []


def test_the_prefix_unused_for_longest_goes_first():
    manager = BlockManager(3, 4)
    texts = [[i, i, i, i] for i in range(3)]
    for tokens in texts:
        manager.truncate(holding(manager, tokens), 0)
    manager.truncate(manager.share(find(manager, texts[0])), 0)
    manager.extend([], 0)
    assert manager.extend([], 4)
    assert [bool(find(manager, tokens)) for tokens in texts] == [True, False, True]


def test_a_shared_block_is_not_written():
    manager = BlockManager(8, 4)
    blocks = holding(manager, [1, 2, 3, 4, 5, 6, 7, 8])
    other = manager.share(find(manager, [1, 2, 3, 4, 5, 6, 7, 8]))
    assert manager.own(other, 6) == 4
    assert other[0] == blocks[0] and other[1] not in blocks
    assert find(manager, [1, 2, 3, 4, 5, 6, 7, 8]) == blocks
    assert manager.own(blocks, 6) == 6  # Alone again: written in place, and offered no more.
    assert find(manager, [1, 2, 3, 4, 5, 6, 7, 8]) == blocks[:1]
    assert manager.own(blocks, 8) == 8


def test_a_shared_block_that_cannot_be_replaced_is_left():
    manager = BlockManager(2, 4)
    blocks = holding(manager, [1, 2, 3, 4, 5, 6, 7, 8])
    other = manager.share(blocks)
    assert manager.own(other, 5) is None
    assert other == blocks and manager.num_free == 0


def test_nothing_is_lost_or_mixed_up_over_thousands_of_random_steps():
    """Against a model that knows the tokens in every block."""
    rng = random.Random(7)
    manager = BlockManager(40, 4)
    written: dict[int, tuple] = {}  # prefix that each block's KV belongs to
    sequences: list[tuple[TokenLog, list[int]]] = []
    found_some = refused = evicted = 0
    for _ in range(6000):
        roll = rng.random()
        if roll < 0.35 and len(sequences) < 12:
            log, blocks = TokenLog(rng.choices(range(2), k=rng.randrange(1, 30))), []
            most = (len(log) - 1) // 4
            blocks += manager.share(manager.find("a", log, most))
            for index, block in enumerate(blocks):
                assert written[block] == tuple(log.tokens[: 4 * index + 4])
            found_some += bool(blocks)
            kept = manager.num_kept
            if not manager.extend(blocks, len(log)):
                manager.truncate(blocks, 0)
                refused += 1
                continue
            evicted += manager.num_kept < kept
            sequences.append((log, blocks))
            for index in range(len(log) // 4):
                prefix = tuple(log.tokens[: 4 * index + 4])
                assert (
                    written.get(blocks[index]) == prefix
                    or references(sequences, blocks[index]) == 1
                )
                written[blocks[index]] = prefix
            manager.register("a", log, blocks, len(log) // 4)
        elif sequences and roll < 0.6:
            _, blocks = sequences.pop(rng.randrange(len(sequences)))
            manager.truncate(blocks, 0)
        elif sequences:
            log, blocks = rng.choice(sequences)
            start = manager.own(blocks, rng.randrange(len(log)))
            if start is not None and start // 4 < len(blocks):
                assert references(sequences, blocks[start // 4]) == 1
                written.pop(blocks[start // 4], None)
                log.cut(max(start, 1))
                manager.truncate(blocks, len(log))
        held = {block for _, blocks in sequences for block in blocks}
        assert manager.num_free == 40 - len(held)
    assert found_some > 300 and refused > 50 and evicted > 300
    for _, blocks in sequences:
        manager.truncate(blocks, 0)
    assert manager.num_free == 40
    assert manager.extend(whole := [], 160) and sorted(whole) == list(range(40))


def references(sequences, block):
    return sum(block in blocks for _, blocks in sequences)


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
    assert with_kv(cached).usable_kv(tokens, num_logits) == usable


def test_longest_common_prefix_equals_a_naive_one():
    rng = random.Random(3)
    for _ in range(3000):
        cached = rng.choices(range(2), k=rng.randrange(12))
        tokens = rng.choices(range(2), k=rng.randrange(1, 12))
        logits = rng.randrange(1, len(tokens) + 1)
        common = 0
        while common < min(len(cached), len(tokens)) and cached[common] == tokens[common]:
            common += 1
        usable = with_kv(cached).usable_kv(tokens, logits)
        assert usable == min(common, len(tokens) - logits)


def with_kv(token_ids):
    sequence = Sequence()
    sequence.wrote(0, token_ids)
    return sequence


def places(manager, tokens, blocks, first=0, salt="a"):
    log = TokenLog(tokens)
    return manager.places(salt, log, blocks, first, len(tokens) // manager.block_tokens)


def test_places_are_those_of_registered_blocks_and_hold_until_they_are_given_away():
    manager = BlockManager(4, 4)
    tokens = list(range(12))
    blocks = holding(manager, tokens)
    told = places(manager, tokens, blocks)
    assert [block for block, _ in told] == blocks
    assert places(manager, tokens, blocks, first=2) == told[2:]
    assert all(manager.holds(*place) for place in told)
    manager.truncate(blocks, 0)
    assert all(manager.holds(*place) for place in told)  # Nobody's, and as they were.
    other = holding(manager, [9] * 8)  # Takes the free one, and one that was kept.
    assert [manager.holds(*place) for place in told] == [True, True, False]
    assert not any(manager.holds(block, 0) for block in other)


def test_places_of_blocks_that_others_registered_are_theirs():
    manager = BlockManager(8, 4)
    tokens = list(range(12))
    first = holding(manager, tokens)
    second = holding(manager, tokens)
    assert [block for block, _ in places(manager, tokens, second)] == first
    assert places(manager, tokens, second, first=1) == places(manager, tokens, first)[1:]


def test_there_is_no_place_for_a_block_whose_hash_belongs_to_other_tokens(monkeypatch):
    monkeypatch.setattr(TokenLog, "prefix_hash", lambda log, length: length)
    manager = BlockManager(8, 4)
    holding(manager, [1] * 8)
    other = holding(manager, [1, 1, 1, 1, 2, 2, 2, 2])
    assert len(places(manager, [1, 1, 1, 1, 2, 2, 2, 2], other)) == 1


def test_a_block_that_is_written_again_no_longer_holds():
    manager = BlockManager(4, 4)
    tokens = list(range(8))
    blocks = holding(manager, tokens)
    told = places(manager, tokens, blocks)
    assert manager.own(blocks, 5) == 5
    assert [manager.holds(*place) for place in told] == [True, False]
    manager.register("a", TokenLog(tokens), blocks, 2)
    assert [manager.holds(*place) for place in told] == [True, False]
