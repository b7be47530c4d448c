"""Whether to hold a pass back for sessions that are about to come back.

A session that has just been answered usually returns with its next entry after one trip to the
orchestrator, or to its draft. A pass that starts before leaves it behind, and it waits for the
whole pass; so do the others next time, and every round costs two passes. Waiting for it is worth
while as long as the trip is short beside a pass. Where the draft computes on the same device it is
far beyond that: those who were left behind draft while the others' pass runs, each slows the other
down, and from then on every round takes two passes and two turns of the draft.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

_SMOOTHING = 0.1
_MARGIN = 2.0
"""Trips vary: most are back after the mean and this many mean deviations."""
DEFAULT_MAX_PASSES = 0.7
"""The longest wait, in passes."""
_BESIDE_MAX_PASSES = 4.0
"""The same for those whose draft computes on this device."""


@dataclass(slots=True)
class _Trips:
    """Sessions that are out the same way, and how long that takes."""

    max_passes: float
    mean_s: float = 0.0
    deviation_s: float = 0.0
    left: dict[Hashable, float] = field(default_factory=dict)
    """When each went, of all who are out: trips that a pass did not wait for are trips too."""
    awaited: set[Hashable] = field(default_factory=set)
    """Those who have gone since the last pass began."""

    def returned(self, key: Hashable, now: float, pass_s: float) -> None:
        sent = self.left.pop(key, None)
        if sent is None:
            return
        self.awaited.discard(key)
        # A pause of minutes says no more than a trip that is too long to wait for.
        trip_s = min(now - sent, (2 + self.max_passes) * pass_s)
        self.deviation_s += _SMOOTHING * (abs(trip_s - self.mean_s) - self.deviation_s)
        self.mean_s += _SMOOTHING * (trip_s - self.mean_s)

    def wait_s(self, now: float, pass_s: float) -> float:
        if not self.awaited:
            return 0.0
        last = max(self.left[key] for key in self.awaited)
        left = last + self.mean_s + _MARGIN * self.deviation_s - now
        return left if 0 < left <= self.max_passes * pass_s else 0.0


class ReturnWindow:
    """Learns how long trips and passes take. Times are seconds on one clock.

    It waits when those who are out are due within `max_passes` passes, or within more if their
    draft is beside it.
    """

    def __init__(self, max_passes: float = DEFAULT_MAX_PASSES) -> None:
        self._away = _Trips(max_passes)
        self._beside = _Trips(max(max_passes, _BESIDE_MAX_PASSES))
        self.pass_s = 0.0
        """A pass, smoothed."""
        self.busy_s = 0.0
        """Spent in passes so far."""

    def answered(self, key: Hashable, now: float, *, beside: bool = False) -> None:
        """A session has got its reply and is out; `beside`: with a draft on this device."""
        trips = self._beside if beside else self._away
        trips.left[key] = now
        trips.awaited.add(key)

    def returned(self, key: Hashable, at: float) -> None:
        """A session is back, with more work or for good."""
        self._away.returned(key, at, self.pass_s)
        self._beside.returned(key, at, self.pass_s)

    def gone(self, key: Hashable) -> None:
        """A session will not come back, or nobody knows when."""
        for trips in (self._away, self._beside):
            trips.left.pop(key, None)
            trips.awaited.discard(key)

    def passed(self, seconds: float) -> None:
        """A pass has run; who has not come back by then is not waited for again."""
        self.busy_s += seconds
        self.pass_s += _SMOOTHING * (seconds - self.pass_s)

    def close(self) -> None:
        """The next pass starts."""
        self._away.awaited.clear()
        self._beside.awaited.clear()

    def wait_s(self, now: float) -> float:
        """How long the next pass should wait from now on; 0 to start at once."""
        return max(trips.wait_s(now, self.pass_s) for trips in (self._away, self._beside))
