"""The controller beside every fixed length on a running stack, category by category.

    python benchmarks/by_category.py    # the demo pair, this CPU: about 18 minutes
    python benchmarks/by_category.py --prompts 1 --long 1 --lengths 0,2 --max-tokens 24    # a try

Each prompt of Spec-Bench is answered by every fixed k and by the controller in turn, twice, the
order turning round, with one seed, so that all say the same tokens; before them once unmeasured, so
that both tiers have it. Prompts come in rounds of one a category: the controller serves them mixed,
as a stack does. It begins after `--warm` other prompts, as on a stack that has served a while.

The ratio is the controller's speed over all prompts of a category to that of the category's best
fixed k. The best of several is the luckiest, too: so the best k is picked by the first answers and
compared in the second, and the other way round, and both count. Beside it stands the ratio in which
every round counts as rounds of its length do on average in this run, whoever had them: the same
guesses and verdicts without the machine's noise.

Two mixtures change in mid-stream. `long`: answers that go on behind their end to `--long-tokens`,
into other text or into saying the same again; the share of guesses that k accepts is told by
quarters. `conversation`: a kept session whose turns are prompts of four categories one after the
other, the easiest and the hardest to guess by turns.

Speeds are of decoding: tokens after the first over the time after it. The bar is 0.95 for each
category and mixture, with rounds at their averages; the exit status tells whether it holds.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from outrider.bench.machine import describe_machine
from outrider.bench.prompts import BenchPrompt, default_prompts, read_prompts, select_evenly
from outrider.bench.systems import client_prompt
from outrider.cli.stack import LocalStack, StackConfig
from outrider.client import Completion, GenerationOptions, OutriderClient, RoundReport

BAR = 0.95
OURS = "controller"
REPEATS = 2
TRIMMED = 0.1
"""Share of the longest and of the shortest rounds that an average leaves out."""
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
    """A category or mixture: what each system answered, by prompt and then by repeat."""

    answers: dict[str, list[list[Completion]]] = field(default_factory=dict)

    def add(self, system: System, done: Sequence[Completion]) -> None:
        self.answers.setdefault(system.name, []).append(list(done))

    def speed(
        self, name: str, repeat: int | None = None, round_s: dict[int, float] | None = None
    ) -> float:
        """Tokens after the first over the time after it, of all prompts together; with `round_s`
        a round of each length takes so long."""
        tokens = seconds = 0.0
        for done in self._of(name, repeat):
            tokens += len(done.token_ids) - 1
            if round_s is None:
                seconds += (done.last_token_s or 0.0) - (done.ttft_s or 0.0)
            else:
                seconds += sum(round_s[told.proposed] for told in done.rounds[1:])
        return tokens / seconds if seconds else 0.0

    @property
    def fixed(self) -> list[str]:
        return [name for name in self.answers if name != OURS]

    @property
    def ratio(self) -> float:
        """Geometric mean of what each repeat says of the k that is best in the other."""
        found = []
        for repeat in range(REPEATS):
            best = self.best(1 - repeat)
            found.append(self.speed(OURS, repeat) / self.speed(best, repeat))
        return statistics.geometric_mean(found)

    def best(self, repeat: int | None = None) -> str:
        return max(self.fixed, key=lambda name: self.speed(name, repeat))

    def even_ratio(self, round_s: dict[int, float]) -> tuple[float, str]:
        """Over the best fixed k, and which that is."""
        speeds = {name: self.speed(name, round_s=round_s) for name in self.answers}
        best = max(self.fixed, key=lambda name: speeds[name])
        return speeds[OURS] / speeds[best], best

    @property
    def num_differing(self) -> int:
        """Answers that are not those of the first system."""
        first, *others = [list(self._of(name)) for name in self.answers]
        pairs = chain.from_iterable(zip(first, other, strict=True) for other in others)
        return sum(a.token_ids != b.token_ids for a, b in pairs)

    def rounds(self) -> Iterable[RoundReport]:
        """All but those of prompts."""
        for name in self.answers:
            for done in self._of(name):
                yield from done.rounds[1:]

    def _of(self, name: str, repeat: int | None = None) -> Iterable[Completion]:
        answers = self.answers[name]
        return chain.from_iterable(answers[repeat::REPEATS] if repeat is not None else answers)


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
        for repeat in range(REPEATS):
            onwards = (number + repeat) % 2 == 0
            for system in self.systems if onwards else self.systems[::-1]:
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
            report_rounds=True,
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
        for prompt in select_evenly(prompts[1:], args.warm):
            await run.speak(prompt, systems[-1], 0)
        await by_category(run)
        if args.long:
            await long_answers(run)
            await conversations(run)
    found, round_s = run.found, average_rounds(run.found.values())
    print("a round, ms: " + ", ".join(f"k={k} {1e3 * round_s[k]:.1f}" for k in sorted(round_s)))
    even = {name: one.even_ratio(round_s) for name, one in found.items()}
    for name, (ratio, best) in even.items():
        print(f"{name}: with rounds at their averages {ratio:.3f} of {best}")
    if args.json:
        args.json.write_text(
            json.dumps({name: report(one, even[name][0]) for name, one in found.items()})
        )
    failures = [f"{name}: {ratio:.3f}" for name, (ratio, _) in even.items() if ratio < BAR]
    failures += [
        f"{name}: {one.num_differing} answers differ by system"
        for name, one in found.items()
        if one.num_differing
    ]
    for failure in failures:
        print(f"FAILED: {failure}")
    as_timed, averaged = (
        [one.ratio for one in found.values()],
        [ratio for ratio, _ in even.values()],
    )
    for how, ratios in ("as timed", as_timed), ("rounds at their averages", averaged):
        print(
            f"controller over the best fixed k, {how}: {min(ratios):.3f} at least, "
            f"{statistics.mean(ratios):.3f} on average"
        )
    print(f"{time.monotonic() - started:.0f} s")
    return 1 if failures else 0


def average_rounds(found: Iterable[Measured]) -> dict[int, float]:
    """Seconds of a round by guesses that it verified, without the longest and the shortest."""
    by_length: dict[int, list[float]] = {}
    for measured in found:
        for told in measured.rounds():
            by_length.setdefault(told.proposed, []).append(told.round_us / 1e6)
    averages = {}
    for length, seconds in by_length.items():
        cut = int(TRIMMED * len(seconds))
        averages[length] = statistics.mean(sorted(seconds)[cut : len(seconds) - cut])
    return averages


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
    options = {"max_tokens": run.args.long_tokens, "ignore_eos": True}
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
    order = sorted(by_name, key=lambda name: found[name].speed(last) / found[name].speed(first))
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
    told = ", ".join(f"{system} {measured.speed(system):.1f}" for system in measured.answers)
    return f"{name}: controller {measured.ratio:.3f} of {measured.best()}; tokens/s {told}"


def quarters(measured: Measured) -> str:
    """Of the last answer of the longest fixed length."""
    name = measured.fixed[-1]
    rounds = measured.answers[name][-1][-1].rounds
    size = max(len(rounds) // QUARTERS, 1)
    parts = [rounds[start : start + size] for start in range(0, size * QUARTERS, size)]
    shares = [
        sum(r.accepted for r in part) / max(sum(r.proposed for r in part), 1) for part in parts
    ]
    return f"{name} accepts {', '.join(f'{share:.2f}' for share in shares)} by quarters"


def report(measured: Measured, even_ratio: float) -> dict[str, Any]:
    return {
        "speeds": {name: measured.speed(name) for name in measured.answers},
        "best": measured.best(),
        "ratio": measured.ratio,
        "even_ratio": even_ratio,
        "rounds": {
            name: [
                [(told.proposed, told.accepted, told.round_us) for told in done.rounds]
                for done in chain.from_iterable(answers)
            ]
            for name, answers in measured.answers.items()
        },
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", default="demo")
    parser.add_argument("--file", type=Path, help="prompts; default: Spec-Bench, as shipped")
    parser.add_argument("--prompts", type=int, default=4, help="of each category")
    parser.add_argument("--long", type=int, default=3, help="of each mixture")
    parser.add_argument("--warm", type=int, default=13, help="prompts before, by the controller")
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
