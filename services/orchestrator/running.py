"""The generations that run here: how many there may be, and who takes whose place."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Protocol

from outrider.errors import AlreadyRunning, Fenced, OutriderError, ResourceExhausted, Unavailable
from services.orchestrator.requests import GenerationPlan

_RETRY_S = 1.0
"""When to try again where all places are taken, by requests that wait mostly."""


class Streaming(Protocol):
    """A generation as far as it matters here."""

    plan: GenerationPlan

    @property
    def epoch(self) -> int:
        """In which it owns its session."""

    def supersede(self, error: OutriderError) -> None: ...


class Place:
    """One call's right to run a generation here."""

    def __init__(self, running: "Running", key: tuple[str, str], idempotency_key: str) -> None:
        self.key = key
        self.idempotency_key = idempotency_key
        self.generation: Streaming | None = None
        self._running = running

    def fill(self, generation: Streaming) -> None:
        """The generation is made. Of two streams of the same one the older ends, whose client is
        somewhere else by now."""
        self.generation = generation
        self._running.take_over(self)


class Running:
    """All places, and the latest of each (tenant, request id)."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._places: set[Place] = set()
        self._latest: dict[tuple[str, str], Place] = {}
        self._draining = False

    @contextlib.contextmanager
    def admitted(
        self, tenant: str, request_id: str, *, idempotency_key: str = "", resumes: bool = False
    ) -> Iterator[Place]:
        """A place for a call. One that `resumes`, or repeats a request with a key, may come beside
        the stream that it comes after. Raises Unavailable, AlreadyRunning, ResourceExhausted."""
        key = (tenant, request_id)
        if self._draining:
            raise Unavailable("this orchestrator is shutting down; retry at another")
        known = self._latest.get(key)
        repeats = known is not None and idempotency_key and known.idempotency_key == idempotency_key
        if known is not None and not repeats and not resumes:
            raise AlreadyRunning("a request with this id is running", field="request_id")
        if len(self._places) >= self._limit:
            raise ResourceExhausted(
                f"{self._limit} calls are served; retry in {_RETRY_S:g} s", retry_after_s=_RETRY_S
            )
        place = Place(self, key, idempotency_key)
        self._places.add(place)
        self._latest.setdefault(key, place)
        try:
            yield place
        finally:
            self._places.discard(place)
            if self._latest.get(key) is place:
                del self._latest[key]

    def take_over(self, place: Place) -> None:
        """Which of two is the older says the epoch: calls may get here in another order than they
        got to the store, and who ends thinks itself fenced there."""
        before = self._latest.get(place.key)
        if before is None or before.generation is None or before is place:
            self._latest[place.key] = place
            return
        known, new = before.generation, place.generation
        assert new is not None
        if known.plan.session_id != new.plan.session_id:
            return
        older = known
        if new.epoch < known.epoch:
            older = new
        else:
            self._latest[place.key] = place
        older.supersede(Fenced("it was resumed by another call"))

    async def drain(self, timeout_s: float) -> None:
        """Return when no generation runs, or the time is over. New ones are refused."""
        self._draining = True
        deadline = time.monotonic() + timeout_s
        while self._places and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
