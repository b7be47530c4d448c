"""What callers may get wrong: a status, the field's name, and a message that tells the range."""

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.client import GenerationOptions
from outrider.client_wire import generate_request
from outrider.errors import (
    AlreadyRunning,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unauthenticated,
)
from outrider.rpc.channel import open_channel
from outrider.rpc.status import error_from_rpc
from outrider.v1 import common_pb2, generation_pb2
from outrider.v1.generation_pb2_grpc import GenerationServiceStub
from scripted_workers import Parts, Rig

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(60)]

Request = generation_pb2.GenerateRequest
Part = generation_pb2.PromptPart
Chat = generation_pb2.ChatMessages
ChatMessage = generation_pb2.ChatMessage
VOCABULARY = 258
CONTEXT = 512


def prompt(*parts: generation_pb2.PromptPart) -> Callable[[generation_pb2.GenerateRequest], None]:
    def change(request: generation_pb2.GenerateRequest) -> None:
        del request.prompt[:]
        request.prompt.extend(parts)

    return change


def fields(part: str = "", /, **values: Any) -> Callable[[generation_pb2.GenerateRequest], None]:
    def change(request: generation_pb2.GenerateRequest) -> None:
        message = getattr(request, part) if part else request
        for name, value in values.items():
            if isinstance(value, list):
                getattr(message, name).extend(value)
            else:
                setattr(message, name, value)

    return change


def together(*changes: Callable[[Request], None]) -> Callable[[Request], None]:
    def change(request: Request) -> None:
        for one in changes:
            one(request)

    return change


def tokens(*ids: int) -> generation_pb2.PromptPart:
    return Part(tokens=generation_pb2.TokenIds(ids=ids))


def chat(*messages: tuple[str, str]) -> generation_pb2.PromptPart:
    return Part(chat=Chat(messages=[ChatMessage(role=r, content=c) for r, c in messages]))


INVALID = grpc.StatusCode.INVALID_ARGUMENT
REJECTION = common_pb2.VERIFICATION_MODE_REJECTION
# name: (change, status, field, a part of the message)
CASES: dict[str, tuple[Any, grpc.StatusCode, str, str]] = {
    "no parts": (prompt(), INVALID, "prompt", "at least one part"),
    "empty text": (prompt(Part(text="")), INVALID, "prompt", "no token"),
    "a part without content": (prompt(Part()), INVALID, "prompt", "text, tokens or chat"),
    "no ids": (prompt(tokens()), INVALID, "prompt.tokens", "empty"),
    "chat and text": (
        prompt(chat(("user", "x")), Part(text="y")),
        INVALID,
        "prompt",
        "only part",
    ),
    "chat without messages": (prompt(chat()), INVALID, "prompt.chat", "1 to 1024"),
    "no role": (prompt(chat(("", "x"))), INVALID, "prompt.chat.role", "1 to 32 bytes"),
    "long role": (prompt(chat(("r" * 33, "x"))), INVALID, "prompt.chat.role", "1 to 32 bytes"),
    "too many messages": (
        prompt(chat(*[("user", "")] * 1025)),
        INVALID,
        "prompt.chat",
        "1 to 1024",
    ),
    "1025 parts": (prompt(*[Part(text="x")] * 1025), INVALID, "prompt", "at most 1024"),
    "long message": (
        prompt(chat(("user", "é" * ((1 << 19) + 1)))),
        INVALID,
        "prompt.chat.content",
        "1048576",
    ),
    "long model": (fields(model="gpt" * 300_000), grpc.StatusCode.NOT_FOUND, "model", "gptgpt"),
    "long text": (prompt(Part(text="x" * ((1 << 20) + 1))), INVALID, "prompt.text", "1048576"),
    "unknown model": (fields(model="gpt"), grpc.StatusCode.NOT_FOUND, "model", "target"),
    "adapter": (fields(adapter="lora"), grpc.StatusCode.UNIMPLEMENTED, "adapter", "no adapters"),
    "prompt over the context": (
        prompt(tokens(*[1] * (CONTEXT + 5))),
        INVALID,
        "prompt",
        "at most 511",
    ),
    "prompt as long as the context": (prompt(tokens(*[1] * CONTEXT)), INVALID, "prompt", "511"),
    "id of no token": (prompt(tokens(1, VOCABULARY)), INVALID, "prompt.tokens", "258"),
    "huge id": (prompt(tokens((1 << 32) - 1)), INVALID, "prompt.tokens", "258"),
    "negative temperature": (fields("sampling", temperature=-0.1), INVALID, "temperature", "10]"),
    "temperature nan": (fields("sampling", temperature=math.nan), INVALID, "temperature", "10]"),
    "temperature inf": (fields("sampling", temperature=math.inf), INVALID, "temperature", "10]"),
    "temperature 10.1": (fields("sampling", temperature=10.1), INVALID, "temperature", "[0, 10]"),
    "top_p 0": (fields("sampling", top_p=0.0), INVALID, "top_p", "(0, 1]"),
    "top_p 1.1": (fields("sampling", top_p=1.1), INVALID, "top_p", "(0, 1]"),
    "top_p nan": (fields("sampling", top_p=math.nan), INVALID, "top_p", "(0, 1]"),
    "min_p -1": (fields("sampling", min_p=-1.0), INVALID, "min_p", "[0, 1]"),
    "min_p nan": (fields("sampling", min_p=math.nan), INVALID, "min_p", "[0, 1]"),
    "top_k 2^31": (fields("sampling", top_k=1 << 31), INVALID, "top_k", "2^31"),
    "k 17": (
        fields("speculation", num_speculative_tokens=17),
        INVALID,
        "speculation.num_speculative_tokens",
        "[0, 16]",
    ),
    "max k 17": (
        fields("speculation", max_speculative_tokens=17),
        INVALID,
        "speculation.max_speculative_tokens",
        "[0, 16]",
    ),
    "fan-out 65": (
        fields("speculation", fan_out=65),
        INVALID,
        "speculation.fan_out",
        "[0, 64]",
    ),
    "4 alternatives": (
        fields("speculation", alternatives=4),
        INVALID,
        "speculation.alternatives",
        "[0, 3]",
    ),
    "alternatives of a sample": (
        together(
            fields("speculation", alternatives=1, mode=REJECTION),
            fields("sampling", temperature=1.0),
        ),
        grpc.StatusCode.UNIMPLEMENTED,
        "speculation.alternatives",
        "coupled mode",
    ),
    "unknown proposer": (
        fields("speculation", proposer="oracle"),
        INVALID,
        "speculation.proposer",
        "draft, ngram",
    ),
    "unknown mode": (fields("speculation", mode=9), INVALID, "mode", "9"),
    "max_tokens 0": (fields("stop", max_tokens=0), INVALID, "stop.max_tokens", "[1, 2^31)"),
    "max_tokens 2^31": (fields("stop", max_tokens=1 << 31), INVALID, "stop.max_tokens", "2^31"),
    "min_tokens over max_tokens": (
        fields("stop", max_tokens=3, min_tokens=4),
        INVALID,
        "stop.min_tokens",
        "max_tokens = 3",
    ),
    "stop id of no token": (
        fields("stop", stop_token_ids=[VOCABULARY]),
        INVALID,
        "stop.stop_token_ids",
        "258",
    ),
    "33 stop ids": (
        fields("stop", stop_token_ids=list(range(33))),
        INVALID,
        "stop.stop_token_ids",
        "at most 32",
    ),
    "17 stop strings": (
        fields("stop", stop_strings=[str(i) for i in range(17)]),
        INVALID,
        "stop.stop_strings",
        "at most 16",
    ),
    "empty stop string": (
        fields("stop", stop_strings=[""]),
        INVALID,
        "stop.stop_strings",
        "1 to 256 bytes",
    ),
    "long stop string": (
        fields("stop", stop_strings=["é" * 129]),
        INVALID,
        "stop.stop_strings",
        "1 to 256 bytes",
    ),
    "logprobs 21": (fields(logprobs=21), INVALID, "logprobs", "[0, 20]"),
    "bad session id": (fields(session_id="../../etc"), INVALID, "session_id", "22 characters"),
    "unknown session": (
        fields(session_id="A" * 22),
        grpc.StatusCode.NOT_FOUND,
        "",
        "does not exist",
    ),
    "long request id": (fields(request_id="r" * 129), INVALID, "request_id", "128 bytes"),
}


PROMPT_CASES = [
    name
    for name, (_, _, field, _) in CASES.items()
    if field.startswith("prompt") and "context" not in name  # of which Tokenize knows nothing
]


@pytest.mark.parametrize("name", CASES)
async def test_a_bad_request_says_what_is_allowed(stack: Rig, name: str) -> None:
    change, code, field, message = CASES[name]
    before = await stack.held()
    request = generate_request("fine", GenerationOptions(max_tokens=4))
    change(request)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in stack.stub.Generate(request, timeout=10):
            pass
    assert refused.value.code() is code, refused.value.details()
    error = error_from_rpc(refused.value)
    assert error.field == field and message in error.message
    await stack.returns_to(before)


async def test_so_many_parts_are_allowed(stack: Rig) -> None:
    request = generate_request("fine", GenerationOptions(max_tokens=1))
    prompt(*[Part(text="")] * 1023, Part(text="x"))(request)
    assert [response async for response in stack.stub.Generate(request, timeout=10)]


async def test_the_edges_of_every_range_are_allowed(stack: Rig) -> None:
    """So that no test above passes because everything is refused."""
    done = await stack.complete(
        "fine",
        max_tokens=2,
        min_tokens=2,
        temperature=10.0,
        top_p=1.0,
        min_p=1.0,
        top_k=(1 << 31) - 1,
        seed=(1 << 64) - 1,
        num_speculative_tokens=16,
        fan_out=64,
        alternatives=3,
        logprobs=20,
        stop_token_ids=tuple(range(32)),
        stop_strings=tuple(f"{i:02}" + "é" * 127 for i in range(16)),
        request_id="r" * 128,
    )
    assert len(done.token_ids) == 2 and done.seed == (1 << 64) - 1
    assert len(done.logprobs[0].top) == 20


async def test_an_oversized_message_is_refused_before_it_is_read(stack: Rig) -> None:
    before = await stack.held()
    channel = open_channel(stack.address, max_message_bytes=64 << 20)
    stub: Any = GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
    request = Request(prompt=[tokens(*[200] * (3 << 20))])
    assert request.ByteSize() > 4 << 20
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Generate(request, timeout=20).read()
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(4 << 20) in (refused.value.details() or "")
    await channel.close()
    assert len((await stack.complete("afterwards", max_tokens=4)).token_ids) == 4
    await stack.returns_to(before)


async def test_a_request_id_is_refused_while_it_runs(stack: Rig) -> None:
    before = await stack.held()
    options = GenerationOptions(max_tokens=300, ignore_eos=True, request_id="the same")
    stream = stack.client.generate("first", options)
    await anext(stream)
    with pytest.raises(AlreadyRunning, match="running") as refused:
        await stack.complete("second", request_id="the same")
    assert refused.value.field == "request_id"
    assert sum([len(chunk.token_ids) async for chunk in stream]) == 299
    again = await stack.complete("second", request_id="the same", max_tokens=4)
    assert len(again.token_ids) == 4
    await stack.returns_to(before)


async def test_a_deadline_in_mid_generation_frees_everything(stack: Rig, parts: Parts) -> None:
    """The client's own deadline, and the server's limit where the client has none."""
    before = await stack.held()
    options = {"max_tokens": 500, "ignore_eos": True, "num_speculative_tokens": 0}
    seen = 0
    with pytest.raises(DeadlineExceeded):
        async for _ in stack.client.generate("x", GenerationOptions(**options), timeout_s=0.2):
            seen += 1
    assert 0 < seen < 400
    await stack.returns_to(before)
    async with parts.orchestrator(
        stack.store_url, targets=stack.targets, drafts=stack.drafts, max_request_s=0.25
    ) as rig:
        seen = 0
        with pytest.raises(DeadlineExceeded, match="time"):
            async for _ in rig.client.generate("x", GenerationOptions(**options), timeout_s=60):
                seen += 1
        assert 0 < seen < 400
        await rig.returns_to(before)


async def test_a_request_that_comes_with_its_deadline_over_costs_nothing(stack: Rig) -> None:
    before = await stack.held()
    results = await asyncio.gather(
        *(stack.complete("late", timeout_s=0.001) for _ in range(8)), return_exceptions=True
    )
    assert all(isinstance(result, DeadlineExceeded) for result in results)
    await stack.returns_to(before)


# --- callers -----------------------------------------------------------------------------------


async def test_callers_need_their_token_and_see_their_own_sessions(
    stack: Rig, parts: Parts, tmp_path: Path
) -> None:
    server_file = tmp_path / "tokens"
    server_file.write_text("# callers\nalice:wonder\nbob:builder\n")
    files = {name: tmp_path / name for name in ("alice", "bob")}
    files["alice"].write_text("wonder\n")
    files["bob"].write_text("builder\n")
    common = {"targets": stack.targets, "drafts": stack.drafts, "auth_token_file": server_file}
    async with (
        parts.orchestrator(
            stack.store_url, client_token_file=str(files["alice"]), **common
        ) as alice,
        parts.orchestrator(stack.store_url, client_token_file=str(files["bob"]), **common) as bob,
    ):
        before = await stack.held()
        done = await alice.complete("mine", max_tokens=4, keep_session=True)
        with pytest.raises(PermissionDenied, match="another caller"):
            await bob.client.get_session(done.session_id)
        with pytest.raises(PermissionDenied, match="another caller"):
            await bob.complete("yours", session_id=done.session_id)
        session = await alice.client.get_session(done.session_id)
        assert len(session.generations) == 1
        more = await alice.complete(" more", session_id=done.session_id, max_tokens=4)
        assert len(more.token_ids) == 4
        await stack.returns_to(before)

        for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", "wonder"),)):
            await check_unauthenticated(alice.address, metadata)
        assert await health_of(alice.address) == health_pb2.HealthCheckResponse.SERVING
        assert await stack.held() == before


async def check_unauthenticated(address: str, metadata: Any) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        calls = [
            stub.ListModels(generation_pb2.ListModelsRequest(), metadata=metadata, timeout=5),
            stub.Tokenize(generation_pb2.TokenizeRequest(), metadata=metadata, timeout=5),
            stub.GetSession(generation_pb2.GetSessionRequest(), metadata=metadata, timeout=5),
            stub.Generate(Request(), metadata=metadata, timeout=5).read(),
        ]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            error = error_from_rpc(refused.value)
            assert isinstance(error, Unauthenticated) and "token" in error.message


async def health_of(address: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
        request = health_pb2.HealthCheckRequest(service="outrider.v1.GenerationService")
        status: int = (await stub.Check(request, timeout=5)).status
        return status


async def test_get_session_and_tokenize_check_what_they_get(stack: Rig) -> None:
    for session_id, expected in (
        ("A" * 22, NotFound),
        ("short", InvalidArgument),
        ("x" * 1_000_000, InvalidArgument),
    ):
        with pytest.raises(expected):
            await stack.client.get_session(session_id)
    with pytest.raises(NotFound, match="target"):
        await stack.client.tokenize("x", model="gpt")


@pytest.mark.parametrize("name", PROMPT_CASES)
async def test_tokenize_has_the_limits_of_generate(stack: Rig, name: str) -> None:
    change, code, field, message = CASES[name]
    request = generate_request("fine", GenerationOptions())
    change(request)
    tokenize = generation_pb2.TokenizeRequest(prompt=request.prompt)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stack.stub.Tokenize(tokenize, timeout=10)
    assert refused.value.code() is code
    error = error_from_rpc(refused.value)
    assert error.field == field and message in error.message


async def test_the_log_holds_no_traceback_after_all_that(stack: Rig) -> None:
    text = stack.log.read_text()
    assert "generation ended" in text
    assert "Traceback" not in text and '"level": "error"' not in text.lower()
