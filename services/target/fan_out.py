"""Which outcomes of a verification a draft prepares for, learned from those that came about."""

from dataclasses import dataclass, field

from outrider.speculation.acceptance import AcceptanceModel, PoolPrior
from outrider.speculation.fan_out import RankCounts, allocate
from outrider.types import Verdict


@dataclass(frozen=True, slots=True)
class Shared:
    """What all sessions of one draft have seen."""

    acceptance: PoolPrior = field(default_factory=PoolPrior)
    ranks: RankCounts = field(default_factory=RankCounts)


class Forecast:
    """The outcomes of one session's verifications.

    Only what rounds brought goes in, and of a round that is prepared for only its length: whether
    a guess is prepared never depends on its own value.
    """

    def __init__(self, shared: Shared) -> None:
        self._acceptance = AcceptanceModel(shared.acceptance)
        self._ranks = shared.ranks

    def fan_out(self, num_pending: int, budget: int) -> tuple[int, ...]:
        """How many of the likeliest tokens to prepare for after 0, 1, …, `num_pending` accepted
        guesses: the likeliest outcomes, `budget` together."""
        counts = [0] * (num_pending + 1)
        acceptance = self._acceptance.survival(num_pending + 1)
        for num_accepted, _ in allocate(acceptance, self._ranks, budget).outcomes:
            counts[num_accepted] += 1
        return tuple(counts)

    def saw(self, verdict: Verdict) -> None:
        """A verification ended so."""
        self._acceptance.observe(verdict.num_proposed, verdict.num_accepted)

    def found(self, verdict: Verdict, rank: int | None, prepared: int) -> None:
        """Its last token was of this rank among the `prepared` ones of its place; None: it was
        none of them."""
        bonus = verdict.num_accepted == verdict.num_proposed
        self._ranks.observe(rank, prepared=prepared, bonus=bonus)
