"""How much to guess: the length, fan-out and proposer with the most tokens per second.

Never by the acceptance rate, which falls as proposals grow whatever they bring.

A guess costs a row of the target's pass, and a row delays everyone in the batch. Sessions that
decide alike are weighed as one: the round has the rows of all their guesses. Sessions that decide
elsewhere lose tokens to a row's seconds. Either way a guess is worth its row where its chance to
survive exceeds the row's seconds times the tokens per second of the whole batch.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from outrider.speculation.fan_out import MAX_RANKS, RankCounts

FAN_OUTS = (1, 2, 4, 8, 16)
"""Budgets of prepared outcomes that are tried."""


class Mode(enum.Enum):
    """How rounds follow each other."""

    SEQUENTIAL = "sequential"
    PIPELINED = "pipelined"


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """What the target's part of the next round costs, in seconds.

    `plain_s` is a round in which nobody guesses; `verify_s` one that may carry guesses, before
    their rows, `row_s` each of these. `sessions` decide alike and bring a row each for a guess;
    others make `others_tokens_per_s` and bring none. `overlap_s` is what verification takes
    longer while the draft works.
    """

    plain_s: float
    verify_s: float
    row_s: float
    sessions: float = 1.0
    others_tokens_per_s: float = 0.0
    overlap_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Offer:
    """What a proposer can give for the next round.

    `acceptance` is a_1 … a_{k_max + 1}, each given that all before it were accepted. The proposal
    is there `draft_s` + k * `step_s` seconds after it was asked for, trip included, and
    `outcome_s` later for each further outcome prepared at once. `coverage` is the share of rounds
    in which it guesses at all. Without `ranks` it prepares no outcomes. A guess that was asked for
    after the verdict has `rows_a_guess`, with its alternatives; what is prepared ahead has none.
    """

    proposer: str
    acceptance: Sequence[float]
    draft_s: float
    step_s: float
    outcome_s: float = 0.0
    coverage: float = 1.0
    ranks: RankCounts | None = None
    hit_scale: float = 1.0
    rows_a_guess: float = 1.0

    @property
    def k_max(self) -> int:
        return len(self.acceptance) - 1


class Plan(NamedTuple):
    """A length and a fan-out (0: the draft waits for the verdict), with what they are worth."""

    num_speculative_tokens: int
    fan_out: int
    tokens_per_s: float
    round_s: float


@dataclass(frozen=True, slots=True)
class Decision:
    """What the next round carries, and why.

    `tokens_per_s` is what the session should make with it, tokens that others lose taken off;
    `plain_tokens_per_s` what it would make if nobody guessed. `inputs` are the numbers behind
    them, for traces.
    """

    num_speculative_tokens: int
    fan_out: int
    proposer: str
    tokens_per_s: float
    plain_tokens_per_s: float
    inputs: dict[str, float]


def choose(offers: Sequence[Offer], costs: RoundCosts, mode: Mode = Mode.SEQUENTIAL) -> Decision:
    """The best plan of all offers; plain decoding where none is better."""
    best, offer = plain_plan(costs), None
    for candidate in offers:
        for plan in plans(candidate, costs, mode):
            if plan.tokens_per_s > best.tokens_per_s:
                best, offer = plan, candidate
    return explain(best, offer, costs)


def explain(plan: Plan, offer: Offer | None, costs: RoundCosts) -> Decision:
    """The decision for a plan, with its numbers."""
    inputs = {
        "plain_s": costs.plain_s,
        "verify_s": costs.verify_s,
        "row_s": costs.row_s,
        "sessions": costs.sessions,
        "others_tokens_per_s": costs.others_tokens_per_s,
    }
    if offer is not None:
        inputs["draft_s"] = offer.draft_s
        inputs["step_s"] = offer.step_s
        inputs["coverage"] = offer.coverage
        for i, rate in enumerate(offer.acceptance[: max(plan.num_speculative_tokens, 1)]):
            inputs[f"acceptance_{i + 1}"] = rate
    return Decision(
        plan.num_speculative_tokens,
        plan.fan_out,
        offer.proposer if offer is not None and plan.num_speculative_tokens else "",
        plan.tokens_per_s,
        _per_s(1.0, costs.plain_s),
        inputs,
    )


def plain_plan(costs: RoundCosts) -> Plan:
    """A round without guesses."""
    return Plan(0, 0, _per_s(1.0, costs.plain_s), costs.plain_s)


def plans(offer: Offer, costs: RoundCosts, mode: Mode = Mode.SEQUENTIAL) -> list[Plan]:
    """What each length from 1 to k_max is worth, with its best fan-out."""
    coverage, step_s = offer.coverage, offer.step_s
    lost = costs.others_tokens_per_s * coverage * costs.row_s
    row_s = costs.sessions * coverage * costs.row_s
    draft_s, verify_s = offer.draft_s, costs.verify_s
    beside = offer.rows_a_guess - 1.0
    ahead = _Ahead(offer, costs) if mode is Mode.PIPELINED and offer.ranks is not None else None
    found = []
    survival, tokens = 1.0, 1.0
    for k, rate in enumerate(offer.acceptance[:-1], 1):
        survival *= rate
        tokens += coverage * survival
        draft_s += step_s
        verify_s += row_s
        net = tokens - k * lost
        round_s = draft_s + verify_s + k * beside * row_s
        own = net - k * beside * lost
        plan = Plan(k, 0, own / round_s if round_s > 0.0 else 0.0, round_s)
        if ahead is not None:
            plan = max(plan, ahead.plan(k, net, verify_s, draft_s), key=_worth)
        found.append(plan)
    return found


class _Ahead:
    """Plans whose draft works while the target verifies, for k = 1, 2, … in this order.

    On a hit a round takes as long as the slower of the two. On a miss plain rounds follow until
    one ends in an outcome that the draft has prepared in the meantime, or the draft is waited for,
    whichever is worth more.
    """

    def __init__(self, offer: Offer, costs: RoundCosts) -> None:
        assert offer.ranks is not None
        self._offer, self._costs, self._ranks = offer, costs, offer.ranks
        self._rejected = offer.ranks.rejected()
        self._found = list(accumulate(offer.ranks.bonus(offer.acceptance[0])))
        self._reached = 1.0
        self._chances: list[float] = []

    def plan(self, k: int, net: float, verify_s: float, draft_s: float) -> Plan:
        """The best fan-out with k guesses."""
        offer, miss_s = self._offer, self._costs.verify_s
        verify_s += self._costs.overlap_s
        fan_out, rate, seconds = 0, 0.0, 0.0
        for outcomes, hit in self._hits(k):
            missed = max(1.0 - hit * offer.hit_scale, 0.0)
            plain = missed / self._found[min(outcomes, MAX_RANKS) - 1]
            ready_s = draft_s + (outcomes - 1) * offer.outcome_s
            hit_s = ready_s if ready_s > verify_s else verify_s
            for tokens, round_s in (
                (net + plain, hit_s + plain * miss_s),
                (net, hit_s + missed * draft_s),
            ):
                tokens_per_s = tokens / round_s if round_s > 0.0 else 0.0
                if tokens_per_s > rate:
                    fan_out, rate, seconds = outcomes, tokens_per_s, round_s
        return Plan(k, fan_out, rate, seconds)

    def _hits(self, k: int) -> list[tuple[int, float]]:
        """Each fan-out with the chance that one of its outcomes comes."""
        acceptance = self._offer.acceptance
        stops = self._reached * (1.0 - acceptance[k - 1])
        self._reached *= acceptance[k - 1]
        reached = self._reached
        self._chances += [stops * p for p in self._rejected]
        bonus = [reached * p for p in self._ranks.bonus(acceptance[k])]
        covered = list(accumulate(sorted(self._chances + bonus, reverse=True)))
        return [(n, covered[n - 1]) for n in FAN_OUTS if n <= len(covered)]


def _worth(plan: Plan) -> float:
    return plan.tokens_per_s


def _per_s(tokens: float, seconds: float) -> float:
    return tokens / seconds if seconds > 0.0 else 0.0
