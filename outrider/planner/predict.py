"""What a pair's texts and costs say about serving it: acceptance, best length, speed-up, workers.

Guesses are accepted in runs, not one by one: text that is easy for a draft stays easy for a while,
and rounds start where it was not. So rounds are walked through the texts as a server goes through
them. From a place t, the first i guesses are accepted with the chance

    w_i = min over j <= i of min(1, draft(x_1 .. x_j) / target(x_1 .. x_j))

given that x_1, x_2, … is what the target says there. This is block verification's rule (Sun et al.,
"Block Verification Accelerates Speculative Decoding", 2024): P(i accepted | guesses) = p_i, weighed
by draft / target to be over the target's texts. Where guesses are verified by equality, it is 1
while the draft picks the same token and 0 from then on.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.planner.values import PairCosts, Sample, Track
from outrider.speculation.acceptance import expected_tokens
from outrider.speculation.fan_out import MAX_RANKS, RankCounts, allocate
from outrider.speculation.length import Mode, Offer, Plan, RoundCosts, plain_plan, plans

FAN_OUT = 8
"""Outcomes that hit probabilities and draft workers are told for: the orchestrator's default."""

_FIRST = 1
"""The first token of a text comes out of the prefill, without guesses."""

_NEGLIGIBLE = 1e-12

_PRIOR_WEIGHT = 4.0
"""As in `PoolPrior`."""

_LOWEST = 1e-3
"""Acceptance that a plan reckons with at least: what waits for a hit must get one some day."""

_SLACK = 1.1
"""A proposal that takes so much longer than the shortest is as good, if nothing can hide it."""


@dataclass(frozen=True, slots=True)
class Walk:
    """Rounds of k guesses through some texts, counted; all counts are expectations.

    Of a round the guesses up to the first rejected one are looked at. `rejected_ranks` counts the
    own tokens at rejections by their place among the draft's other candidates, `bonus_ranks`
    those after all k by their place among all; the last entry is all further places.
    """

    k: int
    rounds: float
    looked_at: Sequence[float]
    accepted: Sequence[float]
    rejected_ranks: Sequence[float]
    bonus_ranks: Sequence[float]

    @property
    def acceptance(self) -> list[float]:
        """a_1 … a_k, each given that all before it were accepted; where few were reached, near to
        the position before."""
        rates: list[float] = []
        for seen, accepted in zip(self.looked_at, self.accepted, strict=True):
            rates.append(_rate_near(rates[-1:], accepted, seen))
        return rates

    @property
    def next_acceptance(self) -> float:
        """The chance that the draft's best is the own token after k accepted guesses."""
        return _rate_near(self.acceptance[-1:], self.bonus_ranks[0], sum(self.bonus_ranks))

    def ranks(self) -> RankCounts:
        return MeasuredRanks(self.rejected_ranks, self.bonus_ranks[1:])


class MeasuredRanks(RankCounts):
    """Ranks as they were counted, with nothing thought of them before."""

    def __init__(self, rejected: Sequence[float], behind: Sequence[float]) -> None:
        """Counts of ranks 0, 1, …, the last entry all further ones; `behind` those of a bonus
        that is not the draft's best."""
        super().__init__()
        self._shares = _shares(rejected)
        self._behind = _shares(behind)

    def rejected(self) -> list[float]:
        return list(self._shares)

    def bonus(self, next_acceptance: float) -> list[float]:
        missed = 1.0 - next_acceptance
        return [next_acceptance, *(missed * share for share in self._behind[: MAX_RANKS - 1])]


@dataclass(frozen=True, slots=True)
class Setting:
    """Where it is to run: sessions at once in a target group, and their context."""

    costs: PairCosts
    sessions: int = 1
    context_len: int = 256


@dataclass(frozen=True, slots=True)
class LengthForecast:
    """Rounds of `k` guesses. Speed-ups are over plain decoding at the same number of sessions.

    `fan_out` outcomes are prepared for in the pipelined case (0: waiting for the verdict is as
    good), which has `workers` drafts for a target group; each computes for `busy` of a round.
    `hit_probability` is that of `FAN_OUT` outcomes.
    """

    k: int
    acceptance: tuple[float, ...]
    mean_acceptance_length: float
    sequential: float
    pipelined: float
    fan_out: int
    hit_probability: float
    workers: int
    busy: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """One mode over some texts, for each length from 1 on; `rounds` and `error` of a_1 (standard
    deviation) say how well it is known."""

    mode: str
    lengths: tuple[LengthForecast, ...]
    rounds: float
    error: float

    def best(self, mode: Mode) -> LengthForecast | None:
        """The fastest length; None where plain decoding is."""
        best = max(self.lengths, key=lambda length: _speed(length, mode))
        return best if _speed(best, mode) > 1.0 else None


def forecast(samples: Iterable[Sample], mode: str, setting: Setting, *, k_max: int) -> Forecast:
    """What `mode` brings over the samples that were taken for it."""
    tracks = [sample.tracks[mode] for sample in samples if mode in sample.tracks]
    walks = [walk(tracks, k) for k in range(1, k_max + 1)]
    first = walks[0]
    rate = first.acceptance[0]
    return Forecast(
        mode,
        tuple(_length(found, setting) for found in walks),
        first.rounds,
        math.sqrt(rate * (1.0 - rate) / first.rounds) if first.rounds else 1.0,
    )


def survival(track: Track, k: int) -> NDArray[np.float64]:  # [tokens, k + 1]
    """The chance that the first i guesses from a place on are accepted; column 0 is 1."""
    ratios = np.asarray(track.log_ratios, dtype=np.float64)
    chances = np.ones((len(ratios), k + 1))
    total, lowest = np.zeros(len(ratios)), np.zeros(len(ratios))
    for i in range(1, k + 1):
        total[: max(len(ratios) - i + 1, 0)] += ratios[i - 1 :]
        lowest = np.minimum(lowest, total)
        chances[:, i] = np.exp(lowest)
    return chances


def walk(tracks: Iterable[Track], k: int) -> Walk:
    """Rounds of k guesses through each text: where one stops, the next begins behind its own
    token."""
    rounds = 0.0
    looked_at, accepted = np.zeros(k), np.zeros(k)
    rejected_ranks, bonus_ranks = np.zeros(MAX_RANKS + 1), np.zeros(MAX_RANKS + 1)
    for track in tracks:
        chances, length = survival(track, k), len(track.log_ratios)
        ranks = np.minimum(track.ranks, MAX_RANKS)
        other_ranks = np.minimum(track.other_ranks, MAX_RANKS)
        starts = np.zeros(length + 1)  # The chance that a round starts there.
        starts[min(_FIRST, length)] = 1.0
        for place in range(_FIRST, length):
            if starts[place] < _NEGLIGIBLE:
                continue
            fits = min(k, length - place)
            reach = starts[place] * chances[place, : fits + 1]
            stops = reach[:-1] - reach[1:]
            rounds += reach[0]
            looked_at[:fits] += reach[:-1]
            accepted[:fits] += reach[1:]
            np.add.at(rejected_ranks, other_ranks[place : place + fits], stops)
            starts[place + 1 : place + 1 + fits] += stops
            if place + k < length:
                bonus_ranks[ranks[place + k]] += reach[k]
                starts[place + k + 1] += reach[k]
    return Walk(
        k, rounds, *(a.tolist() for a in (looked_at, accepted, rejected_ranks, bonus_ranks))
    )


def _length(found: Walk, setting: Setting) -> LengthForecast:
    """One length, with the maths of the controller."""
    k, acceptance = found.k, found.acceptance
    ranks, rounds = found.ranks(), round_costs(setting)
    plain = plain_plan(rounds)
    with_next = [max(rate, _LOWEST) for rate in (*acceptance, found.next_acceptance)]
    sequential = plans(_offer(with_next, setting, setting.sessions), rounds)[-1]
    verify_s = rounds.verify_s + setting.sessions * k * rounds.row_s
    workers = draft_workers(setting, k, verify_s)
    per_worker = -(-setting.sessions // workers)
    ahead = _offer(with_next, setting, per_worker, ranks)
    pipelined = max(sequential, plans(ahead, rounds, Mode.PIPELINED)[-1], key=_rate)
    busy_s = draft_seconds(setting, k, per_worker, pipelined.fan_out)
    return LengthForecast(
        k,
        tuple(acceptance),
        expected_tokens(acceptance),
        sequential.tokens_per_s / plain.tokens_per_s,
        pipelined.tokens_per_s / plain.tokens_per_s,
        pipelined.fan_out,
        allocate(with_next, ranks, FAN_OUT).hit_probability,
        workers if pipelined.fan_out else 1,
        min(busy_s / pipelined.round_s, 1.0),
    )


def round_costs(setting: Setting) -> RoundCosts:
    """The target's part of a round of all sessions, which decide alike."""
    costs, sessions = setting.costs, setting.sessions
    pass_s = costs.verify.predict(sessions, sessions * setting.context_len)
    return RoundCosts(
        plain_s=pass_s + costs.plain_s,
        verify_s=pass_s + costs.round_s,
        row_s=costs.verify.slope + costs.verify.other_slope * setting.context_len,
        sessions=sessions,
    )


def _offer(
    acceptance: Sequence[float], setting: Setting, sessions: int, ranks: RankCounts | None = None
) -> Offer:
    """Proposals of len(acceptance) - 1 guesses of a draft that serves so many sessions at once."""
    draft = setting.costs.draft
    step_s = draft.slope + (sessions - 1) * draft.other_slope
    steps = len(acceptance) - 1
    if ranks is None:
        return Offer("draft", acceptance, draft.base + setting.costs.ask_s, step_s)
    # A pass over the pending guesses finds what may follow them.
    draft_s = draft.base + setting.costs.ask_s + step_s
    outcome_s = steps * sessions * draft.other_slope
    return Offer("draft", acceptance, draft_s, step_s, outcome_s, ranks=ranks)


def draft_workers(setting: Setting, k: int, verify_s: float) -> int:
    """Drafts that a target group needs for drafting to be hidden behind verifying, or to take
    little longer than for one session alone where nothing can hide it."""
    sessions = setting.sessions
    limit = max(verify_s, _SLACK * draft_seconds(setting, k, 1, FAN_OUT))
    for workers in range(1, sessions):
        if draft_seconds(setting, k, -(-sessions // workers), FAN_OUT) <= limit:
            return workers
    return sessions


def draft_seconds(setting: Setting, k: int, sessions: int, fan_out: int) -> float:
    """What a draft computes for a round of so many sessions."""
    draft = setting.costs.draft
    if not fan_out:
        return draft.predict(k, (sessions - 1) * k)
    further = (sessions - 1) * (k + 1) + sessions * (fan_out - 1) * k
    return draft.predict(k + 1, further)


def _speed(length: LengthForecast, mode: Mode) -> float:
    return length.pipelined if mode is Mode.PIPELINED else length.sequential


def _rate(plan: Plan) -> float:
    return plan.tokens_per_s


def _rate_near(before: Sequence[float], part: float, whole: float) -> float:
    """A share, pulled to that of the position before with the weight of a few observations."""
    if not before:
        return _share(part, whole)
    return (part + _PRIOR_WEIGHT * before[0]) / (whole + _PRIOR_WEIGHT)


def _share(part: float, whole: float) -> float:
    return min(part / whole, 1.0) if whole > 0.0 else 0.0


def _shares(counts: Sequence[float]) -> list[float]:
    """Of ranks 0 … MAX_RANKS - 1."""
    total = sum(counts)
    found = [_share(count, total) for count in counts[:MAX_RANKS]]
    return found + [0.0] * (MAX_RANKS - len(found))
