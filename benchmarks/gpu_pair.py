"""Plain against speculative decoding of the synthetic pair, draft and target in processes of their
own over gRPC, on whatever GPU is there.

    python benchmarks/gpu_pair.py --eps 0.01 --k 4 --batches 1,8,32 --temperatures 0,1

Prompts are 64 random token ids, answers 256 tokens with the end-of-sequence token ignored. Each
figure is printed when it is known; plain and speculative take turns, `--repeats` times, and
the median counts.
"""

import argparse
import asyncio
import os
import random
import statistics
import time
from pathlib import Path

from outrider.cli.stack import LocalStack, StackConfig
from outrider.client import Completion, GenerationOptions, OutriderClient

VOCABULARY = 128_256
PROMPT_TOKENS = 64


async def main() -> None:
    args = parse()
    config = StackConfig(
        target=f"synthetic:{args.target},eps={args.eps}",
        draft=f"synthetic:{args.draft}",
        dtype="auto",
        start_timeout_s=400,
        env={
            "OUTRIDER_TARGET_CONTEXT_LENGTH": "2048",
            "OUTRIDER_DRAFT_CONTEXT_LENGTH": "2048",
            "OUTRIDER_TARGET_KV_MEMORY": args.kv_memory,
            "OUTRIDER_DRAFT_KV_MEMORY": args.kv_memory,
            "OUTRIDER_TARGET_GATHER_PASSES": str(args.gather),
            "OUTRIDER_DRAFT_GATHER_PASSES": str(args.gather),
            "OUTRIDER_TARGET_MAX_ROWS": "256",
            "OUTRIDER_DRAFT_MAX_ROWS": "256",
        },
    )
    started = time.monotonic()
    async with LocalStack(
        config, on_event=lambda event: print(event.step.value, event.name)
    ) as stack:
        print(f"start-up {time.monotonic() - started:.1f} s", flush=True)
        client = await OutriderClient.connect(address=stack.address)
        for temperature in args.temperatures:
            for batch in args.batches:
                await compare(client, stack, batch, temperature, args)


async def compare(
    client: OutriderClient,
    stack: LocalStack,
    batch: int,
    temperature: float,
    args: argparse.Namespace,
) -> None:
    """Interleaved runs of one batch size."""
    rates: dict[int, list[float]] = {0: [], args.k: []}
    busy: dict[int, str] = {}
    last: dict[int, list[Completion]] = {}
    for repeat in range(args.repeats):
        for k in rates:
            before = cpu_seconds(stack)
            started = time.perf_counter()
            last[k] = await asyncio.gather(
                *(answer(client, 1000 * repeat + i, k, temperature, args) for i in range(batch))
            )
            seconds = time.perf_counter() - started
            rates[k].append(sum(len(done.token_ids) for done in last[k]) / seconds)
            used = cpu_seconds(stack)
            busy[k] = ", ".join(
                f"{name} {(used[name] - before[name]) / seconds:.0%}" for name in used
            )
    plain, speculative = (statistics.median(rates[k]) for k in rates)
    same = sum(a.token_ids == b.token_ids for a, b in zip(last[0], last[args.k], strict=True))
    stats = last[args.k][0].stats
    usage = last[args.k][0].usage.time
    rounds = max(stats.rounds, 1)
    ttft = statistics.median(done.ttft_s or 0 for done in last[0])
    print(
        f"T={temperature:g} batch {batch}: plain {plain:.1f} tok/s, k={args.k} {speculative:.1f} "
        f"tok/s, {speculative / plain:.2f} x; mean acceptance length "
        f"{stats.mean_acceptance_length:.2f}; per round draft "
        f"{usage.draft_us / rounds / 1e3:.2f} ms "
        f"({usage.draft_compute_us / rounds / 1e3:.2f} computing), verify "
        f"{usage.verify_us / rounds / 1e3:.2f} ms ({usage.verify_compute_us / rounds / 1e3:.2f}); "
        f"plain first token {ttft * 1e3:.0f} ms; same ids {same} of {batch}\n"
        f"  cores busy: plain {busy[0]}; k={args.k} {busy[args.k]}",
        flush=True,
    )


def cpu_seconds(stack: LocalStack) -> dict[str, float]:
    """Processor time of each process so far, this one's as client's."""
    pids = {service.name: service.pid for service in stack.services} | {"client": os.getpid()}
    ticks = os.sysconf("SC_CLK_TCK")
    found = {}
    for name, pid in pids.items():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        found[name] = (int(fields[11]) + int(fields[12])) / ticks
    return found


async def answer(
    client: OutriderClient, number: int, k: int, temperature: float, args: argparse.Namespace
) -> Completion:
    prompt = random.Random(number).choices(range(VOCABULARY), k=PROMPT_TOKENS)
    options = GenerationOptions(
        max_tokens=args.max_tokens,
        ignore_eos=True,
        temperature=temperature,
        seed=number,
        num_speculative_tokens=k,
    )
    return await client.complete(prompt, options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="8b")
    parser.add_argument("--draft", default="1b")
    parser.add_argument("--eps", type=float, default=0.01)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--batches", type=numbers, default=[1, 8, 32])
    parser.add_argument("--temperatures", type=numbers, default=[0, 1])
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kv-memory", default="8GiB")
    parser.add_argument("--gather", type=float, default=4.0, help="see --gather-passes of workers")
    return parser.parse_args()


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    asyncio.run(main())
