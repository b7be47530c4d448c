"""A target that goes on with plain rounds by itself, as real processes: what comes is the same.

`ahead` has such a target; the shared `stack` has the same model in one that is asked each round.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from outrider.client import Completion, GenerationOptions
from outrider.types import FinishReason, VerificationMode
from scripted_workers import Parts, Rig, Stream, until

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

PLAIN: dict[str, Any] = {"num_speculative_tokens": 0}
GREEDY: dict[str, Any] = {"temperature": 0.0}
COUPLED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95}
REJECTION: dict[str, Any] = {"temperature": 1.0, "mode": VerificationMode.REJECTION}
PROMPTS = [f"{number}: go on and on" for number in range(6)]

READER = """
import asyncio, sys
from outrider.client import GenerationOptions, OutriderClient

async def read(client, number):
    options = GenerationOptions(max_tokens=480, ignore_eos=True, num_speculative_tokens=0)
    async for _ in client.generate(f"killed {number}", options):
        print("chunk", flush=True)

async def main():
    client = await OutriderClient.connect(address=sys.argv[1], resume=None)
    await asyncio.gather(*(read(client, number) for number in range(4)))

asyncio.run(main())
"""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def ahead(
    stack: Rig, parts: Parts, tiny_models: dict[str, Path]
) -> AsyncIterator[tuple[Rig, int]]:
    """An orchestrator before a target that goes on by itself, and the target's process id."""
    async with parts.worker("target", tiny_models["target"], more_rounds="on") as (child, target):
        async with parts.orchestrator(stack.store_url, targets=[target]) as rig:
            yield rig, child.pid


def same(done: list[Completion], expected: list[Completion]) -> None:
    for one, other in zip(done, expected, strict=True):
        assert (one.token_ids, one.text) == (other.token_ids, other.text)
        assert (one.finish_reason, one.matched_stop) == (other.finish_reason, other.matched_stop)
        assert one.stats == other.stats


async def test_the_setting_decides_who_offers_it(
    stack: Rig, ahead: tuple[Rig, int], parts: Parts, tiny_models: dict[str, Path]
) -> None:
    rig, _ = ahead
    assert "more_rounds" in (await rig.info(rig.targets[0])).capabilities
    assert "more_rounds" not in (await stack.info(stack.targets[0])).capabilities, "auto, on a CPU"
    async with parts.process(
        "target", "--model", str(tiny_models["target"]), "--more-rounds", "maybe", wait=False
    ) as (child, _):
        assert await asyncio.wait_for(child.wait(), 60) != 0
        assert "more" in child.log_tail()


@pytest.mark.parametrize(
    "options",
    [GREEDY, COUPLED, {**COUPLED, "logprobs": 2}, REJECTION, {**COUPLED, "min_tokens": 60}],
    ids=["greedy", "coupled", "logprobs", "rejection", "min_tokens"],
)
async def test_tokens_are_those_of_a_target_that_is_asked_each_round(
    stack: Rig, ahead: tuple[Rig, int], options: dict[str, Any]
) -> None:
    """Eight streams at once, over several runs each."""
    rig, _ = ahead
    options = {"max_tokens": 90, "seeds": True, **PLAIN, **options}
    expected = await stack.complete_all(PROMPTS, **options)
    done = await rig.complete_all(PROMPTS, **options)
    same(done, expected)
    assert len({one.token_ids for one in done}) == len(PROMPTS)
    assert max(len(one.token_ids) for one in done) > 65
    for one, other in zip(done, expected, strict=True):
        assert len(one.logprobs) == len(other.logprobs)
        for own, others in zip(one.logprobs, other.logprobs, strict=True):
            assert own.logprob == pytest.approx(others.logprob, abs=2e-4)


async def test_stop_strings_and_stop_ids_cut_at_the_same_place(
    stack: Rig, ahead: tuple[Rig, int]
) -> None:
    rig, _ = ahead
    options = {"max_tokens": 120, "seeds": True, **PLAIN, **COUPLED}
    free = await stack.complete_all(PROMPTS, **options)
    texts = [one.text for one in free]
    cuts = tuple(dict.fromkeys(text[20:22] for text in texts))[:16]
    stopped = {**options, "stop_strings": cuts}
    expected = await stack.complete_all(PROMPTS, **stopped)
    assert all(one.finish_reason is FinishReason.STOP_STRING for one in expected)
    same(await rig.complete_all(PROMPTS, **stopped), expected)
    stop_ids = tuple({one.token_ids[25] for one in free})
    stopped = {**options, "stop_token_ids": stop_ids}
    expected = await stack.complete_all(PROMPTS, **stopped)
    assert all(one.finish_reason is FinishReason.STOP_TOKEN for one in expected)
    same(await rig.complete_all(PROMPTS, **stopped), expected)


async def test_the_context_ends_it_at_the_same_place(stack: Rig, ahead: tuple[Rig, int]) -> None:
    rig, _ = ahead
    prompt, options = "x" * 400, {"max_tokens": 400, "ignore_eos": True, **PLAIN}
    done, expected = await rig.complete(prompt, **options), await stack.complete(prompt, **options)
    same([done], [expected])
    assert done.finish_reason is FinishReason.CONTEXT_FULL and len(done.token_ids) == 112


async def test_plain_and_speculative_streams_side_by_side(
    stack: Rig, ahead: tuple[Rig, int], parts: Parts
) -> None:
    rig, _ = ahead
    options = {"max_tokens": 100, "seeds": True, **COUPLED}
    expected = await stack.complete_all(PROMPTS, **PLAIN, **options)
    async with parts.orchestrator(
        stack.store_url, targets=rig.targets, drafts=stack.drafts
    ) as both:
        plain, drafted = await asyncio.gather(
            both.complete_all(PROMPTS, **PLAIN, **options),
            both.complete_all(PROMPTS, num_speculative_tokens=4, **options),
        )
    same(plain, expected)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in expected]
    assert all(one.stats.accepted > 0 for one in drafted)


@contextlib.asynccontextmanager
async def counting_relay(address: str) -> AsyncIterator[tuple[str, list[int]]]:
    """Another address of a service, and how many bytes each read there sent to it."""
    host, place = address.rsplit(":", 1)
    sent: list[int] = []
    tasks: set[asyncio.Task[Any]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, up: bool) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                if up:
                    sent.append(len(data))
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if host == "unix":
            there, back = await asyncio.open_unix_connection(place)
        else:
            there, back = await asyncio.open_connection(host, int(place))
        tasks.add(asyncio.create_task(pump(reader, back, True)))
        tasks.add(asyncio.create_task(pump(there, writer, False)))

    server = await asyncio.start_server(connect, "127.0.0.1")
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", sent
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_target_that_goes_on_by_itself_is_hardly_asked(
    stack: Rig, ahead: tuple[Rig, int], parts: Parts
) -> None:
    bytes_a_token = []
    for address in (stack.targets[0], ahead[0].targets[0]):
        async with (
            counting_relay(address) as (relay, sent),
            parts.orchestrator(stack.store_url, targets=[relay]) as rig,
        ):
            sent.clear()
            await rig.complete(PROMPTS[0], max_tokens=300, ignore_eos=True, **PLAIN)
            bytes_a_token.append(sum(sent) / 300)
    print(bytes_a_token)
    asked, ahead_of = bytes_a_token
    assert asked > 100 and ahead_of < 40


async def test_an_orchestrator_that_stands_for_a_while_loses_nothing(
    stack: Rig, ahead: tuple[Rig, int]
) -> None:
    """Of what the target says meanwhile."""
    rig, _ = ahead
    options = {"max_tokens": 480, "ignore_eos": True, "seed": 4, **PLAIN, **COUPLED}
    expected = await stack.complete(PROMPTS[0], **options)
    stream = Stream(rig, PROMPTS[0], **options)
    for count in (5, 75, 150):
        await stream.reaches(count)
        os.kill(rig.pids[0], signal.SIGSTOP)
        await asyncio.sleep(0.2)
        os.kill(rig.pids[0], signal.SIGCONT)
    done = await stream.end()
    assert done.token_ids == expected.token_ids and done.text == expected.text
    assert done.stats.rounds == done.stats.plain == 480
    assert sum(chunk.speculation.rounds for chunk in stream.chunks) == 480


async def test_a_killed_target_is_replaced_in_mid_run(
    stack: Rig, ahead: tuple[Rig, int], parts: Parts, tiny_models: dict[str, Path]
) -> None:
    rig, _ = ahead
    options = {"max_tokens": 480, "ignore_eos": True, "seed": 5, **PLAIN, **COUPLED}
    expected = await stack.complete(PROMPTS[1], **options)
    async with parts.worker("target", tiny_models["target"], more_rounds="on") as (child, spare):
        async with parts.orchestrator(stack.store_url, targets=[spare, *rig.targets]) as both:
            stream = await Stream(both, PROMPTS[1], **options).reaches(20)
            assert (await both.info(spare)).sessions == 1
            os.kill(child.pid, signal.SIGSTOP)
            await asyncio.sleep(0.1)
            assert stream.num_tokens < 400
            os.kill(child.pid, signal.SIGKILL)
            done = await stream.end()
    assert done.token_ids == expected.token_ids and done.text == expected.text
    assert done.stats.rounds == 480


async def test_streams_left_in_mid_run_free_what_they_held(ahead: tuple[Rig, int]) -> None:
    rig, _ = ahead
    before = await rig.held()
    for number in range(4):
        options = GenerationOptions(max_tokens=480, ignore_eos=True, **PLAIN)
        stream = rig.client.generate(f"left {number}", options)
        for _ in range(1 + 10 * number):
            assert (await anext(stream)).finish_reason is None
        await stream.aclose()
    await rig.returns_to(before)


async def test_a_killed_client_frees_everything_on_the_target(ahead: tuple[Rig, int]) -> None:
    """The target stands while the client dies, so that it is in the midst of its runs."""
    rig, target_pid = ahead
    before = await rig.held()
    expected = await rig.complete(PROMPTS[2], max_tokens=80, **PLAIN)
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", READER, rig.address, stdout=asyncio.subprocess.PIPE
    )
    assert client.stdout
    for _ in range(12):
        assert await asyncio.wait_for(client.stdout.readline(), 30)
    during = await rig.held()
    assert during.sessions[0] > before.sessions[0]
    assert during.blocks_used[0] > before.blocks_used[0]
    os.kill(target_pid, signal.SIGSTOP)
    try:
        client.kill()
        await client.wait()
        await asyncio.sleep(0.2)
    finally:
        os.kill(target_pid, signal.SIGCONT)
    await rig.returns_to(before)

    async def idle() -> bool:
        rig_used = await rig.cpu_s()
        await asyncio.sleep(0.3)
        return await rig.cpu_s() - rig_used < 0.1

    await until(idle, "work ends with the client")
    assert (await rig.complete(PROMPTS[2], max_tokens=80, **PLAIN)).token_ids == expected.token_ids
