"""Runs systems in turns over the same prompts: one at work, the others idle."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.bench.prompts import BenchPrompt
from outrider.bench.systems import RequestResult, System


@dataclass(frozen=True, slots=True)
class SystemRun:
    """All answers of one system in the order of the prompts, and the wall time of its turns."""

    system: str
    results: tuple[RequestResult, ...]
    wall_s: float


async def run_interleaved(
    systems: Sequence[System],
    prompts: Sequence[BenchPrompt],
    *,
    concurrency: int = 1,
    seed: int = 0,
    on_done: Callable[[str, int], None] = lambda system, prompts: None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[SystemRun, ...]:
    """Batches of `concurrency` prompts; in each every system has one turn, order alternating.

    Prompt number i has the seed `seed` + i in every system. Before the first turn each system
    answers the first prompt once, unmeasured.
    """
    for system in systems:
        await system.run(prompts[0], seed)
        on_done(system.name, 0)
    results: dict[str, list[RequestResult]] = {system.name: [] for system in systems}
    walls = dict.fromkeys(results, 0.0)
    for turn, start in enumerate(range(0, len(prompts), concurrency)):
        batch = list(enumerate(prompts[start : start + concurrency], start))
        for system in systems if turn % 2 == 0 else reversed(systems):
            began = clock()
            answers = await _at_once(system, batch, seed)
            walls[system.name] += clock() - began
            results[system.name] += answers
            on_done(system.name, len(batch))
    return tuple(SystemRun(name, tuple(done), walls[name]) for name, done in results.items())


async def _at_once(
    system: System, batch: Sequence[tuple[int, BenchPrompt]], seed: int
) -> list[RequestResult]:
    """The answers of a batch; the first failure cancels the rest and is raised alone."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(system.run(prompt, seed + i)) for i, prompt in batch]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
