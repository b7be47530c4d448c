"""Plain against speculative decoding of the synthetic pair, draft and target in processes of their
own over gRPC, on whatever GPU is there.

    python benchmarks/gpu_pair.py --eps 0.01 --variants 4,4+1 --batches 1,8,32 --temperatures 0,1
    python benchmarks/gpu_pair.py --devices cuda:0,cuda:1 --variants 4,4@8,r4,r4@8 --batches 1
    python benchmarks/gpu_pair.py --target 70b --tensor-parallel 2 --devices cuda,cuda:2 \\
        --eps 0.00335 --variants 4,8@8 --batches 1,8 --modes coupled,rejection
    python benchmarks/gpu_pair.py --target tiny --draft tiny-draft --devices cpu,cpu \\
        --variants 4,4@8,r4,r4@8,auto,rauto --batches 1 --kv-memory 64MiB --max-tokens 64

A variant is k, k@fan-out, k+alternatives, or auto (the server's choice). With an r before it the
orchestrator asks the draft and selects among what it has prepared (`--drafting relayed`); else the
target does. The workers are the same ones: two kinds of orchestrators stand before them.

Prompts are 64 random token ids, answers 256 tokens with the end-of-sequence token ignored. Each
figure is printed when it is known; plain decoding and the variants take turns, `--repeats` times,
and the median counts. A batch is that many callers; each makes `--waves` requests one after the
other (sessions that guess do not end together, so with one wave the last ones have the card alone).
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

from outrider.cli.process import Child
from outrider.cli.stack import PROGRAMS, LocalStack, StackConfig
from outrider.client import Completion, GenerationOptions, OutriderClient
from outrider.engine.synthetic import SHAPES
from outrider.types import VerificationMode
from outrider.worker.gathering import DEFAULT_MAX_PASSES

PROMPT_TOKENS = 64


class Variant(NamedTuple):
    """Guesses a round, outcomes that the draft prepares for, next-best guesses beside each guess
    (None: the server's choice), and whether the orchestrator asks the draft."""

    k: int | None
    fan_out: int | None
    alternatives: int | None
    relayed: bool = False

    @property
    def options(self) -> GenerationOptions:
        return GenerationOptions(
            num_speculative_tokens=self.k, fan_out=self.fan_out, alternatives=self.alternatives
        )

    def __str__(self) -> str:
        by = ", asked by the orchestrator" if self.relayed else ""
        if self.k is None:
            return f"auto{by}"
        if not self.k:
            return "plain"
        ahead = f", {self.fan_out} outcomes ahead" if self.fan_out else ""
        beside = f", {self.alternatives} beside each" if self.alternatives else ""
        return f"k={self.k}{ahead}{beside}{by}"


class Callers(NamedTuple):
    """Clients of orchestrators before the same workers, by who asks the draft, and the processes
    of all."""

    direct: list[OutriderClient]
    relayed: list[OutriderClient]
    pids: dict[str, int]

    def client(self, number: int, variant: Variant) -> OutriderClient:
        clients = self.relayed if variant.relayed else self.direct
        return clients[number % len(clients)]


async def main() -> None:
    args = parse()
    target_device, draft_device = args.devices.split(",")
    target_weights, draft_weights = args.quantize.split(",")
    config = StackConfig(
        target=f"synthetic:{args.target},eps={args.eps}",
        draft=f"synthetic:{args.draft}",
        dtype="auto",
        start_timeout_s=400,
        num_orchestrators=args.orchestrators,
        env={
            "OUTRIDER_TARGET_DEVICE": target_device,
            "OUTRIDER_DRAFT_DEVICE": draft_device,
            "OUTRIDER_TARGET_CONTEXT_LENGTH": "2048",
            "OUTRIDER_DRAFT_CONTEXT_LENGTH": "2048",
            "OUTRIDER_TARGET_KV_MEMORY": args.kv_memory,
            "OUTRIDER_DRAFT_KV_MEMORY": args.kv_memory,
            "OUTRIDER_TARGET_GATHER_PASSES": str(args.gather),
            "OUTRIDER_DRAFT_GATHER_PASSES": str(args.gather),
            "OUTRIDER_TARGET_MAX_ROWS": "256",
            "OUTRIDER_DRAFT_MAX_ROWS": "256",
        }
        | {"OUTRIDER_TARGET_TENSOR_PARALLEL": str(args.tensor_parallel)}
        | ({"OUTRIDER_TARGET_QUANTIZE": target_weights} if target_weights != "none" else {})
        | ({"OUTRIDER_DRAFT_QUANTIZE": draft_weights} if draft_weights != "none" else {}),
    )
    started = time.monotonic()
    async with LocalStack(
        config, on_event=lambda event: print(event.step.value, event.name)
    ) as stack:
        print(f"start-up {time.monotonic() - started:.1f} s", flush=True)
        count = args.orchestrators if any(v.relayed for v in args.variants) else 0
        async with relaying(stack, count) as relays:
            pids = {service.name: service.pid for service in stack.services}
            callers = Callers(
                [await OutriderClient.connect(address=address) for address in stack.addresses],
                [await OutriderClient.connect(address=address) for address in relays],
                pids
                | {child.name: child.pid for child in relays.values()}
                | {"client": os.getpid()},
            )
            for mode, temperature in product(args.modes, args.temperatures):
                if mode is VerificationMode.REJECTION and not temperature:
                    continue  # Greedy decoding is the same in both modes.
                for batch in args.batches:
                    await compare(callers, batch, temperature, mode, args)


@contextlib.asynccontextmanager
async def relaying(stack: LocalStack, count: int) -> AsyncIterator[dict[str, Child]]:
    """So many orchestrators more, by address, that ask the stack's drafts by themselves."""
    flags = ["--drafting", "relayed", "--store-url", stack.store_url, "--host", "127.0.0.1"]
    for service in stack.services:
        if service.role in ("target", "draft"):
            flags += [f"--{service.role}s", service.address]
    children: dict[str, Child] = {}
    try:
        for number in range(count):
            name = f"relay-{number}"
            ready = stack.log_dir / f"{name}.ready"
            command = (*PROGRAMS["orchestrator"], *flags, "--port", "0", "--ready-file", str(ready))
            log = stack.log_dir / f"{name}.log"
            child = await Child.start(name, command, log, stack.config.env)
            while not ready.exists():
                if child.returncode is not None:
                    raise SystemExit(child.log_tail())
                await asyncio.sleep(0.05)
            children[json.loads(ready.read_text())["address"]] = child
        yield children
    finally:
        await asyncio.gather(*(child.stop(10) for child in children.values()))


async def compare(
    callers: Callers,
    batch: int,
    temperature: float,
    mode: VerificationMode,
    args: argparse.Namespace,
) -> None:
    """Interleaved runs of one batch size."""
    variants = [Variant(0, 0, 0), *args.variants]
    rates: dict[Variant, list[float]] = {variant: [] for variant in variants}
    busy: dict[Variant, str] = {}
    last: dict[Variant, list[Completion]] = {}
    for repeat in range(args.repeats):
        for variant in variants:
            before = cpu_seconds(callers.pids)
            started = time.perf_counter()
            last[variant] = await asyncio.gather(
                *(
                    caller(
                        callers.client(i, variant),
                        1000 * repeat + i,
                        replace(variant.options, temperature=temperature, mode=mode),
                        args,
                    )
                    for i in range(batch)
                )
            )
            seconds = time.perf_counter() - started
            tokens = args.waves * sum(len(done.token_ids) for done in last[variant])
            rates[variant].append(tokens / seconds)
            used = cpu_seconds(callers.pids)
            busy[variant] = ", ".join(
                f"{name} {(used[name] - before[name]) / seconds:.0%}" for name in used
            )
    plain = variants[0]
    base = statistics.median(rates[plain])
    sampling = f"T={temperature:g} {mode.value}" if temperature else "T=0"
    for variant in variants:
        rate = statistics.median(rates[variant])
        ratios = [r / p for r, p in zip(rates[variant], rates[plain], strict=True)]
        pairs = zip(last[plain], last[variant], strict=True)
        same = sum(a.token_ids == b.token_ids for a, b in pairs)
        print(
            f"{sampling} batch {batch} {variant}: {rate:.1f} tok/s, {rate / base:.2f} x "
            f"(pairs {min(ratios):.2f} to {max(ratios):.2f}); {per_card(rate, variant, args)}; "
            f"passes saved {passes_saved(last[variant]):.0%}; {rounds_of(last[variant])}; "
            f"same ids {same} of {batch}; cores {busy[variant]}",
            flush=True,
        )


def per_card(rate: float, variant: Variant, args: argparse.Namespace) -> str:
    """Tokens a second of each card in use; plain decoding leaves a draft's card to others."""
    target_device, draft_device = args.devices.split(",")
    first = int(target_device.partition(":")[2] or 0)
    targets = {first + rank for rank in range(args.tensor_parallel)}
    drafts = {int(draft_device.partition(":")[2] or 0)} if variant.k != 0 else set[int]()
    cards = len(targets | drafts)
    return f"{rate / cards:.1f} a card of {cards}"


def passes_saved(done: list[Completion]) -> float:
    """The share of target passes that plain decoding would need besides."""
    tokens = sum(len(each.token_ids) for each in done)
    return 1.0 - sum(each.stats.rounds for each in done) / max(tokens, 1)


def rounds_of(done: list[Completion]) -> str:
    """What a round of the first answer consisted of."""
    stats, time_ = done[0].stats, done[0].usage.time
    rounds = max(stats.rounds, 1)
    hits = stats.buffer_hit_rate
    whole, waited, inside, drafting, verifying = (
        us / rounds / 1e3
        for us in (
            time_.rounds_us,
            time_.draft_us,
            time_.draft_worker_us,
            time_.draft_compute_us,
            time_.verify_compute_us,
        )
    )
    return (
        f"mean acceptance length {stats.mean_acceptance_length:.2f}, round {whole:.2f} ms: draft "
        f"waited for {waited:.2f} (of it in the draft {inside:.2f}; computing {drafting:.2f}), "
        f"verify {verifying:.2f}"
        + (f"; buffer hit {hits:.2f}" if hits is not None else "")
        + f"; first token {statistics.median(d.ttft_s or 0 for d in done) * 1e3:.0f} ms"
    )


def cpu_seconds(pids: dict[str, int]) -> dict[str, float]:
    """Processor time of each process so far."""
    ticks = os.sysconf("SC_CLK_TCK")
    found = {}
    for name, pid in pids.items():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        found[name] = (int(fields[11]) + int(fields[12])) / ticks
    return found


async def caller(
    client: OutriderClient,
    number: int,
    options: GenerationOptions,
    args: argparse.Namespace,
) -> Completion:
    """`--waves` requests in a row; the last answer."""
    for wave in range(args.waves):
        seed = number + 100_000 * wave
        prompt = random.Random(seed).choices(range(SHAPES[args.target].vocab), k=PROMPT_TOKENS)
        options = replace(options, seed=seed, max_tokens=args.max_tokens, ignore_eos=True)
        done = await client.complete(prompt, options)
    return done


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="8b")
    parser.add_argument("--draft", default="1b")
    parser.add_argument("--eps", type=float, default=0.01)
    parser.add_argument(
        "--variants",
        type=variants,
        default=[Variant(4, 0, 0)],
        help="k, k@fan-out, k+alternatives, or auto, each with an r before it or not; by commas",
    )
    parser.add_argument("--devices", default="cuda:0,cuda:0", help="the target's, the draft's")
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, help="ranks of the target; its device is cuda"
    )
    parser.add_argument(
        "--modes",
        type=lambda text: [VerificationMode(part) for part in text.split(",")],
        default=[VerificationMode.COUPLED],
        help="coupled, rejection; by commas",
    )
    parser.add_argument("--quantize", default="none,none", help="the target's, the draft's")
    parser.add_argument("--batches", type=numbers, default=[1, 8, 32])
    parser.add_argument("--temperatures", type=numbers, default=[0, 1])
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--orchestrators", type=int, default=1, help="processes; callers take turns"
    )
    parser.add_argument("--waves", type=int, default=1, help="requests of each caller in a row")
    parser.add_argument("--kv-memory", default="8GiB")
    parser.add_argument(
        "--gather",
        type=float,
        default=DEFAULT_MAX_PASSES,
        help="see --gather-passes of workers",
    )
    return parser.parse_args()


def variants(text: str) -> list[Variant]:
    found = []
    for part in text.split(","):
        relayed, part = part.startswith("r"), part.removeprefix("r")
        if part == "auto":
            found.append(Variant(None, None, None, relayed))
            continue
        part, _, fan_out = part.partition("@")
        k, _, alternatives = part.partition("+")
        found.append(Variant(int(k), int(fan_out or 0), int(alternatives or 0), relayed))
    return found


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    asyncio.run(main())
