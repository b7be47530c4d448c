"""Redis away, back, or back without its memory, under both policies: `require` tells nothing that
is not stored, `best-effort` tells everything and says what is not."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from outrider.client import Completion
from outrider.errors import NotFound, Unavailable
from outrider.types import Durability
from scripted_workers import Parts, Rig, Stream, until
from store_servers import Server, running_server

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(120),
    pytest.mark.slow,
]

LONG: dict[str, Any] = {
    "max_tokens": 300,
    "ignore_eos": True,
    "temperature": 1.0,
    "seed": 31,
    "logprobs": 1,
}
PROMPT = "while Redis is away"
BEST_EFFORT = {"durability": Durability.BEST_EFFORT}
PERSISTENT = ("--appendonly", "yes", "--appendfsync", "always")


@contextlib.asynccontextmanager
async def with_store(
    stack: Rig, parts: Parts, folder: Path, *options: str, **settings: Any
) -> AsyncIterator[tuple[Server, Rig]]:
    """An orchestrator with a store of its own before the shared workers."""
    with running_server("valkey", folder, *options) as server:
        values = {"store_timeout_s": 0.5, "store_retry_s": 8.0, "store_wait_s": 0.2, **settings}
        async with parts.orchestrator(
            server.url, targets=stack.targets, drafts=stack.drafts, **values
        ) as rig:
            yield server, rig


async def undisturbed(stack: Rig) -> Completion:
    return await stack.complete(PROMPT, num_speculative_tokens=0, **LONG)


def assert_same(done: Completion, expected: Completion) -> None:
    assert done.token_ids == expected.token_ids and done.text == expected.text
    assert done.finish_reason is expected.finish_reason
    assert len(done.logprobs) == len(expected.logprobs)


async def test_a_store_that_comes_back_with_its_memory_costs_time_only(
    stack: Rig, parts: Parts, tmp_path: Path
) -> None:
    expected = await undisturbed(stack)
    async with with_store(stack, parts, tmp_path, *PERSISTENT) as (server, rig):
        stream = await Stream(rig, PROMPT, **LONG).reaches(40)
        server.stop()
        await asyncio.sleep(0.3)
        told = stream.num_tokens
        await asyncio.sleep(0.3)
        assert stream.num_tokens == told  # Nothing is told that is not stored.
        server.restart()
        done = await stream.end()
        assert_same(done, expected)
        assert done.durable and done.usage.tokens_sent_undurable == 0


async def test_best_effort_goes_on_meanwhile_and_the_store_catches_up(
    stack: Rig, parts: Parts, tmp_path: Path
) -> None:
    expected = await undisturbed(stack)
    async with with_store(stack, parts, tmp_path, *PERSISTENT) as (server, rig):
        stream = await Stream(rig, PROMPT, **LONG, **BEST_EFFORT, keep_session=True).reaches(40)
        server.stop()
        told = stream.num_tokens
        await stream.reaches(told + 60)
        server.restart()
        done = await stream.end()
        assert_same(done, expected)
        undurable = sum(len(chunk.token_ids) for chunk in stream.chunks if not chunk.durable)
        assert undurable == done.usage.tokens_sent_undurable >= 40
        assert stream.chunks[0].durable and not done.durable

        async def whole() -> bool:
            session = await rig.client.get_session(done.session_id, include_tokens=True)
            [generation] = session.generations
            ids = session.token_ids[generation.prompt_end :]
            return ids == done.token_ids and generation.finish_reason is done.finish_reason

        await until(whole, "the store has all of it in the end")
        await rig.client.delete_session(done.session_id)  # The workers are everybody's.


@pytest.mark.parametrize("policy", list(Durability), ids=lambda policy: policy.value)
async def test_a_store_that_has_forgotten_ends_a_stream_or_does_not(
    stack: Rig, parts: Parts, tmp_path: Path, policy: Durability
) -> None:
    """The policy of the server, where a request says nothing."""
    expected = await undisturbed(stack)
    await asyncio.sleep(0.2)
    before = await stack.held()
    settings = {"durability": policy.value}
    async with with_store(stack, parts, tmp_path, **settings) as (server, rig):
        stream = await Stream(rig, PROMPT, **LONG).reaches(40)
        server.restart()
        if policy is Durability.REQUIRE:
            error = await stream.error()
            assert isinstance(error, NotFound) and "expired, was deleted or evicted" in str(error)
            ids = [token_id for chunk in stream.chunks for token_id in chunk.token_ids]
            assert tuple(ids) == expected.token_ids[: len(ids)] and len(ids) < 300
            assert all(chunk.durable for chunk in stream.chunks)
        else:
            done = await stream.end()
            assert_same(done, expected)
            assert not done.durable and done.usage.tokens_sent_undurable > 0
            with pytest.raises(NotFound):
                await rig.client.get_session(done.session_id)
        await stack.returns_to(before)
        # Both serve again at once.
        assert (await rig.complete("afterwards", max_tokens=5)).durable


async def test_a_store_that_hangs_holds_up_a_best_effort_stream_but_for_a_moment(
    stack: Rig, parts: Parts, tmp_path: Path
) -> None:
    expected = await undisturbed(stack)
    async with with_store(stack, parts, tmp_path) as (server, rig):
        stream = await Stream(rig, PROMPT, **LONG, **BEST_EFFORT).reaches(40)
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            done = await stream.end()
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        assert_same(done, expected)
        assert not done.durable and done.usage.tokens_sent_undurable > 200


async def test_without_the_store_nothing_is_told_beyond_the_lease(
    stack: Rig, parts: Parts, tmp_path: Path
) -> None:
    """Long before the time that commits are repeated for."""
    settings = {"lease_s": 1.0, "store_retry_s": 60.0, "store_timeout_s": 0.3}
    async with with_store(stack, parts, tmp_path, **settings) as (server, rig):
        stream = await Stream(rig, PROMPT, **LONG).reaches(40)
        os.kill(server.process.pid, signal.SIGSTOP)
        started = time.monotonic()
        try:
            error = await stream.error()
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        assert isinstance(error, Unavailable) and "lease of the session ran out" in str(error)
        assert 0.9 < time.monotonic() - started < 20
