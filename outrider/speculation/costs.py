"""What work costs: seconds as a line of its size, fitted while serving.

Linear, never constant: a pass that is thought to cost the same whatever its rows makes longer
proposals look free, and their length runs away.
"""

from dataclasses import dataclass
from typing import Protocol

_CLIP = 4.0
"""An observation further from the line than this many mean deviations counts as this far."""

_DRIFT = 0.05
"""The level follows the last 1 / _DRIFT observations: machines slow down and recover."""

_SLOPE_FORGETTING = 0.005
"""Share of what is known of a slope that one observation may replace, at most."""

_MOST_BY_SIZE = 0.98

_AGEING = 2e-4
"""Share that each observation which tells about a slope replaces at least."""


class Cost(Protocol):
    """Seconds by size, and by something else where there is something else."""

    @property
    def slope(self) -> float:
        """Seconds that one more of the first size costs."""

    def predict(self, size: float, other: float = 0.0) -> float:
        """Seconds."""


@dataclass(frozen=True, slots=True)
class Line:
    """A known cost: base + slope * size + other_slope * other, in seconds."""

    base: float
    slope: float = 0.0
    other_slope: float = 0.0

    def predict(self, size: float, other: float = 0.0) -> float:
        return self.base + self.slope * size + self.other_slope * other


class CostLine:
    """Least squares of seconds on two sizes, online, forgetting, robust; slopes are never negative.

    The level and the slopes forget at different paces. The level follows the last observations.
    Slopes come from how far each observation is from that level, and what is known of them is
    replaced only by observations that tell about them: while the size stays the same, a slope
    learned before stays, and a drift of the level is not taken for one. (Recursive least squares
    with directional forgetting; Kulhavý and Kárný, 1984.)

    `relative_slope` and `relative_other` are what is thought of the slopes at first, as shares
    of the first observation, with the weights of `prior` squared units of the size.
    """

    __slots__ = (
        "_cross", "_deviation", "_info", "_info_other", "_mean", "_mean_other", "_mean_size",
        "_relative", "_unseen", "num_observations", "other_slope", "slope",
    )  # fmt: skip

    def __init__(
        self,
        *,
        relative_slope: float = 0.03,
        relative_other: float = 0.0,
        prior: tuple[float, float] = (4.0, 0.5),
    ) -> None:
        self.num_observations = 0
        self.slope = self.other_slope = 0.0
        self._relative = (relative_slope, relative_other)
        self._info, self._info_other = prior
        self._cross = 0.0
        self._mean = self._mean_size = self._mean_other = self._deviation = 0.0
        self._unseen = 0.0

    def predict(self, size: float, other: float = 0.0) -> float:
        """Seconds; 0 before the first observation."""
        seconds = (
            self._mean
            + self.slope * (size - self._mean_size)
            + self.other_slope * (other - self._mean_other)
        )
        return seconds if seconds > 0.0 else 0.0

    def observe(self, seconds: float, size: float, other: float = 0.0) -> None:
        if not self.num_observations:
            self._start(seconds, size, other)
            return
        self.num_observations += 1
        d_size, d_other = size - self._mean_size, other - self._mean_other
        expected = self._mean + self.slope * d_size + self.other_slope * d_other
        error = self._clipped(seconds - expected)
        self._learn_slopes(d_size, d_other, error)
        pace = max(1.0 - (1.0 - _DRIFT) ** (1.0 + self._unseen), 1.0 / self.num_observations)
        self._unseen = 0.0
        self._mean += pace * (expected + error - self._mean)
        self._mean_size += pace * d_size
        self._mean_other += pace * d_other

    def passed_over(self, times: float) -> None:
        """So many observations might have been made meanwhile and were not: the next one says more
        of the level than what was known."""
        self._unseen += times

    def line(self) -> Line:
        """The fit as it is."""
        return Line(self.predict(0.0), self.slope, self.other_slope)

    def _start(self, seconds: float, size: float, other: float) -> None:
        slope, other_slope = self._relative
        base = seconds / (1.0 + slope * size + other_slope * other)
        self.slope, self.other_slope = slope * base, other_slope * base
        self._mean, self._mean_size, self._mean_other = seconds, size, other
        self._deviation = 0.1 * seconds
        self.num_observations = 1

    def _clipped(self, error: float) -> float:
        """The error, no further than an outlier may pull; a lasting one moves the limit, and so
        does not having looked."""
        if self._deviation > 0.0:
            limit = _CLIP * self._deviation * (1.0 + self._unseen)
            error = limit if error > limit else -limit if error < -limit else error
        self._deviation += _DRIFT * (abs(error) - self._deviation)
        self._deviation = max(self._deviation, 0.005 * self._mean)
        return error

    def _learn_slopes(self, d_size: float, d_other: float, error: float) -> None:
        """One step of least squares: slopes += inverse(information) * deviation * error."""
        keep, keep_other = _kept(d_size, self._info), _kept(d_other, self._info_other)
        if keep == 1.0 and keep_other == 1.0:
            return
        self._info = self._info * keep + d_size * d_size
        self._info_other = self._info_other * keep_other + d_other * d_other
        self._cross = self._cross * (keep * keep_other) ** 0.5 + d_size * d_other
        info, other, cross = self._info, self._info_other, self._cross
        gain = error / max(info * other - cross * cross, 1e-9 * info * other)
        slope = self.slope + (other * d_size - cross * d_other) * gain
        other_slope = self.other_slope + (info * d_other - cross * d_size) * gain
        if slope < 0.0:
            other_slope += cross / other * slope
            slope = 0.0
        if other_slope < 0.0:
            slope = max(slope + cross / info * other_slope, 0.0)
            other_slope = 0.0
        most = slope * self._mean_size + other_slope * self._mean_other
        if most > _MOST_BY_SIZE * max(self._mean, 0.0):
            # Work of no size is not free.
            share = _MOST_BY_SIZE * max(self._mean, 0.0) / most
            slope, other_slope = slope * share, other_slope * share
        self.slope, self.other_slope = slope, other_slope


def _kept(deviation: float, info: float) -> float:
    """Share of the old information that stays: as much goes as comes."""
    if -0.01 < deviation < 0.01:
        return 1.0
    return 1.0 - min(_SLOPE_FORGETTING, deviation * deviation / info) - _AGEING
