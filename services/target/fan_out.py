"""Which outcomes of a verification a draft prepares for, learned from those that came about."""

import heapq
from dataclasses import dataclass, field

from outrider.types import MAX_SPECULATIVE_TOKENS, Verdict

_DISCOUNT = 0.98
"""What a round counts one round later."""

_PRIOR_ACCEPTED, _PRIOR_REJECTED = 3.0, 2.0
_PRIOR_BONUS = (0.6, 0.12, 0.06, 0.04)
"""Chance that the bonus token is the draft's best, second best … guess."""
_PRIOR_RECOVERED = (0.29, 0.10, 0.10, 0.05)
"""Likewise for a recovered token (shared/peers.md), the rejected guess left out."""
_PRIOR_ROUNDS = 8.0
_RANKS = 7
"""Ranks that are prepared at one place: further ones are rare, and a CUDA draft finds eight."""
_TAIL = 0.75
"""Chance of a rank beyond the priors' over the one before."""


@dataclass(slots=True)
class _Ranks:
    """How often the token that came was the draft's best guess, its second best, …"""

    counts: list[float]
    total: float = _PRIOR_ROUNDS

    @classmethod
    def of(cls, prior: tuple[float, ...]) -> "_Ranks":
        chances = list(prior)
        while len(chances) < _RANKS:
            chances.append(chances[-1] * _TAIL)
        return cls([chance * _PRIOR_ROUNDS for chance in chances])

    def see(self, rank: int | None) -> None:
        self.total = self.total * _DISCOUNT + 1
        self.counts = [count * _DISCOUNT for count in self.counts]
        if rank is not None and rank < _RANKS:
            self.counts[rank] += 1

    def chance(self, rank: int) -> float:
        return self.counts[rank] / self.total if rank < _RANKS else 0.0


@dataclass(slots=True)
class FanOut:
    """The outcomes of one session's verifications.

    The chance of an outcome is that of stopping at its place, times that of its token's rank among
    the draft's guesses there. Only what rounds brought goes in, and of a round that is prepared for
    only its length: whether a guess is prepared never depends on its own value.
    """

    _accepted: list[float] = field(
        default_factory=lambda: [_PRIOR_ACCEPTED] * MAX_SPECULATIVE_TOKENS
    )
    _rejected: list[float] = field(
        default_factory=lambda: [_PRIOR_REJECTED] * MAX_SPECULATIVE_TOKENS
    )
    _bonus: _Ranks = field(default_factory=lambda: _Ranks.of(_PRIOR_BONUS))
    _recovered: _Ranks = field(default_factory=lambda: _Ranks.of(_PRIOR_RECOVERED))

    def allocate(self, num_pending: int, budget: int) -> tuple[int, ...]:
        """How many of the likeliest tokens to prepare for after 0, 1, …, `num_pending` accepted
        guesses: the likeliest outcomes, `budget` together."""
        stops = self._stop_chances(num_pending)
        fan_out = [0] * (num_pending + 1)
        heap = [(-stop * self._ranks(i, num_pending).chance(0), i) for i, stop in enumerate(stops)]
        heapq.heapify(heap)
        for _ in range(budget):
            chance, place = heapq.heappop(heap)
            if chance == 0.0:
                break
            fan_out[place] += 1
            next_rank = self._ranks(place, num_pending).chance(fan_out[place])
            heapq.heappush(heap, (-stops[place] * next_rank, place))
        return tuple(fan_out)

    def learn(self, verdict: Verdict, rank: int | None) -> None:
        """A verdict, and the rank of its last token among those prepared; None on a miss."""
        accepted = verdict.num_accepted
        for place in range(min(accepted, MAX_SPECULATIVE_TOKENS)):
            self._count(place, accepted=True)
        if accepted < verdict.num_proposed:
            self._count(accepted, accepted=False)
        self._ranks(accepted, verdict.num_proposed).see(rank)

    def _count(self, place: int, *, accepted: bool) -> None:
        if place < MAX_SPECULATIVE_TOKENS:
            self._accepted[place] = self._accepted[place] * _DISCOUNT + accepted
            self._rejected[place] = self._rejected[place] * _DISCOUNT + (not accepted)

    def _ranks(self, place: int, num_pending: int) -> _Ranks:
        return self._bonus if place == num_pending else self._recovered

    def _stop_chances(self, num_pending: int) -> list[float]:
        """Chance that 0, 1, …, all of the pending guesses are accepted."""
        chances, reach = [], 1.0
        for place in range(num_pending):
            index = min(place, MAX_SPECULATIVE_TOKENS - 1)
            accepted, rejected = self._accepted[index], self._rejected[index]
            rate = accepted / (accepted + rejected)
            chances.append(reach * (1 - rate))
            reach *= rate
        return [*chances, reach]
