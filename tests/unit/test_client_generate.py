"""Streams through the client: values, retries, deadlines, cancellation, lost tokens, errors."""

import asyncio
import contextlib
import dataclasses
import time

import pytest
from test_client_fakes import (
    ACCEPTED,
    PLAIN,
    RECOVERED,
    FakeService,
    answer,
    eventually,
    last,
    playing,
    response,
    serving,
)

from outrider import client_resume
from outrider.client import GenerationOptions, Message, OutriderClient, ResumePolicy
from outrider.errors import (
    Cancelled,
    DeadlineExceeded,
    Fenced,
    InternalError,
    InvalidArgument,
    OutriderError,
    ResourceExhausted,
    Unavailable,
    Unsupported,
)
from outrider.rpc.status import abort_with
from outrider.types import FinishReason, Priority, TokenSource, VerificationMode
from outrider.v1 import common_pb2, generation_pb2


@pytest.fixture(autouse=True)
def quick_backoff(monkeypatch):
    monkeypatch.setattr(client_resume, "FIRST_BACKOFF_S", 0.001)


async def test_complete_joins_the_chunks():
    async with (
        serving(FakeService()) as address,
        await OutriderClient.connect(address=address) as client,
    ):
        done = await client.complete("hello")
    assert done.token_ids == (10, 11, 12, 13)
    assert done.text == "Hi there!"
    assert [s.value for s in done.sources] == ["plain", "accepted", "accepted", "recovered"]
    assert done.finish_reason is FinishReason.EOS
    assert done.seed == 7
    assert done.stats.acceptance_rate == 0.5
    assert done.stats.accepted_by_position == (1, 1, 0, 0)
    assert done.usage.time.verify_us == 900
    assert 0 < done.ttft_s <= done.last_token_s <= done.total_s
    with pytest.raises(dataclasses.FrozenInstanceError):
        done.seed = 1  # type: ignore[misc]


async def test_every_option_reaches_the_request():
    service = FakeService()
    options = GenerationOptions(
        max_tokens=9,
        min_tokens=1,
        stop_strings=("x", "y"),
        stop_token_ids=(4,),
        ignore_eos=True,
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        seed=2**64 - 1,
        mode=VerificationMode.REJECTION,
        num_speculative_tokens=0,
        proposer="ngram",
        fan_out=0,
        alternatives=2,
        logprobs=0,
        model="m",
        adapter="a",
        session_id="s",
        keep_session=True,
        request_id="r",
        priority=Priority.HIGH,
    )
    async with serving(service) as address, await OutriderClient.connect(address=address) as client:
        await client.complete([Message("user", "hello")], options)
        await client.complete([1, 2, 3])
    full, empty = service.requests
    assert full.prompt[0].chat.messages[0].content == "hello"
    assert full.stop.max_tokens == 9 and full.stop.min_tokens == 1 and full.stop.ignore_eos
    assert list(full.stop.stop_strings) == ["x", "y"] and list(full.stop.stop_token_ids) == [4]
    assert full.sampling.seed == 2**64 - 1 and full.sampling.top_k == 3
    assert full.sampling.top_p == pytest.approx(0.9) and full.sampling.min_p == pytest.approx(0.1)
    assert full.speculation.mode == common_pb2.VERIFICATION_MODE_REJECTION
    assert full.speculation.HasField("num_speculative_tokens")
    assert full.speculation.proposer == "ngram" and full.HasField("logprobs")
    assert full.speculation.HasField("fan_out") and full.speculation.alternatives == 2
    assert (full.model, full.adapter, full.session_id, full.request_id) == ("m", "a", "s", "r")
    assert full.keep_session and full.priority == generation_pb2.PRIORITY_HIGH
    assert list(empty.prompt[0].tokens.ids) == [1, 2, 3]
    assert empty.request_id  # drawn
    for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
        assert not empty.sampling.HasField(name)
    assert not empty.HasField("logprobs") and not empty.stop.HasField("max_tokens")
    for name in ("num_speculative_tokens", "fan_out", "alternatives"):
        assert not empty.speculation.HasField(name)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (GenerationOptions(top_k=-1), "top_k"),
        (GenerationOptions(seed=2**64), "seed"),
        (GenerationOptions(max_tokens=-5), "max_tokens"),
        (GenerationOptions(stop_token_ids=(-1,)), "stop_token_ids"),
        (GenerationOptions(num_speculative_tokens=-1), "num_speculative_tokens"),
        (GenerationOptions(alternatives=-1), "alternatives"),
        (GenerationOptions(stop_strings=("\ud800",)), "stop_strings"),
    ],
)
async def test_values_that_no_message_can_hold_name_their_field(options, field):
    async with (
        serving(FakeService()) as address,
        await OutriderClient.connect(address=address) as client,
    ):
        with pytest.raises(InvalidArgument) as caught:
            await client.complete("hello", options)
    assert caught.value.field == field


async def test_unavailable_before_the_first_chunk_is_tried_again_under_the_same_request_id():
    service = FakeService(
        playing([Unavailable("starting")]), playing([Cancelled("stopping")]), playing(answer())
    )
    async with serving(service) as address, await OutriderClient.connect(address=address) as client:
        done = await client.complete("hello")
    assert len(done.token_ids) == 4
    assert len(service.requests) == 3
    assert len({request.request_id for request in service.requests}) == 1


@pytest.mark.parametrize("resume", [None, ResumePolicy()], ids=["off", "an old server"])
async def test_a_stream_that_cannot_be_resumed_ends_with_what_broke_it(resume):
    class OldService(FakeService):
        async def Resume(self, request, context):
            await abort_with(context, Unsupported("Method not found!"))
            yield

    service = OldService(playing([response(0, [10], text="Hi"), Unavailable("target died")]))
    async with (
        serving(service) as address,
        await OutriderClient.connect(address=address, resume=resume) as client,
    ):
        seen = []
        with pytest.raises(Unavailable, match="target died"):
            async for chunk in client.generate("hello"):
                seen.append(chunk.text)
    assert seen == ["Hi"]
    assert len(service.requests) == 1


async def test_retries_are_bounded_and_other_errors_are_not_retried():
    service = FakeService(playing([Unavailable("away")]))
    async with serving(service) as address, await OutriderClient.connect(address=address) as client:
        with pytest.raises(Unavailable):
            await client.complete("hello")
        assert len(service.requests) == 1 + client_resume.RETRIES
        service.requests.clear()
        service.scripts = [playing([ResourceExhausted("full")])]
        with pytest.raises(ResourceExhausted):
            await client.complete("hello")
    assert len(service.requests) == 1


async def test_the_deadline_bounds_retries_too(monkeypatch):
    monkeypatch.setattr(client_resume, "FIRST_BACKOFF_S", 5.0)
    service = FakeService(playing([Unavailable("away")]))
    async with serving(service) as address, await OutriderClient.connect(address=address) as client:
        started = time.perf_counter()
        with pytest.raises(Unavailable):
            await client.complete("hello", timeout_s=1)
        assert time.perf_counter() - started < 1
    assert len(service.requests) == 1


async def test_a_stream_that_stalls_ends_at_its_deadline():
    async def stalls(request, context):
        yield response(0, [10], text="Hi")
        await asyncio.Event().wait()

    service = FakeService(stalls)
    async with serving(service) as address, await OutriderClient.connect(address=address) as client:
        with pytest.raises(DeadlineExceeded):
            await client.complete("hello", timeout_s=0.3)
        await asyncio.wait_for(service.cancelled.wait(), 5)


async def test_leaving_the_loop_early_cancels_the_request():
    async def endless(request, context):
        for offset in range(10**6):
            yield response(offset, [offset % 50], text="x")
            await asyncio.sleep(0.01)

    service = FakeService(endless)
    async with serving(service) as address, await OutriderClient.connect(address=address) as client:
        async for chunk in client.generate("hello"):
            if chunk.offset == 3:
                break
        await asyncio.wait_for(service.cancelled.wait(), 5)
        stream = client.generate("hello")
        await anext(stream)
        assert service.running == 1
        await stream.aclose()
        await eventually(lambda: service.running == 0)
    assert len(service.requests) == 2


@pytest.mark.parametrize(
    ("responses", "fault"),
    [
        ([response(0, [1]), last(2, [2], completion_tokens=2)], "token 1 was due"),
        ([response(0, [1, 2]), last(1, [2, 3], completion_tokens=4)], "token 2 was due"),
        ([response(1, [1]), last(2, [2], completion_tokens=2)], "token 0 was due"),
        ([last(0, [1, 2], completion_tokens=3)], "3 were counted"),
        ([last(0, [1, 2], [PLAIN])], "2 tokens with 1 sources"),
        ([response(0, [1])], "without a finish reason"),
        ([], "without a finish reason"),
    ],
    ids=["gap", "doubled", "late start", "miscount", "sources", "cut off", "nothing"],
)
async def test_lost_and_doubled_tokens_are_noticed(responses, fault):
    service = FakeService(playing(responses))
    async with serving(service) as address, await OutriderClient.connect(address=address) as client:
        with pytest.raises(InternalError, match=fault):
            await client.complete("hello")


async def test_a_final_response_without_tokens_is_whole():
    responses = [response(0, [1, 2], [ACCEPTED, RECOVERED], text="ab"), last(0, [], text="c")]
    responses[-1].usage.completion_tokens = 2
    async with (
        serving(FakeService(playing(responses))) as address,
        await OutriderClient.connect(address=address) as client,
    ):
        done = await client.complete("hello")
    assert done.text == "abc" and done.token_ids == (1, 2)
    assert done.sources == (TokenSource.ACCEPTED, TokenSource.RECOVERED)
    assert done.last_token_s == done.ttft_s < done.total_s


async def test_logprobs_arrive_as_values():
    entry = common_pb2.PositionLogprobs(
        chosen=common_pb2.TokenLogprob(token_id=1, logprob=-0.5),
        top=[common_pb2.TokenLogprob(token_id=3, logprob=-0.25)],
    )
    service = FakeService(playing([last(0, [1], logprobs=[entry])]))
    async with serving(service) as address, await OutriderClient.connect(address=address) as client:
        done = await client.complete("hello", GenerationOptions(logprobs=1))
    assert done.logprobs[0].token_id == 1 and done.logprobs[0].top == ((3, -0.25),)


async def test_chunks_tell_the_time_since_the_call() -> None:
    async with (
        serving(FakeService()) as address,
        await OutriderClient.connect(address=address) as client,
    ):
        chunks = [chunk async for chunk in client.generate("hello")]
    assert chunks[-1].elapsed_s >= chunks[0].elapsed_s > 0


async def endless(request, context):
    for offset in range(10**6):
        yield response(offset, [offset % 50], text="x")
        await asyncio.sleep(0.01)


async def test_a_server_is_told_that_a_stream_was_left_for_good():
    """It could not know that nobody will resume it."""
    service = FakeService(endless)
    async with serving(service) as address, await OutriderClient.connect(address=address) as client:
        stream = client.generate("hello")
        await anext(stream)
        await stream.aclose()
        await eventually(lambda: len(service.left) == 1)
        waiting = asyncio.create_task(client.complete("hello"))
        await eventually(lambda: len(service.requests) == 2)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert len(service.left) == 2  # `close` waits for it
    for request, left in zip(service.requests, service.left, strict=True):
        assert request.resumable and len(request.idempotency_key) == 22
        assert left.request_id == request.request_id
        assert left.idempotency_key == request.idempotency_key
    assert service.left[0].session_id == "s" * 22
    assert len({request.idempotency_key for request in service.requests}) == 2


@pytest.mark.parametrize(
    ("script", "resume"),
    [
        (playing(answer()), ResumePolicy()),
        (playing([response(0, [10]), Fenced("taken over")]), ResumePolicy(max_fenced=0)),
        (playing([response(0, [10]), InternalError("a fault")]), ResumePolicy()),
        (endless, None),
    ],
    ids=["ended", "taken over", "failed", "not resumable"],
)
async def test_nobody_is_told_what_needs_no_telling(script, resume):
    service = FakeService(script)
    async with (
        serving(service) as address,
        await OutriderClient.connect(address=address, resume=resume) as client,
    ):
        with contextlib.suppress(OutriderError):
            async for chunk in client.generate("hello"):
                if chunk.finish_reason or script is endless:
                    break
        await asyncio.sleep(0.05)
    assert not service.left


async def test_a_broken_stream_goes_on_at_another_server_and_says_so():
    broken = FakeService(playing([answer()[0], Unavailable("target died")]))
    whole = FakeService()
    async with (
        serving(broken) as first,
        serving(whole) as second,
        await OutriderClient.connect(address=[first, second]) as client,
    ):
        done = await client.complete("hello")
        again = await client.complete("hello")
    assert done.token_ids == (10, 11, 12, 13) and done.text == "Hi there!"
    assert done.resumes == 1 and 0 < done.interrupted_s < done.total_s
    [asked] = whole.resumes
    assert (asked.session_id, asked.offset, asked.text_chars) == ("s" * 22, 1, 2)
    assert asked.request_id == broken.requests[0].request_id
    # The client stays with the server that answers.
    assert len(broken.requests) == 1 and len(whole.requests) == 1 and again.resumes == 0
