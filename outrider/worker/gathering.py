"""Whether to hold a pass back for sessions that are about to come back.

A session that has just been answered usually returns with its next entry after one trip to the
orchestrator. A pass that starts before leaves it behind, and it waits for the whole pass; so do
the others next time, and every round costs two passes. Waiting for it is worth while as long as
the trip is short beside a pass.
"""

from collections.abc import Hashable

_SMOOTHING = 0.1
_MARGIN = 2.0
"""Trips vary; most are back after this many times the mean."""
_MAX_SHARE = 0.4
"""Of a pass, the most that waiting may cost."""


class ReturnWindow:
    """Learns how long trips and passes take. Times are seconds on one clock."""

    def __init__(self) -> None:
        self._trip_s = 0.0
        self._pass_s = 0.0
        self._answered: dict[Hashable, float] = {}

    def answered(self, key: Hashable, now: float) -> None:
        self._answered[key] = now

    def returned(self, key: Hashable, now: float) -> None:
        """A session is back, with more work or for good."""
        sent = self._answered.pop(key, None)
        if sent is not None:
            # A pause of minutes says no more than a trip that is too long to wait for.
            trip_s = min(now - sent, 2 * self._pass_s)
            self._trip_s += _SMOOTHING * (trip_s - self._trip_s)

    def passed(self, seconds: float) -> None:
        """A pass has run; who has not come back by then is not waited for again."""
        self._pass_s += _SMOOTHING * (seconds - self._pass_s)

    def close(self) -> None:
        """The next pass starts."""
        self._answered.clear()

    def wait_s(self, now: float) -> float:
        """How long the next pass should wait from now on; 0 to start at once."""
        window = _MARGIN * self._trip_s
        if not self._answered or window > _MAX_SHARE * self._pass_s:
            return 0.0
        return max(max(self._answered.values()) + window - now, 0.0)
