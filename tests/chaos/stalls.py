"""Time without a token: targets and orchestrators are killed again and again under running streams.

Of each stream that was there when its target or orchestrator died: the longest time between two
tokens from a moment before the kill on, as its client saw them. The pair and the settings are those
that a user gets who says nothing. Targets may be stopped instead (SIGSTOP): connections stay as
they are, as where a host is cut off.
"""

import asyncio
import contextlib
import itertools
import math
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from redis.asyncio import Redis

from outrider.client import GenerationOptions, OutriderClient
from outrider.errors import OutriderError
from services.orchestrator.totals import Totals

from .stack import ORCHESTRATORS, TARGETS, Stack

STREAMS = 4
MIN_TOKENS = 12
"""Chunks of each stream before a kill, and after it: what comes later says nothing of it."""
_REACH_S = 60.0
_READ_S = 120.0


@dataclass
class _Reading:
    """One stream as its client reads it."""

    arrivals: list[float] = field(default_factory=list)
    session_id: str = ""
    resumes: int = 0
    error: str = ""

    def gap_s(self, killed: float) -> float | None:
        """The longest time without a token around and after a kill; None where none came then."""
        before = [t for t in self.arrivals if t <= killed]
        after = [t for t in self.arrivals if t > killed]
        if not before or not after:
            return None
        times = [before[-1], *after]
        return max(b - a for a, b in itertools.pairwise(times))


@dataclass
class Stalls:
    """Seconds without a token, of each stream that was hit."""

    gaps_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    kills: int = 0
    """Or times that something was stopped."""

    def line(self, what: str) -> str:
        ordered = sorted(self.gaps_s)
        numbers = ", ".join(
            f"p{100 * q:g} {_quantile(ordered, q):.3f} s" for q in (0.5, 0.9, 0.99, 1.0)
        )
        return f"{what}: {self.kills} times, {len(ordered)} streams hit: {numbers}"


def _quantile(ordered: Sequence[float], q: float) -> float:
    return ordered[max(math.ceil(q * len(ordered)) - 1, 0)] if ordered else math.nan


async def measure(
    stack: Stack, tier: str, kills: int, *, number: signal.Signals = signal.SIGKILL
) -> Stalls:
    """Kill parts of a tier (`target` or `orchestrator`) in turn, each under streams of its own; or
    stop them, by SIGSTOP, until their streams have gone on elsewhere."""
    found = Stalls()
    parts = TARGETS if tier == "target" else ORCHESTRATORS
    for turn in range(kills):
        await _kill_one(stack, parts[turn % len(parts)], tier, turn, number, found)
        print(found.line(tier), flush=True)
    return found


async def _kill_one(
    stack: Stack, part: str, tier: str, turn: int, number: signal.Signals, found: Stalls
) -> None:
    # The victim first: all streams are its, where orchestrators are killed.
    order = [part, *(n for n in ORCHESTRATORS if n != part)] if tier != "target" else ORCHESTRATORS
    async with await OutriderClient.connect(address=[stack.address(n) for n in order]) as client:
        readings = [_Reading() for _ in range(STREAMS)]
        tasks = [
            asyncio.create_task(_read(client, reading, f"{turn}-{index}"))
            for index, reading in enumerate(readings)
        ]
        try:
            await _reach(readings, tasks, [MIN_TOKENS] * STREAMS)
            hit = readings if tier != "target" else await _of_target(stack, part, readings)
            killed = time.monotonic()
            stack.send(part, number)
            if number is signal.SIGKILL:
                await stack.processes[part].wait(10)
            found.kills += 1
            told = [len(reading.arrivals) for reading in readings]
            await _reach(readings, tasks, [count + MIN_TOKENS for count in told])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            stack.send(part, signal.SIGCONT)
            await stack.start(part)
            await _known(stack)
    for reading in hit:
        gap = reading.gap_s(killed)
        if reading.error:
            found.errors.append(reading.error)
        elif gap is not None and (tier == "target" or reading.resumes):
            found.gaps_s.append(gap)


async def _read(client: OutriderClient, reading: _Reading, name: str) -> None:
    options = GenerationOptions(max_tokens=400, ignore_eos=True, temperature=0.0)
    prompt = f"Stream {name}. Tell the story of a lighthouse keeper and the sea."
    try:
        async for chunk in client.generate(prompt, options, timeout_s=_READ_S):
            reading.session_id = chunk.session_id
            reading.resumes = chunk.resumes
            if chunk.token_ids:
                reading.arrivals.append(time.monotonic())
    except OutriderError as error:
        reading.error = f"{type(error).__name__}: {error}"


async def _reach(
    readings: Sequence[_Reading], tasks: "Sequence[asyncio.Task[None]]", counts: Sequence[int]
) -> None:
    """Until each of them has had so many chunks, or has ended."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_REACH_S):
            while any(
                len(reading.arrivals) < count and not task.done()
                for reading, task, count in zip(readings, tasks, counts, strict=True)
            ):
                await asyncio.sleep(0.005)


async def _known(stack: Stack) -> None:
    """Until both orchestrators have found every target again, as their leases say."""
    async with Redis.from_url(stack.store_url) as redis, asyncio.timeout(_REACH_S):
        for target in TARGETS:
            key = f"outrider:worker:{(await stack.info(target)).incarnation:016x}"
            while await redis.hlen(key) < len(ORCHESTRATORS):
                await asyncio.sleep(0.1)


async def _of_target(stack: Stack, part: str, readings: Sequence[_Reading]) -> Sequence[_Reading]:
    """Those whose session was at a target at its last commit."""
    address = stack.address(part)
    found = []
    async with Redis.from_url(stack.store_url) as redis:
        for reading in readings:
            key = f"outrider:{{{reading.session_id}}}:meta"
            progress = await redis.hget(key, "progress")
            if progress and Totals.from_json(progress.decode()).target == address:
                found.append(reading)
    return found
