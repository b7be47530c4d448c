"""Resume, Cancel and repeated requests through the public API: who may, what comes, what stays."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.client import Completion, GenerationChunk, GenerationOptions, OutriderClient, collect
from outrider.client_wire import chunk_from, generate_request
from outrider.errors import (
    AlreadyRunning,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    Fenced,
    InvalidArgument,
    NotFound,
    OutriderError,
    PermissionDenied,
)
from outrider.rpc.channel import ChannelSecurity
from outrider.rpc.status import error_from_rpc
from outrider.types import FinishReason, SessionState, chain_hash
from outrider.v1 import generation_pb2
from scripted_workers import Parts, Rig, until

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

COUPLED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "seed": 21}
LONG: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True, **COUPLED}
PROMPT = "to be gone on with"
Responses = list[generation_pb2.GenerateResponse]


async def read(call: Any, into: Responses | None = None) -> Responses:
    """All responses; the error that ends them is one of ours."""
    responses = [] if into is None else into
    try:
        async for response in call:
            responses.append(response)
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from None
    return responses


def request_of(**options: Any) -> generation_pb2.GenerateRequest:
    resumable = options.pop("resumable", True)
    key = options.pop("key", None)
    request = generate_request(PROMPT, GenerationOptions(**options), resumable=resumable)
    if key is not None:
        request.idempotency_key = key
    return request


def resume_of(
    request: generation_pb2.GenerateRequest, told: Responses, **other: Any
) -> generation_pb2.ResumeRequest:
    ids = [token_id for response in told for token_id in response.token_ids]
    fields = {
        "session_id": told[0].session_id if told else "",
        "request_id": request.request_id,
        "offset": len(ids),
        "text_chars": sum(len(response.text) for response in told),
        "tokens_hash": chain_hash(0, ids),
    }
    return generation_pb2.ResumeRequest(**fields | other)


def joined(*parts: Responses) -> Completion:
    chunks: list[GenerationChunk] = [chunk_from(r, 0.0) for part in parts for r in part]
    return collect(chunks)


async def begin(rig: Rig, request: Any, num_tokens: int) -> tuple[Any, Responses]:
    """A stream that has told so many tokens."""
    call = rig.stub.Generate(request, timeout=60)
    told: Responses = []
    async for response in call:
        told.append(response)
        if sum(len(r.token_ids) for r in told) >= num_tokens:
            break
    return call, told


async def leave(rig: Rig, request: Any, num_tokens: int) -> Responses:
    """A stream that breaks off after so many tokens, without a word; it waits to be resumed."""
    call, told = await begin(rig, request, num_tokens)
    call.cancel()

    async def waits() -> bool:
        session = await rig.client.get_session(told[0].session_id)
        return session.state is SessionState.INTERRUPTED

    await until(waits, "the stream is given up")
    return told


@pytest.mark.parametrize("ending", ["max tokens", "stop string"])
async def test_what_has_ended_is_told_again_from_any_place(stack: Rig, ending: str) -> None:
    """While it lingers: the same tokens, sources, text, log probabilities, reason and usage."""
    options: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "logprobs": 1, **COUPLED}
    plain = await stack.complete(PROMPT, **options)
    if ending == "stop string":
        options["stop_strings"] = (plain.text[40:43],)
    request = request_of(**options, keep_session=True)
    told = await read(stack.stub.Generate(request))
    whole = joined(told)
    reason = FinishReason.MAX_TOKENS if ending == "max tokens" else FinishReason.STOP_STRING
    assert whole.finish_reason is reason
    epoch = (await stack.client.get_session(told[0].session_id)).epoch
    for count in (0, 1, len(told) // 2, len(told) - 1):
        session_id = told[0].session_id
        resume = resume_of(request, told[:count], session_id=session_id)
        rest = await read(stack.stub.Resume(resume))
        again = joined(told[:count], rest)
        assert dataclasses.replace(again, rounds=()) == dataclasses.replace(whole, rounds=())
        segments = [s for r in (*told[:count], *rest) for s in r.text_segments]
        assert sum(segment.length for segment in segments) == len(whole.text)
    # Nothing but the end is missing.
    end = await read(stack.stub.Resume(resume_of(request, told)))
    assert [list(r.token_ids) for r in end] == [[]] and not end[0].text
    assert end[0].usage == told[-1].usage and end[0].finish_reason == told[-1].finish_reason
    # Looking changes nothing.
    assert (await stack.client.get_session(told[0].session_id)).epoch == epoch
    await stack.client.delete_session(told[0].session_id)


async def test_a_stream_that_broke_off_waits_without_kv_and_goes_on(stack: Rig) -> None:
    expected = await stack.complete(PROMPT, **LONG)
    await asyncio.sleep(0.2)  # Its session is closed.
    before = await stack.held()
    request = request_of(**LONG)
    told = await leave(stack, request, 30)

    async def only_keys() -> bool:
        held = await stack.held()
        return dataclasses.replace(held, keys=0).is_within(before) and held.keys > before.keys

    await until(only_keys, "its KV is free")
    session = await stack.client.get_session(told[0].session_id)
    assert 0 < session.ttl_seconds <= 30
    rest = await read(stack.stub.Resume(resume_of(request, told)))
    done = joined(told, rest)
    assert done.token_ids == expected.token_ids and done.text == expected.text
    assert done.usage.takeovers == 1
    await stack.returns_to(before)


async def test_a_client_comes_back_to_an_orchestrator_that_has_not_missed_it(stack: Rig) -> None:
    """Its old connection is half open, say: the old stream ends, the new one has all the rest."""
    expected = await stack.complete(PROMPT, **LONG)
    before = await stack.held()
    request = request_of(**LONG)
    call, told = await begin(stack, request, 20)
    rest = await read(stack.stub.Resume(resume_of(request, told)))
    with pytest.raises(Fenced, match="taken over, this stream ends here"):
        await read(call)
    done = joined(told, rest)
    assert done.token_ids == expected.token_ids and done.text == expected.text
    await stack.returns_to(before)


async def test_a_stream_that_nobody_comes_back_to_is_gone_after_its_time(
    stack: Rig, parts: Parts
) -> None:
    async with parts.orchestrator(
        stack.store_url, targets=stack.targets, drafts=stack.drafts, session_resume_s=0.5
    ) as rig:
        before = await rig.keys()
        request = request_of(**LONG)
        told = await leave(rig, request, 10)
        with pytest.raises(NotFound):
            await asyncio.sleep(0.7)
            await read(rig.stub.Resume(resume_of(request, told)))
        assert await rig.keys() <= before


async def test_a_stream_that_is_not_resumable_is_gone_at_once(stack: Rig) -> None:
    before = await stack.keys()
    call, told = await begin(stack, request_of(**LONG, resumable=False), 10)
    call.cancel()

    async def gone() -> bool:
        return not any(told[0].session_id.encode() in key for key in await stack.keys())

    await until(gone, "its keys are removed")
    assert await stack.keys() <= before


@pytest.mark.parametrize("kept", [False, True], ids=["not kept", "kept"])
async def test_a_generation_that_is_cancelled_cannot_be_resumed(stack: Rig, kept: bool) -> None:
    before = await stack.held()
    request = request_of(**LONG, keep_session=kept)
    told = await leave(stack, request, 10)
    session_id = told[0].session_id
    cancel = generation_pb2.CancelRequest(session_id=session_id, request_id=request.request_id)
    await stack.stub.Cancel(cancel)
    expected: type[OutriderError] = FailedPrecondition if kept else NotFound
    with pytest.raises(expected):
        await read(stack.stub.Resume(resume_of(request, told)))
    if kept:
        session = await stack.client.get_session(session_id)
        assert session.state is SessionState.IDLE and session.ttl_seconds > 3000
        more = await stack.complete(" more", session_id=session_id, max_tokens=3)
        assert len(more.token_ids) == 3
        with pytest.raises(grpc.aio.AioRpcError) as other:  # its last request is another one now
            await stack.stub.Cancel(cancel)
        assert isinstance(error_from_rpc(other.value), FailedPrecondition | NotFound)
    await stack.returns_to(before)


async def test_a_running_generation_can_be_cancelled_from_elsewhere(
    stack: Rig, parts: Parts
) -> None:
    async with parts.orchestrator(
        stack.store_url, targets=stack.targets, drafts=stack.drafts
    ) as rig:
        before = await stack.held()
        request = request_of(**LONG)
        call, _ = await begin(rig, request, 10)
        await stack.stub.Cancel(
            generation_pb2.CancelRequest(
                idempotency_key=request.idempotency_key, request_id=request.request_id
            )
        )
        with pytest.raises((Fenced, NotFound)):
            await read(call)
        await stack.returns_to(before)


async def test_who_has_lost_something_is_told_so(stack: Rig) -> None:
    """More tokens than the store has, or other ones, mean that the store has lost some."""
    request = request_of(**LONG)
    told = await leave(stack, request, 20)
    ids = [token_id for response in told for token_id in response.token_ids]
    durable = (await stack.client.get_session(told[0].session_id)).length
    for wrong in (
        resume_of(request, told, offset=durable + 1),
        resume_of(request, told, offset=1 << 30),
        resume_of(request, told, tokens_hash=chain_hash(0, [*ids[:-1], ids[-1] ^ 1])),
    ):
        with pytest.raises(DataLoss) as lost:
            await read(stack.stub.Resume(wrong))
        assert lost.value.field in ("offset", "tokens_hash") and lost.value.message
    # It is as it was for whoever knows better.
    expected = await stack.complete(PROMPT, **LONG)
    done = joined(told, await read(stack.stub.Resume(resume_of(request, told))))
    assert done.token_ids == expected.token_ids


async def test_only_its_own_request_resumes_a_generation(stack: Rig) -> None:
    request = request_of(**LONG)
    call, told = await begin(stack, request, 5)
    with pytest.raises(FailedPrecondition, match="not this request's") as other:
        await read(stack.stub.Resume(resume_of(request, told, request_id="another")))
    assert other.value.field == "request_id"
    with pytest.raises(InvalidArgument, match="request_id"):
        await read(stack.stub.Resume(resume_of(request, told, request_id="")))
    with pytest.raises(NotFound):
        await read(stack.stub.Resume(resume_of(request, told, session_id="A" * 22)))
    with pytest.raises(InvalidArgument, match="session_id"):
        await read(stack.stub.Resume(resume_of(request, told, session_id="A")))
    # The stream that runs has noticed nothing of that.
    rest: Responses = []
    async for response in call:
        rest.append(response)
    assert joined(told, rest).usage.takeovers == 0


@contextlib.asynccontextmanager
async def callers(
    stack: Rig, parts: Parts, tmp_path: Path, **settings: Any
) -> AsyncIterator[tuple[Rig, OutriderClient]]:
    """An orchestrator as alice sees it, and bob's client of it."""
    (tmp_path / "tokens").write_text("alice:wonder\nbob:builder\n")
    for name, token in (("alice", "wonder"), ("bob", "builder")):
        (tmp_path / name).write_text(token)
    async with parts.orchestrator(
        stack.store_url,
        targets=stack.targets,
        drafts=stack.drafts,
        client_token_file=str(tmp_path / "alice"),
        auth_token_file=tmp_path / "tokens",
        **settings,
    ) as rig:
        bob = ChannelSecurity(token_file=str(tmp_path / "bob"))
        async with await OutriderClient.connect(address=rig.address, security=bob) as client:
            yield rig, client


async def test_another_caller_resumes_cancels_and_deletes_nothing(
    stack: Rig, parts: Parts, tmp_path: Path
) -> None:
    async with callers(stack, parts, tmp_path) as (alice, bob):
        done = await alice.complete(PROMPT, max_tokens=8, keep_session=True, request_id="mine")
        stub = bob._servers.stub(0)
        resume = generation_pb2.ResumeRequest(session_id=done.session_id, request_id="mine")
        with pytest.raises(PermissionDenied, match="another caller"):
            await read(stub.Resume(resume))
        for unary in (
            stub.Cancel(
                generation_pb2.CancelRequest(session_id=done.session_id, request_id="mine")
            ),
            stub.DeleteSession(generation_pb2.DeleteSessionRequest(session_id=done.session_id)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await unary
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert (await bob.list_sessions()).sessions == ()
        [mine] = (await alice.client.list_sessions()).sessions
        assert mine.session_id == done.session_id
        await alice.client.delete_session(done.session_id)


# Requests that come again


async def test_a_request_with_a_key_is_begun_once(stack: Rig, parts: Parts) -> None:
    """Sent again while it runs, elsewhere, and when it has ended: one session, one generation, one
    seed, though none was given; its former stream ends."""
    options = {**LONG, "seed": None}
    async with parts.orchestrator(
        stack.store_url, targets=stack.targets, drafts=stack.drafts
    ) as rig:
        before = await stack.held()
        request = request_of(**options, key="once")
        call, told = await begin(rig, request, 20)
        again = joined(await read(stack.stub.Generate(request)))
        late: Responses = []
        with pytest.raises(Fenced, match="taken over"):
            await read(call, late)
        ids = tuple(t for r in (*told, *late) for t in r.token_ids)
        assert again.token_ids[: len(ids)] == ids and len(again.token_ids) == 400
        assert again.session_id == told[0].session_id and again.usage.takeovers == 1
        ended = joined(await read(rig.stub.Generate(request)))
        assert ended.token_ids == again.token_ids and ended.seed == again.seed
        await stack.returns_to(before)


async def test_a_key_stands_for_one_request_only(stack: Rig) -> None:
    request = request_of(max_tokens=8, key="one", request_id="r1", keep_session=True)
    done = joined(await read(stack.stub.Generate(request)))
    for change in ({"max_tokens": 9}, {"request_id": "r2"}, {"temperature": 0.5}):
        options = {"max_tokens": 8, "request_id": "r1", "keep_session": True, **change}
        with pytest.raises((AlreadyRunning, FailedPrecondition)):
            await read(stack.stub.Generate(request_of(**options, key="one")))
    other = request_of(max_tokens=8, key="one", request_id="r1", keep_session=True)
    other.prompt[0].text = "something else"
    with pytest.raises(AlreadyRunning, match="another request") as known:
        await read(stack.stub.Generate(other))
    assert known.value.field == "idempotency_key"
    # A turn of a kept session likewise; without a key a request id may come again, and be new.
    turn = request_of(max_tokens=8, key="two", session_id=done.session_id, keep_session=True)
    first = joined(await read(stack.stub.Generate(turn)))
    assert joined(await read(stack.stub.Generate(turn))).token_ids == first.token_ids
    assert len((await stack.client.get_session(done.session_id)).generations) == 2
    assert first.session_id == done.session_id
    await stack.client.delete_session(done.session_id)
    # What was deleted may be begun anew, by the same key, at workers that knew it before.
    assert joined(await read(stack.stub.Generate(request))).token_ids == done.token_ids
    await stack.client.delete_session(done.session_id)


async def test_the_time_of_a_request_goes_on_while_nobody_reads_it(stack: Rig) -> None:
    request = request_of(**LONG)
    call = stack.stub.Generate(request, timeout=1.0)
    told = [await call.read() for _ in range(3)]
    call.cancel()
    await asyncio.sleep(1.1)
    with pytest.raises((DeadlineExceeded, NotFound)):
        await read(stack.stub.Resume(resume_of(request, told), timeout=30))
