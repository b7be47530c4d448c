"""The controller beside every fixed length on a running stack, category by category.

    python benchmarks/by_category.py    # the demo pair, this CPU: about 14 minutes
    python benchmarks/by_category.py --prompts 1 --long 1 --lengths 0,2 --max-tokens 24    # a try

Each prompt of Spec-Bench is answered by every fixed k and by the controller in turn, the order
alternating, with one seed, so that all say the same tokens; before them once unmeasured, so that
both tiers have it. Prompts come in rounds of one a category: the controller serves them mixed, as a
stack does. A ratio is that of a prompt, the controller's speed over that of the fixed k that is
best for the category; the median of the prompts counts. (The best of several is the luckiest too,
so ratios are low by what noise there is.)

Two mixtures change in mid-stream. `long`: answers that go on behind their end to `--long-tokens`,
into other text or into saying the same again; the share of guesses that k accepts is told by
quarters. `conversation`: a kept session whose turns are prompts of four categories one after the
other, the easiest and the hardest to guess by turns.

Speeds are of decoding: tokens after the first over the time after it. The bar is 0.95 for each
category and mixture; the exit status tells whether it holds.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from outrider.bench.machine import describe_machine
from outrider.bench.prompts import BenchPrompt, default_prompts, read_prompts, select_evenly
from outrider.bench.systems import client_prompt
from outrider.cli.stack import LocalStack, StackConfig
from outrider.client import Completion, GenerationOptions, OutriderClient

BAR = 0.95
OURS = "controller"
LONG, CONVERSATION = "long", "conversation"
TURNS, TURN_TOKENS = 4, 32
QUARTERS = 4


@dataclass(frozen=True, slots=True)
class System:
    """A fixed length, or the controller's choice (None)."""

    name: str
    k: int | None


Play = Callable[[System], Awaitable[list[Completion]]]
"""Has a system answer; all answers that belong to one measurement."""


@dataclass
class Measured:
    """A category or mixture: speeds by system, a number a prompt."""

    speeds: dict[str, list[float]] = field(default_factory=dict)
    answers: dict[str, list[Completion]] = field(default_factory=dict)

    def add(self, system: System, done: Sequence[Completion]) -> None:
        tokens = sum(len(one.token_ids) - 1 for one in done)
        seconds = sum((one.last_token_s or 0.0) - (one.ttft_s or 0.0) for one in done)
        self.speeds.setdefault(system.name, []).append(tokens / seconds if seconds else 0.0)
        self.answers.setdefault(system.name, []).extend(done)

    def total(self, name: str) -> float:
        """Harmonic, prompts alike: the speed over all of them."""
        return statistics.harmonic_mean(self.speeds[name])

    @property
    def best(self) -> str:
        return max((name for name in self.speeds if name != OURS), key=self.total)

    @property
    def ratio(self) -> float:
        pairs = zip(self.speeds[OURS], self.speeds[self.best], strict=True)
        return statistics.median(own / best for own, best in pairs if best)

    @property
    def num_differing(self) -> int:
        """Answers that are not those of the first system."""
        first, *others = self.answers.values()
        pairs = chain.from_iterable(zip(first, other, strict=True) for other in others)
        return sum(a.token_ids != b.token_ids for a, b in pairs)


@dataclass(frozen=True, slots=True)
class Run:
    """What is measured: everything here at one stack, by turns."""

    client: OutriderClient
    prompts: Sequence[BenchPrompt]
    systems: Sequence[System]
    args: argparse.Namespace
    found: dict[str, Measured] = field(default_factory=dict)

    async def by_turns(self, name: str, number: int, play: Play) -> None:
        """One measurement of each system."""
        measured = self.found.setdefault(name, Measured())
        for system in self.systems if number % 2 == 0 else self.systems[::-1]:
            measured.add(system, await play(system))

    async def alone(self, name: str, number: int, prompt: BenchPrompt, **more: Any) -> None:
        """One measurement of each system: its answer to a prompt."""

        async def play(system: System) -> list[Completion]:
            return [await self.speak(prompt, system, number, **more)]

        # Both tiers have the prompt: whoever guessed first would wait for the draft to read it.
        await self.speak(prompt, self.systems[-2], number, **more | {"max_tokens": 8})
        await self.by_turns(name, number, play)

    async def speak(
        self, prompt: BenchPrompt, system: System, seed: int, **more: Any
    ) -> Completion:
        options = GenerationOptions(
            max_tokens=self.args.max_tokens,
            temperature=self.args.temperature,
            seed=seed,
            num_speculative_tokens=system.k,
        )
        return await self.client.complete(client_prompt(prompt), replace(options, **more))


async def main() -> int:
    args = parse()
    machine, started = describe_machine(), time.monotonic()
    print(f"{machine['processor']}, {machine['cores']} cores; T={args.temperature:g}", flush=True)
    systems = [*(System(f"k={k}", k) for k in args.lengths), System(OURS, None)]
    prompts = read_prompts(args.file or default_prompts())
    config = StackConfig(target=args.target, draft=args.draft)
    async with (
        LocalStack(config, on_event=lambda event: None) as stack,
        await OutriderClient.connect(address=stack.addresses[0]) as client,
    ):
        run = Run(client, prompts, systems, args)
        for system in systems:
            await run.speak(prompts[0], system, 0)
        await by_category(run)
        if args.long:
            await long_answers(run)
            await conversations(run)
    found = run.found
    if args.json:
        args.json.write_text(json.dumps({name: report(one) for name, one in found.items()}))
    failures = [
        f"{name}: {one.ratio:.3f} of {one.best}" for name, one in found.items() if one.ratio < BAR
    ]
    failures += [
        f"{name}: {one.num_differing} answers differ by system"
        for name, one in found.items()
        if one.num_differing
    ]
    for failure in failures:
        print(f"FAILED: {failure}")
    ratios = [one.ratio for one in found.values()]
    print(
        f"controller over the best fixed k: {min(ratios):.3f} at least, "
        f"{statistics.mean(ratios):.3f} on average; {time.monotonic() - started:.0f} s"
    )
    return 1 if failures else 0


async def by_category(run: Run) -> None:
    names = dict.fromkeys(prompt.category for prompt in run.prompts)
    chosen = select_evenly(run.prompts, len(names) * run.args.prompts)
    for number, prompt in enumerate(chosen):
        await run.alone(prompt.category, number, prompt)
        last_round = number >= len(chosen) - len(names)
        if last_round:
            print(row(prompt.category, run.found[prompt.category]), flush=True)


async def long_answers(run: Run) -> None:
    """Each from another category."""
    options = {"max_tokens": run.args.long_tokens, "ignore_eos": True, "report_rounds": True}
    for number, prompt in enumerate(select_evenly(run.prompts, run.args.long)):
        await run.alone(LONG, number, prompt, **options)
        print(f"  long, {prompt.category}: {quarters(run.found[LONG])}", flush=True)
    print(row(LONG, run.found[LONG]), flush=True)


async def conversations(run: Run) -> None:
    lengths, found = run.args.lengths, run.found
    by_name: dict[str, list[BenchPrompt]] = {}
    for prompt in run.prompts:
        by_name.setdefault(prompt.category, []).append(prompt)
    # By what guesses bring: the longest fixed length's speed over the shortest's.
    first, last = f"k={min(lengths)}", f"k={max(lengths)}"
    order = sorted(by_name, key=lambda name: found[name].total(last) / found[name].total(first))
    turns = [order[0], order[-1]] * (TURNS // 2)
    for number in range(run.args.long):

        async def play(system: System, number: int = number) -> list[Completion]:
            done: list[Completion] = []
            for turn, name in enumerate(turns):
                prompt = by_name[name][(number * TURNS + turn) % len(by_name[name])]
                session = {"session_id": done[-1].session_id} if done else {}
                kept = {"keep_session": turn + 1 < len(turns), "max_tokens": TURN_TOKENS}
                done.append(await run.speak(prompt, system, number, **kept, **session))
            return done

        await run.by_turns(CONVERSATION, number, play)
    print(row(f"{CONVERSATION} ({turns[0]}, {turns[1]})", found[CONVERSATION]), flush=True)


# --- what is told ---------------------------------------------------------------------------------


def row(name: str, measured: Measured) -> str:
    told = ", ".join(f"{system} {measured.total(system):.1f}" for system in measured.speeds)
    spread = [
        own / best
        for own, best in zip(measured.speeds[OURS], measured.speeds[measured.best], strict=True)
    ]
    return (
        f"{name}: controller {measured.ratio:.3f} of {measured.best} "
        f"({min(spread):.2f} to {max(spread):.2f}); tokens/s {told}"
    )


def quarters(measured: Measured) -> str:
    """Of the last answer of the longest fixed length."""
    name = [system for system in measured.speeds if system != OURS][-1]
    rounds = measured.answers[name][-1].rounds
    size = max(len(rounds) // QUARTERS, 1)
    parts = [rounds[start : start + size] for start in range(0, size * QUARTERS, size)]
    shares = [
        sum(r.accepted for r in part) / max(sum(r.proposed for r in part), 1) for part in parts
    ]
    return f"{name} accepts {', '.join(f'{share:.2f}' for share in shares)} by quarters"


def report(measured: Measured) -> dict[str, Any]:
    return {"speeds": measured.speeds, "best": measured.best, "ratio": measured.ratio}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", default="demo")
    parser.add_argument("--file", type=Path, help="prompts; default: Spec-Bench, as shipped")
    parser.add_argument("--prompts", type=int, default=5, help="of each category")
    parser.add_argument("--long", type=int, default=5, help="of each mixture")
    parser.add_argument("--lengths", type=numbers, default=[0, 1, 2, 3, 4, 5])
    parser.add_argument("--max-tokens", type=int, default=56)
    parser.add_argument("--long-tokens", type=int, default=192)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
