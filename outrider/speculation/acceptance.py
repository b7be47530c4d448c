"""Which guesses survive: the acceptance of a position, given that all before it were accepted.

A guess is looked at only where every guess before it was accepted, so a round tells about the
positions up to its first rejection and nothing about those behind it. Counting these as rejected
too would take the rate down the longer proposals are.
"""

from collections.abc import Sequence

_LOWEST, _HIGHEST = 0.01, 0.99
"""No estimate is certain: odds stay finite, and a surprise stays possible."""

_HEAVIEST = 1e9

_REFRESH_EVERY = 8
"""Observations between two looks at a pool, which moves slowly."""

_FORECAST_FOR = 4
"""Rounds that a forecast is good for."""

_CHANGE_Z = 2.5
"""Standard deviations between what was expected of late and what came: the text has changed."""

_UNSEEN_KEPT = 0.95
"""How much of what guesses told counts a plain round later: text that nobody looks at may have
become another."""

_CHANGE_MEMORY = 0.85
_KEPT_AFTER_CHANGE = 0.1
_DEPARTED_WEIGHT = 4.0
"""A text that has turned out to be another than the pool's goes by itself."""


def expected_tokens(acceptance: Sequence[float]) -> float:
    """Tokens that a round emits, its own one included: 1 + sum over i of prod over j <= i of a_j.

    Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), eq. 1,
    without its assumption that all positions are alike.
    """
    tokens = survival = 1.0
    for rate in acceptance:
        survival *= rate
        tokens += survival
    return tokens


class DiscountedCounts:
    """Accepted and looked-at guesses by position; old rounds fade by `discount` a round.

    The weight of a new round grows instead of all old ones shrinking.
    """

    def __init__(self, discount: float) -> None:
        self._growth = 1.0 / discount
        self._weight = 1.0
        self._accepted: list[float] = []
        self._seen: list[float] = []

    def observe(self, num_proposed: int, num_accepted: int) -> None:
        if num_proposed <= 0:
            return
        self._weight *= self._growth
        if self._weight > _HEAVIEST:
            self._rescale()
        looked_at = num_accepted + 1 if num_accepted < num_proposed else num_proposed
        while len(self._seen) < looked_at:
            self._accepted.append(0.0)
            self._seen.append(0.0)
        for i in range(looked_at):
            self._seen[i] += self._weight
        for i in range(num_accepted):
            self._accepted[i] += self._weight

    def counts(self) -> tuple[list[float], list[float]]:
        """Accepted, and looked at, by position; the last round counts as 1."""
        scale = 1.0 / self._weight
        return [count * scale for count in self._accepted], [n * scale for n in self._seen]

    def add(self, accepted: Sequence[float], seen: Sequence[float]) -> None:
        """Counts from elsewhere, as if of the last rounds."""
        for i, (kept, looked_at) in enumerate(zip(accepted, seen, strict=True)):
            while len(self._seen) <= i:
                self._accepted.append(0.0)
                self._seen.append(0.0)
            self._accepted[i] += self._weight * kept
            self._seen[i] += self._weight * looked_at

    def fade(self, kept: float) -> None:
        """Keep this share of what has been counted."""
        self._weight /= kept

    def _rescale(self) -> None:
        self._accepted, self._seen = self.counts()
        self._weight = 1.0


class PoolPrior:
    """What all sessions of one target and proposer found: where a new session starts from.

    `rate` stands for the first position until something is known, with the weight of `weight`
    looked-at guesses; each further position starts from the one before it. With a `parent` each
    starts from what is known there, and what is found here is told there too.
    """

    def __init__(
        self,
        *,
        rate: float = 0.5,
        weight: float = 4.0,
        discount: float = 0.998,
        parent: "PoolPrior | None" = None,
    ) -> None:
        self._parent = parent
        self._rate = rate
        self._weight = weight
        self._counts = DiscountedCounts(discount)
        self._age = 0
        self._cached: list[float] = []

    def observe(self, num_proposed: int, num_accepted: int) -> None:
        if self._parent is not None:
            self._parent.observe(num_proposed, num_accepted)
        self._counts.observe(num_proposed, num_accepted)
        self._age += 1
        if self._age >= _REFRESH_EVERY:
            self._cached = []

    def survival(self, k: int) -> list[float]:
        """a_1 … a_k, each given that all before it were accepted."""
        if len(self._cached) < k:
            self._cached = self._estimate(max(k, 8))
            self._age = 0
        return self._cached[:k]

    def _estimate(self, k: int) -> list[float]:
        accepted, seen = self._counts.counts()
        rates, last = [], self._rate
        before = self._parent.survival(k) if self._parent is not None else None
        for i in range(k):
            last = last if before is None else before[i]
            if i < len(seen):
                last = (accepted[i] + self._weight * last) / (seen[i] + self._weight)
            rates.append(min(max(last, _LOWEST), _HIGHEST))
        return rates


class AcceptanceModel:
    """Acceptance by position of one session; feeds the pool that it starts from.

    A position's prior is the estimate of the position before it, moved by the ratio of odds that
    the pool shows between the two: beyond what was tried, the last known rate goes on, and no
    position is better than evidence says. Where the text changes (the last rounds are far from
    what was expected), older counts are set aside.
    """

    def __init__(self, pool: PoolPrior, *, weight: float = 16.0, discount: float = 0.97) -> None:
        self._pool = pool
        self._weight = weight
        self._counts = DiscountedCounts(discount)
        self._departed = False
        self._memory = 1.0 / (1.0 - discount) if discount < 1.0 else _HEAVIEST
        self._estimates: list[float] = []
        self._age = 0
        self._surprise = self._variance = 0.0
        self.num_changes = 0

    def observe(self, num_proposed: int, num_accepted: int) -> None:
        if num_proposed <= 0:
            return
        self._watch(num_proposed, num_accepted)
        self._counts.observe(num_proposed, num_accepted)
        self._pool.observe(num_proposed, num_accepted)
        self._age += 1

    def plain_rounds(self, count: int) -> None:
        """So many rounds had no guesses."""
        if not self._departed:
            self._counts.fade(_UNSEEN_KEPT**count)
            self._age += 1

    def recall(self, proposed: Sequence[int], accepted: Sequence[int]) -> None:
        """Start from counts of the generation's former rounds: of guesses that were proposed at a
        position, and of those accepted. They weigh as much as this model remembers, at most."""
        if not proposed or not proposed[0]:
            return
        share = min(self._memory / proposed[0], 1.0)
        seen, kept = [], []
        reached, before = float(proposed[0]), float(proposed[0])
        for guesses, survived in zip(proposed, accepted, strict=True):
            # A guess behind a rejected one was proposed, but nobody looked at it.
            looked_at = reached * guesses / before
            if looked_at <= 0.0:
                break
            seen.append(share * looked_at)
            kept.append(share * min(float(survived), looked_at))
            reached, before = float(survived), float(guesses)
        self._counts.add(kept, seen)
        self._depart()
        self._age += 1

    def survival(self, k: int) -> list[float]:
        """a_1 … a_k, each given that all before it were accepted."""
        if self._age or len(self._estimates) < k:
            self._estimates = self._estimate(max(k, len(self._estimates)))
            self._age = 0
        return self._estimates[:k]

    def last_survival(self, k: int) -> list[float]:
        """The same as it was a few rounds ago, at most: a forecast that mostly costs nothing."""
        if self._age < _FORECAST_FOR and len(self._estimates) >= k:
            return self._estimates[:k]
        return self.survival(k)

    def expected_tokens(self, k: int) -> float:
        """Tokens of a round with k guesses, its own one included."""
        return expected_tokens(self.survival(k))

    def _estimate(self, k: int) -> list[float]:
        (accepted, seen), weight = self._counts.counts(), self._weight
        known = len(seen)
        rates: list[float] = []
        odds_ratio = 1.0
        for i, pooled in enumerate(self._pool.survival(k)):
            pooled_odds = pooled / (1.0 - pooled)
            odds = pooled_odds * odds_ratio
            rate = odds / (1.0 + odds)
            if i < known:
                rate = (accepted[i] + weight * rate) / (seen[i] + weight)
            rate = _LOWEST if rate < _LOWEST else _HIGHEST if rate > _HIGHEST else rate
            odds_ratio = rate / (1.0 - rate) / pooled_odds
            rates.append(rate)
        return rates

    def _depart(self) -> None:
        self._departed, self._weight = True, min(self._weight, _DEPARTED_WEIGHT)

    def _watch(self, num_proposed: int, num_accepted: int) -> None:
        """Set older counts aside where the last rounds were not what they say."""
        looked_at = num_accepted + 1 if num_accepted < num_proposed else num_proposed
        surprise, variance = float(num_accepted), 0.0
        for rate in self.last_survival(looked_at):
            surprise -= rate
            variance += rate * (1.0 - rate)
        self._surprise = _CHANGE_MEMORY * self._surprise + surprise
        # A sum that fades by m has the variance of one that fades by m squared.
        self._variance = _CHANGE_MEMORY**2 * self._variance + variance
        if self._surprise**2 > _CHANGE_Z**2 * (self._variance + 0.25):
            self._counts.fade(_KEPT_AFTER_CHANGE)
            self._depart()
            self._surprise = self._variance = 0.0
            self.num_changes += 1
