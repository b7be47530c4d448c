"""All sources of a tier together: what they tell is merged and handed on."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from services.orchestrator.discovery.endpoints import Endpoint, Endpoints, Source

logger = logging.getLogger(__name__)

_AGAIN_S = 1.0
MAX_ENDPOINTS = 1024
"""Of one tier; more are left out."""


class Discovery:
    """`start`, then `first`, in the end `close`. `tell` gets all endpoints whenever they change."""

    def __init__(self, sources: Sequence[Source], tell: Callable[[Endpoints], None]) -> None:
        self._sources = sources
        self._tell = tell
        self._told: dict[int, Endpoints] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._complete = asyncio.Event()

    @property
    def is_static(self) -> bool:
        """Nothing ever changes."""
        return all(source.is_static for source in self._sources)

    def start(self) -> None:
        if not self._sources:
            self._complete.set()
        for number, source in enumerate(self._sources):
            task = asyncio.create_task(self._follow(number, source), name=f"watch-{source.name}")
            self._tasks.append(task)

    async def first(self, timeout_s: float) -> None:
        """Until every source has told something, or the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._complete.wait()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, number: int, source: Source) -> None:
        while True:
            try:
                async with contextlib.aclosing(source.watch()) as news:
                    async for endpoints in news:
                        self._told[number] = endpoints
                        self._merge()
            except Exception:
                logger.exception("a source of endpoints failed", extra={"source": source.name})
            await asyncio.sleep(_AGAIN_S)

    def _merge(self) -> None:
        """Of an address that several sources name, the first one's word counts."""
        merged: dict[str, Endpoint] = {}
        for number in sorted(self._told):
            for endpoint in self._told[number]:
                merged.setdefault(endpoint.address, endpoint)
        if len(merged) > MAX_ENDPOINTS:
            logger.error("too many endpoints", extra={"found": len(merged), "most": MAX_ENDPOINTS})
        self._tell(tuple(merged.values())[:MAX_ENDPOINTS])
        if len(self._told) == len(self._sources):
            self._complete.set()
