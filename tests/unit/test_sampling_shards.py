"""Picks of a vocabulary in parts against those of the whole."""

import pytest
import torch

from outrider.engine import cpu_kernels
from outrider.engine.drawing import picks_of
from outrider.sampling import coupled_picks, join_candidates, shard_candidates
from outrider.types import SamplingParams


@pytest.fixture(autouse=True, scope="module")
def kernels():
    cpu_kernels.load()


def split_picks(logits, rows, ranks):
    """By the candidates of so many ranks."""
    size = logits.shape[1] // ranks
    parts = [
        shard_candidates(logits[:, rank * size : (rank + 1) * size], rows, rank * size)
        for rank in range(ranks)
    ]
    return join_candidates(torch.stack(parts), rows).tolist()


def random_rows(count, seed, temperatures=(0.0, 1e-3, 0.4, 1.0, 1.7)):
    generator = torch.Generator().manual_seed(seed)

    def number(high):
        return int(torch.randint(high, (1,), generator=generator))

    return [
        (
            SamplingParams(
                temperature=temperatures[number(len(temperatures))], seed=number(2**62) * 4 + 3
            ),
            number(2**40),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize(("vocab", "ranks"), [(300, 2), (258, 2), (303, 3), (4096, 8), (12, 4)])
def test_picks_of_parts_are_those_of_the_whole(vocab, ranks):
    """Also where a part begins inside a block of noise, as 129 of 258 does."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(400, vocab, generator=generator) * 3
    rows = random_rows(400, seed=ranks)
    expected = picks_of(logits, rows).tolist()
    assert split_picks(logits, rows, ranks) == expected
    winners = {pick * ranks // vocab for pick in expected}
    assert winners == set(range(ranks))


def test_noise_of_a_part_that_forgot_where_it_begins_would_show():
    logits = torch.zeros(64, 64)
    rows = random_rows(64, seed=1, temperatures=(1.0,))
    wrong = [shard_candidates(logits[:, i : i + 32], rows, 0) for i in (0, 32)]
    wrong[1][..., 2] += 32
    assert join_candidates(torch.stack(wrong), rows).tolist() != picks_of(logits, rows).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_lowest_global_id_wins_a_tie(temperature):
    """Greedy rows; and candidates of one score."""
    logits = torch.zeros(1, 8)
    logits[0, [2, 3, 6]] = 5.0
    rows = [(SamplingParams(temperature=temperature, seed=1), 4)]
    if temperature == 0.0:
        assert split_picks(logits, rows, 2) == [2]
        assert split_picks(logits.flip(1), rows, 2) == [1]
    tied = torch.tensor([[[5.0, 1.5, 3.0]], [[5.0, 1.5, 6.0]]], dtype=torch.float64)
    assert join_candidates(tied, rows).tolist() == [3]


def test_a_part_without_any_token_that_can_come_has_no_say():
    logits = torch.full((2, 8), -torch.inf)
    logits[:, 5] = -3e4
    rows = [(SamplingParams(), 1), (SamplingParams(temperature=0.5, seed=2), 1)]
    assert split_picks(logits, rows, 2) == [5, 5]
    assert split_picks(logits.flip(1), rows, 2) == [2, 2]


@pytest.mark.parametrize("temperature", [1e-30, 1e-6])
def test_a_temperature_near_0_is_greedy(temperature):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(50, 40, generator=generator) + 1e3
    rows = [(SamplingParams(temperature=temperature, seed=n), n) for n in range(50)]
    assert split_picks(logits, rows, 2) == logits.argmax(-1).tolist()


def test_picks_follow_the_distribution_of_the_whole():
    """Parts of very different weight: the winner's part is as likely as its tokens are."""
    probs = torch.tensor([0.02, 0.01, 0.03, 0.04, 0.5, 0.2, 0.15, 0.05])
    count = 20_000
    logits = probs.log().expand(count, -1) + 17.0
    rows = [(SamplingParams(temperature=1.0, seed=9), n) for n in range(count)]
    found = torch.bincount(torch.tensor(split_picks(logits, rows, 4)), minlength=8) / count
    assert (found - probs).abs().max() < 0.012
    exact = coupled_picks(probs.log().expand(count, -1), [9] * count, range(count))
    assert split_picks(logits, rows, 4) == exact.tolist()
