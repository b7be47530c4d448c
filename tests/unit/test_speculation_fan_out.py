"""Outcomes to prepare for: the likeliest ones, and how likely they are."""

import itertools
import random

import pytest

from outrider.speculation.fan_out import MAX_RANKS, FanOut, RankCounts, allocate


def chance(outcome: tuple[int, int], acceptance: list[float], ranks: RankCounts) -> float:
    """Written out once more: all before it accepted, stopped there, of that rank."""
    accepted, rank = outcome
    reached = 1.0
    for rate in acceptance[:accepted]:
        reached *= rate
    if accepted == len(acceptance) - 1:
        return reached * ranks.bonus(acceptance[-1])[rank]
    return reached * (1 - acceptance[accepted]) * ranks.rejected()[rank]


@pytest.mark.parametrize(
    "acceptance", [[0.6, 0.6, 0.6], [0.9, 0.8, 0.95], [0.2, 0.9, 0.5], [0.5, 0.1, 0.1]]
)
@pytest.mark.parametrize("budget", [1, 2, 3])
def test_no_other_choice_is_hit_more_often(acceptance: list[float], budget: int):
    ranks = RankCounts()
    every = list(itertools.product(range(len(acceptance)), range(4)))
    best = max(
        sum(chance(outcome, acceptance, ranks) for outcome in chosen)
        for chosen in itertools.combinations(every, budget)
    )
    found = allocate(acceptance, ranks, budget)
    assert found.hit_probability == pytest.approx(best)
    assert len(found.outcomes) == budget
    chances = [chance(outcome, acceptance, ranks) for outcome in found.outcomes]
    assert chances == sorted(chances, reverse=True)
    assert sum(chances) == pytest.approx(found.hit_probability)


def test_all_outcomes_together_are_never_more_than_certain():
    found = allocate([0.7] * 5, RankCounts(), 1000)
    assert len(found.outcomes) == 5 * MAX_RANKS and 0.6 < found.hit_probability <= 1.0
    assert allocate([0.7] * 5, RankCounts(), 0) == FanOut((), 0.0)


def test_a_draft_that_is_right_prepares_for_its_next_guess():
    assert allocate([0.95] * 5, RankCounts(), 1).outcomes == ((4, 0),)
    assert allocate([0.1] * 5, RankCounts(), 1).outcomes == ((0, 0),)


def test_more_is_prepared_where_stopping_is_likelier():
    outcomes = allocate([0.95, 0.3, 0.95, 0.95], RankCounts(), 6).outcomes
    by_place = [sum(accepted == place for accepted, _ in outcomes) for place in range(4)]
    assert by_place[1] == max(by_place) and by_place[1] > by_place[0]


def test_before_anything_is_seen_ranks_are_as_measured():
    rejected = RankCounts().rejected()
    for fan_out, share in {1: 0.29, 2: 0.39, 3: 0.49, 5: 0.58}.items():
        assert sum(rejected[:fan_out]) == pytest.approx(share)


def test_ranks_are_learned_where_misses_hide_the_rank():
    true, rng, prepared = [0.6, 0.2, 0.1, 0.05], random.Random(1), 2
    ranks, counted, rounds = RankCounts(discount=1.0), [0.0] * 2, 4000
    for _ in range(rounds):
        rank = rng.choices([0, 1, 2, 3, None], weights=[*true, 0.05])[0]
        seen = rank if rank is not None and rank < prepared else None
        ranks.observe(seen, prepared=prepared, bonus=False)
        if seen is not None:
            counted[seen] += 1
    assert ranks.rejected()[:2] == pytest.approx(true[:2], abs=0.03)
    # Of what was never prepared nothing is learned: as before, of what is left.
    prior = RankCounts().rejected()
    left = 1 - sum(ranks.rejected()[:2])
    assert ranks.rejected()[2] / left == pytest.approx(prior[2] / (1 - sum(prior[:2])))


def test_a_bonus_of_rank_zero_is_a_guess_that_would_have_survived():
    ranks = RankCounts()
    for rate in (0.1, 0.5, 0.9):
        bonus = ranks.bonus(rate)
        assert bonus[0] == rate and sum(bonus) <= 1.0
        assert bonus[1] == pytest.approx((1 - rate) * ranks.rejected()[0])


def test_bonus_ranks_are_learned_apart_from_rejections():
    ranks = RankCounts(discount=1.0)
    before = ranks.rejected()
    for _ in range(500):
        ranks.observe(1, prepared=4, bonus=True)
    assert ranks.rejected() == before
    assert ranks.bonus(0.5)[1] > 0.45


def test_hit_probability_is_how_often_outcomes_come():
    acceptance, ranks, rng = [0.7, 0.5, 0.6, 0.8], RankCounts(), random.Random(2)
    found = allocate(acceptance, ranks, 5)
    hits, rounds = 0, 20_000
    for _ in range(rounds):
        accepted = 0
        while accepted < 3 and rng.random() < acceptance[accepted]:
            accepted += 1
        chances = ranks.bonus(acceptance[3]) if accepted == 3 else ranks.rejected()
        rank = rng.choices([*range(MAX_RANKS), -1], weights=[*chances, 1 - sum(chances)])[0]
        hits += (accepted, rank) in found.outcomes
    assert hits / rounds == pytest.approx(found.hit_probability, abs=0.015)
