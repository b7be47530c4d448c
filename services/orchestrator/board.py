"""What several orchestrators tell each other of the workers that they share, through Redis.

Every second each of them renews its part in the lease of each worker, `outrider:worker:INCARNATION`
(a worker that was restarted is another one), with what it has there, and reads what the others
have. Without Redis each goes on with what it knows itself, and with what workers say of their load.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import OutriderError
from services.orchestrator.models import ModelRegistry
from services.orchestrator.store_client import ScriptClient
from services.orchestrator.workers import FRESH_S, Others, Worker

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
_AT_ONCE = 16
_MOST = 1 << 31
"""Of any count that another orchestrator tells."""

SCRIPT = Path(__file__).with_name("lease.lua").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Load:
    """What one orchestrator has at a worker; `waiting` requests would like to be there."""

    sessions: int
    tokens: int
    waiting: int

    def to_json(self, **about: str) -> str:
        values = {"sessions": self.sessions, "tokens": self.tokens, "waiting": self.waiting}
        return json.dumps(values | about, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Load":
        """Raises ValueError."""
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError("no object")
        return cls(*(_count(values.get(name, 0)) for name in ("sessions", "tokens", "waiting")))


class Board:
    """`start`, in the end `close`. `waiting` tells how many requests wait for a model's targets."""

    def __init__(
        self,
        client: ScriptClient,
        registry: ModelRegistry,
        owner: str,
        waiting: Callable[[str], int],
        *,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._client = client
        self._registry = registry
        self._owner = owner
        self._waiting = waiting
        self._interval_s = interval_s
        self._gate = asyncio.Semaphore(_AT_ONCE)
        self._task: asyncio.Task[None] | None = None
        self._is_failing = False
        self._told: set[int] = set()

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="board")

    async def close(self) -> None:
        """Take this orchestrator's part out of all leases."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        leaving = [self._call(key, "leave", self._owner) for key in self._told]
        await asyncio.gather(*leaving, return_exceptions=True)

    async def renew(self) -> None:
        """Tell and read once. Raises OutriderError, where it can be for some of the workers."""
        workers = {
            worker.incarnation: (tier, worker)
            for tier in (self._registry.targets, self._registry.drafts)
            for worker in tier.workers
            if worker.usable
        }
        waiting = {model.name: self._waiting(model.name) for model in self._registry.models}
        self._told = set(workers)
        results = await asyncio.gather(
            *(self._renew(tier.name, worker, waiting) for tier, worker in workers.values()),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _run(self) -> None:
        while True:
            started = time.monotonic()
            try:
                await self.renew()
                if self._is_failing:
                    logger.info("other orchestrators are heard of again")
                self._is_failing = False
            except OutriderError as error:
                if not self._is_failing:
                    logger.warning(
                        "nothing is heard of other orchestrators", extra={"why": str(error)}
                    )
                self._is_failing = True
            await asyncio.sleep(max(self._interval_s - (time.monotonic() - started), 0.05))

    async def _renew(self, tier: str, worker: Worker, waiting: dict[str, int]) -> None:
        info = worker.link.info
        model = info.model if info is not None else ""
        own = Load(worker.sessions, worker.tokens, waiting.get(model, 0) if tier == "target" else 0)
        load = own.to_json(tier=tier, model=model, address=worker.address, zone=worker.zone)
        lease_ms = int(FRESH_S * 1000)
        sent = time.monotonic()
        _, *others = await self._call(worker.incarnation, "renew", self._owner, lease_ms, load)
        worker.others = _sum(others, until=sent + FRESH_S)

    async def _call(self, incarnation: int, *args: str | int) -> list[Any]:
        async with self._gate:
            return await self._client.call([f"outrider:worker:{incarnation:016x}"], args)


def _sum(texts: Iterable[bytes], *, until: float) -> Others:
    """What others have there together; what cannot be read is left out."""
    sessions = tokens = waiting = 0
    for text in texts:
        try:
            load = Load.from_json(text)
        except ValueError:
            continue
        sessions, tokens = sessions + load.sessions, tokens + load.tokens
        waiting += load.waiting > 0
    return Others(sessions, tokens, waiting, until)


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
        raise ValueError(f"{value!r} is no count")
    return value
