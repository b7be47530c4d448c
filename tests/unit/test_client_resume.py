"""How a client mends its streams: against servers that are made up, on a clock that is, too."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest
from test_client_fakes import last, response

from outrider import client_resume
from outrider.client_resume import MendedStream, ResumePolicy
from outrider.errors import (
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    Fenced,
    InternalError,
    InvalidArgument,
    NotFound,
    OutriderError,
    ResourceExhausted,
    Unavailable,
    Unsupported,
)
from outrider.types import chain_hash
from outrider.v1 import generation_pb2

POLICY = ResumePolicy()
REQUEST = generation_pb2.GenerateRequest(request_id="r", idempotency_key="k")


def rpc_error(error: OutriderError) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        grpc.StatusCode[error.grpc_name],
        grpc.aio.Metadata(),
        grpc.aio.Metadata(),
        error.message,
    )


GONE = Unavailable("connection reset")
Script = list[Any]
"""Responses, then perhaps an error; a number is seconds that pass."""


@dataclass
class Servers:
    """`scripts` are played one a call, the last one for ever."""

    scripts: list[Script]
    count: int = 1
    current: int = 0
    now: float = 0.0
    calls: list[tuple[str, int, Any, float]] = field(default_factory=list)
    sleeps: list[float] = field(default_factory=list)
    open_calls: int = 0

    def __len__(self) -> int:
        return self.count

    def failed(self, server: int) -> None:
        assert server == self.current
        self.current = (server + 1) % self.count

    def generate(self, server: int, request: Any, timeout_s: float) -> Any:
        return self._play("generate", server, request, timeout_s)

    def resume(self, server: int, request: Any, timeout_s: float) -> Any:
        return self._play("resume", server, request, timeout_s)

    async def _play(self, kind: str, server: int, request: Any, left: float) -> AsyncGenerator:
        copy = type(request)()
        copy.CopyFrom(request)
        self.calls.append((kind, server, copy, left))
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        self.open_calls += 1
        try:
            for item in script:
                if isinstance(item, float):
                    self.now += item
                elif isinstance(item, OutriderError):
                    raise rpc_error(item)
                else:
                    yield item
        finally:
            self.open_calls -= 1

    async def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds

    @property
    def kinds(self) -> list[tuple[str, int]]:
        return [(kind, server) for kind, server, *_ in self.calls]

    def stream(self, policy: ResumePolicy | None = POLICY, deadline: float = 600.0) -> MendedStream:
        return MendedStream(
            self, REQUEST, policy, deadline=deadline, clock=lambda: self.now, sleep=self.sleep
        )


async def read(stream: MendedStream, into: list[Any] | None = None) -> list[Any]:
    seen = [] if into is None else into
    async for item in stream.responses():
        seen.append(item)
    return seen


def ids_of(responses: list[Any]) -> list[int]:
    return [token_id for item in responses for token_id in item.token_ids]


FIRST = response(0, [10, 11], text="Hé")
REST = last(2, [12], text="!")


async def test_a_stream_that_breaks_is_resumed_at_the_next_server_at_once() -> None:
    servers = Servers([[FIRST, GONE], [0.25, REST]], count=2)
    stream = servers.stream()
    assert ids_of(await read(stream)) == [10, 11, 12]
    assert servers.kinds == [("generate", 0), ("resume", 1)] and servers.sleeps == [0.0]
    asked = servers.calls[1][2]
    assert (asked.session_id, asked.request_id) == ("s" * 22, "r")
    assert (asked.offset, asked.text_chars) == (2, 2)
    assert asked.tokens_hash == chain_hash(0, [10, 11])
    assert (stream.resumes, stream.interrupted_s, stream.finished) == (1, 0.25, True)
    assert servers.open_calls == 0


async def test_it_is_resumed_again_and_again_and_all_is_counted() -> None:
    servers = Servers(
        [
            [response(0, [1], text="a"), GONE],
            [0.5, response(1, [2], text=""), GONE],
            [GONE],
            [0.5, response(2, [], text="bc"), GONE],
            [last(2, [3], text="d")],
        ],
        count=2,
    )
    stream = servers.stream()
    assert ids_of(await read(stream)) == [1, 2, 3]
    assert [(c[2].offset, c[2].text_chars) for c in servers.calls[1:]] == [
        (1, 1),
        (2, 1),
        (2, 1),
        (2, 3),
    ]
    assert servers.kinds[1:] == [("resume", 1), ("resume", 0), ("resume", 1), ("resume", 0)]
    assert stream.resumes == 3
    assert stream.interrupted_s == pytest.approx(1.0 + sum(servers.sleeps))


async def test_before_the_first_response_the_request_itself_is_sent_again() -> None:
    servers = Servers([[GONE], [GONE], [FIRST, REST]], count=3)
    stream = servers.stream()
    assert ids_of(await read(stream)) == [10, 11, 12]
    assert servers.kinds == [("generate", 0), ("generate", 1), ("generate", 2)]
    assert {call[2].idempotency_key for call in servers.calls} == {"k"}
    assert stream.resumes == 0 and stream.interrupted_s == 0


async def test_one_server_is_asked_again_after_growing_pauses() -> None:
    servers = Servers([[FIRST, GONE], [GONE], [GONE], [REST]])
    await read(servers.stream())
    assert len(servers.sleeps) == 3
    for n, pause in enumerate(servers.sleeps):
        assert client_resume.FIRST_BACKOFF_S <= pause / 2**n <= 1.5 * client_resume.FIRST_BACKOFF_S


async def test_several_servers_share_a_pause() -> None:
    """None between the servers, one when all have been tried."""
    servers = Servers([[FIRST, GONE], *[[GONE]] * 5, [REST]], count=3)
    await read(servers.stream())
    assert [pause == 0 for pause in servers.sleeps] == [True, True, False] * 2


async def test_it_is_given_up_after_a_while() -> None:
    servers = Servers([[FIRST, GONE], [Unavailable("no target")]], count=2)
    seen: list[Any] = []
    with pytest.raises(Unavailable, match="no target"):
        await read(servers.stream(ResumePolicy(give_up_after_s=5)), seen)
    assert ids_of(seen) == [10, 11]
    assert 2 < servers.now <= 5
    assert max(servers.sleeps) <= 1.5 * client_resume.MAX_BACKOFF_S


async def test_each_response_gives_it_time_anew() -> None:
    away = [[GONE], [GONE], [GONE]]
    scripts = [[FIRST, GONE]]
    for offset in range(2, 6):
        scripts += [*away, [3.0, response(offset, [offset]), GONE]]
    servers = Servers([*scripts, [last(6, [6])]])
    assert len(ids_of(await read(servers.stream(ResumePolicy(give_up_after_s=5))))) == 7
    assert servers.now > 10


async def test_the_deadline_ends_it() -> None:
    servers = Servers([[1.0, FIRST, GONE], [GONE]])
    with pytest.raises(Unavailable):
        await read(servers.stream(deadline=3.0))
    assert servers.now < 3.0
    assert [left for *_, left in servers.calls] == sorted(
        (left for *_, left in servers.calls), reverse=True
    )
    servers = Servers([[FIRST, 4.0, GONE]])
    with pytest.raises(Unavailable):
        await read(servers.stream(deadline=3.0))
    servers = Servers([[4.0, DeadlineExceeded("too late")]])
    with pytest.raises(DeadlineExceeded):
        await read(servers.stream(deadline=3.0))
    assert len(servers.calls) == 1


async def test_a_stream_that_somebody_took_over_is_not_fought_over() -> None:
    taken = Fenced("taken over")
    servers = Servers([[FIRST, taken], [response(2, [12]), taken], [REST]], count=2)
    seen: list[Any] = []
    with pytest.raises(Fenced):
        await read(servers.stream(), seen)
    assert ids_of(seen) == [10, 11, 12] and len(servers.calls) == 2
    servers = Servers([[FIRST, taken], [REST]])
    with pytest.raises(Fenced):
        await read(servers.stream(ResumePolicy(max_fenced=0)))
    assert len(servers.calls) == 1


class Contested(Servers):
    """A generation of 50 tokens; whoever resumes it takes it from who has it."""

    holder: "Contested | None" = None
    takes = 0

    async def _play(self, kind: str, server: int, request: Any, left: float) -> AsyncGenerator:
        Contested.holder = self
        Contested.takes += 1
        for offset in range(getattr(request, "offset", 0), 50):
            yield (last if offset == 49 else response)(offset, [offset])
            await asyncio.sleep(0)
            if Contested.holder is not self:
                raise rpc_error(Fenced("taken over"))


async def test_two_clients_of_one_generation_do_not_take_it_from_each_other_for_ever() -> None:
    streams = [Contested([], count=2).stream() for _ in range(2)]
    ends = await asyncio.gather(*map(read, streams), return_exceptions=True)
    lost = [end for end in ends if isinstance(end, Fenced)]
    whole = [end for end in ends if isinstance(end, list)]
    assert len(lost) == len(whole) == 1 and ids_of(whole[0]) == list(range(50))
    assert 3 <= Contested.takes <= 4, Contested.takes


@pytest.mark.parametrize(
    "error",
    [
        NotFound("gone"),
        DataLoss("lost"),
        FailedPrecondition("another request"),
        InternalError("a fault"),
        InvalidArgument("wrong"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_what_does_not_pass_is_raised(error: OutriderError) -> None:
    servers = Servers([[FIRST, GONE], [error], [REST]])
    with pytest.raises(type(error)):
        await read(servers.stream())
    servers = Servers([[FIRST, error], [REST]])
    with pytest.raises(type(error)):
        await read(servers.stream())
    assert len(servers.calls) == 1


async def test_a_full_server_is_an_obstacle_only_to_what_has_begun() -> None:
    servers = Servers([[FIRST, GONE], [ResourceExhausted("full")], [REST]], count=3)
    assert ids_of(await read(servers.stream())) == [10, 11, 12]
    servers = Servers([[ResourceExhausted("full")], [FIRST, REST]], count=2)
    with pytest.raises(ResourceExhausted):
        await read(servers.stream())
    servers = Servers([[FIRST, ResourceExhausted("out of KV")], [REST]], count=2)
    with pytest.raises(ResourceExhausted):
        await read(servers.stream())


@pytest.mark.parametrize("details", ["Received RST_STREAM with error code 2", "Stream removed"])
async def test_a_lost_connection_by_another_name_is_one(details: str) -> None:
    servers = Servers([[FIRST, InternalError(details)], [REST]])
    assert ids_of(await read(servers.stream())) == [10, 11, 12]


async def test_an_old_server_that_cannot_resume_leaves_the_first_error() -> None:
    servers = Servers([[FIRST, GONE], [Unsupported("Method not found!")]])
    with pytest.raises(Unavailable, match="connection reset"):
        await read(servers.stream())


async def test_switched_off_a_started_stream_is_not_mended() -> None:
    servers = Servers([[FIRST, GONE], [REST]], count=2)
    with pytest.raises(Unavailable):
        await read(servers.stream(None))
    assert len(servers.calls) == 1
    servers = Servers([[GONE], [FIRST, REST]], count=2)
    assert ids_of(await read(servers.stream(None))) == [10, 11, 12]


async def test_nothing_is_asked_for_after_the_last_response() -> None:
    servers = Servers([[FIRST, REST, GONE], [REST]])
    stream = servers.stream()
    assert ids_of(await read(stream)) == [10, 11, 12]
    assert stream.finished and len(servers.calls) == 1


async def test_leaving_ends_the_call_that_is_open() -> None:
    servers = Servers([[FIRST, GONE], [REST]])
    responses = servers.stream().responses()
    await anext(responses)
    assert servers.open_calls == 1
    await responses.aclose()
    assert servers.open_calls == 0
