"""Streams that their clients leave: everything is freed at once, and no work goes on."""

import asyncio
import contextlib
import random
import time
from typing import Any

import pytest

from outrider.client import GenerationOptions
from outrider.client_wire import generate_request
from outrider.rpc.channel import open_channel
from outrider.types import VerificationMode
from outrider.v1.generation_pb2_grpc import GenerationServiceStub
from scripted_workers import LINGER_S, Parts, Rig

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

CONCURRENCY = 16
REFERENCE = [f"before and after {number}" for number in range(4)]


async def leave(rig: Rig, chance: random.Random) -> str:
    """Start a stream and leave it at a random moment; how far it got."""
    prompt = [chance.randrange(250) for _ in range(chance.choice((1, 5, 40, 300)))]
    options = GenerationOptions(
        max_tokens=chance.choice((20, 150)),
        temperature=chance.choice((0.0, 1.0)),
        num_speculative_tokens=chance.choice((0, 1, 4, 8)),
        proposer=chance.choice(("draft", "draft", "ngram")),
        mode=chance.choice(list(VerificationMode)),
        seed=chance.randrange(1 << 32),
        stop_strings=chance.choice(((), ("zzzz",))),
    )
    patience_s = chance.choice((0.0, chance.uniform(0, 0.05), chance.uniform(0, 0.6)))
    num_chunks = chance.choice((0, 1, 3, 1000))
    seen = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patience_s if num_chunks == 1000 else None):
            async with contextlib.aclosing(rig.client.generate(prompt, options)) as stream:
                async for chunk in stream:
                    seen += 1
                    if chunk.finish_reason is not None:
                        return "ended"
                    if seen > num_chunks:
                        break
    return "mid-stream" if seen else "before its first token"


async def check_that_leaving_frees_everything(rig: Rig, count: int) -> None:
    options: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, "seeds": True}
    expected = await rig.complete_all(REFERENCE, num_speculative_tokens=4, **options)
    await asyncio.sleep(0.3)  # The last sessions before are closed.
    before = await rig.held()
    lasting = await rig.keys(lasting=True)
    gate = asyncio.Semaphore(CONCURRENCY)
    chance = random.Random(12)
    outcomes: list[str] = []

    async def one() -> None:
        async with gate:
            outcomes.append(await leave(rig, random.Random(chance.random())))

    await asyncio.gather(*(one() for _ in range(count)))
    tally = {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}
    print(tally)
    assert tally["mid-stream"] > count / 5 and tally["before its first token"] > count / 20
    await rig.returns_to(before)
    used = await rig.cpu_s()
    await asyncio.sleep(1.0)
    assert await rig.cpu_s() - used < 0.25, "work goes on after all clients have left"
    await asyncio.sleep(LINGER_S)
    assert await rig.keys() == lasting
    again = await rig.complete_all(REFERENCE, num_speculative_tokens=4, **options)
    assert [d.token_ids for d in again] == [d.token_ids for d in expected]
    assert [d.stats for d in again] == [d.stats for d in expected]


async def test_200_streams_left_at_random_moments(stack: Rig) -> None:
    await check_that_leaving_frees_everything(stack, 200)


@pytest.mark.exactness
async def test_1000_streams_left_at_random_moments(stack: Rig) -> None:
    await check_that_leaving_frees_everything(stack, 1000)


async def test_leaving_frees_keys_and_kv_at_once(stack: Rig, parts: Parts) -> None:
    """Long before an ended session's linger time, and before any timer."""
    async with parts.orchestrator(
        stack.store_url, targets=stack.targets, drafts=stack.drafts, session_linger_s=600
    ) as rig:
        before = await rig.held()
        streams = [
            rig.client.generate("x" * 200, GenerationOptions(max_tokens=300, ignore_eos=True))
            for _ in range(4)
        ]
        for stream in streams:
            for _ in range(3):  # The first token comes before any proposal.
                await anext(stream)
        during = await rig.held()
        assert during.keys - before.keys in (12, 13)  # 3 each, and the index of live sessions
        assert all(d - b == 4 for d, b in zip(during.sessions, before.sessions, strict=True))
        assert all(d > b for d, b in zip(during.blocks_used, before.blocks_used, strict=True))
        started = time.monotonic()
        for stream in streams:
            await stream.aclose()
        await rig.returns_to(before, timeout_s=5)
        print(f"free after {time.monotonic() - started:.2f} s")


async def test_a_client_whose_connection_goes_is_noticed(stack: Rig) -> None:
    before = await stack.held()
    channel = open_channel(stack.address)
    stub: Any = GenerationServiceStub(channel)
    call = stub.Generate(generate_request("y" * 50, GenerationOptions(max_tokens=400)))
    await call.read()
    assert (await stack.held()).keys > before.keys
    await channel.close(None)
    await stack.returns_to(before)


async def test_a_slow_reader_holds_up_nobody(stack: Rig) -> None:
    slow = stack.client.generate("slow", GenerationOptions(max_tokens=300, ignore_eos=True))
    await anext(slow)
    started = time.monotonic()
    await stack.complete_all([f"quick {number}" for number in range(8)], max_tokens=16)
    assert time.monotonic() - started < 20
    rest = [chunk async for chunk in slow]
    assert sum(len(chunk.token_ids) for chunk in rest) + 1 == 300
