"""What the parts hold when nothing runs; after a schedule it must be no more than before.

Sequences that stay in a worker's cache of prefixes hold no KV block that counts as used.
"""

import asyncio
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from redis.asyncio import Redis

from .stack import DRAFTS, ORCHESTRATORS, TARGETS, Stack

WAIT_S = 30.0
"""Workers close by themselves what nobody closed within `session_idle_s`, a net that is counted."""

SLACK: Mapping[str, int] = {
    "tasks": 32,
    "files": 32,
    "memory": 96 << 20,
}
"""What a process may have more of than when it was new: connections to peers that have come since,
the tasks that serve them, and buffers of the allocator. Of sessions, blocks and what belongs to a
generation it may have none more: a stream's last error, which holds on to all of it, goes with the
next call (`Stack.poke`)."""


@dataclass(frozen=True, slots=True)
class Held:
    """By part, by what: processes, workers (sessions and KV blocks in use), the store (keys)."""

    by_part: Mapping[str, Mapping[str, int]]

    def excess(self, before: "Held") -> str:
        """What is more than before; "" where nothing is."""
        found = []
        for part, values in self.by_part.items():
            known = before.by_part.get(part, {})
            for what, amount in values.items():
                if what in known and amount > known[what] + SLACK.get(what, 0):
                    found.append(f"{part} holds {amount} {what}, {known[what]} before")
        return "; ".join(found)


class Baseline:
    """What was held at first, for each process of its own: one that came later begins anew."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._first: dict[tuple[str, int], Mapping[str, int]] = {}

    async def excess(self) -> str:
        """Wait until nothing is held any more that a schedule has brought; what stays, if any."""
        deadline = time.monotonic() + WAIT_S
        while True:
            found = await self._excess()
            if not found or time.monotonic() > deadline:
                return found
            await asyncio.sleep(0.1)

    async def _excess(self) -> str:
        now = await held(self._stack)
        found = []
        for part, values in now.by_part.items():
            first = self._first.setdefault((part, self._stack.pid_of(part)), _clean(values))
            excess = Held({part: values}).excess(Held({part: first}))
            if excess:
                found.append(excess)
        return "; ".join(found)


_NOTHING = (
    "sessions",
    "blocks",
    "lasting keys",
    "Generation",
    "RemoteSession",
    "CommitQueue",
    "Sequence",
    "DraftSession",
)


def _clean(values: Mapping[str, int]) -> Mapping[str, int]:
    """What an idle process holds, by what this one does: of sessions nothing."""
    return {what: 0 if what in _NOTHING else amount for what, amount in values.items()}


async def held(stack: Stack) -> Held:
    workers = (*TARGETS, *DRAFTS)
    infos = await asyncio.gather(*(stack.info(name) for name in workers))
    await asyncio.gather(*(stack.poke(name) for name in ORCHESTRATORS))
    reports = await asyncio.gather(*(report(stack, n) for n in (*workers, *ORCHESTRATORS)))
    by_part = dict(zip((*workers, *ORCHESTRATORS), reports, strict=True))
    for name, info in zip(workers, infos, strict=True):
        used = info.kv_blocks_total - info.kv_blocks_free
        by_part[name] = {**by_part[name], "sessions": info.sessions, "blocks": used}
    by_part["store"] = {"lasting keys": await lasting_keys(stack)}
    for name in TARGETS:
        for rank, pid in enumerate(stack.rank_pids(name), start=1):
            by_part[f"{name} rank {rank}"] = _size(pid)
    return Held(by_part)


def _size(pid: int) -> Mapping[str, int]:
    """Files and memory of a process; nothing where it has just ended."""
    try:
        resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return {
            "files": len(os.listdir(f"/proc/{pid}/fd")),
            "memory": resident * os.sysconf("SC_PAGE_SIZE"),
        }
    except (OSError, IndexError):
        return {}


_ORDER_AGAIN_S = 1.0


async def lasting_keys(stack: Stack) -> int:
    """Keys of sessions that nothing will remove."""
    async with Redis.from_url(stack.store_url) as redis:
        keys = [key async for key in redis.scan_iter("outrider:{*", count=1000)]
        async with redis.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.pttl(key)
            return sum(life_ms == -1 for life_ms in await pipeline.execute())


async def session_keys(stack: Stack) -> list[str]:
    """Keys of sessions, each with the seconds that it has left."""
    async with Redis.from_url(stack.store_url) as redis:
        keys = [key async for key in redis.scan_iter("outrider:{*", count=1000)]
        return [f"{key.decode()} ({await redis.ttl(key)} s)" for key in keys]


async def report(stack: Stack, name: str, timeout_s: float = 10.0) -> Mapping[str, int]:
    """What a process says that it holds."""
    path = stack.folder / f"{name}.report"
    path.unlink(missing_ok=True)
    deadline = time.monotonic() + timeout_s
    again = 0.0
    while (now := time.monotonic()) < deadline:
        if now >= again:  # One that is just starting does not hear of it.
            stack.order(name, {"report": str(path)})
            again = now + _ORDER_AGAIN_S
        try:
            values: dict[str, int] = json.loads(path.read_text())
            return values
        except (OSError, ValueError):
            await asyncio.sleep(0.01)
    raise TimeoutError(f"{name} does not report")
