"""The length with the most tokens per second, against arithmetic written out once more."""

import dataclasses

import pytest

from outrider.speculation.fan_out import RankCounts
from outrider.speculation.length import Mode, Offer, RoundCosts, choose, plans

COSTS = RoundCosts(plain_s=0.020, verify_s=0.021, row_s=0.0006)


def offer(rate: float, *, step_s: float = 0.002, k_max: int = 8, **more) -> Offer:
    return Offer("draft", [rate] * (k_max + 1), 0.0002, step_s, **more)


def worth(rate: float, k: int, costs: RoundCosts, step_s: float) -> float:
    tokens = sum(rate**i for i in range(k + 1))
    return tokens / (0.0002 + k * step_s + costs.verify_s + k * costs.row_s)


@pytest.mark.parametrize("rate", [0.05, 0.2, 0.4, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("step_s", [0.0004, 0.002, 0.010])
def test_the_best_of_all_lengths_is_chosen(rate: float, step_s: float):
    found = choose([offer(rate, step_s=step_s)], COSTS)
    by_length = {k: worth(rate, k, COSTS, step_s) for k in range(1, 9)} | {0: 1 / COSTS.plain_s}
    best = max(by_length, key=lambda k: by_length[k])
    assert found.num_speculative_tokens == best
    assert found.tokens_per_s == pytest.approx(by_length[best])
    assert found.plain_tokens_per_s == pytest.approx(50.0)


def test_acceptance_rate_alone_does_not_decide():
    # One guess is accepted more often than four are; four bring more.
    found = choose([offer(0.8, step_s=0.0002)], COSTS)
    assert found.num_speculative_tokens >= 4


def test_a_row_that_costs_more_makes_proposals_shorter():
    lengths = [
        choose([offer(0.8)], dataclasses.replace(COSTS, row_s=row_s)).num_speculative_tokens
        for row_s in (0.0, 0.001, 0.003, 0.030)
    ]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > lengths[-2] > lengths[-1] == 0


def test_the_rows_of_alternatives_cost_as_rows_of_guesses_do():
    """Sequentially: what is prepared ahead are chains alone."""
    wide = [offer(0.8, rows_a_guess=3.0), dataclasses.replace(COSTS, others_tokens_per_s=90.0)]
    dear = [offer(0.8), dataclasses.replace(wide[1], row_s=3 * COSTS.row_s)]
    for found, expected in zip(plans(*wide), plans(*dear), strict=True):
        assert found == pytest.approx(expected)
    ahead = offer(0.8, ranks=RankCounts())
    best = plans(ahead, COSTS, Mode.PIPELINED)
    beside = plans(dataclasses.replace(ahead, rows_a_guess=3.0), COSTS, Mode.PIPELINED)
    assert best == beside and all(plan.fan_out for plan in best)


def test_a_guess_is_worth_its_row_to_the_whole_batch():
    """A row pays while its guess's chance to survive exceeds its seconds times tokens/s."""
    others = 300.0
    costs = RoundCosts(0.040, 0.040, 0.0012, others_tokens_per_s=others)
    free = Offer("draft", [0.7] * 9, 0.0, 0.0)
    k = choose([free], costs).num_speculative_tokens
    tokens_per_s = others + choose([free], costs).tokens_per_s
    price = costs.row_s * tokens_per_s
    assert 0.7**k > price * 0.95 and 0.7 ** (k + 1) < price * 1.05
    selfish = choose([free], dataclasses.replace(costs, others_tokens_per_s=0.0))
    assert 0 < k < selfish.num_speculative_tokens


def test_sessions_that_decide_alike_count_all_their_rows():
    alone = choose([offer(0.6)], COSTS)
    eight = choose([offer(0.6)], dataclasses.replace(COSTS, sessions=8.0))
    assert alone.num_speculative_tokens > eight.num_speculative_tokens
    as_one = choose([offer(0.6)], dataclasses.replace(COSTS, row_s=8 * COSTS.row_s))
    assert eight.num_speculative_tokens == as_one.num_speculative_tokens
    assert eight.tokens_per_s == pytest.approx(as_one.tokens_per_s)


def test_the_proposer_with_the_most_tokens_per_second_wins():
    draft = offer(0.7, step_s=0.004)
    often = Offer("ngram", [0.5] * 9, 0.0, 0.0)
    rarely = Offer("ngram", [0.5] * 9, 0.0, 0.0, coverage=0.1)
    assert choose([draft, often], COSTS).proposer == "ngram"
    assert choose([draft, rarely], COSTS).proposer == "draft"
    assert choose([], COSTS).proposer == "" == choose([offer(0.01)], COSTS).proposer


def test_a_pipelined_round_takes_as_long_as_the_slower_tier_and_the_misses():
    ranks = RankCounts()
    slow = offer(0.8, step_s=0.004, outcome_s=0.0001, ranks=ranks)
    for plan in plans(slow, COSTS, Mode.PIPELINED):
        k, fan_out = plan.num_speculative_tokens, plan.fan_out
        assert fan_out > 0
        draft_s = 0.0002 + k * 0.004 + (fan_out - 1) * 0.0001
        assert plan.round_s > max(draft_s, COSTS.verify_s + k * COSTS.row_s)
        sequential = plans(slow, COSTS)[k - 1]
        assert plan.tokens_per_s > sequential.tokens_per_s


def test_more_outcomes_are_prepared_where_the_draft_has_time():
    ranks = RankCounts()
    cheap = offer(0.7, step_s=0.004, outcome_s=0.0, ranks=ranks)
    dear = offer(0.7, step_s=0.004, outcome_s=0.01, ranks=ranks)
    assert choose([cheap], COSTS, Mode.PIPELINED).fan_out == 16
    assert choose([dear], COSTS, Mode.PIPELINED).fan_out < 4


def test_pipelining_that_slows_the_target_stays_off():
    shared = dataclasses.replace(COSTS, overlap_s=0.02)
    with_ranks = offer(0.7, ranks=RankCounts())
    assert choose([with_ranks], COSTS, Mode.PIPELINED).fan_out > 0
    found = choose([with_ranks], shared, Mode.PIPELINED)
    assert found.fan_out == 0 and found.num_speculative_tokens > 0


def test_a_decision_holds_the_numbers_behind_it():
    found = choose([offer(0.8)], COSTS)
    numbers, k = found.inputs, found.num_speculative_tokens
    tokens, survival = 1.0, 1.0
    for i in range(1, k + 1):
        survival *= numbers[f"acceptance_{i}"]
        tokens += survival
    seconds = numbers["draft_s"] + k * numbers["step_s"] + numbers["verify_s"]
    seconds += k * numbers["sessions"] * numbers["row_s"]
    assert found.tokens_per_s == pytest.approx(tokens / seconds)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.fan_out = 3  # type: ignore[misc]
