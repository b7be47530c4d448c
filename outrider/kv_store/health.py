"""Whether the store is to be used now, and what happened with it, counted."""

import logging
import threading
import time
from collections import Counter

from outrider.kv_store.connection import StoreAddress

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0


class Counts:
    """Adds to a counter from any thread; the names are its own there (`kv_…`)."""

    def __init__(self, counter: Counter[str]) -> None:
        self._counter = counter
        self._lock = threading.Lock()

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._counter[name] += amount

    def __getitem__(self, name: str) -> int:
        return self._counter[name]


class Health:
    """A store that fails is left alone for a while, longer each time; a probe brings it back.

    `losses` changes whenever something that was thought to be there may not be.
    """

    def __init__(self, address: StoreAddress, counts: Counts) -> None:
        self.up = False
        self.losses = 0
        self._address = address
        self._counts = counts
        self._pause_s = _FIRST_PAUSE_S
        self._again_at = self._up_since = 0.0
        self._lock = threading.Lock()

    @property
    def probe_in_s(self) -> float:
        """When a store that is away should be probed, from now on."""
        return max(self._again_at - time.monotonic(), 0.0)

    def failed(self, error: Exception) -> None:
        """Whoever uses the store tells what it met."""
        self._counts.add("kv_store_errors")
        now = time.monotonic()
        with self._lock:
            was_up, self.up = self.up, False
            self.losses += 1  # It may come back empty.
            if was_up and now - self._up_since > _LONGEST_PAUSE_S:
                self._pause_s = _FIRST_PAUSE_S
            self._again_at = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        if was_up:
            logger.warning("the KV store is left alone: %s", self._address.explain(error))

    def lost(self) -> None:
        """A block was not what it should be."""
        with self._lock:
            self.losses += 1

    def answered(self) -> None:
        """A probe went well."""
        with self._lock:
            was_up, self.up = self.up, True
            if not was_up:
                self._up_since = time.monotonic()
        if not was_up:
            logger.info("the KV store is used", extra={"store": self._address.name})
