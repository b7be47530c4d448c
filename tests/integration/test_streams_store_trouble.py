"""Whole streams while their store fails over, loses nodes, loads, is full, slow, or forgets."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from redis import Redis

from outrider.client import Completion
from outrider.errors import DataLoss, NotFound, OutriderError, Unavailable
from outrider.types import Durability
from scripted_workers import Parts, Rig, Stream, until
from store_fleets import (
    SERVICE,
    ask,
    promote,
    running_cluster,
    running_pair,
    running_sentinels,
    wait,
)
from store_servers import running_link, running_server
from test_store_policy import LONG, PROMPT, assert_same, undisturbed, with_store

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(120),
    pytest.mark.slow,
]

POLICIES = pytest.mark.parametrize("policy", list(Durability), ids=lambda policy: policy.value)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def expected(stack: Rig) -> Completion:
    return await undisturbed(stack)


@contextlib.asynccontextmanager
async def at(stack: Rig, parts: Parts, url: str, **settings: Any) -> AsyncIterator[Rig]:
    """An orchestrator with this store before the shared workers."""
    values = {"store_timeout_s": 0.5, "store_retry_s": 20.0, "store_wait_s": 0.2, **settings}
    async with parts.orchestrator(url, targets=stack.targets, drafts=stack.drafts, **values) as rig:
        yield rig


async def test_a_stream_outlives_the_primary_of_its_store(
    stack: Rig, parts: Parts, tmp_path: Path, expected: Completion
) -> None:
    with running_pair(tmp_path) as (first, _):
        with running_sentinels(tmp_path, first) as sentinels:
            hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in sentinels)
            async with at(stack, parts, f"redis+sentinel://{hosts}/{SERVICE}") as rig:
                stream = await Stream(rig, PROMPT, **LONG).reaches(40)
                os.kill(rig.pids[0], signal.SIGSTOP)  # So that the replica has all of it.
                await asyncio.sleep(0.1)
                first.stop()
                os.kill(rig.pids[0], signal.SIGCONT)
                done = await stream.end()
                assert_same(done, expected)
                assert done.durable and done.usage.tokens_sent_undurable == 0
                assert (await rig.complete("afterwards", max_tokens=5)).durable


@POLICIES
async def test_a_replica_that_lagged_ends_a_stream_or_does_not(
    stack: Rig, parts: Parts, tmp_path: Path, expected: Completion, policy: Durability
) -> None:
    """It takes over without the latest commits: nothing is told twice, nothing silently lost."""
    with running_pair(tmp_path) as (first, second):
        async with running_link(first) as link, at(stack, parts, link.url) as rig:
            stream = await Stream(rig, PROMPT, **LONG, durability=policy).reaches(40)
            promote(second)
            await stream.reaches(stream.num_tokens + 40)
            link.hold.clear()
            first.stop()
            link.target_port = second.port
            link.hold.set()
            if policy is Durability.REQUIRE:
                error = await stream.error()
                assert isinstance(error, DataLoss) and "has lost the rest" in str(error), error
                ids = [token_id for chunk in stream.chunks for token_id in chunk.token_ids]
                assert tuple(ids) == expected.token_ids[: len(ids)] and 80 <= len(ids) < 300
            else:
                done = await stream.end()
                assert_same(done, expected)
                assert not done.durable
            assert (await rig.complete("afterwards", max_tokens=5)).durable


async def test_streams_in_a_cluster_outlive_a_dead_node(
    stack: Rig, parts: Parts, tmp_path: Path, expected: Completion
) -> None:
    with running_cluster(tmp_path) as fleet:
        async with at(stack, parts, fleet.url) as rig:
            streams = [Stream(rig, PROMPT, **LONG) for _ in range(6)]
            for stream in streams:
                await stream.reaches(30)
            homes = {fleet.owner(stream.chunks[0].session_id).port for stream in streams}
            assert len(homes) > 1
            fleet.primaries[0].stop()
            for stream in streams:
                done = await stream.end()
                assert_same(done, expected)
                assert done.durable
            wait(fleet.is_whole, "the cluster is whole again")
            kept = await rig.complete("kept", max_tokens=5, keep_session=True)
            assert [s.session_id for s in (await rig.client.list_sessions()).sessions] == [
                kept.session_id
            ]
            await rig.client.delete_session(kept.session_id)


async def test_a_store_that_loads_its_data_is_waited_for(
    stack: Rig, parts: Parts, tmp_path: Path, expected: Completion
) -> None:
    slow_load = ("--key-load-delay", "2000", "--loading-process-events-interval-bytes", "1024")
    options = (*slow_load, "--appendonly", "yes", "--appendfsync", "always")
    settings = {"store_timeout_s": 3.0, "store_retry_s": 20.0}
    async with with_store(stack, parts, tmp_path, *options, **settings) as (server, rig):
        with Redis.from_url(server.url) as redis:
            redis.mset({f"other:{n}": os.urandom(100) for n in range(3000)})
            redis.bgrewriteaof()  # While it loads what was rewritten, it answers.
            wait(lambda: redis.info("persistence")["aof_base_size"] > 40_000, "it is rewritten")
        stream = await Stream(rig, PROMPT, **LONG).reaches(40)
        server.stop()
        server.restart()
        with pytest.raises(Unavailable, match="is loading its data"):
            await rig.complete("meanwhile", max_tokens=1)
        assert_same(await stream.end(), expected)


@POLICIES
async def test_a_full_store_holds_a_stream_up_or_does_not(
    stack: Rig, parts: Parts, tmp_path: Path, expected: Completion, policy: Durability
) -> None:
    settings = {"store_retry_s": 20.0, "durability": policy.value}
    async with with_store(stack, parts, tmp_path, **settings) as (server, rig):
        stream = await Stream(rig, PROMPT, **LONG).reaches(40)
        ask(server, "CONFIG", "SET", "maxmemory", "1")
        await asyncio.sleep(0.2)
        if policy is Durability.REQUIRE:
            told = stream.num_tokens
            await asyncio.sleep(0.3)
            assert stream.num_tokens == told < 300
            ask(server, "CONFIG", "SET", "maxmemory", "0")
        done = await stream.end()
        assert_same(done, expected)
        assert done.durable == (policy is Durability.REQUIRE)
        if policy is Durability.BEST_EFFORT:
            with pytest.raises(OutriderError, match="out of memory"):
                await rig.complete("another", max_tokens=3)


async def test_slow_replies_make_commits_larger_not_streams_slower(
    stack: Rig, parts: Parts, tmp_path: Path, expected: Completion
) -> None:
    with running_server("valkey", tmp_path) as server:
        async with running_link(server) as link, at(stack, parts, link.url) as rig:
            stream = await Stream(rig, PROMPT, **LONG).reaches(20)
            ask(server, "CONFIG", "RESETSTAT")
            link.delay_s = 0.15
            done = await stream.end()
            link.delay_s = 0.0
            assert_same(done, expected)
            assert done.durable
            # Far fewer than the rounds that were left: what waits goes together.
            scripts = ask(server, "INFO", "commandstats")["cmdstat_evalsha"]["calls"]
            assert scripts < 60 < done.stats.rounds - 10


@POLICIES
async def test_a_key_that_is_evicted_ends_a_stream_or_does_not(
    stack: Rig, parts: Parts, tmp_path: Path, expected: Completion, policy: Durability
) -> None:
    settings = {"durability": policy.value}
    async with with_store(stack, parts, tmp_path, **settings) as (server, rig):
        streams = {key: Stream(rig, PROMPT, **LONG) for key in ("meta", "log", "notes")}
        for key, stream in streams.items():
            await stream.reaches(40)
            session_id = stream.chunks[0].session_id
            assert ask(server, "DEL", f"outrider:{{{session_id}}}:{key}") == 1
        for stream in streams.values():
            if policy is Durability.REQUIRE:
                error = await stream.error()
                assert isinstance(error, NotFound) and "evicted" in str(error)
                ids = [token_id for chunk in stream.chunks for token_id in chunk.token_ids]
                assert tuple(ids) == expected.token_ids[: len(ids)]
            else:
                done = await stream.end()
                assert_same(done, expected)
                assert not done.durable

        async def gone() -> bool:
            return ask(server, "KEYS", "outrider:{*") == []

        await until(gone, "what was left of them is gone too")


async def test_a_store_that_evicts_takes_sessions_and_nothing_else(
    stack: Rig, parts: Parts, tmp_path: Path
) -> None:
    """allkeys-lru, full of other things: a kept session vanishes, which is said."""
    options = ("--maxmemory-policy", "allkeys-lru", "--maxmemory-samples", "64")
    async with with_store(stack, parts, tmp_path, *options) as (server, rig):
        kept = await rig.complete("kept", max_tokens=5, keep_session=True)
        with Redis.from_url(server.url) as redis:
            used = redis.info("memory")["used_memory"]
            redis.config_set("maxmemory", used + (4 << 20))
            for n in range(600):
                redis.set(f"other:{n}", "x" * 16_384)
            assert redis.exists(f"outrider:{{{kept.session_id}}}:log") == 0
        with pytest.raises(NotFound, match="evicted"):
            await rig.complete("more", max_tokens=5, session_id=kept.session_id, keep_session=True)
        assert (await rig.client.list_sessions()).sessions == ()
        assert (await rig.complete("another", max_tokens=5)).durable
