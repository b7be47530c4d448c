"""A client that costs little: the sessions of sessions.js, from one process of Python.

run.py starts this where the client must not take the cores from what is measured: k6 needs more
than half a core to offer three times what a machine of two cores can serve, this a fifth. Sessions
come one after the other, so many at a time (`closed`), or at their times whatever becomes of those
before (`open`: as a Poisson process, so that they come in bunches too). How late each one was sent,
and by how much this process's own loop was late meanwhile, is told, so that a slow client is not
taken for a slow server.

It gets settings as JSON in its only argument, and writes JSON to the file that they name.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2

from outrider.v1 import generation_pb2, generation_pb2_grpc

_TICK_S = 0.01
_TIMEOUT_S = 120.0
_MAX_REFUSALS = 1000
_MASK = (1 << 32) - 1

Settings = dict[str, Any]


def tokens(part: int, count: int) -> list[int]:
    """As in sessions.js: equal numbers give equal tokens."""
    state = (part * 2654435761 + 12345) & _MASK
    found = []
    for _ in range(count):
        state = (state * 1664525 + 1013904223) & _MASK
        found.append((state >> 16) % 250)
    return found


def key_of(settings: Settings, number: int) -> str:
    """The prompt of a session: of few prefixes some come much more often than others."""
    if settings["keys"]:
        return str(settings["keys"][number])
    high, low, question = tokens(1000003 + number, 3)
    rank = int(settings["prefixes"] ** (((high << 8) + low) / (250 << 8)))
    return f"{rank}/{question % settings['questions']}"


def request_of(settings: Settings, key: str) -> generation_pb2.GenerateRequest:
    rank, question = map(int, key.split("/"))
    ids = tokens(rank % settings["systems"], settings["system_tokens"])
    ids += tokens(100 + rank, settings["prefix_tokens"])
    ids += tokens(5000 + rank * 512 + question, settings["question_tokens"])
    request = generation_pb2.GenerateRequest()
    request.prompt.add().tokens.ids.extend(ids)
    request.sampling.temperature = 0.8
    request.sampling.seed = rank * 512 + question
    request.stop.max_tokens = settings["max_tokens"]
    request.stop.ignore_eos = True
    if settings["plain"]:
        request.speculation.num_speculative_tokens = 0
    return request


class Crowd:
    """All sessions of a run."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.told: list[dict[str, Any]] = []
        self.lags_ms: list[float] = []
        self.seconds = 0.0
        """From the first request to the last response."""
        self._stubs: list[Any] = []

    async def run(self) -> None:
        addresses = self.settings["addresses"]
        channels = [grpc.aio.insecure_channel(address) for address in addresses]
        self._stubs = [generation_pb2_grpc.GenerationServiceStub(channel) for channel in channels]
        await asyncio.gather(*(channel.channel_ready() for channel in channels))
        ticker, started = asyncio.create_task(self._tick()), time.monotonic()
        try:
            await (self._open() if self.settings["kind"] == "open" else self._closed())
            self.seconds = time.monotonic() - started
        finally:
            ticker.cancel()
            await asyncio.gather(*(channel.close() for channel in channels))

    async def _closed(self) -> None:
        numbers = iter(range(self.settings["sessions"]))

        async def one_by_one() -> None:
            for number in numbers:
                await self._session(number, time.monotonic())

        await asyncio.gather(*(one_by_one() for _ in range(self.settings["concurrency"])))

    async def _open(self) -> None:
        """Nobody waits for anybody; what was begun in time is brought to its end."""
        started, tasks = time.monotonic(), []
        for number, after_s in enumerate(self._arrivals()):
            due = started + after_s
            await asyncio.sleep(max(due - time.monotonic(), 0))
            tasks.append(asyncio.create_task(self._session(number, due)))
        await asyncio.gather(*tasks)

    def _arrivals(self) -> Iterator[float]:
        chance, after_s = random.Random(self.settings["seed"]), 0.0
        while (after_s := after_s + chance.expovariate(self.settings["arrivals_per_s"])) < (
            self.settings["max_s"]
        ):
            yield after_s

    async def _session(self, number: int, due: float) -> None:
        """One session to its end; refused ones come again where nobody but they would come."""
        key = key_of(self.settings, number)
        request = request_of(self.settings, key)
        refusals = 0
        while True:
            asked = time.monotonic()
            one = await self._ask(self._stubs[number % len(self._stubs)], request)
            again = one["refused"] and self.settings["kind"] == "closed"
            if not again or refusals >= _MAX_REFUSALS:
                break
            refusals += 1
            await asyncio.sleep((one["retry_s"] or 0.5) * (1 + random.random()))
        first, ended = one.pop("first"), time.monotonic()
        self.told.append(
            {
                "number": number,
                "key": key,
                "refusals": refusals,
                "late_ms": 1e3 * (asked - due) if not refusals else 0.0,
                "ttft_ms": round(1e3 * (first - due)) if first else 0,
                "total_ms": round(1e3 * (ended - due)),
                "last_try_ms": round(1e3 * (ended - (asked if refusals else due)), 1),
                **one,
            }
        )

    async def _ask(self, stub: Any, request: generation_pb2.GenerateRequest) -> dict[str, Any]:
        ids: list[int] = []
        fault = refused = code = ""
        first, retry_s, last = 0.0, None, generation_pb2.GenerateResponse()
        try:
            async for response in stub.Generate(request, timeout=_TIMEOUT_S):
                if response.token_ids:
                    if response.offset != len(ids):
                        fault = f"token {len(ids)} was due, {response.offset} came"
                    first = first or time.monotonic()
                    ids += response.token_ids
                last = response
        except grpc.aio.AioRpcError as error:
            code = error.code().name
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and not ids:
                refused, retry_s = error.details() or "without a reason", retry_after_s(error)
            else:
                fault = f"{code} {error.details()}"
        usage = last.usage
        if not fault and not refused and usage.completion_tokens != len(ids):
            fault = f"{usage.completion_tokens} tokens were counted, {len(ids)} came"
        return {
            "fault": fault,
            "refused": refused,
            "code": code,
            "retry_s": retry_s,
            "first": first,
            "rounds": usage.speculation.rounds,
            "ids": " ".join(map(str, ids)),
            "prompt": usage.prompt_tokens,
            "cached": usage.cached_prompt_tokens,
        }

    async def _tick(self) -> None:
        """How late this loop is at what it wants to do."""
        while True:
            due = time.monotonic() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self.lags_ms.append(1e3 * (time.monotonic() - due))


def retry_after_s(error: grpc.aio.AioRpcError) -> float | None:
    """Of google.rpc.RetryInfo among the status's details; None where there is none."""
    for name, value in error.trailing_metadata() or ():
        if name == "grpc-status-details-bin":
            info = error_details_pb2.RetryInfo()
            for detail in status_pb2.Status.FromString(value).details:
                if detail.Unpack(info):
                    return float(info.retry_delay.ToTimedelta().total_seconds())
    return None


def main() -> None:
    settings = json.loads(sys.argv[1])
    crowd = Crowd(settings)
    asyncio.run(crowd.run())
    told = {
        "sessions": crowd.told,
        "seconds": crowd.seconds,
        "lags_ms": crowd.lags_ms,
        "cpu_s": time.process_time(),
    }
    with open(settings["told"], "w", encoding="utf-8") as file:
        json.dump(told, file)


if __name__ == "__main__":
    main()
