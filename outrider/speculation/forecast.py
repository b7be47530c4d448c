"""Which outcomes of a verification a draft prepares for, learned from those that came about."""

from dataclasses import dataclass, field

from outrider.speculation.acceptance import AcceptanceModel, PoolPrior
from outrider.speculation.fan_out import RankCounts, allocate
from outrider.types import Verdict

_PACE = 0.1
"""How fast the share of answers that are in time is followed."""


@dataclass(slots=True)
class Punctuality:
    """Whether a draft's answers are there by the end of the pass that they were asked for."""

    share: float = 1.0

    def observe(self, *, in_time: bool) -> None:
        self.share += _PACE * (in_time - self.share)


@dataclass(frozen=True, slots=True)
class Shared:
    """What all sessions of one draft have seen."""

    acceptance: PoolPrior = field(default_factory=PoolPrior)
    ranks: RankCounts = field(default_factory=RankCounts)
    punctuality: Punctuality = field(default_factory=Punctuality)


class Forecast:
    """The outcomes of one session's verifications.

    Only what rounds brought goes in, and of a round that is prepared for only its length: whether
    a guess is prepared never depends on its own value.
    """

    def __init__(self, shared: Shared) -> None:
        self._acceptance = AcceptanceModel(shared.acceptance)
        self._ranks = shared.ranks
        self._punctuality = shared.punctuality

    @property
    def in_time(self) -> bool:
        """Whether answers mostly come before the verdict. A run-ahead guess that does not is worth
        less than the likeliest token, which the target's own more often is."""
        return self._punctuality.share >= 0.5

    def expected_tokens(self, length: int) -> float:
        """Of a round with so many guesses, its own token included."""
        return self._acceptance.expected_tokens(length)

    def answered(self, *, in_time: bool) -> None:
        """A pass is over, and the answer that was asked for meanwhile was there or not."""
        self._punctuality.observe(in_time=in_time)

    def fan_out(self, num_pending: int, budget: int, *, run_ahead: bool = False) -> tuple[int, ...]:
        """How many of the likeliest tokens to prepare for after 0, 1, …, `num_pending` accepted
        guesses: the likeliest outcomes, `budget` together; with `run_ahead` one of them at least is
        behind all guesses."""
        counts = self._likeliest(num_pending, budget)
        if run_ahead and not counts[-1]:
            counts = self._likeliest(num_pending, budget - 1)
            counts[-1] = 1
        return tuple(counts)

    def _likeliest(self, num_pending: int, budget: int) -> list[int]:
        counts = [0] * (num_pending + 1)
        acceptance = self._acceptance.survival(num_pending + 1)
        for num_accepted, _ in allocate(acceptance, self._ranks, budget).outcomes:
            counts[num_accepted] += 1
        return counts

    def saw(self, verdict: Verdict) -> None:
        """A verification ended so."""
        self._acceptance.observe(verdict.num_guesses, verdict.num_survived)

    def found(self, verdict: Verdict, rank: int | None, prepared: int) -> None:
        """Its last token was of this rank among the `prepared` ones of its place; None: it was
        none of them."""
        bonus = verdict.num_accepted == verdict.num_proposed
        self._ranks.observe(rank, prepared=prepared, bonus=bonus)
