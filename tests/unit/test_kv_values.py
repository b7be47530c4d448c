"""Values of KV blocks in a store: what was written comes back, and nothing else is believed."""

from dataclasses import replace

import numpy as np
import pytest

from outrider.kv_store.blocks import BlockCodec, KvLayout, Refused, blocks_of
from outrider.token_log import TokenLog

LAYOUT = KvLayout(
    model="abc",
    adapter="",
    quantised="",
    dtype="bfloat16",
    layers=2,
    kv_heads=2,
    head_dim=16,
    block_tokens=8,
    block_bytes=2048,
    arrangement="by token",
    arithmetic="cpu x",
)
CODEC = BlockCodec(LAYOUT)
TOKENS = list(range(100, 130))
RAW = np.random.default_rng(1).integers(0, 256, 2048, dtype=np.uint8)


def blocks(tokens=TOKENS, tenant="a"):
    return blocks_of(tenant, tokens, TokenLog(tokens).block_hashes(8), 8)


def value_of(block, codec=CODEC, raw=RAW):
    return bytes(codec.encode(block, lambda into: np.copyto(into, raw)))


def reason(block, value, codec=CODEC):
    with pytest.raises(Refused) as refused:
        codec.decode(block, value)
    return refused.value.reason


def test_what_was_written_comes_back_bit_by_bit():
    for block in blocks():
        value = value_of(block)
        assert len(value) == CODEC.value_bytes
        assert np.array_equal(CODEC.decode(block, value), RAW)


def test_a_prefix_is_cut_into_full_blocks_wherever_one_begins():
    whole = blocks()
    assert [block.index for block in whole] == [0, 1, 2]
    hashes = TokenLog(TOKENS).block_hashes(8)
    assert blocks_of("a", TOKENS, hashes, 8, after=whole[0]) == whole[1:]
    assert blocks_of("a", TOKENS, hashes, 8, after=whole[2]) == []


@pytest.mark.parametrize("place", [0, 20, 300, 1000, -40, -1])
def test_one_flipped_bit_anywhere_is_damage(place):
    block = blocks()[1]
    value = bytearray(value_of(block))
    value[place] ^= 1
    assert reason(block, bytes(value)) == "damaged"


@pytest.mark.parametrize("length", [0, 5, 31, 500, CODEC.value_bytes - 1])
def test_a_truncated_value_is_damage(length):
    block = blocks()[1]
    assert reason(block, value_of(block)[:length]) == "damaged"


@pytest.mark.parametrize(
    "change",
    [
        {"model": "abd"},
        {"adapter": "x"},
        {"quantised": "int8"},
        {"dtype": "float16"},
        {"layers": 1},
        {"kv_heads": 1},
        {"head_dim": 8},
        {"arrangement": "by head"},
        {"arithmetic": "cuda y"},
        {"rank": 1},
        {"size": 2},
    ],
)
def test_other_models_and_layouts_have_other_keys_and_are_refused_under_ours(change):
    other = BlockCodec(replace(LAYOUT, **change))
    block = blocks()[1]
    assert other.key("a", block) != CODEC.key("a", block)
    assert reason(block, value_of(block, other)) == "foreign"


def test_another_caller_has_other_keys_and_is_refused_under_ours():
    own, others = blocks()[1], blocks(tenant="b")[1]
    assert own.hash == others.hash
    assert CODEC.key("a", own) != CODEC.key("b", others)
    assert reason(own, value_of(others)) == "other_tokens"


def test_other_tokens_under_the_same_hash_are_refused():
    own = blocks()[1]
    changed = list(TOKENS)
    changed[9] += 1
    assert reason(own, value_of(replace(blocks(changed)[1], hash=own.hash))) == "other_tokens"


def test_the_same_tokens_after_another_prefix_are_refused():
    """As where the hashes of the two prefixes collide: from then on all keys are the same."""
    own = blocks()[1]
    other = blocks([1, *TOKENS[1:]])[1]
    assert other.token_ids == own.token_ids
    assert reason(own, value_of(replace(other, hash=own.hash))) == "other_tokens"


def test_a_block_under_another_place_is_refused():
    tokens = [7] * 24
    first, second, _ = blocks(tokens)
    assert first.token_ids == second.token_ids
    assert reason(second, value_of(first)) == "other_tokens"


def test_keys_name_no_caller():
    key = CODEC.key("somebody@example.com", blocks(tenant="somebody@example.com")[0])
    assert "somebody" not in key and key.startswith("outrider:kv:block:")
