"""A GenerationService in the test's own process that plays a script; other tests import it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc.aio

from outrider.errors import OutriderError
from outrider.rpc.status import abort_with
from outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc

ACCEPTED = common_pb2.TOKEN_SOURCE_ACCEPTED
RECOVERED = common_pb2.TOKEN_SOURCE_RECOVERED
BONUS = common_pb2.TOKEN_SOURCE_BONUS
PLAIN = common_pb2.TOKEN_SOURCE_PLAIN

Script = Callable[[generation_pb2.GenerateRequest, Any], AsyncIterator[Any]]


def response(offset: int, ids: list[int], sources: list[int] | None = None, **more: Any) -> Any:
    return generation_pb2.GenerateResponse(
        session_id="s" * 22,
        offset=offset,
        token_ids=ids,
        token_sources=sources or [PLAIN] * len(ids),
        seed=more.pop("seed", 7),
        **more,
    )


def last(offset: int, ids: list[int], sources: list[int] | None = None, **more: Any) -> Any:
    """The final response; counts as many tokens as came unless told otherwise."""
    stats = more.pop(
        "stats",
        {"rounds": 2, "proposed": 4, "accepted": 2, "recovered": 1, "plain": 1}
        | {"proposed_by_position": [1, 1, 1, 1], "accepted_by_position": [1, 1, 0, 0]},
    )
    usage = generation_pb2.Usage(
        prompt_tokens=5,
        completion_tokens=more.pop("completion_tokens", offset + len(ids)),
        speculation=generation_pb2.SpeculationStats(**stats),
        time=generation_pb2.TimeStats(
            draft_us=300, draft_compute_us=200, verify_us=900, verify_compute_us=600
        ),
    )
    reason = more.pop("finish_reason", generation_pb2.FINISH_REASON_EOS)
    return response(offset, ids, sources, finish_reason=reason, usage=usage, **more)


def answer() -> list[Any]:
    """Four tokens in two chunks."""
    return [
        response(0, [10], text="Hi"),
        last(1, [11, 12, 13], [ACCEPTED, ACCEPTED, RECOVERED], text=" there!"),
    ]


def playing(responses: list[Any]) -> Script:
    async def script(request: Any, context: Any) -> AsyncIterator[Any]:
        for item in responses:
            yield item

    return script


class FakeService(generation_pb2_grpc.GenerationServiceServicer):
    """Plays `scripts`, one a call, the last one for ever; an OutriderError in one is raised."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts) or [playing(answer())]
        self.requests: list[generation_pb2.GenerateRequest] = []
        self.resumes: list[generation_pb2.ResumeRequest] = []
        self.left: list[generation_pb2.CancelRequest] = []
        self.cancelled = asyncio.Event()
        self.running = 0
        self.most_running = 0
        self.unary_failures: list[OutriderError] = []

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            async for item in script(request, context):
                if isinstance(item, OutriderError):
                    await abort_with(context, item)
                yield item
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            self.running -= 1

    async def Resume(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Goes on with the answer."""
        self.resumes.append(request)
        for item in answer():
            if item.offset >= request.offset:
                yield item

    async def Cancel(self, request: Any, context: Any) -> Any:
        self.left.append(request)
        return generation_pb2.CancelResponse()

    async def _unary(self, context: Any) -> None:
        if self.unary_failures:
            await abort_with(context, self.unary_failures.pop(0))

    async def ListModels(self, request: Any, context: Any) -> Any:
        await self._unary(context)
        model = generation_pb2.Model(
            name="fake", dtype="float32", device="cpu", vocab_size=100, proposers=["draft"]
        )
        model.eos_token_ids.append(2)
        return generation_pb2.ListModelsResponse(models=[model])

    async def Tokenize(self, request: Any, context: Any) -> Any:
        await self._unary(context)
        part = request.prompt[0]
        text = part.text or "".join(m.content for m in part.chat.messages)
        return generation_pb2.TokenizeResponse(token_ids=list(text.encode()))

    async def GetSession(self, request: Any, context: Any) -> Any:
        await self._unary(context)
        run = generation_pb2.Generation(request_id="r", start=0, prompt_end=3, seed=9)
        return generation_pb2.GetSessionResponse(
            session_id=request.session_id, length=4, generations=[run], token_ids=[1, 2, 3, 4]
        )


@contextlib.asynccontextmanager
async def serving(service: FakeService) -> AsyncIterator[str]:
    """The address at which `service` answers."""
    server = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def eventually(
    condition: Callable[[], bool | Awaitable[bool]], timeout_s: float = 10
) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.02)
