"""Times of calls to a peer and back, and what they say about its clock."""

import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple

from outrider.v1 import facts_pb2

MAX_SAMPLES = 200
DEFAULT_SAMPLES = 20


class Reading(NamedTuple):
    """One question for the time, in microseconds since 1970: when it was sent and its answer
    arrived by one's own clock, when it came and was answered by the peer's."""

    sent: int
    came: int
    answered: int
    arrived: int

    @property
    def trip_us(self) -> int:
        """On the way, there and back."""
        return max((self.arrived - self.sent) - (self.answered - self.came), 0)


def unix_us() -> int:
    return time.time_ns() // 1000


async def measure(
    call: Callable[[], Awaitable[object]], samples: int, *, within_s: float
) -> facts_pb2.RoundTrips:
    """Calls one after the other, the first one, which may have to connect, not counted. No call is
    begun after `within_s`. Raises what a call does."""
    await call()
    ends = time.monotonic() + within_s
    seconds: list[float] = []
    while len(seconds) < min(samples, MAX_SAMPLES) and time.monotonic() < ends:
        started = time.perf_counter()
        await call()
        seconds.append(time.perf_counter() - started)
    return summary(seconds)


def summary(seconds: Sequence[float]) -> facts_pb2.RoundTrips:
    """Of measured trips; empty without any."""
    if not seconds:
        return facts_pb2.RoundTrips()
    ordered = sorted(seconds)

    def at(share: float) -> int:
        return round(ordered[min(int(share * len(ordered)), len(ordered) - 1)] * 1e6)

    return facts_pb2.RoundTrips(
        samples=len(ordered), least_us=at(0.0), p50_us=at(0.5), p99_us=at(0.99)
    )


def clock_of(readings: Iterable[Reading]) -> facts_pb2.Clock:
    """By the reading whose trip was shortest (as NTP does): the peer read its clock somewhere on
    the way, so half of the trip is what it may be wrong by. Needs one reading."""
    best = min(readings, key=lambda reading: reading.trip_us)
    ahead = ((best.came - best.sent) + (best.answered - best.arrived)) // 2
    return facts_pb2.Clock(ahead_us=ahead, error_us=(best.trip_us + 1) // 2)
