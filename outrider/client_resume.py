"""A stream that mends itself: asked for again before its first response, resumed after it.

What was received is never asked for again, what was not is: the server is told how many tokens and
characters there are. A generation that was taken over by somebody else is not fought over.
"""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import grpc.aio

from outrider.errors import (
    Cancelled,
    DeadlineExceeded,
    Fenced,
    InternalError,
    OutriderError,
    ResourceExhausted,
    Unavailable,
    Unsupported,
)
from outrider.rpc.status import error_from_rpc
from outrider.types import EMPTY_PREFIX_HASH, chain_hash
from outrider.v1 import generation_pb2

RETRIES = 4
"""Of a request that has brought nothing yet, at the same server."""

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0

_LOST_CONNECTION = ("RST_STREAM", "Stream removed", "Socket closed", "Connection reset")
"""What gRPC says, in errors of other kinds, when it was the connection that failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePolicy:
    """How a broken stream is mended.

    It is given up `give_up_after_s` after it broke (and at its deadline in any case), and after the
    generation was taken away `max_fenced` times by somebody else who resumed it.
    """

    give_up_after_s: float = 30.0
    max_fenced: int = 1


Responses = AsyncGenerator[generation_pb2.GenerateResponse, None]


class Transport(Protocol):
    """Calls to some servers, numbered from 0; the next one is best made to `current`."""

    @property
    def current(self) -> int: ...

    def __len__(self) -> int: ...

    def failed(self, server: int) -> None:
        """A call to it failed."""

    def generate(
        self, server: int, request: generation_pb2.GenerateRequest, timeout_s: float
    ) -> "Responses":
        """Raises AioRpcError while it is iterated."""

    def resume(
        self, server: int, request: generation_pb2.ResumeRequest, timeout_s: float
    ) -> "Responses":
        """Likewise."""


class MendedStream:
    """One generation as one stream, whatever becomes of its calls. Iterate `responses` once.

    `deadline` is on `clock`; `policy` None: a stream that has brought something is not mended.
    """

    def __init__(
        self,
        transport: Transport,
        request: generation_pb2.GenerateRequest,
        policy: ResumePolicy | None,
        *,
        deadline: float,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    ) -> None:
        self.session_id = request.session_id
        self.finished = False
        self.resumes = 0
        """Times that a stream was broken and went on."""
        self.interrupted_s = 0.0
        """Seconds from noticing that until the next response, in all."""
        self._transport = transport
        self._request = request
        self._policy = policy
        self._deadline = deadline
        self._clock = clock
        self._sleep = sleep
        self._started = False
        self._offset = self._text_chars = 0
        self._tokens_hash = EMPTY_PREFIX_HASH
        self._failures = 0
        """Calls that failed since the last response."""
        self._fenced = 0
        self._broke_at: float | None = None
        self._broke_by: OutriderError | None = None

    async def responses(self) -> Responses:
        """Raises OutriderError: what ended the last call, once there is no mending it."""
        while True:
            server = self._transport.current
            try:
                async with aclosing(self._call(server)) as call:
                    async for response in call:
                        self._note(response)
                        yield response
                return
            except grpc.aio.AioRpcError as rpc_error:
                if self.finished:
                    return  # Nothing is missing.
                error = _error_of(rpc_error)
                try:
                    delay = self._delay(error)
                except OutriderError as last:
                    raise last from rpc_error
            self._transport.failed(server)
            await self._sleep(delay)

    def _call(self, server: int) -> Responses:
        left_s = self._deadline - self._clock()
        if left_s <= 0:
            raise DeadlineExceeded("the time given ran out before the server answered")
        if not self._started:
            return self._transport.generate(server, self._request, left_s)
        request = generation_pb2.ResumeRequest(
            session_id=self.session_id,
            request_id=self._request.request_id,
            offset=self._offset,
            text_chars=self._text_chars,
            tokens_hash=self._tokens_hash,
        )
        return self._transport.resume(server, request, left_s)

    def _note(self, response: generation_pb2.GenerateResponse) -> None:
        """Count what is there now: the server goes on from it."""
        if self._broke_at is not None and self._started:
            self.resumes += 1
            self.interrupted_s += self._clock() - self._broke_at
        self._broke_at = None
        self._failures = 0
        self._started = True
        self.session_id = response.session_id
        self._offset += len(response.token_ids)
        self._text_chars += len(response.text)
        self._tokens_hash = chain_hash(self._tokens_hash, response.token_ids)
        self.finished = response.finish_reason != generation_pb2.FINISH_REASON_UNSPECIFIED

    def _delay(self, error: OutriderError) -> float:
        """Seconds to wait before the next call; raises the error where none is to be made."""
        now = self._clock()
        is_resuming = self._started and self._broke_at is not None
        if is_resuming and isinstance(error, Unsupported) and self._broke_by:
            raise self._broke_by  # An older server, which knows of no resuming.
        if not self._is_passing(error, is_resuming):
            raise error
        if self._broke_at is None:
            self._broke_at, self._broke_by = now, error
        rounds, at_once = divmod(self._failures, len(self._transport))
        self._failures += 1
        # The other servers are tried at once, all of them again after a while.
        at_once = at_once < len(self._transport) - 1
        delay = 0.0 if at_once else _backoff_s(rounds)
        if not self._started and rounds >= RETRIES:
            raise error
        if self._started and self._policy:
            if now + delay - self._broke_at > self._policy.give_up_after_s:
                raise error
        if now + delay >= self._deadline:
            raise error
        return delay

    def _is_passing(self, error: OutriderError, is_resuming: bool) -> bool:
        """Whether another call may succeed."""
        if not self._started:
            # A server that goes away cancels calls that reach it a moment before it hangs up.
            # (Where this side cancels, there is no status but a CancelledError.)
            return isinstance(error, Unavailable | Cancelled)
        if self._policy is None:
            return False
        if isinstance(error, Fenced):
            self._fenced += 1
            return self._fenced <= self._policy.max_fenced
        # A server that is full does not end a stream that another one has begun.
        return isinstance(error, Unavailable | Cancelled) or (
            is_resuming and isinstance(error, ResourceExhausted)
        )


def _backoff_s(rounds: int) -> float:
    """Doubling, each with up to 50% of jitter."""
    backoff_s: float = min(FIRST_BACKOFF_S * 2**rounds, MAX_BACKOFF_S)
    return backoff_s * random.uniform(1, 1.5)


def backoff_delays() -> list[float]:
    """Delays before each further attempt of a call that brings one response."""
    return [_backoff_s(attempt) for attempt in range(RETRIES)]


def _error_of(rpc_error: grpc.aio.AioRpcError) -> OutriderError:
    error = error_from_rpc(rpc_error)
    details = rpc_error.details() or ""
    if isinstance(error, InternalError) and any(text in details for text in _LOST_CONNECTION):
        return Unavailable(details)
    return error
