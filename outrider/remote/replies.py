"""The replies to one entry on their way to whoever sent it."""

import asyncio
from collections import deque
from collections.abc import Callable

from outrider.errors import OutriderError, Unavailable
from outrider.remote.timeouts import Timeouts
from outrider.v1 import worker_pb2

Listener = Callable[["worker_pb2.Reply | OutriderError"], None]


class Replies:
    """The replies to one entry, in order; one reader, or one listener."""

    def __init__(self, forget: Callable[[], object], timeouts: Timeouts) -> None:
        self._forget = forget
        self._timeouts = timeouts
        self._listener: Listener | None = None
        self._arrived: deque[worker_pb2.Reply] = deque()
        self._error: OutriderError | None = None
        self._reader: asyncio.Future[None] | None = None

    async def next(self, timeout_s: float) -> worker_pb2.Reply:
        """Raises Unavailable (link broken), TimeoutError."""
        if not self._arrived:
            await self._wait(timeout_s)
        if not self._arrived:
            raise self._error or Unavailable("the link broke")
        return self._arrived.popleft()

    def drain(self) -> list[worker_pb2.Reply]:
        """What has arrived and was not read yet."""
        arrived = list(self._arrived)
        self._arrived.clear()
        return arrived

    def close(self) -> None:
        """Further replies are late ones."""
        self._forget()

    def listen(self, listener: Listener) -> None:
        """Call this with each reply, or with why no more will come."""
        self._listener = listener

    def deliver(self, reply: worker_pb2.Reply) -> None:
        if self._listener is not None:
            self._listener(reply)
            return
        self._arrived.append(reply)
        self._wake()

    def break_off(self, error: OutriderError) -> None:
        """No more replies will come."""
        if self._listener is not None:
            self._listener(error)
            return
        self._error = error
        self._wake()

    async def _wait(self, timeout_s: float) -> None:
        if self._error:
            return
        reader = self._reader = asyncio.get_running_loop().create_future()
        timeout = self._timeouts.start(timeout_s, lambda: _expire(reader))
        try:
            await reader
        finally:
            timeout.cancel()

    def _wake(self) -> None:
        if self._reader and not self._reader.done():
            self._reader.set_result(None)


def _expire(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_exception(TimeoutError())
