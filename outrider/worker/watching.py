"""How a worker is doing, told again and again to those who watch it."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from outrider.errors import InvalidArgument
from outrider.v1 import worker_pb2

DEFAULT_INTERVAL_S = 0.25
_INTERVALS_MS = (20, 60_000)


@dataclass(frozen=True, slots=True)
class Vitals:
    """What a worker says of itself at one moment; fields as in WatchResponse."""

    draining: bool
    sessions: int
    running: int
    queued: int
    queue_s: float
    kv_blocks_free: int
    pass_s: float
    busy_s: float
    """Spent in passes since the start."""


class Watching:
    """The watchers of one worker. `read` tells how it is doing, from the event loop."""

    def __init__(self, incarnation: int, read: Callable[[], Vitals]) -> None:
        self._incarnation = incarnation
        self._read = read
        self._news = asyncio.Event()
        self._ended = False

    def tell(self) -> None:
        """Let all watchers know now."""
        self._news.set()
        self._news = asyncio.Event()

    def end(self) -> None:
        """Let all watchers know for the last time."""
        self._ended = True
        self.tell()

    async def responses(
        self, request: worker_pb2.WatchRequest
    ) -> AsyncIterator[worker_pb2.WatchResponse]:
        """What one watcher gets. Raises InvalidArgument."""
        interval_s = interval_of(request)
        news = self._news  # Whatever comes after it is not missed while a response is on its way.
        vitals, read_at = self._read(), time.monotonic()
        yield self._response(vitals, busy=0.0)
        while not self._ended:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await news.wait()
            before, before_at, news = vitals, read_at, self._news
            vitals, read_at = self._read(), time.monotonic()
            elapsed_s = max(read_at - before_at, 1e-6)
            busy = min((vitals.busy_s - before.busy_s) / elapsed_s, 1.0)
            yield self._response(vitals, busy=busy)

    def _response(self, vitals: Vitals, *, busy: float) -> worker_pb2.WatchResponse:
        return worker_pb2.WatchResponse(
            incarnation=self._incarnation,
            draining=vitals.draining,
            sessions=vitals.sessions,
            running=vitals.running,
            queued=vitals.queued,
            queue_us=int(vitals.queue_s * 1e6),
            kv_blocks_free=vitals.kv_blocks_free,
            pass_us=int(vitals.pass_s * 1e6),
            busy=busy,
        )


def interval_of(request: worker_pb2.WatchRequest) -> float:
    """Seconds between two responses. Raises InvalidArgument."""
    least, most = _INTERVALS_MS
    if not request.interval_ms:
        return DEFAULT_INTERVAL_S
    if not least <= request.interval_ms <= most:
        raise InvalidArgument(
            f"{request.interval_ms} is not in [{least}, {most}] and not 0", field="interval_ms"
        )
    return request.interval_ms / 1000
