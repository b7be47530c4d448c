"""Where guessing pays sometimes, or pipelining never: what the controller loses by trying.

    python benchmarks/no_worse.py    # the demo pair on this CPU: about 5 minutes

*Swinging load*: phases of one session and of many take turns (`--sessions`), each session with one
answer a phase; guesses pay for one and not for many. The same phases with the controller and with
plain decoding make a pair, in turn, the first of them cold; the median of the pairs counts, bar
0.97 of plain decoding's tokens per second.

*Pipelining on shared cores*: draft and target of a local stack share them. First what preparing
ahead makes of a fixed k, over the same k without, in interleaved pairs. Left to itself the
orchestrator must prepare nothing ahead. Where a request allows it (`fan_out`) and it loses, the
controller must find that out: it prepares in fewer than one round in five of the last answers.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from outrider.bench.machine import describe_machine
from outrider.bench.prompts import BenchPrompt, default_prompts, read_prompts, select_evenly
from outrider.bench.systems import client_prompt
from outrider.cli.stack import LocalStack, StackConfig
from outrider.client import Completion, GenerationOptions, OutriderClient

LEAST = 0.97
MOST_AHEAD = 0.2
FAN_OUT, K = 4, 3
ANSWERS = 8
"""Of each variant of pipelining."""


async def main() -> int:
    args = parse()
    machine, started = describe_machine(), time.monotonic()
    print(f"{machine['processor']}, {machine['cores']} cores", flush=True)
    prompts = select_evenly(read_prompts(default_prompts()), 13)
    # Long prompts would measure how long prompts take.
    prompts = sorted(prompts, key=lambda prompt: len(prompt.text))[:8]
    async with (
        LocalStack(StackConfig(), on_event=lambda event: None) as stack,
        await OutriderClient.connect(address=stack.addresses[0]) as client,
    ):
        failures = await swinging(client, prompts, args)
        failures += await pipelining(client, prompts, args)
    for failure in failures:
        print(f"FAILED: {failure}")
    print(f"{'bars missed' if failures else 'all bars held'}; {time.monotonic() - started:.0f} s")
    return 1 if failures else 0


async def swinging(
    client: OutriderClient, prompts: Sequence[BenchPrompt], args: argparse.Namespace
) -> list[str]:
    for prompt in prompts:  # So that no turn has to compute prompts that others find.
        await answer(client, prompt, 0, args, max_tokens=2)
    ratios = []
    for turn in range(args.repeats):
        order = (None, 0) if turn % 2 == 0 else (0, None)
        made = {k: await phases(client, prompts, k, args) for k in order}
        # All say as many tokens, so times tell.
        ratios.append(sum(made[0]) / sum(made[None]))
        by_phase = ", ".join(
            f"{n} at once {plain / own:.2f}"
            for n, own, plain in zip(args.sessions, made[None], made[0], strict=True)
        )
        print(f"swinging load, pair {turn + 1}: {ratios[-1]:.3f} of plain ({by_phase})", flush=True)
    median = statistics.median(ratios)
    print(f"swinging load: {median:.3f} of plain ({min(ratios):.2f} to {max(ratios):.2f})")
    return [f"swinging load: {median:.3f} of plain"] if median < LEAST else []


async def phases(
    client: OutriderClient, prompts: Sequence[BenchPrompt], k: int | None, args: argparse.Namespace
) -> list[float]:
    """Seconds of each phase."""
    took = []
    for sessions in args.sessions:
        began = time.perf_counter()
        await asyncio.gather(
            *(answer(client, prompts[i % len(prompts)], k, args) for i in range(sessions))
        )
        took.append(time.perf_counter() - began)
    return took


async def pipelining(
    client: OutriderClient, prompts: Sequence[BenchPrompt], args: argparse.Namespace
) -> list[str]:
    ratios = []
    for number in range(max(args.repeats, 5)):
        prompt, order = prompts[number % len(prompts)], (0, FAN_OUT)
        speeds = {
            fan_out: speed(await answer(client, prompt, K, args, fan_out=fan_out))
            for fan_out in (order if number % 2 else order[::-1])
        }
        ratios.append(speeds[FAN_OUT] / speeds[0])
    gain = statistics.median(ratios)
    told = f"{gain:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    print(f"pipelining, k={K} with fan-out {FAN_OUT} over without: {told}", flush=True)
    failures = []
    for fan_out, most in ((None, 0.0), (FAN_OUT, MOST_AHEAD if gain < LEAST else 1.0)):
        done = [
            await answer(client, prompt, None, args, fan_out=fan_out, report_rounds=True)
            for prompt in prompts[:ANSWERS]
        ]
        rounds = [report for one in done[ANSWERS // 2 :] for report in one.rounds]
        share = sum(report.hit is not None for report in rounds) / max(len(rounds), 1)
        name = "left to itself" if fan_out is None else f"with fan-out {fan_out} allowed"
        print(f"pipelining, {name}: {share:.1%} of {len(rounds)} rounds prepared", flush=True)
        if share > most:
            failures.append(f"pipelining, {name}: {share:.1%} of rounds are prepared for")
    return failures


async def answer(
    client: OutriderClient,
    prompt: BenchPrompt,
    k: int | None,
    args: argparse.Namespace,
    **more: int | bool | None,
) -> Completion:
    options = GenerationOptions(
        max_tokens=args.max_tokens,
        ignore_eos=True,
        temperature=0.0,
        num_speculative_tokens=k,
    )
    return await client.complete(client_prompt(prompt), replace(options, **more))


def speed(done: Completion) -> float:
    """Tokens after the first one, per second."""
    return (len(done.token_ids) - 1) / ((done.last_token_s or 0.0) - (done.ttft_s or 0.0))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--sessions",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[1, 8, 1, 8],
        help="at once, phase by phase",
    )
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7, help="pairs")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
