"""What the planner and the simulator foretell, beside what a running stack does.

    python benchmarks/predictions.py                       # the demo pair, on this CPU
    python benchmarks/predictions.py --target synthetic:8b,eps=0.01 --draft synthetic:1b \
        --devices cuda:0,cuda:1 --limit 8 --max-tokens 192 --ignore-eos

The planner measures the pair first, alone, and foretells the acceptance of each position, the best
k and each k's gain over plain decoding. Then a stack serves the same prompts with the same seeds:
plainly, with each k and as the controller chooses, in turns. The simulator gets the rounds that
were recorded there (costs are fitted to all of them, acceptance is that of the longest k) and
foretells the tokens per second of each. Speeds are of decoding: tokens after the first over the
time after it. Bars: acceptance within 0.05, best k within 1, speeds within 15%.
"""

import argparse
import asyncio
import dataclasses
import json
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

from rich.console import Console

from outrider.bench.prompts import BenchPrompt, default_prompts, read_prompts, select_evenly
from outrider.bench.recording import traced
from outrider.bench.runner import SystemRun, run_interleaved
from outrider.bench.systems import OutriderSystem
from outrider.cli import plan
from outrider.cli.stack import LocalStack, StackConfig
from outrider.client import GenerationOptions, OutriderClient
from outrider.planner.predict import Forecast, Setting, forecast
from outrider.planner.values import COUPLED, GREEDY, Measurement, Prompt, Request
from outrider.speculation.length import Mode
from outrider.speculation.processes import estimate
from outrider.speculation.replay import OURS, PLAIN, Scenario, fixed, policy, run, world_of
from outrider.speculation.traces import Trace
from outrider.speculation.world import Result
from outrider.types import SamplingParams, SpeculationStats

ACCEPTANCE_BAR, K_BAR, SPEED_BAR = 0.05, 1, 0.15

_KINDS = {"measured": "measured", "planned": "planned_gain", "simulated": "simulated"}


async def main() -> None:
    args = parse()
    err = Console(stderr=True)
    prompts = select_evenly(read_prompts(args.prompts or default_prompts()), args.limit)
    found = await plan.measured(request(args, prompts), err)
    print(f"planner: {found.device}, {found.dtype}, {len(found.samples)} texts", flush=True)
    separate = len(set(args.devices.split(","))) > 1
    mode = Mode.PIPELINED if separate else Mode.SEQUENTIAL
    report = []
    async with (
        LocalStack(stack_config(args), on_event=lambda event: None) as stack,
        await OutriderClient.connect(address=stack.addresses[0]) as client,
    ):
        for temperature in args.temperatures:
            runs = await measure(client, prompts, temperature, args)
            report.append(compare(found, runs, temperature, mode, args))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


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
            env[f"OUTRIDER_{tier}_CONTEXT_LENGTH"] = "4096"
            env[f"OUTRIDER_{tier}_KV_MEMORY"] = "4GiB"
    return StackConfig(target=args.target, draft=args.draft, start_timeout_s=400, env=env)


async def measure(
    client: OutriderClient,
    prompts: Sequence[BenchPrompt],
    temperature: float,
    args: argparse.Namespace,
) -> dict[str, SystemRun]:
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
    runs = await run_interleaved(systems, prompts, seed=args.seed)
    return {run.system: run for run in runs}


def compare(
    found: Measurement,
    runs: dict[str, SystemRun],
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
    speeds = {name: speed(run) for name, run in runs.items()}
    simulated = simulate(runs, mode, max(args.lengths))
    rows = [_row(name, planned, mode, speeds, simulated, runs[name]) for name in runs]
    print(
        f"\nT={temperature:g}   tokens/s: measured, simulated; gain over plain: measured, planned"
    )
    for row in rows:
        print(_line(row), flush=True)
    best = {kind: _best(rows, key) for kind, key in _KINDS.items()}
    off = {kind: abs(k - best["measured"]) for kind, k in best.items()}
    told = [f"{kind} {k}{_mark(off[kind] > K_BAR)}" for kind, k in best.items()]
    print(f"best k: {', '.join(told)}", flush=True)
    return {"temperature": temperature, "mode": mode.value, "rows": rows, "best": best}


def _best(rows: Sequence[dict[str, Any]], key: str) -> int:
    """The fastest fixed length, plain decoding included, as measured or as foretold."""
    speeds = {row["system"]: row[key] for row in rows if row["system"] != OURS}
    name = max(speeds, key=lambda system: speeds[system])
    return 0 if name == PLAIN else int(name.removeprefix("k="))


def _row(
    name: str,
    planned: Forecast,
    mode: Mode,
    speeds: dict[str, float],
    simulated: dict[str, float],
    run_: SystemRun,
) -> dict[str, Any]:
    length = planned.lengths[int(name[2:]) - 1] if name.startswith("k=") else None
    gain = None
    if length is not None:
        gain = length.pipelined if mode is Mode.PIPELINED else length.sequential
    return {
        "system": name,
        "measured": speeds[name],
        "simulated": simulated[name],
        "measured_gain": speeds[name] / speeds[PLAIN],
        "planned_gain": 1.0 if name == PLAIN else gain,
        "accepted": survival(run_) if length else [],
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


def survival(run_: SystemRun) -> list[float]:
    """Of the guesses at each position, the share that was accepted."""
    usages = (result.usage for result in run_.results)
    stats = sum((u.speculation for u in usages if u is not None), SpeculationStats())
    pairs = zip(stats.accepted_by_position, stats.proposed_by_position, strict=True)
    return [accepted / proposed for accepted, proposed in pairs]


def simulate(runs: dict[str, SystemRun], mode: Mode, k_max: int) -> dict[str, float]:
    """Tokens per second of each system, replayed: costs from all rounds, acceptance from the
    longest fixed length; the same sessions several times over."""
    longest = traced(runs[fixed(k_max)])
    sessions = tuple(session for run_ in runs.values() for session in traced(run_))
    world = world_of(Trace(mode.value, {}, sessions), mode)
    processes = estimate(Trace(mode.value, {}, tuple(longest)), k_max=k_max + 1)
    found = {}
    for name in runs:
        results = [
            run(world, processes, policy(name, world, k_max), Scenario(), seed) for seed in range(4)
        ]
        total = sum((r for result in results for r in result.values()), Result())
        found[name] = total.decoded_per_s
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", default="demo")
    parser.add_argument("--devices", default="cpu,cpu", help="the target's, the draft's")
    parser.add_argument("--prompts", type=Path, help="default: Spec-Bench, as shipped")
    parser.add_argument("--limit", type=int, default=13)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--lengths", type=_numbers, default=[1, 2, 3, 4, 5])
    parser.add_argument("--temperatures", type=_numbers, default=[0, 1])
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    asyncio.run(main())
