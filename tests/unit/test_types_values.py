"""Values: hashes of prefixes, session ids, verdicts and counted speculation."""

import random

import pytest

from outrider.token_log import TokenLog
from outrider.types import (
    EMPTY_PREFIX_HASH,
    Proposal,
    SparseDistribution,
    SpeculationStats,
    TokenSource,
    Verdict,
    chain_hash,
    is_session_id,
    new_nonce,
    new_session_id,
)


def test_chained_hash_extends_piece_by_piece():
    rng = random.Random(0)
    for _ in range(200):
        tokens = rng.choices(range(1 << 20), k=rng.randrange(1, 20))
        cut = rng.randrange(len(tokens) + 1)
        whole = chain_hash(EMPTY_PREFIX_HASH, tokens)
        assert chain_hash(chain_hash(EMPTY_PREFIX_HASH, tokens[:cut]), tokens[cut:]) == whole
        changed = list(tokens)
        changed[rng.randrange(len(tokens))] ^= 1
        assert chain_hash(EMPTY_PREFIX_HASH, changed) != whole


def test_chained_hash_is_the_one_that_is_written_down():
    """Two processes of different versions must agree: BLAKE2b-64 of (hash, id), little-endian."""
    assert chain_hash(EMPTY_PREFIX_HASH, ()) == 0
    assert chain_hash(EMPTY_PREFIX_HASH, (1, 2, 3)) == 0xDC65DA7DC13BA17A


def test_order_and_zeros_change_the_hash():
    hashes = {chain_hash(0, tokens) for tokens in ((), (0,), (0, 0), (1, 2), (2, 1), (1,), (256,))}
    assert len(hashes) == 7


def test_session_ids_are_new_and_well_formed():
    ids = {new_session_id() for _ in range(1000)}
    assert len(ids) == 1000 and all(is_session_id(text) for text in ids)


@pytest.mark.parametrize(
    "text", ["", "a" * 21, "a" * 23, "a" * 21 + "=", "a" * 22 + "\n", "ä" * 22, "a" * 21 + "{"]
)
def test_other_texts_are_no_session_ids(text):
    assert not is_session_id(text)


def test_nonces_are_never_zero():
    nonces = [new_nonce() for _ in range(1000)]
    assert all(0 < nonce < 1 << 63 for nonce in nonces) and len(set(nonces)) == 1000


@pytest.mark.parametrize(
    ("accepted", "proposed", "own"),
    [
        (0, 0, TokenSource.PLAIN),
        (0, 3, TokenSource.RECOVERED),
        (2, 3, TokenSource.RECOVERED),
        (3, 3, TokenSource.BONUS),
    ],
)
def test_sources_of_a_verdict(accepted, proposed, own):
    verdict = Verdict(tuple(range(accepted + 1)), accepted, proposed)
    assert verdict.sources == (TokenSource.ACCEPTED,) * accepted + (own,)


@pytest.mark.parametrize(
    ("accepted", "proposed", "run_ahead", "last", "guesses", "survived"),
    [
        (3, 3, True, TokenSource.ACCEPTED, 4, 4),
        (3, 3, False, TokenSource.RECOVERED, 4, 3),
        (1, 3, False, TokenSource.RECOVERED, 4, 1),
        (0, 0, True, TokenSource.ACCEPTED, 1, 1),
        (0, 0, False, TokenSource.RECOVERED, 1, 0),
        (3, 3, None, TokenSource.BONUS, 3, 3),
    ],
)
def test_a_run_ahead_guess_is_one_more_guess(
    accepted, proposed, run_ahead, last, guesses, survived
):
    tokens = tuple(range(accepted + 1))
    verdict = Verdict(tokens, accepted, proposed, run_ahead=run_ahead)
    assert verdict.sources == (TokenSource.ACCEPTED,) * accepted + (last,)
    assert (verdict.num_guesses, verdict.num_survived) == (guesses, survived)


def random_tree(rng, count):
    """`count` nodes, their tokens 0, 1, …; most of them hang at the node before."""
    parents = (i - 1 if rng.random() < 0.5 else rng.randrange(-1, i) for i in range(count))
    return Proposal(tuple(range(count)), parents=tuple(parents), proposer="oak")


def paths_of(tree):
    """The tokens from a child of the base to each node."""
    paths = []
    for token, parent in zip(tree.token_ids, tree.parents or range(-1, len(tree)), strict=False):
        paths.append([*(paths[parent] if parent >= 0 else ()), token])
    return paths


def test_a_tree_cut_by_depth_keeps_the_paths_that_are_short_enough():
    rng = random.Random(2)
    shapes = set()
    for _ in range(300):
        tree = random_tree(rng, rng.randrange(12))
        paths = paths_of(tree)
        assert tree.length == max(map(len, paths), default=0)
        for length in range(-1, 8):
            cut = tree.cut(length)
            assert paths_of(cut) == [path for path in paths if len(path) <= length]
            assert cut.length <= max(length, 0) and cut.proposer == "oak"
            shapes.add((len(cut), bool(cut.parents)))
    assert {(3, True), (3, False), (0, False)} <= shapes


def test_the_spine_is_the_chain_that_a_tree_starts_with():
    tree = Proposal((5, 6, 7, 8, 9), parents=(-1, 0, -1, 1, 3))
    assert tree.spine == Proposal((5, 6))
    assert Proposal((5, 6)).spine == Proposal((5, 6)) and Proposal().spine == Proposal()
    assert tree.length == 4 and Proposal((5, 6)).length == 2


def test_distributions_follow_their_guesses():
    masses = tuple(SparseDistribution((i,), (1,)) for i in range(4))
    tree = Proposal((0, 1, 2, 3), parents=(-1, 0, -1, 2), distributions=masses)
    assert tree.cut(1) == Proposal((0, 2), (-1, -1), (masses[0], masses[2]))
    assert tree.spine == Proposal((0, 1), (), masses[:2])


@pytest.mark.parametrize(("alternatives", "kept"), [(0, 2), (1, 4), (3, 4)])
def test_a_tree_with_more_guesses_than_asked_for_loses_its_leaves(alternatives, kept):
    tree = Proposal((1, 2, 3, 4, 5, 6), parents=(-1, 0, 1, -1, 0, 1))
    assert len(tree.within(2, alternatives)) == kept
    assert Proposal((1, 2, 3)).within(2, alternatives) == Proposal((1, 2))


def test_speculation_is_added_field_by_field_and_position_by_position():
    left = SpeculationStats(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, (2, 1), (1,))
    right = SpeculationStats(10, 20, 30, 40, 50, 60, 70, 80, 90, 100, (1, 1, 1), (1, 1))
    total = SpeculationStats(11, 22, 33, 44, 55, 66, 77, 88, 99, 110, (3, 2, 1), (2, 1))
    assert left + right == right + left == total
    assert left + SpeculationStats() == left


def test_rates_of_nothing_are_unknown_and_not_zero():
    assert SpeculationStats().acceptance_rate is None
    assert SpeculationStats().mean_acceptance_length is None
    stats = SpeculationStats(rounds=4, proposed=8, accepted=4, recovered=2, bonus=1, plain=1)
    assert stats.acceptance_rate == 0.5
    assert stats.mean_acceptance_length == 2.0


def test_log_knows_the_hash_of_every_prefix():
    rng = random.Random(1)
    log, naive = TokenLog(), []
    for _ in range(300):
        if rng.random() < 0.3:
            length = rng.randrange(len(naive) + 1)
            log.cut(length)
            del naive[length:]
        else:
            tokens = rng.choices(range(50000), k=rng.randrange(4))
            log.append(tokens)
            naive += tokens
        length = rng.randrange(len(naive) + 1)
        assert log.tokens == naive and len(log) == len(naive)
        assert log.prefix_hash(length) == chain_hash(0, naive[:length])
        assert log.matches(length, chain_hash(0, naive[:length]))
        assert not log.matches(len(naive) + 1, chain_hash(0, [*naive, 0]))


def snapshot(log):
    return list(log.tokens), [log.prefix_hash(i) for i in range(len(log) + 1)]


@pytest.mark.parametrize(
    ("start", "tokens", "base"),
    [
        (4, [9], [1, 2, 3, 9]),  # A gap before the tail.
        (2, [8, 9], [1, 2, 8]),  # Longer than the base.
        (2, [8], [1, 2, 8, 9]),  # Shorter than the base.
        (2, [8, 9], [1, 5, 8, 9]),  # The base has another prefix.
        (2, [8, 9], [1, 2, 9, 8]),  # The base has another tail.
        (1, [], [5]),  # A cut to a base that is not ours.
    ],
)
def test_tail_that_does_not_give_the_base_changes_nothing(start, tokens, base):
    log = TokenLog([1, 2, 3])
    before = snapshot(log)
    assert not log.replace_tail(start, tokens, len(base), chain_hash(0, base))
    assert snapshot(log) == before


@pytest.mark.parametrize("base_len", [0, 3, 5])
def test_tail_with_the_right_hash_but_another_length_changes_nothing(base_len):
    log = TokenLog([1, 2, 3])
    before = snapshot(log)
    assert not log.replace_tail(2, [8, 9], base_len, chain_hash(0, [1, 2, 8, 9]))
    assert snapshot(log) == before


@pytest.mark.parametrize(
    ("start", "tokens", "base"),
    [(3, [4, 5], [1, 2, 3, 4, 5]), (1, [7], [1, 7]), (0, [9, 9], [9, 9]), (2, [], [1, 2])],
)
def test_tail_that_gives_the_base_is_taken(start, tokens, base):
    log = TokenLog([1, 2, 3])
    assert log.replace_tail(start, tokens, len(base), chain_hash(0, base))
    assert snapshot(log) == snapshot(TokenLog(base))
