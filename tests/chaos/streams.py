"""The streams that faults are to disturb, what undisturbed ones say, and how the two compare."""

import asyncio
import dataclasses
import hashlib
import itertools
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.client import (
    Completion,
    GenerationChunk,
    GenerationOptions,
    OutriderClient,
    ResumePolicy,
    collect,
)
from outrider.errors import OutriderError
from outrider.types import Durability

STREAMS = 20
POOL = 64
STREAM_S = 60.0
"""Deadline of one stream."""

_WORDS = (
    "river stone lantern copper meadow signal harbour winter thread orchard glass ember".split()
)


@dataclass(frozen=True, slots=True)
class Spec:
    """What decides what a stream says."""

    prompt: str
    temperature: float
    seed: int
    max_tokens: int

    @property
    def key(self) -> str:
        return json.dumps(dataclasses.astuple(self))


@dataclass(frozen=True, slots=True)
class Said:
    """What an undisturbed stream says."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str

    @classmethod
    def of(cls, done: Completion) -> "Said":
        return cls(done.token_ids, done.text, done.finish_reason.value)


def pool() -> tuple[Spec, ...]:
    """All streams there are: half greedy, half drawn at temperature 1."""
    rng = random.Random("streams")
    specs = []
    for number in range(POOL):
        words = " ".join(rng.choices(_WORDS, k=rng.randint(2, 9)))
        specs.append(
            Spec(
                prompt=f"{number}: {words}",
                temperature=float(number % 2),
                seed=rng.getrandbits(31),
                max_tokens=rng.randint(120, 300),
            )
        )
    return tuple(specs)


class References:
    """What undisturbed streams say, by plain decoding; made once for a pair of models."""

    def __init__(self, said: Mapping[str, Said]) -> None:
        self._said = said

    def of(self, spec: Spec) -> Said:
        return self._said[spec.key]

    @classmethod
    async def load(cls, client: OutriderClient, cache: Path) -> "References":
        [model] = await client.list_models()
        specs = pool()
        digest = hashlib.sha256(model.model_fingerprint.encode())
        digest.update("\n".join(spec.key for spec in specs).encode())
        path = cache / f"said-{digest.hexdigest()[:16]}.json"
        if path.exists():
            known = json.loads(path.read_text())
            return cls({k: Said(tuple(ids), text, why) for k, (ids, text, why) in known.items()})
        gate = asyncio.Semaphore(8)

        async def one(spec: Spec) -> Said:
            async with gate:
                options = options_of(spec, num_speculative_tokens=0)
                return Said.of(await client.complete(spec.prompt, options))

        said = dict(
            zip((s.key for s in specs), await asyncio.gather(*map(one, specs)), strict=True)
        )
        cache.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".new")
        scratch.write_text(json.dumps({k: dataclasses.astuple(v) for k, v in said.items()}))
        scratch.rename(path)
        return cls(said)


def options_of(spec: Spec, **more: Any) -> GenerationOptions:
    return GenerationOptions(
        max_tokens=spec.max_tokens,
        ignore_eos=True,
        temperature=spec.temperature,
        seed=spec.seed,
        **more,
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """One stream of a schedule: what it says, how it is served, when it starts, by which client."""

    spec: Spec
    start_s: float
    client: int
    durability: Durability
    num_speculative_tokens: int | None

    def describe(self) -> str:
        k = "controller" if self.num_speculative_tokens is None else self.num_speculative_tokens
        drawn = "T=1" if self.spec.temperature else "greedy"
        return (
            f"{self.spec.prompt!r}, {self.spec.max_tokens} tokens, {drawn}, k {k}, "
            f"{self.durability.value}, client {self.client}, at {self.start_s:.2f} s"
        )


def plans_of(rng: random.Random, *, num_clients: int) -> tuple[Plan, ...]:
    """The streams of one schedule."""
    specs = rng.sample(pool(), STREAMS)
    return tuple(
        Plan(
            spec=spec,
            start_s=0.0 if number < STREAMS // 2 else rng.uniform(0.0, 1.2),
            client=number % num_clients,
            durability=rng.choice(list(Durability)),
            num_speculative_tokens=rng.choice([None, None, 1, 3, 5]),
        )
        for number, spec in enumerate(specs)
    )


@dataclass
class Ended:
    """What became of a stream. `problem` says what differs from what it should have said."""

    plan: Plan
    chunks: list[GenerationChunk] = field(default_factory=list)
    started: float = 0.0
    ended: float = 0.0
    error: OutriderError | None = None
    completion: Completion | None = None
    problem: str = ""

    @property
    def resumes(self) -> int:
        return self.chunks[-1].resumes if self.chunks else 0

    @property
    def undurable(self) -> bool:
        """It was told something that the store did not have."""
        return any(not chunk.durable for chunk in self.chunks)

    @property
    def longest_gap_s(self) -> float:
        """The longest time without a token, the first one's not counted."""
        times = [chunk.elapsed_s for chunk in self.chunks if chunk.token_ids]
        return max((b - a for a, b in itertools.pairwise(times)), default=0.0)


def clients_of(addresses: Sequence[str], number: int) -> list[str]:
    """The addresses in the order in which a client tries them."""
    turn = number % len(addresses)
    return [*addresses[turn:], *addresses[:turn]]


RESUME = ResumePolicy(give_up_after_s=40.0)


async def run_stream(client: OutriderClient, plan: Plan, references: References) -> Ended:
    """Read one stream to its end, and compare."""
    ended = Ended(plan, started=time.monotonic())
    options = options_of(
        plan.spec,
        num_speculative_tokens=plan.num_speculative_tokens,
        durability=plan.durability,
    )
    try:
        async for chunk in client.generate(plan.spec.prompt, options, timeout_s=STREAM_S):
            ended.chunks.append(chunk)
        ended.completion = collect(ended.chunks)
    except OutriderError as error:
        ended.error = error
    ended.ended = time.monotonic()
    ended.problem = _difference(ended, references.of(plan.spec))
    return ended


def _difference(ended: Ended, said: Said) -> str:
    """How a stream, or the part of it that came, differs from the undisturbed one; "" if not."""
    ids = tuple(token for chunk in ended.chunks for token in chunk.token_ids)
    text = "".join(chunk.text for chunk in ended.chunks)
    if ended.completion is None:
        said = Said(said.token_ids[: len(ids)], said.text[: len(text)], "")
    if ids != said.token_ids:
        pairs = list(zip(ids, said.token_ids, strict=False))
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        return (
            f"{len(ids)} tokens where {len(said.token_ids)} were due; from token {first} on "
            f"{ids[first : first + 6]} for {said.token_ids[first : first + 6]}"
        )
    if text != said.text:
        return f"its text differs: {text[-40:]!r} for {said.text[-40:]!r}"
    if ended.completion is not None and ended.completion.finish_reason.value != said.finish_reason:
        return f"it ended by {ended.completion.finish_reason.value}, not {said.finish_reason}"
    return ""
