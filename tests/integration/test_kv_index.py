"""Who holds a prefix: what workers tell the store, and what placement may ask it."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from redis import Redis

from outrider.kv_store.connection import StoreAddress
from outrider.kv_store.index import MAX_HOLDERS, IndexReader, IndexWriter, index_key, index_salt
from store_servers import Server, free_port, running_server

SALT = index_salt("model", "", "alice")
TTL_S = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server("valkey", tmp_path_factory.mktemp("index")) as running:
        yield running


@pytest.fixture
def redis(server: Server) -> Iterator[Redis]:
    with Redis.from_url(server.url) as client:
        client.flushall()
        yield client


@pytest_asyncio.fixture
async def reader(server: Server) -> AsyncIterator[IndexReader]:
    made = IndexReader.connect(StoreAddress(server.url), ttl_s=TTL_S, timeout_s=2.0)
    yield made
    await made.close()


def tell(redis: Redis, incarnation: int, hashes: list[int], *, tenant: str = "alice") -> None:
    writer = IndexWriter(redis, incarnation, model_fingerprint="model", adapter="", ttl_s=TTL_S)
    writer.add(tenant, hashes)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 100, 511])
async def test_the_depth_is_exact_whatever_the_length(
    redis: Redis, reader: IndexReader, length: int
) -> None:
    for depth in {1, length // 3, length // 2, length - 1, length} - {0}:
        prompt = [hash((length, depth, i)) & 0xFFFF_FFFF for i in range(length)]
        tell(redis, 7, prompt[:depth])
        assert await reader.holders(SALT, prompt) == {7: depth}


async def test_several_hold_it_and_callers_are_kept_apart(
    redis: Redis, reader: IndexReader
) -> None:
    prompt = list(range(100, 108))
    tell(redis, 1, prompt[:8])
    tell(redis, 2, prompt[:3])
    tell(redis, 3, prompt, tenant="bob")
    assert await reader.holders(SALT, prompt) == {1: 8, 2: 3}
    assert await reader.holders(index_salt("other", "", "alice"), prompt) == {}
    assert await reader.holders(SALT, [9, 9]) == {} == await reader.holders(SALT, [])


async def test_it_stays_small_and_forgets(redis: Redis, reader: IndexReader) -> None:
    for incarnation in range(3 * MAX_HOLDERS):
        tell(redis, incarnation, [5])
    latest = set(range(2 * MAX_HOLDERS, 3 * MAX_HOLDERS))
    assert set(await reader.holders(SALT, [5])) == latest
    assert 0 < redis.pttl(index_key(SALT, 5)) <= TTL_S * 1000
    redis.zadd(index_key(SALT, 5), {"23": time.time() - TTL_S - 1})
    assert set(await reader.holders(SALT, [5])) == latest - {23}


async def test_without_the_store_nobody_is_known_and_nobody_waits(server: Server) -> None:
    away = IndexReader.connect(StoreAddress(f"redis://127.0.0.1:{free_port()}"), ttl_s=TTL_S)
    assert await away.holders(SALT, [1, 2]) == {} and away.failures == 1
    await away.close()
    hung = IndexReader.connect(StoreAddress(server.url), ttl_s=TTL_S, timeout_s=0.05)
    assert await hung.holders(SALT, [1]) == {} and hung.failures == 0
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        answers = await asyncio.gather(*(hung.holders(SALT, [1, 2]) for _ in range(5)))
        assert answers == [{}] * 5 and time.monotonic() - started < 1
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
    assert hung.failures == 5
    await hung.close()
