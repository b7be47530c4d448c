"""Many sessions' writes in one batch: each gets its own reply, whatever becomes of the others."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from redis.asyncio import BlockingConnectionPool, Redis

from outrider.errors import NotFound, Unavailable
from outrider.types import Fence, chain_hash
from services.orchestrator.store import SessionStore
from services.orchestrator.store_batches import Batches, packed
from services.orchestrator.store_commit import CommitQueue
from store_servers import Server, begin, create, log_of, open_store, running_link, running_server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with running_server("valkey", tmp_path) as running:
        yield running


@pytest_asyncio.fixture
async def pool(server: Server) -> AsyncIterator[BlockingConnectionPool]:
    pool = BlockingConnectionPool.from_url(server.url, protocol=2, max_connections=8, timeout=1)
    yield pool
    await pool.aclose()


async def connections(server: Server) -> int:
    """That have been made since the server started."""
    async with Redis.from_url(server.url) as redis:
        return int((await redis.info("stats"))["total_connections_received"])


async def queues(store: SessionStore, count: int) -> list[tuple[Fence, CommitQueue]]:
    """Of sessions whose log is [1]."""
    found = []
    for _ in range(count):
        fence = await create(store)
        await begin(store, fence, [1])
        queue = CommitQueue(store, fence, durable_len=1, prefix_hash=chain_hash(0, [1]))
        found.append((fence, queue))
    return found


def test_commands_are_packed_as_redis_reads_them() -> None:
    command = packed(["SET", "ключ", b"\x00\r\n\xff", -7])
    assert command == (
        b"*4\r\n$3\r\nSET\r\n$8\r\n" + "ключ".encode() + b"\r\n$4\r\n\x00\r\n\xff\r\n$2\r\n-7\r\n"
    )


async def test_what_is_asked_at_once_goes_over_one_connection(
    server: Server, pool: BlockingConnectionPool
) -> None:
    batches = Batches(pool, 2.0)
    before = await connections(server)
    echoes = [batches.execute(["ECHO", f"{n}"]) for n in range(1000)]
    assert await asyncio.gather(*echoes) == [b"%d" % n for n in range(1000)]
    assert await connections(server) - before <= 1 + 2  # Two of at most 512, and this question's.
    await batches.close()


async def test_one_commands_error_is_its_own(pool: BlockingConnectionPool) -> None:
    batches = Batches(pool, 2.0)
    commands = [["ECHO", "a"], ["NONSENSE"], ["ECHO", "b"], ["INCR"], ["ECHO", "c"]]
    found = await asyncio.gather(*map(batches.execute, commands), return_exceptions=True)
    assert found[::2] == [b"a", b"b", b"c"]
    assert "unknown command" in str(found[1]) and "wrong number" in str(found[3])
    await batches.close()


async def test_whoever_gives_up_disturbs_nobody(pool: BlockingConnectionPool) -> None:
    batches = Batches(pool, 2.0)
    early, late, kept = (
        asyncio.create_task(batches.execute(["ECHO", name])) for name in ("early", "late", "kept")
    )
    await asyncio.sleep(0)
    early.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    late.cancel()
    assert await kept == b"kept"
    assert await batches.execute(["ECHO", "next"]) == b"next"
    await batches.close()


async def test_a_connection_that_died_unnoticed_is_replaced(
    server: Server, pool: BlockingConnectionPool
) -> None:
    batches = Batches(pool, 2.0)
    await batches.execute(["SET", "n", 0])
    async with Redis.from_url(server.url) as redis:
        await redis.client_kill_filter(_type="normal", skipme=True)
    assert await asyncio.gather(*(batches.execute(["ECHO", n]) for n in range(3))) == [
        b"0",
        b"1",
        b"2",
    ]
    await batches.close()


async def test_sessions_that_commit_together_keep_their_own_fates(server: Server) -> None:
    async with open_store(server.url) as store:
        found = await queues(store, 40)
        await store.remove(found[7][0].session_id, tenant="alice")
        stores = [queue.store([n, n + 1]) for n, (_, queue) in enumerate(found)]
        ended = await asyncio.gather(*stores, return_exceptions=True)
        assert [type(error) for error in ended if error is not None] == [NotFound]
        assert isinstance(ended[7], NotFound)
        for n, (fence, _) in enumerate(found):
            assert n == 7 or await log_of(store, fence) == [1, n, n + 1]


async def test_a_store_that_forgot_the_script_is_told_it_again(server: Server) -> None:
    async with open_store(server.url) as store:
        found = await queues(store, 5)
        async with Redis.from_url(server.url) as redis:
            await redis.script_flush()
        await asyncio.gather(*(queue.store([2]) for _, queue in found))
        assert [await log_of(store, fence) for fence, _ in found] == [[1, 2]] * 5


async def test_a_silent_store_is_given_up_in_time_by_all_who_asked(server: Server) -> None:
    async with (
        running_link(server) as link,
        open_store(link.url, command_timeout_s=0.3) as store,
    ):
        found = await queues(store, 3)
        link.hold.clear()
        started = asyncio.get_running_loop().time()
        renewals = [store.renew(fence) for fence, _ in found]
        ended = await asyncio.gather(*renewals, return_exceptions=True)
        assert 0.25 < asyncio.get_running_loop().time() - started < 0.8
        assert all(isinstance(e, Unavailable) and "did not answer" in str(e) for e in ended)
        link.hold.set()
        await asyncio.gather(*(store.renew(fence) for fence, _ in found))
