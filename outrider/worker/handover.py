"""From threads to the event loop."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Handover(Generic[T]):
    """Things put in by a thread, taken on the loop in order. The loop is woken once for all that is
    there: what a pass has made for its sessions comes together."""

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[T], None]) -> None:
        """`take` is called on the loop and must not raise."""
        self._loop = loop
        self._take = take
        self._items: deque[T] = deque()

    def put(self, item: T) -> None:
        self._items.append(item)
        if len(self._items) == 1:
            with contextlib.suppress(RuntimeError):  # The loop is closed: nobody listens.
                self._loop.call_soon_threadsafe(self._take_all)

    def _take_all(self) -> None:
        while self._items:
            self._take(self._items[0])
            self._items.popleft()  # Only now: whoever puts something in meanwhile wakes nobody.
