"""Whether to hold a pass back for sessions that are about to come back.

A session that has just been answered usually returns with its next entry after one trip to the
orchestrator. A pass that starts before leaves it behind, and it waits for the whole pass; so do
the others next time, and every round costs two passes. Waiting for it is worth while as long as
the trip is short beside a pass; where draft and target share a card, far beyond that, because two
passes of one round then take the card from each other.
"""

from collections.abc import Hashable

_SMOOTHING = 0.1
_MARGIN = 2.0
"""Trips vary: most are back after the mean and this many mean deviations."""
DEFAULT_MAX_PASSES = 0.7
"""The longest wait, in passes."""


class ReturnWindow:
    """Learns how long trips and passes take. Times are seconds on one clock.

    It waits when those who are out are due within `max_passes` passes.
    """

    def __init__(self, max_passes: float = DEFAULT_MAX_PASSES) -> None:
        self._max_passes = max_passes
        self._trip_s = 0.0
        self._deviation_s = 0.0
        self._pass_s = 0.0
        self.busy_s = 0.0
        """Spent in passes so far."""
        self._answered: dict[Hashable, float] = {}

    def answered(self, key: Hashable, now: float) -> None:
        """A session has got its reply and is out."""
        self._answered[key] = now

    def returned(self, key: Hashable, now: float) -> None:
        """A session is back, with more work or for good."""
        sent = self._answered.pop(key, None)
        if sent is not None:
            # A pause of minutes says no more than a trip that is too long to wait for.
            trip_s = min(now - sent, (2 + self._max_passes) * self._pass_s)
            self._deviation_s += _SMOOTHING * (abs(trip_s - self._trip_s) - self._deviation_s)
            self._trip_s += _SMOOTHING * (trip_s - self._trip_s)

    def passed(self, seconds: float) -> None:
        """A pass has run; who has not come back by then is not waited for again."""
        self.busy_s += seconds
        self._pass_s += _SMOOTHING * (seconds - self._pass_s)

    @property
    def pass_s(self) -> float:
        """A pass, smoothed."""
        return self._pass_s

    def close(self) -> None:
        """The next pass starts."""
        self._answered.clear()

    def wait_s(self, now: float) -> float:
        """How long the next pass should wait from now on; 0 to start at once."""
        if not self._answered:
            return 0.0
        due = max(self._answered.values()) + self._trip_s + _MARGIN * self._deviation_s
        left = due - now
        return left if 0 < left <= self._max_passes * self._pass_s else 0.0
