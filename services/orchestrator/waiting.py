"""Requests that wait for a seat: one class of priority, by caller."""

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from outrider.types import Priority
from services.orchestrator.seats import Demand, Seat


@dataclass(slots=True, eq=False)
class Waiter:
    """A request without a seat; `arrived` is on the monotonic clock."""

    caller: str
    priority: Priority
    demand: Demand
    arrived: float
    seat: "asyncio.Future[Seat]"


@dataclass(slots=True)
class Queue:
    """The waiting requests of one class, by caller."""

    by_caller: dict[str, deque[Waiter]] = field(default_factory=dict)
    size: int = 0

    def add(self, waiter: Waiter) -> None:
        self.by_caller.setdefault(waiter.caller, deque()).append(waiter)
        self.size += 1

    def remove(self, waiter: Waiter) -> None:
        own = self.by_caller[waiter.caller]
        own.remove(waiter)
        self.size -= 1
        if not own:
            del self.by_caller[waiter.caller]

    def ahead_of(self, waiter: Waiter) -> int:
        """Those who get their turn before, where callers take turns."""
        return self._ahead(waiter.caller, list(self.by_caller[waiter.caller]).index(waiter))

    def ahead_of_next(self, caller: str) -> int:
        """The same for a request that this caller would add."""
        return self._ahead(caller, len(self.by_caller.get(caller, ())))

    def _ahead(self, caller: str, own: int) -> int:
        others = (queue for other, queue in self.by_caller.items() if other != caller)
        return own + sum(min(len(queue), own + 1) for queue in others)

    def __iter__(self) -> Iterator[Waiter]:
        for queue in self.by_caller.values():
            yield from queue
