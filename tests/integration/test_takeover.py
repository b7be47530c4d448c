"""Orchestrators that die or sleep in mid-stream: another goes on at once, and the client gets what
it would have got anyway, and is told of it by its statistics alone."""

import asyncio
import contextlib
import dataclasses
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.client import Completion, GenerationOptions, OutriderClient
from outrider.client_wire import generate_request
from outrider.errors import Fenced
from outrider.rpc.status import error_from_rpc
from outrider.types import FinishReason, VerificationMode, chain_hash
from outrider.v1 import generation_pb2
from scripted_workers import Parts, Rig, Stream

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(120),
    pytest.mark.slow,
]

LONG: dict[str, Any] = {"max_tokens": 240, "ignore_eos": True, "seed": 11, "logprobs": 2}
COUPLED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95}
PROMPTS = [f"stream number {number} outlives its orchestrator" for number in range(7)]


def assert_same(done: Completion, expected: Completion) -> None:
    """All that a client can see of a generation, but for how it came about."""
    assert done.token_ids == expected.token_ids
    assert (done.text, done.cut_text) == (expected.text, expected.cut_text)
    assert done.finish_reason is expected.finish_reason
    assert done.matched_stop == expected.matched_stop and done.seed == expected.seed
    for name in ("prompt_tokens", "completion_tokens"):
        assert getattr(done.usage, name) == getattr(expected.usage, name)
    assert len(done.logprobs) == len(expected.logprobs)
    for one, other in zip(done.logprobs, expected.logprobs, strict=True):
        assert one.token_id == other.token_id and len(one.top) == len(other.top)
        assert one.logprob == pytest.approx(other.logprob, abs=2e-4)


@contextlib.asynccontextmanager
async def doomed(stack: Rig, parts: Parts, **settings: Any) -> AsyncIterator[Rig]:
    """An orchestrator to be killed, and a client that knows the shared one, too."""
    async with parts.orchestrator(
        stack.store_url, targets=stack.targets, drafts=stack.drafts, **settings
    ) as rig:
        addresses = [rig.address, stack.address]
        async with await OutriderClient.connect(address=addresses, keepalive_s=1) as client:
            yield dataclasses.replace(rig, client=client, _channels={})


def kill(rig: Rig) -> None:
    assert rig.process is not None
    os.kill(rig.process.pid, signal.SIGKILL)


@pytest.mark.parametrize("sampling", [{}, COUPLED], ids=["greedy", "coupled"])
async def test_streams_of_a_killed_orchestrator_go_on_elsewhere(
    stack: Rig, parts: Parts, sampling: dict[str, Any]
) -> None:
    """At whatever token each of them was, before its first one included; the stop strings hold
    tokens back again and again, and end one of them."""
    options = {**LONG, **sampling, "max_tokens": 300}
    plain = await stack.complete(PROMPTS[0], num_speculative_tokens=0, **options)
    # What begins so is held back until it is seen to go on otherwise; the last one comes late.
    stops = tuple(f"{char}\x00never" for char in sorted(set(plain.text))[:12])
    stops += (plain.text[-60:-54],)
    options = {**options, "stop_strings": stops}
    expected = await stack.complete_all(PROMPTS, num_speculative_tokens=0, **options)
    assert expected[0].finish_reason is FinishReason.STOP_STRING
    before = await stack.held()
    async with doomed(stack, parts) as rig:
        streams = []
        for prompt in PROMPTS[:-1]:
            streams.append(Stream(rig, prompt, **options))
            await asyncio.sleep(0.04)
        await streams[0].reaches(60)
        for stream in streams[1:5]:  # A busy machine may have kept them waiting.
            await stream.reaches(1)
        streams.append(Stream(rig, PROMPTS[-1], **options))
        told = [stream.num_tokens for stream in streams]
        kill(rig)
        done = [await stream.end() for stream in streams]
    for one, other in zip(done, expected, strict=True):
        assert_same(one, other)
    print("tokens told at the kill:", told, "waits:", [round(d.interrupted_s, 3) for d in done])
    assert sum(d.resumes for d in done) >= 4 and all(d.resumes <= 1 for d in done)
    assert all(d.usage.takeovers == 1 for d in done if d.resumes)
    assert all(d.durable and d.stats.accepted > 0 for d in done)
    for d in done:  # The counts go on where the former owner's last commit left them.
        made = d.stats.accepted + d.stats.recovered + d.stats.bonus + d.stats.plain
        assert len(d.token_ids) <= made <= len(d.token_ids) + 60
        assert d.usage.time.first_token_us < d.usage.time.total_us
    await stack.returns_to(before)


async def test_in_rejection_mode_what_was_told_stays_and_the_rest_is_drawn_anew(
    stack: Rig, parts: Parts
) -> None:
    """Other tokens may come than in an undisturbed run, none is taken back, none too many."""
    options = {**LONG, **COUPLED, "mode": VerificationMode.REJECTION, "logprobs": None}
    async with doomed(stack, parts) as rig:
        streams = [await Stream(rig, prompt, **options).reaches(20) for prompt in PROMPTS[:3]]
        kill(rig)
        done = [await stream.end() for stream in streams]
    assert sum(d.resumes for d in done) >= 2
    for d in done:
        assert len(d.token_ids) == 240 and d.finish_reason is FinishReason.MAX_TOKENS
        assert d.stats.accepted > 0 and d.durable


async def test_a_former_owner_that_wakes_up_is_fenced_and_harms_nobody(
    stack: Rig, parts: Parts
) -> None:
    """It sleeps in mid-stream, the stream is resumed elsewhere, it goes on where it was: its own
    reader is told so, its words at the workers and at the store are dropped."""
    options = {**LONG, **COUPLED, "max_tokens": 320}
    expected = await stack.complete(PROMPTS[0], num_speculative_tokens=0, **options)
    before = await stack.held()
    async with doomed(stack, parts) as rig:
        assert rig.process is not None
        request = generate_request(PROMPTS[0], GenerationOptions(**options), resumable=True)
        call = aiter(rig.stub.Generate(request, timeout=60))
        told: list[Any] = []
        while sum(len(response.token_ids) for response in told) < 40:
            told.append(await anext(call))
        os.kill(rig.process.pid, signal.SIGSTOP)
        offset = sum(len(response.token_ids) for response in told)
        resume = stack.stub.Resume(
            generation_pb2.ResumeRequest(
                session_id=told[0].session_id,
                request_id=request.request_id,
                offset=offset,
                text_chars=sum(len(response.text) for response in told),
                tokens_hash=chain_hash(0, [t for r in told for t in r.token_ids]),
            ),
            timeout=60,
        )
        resumed = aiter(resume)
        rest = [await anext(resumed) for _ in range(3)]
        os.kill(rig.process.pid, signal.SIGCONT)
        late = []
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            async for response in call:
                late.append(response)
        error = error_from_rpc(ended.value)
        assert isinstance(error, Fenced) and "taken over" in error.message, error
        async for response in resumed:
            rest.append(response)
        whole = [t for response in (*told, *rest) for t in response.token_ids]
        assert tuple(whole) == expected.token_ids
        assert "".join(r.text for r in (*told, *rest)) == expected.text
        assert rest[-1].usage.takeovers == 1
        # What it still had in its pocket was durable before: the same tokens, and no others.
        for response in late:
            ids = expected.token_ids[response.offset :][: len(response.token_ids)]
            assert tuple(response.token_ids) == ids
        # It is as good as ever.
        again = await rig.complete(PROMPTS[0], num_speculative_tokens=0, **options)
        assert again.token_ids == expected.token_ids
        await stack.returns_to(before)


async def test_a_half_open_connection_is_noticed_and_the_stream_resumed(
    stack: Rig, parts: Parts
) -> None:
    """The orchestrator hangs; so does its connection, which says nothing any more."""
    expected = await stack.complete(PROMPTS[1], num_speculative_tokens=0, **LONG)
    async with doomed(stack, parts) as rig:
        assert rig.process is not None
        stream = await Stream(rig, PROMPTS[1], **LONG).reaches(30)
        os.kill(rig.process.pid, signal.SIGSTOP)
        done = await stream.end()
        assert_same(done, expected)
        assert done.resumes == 1
        kill(rig)


async def test_two_readers_of_one_generation_come_to_an_end(stack: Rig, parts: Parts) -> None:
    """One resumes what the other reads, who takes it back once; then the first gives up or the
    other does, and whoever has it gets all of it."""
    options = {**LONG, "max_tokens": 320}
    expected = await stack.complete(PROMPTS[2], num_speculative_tokens=0, **options)
    async with doomed(stack, parts) as rig:
        stream = await Stream(rig, PROMPTS[2], request_id="contested", **options).reaches(20)
        resumed = stack.stub.Resume(
            generation_pb2.ResumeRequest(
                session_id=stream.chunks[0].session_id, request_id="contested"
            ),
            timeout=60,
        )
        ids: list[int] = []
        try:
            async for response in resumed:
                ids += response.token_ids
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.ABORTED
        assert 20 <= len(ids) and ids == list(expected.token_ids[: len(ids)])
        done = await stream.end()
        assert_same(done, expected)
        assert done.resumes == 1 and done.usage.takeovers == 2


async def test_an_orchestrator_that_drains_hands_its_streams_on(stack: Rig, parts: Parts) -> None:
    """SIGTERM: what outlasts the drain ends elsewhere; new requests go there at once."""
    expected = await stack.complete_all(PROMPTS[:2], num_speculative_tokens=0, **LONG)
    before = await stack.held()
    async with doomed(stack, parts, drain_s=0.1) as rig:
        assert rig.process is not None
        stream = await Stream(rig, PROMPTS[0], **LONG).reaches(30)
        os.kill(rig.process.pid, signal.SIGTERM)
        new = await rig.complete(PROMPTS[1], **LONG)
        done = await stream.end()
    assert_same(done, expected[0])
    assert_same(new, expected[1])
    assert done.resumes == 1
    await stack.returns_to(before)


async def test_an_orchestrator_that_comes_back_goes_on_itself(stack: Rig, parts: Parts) -> None:
    """The only one there is: killed, and started again at its place."""
    expected = await stack.complete(PROMPTS[3], num_speculative_tokens=0, **LONG, **COUPLED)
    port = 0
    async with parts.orchestrator(
        stack.store_url, targets=stack.targets, drafts=stack.drafts
    ) as rig:
        port = int(rig.address.rpartition(":")[2])
        client = await OutriderClient.connect(address=rig.address)
        stream = await Stream(
            dataclasses.replace(rig, client=client), PROMPTS[3], **LONG, **COUPLED
        ).reaches(30)
        kill(rig)
        assert rig.process is not None
        await rig.process.wait()
    async with (
        client,
        parts.orchestrator(stack.store_url, targets=stack.targets, drafts=stack.drafts, port=port),
    ):
        done = await stream.end()
    assert_same(done, expected)
    assert done.resumes == 1 and done.usage.takeovers == 1


async def test_a_resolver_s_address_finds_the_servers_that_are_left(
    stack: Rig, parts: Parts
) -> None:
    async with parts.orchestrator(
        stack.store_url, targets=stack.targets, drafts=stack.drafts
    ) as rig:
        address = f"ipv4:{rig.address},{stack.address}"
        async with await OutriderClient.connect(address=address) as client:
            both = dataclasses.replace(rig, client=client)
            expected = await stack.complete_all(PROMPTS[:4], num_speculative_tokens=0, **LONG)
            streams = [await Stream(both, prompt, **LONG).reaches(5) for prompt in PROMPTS[:4]]
            kill(rig)
            done = [await stream.end() for stream in streams]
    for one, other in zip(done, expected, strict=True):
        assert_same(one, other)
    assert 1 <= sum(d.resumes for d in done) < 4  # They were spread over both.
