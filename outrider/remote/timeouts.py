"""Timeouts of what nearly always comes in time, on one event loop.

A timer of the loop for each would cost more than the rest of a question to a worker. So those that
end at about the same time share one.
"""

import asyncio
import itertools
import logging
import math
from collections.abc import Callable
from typing import NamedTuple

logger = logging.getLogger(__name__)

_PARTS = 6
"""A timeout ends up to 2 ** (1 - 6) of itself late."""
_SHORTEST_S = 1e-3

Expire = Callable[[], object]


class Timeout(NamedTuple):
    """One that runs."""

    together: dict[int, Expire]
    key: int

    def cancel(self) -> None:
        """Nothing happens at its end, if that is still to come."""
        self.together.pop(self.key, None)


class Timeouts:
    """Calls what is not cancelled in time, never early and at most a 32nd of its time late."""

    def __init__(self) -> None:
        self._slots: dict[tuple[float, int], dict[int, Expire]] = {}
        """By length, and number of such lengths on the loop's clock, of the time that they end."""
        self._keys = itertools.count()

    def start(self, timeout_s: float, expire: Expire) -> Timeout:
        """`expire` is called on the running loop."""
        loop = asyncio.get_running_loop()
        timeout_s = max(timeout_s, _SHORTEST_S)
        step_s = math.ldexp(1.0, math.frexp(timeout_s)[1] - _PARTS)
        slot = step_s, math.ceil((loop.time() + timeout_s) / step_s)
        together = self._slots.get(slot)
        if together is None:
            together = self._slots[slot] = {}
            loop.call_at(slot[0] * slot[1], self._end, slot)
        key = next(self._keys)
        together[key] = expire
        return Timeout(together, key)

    def _end(self, slot: tuple[float, int]) -> None:
        together = self._slots.pop(slot)
        while together:  # One that ends may cancel others.
            _, expire = together.popitem()
            try:
                expire()
            except Exception:
                logger.exception("a timeout failed")
