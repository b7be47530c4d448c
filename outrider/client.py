"""The client: one asyncio class over the public API, frozen values in and out.

    async with await OutriderClient.connect(address="127.0.0.1:50051") as client:
        async for chunk in client.generate([Message("user", "Why is the sky blue?")]):
            ...

Every call has a deadline. A stream that breaks off is gone on with at once, at another of the
client's servers or the same one: no token is lost, doubled or altered (outrider.client_resume). A
call that is refused with UNAVAILABLE before anything came is tried again. Errors are those of
`outrider.errors`. Leaving the loop over `generate` early cancels the request.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio
from google.protobuf.message import Message as ProtoMessage

from outrider.client_resume import MendedStream, ResumePolicy, backoff_delays
from outrider.client_servers import Servers
from outrider.client_values import (
    Completion,
    GenerationChunk,
    GenerationOptions,
    Message,
    ModelInfo,
    Prompt,
    Purged,
    RoundReport,
    Session,
    SessionPage,
    SessionSummary,
    Usage,
    collect,
)
from outrider.client_wire import (
    chunk_from,
    fill,
    generate_request,
    page_from,
    prompt_parts,
    session_from,
    values_from,
)
from outrider.errors import Cancelled, DeadlineExceeded, OutriderError, Unavailable
from outrider.rpc.channel import ChannelSecurity
from outrider.rpc.status import error_from_rpc
from outrider.telemetry.calls import GenerateCall
from outrider.v1 import generation_pb2

__all__ = [
    "Completion",
    "GenerationChunk",
    "GenerationOptions",
    "Message",
    "ModelInfo",
    "OutriderClient",
    "Prompt",
    "Purged",
    "ResumePolicy",
    "RoundReport",
    "Session",
    "SessionPage",
    "SessionSummary",
    "Usage",
    "collect",
]

MAX_CONNECT_S = 10.0
KEEPALIVE_S = 6.0

_GIVE_UP_S = 2.0
"""Seconds for telling a server that a stream was left."""

_DEFAULTS = GenerationOptions()
_RESUME = ResumePolicy()


class OutriderClient:
    """A connection to one or several servers. Build it with `connect`; close it, or use
    `async with`."""

    def __init__(
        self, servers: Servers, *, timeout_s: float = 600.0, resume: ResumePolicy | None = _RESUME
    ) -> None:
        self._servers = servers
        self._timeout_s = timeout_s
        self._resume = resume
        self._leaving: set[asyncio.Task[None]] = set()
        self._closed = False

    @classmethod
    async def connect(
        cls,
        *,
        address: str | Sequence[str],
        security: ChannelSecurity | None = None,
        timeout_s: float = 600.0,
        resume: ResumePolicy | None = _RESUME,
        keepalive_s: float = KEEPALIVE_S,
    ) -> Self:
        """Connect, or raise Unavailable shortly after all servers have refused.

        `address` is one server or several of equal rights, tried in turn: "host:port",
        "unix:/path", or a resolver's ("dns:///name:port") whose servers share the calls.
        `timeout_s` is the deadline of every call that names none; connecting takes at most
        min(timeout_s, MAX_CONNECT_S). `resume` None: a stream that breaks off raises what broke it.
        A connection that is silent for `keepalive_s` and half as long again is given up.
        """
        addresses = [address] if isinstance(address, str) else list(address)
        servers = Servers(addresses, security, keepalive_s=keepalive_s)
        try:
            await servers.connect(min(timeout_s, MAX_CONNECT_S))
        except BaseException:
            await servers.close()
            raise
        return cls(servers, timeout_s=timeout_s, resume=resume)

    async def close(self) -> None:
        self._closed = True
        if self._leaving:
            await asyncio.wait(self._leaving, timeout=_GIVE_UP_S)
        await self._servers.close()

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
        request = generate_request(prompt, options, resumable=self._resume is not None)
        started = time.perf_counter()
        deadline = started + (self._timeout_s if timeout_s is None else timeout_s)
        left = True
        with GenerateCall(request) as told:
            calls = _Calls(self._servers, told.metadata)
            stream = MendedStream(calls, request, self._resume, deadline=deadline)
            try:
                async with aclosing(stream.responses()) as responses:
                    async for response in responses:
                        told.responded(response)
                        yield chunk_from(
                            response,
                            time.perf_counter() - started,
                            resumes=stream.resumes,
                            interrupted_s=stream.interrupted_s,
                        )
                left = False
            except OutriderError as error:
                # Other errors have ended it there, too; one that was taken over is another's now.
                left = isinstance(error, Unavailable | Cancelled)
                raise
            finally:
                if left and not stream.finished:
                    self._leave(stream, request)

    def _leave(self, stream: MendedStream, request: generation_pb2.GenerateRequest) -> None:
        """Tell a server that nobody will resume this one, which it cannot know otherwise."""
        if self._closed or not request.resumable:
            return
        left = generation_pb2.CancelRequest(
            session_id=stream.session_id,
            request_id=request.request_id,
            idempotency_key=request.idempotency_key,
        )
        task = asyncio.create_task(self._tell_left(left), name="leave-stream")
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _tell_left(self, left: generation_pb2.CancelRequest) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await self._servers.stub(self._servers.current).Cancel(left, timeout=_GIVE_UP_S)

    async def complete(
        self,
        prompt: Prompt,
        options: GenerationOptions = _DEFAULTS,
        *,
        timeout_s: float | None = None,
    ) -> Completion:
        """The whole generation; InternalError when tokens were lost, doubled or miscounted."""
        return collect([c async for c in self.generate(prompt, options, timeout_s=timeout_s)])

    async def get_session(
        self, session_id: str, *, include_tokens: bool = False, include_text: bool = False
    ) -> Session:
        """Raises NotFound, PermissionDenied (another caller's)."""
        request = generation_pb2.GetSessionRequest()
        fill(
            request,
            session_id=session_id,
            include_tokens=include_tokens,
            include_text=include_text,
        )
        response = await self._unary("GetSession", request)
        return session_from(response)

    async def list_sessions(self, *, page_size: int = 0, page_token: str = "") -> SessionPage:
        """A page of your live sessions: running, interrupted, kept."""
        request = generation_pb2.ListSessionsRequest()
        fill(request, page_size=page_size, page_token=page_token)
        return page_from(await self._unary("ListSessions", request))

    async def delete_session(self, session_id: str) -> None:
        """Remove a session everywhere, a running one too. Raises NotFound, PermissionDenied."""
        request = generation_pb2.DeleteSessionRequest()
        fill(request, session_id=session_id)
        await self._unary("DeleteSession", request)

    async def purge_sessions(self) -> Purged:
        """Remove all your live sessions, and your KV blocks in the workers' store."""
        request = generation_pb2.PurgeSessionsRequest()
        return values_from(Purged, await self._unary("PurgeSessions", request))

    async def list_models(self) -> tuple[ModelInfo, ...]:
        response = await self._unary("ListModels", generation_pb2.ListModelsRequest())
        return tuple(values_from(ModelInfo, model) for model in response.models)

    async def tokenize(self, prompt: Prompt, *, model: str = "") -> tuple[int, ...]:
        """Token ids of a prompt, as `generate` would make them."""
        request = generation_pb2.TokenizeRequest(prompt=prompt_parts(prompt))
        fill(request, model=model)
        return tuple((await self._unary("Tokenize", request)).token_ids)

    async def _unary(self, method: str, request: ProtoMessage) -> Any:
        deadline = time.perf_counter() + self._timeout_s
        delays = backoff_delays()
        while True:
            server = self._servers.current
            call: Callable[..., Awaitable[Any]] = getattr(self._servers.stub(server), method)
            try:
                return await call(request, timeout=_time_left(deadline))
            except grpc.aio.AioRpcError as error:
                failure = error_from_rpc(error)
                delay = delays.pop(0) if delays else float("inf")
                is_late = time.perf_counter() + delay >= deadline
                if is_late or not isinstance(failure, Unavailable):
                    raise failure from error
            self._servers.failed(server)
            await asyncio.sleep(delay)


class _Calls:
    """The streams of the API at a client's servers; `metadata` goes with each."""

    def __init__(self, servers: Servers, metadata: tuple[tuple[str, str], ...]) -> None:
        self._servers = servers
        self._metadata = metadata
        self.failed = servers.failed

    @property
    def current(self) -> int:
        return self._servers.current

    def __len__(self) -> int:
        return len(self._servers)

    def generate(
        self, server: int, request: generation_pb2.GenerateRequest, timeout_s: float
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        method = self._servers.stub(server).Generate
        return _responses(method(request, timeout=timeout_s, metadata=self._metadata))

    def resume(
        self, server: int, request: generation_pb2.ResumeRequest, timeout_s: float
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        method = self._servers.stub(server).Resume
        return _responses(method(request, timeout=timeout_s, metadata=self._metadata))


async def _responses(call: Any) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
    """Those of a call, which is cancelled when nobody wants more of them."""
    try:
        async for response in call:
            yield response
    finally:
        call.cancel()


def _time_left(deadline: float) -> float:
    left = deadline - time.perf_counter()
    if left <= 0:
        raise DeadlineExceeded("the time given ran out before the server answered")
    return left
