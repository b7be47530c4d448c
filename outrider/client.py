"""The client: one asyncio class over the public API, frozen values in and out.

    async with await OutriderClient.connect(address="127.0.0.1:50051") as client:
        async for chunk in client.generate([Message("user", "Why is the sky blue?")]):
            ...

Every call has a deadline. A call that is refused with UNAVAILABLE before anything was emitted, or
cancelled by the server's end, is tried again under the same request id, so that the server can
tell; nothing else is. Errors are those of `outrider.errors`. Leaving the loop over `generate` early
cancels the request.
"""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio
from google.protobuf.message import Message as ProtoMessage

from outrider.client_values import (
    Completion,
    GenerationChunk,
    GenerationOptions,
    Message,
    ModelInfo,
    Prompt,
    RoundReport,
    Session,
    Usage,
    collect,
)
from outrider.client_wire import (
    chunk_from,
    fill,
    generate_request,
    prompt_parts,
    session_from,
    values_from,
)
from outrider.errors import Cancelled, DeadlineExceeded, Unavailable
from outrider.rpc.channel import ChannelSecurity, open_channel
from outrider.rpc.status import error_from_rpc
from outrider.telemetry.calls import GenerateCall
from outrider.v1 import generation_pb2
from outrider.v1.generation_pb2_grpc import GenerationServiceStub

__all__ = [
    "Completion",
    "GenerationChunk",
    "GenerationOptions",
    "Message",
    "ModelInfo",
    "OutriderClient",
    "Prompt",
    "RoundReport",
    "Session",
    "Usage",
    "collect",
]

MAX_CONNECT_S = 10.0
POLL_S = 0.01
KEEP_TRYING_S = 1.0
"""Failed attempts to connect are repeated for so long: a busy machine may be late to answer one."""

RETRIES = 4
FIRST_BACKOFF_S = 0.1
_DEFAULTS = GenerationOptions()


class OutriderClient:
    """A connection to one server. Build it with `connect`; close it, or use `async with`."""

    def __init__(self, channel: grpc.aio.Channel, *, timeout_s: float = 600.0) -> None:
        self._channel = channel
        self._timeout_s = timeout_s
        self._stub: Any = GenerationServiceStub(channel)  # type: ignore[no-untyped-call]

    @classmethod
    async def connect(
        cls, *, address: str, security: ChannelSecurity | None = None, timeout_s: float = 600.0
    ) -> Self:
        """Connect, or raise Unavailable after KEEP_TRYING_S where no server answers.

        `timeout_s` is the deadline of every call that names none; connecting takes at most
        min(timeout_s, MAX_CONNECT_S).
        """
        channel = open_channel(address, security)
        try:
            await _wait_ready(channel, address, min(timeout_s, MAX_CONNECT_S))
        except BaseException:
            await channel.close()
            raise
        return cls(channel, timeout_s=timeout_s)

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self.close()

    async def generate(
        self,
        prompt: Prompt,
        options: GenerationOptions = _DEFAULTS,
        *,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Stream a generation. Leaving the loop, or `aclose()`, cancels it on the server."""
        request = generate_request(prompt, options)
        started = time.perf_counter()
        deadline = started + (self._timeout_s if timeout_s is None else timeout_s)
        delays = _backoff()
        with GenerateCall(request) as told:
            while True:
                emitted = False
                call = self._stub.Generate(
                    request, timeout=_time_left(deadline), metadata=told.metadata
                )
                try:
                    async for response in call:
                        emitted = True
                        told.responded(response)
                        yield chunk_from(response, time.perf_counter() - started)
                    return
                except grpc.aio.AioRpcError as error:
                    delay = _retry_delay(error, delays, deadline, emitted=emitted)
                finally:
                    call.cancel()
                await asyncio.sleep(delay)

    async def complete(
        self,
        prompt: Prompt,
        options: GenerationOptions = _DEFAULTS,
        *,
        timeout_s: float | None = None,
    ) -> Completion:
        """The whole generation; InternalError when tokens were lost, doubled or miscounted."""
        return collect([c async for c in self.generate(prompt, options, timeout_s=timeout_s)])

    async def get_session(self, session_id: str, *, include_tokens: bool = False) -> Session:
        request = generation_pb2.GetSessionRequest()
        fill(request, session_id=session_id, include_tokens=include_tokens)
        response = await self._unary(self._stub.GetSession, request)
        return session_from(response)

    async def list_models(self) -> tuple[ModelInfo, ...]:
        response = await self._unary(self._stub.ListModels, generation_pb2.ListModelsRequest())
        return tuple(values_from(ModelInfo, model) for model in response.models)

    async def tokenize(self, prompt: Prompt, *, model: str = "") -> tuple[int, ...]:
        """Token ids of a prompt, as `generate` would make them."""
        request = generation_pb2.TokenizeRequest(prompt=prompt_parts(prompt))
        fill(request, model=model)
        return tuple((await self._unary(self._stub.Tokenize, request)).token_ids)

    async def _unary(self, method: Callable[..., Awaitable[Any]], request: ProtoMessage) -> Any:
        deadline = time.perf_counter() + self._timeout_s
        delays = _backoff()
        while True:
            try:
                return await method(request, timeout=_time_left(deadline))
            except grpc.aio.AioRpcError as error:
                delay = _retry_delay(error, delays, deadline, emitted=False)
            await asyncio.sleep(delay)


async def _wait_ready(channel: grpc.aio.Channel, address: str, timeout_s: float) -> None:
    started = time.perf_counter()
    failed = False
    while time.perf_counter() - started < (min(KEEP_TRYING_S, timeout_s) if failed else timeout_s):
        state = channel.get_state(try_to_connect=True)
        if state is grpc.ChannelConnectivity.READY:
            return
        failed = state is grpc.ChannelConnectivity.TRANSIENT_FAILURE
        await asyncio.sleep(POLL_S)
    if not failed:
        raise Unavailable(f"{address} did not answer within {timeout_s:g} s")
    reason = ""
    stub: Any = GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
    try:  # A call on a failed channel is refused at once, with the reason.
        await stub.ListModels(generation_pb2.ListModelsRequest(), timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        reason = f": {error.details()}"
    raise Unavailable(f"no Outrider server answers at {address}{reason}")


def _backoff() -> Iterator[float]:
    """Delays before each further attempt, doubling, each with up to 50% of jitter."""
    return iter([FIRST_BACKOFF_S * 2**n * random.uniform(1, 1.5) for n in range(RETRIES)])


def _time_left(deadline: float) -> float:
    left = deadline - time.perf_counter()
    if left <= 0:
        raise DeadlineExceeded("the time given ran out before the server answered")
    return left


def _retry_delay(
    error: grpc.aio.AioRpcError, delays: Iterator[float], deadline: float, *, emitted: bool
) -> float:
    """Seconds to wait before trying again; raises the error where that is not allowed."""
    failure = error_from_rpc(error)
    delay = next(delays, None)
    # A server that goes away cancels calls that reach it a moment before it hangs up. (Where this
    # side cancels, there is no status but a CancelledError.)
    if emitted or delay is None or not isinstance(failure, Unavailable | Cancelled):
        raise failure from error
    if time.perf_counter() + delay >= deadline:
        raise failure from error
    return delay
