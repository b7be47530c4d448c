"""What orchestrators tell each other of the workers that they share, by a real store."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from redis.asyncio import Redis

from outrider.errors import Unavailable
from outrider.v1 import worker_pb2
from services.orchestrator import board as board_module
from services.orchestrator.board import SCRIPT, Board, Load
from services.orchestrator.discovery.endpoints import Endpoint
from services.orchestrator.store_client import RIGHTS, ScriptClient
from services.orchestrator.workers import Worker
from store_servers import Server, running_server

pytestmark = [pytest.mark.timeout(60)]

SHARED, OWN = 0xA, 0xB


def worker(incarnation: int) -> Worker:
    info = worker_pb2.InfoResponse(incarnation=incarnation, model="m")
    link: Any = SimpleNamespace(
        address=f"w{incarnation}", info=info, draining=False, vitals=None, vitals_at=0.0
    )
    found = Worker(link, Endpoint(link.address))
    found.fits = incarnation
    return found


class Orchestrator:
    """As much of one as has a board."""

    def __init__(self, name: str, client: ScriptClient, *workers: Worker) -> None:
        self.workers = workers
        self.waiting = 0
        self.client = client
        targets = SimpleNamespace(name="target", workers=workers)
        registry: Any = SimpleNamespace(
            targets=targets,
            drafts=SimpleNamespace(name="draft", workers=()),
            models=[SimpleNamespace(name="m")],
        )
        self.board = Board(client, registry, name, lambda model: self.waiting, interval_s=0.05)

    def seen(self) -> tuple[int, int, int]:
        """What others have at its first worker, as far as it is fresh."""
        others = self.workers[0].others
        fresh = time.monotonic() < others.until
        return (others.sessions, others.tokens, others.waiting) if fresh else (0, 0, 0)


@pytest.fixture
def server(tmp_path: Path) -> Any:
    with running_server("valkey", tmp_path) as running:
        yield running


@contextlib.asynccontextmanager
async def orchestrators(server: Server, *names: str) -> AsyncIterator[list[Orchestrator]]:
    async with contextlib.AsyncExitStack() as stack:
        found = []
        for name in names:
            client = await ScriptClient.connect(server.url, SCRIPT, timeout_s=0.5)
            stack.push_async_callback(client.close)
            found.append(Orchestrator(name, client, worker(SHARED)))
        yield found


async def test_each_sees_what_the_others_have_together(server: Server) -> None:
    async with orchestrators(server, "a", "b", "c") as (a, b, c):
        a.workers[0].sessions, a.workers[0].tokens = 3, 300
        b.workers[0].sessions, b.workers[0].tokens, b.waiting = 2, 50, 9
        for one in (a, b, c, a, b, c):
            await one.board.renew()
        assert a.seen() == (2, 50, 1)
        assert b.seen() == (3, 300, 0)
        assert c.seen() == (5, 350, 1)
        a.workers[0].sessions = 0
        for one in (a, b):
            await one.board.renew()
        assert b.seen() == (0, 300, 0)


async def test_a_restarted_worker_starts_with_nobody(server: Server) -> None:
    async with orchestrators(server, "a", "b") as (a, b):
        a.workers[0].sessions = 3
        await a.board.renew()
        await b.board.renew()
        assert b.seen() == (3, 0, 0)
        info = b.workers[0].link.info
        assert info is not None
        info.incarnation = b.workers[0].fits = OWN
        await b.board.renew()
        assert b.seen() == (0, 0, 0)


async def test_what_a_dead_orchestrator_had_is_soon_forgotten(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board_module, "FRESH_S", 0.2)
    async with orchestrators(server, "dead", "b") as (dead, b):
        dead.workers[0].sessions = 3
        await dead.board.renew()
        await b.board.renew()
        assert b.seen() == (3, 0, 0)
        await asyncio.sleep(0.15)
        await b.board.renew()
        assert b.seen() == (3, 0, 0), "it may only be slow"
        await asyncio.sleep(0.1)
        await b.board.renew()
        assert b.seen() == (0, 0, 0)
        await asyncio.sleep(0.25)
        async with Redis.from_url(server.url) as redis:
            assert await redis.keys("*") == [], "leases run out"


async def test_one_that_leaves_says_so(server: Server) -> None:
    async with orchestrators(server, "a", "b") as (a, b):
        a.workers[0].sessions = 3
        a.board.start()
        b.board.start()
        async with asyncio.timeout(5):
            while b.seen() != (3, 0, 0):
                await asyncio.sleep(0.01)
            await a.board.close()
            while b.seen() != (0, 0, 0):
                await asyncio.sleep(0.01)
        await b.board.close()
        async with Redis.from_url(server.url) as redis:
            assert await redis.keys("outrider:worker:*") == []


async def test_without_redis_what_others_had_holds_until_it_is_old(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board_module, "FRESH_S", 0.4)
    async with orchestrators(server, "a", "b") as (a, b):
        a.workers[0].sessions = 3
        await a.board.renew()
        b.board.start()
        async with asyncio.timeout(5):
            while b.seen() != (3, 0, 0):
                await asyncio.sleep(0.01)
            server.stop()
            with pytest.raises(Unavailable):
                await b.board.renew()
            while b.seen() != (0, 0, 0):
                await asyncio.sleep(0.01)
            server.restart()
            while True:  # And it is found again, script and all.
                with contextlib.suppress(Unavailable):
                    await a.board.renew()
                    break
                await asyncio.sleep(0.05)
            while b.seen() != (3, 0, 0):
                await asyncio.sleep(0.01)
                await a.board.renew()
        await b.board.close()


async def test_what_makes_no_sense_is_left_out(server: Server) -> None:
    async with orchestrators(server, "a", "b") as (a, b), Redis.from_url(server.url) as redis:
        a.workers[0].sessions = 3
        await a.board.renew()
        key = f"outrider:worker:{SHARED:016x}"
        for n, garbage in enumerate(
            [
                b"",
                b"x",
                b"99999999999999 {}}",
                b"99999999999999 []",
                b'99999999999999 {"sessions":-1}',
                b'99999999999999 {"sessions":1e99}',
                b'99999999999999 {"sessions":true}',
                b"99999999999999 \xff",
            ]
        ):
            await redis.hset(key, f"odd{n}", garbage)
        await b.board.renew()
        assert b.seen() == (3, 0, 0)


async def test_the_rights_of_the_session_store_are_enough(server: Server) -> None:
    async with Redis.from_url(server.url) as redis:
        await redis.execute_command(
            "ACL", "SETUSER", "o", "on", ">pw", "~outrider:*", *RIGHTS.split()
        )
        client = await ScriptClient.connect(
            server.url.replace("//", "//o:pw@"), SCRIPT, timeout_s=2
        )
        try:
            one = Orchestrator("a", client, worker(SHARED))
            await one.board.renew()
            one.board.start()
            await one.board.close()
            assert await redis.keys("*") == []
        finally:
            await client.close()


def test_loads_come_back_from_json() -> None:
    load = Load(sessions=3, tokens=99, waiting=1)
    assert Load.from_json(load.to_json(model="m", zone="")) == load
