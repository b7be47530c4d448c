"""Whether bringing KV back beats computing it again.

Both costs are measured at start, and each has a factor that follows what really happened: under
load a prefill takes longer than alone, and a store serves others too.
"""

from dataclasses import dataclass

_PACE = 0.2
"""How fast the factors follow."""
_MOST = 20.0
"""A factor is at most this, and at least one over it."""
_LEAST_HITS = 0.05
"""As if at least so many lookups found something, so that it is looked up now and then."""


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Seconds that KV of a token takes to compute: `token_s`, and `context_s` for each token
    before it."""

    token_s: float
    context_s: float = 0.0

    def seconds(self, start: int, stop: int) -> float:
        """For tokens start … stop - 1."""
        return (stop - start) * self.token_s + self.context_s * (stop**2 - start**2) / 2


@dataclass(frozen=True, slots=True)
class FetchCost:
    """Seconds that a fetch takes: one trip, and `byte_s` for each byte, its check included."""

    latency_s: float
    byte_s: float

    def seconds(self, num_bytes: int) -> float:
        return self.latency_s + num_bytes * self.byte_s


class Estimate:
    """Compares the two. `fetch` is None until the store has been measured."""

    def __init__(self, prefill: PrefillCost, block_bytes: int, block_tokens: int) -> None:
        self.prefill = prefill
        self.fetch: FetchCost | None = None
        self._block_bytes = block_bytes
        self._block_tokens = block_tokens
        self._prefill_factor = self._fetch_factor = 1.0
        self._hits = 0.5

    def recompute_s(self, start: int, stop: int) -> float:
        return self._prefill_factor * self.prefill.seconds(start, stop)

    def restore_s(self, start: int, stop: int, *, backlog_bytes: int = 0) -> float:
        """With `backlog_bytes` to be fetched first; infinite where the store is not measured."""
        if self.fetch is None:
            return float("inf")
        blocks = -(-stop // self._block_tokens) - start // self._block_tokens
        num_bytes = blocks * self._block_bytes + backlog_bytes
        return self._fetch_factor * self.fetch.seconds(num_bytes)

    def gain_s(self, start: int, stop: int, *, backlog_bytes: int = 0) -> float:
        """What fetching tokens start … stop - 1 saves where they are there."""
        restore_s = self.restore_s(start, stop, backlog_bytes=backlog_bytes)
        return self.recompute_s(start, stop) - restore_s

    def pays(self, start: int, stop: int, *, backlog_bytes: int = 0) -> bool:
        """Whether to look for them: they may be there or not."""
        gain = self.gain_s(start, stop, backlog_bytes=backlog_bytes)
        if self.fetch is None or gain <= 0:
            return False
        return self._hits * gain > (1 - self._hits) * self.fetch.latency_s

    def measured(self, fetch: FetchCost) -> None:
        """The store has been measured, at first or again."""
        self.fetch, self._fetch_factor = fetch, 1.0

    def recomputed(self, seconds: float, start: int, stop: int) -> None:
        """Computing these took so long."""
        alone = self.prefill.seconds(start, stop)
        self._prefill_factor = _follow(self._prefill_factor, seconds, alone)

    def restored(self, seconds: float, num_bytes: int) -> None:
        """Fetching so many bytes until they were in the pool took so long."""
        if self.fetch is not None:
            alone = self.fetch.seconds(num_bytes)
            self._fetch_factor = _follow(self._fetch_factor, seconds, alone)

    def late(self, seconds: float, num_bytes: int) -> None:
        """Fetching so many was given up after so long: it takes longer."""
        if self.fetch is not None and seconds > self._fetch_factor * self.fetch.seconds(num_bytes):
            self.restored(seconds, num_bytes)

    def looked_up(self, found: bool) -> None:
        self._hits = max(self._hits + _PACE * (found - self._hits), _LEAST_HITS)


def _follow(factor: float, seconds: float, alone: float) -> float:
    if alone <= 0:
        return factor
    seen = min(max(seconds / alone, 1 / _MOST), _MOST)
    return factor + _PACE * (seen - factor)
