"""Every part restarted once, one after the other, under a constant load, as Kubernetes does it.

A pod that is to go first sleeps (preStop, while it leaves the endpoints), then gets SIGTERM, drains
within `drain_s`, and is killed when that and a reserve are over. The times here are those of the
chart's values divided by `SCALE`. The one that follows has the same address. No stream may fail, or
say anything else than it would have said.
"""

import asyncio
import itertools
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from outrider.client import OutriderClient
from outrider.types import Durability

from .run import clients
from .stack import DRAFTS, ORCHESTRATOR, ORCHESTRATORS, TARGETS, WORKER, Stack, StackSettings
from .streams import Plan, References, pool, run_stream

SCALE = 10
PRE_STOP_S = 10 / SCALE
DRAIN_S = {"orchestrator": 300 / SCALE, "target": 60 / SCALE, "draft": 60 / SCALE}
RESERVE_S = 15
"""What the grace period has beyond preStop and draining; not scaled, as nothing waits for it."""
MIN_READY_S = {"orchestrator": 10 / SCALE, "target": 15 / SCALE, "draft": 15 / SCALE}
"""How long a part has to serve before the next one goes."""
LOAD = 8
_AT_FIRST_S = 1.0


@dataclass
class Rolled:
    """What came of it."""

    streams: int = 0
    resumes: int = 0
    problems: list[str] = field(default_factory=list)
    restarts: list[str] = field(default_factory=list)


def settings(target: str, draft: str) -> StackSettings:
    """As the chart has them, `SCALE` times faster."""
    return StackSettings(
        target=target,
        draft=draft,
        orchestrator_settings={**ORCHESTRATOR, "drain_s": DRAIN_S["orchestrator"]},
        worker_settings={**WORKER, "drain_s": DRAIN_S["target"]},
    )


async def roll(stack: Stack, references: References) -> Rolled:
    """Restart every part but the store."""
    rolled = Rolled()
    over = asyncio.Event()
    numbers = itertools.count()
    async with clients(stack) as given:
        load = [
            asyncio.create_task(_load(client, references, rolled, over, numbers))
            for client in itertools.islice(itertools.cycle(given), LOAD)
        ]
        try:
            await asyncio.sleep(_AT_FIRST_S)
            for part in (*TARGETS, *DRAFTS, *ORCHESTRATORS):
                await _restart(stack, part, rolled)
                await asyncio.sleep(MIN_READY_S[part.partition("-")[0]])
        finally:
            over.set()
            await asyncio.gather(*load)
    rolled.problems += stack.deaths
    stack.deaths.clear()
    return rolled


async def _restart(stack: Stack, part: str, rolled: Rolled) -> None:
    started = time.monotonic()
    await asyncio.sleep(PRE_STOP_S)
    stack.send(part, signal.SIGTERM)
    process = stack.processes[part]
    if await process.wait(DRAIN_S[part.partition("-")[0]] + RESERVE_S) is None:
        rolled.problems.append(f"{part} did not end within its grace period")
        stack.send(part, signal.SIGKILL)
        await process.wait(10)
    ended = time.monotonic() - started
    await stack.start(part)
    line = f"{part}: ended after {ended:.1f} s, served after {time.monotonic() - started:.1f} s"
    rolled.restarts.append(line)


async def _load(
    client: OutriderClient,
    references: References,
    rolled: Rolled,
    over: asyncio.Event,
    numbers: "itertools.count[int]",
) -> None:
    specs = pool()
    while not over.is_set():
        number = next(numbers)
        durability = list(Durability)[number % 2]
        plan = Plan(specs[number % len(specs)], 0.0, 0, durability, None)
        ended = await run_stream(client, plan, references)
        rolled.streams += 1
        rolled.resumes += ended.resumes
        if ended.problem or ended.error:
            why = ended.problem or f"{type(ended.error).__name__}: {ended.error}"
            rolled.problems.append(f"{plan.describe()}: {why}")


def tell(rolled: Rolled, folder: Path) -> int:
    """Print it; the exit status."""
    for line in rolled.restarts:
        print(line)
    print(f"{rolled.streams} streams, {rolled.resumes} resumes, {len(rolled.problems)} problems")
    for problem in rolled.problems:
        print(f"  {problem}")
    if rolled.problems:
        print(f"logs in {folder}")
    return 1 if rolled.problems or not rolled.streams else 0
