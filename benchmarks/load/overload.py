"""What becomes of a machine that is asked for several times what it can do.

First as many sessions as there is room for, in a closed loop: how fast each one is. Then so many
that some always wait: how many end in a second, which is the capacity. Then for a minute several
times as many come, whatever becomes of them.
"""

import asyncio
import contextlib
import functools
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from figures import (
    Sessions,
    altered,
    of_client,
    of_refusals,
    of_sessions,
    over_time,
    speeds,
    told_keys,
)
from machine import ROOT, Machine

_SAMPLE_S = 1.0
_ALONE = 3
"""Sessions at a time that disturb nobody: one a target."""

Ask = Callable[..., Awaitable[dict[str, Any]]]


async def overload(machine: Machine, prompts: dict[str, Any]) -> dict[str, Any]:
    """`prompts` are the settings of sessions.js that say what is asked."""
    args = machine.args
    room = args.max_target_sessions * args.targets
    ask = functools.partial(_ask, machine, prompts)
    warm = await ask("closed", sessions=4 * room, concurrency=room)
    calm = await ask("closed", sessions=args.sessions, concurrency=room)
    # So many wait that each place is taken at once, and so few that none is refused.
    crowded = room + 2 * args.orchestrators
    full = await ask("closed", sessions=args.sessions, concurrency=crowded)
    capacity = len(full["sessions"]) / full["seconds"]
    machine.forget_refusals()
    cpu_s = machine.cpu_s(machine.orchestrators)
    async with _watching(machine) as memory:
        crowd = await ask("open", arrivals_per_s=args.overload * capacity, max_s=args.overload_s)
    cpu_s = machine.cpu_s(machine.orchestrators) - cpu_s
    before, during = speeds(calm["sessions"]), speeds(crowd["sessions"])
    arrived = len(crowd["sessions"]) / args.overload_s
    ran = [one for run in (warm, calm, full, crowd) for one in run["sessions"]]
    return {
        "room": room,
        "capacity_per_s": round(capacity, 1),
        "arrived_per_s": round(arrived, 1),
        "offered_of_capacity": round(arrived / capacity, 2),
        "calm": of_sessions(calm["sessions"], calm["seconds"]),
        "crowd": of_sessions(crowd["sessions"], crowd["seconds"]),
        "speed_kept_median": round(during["median"] / before["median"], 3),
        "speed_kept_mean": round(during["mean"] / before["mean"], 3),
        **of_refusals(crowd["sessions"]),
        "refused_within_ms": machine.refused_within_ms(),
        "client": of_client(crowd),
        "orchestrator_cores": round(cpu_s / crowd["seconds"], 2),
        "mib": over_time(memory),
        **await _altered(ask, ran),
    }


async def _ask(
    machine: Machine, prompts: dict[str, Any], kind: str, **settings: Any
) -> dict[str, Any]:
    """Run crowd.py; what it told, and the seconds that it took."""
    told = machine.folder / "crowd.json"
    settings = {
        **prompts,
        "kind": kind,
        "seed": 1,
        "addresses": [machine.address(name) for name in machine.orchestrators],
        "told": str(told),
        **settings,
    }
    command = [sys.executable, str(Path(__file__).with_name("crowd.py")), json.dumps(settings)]
    log = machine.folder / "crowd.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdout=output,
            stderr=output,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"},
        )
        if await process.wait():
            sys.exit(f"the client failed:\n{log.read_text()[-2000:]}")
    found: dict[str, Any] = json.loads(told.read_text())
    return found


@contextlib.asynccontextmanager
async def _watching(machine: Machine) -> AsyncIterator[list[dict[str, float]]]:
    """The memory of each part, once a second."""
    seen = [machine.memory()]

    async def watch() -> None:
        while True:
            await asyncio.sleep(_SAMPLE_S)
            seen.append(machine.memory())

    watching = asyncio.create_task(watch())
    try:
        yield seen
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        seen.append(machine.memory())


async def _altered(ask: Ask, sessions: Sessions) -> dict[str, Any]:
    """Sessions whose tokens are not those that the same prompt gives undisturbed."""
    keys = told_keys(sessions)
    alone = await ask("closed", keys=keys, sessions=len(keys), concurrency=_ALONE, plain=True)
    return altered(sessions, alone["sessions"])
