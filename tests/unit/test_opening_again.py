"""A request that comes again while what it began before is being removed."""

from types import SimpleNamespace
from typing import Any

import pytest

from outrider.errors import AlreadyRunning, NotFound, OutriderError
from outrider.v1 import generation_pb2
from services.orchestrator.opening import Opener

REQUEST = generation_pb2.GenerateRequest(request_id="r", idempotency_key="k")


class Opening(Opener):
    """An opener whose store says what it is told to, one answer after the other."""

    def __init__(self, creates: list[OutriderError | str], again: OutriderError | str) -> None:
        self._creates, self._told_again = creates, again
        self._registry: Any = SimpleNamespace(model=lambda name: None)

    async def start(self, *_: Any) -> Any:
        async def take(*args: Any) -> None:
            return None

        seats = SimpleNamespace(check=lambda: None, take=take)
        return await super().start(REQUEST, SimpleNamespace(seats=seats, tenant="t"))  # type: ignore[arg-type]

    async def _plan(self, *_: Any, **__: Any) -> Any:
        return None

    async def _create(self, *_: Any) -> Any:
        return _answer(self._creates.pop(0))

    async def _again(self, *_: Any) -> Any:
        return _answer(self._told_again)

    async def _generation(self, plan: Any, model: Any, fence: Any, *_: Any) -> Any:
        return fence


def _answer(answer: OutriderError | str) -> str:
    if isinstance(answer, OutriderError):
        raise answer
    return answer


async def test_what_was_begun_before_is_gone_on_with() -> None:
    assert await Opening([AlreadyRunning("it exists")], "found").start() == "found"


async def test_what_is_removed_in_between_is_begun_anew() -> None:
    """Its former owner, asleep until now, gives the session up that it sees without a client."""
    opening = Opening([AlreadyRunning("it exists"), "made"], NotFound("it does not exist"))
    assert await opening.start() == "made"


async def test_what_comes_and_goes_all_the_time_is_an_error() -> None:
    opening = Opening([AlreadyRunning("one"), AlreadyRunning("two")], NotFound("gone"))
    with pytest.raises(AlreadyRunning, match="two"):
        await opening.start()
