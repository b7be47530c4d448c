"""How many calls a caller may start: a token bucket each."""

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from outrider.errors import InvalidArgument, ResourceExhausted

MAX_CALLERS = 10_000


@dataclass(slots=True)
class _Bucket:
    calls: float
    filled_at: float


class CallQuota:
    """`per_s` calls a second for each caller, `burst` at once. 0 a second: no limit.

    Buckets of at most MAX_CALLERS callers are kept: who called longest ago is forgotten first, and
    has a full bucket by then unless more callers than that take turns.
    """

    def __init__(
        self, per_s: float, burst: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Without `burst` two seconds' calls may come at once."""
        if not 0 <= per_s <= 1e6:
            raise InvalidArgument(f"{per_s} is not in [0, 1000000]", field="calls_per_s")
        if not 0 <= burst <= 1_000_000:
            raise InvalidArgument(f"{burst} is not in [0, 1000000]", field="calls_burst")
        self._per_s = per_s
        self._burst = burst or max(math.ceil(2 * per_s), 1)
        self._clock = clock
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def take(self, tenant: str) -> None:
        """One call of a caller; raises ResourceExhausted where it has none left."""
        if not self._per_s:
            return
        now = self._clock()
        bucket = self._buckets.setdefault(tenant, _Bucket(self._burst, now))
        self._buckets.move_to_end(tenant)
        if len(self._buckets) > MAX_CALLERS:
            self._buckets.popitem(last=False)
        grown = bucket.calls + (now - bucket.filled_at) * self._per_s
        bucket.calls, bucket.filled_at = min(grown, self._burst), now
        if bucket.calls < 1:
            wait_s = (1 - bucket.calls) / self._per_s
            raise ResourceExhausted(
                f"more than {self._per_s:g} calls a second; retry in {wait_s:.2f} s",
                retry_after_s=wait_s,
            )
        bucket.calls -= 1
