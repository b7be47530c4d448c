"""What the planner and the simulator foretell, beside what a running stack does.

    python benchmarks/predictions.py                       # the demo pair, on this CPU: 12 minutes
    python benchmarks/predictions.py --target synthetic:8b,eps=0.01 --draft synthetic:1b \
        --devices cuda:0,cuda:1                            # two cards: under 5 minutes

The planner measures the pair alone and foretells the acceptance of each position, the best k and
each k's gain over plain decoding. A stack serves the same prompts with the same seeds: plainly,
with each k and as the controller chooses, in turns. The simulator gets the rounds that were
recorded there and foretells the tokens per second of each. Passes are fitted to all rounds, and so
are proposals; where these are hidden behind passes they cost what the planner measured. Acceptance
is that of the longest k.

Speeds are of decoding: tokens after the first over the time after it. Each turn is all prompts by
every system, prompt by prompt; a gain is that of a turn, and the median of the turns counts. Bars:
acceptance within 0.05, best k within 1, speeds and gains within 15%. The exit status tells whether
they hold.

On GPUs the planner works while the stack starts (on the target's card, where both fit), on a CPU
before. Prompts of a synthetic pair are random tokens.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from outrider.bench.machine import describe_machine
from outrider.bench.prompts import BenchPrompt, default_prompts, read_prompts, select_evenly
from outrider.bench.recording import traced
from outrider.bench.runner import SystemRun
from outrider.bench.systems import OutriderSystem, RequestResult
from outrider.cli import plan
from outrider.cli.stack import LocalStack, StackConfig
from outrider.client import GenerationOptions, OutriderClient
from outrider.planner.predict import Forecast, Setting, forecast
from outrider.planner.values import COUPLED, GREEDY, Measurement, PairCosts, Prompt, Request
from outrider.speculation.length import Mode
from outrider.speculation.processes import estimate
from outrider.speculation.replay import OURS, PLAIN, Scenario, fixed, policy, run, world_of
from outrider.speculation.traces import Trace
from outrider.speculation.world import Result
from outrider.types import SamplingParams, SpeculationStats

ACCEPTANCE_BAR, K_BAR, SPEED_BAR = 0.05, 1, 0.15

SYNTHETIC = "synthetic:"
PROMPT_TOKENS = 64
"""Of a synthetic pair's prompts."""

_KINDS = {"measured": "measured_gain", "planned": "planned_gain", "simulated": "simulated"}
_PACES = {"cpu": (8, 56), "cuda": (7, 96)}
"""Prompts, and tokens of an answer, unless told otherwise."""


class Turns(NamedTuple):
    """What each system made, a run a turn."""

    runs: dict[str, list[SystemRun]]

    def speeds(self, name: str) -> list[float]:
        return [speed(run_) for run_ in self.runs[name]]

    def gain(self, name: str) -> float:
        pairs = zip(self.speeds(name), self.speeds(PLAIN), strict=True)
        return statistics.median(own / plain for own, plain in pairs)


async def main() -> int:
    args = parse()
    machine, started = describe_machine(), time.monotonic()
    print(f"{machine['processor']}, {machine['cores']} cores; {args.devices}", flush=True)
    prompts = prompts_of(args)
    err = Console(stderr=True)
    on_gpus = args.devices.startswith("cuda")
    report: list[dict[str, Any]] = []
    async with contextlib.AsyncExitStack() as stack:
        planning = asyncio.create_task(plan.measured(request(args, prompts), err))
        stack.callback(planning.cancel)
        if not on_gpus:
            await planning
        client = await stack.enter_async_context(serving(args))
        found = await planning
        print(
            f"planner: {found.device}, {found.dtype}, {len(found.samples)} texts; both ready after "
            f"{time.monotonic() - started:.0f} s",
            flush=True,
        )
        separate = len(set(args.devices.split(","))) > 1
        mode = Mode.PIPELINED if separate else Mode.SEQUENTIAL
        for temperature in args.temperatures:
            turns = await measure(client, prompts, temperature, args)
            report.append(compare(found, turns, temperature, mode, args))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    failures = [failure for part in report for failure in part["failures"]]
    for failure in failures:
        print(f"FAILED: {failure}")
    print(f"{'bars missed' if failures else 'all bars held'}; {time.monotonic() - started:.0f} s")
    return 1 if failures else 0


def prompts_of(args: argparse.Namespace) -> Sequence[BenchPrompt]:
    """Spec-Bench's, or words of a synthetic tokenizer, one a token."""
    if not args.target.startswith(SYNTHETIC):
        return select_evenly(read_prompts(args.prompts or default_prompts()), args.limit)
    from outrider.engine.synthetic import SHAPES, parse

    vocab = SHAPES[parse(args.target)[0]].vocab
    return [
        BenchPrompt(
            str(number),
            "random",
            " ".join(f"t{i}" for i in random.Random(number).choices(range(vocab), k=PROMPT_TOKENS)),
            chat=False,
        )
        for number in range(args.limit)
    ]


@contextlib.asynccontextmanager
async def serving(args: argparse.Namespace) -> AsyncIterator[OutriderClient]:
    async with (
        LocalStack(stack_config(args), on_event=lambda event: None) as stack,
        await OutriderClient.connect(address=stack.addresses[0]) as client,
    ):
        yield client


def request(args: argparse.Namespace, prompts: Sequence[BenchPrompt]) -> Request:
    return Request(
        target=args.target,
        draft=args.draft,
        dtype="auto",
        threads=0,
        prompts=[Prompt(p.id, p.category, p.text, p.chat) for p in prompts],
        given="",
        limit=len(prompts),
        max_tokens=args.max_tokens,
        ignore_eos=args.ignore_eos,
        sampling=SamplingParams(temperature=max(args.temperatures) or 1.0, seed=args.seed),
        sessions=1,
        k_max=max(args.lengths),
        with_costs=True,
    )


def stack_config(args: argparse.Namespace) -> StackConfig:
    target, draft = args.devices.split(",")
    env = {"OUTRIDER_TARGET_DEVICE": target, "OUTRIDER_DRAFT_DEVICE": draft}
    if target.startswith("cuda"):
        for tier in ("TARGET", "DRAFT"):
            env[f"OUTRIDER_{tier}_CONTEXT_LENGTH"] = "2048"
            env[f"OUTRIDER_{tier}_KV_MEMORY"] = "4GiB"
            env[f"OUTRIDER_{tier}_MAX_ROWS"] = "128"
    return StackConfig(target=args.target, draft=args.draft, start_timeout_s=400, env=env)


async def measure(
    client: OutriderClient,
    prompts: Sequence[BenchPrompt],
    temperature: float,
    args: argparse.Namespace,
) -> Turns:
    """Plain decoding, each k and the controller, in turns; alternatives are not asked for, since
    nobody foretells them."""
    base = GenerationOptions(
        max_tokens=args.max_tokens,
        temperature=temperature,
        ignore_eos=args.ignore_eos,
        alternatives=0,
        report_rounds=True,
    )
    lengths = {PLAIN: 0, **{fixed(k): k for k in args.lengths}, OURS: None}
    systems = [
        OutriderSystem(name, client, dataclasses.replace(base, num_speculative_tokens=k))
        for name, k in lengths.items()
    ]
    print(f"\nT={temperature:g}", flush=True)
    turns: dict[str, list[SystemRun]] = {name: [] for name in lengths}
    for system in systems:
        await system.run(prompts[0], args.seed)
    for turn in range(args.repeats):
        for name, run_ in (await one_turn(systems, prompts, turn, args.seed)).items():
            turns[name].append(run_)
        told = [f"{name} {speed(own[-1]):.1f}" for name, own in turns.items()]
        print(f"turn {turn + 1} of {args.repeats}, tokens/s: {', '.join(told)}", flush=True)
    return Turns(turns)


async def one_turn(
    systems: Sequence[OutriderSystem], prompts: Sequence[BenchPrompt], turn: int, seed: int
) -> dict[str, SystemRun]:
    """All prompts by every system, prompt by prompt, the order of the systems alternating."""
    results: dict[str, list[RequestResult]] = {system.name: [] for system in systems}
    for number, prompt in enumerate(prompts):
        for system in systems if (turn + number) % 2 == 0 else systems[::-1]:
            results[system.name].append(await system.run(prompt, seed + number))
    return {name: SystemRun(name, tuple(done), 0.0) for name, done in results.items()}


def compare(
    found: Measurement,
    turns: Turns,
    temperature: float,
    mode: Mode,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """One temperature, printed and as an object."""
    assert found.costs is not None
    contexts = [sample.context_len for sample in found.samples]
    setting = Setting(found.costs, 1, sum(contexts) // len(contexts))
    track = COUPLED if temperature else GREEDY
    planned = forecast(found.samples, track, setting, k_max=max(args.lengths))
    simulated = simulate(turns, mode, max(args.lengths), found.costs)
    rows = [_row(name, planned, mode, simulated, turns) for name in turns.runs]
    print("          tokens/s: measured, simulated; gain over plain: measured, planned")
    for row in rows:
        print(_line(row), flush=True)
    best = {kind: _best(rows, key) for kind, key in _KINDS.items()}
    off = {kind: abs(k - best["measured"]) for kind, k in best.items()}
    told = [f"{kind} {k}{_mark(off[kind] > K_BAR)}" for kind, k in best.items()]
    print(f"best k: {', '.join(told)}", flush=True)
    failures = [f"T={temperature:g}: {text}" for row in rows for text in _missed(row)]
    failures += [
        f"T={temperature:g}: best k is {best['measured']}, {kind} {best[kind]}"
        for kind in best
        if off[kind] > K_BAR
    ]
    return {
        "temperature": temperature,
        "mode": mode.value,
        "rows": rows,
        "best": best,
        "failures": failures,
    }


def _missed(row: Mapping[str, Any]) -> list[str]:
    """The bars that a system's row does not hold."""
    name, found = row["system"], []
    pairs = {
        "simulated tokens/s": (row["simulated"], row["measured"]),
        "planned gain": (row["planned_gain"], row["measured_gain"]),
    }
    for what, (foretold, measured) in pairs.items():
        if foretold is not None and abs(foretold / measured - 1.0) > SPEED_BAR:
            found.append(f"{name}, {what}: {foretold:.2f}, measured {measured:.2f}")
    if row["accepted"] and (worst := _off(row)) > ACCEPTANCE_BAR:
        found.append(f"{name}, planned acceptance: off by {worst:.3f}")
    return found


def _off(row: Mapping[str, Any]) -> float:
    """How far planned acceptance is from what was counted, at the worst position."""
    pairs = zip(row["accepted"], row["planned_accepted"], strict=True)
    return max((abs(a - b) for a, b in pairs), default=0.0)


def _best(rows: Sequence[dict[str, Any]], key: str) -> int:
    """The fastest fixed length, plain decoding included, as measured or as foretold."""
    speeds = {row["system"]: row[key] for row in rows if row["system"] != OURS}
    name = max(speeds, key=lambda system: speeds[system])
    return 0 if name == PLAIN else int(name.removeprefix("k="))


def _row(
    name: str, planned: Forecast, mode: Mode, simulated: dict[str, float], turns: Turns
) -> dict[str, Any]:
    length = planned.lengths[int(name[2:]) - 1] if name.startswith("k=") else None
    gain = None
    if length is not None:
        gain = length.pipelined if mode is Mode.PIPELINED else length.sequential
    return {
        "system": name,
        "measured": statistics.median(turns.speeds(name)),
        "simulated": simulated[name],
        "measured_gain": turns.gain(name),
        "planned_gain": 1.0 if name == PLAIN else gain,
        "accepted": survival(turns.runs[name]) if length else [],
        "planned_accepted": list(accumulate(length.acceptance, mul)) if length else [],
    }


def _line(row: dict[str, Any]) -> str:
    off = row["simulated"] / row["measured"] - 1.0
    text = f"{row['system']:8} {row['measured']:7.1f} {row['simulated']:7.1f} ({off:+.0%}"
    text += _mark(abs(off) > SPEED_BAR) + f")   {row['measured_gain']:5.2f}"
    if row["planned_gain"] is not None:
        off = row["planned_gain"] / row["measured_gain"] - 1.0
        text += f" {row['planned_gain']:5.2f} ({off:+.0%}{_mark(abs(off) > SPEED_BAR)})"
    if row["accepted"]:
        pairs = list(zip(row["accepted"], row["planned_accepted"], strict=True))
        worst = max(abs(a - b) for a, b in pairs)
        told = ", ".join(f"{a:.2f}/{b:.2f}" for a, b in pairs)
        text += f"   accepted {told} (off by {worst:.3f}{_mark(worst > ACCEPTANCE_BAR)})"
    return text


def _mark(is_over: bool) -> str:
    return " !" if is_over else ""


def speed(run_: SystemRun) -> float:
    """Tokens per second after the first one, of one session at a time."""
    tokens = seconds = 0.0
    for result in run_.results:
        if result.ttft_s is not None and result.last_token_s is not None:
            tokens += len(result.token_ids) - 1
            seconds += result.last_token_s - result.ttft_s
    return tokens / seconds if seconds else 0.0


def survival(runs: Sequence[SystemRun]) -> list[float]:
    """Of the guesses at each position, the share that was accepted."""
    usages = (result.usage for run_ in runs for result in run_.results)
    stats = sum((u.speculation for u in usages if u is not None), SpeculationStats())
    pairs = zip(stats.accepted_by_position, stats.proposed_by_position, strict=True)
    return [accepted / proposed for accepted, proposed in pairs]


def simulate(turns: Turns, mode: Mode, k_max: int, costs: PairCosts) -> dict[str, float]:
    """Tokens per second of each system, replayed: costs from all rounds, acceptance from the
    longest fixed length; as many turns as were measured, several times over."""
    longest = [session for run_ in turns.runs[fixed(k_max)] for session in traced(run_)]
    sessions = tuple(
        session for runs in turns.runs.values() for run_ in runs for session in traced(run_)
    )
    lines = {"draft": _hidden_draft(costs, k_max)} if mode is Mode.PIPELINED else {}
    world = world_of(Trace(mode.value, lines, sessions), mode)
    processes = estimate(Trace(mode.value, {}, tuple(longest)), k_max=k_max + 1)
    found = {}
    for name in turns.runs:
        results = [
            run(world, processes, policy(name, world, k_max), Scenario(), seed) for seed in range(4)
        ]
        total = sum((r for result in results for r in result.values()), Result())
        found[name] = total.decoded_per_s
    return found


def _hidden_draft(costs: PairCosts, k_max: int) -> dict[str, float]:
    """A proposal that is prepared ahead, as the planner measured it: rounds tell of waits alone. A
    pass over the pending guesses comes first; an outcome is a row of each further step."""
    draft = costs.draft
    return {
        "base": draft.base + costs.ask_s + draft.slope,
        "slope": draft.slope,
        "other_slope": draft.other_slope * (k_max + 1) / 2,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", default="demo")
    parser.add_argument("--devices", default="cpu,cpu", help="the target's, the draft's")
    parser.add_argument("--prompts", type=Path, help="default: Spec-Bench, as shipped")
    parser.add_argument("--limit", type=int, help="prompts; default: 8, on GPUs 7")
    parser.add_argument("--max-tokens", type=int, help="default: 56, on GPUs 96")
    parser.add_argument("--repeats", type=int, default=5, help="turns of all systems")
    parser.add_argument("--lengths", type=_numbers, default=[1, 2, 3, 4, 5])
    parser.add_argument("--temperatures", type=_numbers, default=[0, 1])
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    limit, max_tokens = _PACES["cuda" if args.devices.startswith("cuda") else "cpu"]
    args.limit, args.max_tokens = args.limit or limit, args.max_tokens or max_tokens
    return args


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
