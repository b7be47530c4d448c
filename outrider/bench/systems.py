"""What is measured: Outrider with and without speculation, and `transformers` beside it."""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from outrider.bench.prompts import BenchPrompt
from outrider.client import (
    GenerationOptions,
    Message,
    OutriderClient,
    Prompt,
    RoundReport,
    Usage,
)
from outrider.errors import InternalError, Unavailable

MAX_LINE_BYTES = 16 * 1024 * 1024
STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class RequestResult:
    """One answer. Times are seconds from the request; `usage` where the system tells it."""

    prompt_id: str
    category: str
    token_ids: tuple[int, ...]
    ttft_s: float | None
    last_token_s: float | None
    total_s: float
    usage: Usage | None = None
    rounds: tuple[RoundReport, ...] = ()

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first one; None below two tokens."""
        if self.ttft_s is None or self.last_token_s is None or len(self.token_ids) < 2:
            return None
        return (self.last_token_s - self.ttft_s) / (len(self.token_ids) - 1)


class System(Protocol):
    """Something that answers prompts; several at once where it can."""

    name: str

    async def run(self, prompt: BenchPrompt, seed: int) -> RequestResult: ...


class OutriderSystem:
    """A stack through its client; `options` say whether it speculates."""

    def __init__(self, name: str, client: OutriderClient, options: GenerationOptions) -> None:
        self.name = name
        self._client = client
        self._options = options

    async def run(self, prompt: BenchPrompt, seed: int) -> RequestResult:
        options = dataclasses.replace(self._options, seed=seed)
        done = await self._client.complete(client_prompt(prompt), options)
        return RequestResult(
            prompt.id,
            prompt.category,
            done.token_ids,
            done.ttft_s,
            done.last_token_s,
            done.total_s,
            done.usage,
            done.rounds,
        )


class TransformersSystem:
    """`transformers` generate in a process of its own, batch 1: requests take turns.

    It gets token ids from the server, so that both see the same prompt; `command` starts
    outrider.bench.transformers_peer, which explains the lines.
    """

    def __init__(
        self,
        name: str,
        client: OutriderClient,
        options: GenerationOptions,
        command: Sequence[str],
        log: Path,
        *,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.info: dict[str, Any] = {}
        self._client = client
        self._options = options
        self._command = command
        self._log = log
        self._eos = [] if options.ignore_eos else list(eos_token_ids)
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process

    async def __aenter__(self) -> Self:
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                limit=MAX_LINE_BYTES,
            )
        try:
            self.info = await self._read()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self._stop()

    async def run(self, prompt: BenchPrompt, seed: int) -> RequestResult:
        async with self._turn:
            ids = await self._client.tokenize(client_prompt(prompt))
            request = {
                "prompt_ids": ids,
                "max_tokens": self._options.max_tokens,
                "temperature": self._options.temperature or 0.0,
                "top_k": self._options.top_k or 0,
                "top_p": 1.0 if self._options.top_p is None else self._options.top_p,
                "min_p": self._options.min_p or 0.0,
                "seed": seed,
                "eos_token_ids": self._eos,
            }
            answer = await self._ask(request)
        return RequestResult(
            prompt.id,
            prompt.category,
            tuple(answer["token_ids"]),
            answer["ttft_s"],
            answer["last_token_s"],
            answer["total_s"],
        )

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):  # Its death shows when the answer is read.
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            await self._process.stdin.drain()
        return await self._read()

    async def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            tail = self._log.read_text(errors="replace").strip().splitlines()[-1:]
            raise Unavailable(f"the {self.name} process ended: {' '.join(tail)}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise InternalError(f"{self.name}: {answer['error']}")
        return answer

    async def _stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(STOP_S):
                await self._process.wait()
        except TimeoutError:
            pass
        finally:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()


def client_prompt(prompt: BenchPrompt) -> Prompt:
    return [Message("user", prompt.text)] if prompt.chat else prompt.text
