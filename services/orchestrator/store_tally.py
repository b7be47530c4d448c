"""What the session store was asked for, counted."""

import asyncio
import time
from collections import Counter
from types import TracebackType

from outrider.errors import Cancelled, Fenced, OutriderError


class StoreTally:
    """Operations by name: how many have ended, how long they took, what went wrong (by name and
    gRPC status). One owner adds to it; it may be read from any thread."""

    def __init__(self) -> None:
        self.ended: Counter[str] = Counter()
        self.seconds: dict[str, float] = {}
        self.failed: Counter[tuple[str, str]] = Counter()
        self.fenced = 0
        self.commit_retries = 0
        self.takeovers = 0
        self.sent_undurable = 0

    def operation(self, name: str) -> "_Operation":
        """To be entered around an operation."""
        return _Operation(self, name)

    def add(self, name: str, seconds: float, error: BaseException | None) -> None:
        self.ended[name] += 1
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        if error is not None:
            self.failed[name, _status_of(error)] += 1
            self.fenced += isinstance(error, Fenced)


class _Operation:
    """A context manager of its own: one made of a generator costs three times as much."""

    __slots__ = ("_name", "_started", "_tally")

    def __init__(self, tally: StoreTally, name: str) -> None:
        self._tally = tally
        self._name = name

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._tally.add(self._name, time.perf_counter() - self._started, error)


def _status_of(error: BaseException) -> str:
    if isinstance(error, OutriderError):
        return error.grpc_name
    return Cancelled.grpc_name if isinstance(error, asyncio.CancelledError) else "UNKNOWN"
