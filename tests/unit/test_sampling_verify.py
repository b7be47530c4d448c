"""Acceptance by equality and by block, on cases small enough to know the answer."""

import math
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from outrider.errors import InvalidArgument
from outrider.sampling import (
    Chain,
    NoiseKeys,
    Stream,
    accept_chains,
    coupled_picks,
    coupled_scores,
    greedy_picks,
    pack_chains,
    pick_coupled,
    point_mass,
    sample_sparse,
    truncate,
    truncate_rows,
    uniforms,
    usable_guesses,
    verify_block,
    verify_blocks,
    verify_tokens,
    verify_tokens_batch,
    verify_tree,
)
from outrider.types import SparseDistribution


def random_log_probs(rows, vocab, seed=0, spread=2.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=generator) * spread).log_softmax(-1)


def honest_chain(draft_log_probs, seed, base_len):
    """Guesses as a draft makes them."""
    distributions = tuple(truncate(row.exp()) for row in draft_log_probs)
    ids = tuple(sample_sparse(d, seed, base_len, base_len + i) for i, d in enumerate(distributions))
    return Chain(ids, seed, base_len, distributions)


@pytest.mark.parametrize(
    ("picks", "guesses", "accepted"),
    [([4], [], 0), ([4, 5], [4], 1), ([4, 5, 6], [4, 6], 1), ([4, 5, 6], [3, 5], 0)],
)
def test_guesses_before_the_first_mismatch_are_accepted(picks, guesses, accepted):
    assert verify_tokens(picks, guesses) == accepted


def test_batch_of_token_verifications_equals_one_by_one():
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(0, 2, (200, 7), generator=generator)
    guesses = torch.randint(0, 2, (200, 6), generator=generator)
    lengths = torch.randint(0, 7, (200,), generator=generator)
    together = verify_tokens_batch(picks, guesses, lengths).tolist()
    rows = zip(picks.tolist(), guesses.tolist(), lengths.tolist(), strict=True)
    assert together == [verify_tokens(p, g[:n]) for p, g, n in rows]
    assert set(together) >= {0, 1, 2, 3}


def path_to(node, parents):
    return [] if node < 0 else [*path_to(parents[node], parents), node]


def test_a_walk_down_a_tree_says_what_plain_decoding_says():
    """Against a target whose next token is any function of the text so far, and every path of the
    tree tried out."""
    rng = random.Random(0)
    ends = Counter()
    for _ in range(2000):
        count = rng.randrange(9)
        parents = [rng.randrange(-1, i) for i in range(count)]
        guesses = [rng.randrange(3) for _ in range(count)]
        says = {}

        def next_token(text, says=says):
            return says.setdefault(tuple(text), rng.randrange(3))

        texts = [[guesses[i] for i in path_to(node, parents)] for node in range(count)]
        picks = [next_token(text) for text in ([], *texts)]
        plain = []
        while len(plain) <= count:
            plain.append(next_token(plain))

        accepted = verify_tree(picks, guesses, parents)
        emitted = [picks[node + 1] for node in (-1, *accepted)]
        assert emitted == plain[: len(emitted)]
        assert emitted[:-1] == [guesses[node] for node in accepted]
        assert accepted == (path_to(accepted[-1], parents) if accepted else [])
        siblings = list(zip(parents, guesses, strict=True))
        if len(set(siblings)) == count:  # Else only the first of equal siblings is looked at.
            right = (len(text) for text in texts if text == plain[: len(text)])
            assert len(accepted) == max(right, default=0)
        last = accepted[-1] if accepted else -1
        ends["base" if last < 0 else "inside" if last in parents else "leaf"] += 1
        ends["beside the chain"] += accepted != list(range(len(accepted)))
    assert min(ends.values()) > 100 and len(ends) == 4, ends


def test_a_chain_is_the_narrowest_tree():
    rng = random.Random(1)
    for _ in range(200):
        count = rng.randrange(7)
        picks = rng.choices(range(2), k=count + 1)
        guesses = rng.choices(range(2), k=count)
        walked = verify_tree(picks, guesses, range(-1, count - 1))
        assert walked == list(range(verify_tokens(picks, guesses)))


def test_of_equal_siblings_the_first_counts():
    assert verify_tree([7, 8, 9, 9], [7, 7, 8], [-1, -1, 0]) == [0, 2]
    assert verify_tree([7, 8, 9, 9], [7, 7, 8], [-1, -1, 1]) == [0]


def test_picks_take_the_lowest_id_among_equals():
    assert greedy_picks(torch.tensor([[1.0, 3.0, 3.0], [0.0, 0.0, 0.0]])).tolist() == [1, 0]


def test_coupled_pick_of_a_point_mass_is_its_token():
    log_probs = torch.full((100, 40), -math.inf)
    log_probs[:, 23] = 0.0
    assert set(coupled_picks(log_probs, range(100), range(100)).tolist()) == {23}


def test_sharded_coupled_scores_give_the_same_pick():
    log_probs = random_log_probs(4, 1000)
    seeds, positions = [1, 2, 3, 4], [9, 9, 9, 9]
    parts = [
        coupled_scores(log_probs[:, a:b], seeds, positions, a)
        for a, b in [(0, 333), (333, 700), (700, 1000)]
    ]
    assert (
        torch.cat(parts, dim=-1).argmax(-1).tolist()
        == coupled_picks(log_probs, seeds, positions).tolist()
    )
    assert pick_coupled(log_probs[2], 3, 9) == coupled_picks(log_probs, seeds, positions)[2]


def test_targets_own_greedy_tokens_are_all_accepted():
    target = torch.full((9, 50), -math.inf)
    target[torch.arange(9), torch.arange(9)] = 0.0
    assert verify_block(target, range(8), seed=1, base_len=30) == (8, 8)


def test_equal_target_and_draft_accept_everything():
    """0/0 at every inner place: the acceptance must be certain, not undefined."""
    distribution = SparseDistribution((1, 4, 6, 9), (65535, 32768, 16384, 1))
    row = torch.zeros(16)
    row[list(distribution.ids)] = torch.tensor(distribution.weights, dtype=torch.float32)
    target = (row / row.sum()).log().repeat(7, 1)
    for seed in range(100):
        ids = [sample_sparse(distribution, seed, 5, 5 + i) for i in range(6)]
        outcome = verify_block(target, ids, seed, 5, [distribution] * 6)
        assert outcome.num_accepted == 6
        assert outcome.final in distribution.ids


def test_guess_impossible_for_the_target_is_never_accepted():
    target = random_log_probs(4, 20)
    target[1, 3] = -math.inf
    for seed in range(150):
        outcome = verify_block(target, [int(target[0].argmax()), 3, 5], seed, 10)
        assert outcome.num_accepted <= 1
        if outcome.num_accepted == 1:
            assert outcome.final != 3


def test_recovered_token_of_a_point_mass_is_never_the_guess():
    target = random_log_probs(2, 20)
    outcomes = [verify_block(target, [7], seed, 10) for seed in range(150)]
    recovered = [o.final for o in outcomes if o.num_accepted == 0]
    assert len(recovered) > 50
    assert 7 not in recovered


def test_k_0_draws_from_the_target_with_the_residual_stream():
    target = random_log_probs(1, 20)
    finals = [verify_block(target, [], seed, 10).final for seed in range(2000)]
    counts = torch.bincount(torch.tensor(finals), minlength=20).double()
    expected = target[0].double().exp() * 2000
    assert ((counts - expected).abs() < 5 * expected.sqrt() + 3).all()


def test_limits_of_one_case_by_hand():
    """k=2 on vocabulary 2, the formulas of the paper worked out."""
    target = torch.tensor([[0.25, 0.75], [0.25, 0.75], [0.5, 0.5]]).log()
    drafts = [SparseDistribution((0, 1), (1, 1)), SparseDistribution((0, 1), (3, 1))]
    # p_1 = .25/.5 = 1/2; p_1 target = (.125, .375) against (.75, .25): S_1 = .125,
    # h_1 = .125 / .625 = .2; guess 1 has p_2 = min(.5 * .75 / .25, 1) = 1.
    chains = [Chain((0, 1), s, 10, tuple(drafts)) for s in range(500)]
    acceptance = accept_chains(target.repeat(500, 1), pack_chains(chains))
    assert set(acceptance.num_accepted.tolist()) == {2}
    # Guess 0 has p_2 = .5 * .25 / .75 = 1/6.
    chains = [Chain((0, 0), s, 10, tuple(drafts)) for s in range(500)]
    acceptance = accept_chains(target.repeat(500, 1), pack_chains(chains))
    for seed, accepted in enumerate(acceptance.num_accepted.tolist()):
        keys = NoiseKeys.per_round([seed] * 2, [10, 11], [10, 10])
        first, second = uniforms(Stream.ACCEPT, keys, 1)[:, 0].tolist()
        assert accepted == (2 if second <= 1 / 6 else 1 if first <= 1 / 5 else 0)
    assert set(acceptance.num_accepted.tolist()) == {0, 1, 2}


def test_ragged_batch_equals_each_chain_alone():
    target, chains = [], []
    for index, k in enumerate([3, 0, 8, 1, 5]):
        draft = random_log_probs(k, 300, seed=100 + index, spread=3.0)
        chains.append(honest_chain(draft, seed=index, base_len=20 + index))
        mixed = torch.cat([draft, random_log_probs(1, 300)])
        target.append((mixed + 0.3 * random_log_probs(k + 1, 300, index)).log_softmax(-1))
    together = verify_blocks(torch.cat(target), chains)
    alone = [verify_blocks(t, [c])[0] for t, c in zip(target, chains, strict=True)]
    assert together == alone
    assert sum(o.num_accepted for o in alone) > 3


def test_a_chain_without_a_bonus_needs_no_row_behind_its_last_guess():
    """It gets the same, save for the bonus; its neighbours' rows are where they are."""
    whole, cut = [], []
    for index, k in enumerate([3, 1, 8, 4, 1, 2]):
        draft = random_log_probs(k, 300, seed=100 + index, spread=3.0)
        target = torch.cat([draft + 0.2 * random_log_probs(k, 300, index), draft[:1]])
        chain = honest_chain(draft, seed=index, base_len=20 + index)
        has_bonus = index in (0, 2)
        whole.append((target.log_softmax(-1), chain))
        cut.append((whole[-1][0][: k + has_bonus], replace(chain, bonus=has_bonus)))
    expected = verify_blocks(torch.cat([t for t, _ in whole]), [c for _, c in whole])
    found = verify_blocks(torch.cat([t for t, _ in cut]), [c for _, c in cut])
    complete = 0
    for (_, chain), full, outcome in zip(cut, expected, found, strict=True):
        is_cut = not chain.bonus and full.num_accepted == len(chain.token_ids)
        assert outcome == (full._replace(final=None) if is_cut else full)
        complete += is_cut
    assert complete >= 2 and sum(outcome.final is not None for outcome in found) >= 2


def test_nothing_is_verified_without_a_row():
    with pytest.raises(InvalidArgument, match="needs its bonus"):
        verify_blocks(torch.zeros(0, 20), [Chain((), 1, 10, bonus=False)])
    with pytest.raises(InvalidArgument, match="2 rows"):
        verify_blocks(random_log_probs(2, 20), [Chain((3,), 1, 10, bonus=False)])


def test_round_start_is_part_of_the_key():
    target = random_log_probs(1, 5000, spread=0.1)
    finals = {verify_block(target, [], 3, 10, round_start=start).final for start in range(1, 11)}
    assert len(finals) > 8
    assert verify_block(target, [], 3, 10) == verify_block(target, [], 3, 10, round_start=10)


def test_truncated_distribution_is_what_the_wire_can_hold():
    probs = torch.zeros(200)
    probs[[150, 3, 77]] = torch.tensor([0.9, 0.1, 1e-9])
    assert truncate(probs) == SparseDistribution((3, 77, 150), (7282, 1, 65535))
    wide = truncate(random_log_probs(1, 200)[0].exp())
    assert len(wide.ids) == 64
    assert max(wide.weights) == 65535
    assert list(wide.ids) == sorted(wide.ids)
    rows = truncate_rows(random_log_probs(3, 200).exp(), entries=4)
    assert rows.ids.shape == (3, 4)
    assert torch.allclose(rows.probs.sum(-1), torch.ones(3, dtype=torch.float64))


def test_sparse_samples_follow_the_weights():
    distribution = SparseDistribution((2, 30, 400), (65535, 20000, 500))
    picks = torch.tensor([sample_sparse(distribution, seed, 4, 5) for seed in range(6000)])
    for token, weight in zip(distribution.ids, distribution.weights, strict=True):
        expected = 6000 * weight / sum(distribution.weights)
        assert abs(int((picks == token).sum()) - expected) < 5 * math.sqrt(expected)


@pytest.mark.parametrize(
    "bad",
    [
        SparseDistribution((1, 2), (5, 0)),
        SparseDistribution((2, 1), (5, 5)),
        SparseDistribution((1, 20), (5, 5)),
        SparseDistribution((1, 2), (5, 70000)),
        SparseDistribution((), ()),
        SparseDistribution((1, 2), (5,)),
        SparseDistribution((2, 3), (5, 5)),
        SparseDistribution((-1, 1), (5, 5)),
    ],
)
def test_malformed_proposals_are_found_and_refused(bad):
    good = point_mass(1)
    assert usable_guesses([1, 1, 1], [good, bad, good], vocab_size=20) == 1
    with pytest.raises(InvalidArgument):
        verify_block(random_log_probs(4, 20), [1, 1, 1], 0, 5, [good, bad, good])


def test_ids_outside_the_vocabulary_and_wrong_row_counts_are_refused():
    assert usable_guesses([1, 20], [], vocab_size=20) == 1
    assert usable_guesses([1, 2], [point_mass(1)], vocab_size=20) == 0
    with pytest.raises(InvalidArgument):
        verify_block(random_log_probs(2, 20), [-1], 0, 5)
    with pytest.raises(InvalidArgument):
        verify_block(random_log_probs(3, 20), [1], 0, 5)
