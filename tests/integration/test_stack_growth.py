"""What hundreds of sessions leave behind: nothing, in the store and in any process."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from redis import Redis

from outrider.errors import OutriderError
from outrider.types import Durability
from scripted_workers import LINGER_S, Parts, Rig, Stream, until
from store_fleets import pause, resume
from store_servers import Server, running_server
from test_stack_cancel import leave

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(150),
    pytest.mark.slow,
]

MIB = 1 << 20


class Store(NamedTuple):
    """What the store holds."""

    keys: int
    bytes: int
    scripts: int

    @classmethod
    def of(cls, server: Server) -> "Store":
        with Redis.from_url(server.url) as redis:
            memory = redis.info("memory")
            keys = [key for key in redis.keys() if not key.startswith(b"outrider:worker:")]
            return cls(len(keys), memory["used_memory_dataset"], memory["number_of_cached_scripts"])


class Process(NamedTuple):
    files: int
    threads: int
    bytes: int


def _processes(rig: Rig, stack: Rig) -> Iterator[Process]:
    for pid in (*rig.pids, *stack.pids[:2]):
        process = psutil.Process(pid)
        yield Process(process.num_fds(), process.num_threads(), process.memory_info().rss)


async def _ends(rig: Rig, number: int) -> None:
    """One session, of every kind in turn."""
    prompt = f"session {number}"
    match number % 5:
        case 0:
            await rig.complete(prompt, max_tokens=20)
        case 1:
            kept = await rig.complete(prompt, max_tokens=10, keep_session=True)
            more = {"max_tokens": 5, "session_id": kept.session_id, "keep_session": True}
            await rig.complete("and on", **more)
            await rig.client.delete_session(kept.session_id)
        case 2 | 3:
            await leave(rig, random.Random(number))
        case 4:
            with pytest.raises(OutriderError):
                await rig.complete(prompt, max_tokens=5, session_id="A" * 22)


async def _many(rig: Rig, numbers: range) -> None:
    gate = asyncio.Semaphore(12)

    async def one(number: int) -> None:
        async with gate:
            await _ends(rig, number)

    await asyncio.gather(*(one(number) for number in numbers))


async def _without_the_store(rig: Rig, server: Server) -> None:
    """Streams that go on from memory, and what waits for the store in it."""
    options: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}
    policy = {"durability": Durability.BEST_EFFORT}
    streams = [Stream(rig, f"without {n}", **options, **policy) for n in range(8)]
    for stream in streams:
        await stream.reaches(10)
    pause(server)
    try:
        for stream in streams:
            await stream.end()
    finally:
        resume(server)


async def test_hundreds_of_sessions_leave_nothing_behind(
    stack: Rig, parts: Parts, tmp_path: Path
) -> None:
    with running_server("valkey", tmp_path) as server:
        values = {"store_timeout_s": 1.0, "store_wait_s": 0.1, "lease_s": 2, "session_resume_s": 1}
        async with parts.orchestrator(
            server.url, targets=stack.targets, drafts=stack.drafts, **values
        ) as rig:

            async def sessions() -> list[int]:
                workers = (*rig.targets, *rig.drafts)
                return [(await rig.info(address)).sessions for address in workers]

            # Kept ones of other tests: workers keep them until they have been idle for long.
            others = await sessions()

            async def settled() -> bool:
                keys, held = Store.of(server).keys, await sessions()
                print(f"keys and sessions left: {keys}, {held}; before {others}")
                return keys == 0 and held == others

            await _many(rig, range(60))  # Warm: pools, caches and arenas have their size.
            await _without_the_store(rig, server)
            await until(settled, "no key and no session is left", timeout_s=LINGER_S + 40)
            store, before = Store.of(server), list(_processes(rig, stack))
            await _many(rig, range(60, 260))
            await _without_the_store(rig, server)
            await until(settled, "no key and no session is left", timeout_s=LINGER_S + 40)
            after = list(_processes(rig, stack))
            now = Store.of(server)
    print(f"{store} -> {now}\n{before}\n{after}")
    assert now.scripts == store.scripts and now.bytes < store.bytes + MIB
    for then, one in zip(before, after, strict=True):
        # Connections of the pool come and go, as many as there are streams at once.
        assert one.files <= then.files + 24 and one.threads <= then.threads + 8
        assert one.bytes < then.bytes + 24 * MIB
