"""Which outcomes of the verification in flight are worth preparing a proposal for.

An outcome is (number accepted, rank): the verification stops after so many guesses, and the
target's own token is the draft's next-best of that rank there (0 is the best; the rejected guess
is left out). After a fully accepted proposal rank 0 is the guess that would have come next.
Outcomes exclude each other, so the chance that one of them comes is the sum of theirs, and the
best choice under a budget is the likeliest ones.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

MAX_RANKS = 6
"""Ranks that are considered: each further one is rarer than one in twenty rejections."""

_COVERED = {1: 0.29, 2: 0.39, 3: 0.49, 5: 0.58}
"""Shares of rejections that so many next-best tokens cover: SmolLM2-135M, v0 draft, T = 0."""


@dataclass(frozen=True, slots=True)
class FanOut:
    """Outcomes to prepare for, likeliest first, and the chance that one of them comes."""

    outcomes: tuple[tuple[int, int], ...]
    hit_probability: float


class RankCounts:
    """Of which rank the target's own token is, learned from hits and misses.

    Counted as hazards (rank r, given that it is none before it), because a miss with n prepared
    ranks tells that it was none of these n, and nothing about the others. Rejections and bonuses
    are apart: the bonus is of rank 0 where one more guess would have been accepted.
    """

    def __init__(self, *, weight: float = 20.0, discount: float = 0.998) -> None:
        self._rejected = _Hazards(prior_hazards(), weight, discount)
        # Behind rank 0 a bonus is what a recovered token is behind the rejected guess.
        self._missed_bonus = _Hazards(prior_hazards(), weight, discount)

    def observe(self, rank: int | None, *, prepared: int, bonus: bool) -> None:
        """The own token was of this rank; None: of none of the `prepared` first ones."""
        if not bonus:
            self._rejected.observe(rank, prepared)
        elif rank is None:
            self._missed_bonus.observe(None, prepared - 1)
        elif rank > 0:
            self._missed_bonus.observe(rank - 1, prepared - 1)

    def rejected(self) -> list[float]:
        """P(rank r | a guess was rejected) for r = 0 … MAX_RANKS - 1."""
        return self._rejected.probabilities

    def bonus(self, next_acceptance: float) -> list[float]:
        """P(rank r | all were accepted), where one more guess had survived with this chance."""
        missed = 1.0 - next_acceptance
        behind = self._missed_bonus.probabilities
        return [next_acceptance, *(missed * p for p in behind[: MAX_RANKS - 1])]


def allocate(acceptance: Sequence[float], ranks: RankCounts, budget: int) -> FanOut:
    """The `budget` likeliest outcomes of a proposal of len(acceptance) - 1 guesses.

    `acceptance` is a_1 … a_{k+1}, each given that all before it were accepted.
    """
    stops = stop_chances(acceptance)
    rejected, bonus = ranks.rejected(), ranks.bonus(acceptance[-1])
    chances = [
        (stop * p, (accepted, rank))
        for accepted, stop in enumerate(stops)
        for rank, p in enumerate(rejected if accepted < len(stops) - 1 else bonus)
    ]
    chances.sort(reverse=True)
    chosen = chances[: max(budget, 0)]
    hit = sum(chance for chance, _ in chosen)
    return FanOut(tuple(outcome for _, outcome in chosen), min(hit, 1.0))


def stop_chances(acceptance: Sequence[float]) -> list[float]:
    """P(0 accepted) … P(all accepted) of a proposal of len(acceptance) - 1 guesses."""
    reached, stops = 1.0, []
    for rate in acceptance[:-1]:
        stops.append(reached * (1.0 - rate))
        reached *= rate
    return [*stops, reached]


class _Hazards:
    """P(rank = r | rank >= r) as discounted Beta counts around a prior."""

    def __init__(self, prior: Sequence[float], weight: float, discount: float) -> None:
        self._prior = tuple(prior)
        self._weight = weight
        self._discount = discount
        self._hits = [0.0] * len(prior)
        self._seen = [0.0] * len(prior)
        self.probabilities: list[float] = []
        self._update()

    def observe(self, rank: int | None, prepared: int) -> None:
        looked_at = min(prepared if rank is None else rank + 1, len(self._prior))
        for r in range(looked_at):
            hit = float(r == rank)
            self._hits[r] = self._hits[r] * self._discount + hit
            self._seen[r] = self._seen[r] * self._discount + 1.0
        if looked_at > 0:
            self._update()

    def _update(self) -> None:
        left, probabilities = 1.0, []
        for hits, seen, prior in zip(self._hits, self._seen, self._prior, strict=True):
            hazard = (hits + self._weight * prior) / (seen + self._weight)
            probabilities.append(left * hazard)
            left *= 1.0 - hazard
        self.probabilities = probabilities


@functools.cache
def prior_hazards() -> tuple[float, ...]:
    """Hazards of ranks 0 … MAX_RANKS - 1 that give the measured coverage; constant behind it."""
    hazards: list[float] = []
    covered, last = 0.0, 0
    for count, share in _COVERED.items():
        ranks = count - last
        hazards += [1.0 - ((1.0 - share) / (1.0 - covered)) ** (1.0 / ranks)] * ranks
        covered, last = share, count
    hazards += hazards[-1:] * (MAX_RANKS - len(hazards))
    return tuple(hazards)
