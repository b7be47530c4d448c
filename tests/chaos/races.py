"""Two clients that resume one running generation at once, at different orchestrators."""

import asyncio
import random
from typing import Any

import grpc.aio

from outrider.client_wire import generate_request
from outrider.errors import OutriderError
from outrider.rpc.channel import open_channel
from outrider.rpc.status import error_from_rpc
from outrider.types import EMPTY_PREFIX_HASH, chain_hash
from outrider.v1 import generation_pb2
from outrider.v1.generation_pb2_grpc import GenerationServiceStub

from .stack import ORCHESTRATORS, Stack
from .streams import References, Spec, options_of, pool

_S = 45.0
_PAUSE_S = 0.1
_PASSING = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,  # A connection that broke, as gRPC may put it.
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)


class Race:
    """A generation begins, is left in its midst, and two readers resume it at the same moment.

    Each goes on until the other has taken it away, which it then accepts: one of them gets all,
    nobody gets anything wrong.
    """

    def __init__(
        self, stack: Stack, references: References, rng: random.Random, *, after_tokens: int
    ) -> None:
        self.spec: Spec = rng.choice(pool())
        self._stack = stack
        self._said = references.of(self.spec)
        self._after = after_tokens
        self._request = generate_request(self.spec.prompt, options_of(self.spec), resumable=True)

    async def run(self) -> str:
        """What was wrong; "" if nothing."""
        channels = [
            open_channel(self._stack.address(name), keepalive_s=1) for name in ORCHESTRATORS
        ]
        try:
            stubs: list[Any] = [GenerationServiceStub(c) for c in channels]  # type: ignore[no-untyped-call]
            first = await self._begin(stubs[0])
            if not first:
                return ""  # Disturbed by another fault; others try that.
            readers = [self._read(stubs, number, list(first)) for number in range(2)]
            ends = await asyncio.gather(*readers)
            wrong = [end for end in ends if end not in ("all", "fenced")]
            if wrong:
                return "; ".join(wrong)
            return "" if "all" in ends else "neither reader got all of it"
        finally:
            await asyncio.gather(*(channel.close() for channel in channels))

    async def _begin(self, stub: Any) -> list[Any]:
        """The first responses; the call is left then."""
        responses = []
        call = stub.Generate(self._request, timeout=_S)
        try:
            async for response in call:
                responses.append(response)
                if sum(len(r.token_ids) for r in responses) >= self._after:
                    break
        except grpc.aio.AioRpcError:
            pass
        finally:
            call.cancel()
        return responses

    async def _read(self, stubs: list[Any], number: int, responses: list[Any]) -> str:
        """Resume at one orchestrator, at the other one where that fails; how it ended."""
        deadline = asyncio.get_running_loop().time() + _S
        while True:
            if responses[-1].finish_reason:
                return self._compare(responses)
            ids = [token for r in responses for token in r.token_ids]
            request = generation_pb2.ResumeRequest(
                session_id=responses[0].session_id,
                request_id=self._request.request_id,
                offset=len(ids),
                text_chars=sum(len(r.text) for r in responses),
                tokens_hash=chain_hash(EMPTY_PREFIX_HASH, ids),
            )
            try:
                async for response in stubs[number].Resume(request, timeout=_S):
                    if response.token_ids and response.offset != sum(
                        len(r.token_ids) for r in responses
                    ):
                        return f"a response starts at {response.offset}"
                    responses.append(response)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.ABORTED:
                    return self._compare(responses) or "fenced"
                if error.code() not in _PASSING:
                    return _told(error_from_rpc(error))
                if asyncio.get_running_loop().time() > deadline:
                    return f"not over in time: {_told(error_from_rpc(error))}"
                number = 1 - number
                await asyncio.sleep(_PAUSE_S)

    def _compare(self, responses: list[Any]) -> str:
        """ "all" for the whole, "" for a beginning; else what differs."""
        ids = tuple(token for r in responses for token in r.token_ids)
        text = "".join(r.text for r in responses)
        if ids != self._said.token_ids[: len(ids)] or not self._said.text.startswith(text):
            return f"{len(ids)} tokens, not those of an undisturbed stream"
        if not responses[-1].finish_reason:
            return ""
        whole = ids == self._said.token_ids and text == self._said.text
        return "all" if whole else f"ended after {len(ids)} of {len(self._said.token_ids)} tokens"


def _told(error: OutriderError) -> str:
    return f"{type(error).__name__}: {error.message}"
