"""What telemetry costs the real stack, in tokens a second: `python benchmarks/telemetry_cost.py`.

A block starts three fresh stacks of the demo pair: two with telemetry off, and one with a
Prometheus endpoint that is scraped every second, and traces and metrics sent by OTLP to a collector
on this machine, which throws them away. All requests are traced, rounds as `trace_every` has it
(32). The stacks are asked in turn, and their order is another one in each turn and block, so that
whatever else the machine does falls on all.

Stacks that are alike differ too, by more than the 2% that are asked about: by where their memory
and threads happen to lie. So a block gives one ratio of on over off (the mean of both), and one of
off over off, which has to be 1 but for that; many blocks average it away, and the intervals are of
resampled blocks. CPU seconds a token, as the kernel counts them for each process, say the same
less disturbed by who else uses the machine. The number of guesses is fixed, since a controller
that decides otherwise in one of the stacks would be most of what is seen.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc

from outrider.bench.machine import describe_git, describe_machine
from outrider.bench.prompts import default_prompts, read_prompts, select_evenly
from outrider.cli.scrape import scrape_all
from outrider.cli.stack import LocalStack, StackConfig
from outrider.client import GenerationOptions, Message, OutriderClient

TIERS = ("orchestrator", "target", "draft")
SCRAPE_EVERY_S = 1.0
EXPORT_EVERY_MS = 5000
BAR = 0.98
KINDS = ("off", "off again", "on")
LEVEL = 0.95
_RESAMPLES = 4000
_LEAST_BLOCKS = 5
"""Of fewer an interval says nothing."""
_TICKS = os.sysconf("SC_CLK_TCK")

Block = dict[str, dict[str, float]]
"""The figures of three stacks, by kind and name."""


def collect(ready: Connection) -> None:
    """A collector in a process of its own: takes whatever comes, and reads nothing of it."""

    class Everything(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            return grpc.unary_unary_rpc_method_handler(lambda request, context: b"")

    server = grpc.server(futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((Everything(),))
    ready.send(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    server.wait_for_termination()


@contextlib.contextmanager
def collector() -> Any:
    """Its endpoint."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=collect, args=(there,))
    process.start()
    try:
        yield f"http://127.0.0.1:{here.recv()}"
    finally:
        process.terminate()
        process.join()


@dataclass
class Side:
    """A stack, where its metrics are (nowhere where telemetry is off), and what it did so far."""

    client: OutriderClient
    pids: dict[str, int]
    """By tier."""
    metrics: tuple[str, ...]
    tokens: int = 0
    seconds: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIERS, 0.0))

    async def turn(self, args: argparse.Namespace, texts: list[str], *, counts: bool) -> None:
        """`args.sessions` streams at once; all prompts but the first turn's are cached."""
        options = GenerationOptions(
            max_tokens=args.max_tokens,
            ignore_eos=True,
            temperature=0.0,
            num_speculative_tokens=args.k,
        )

        async def one(number: int) -> int:
            text = texts[number % len(texts)]
            done = await self.client.complete([Message("user", text)], options)
            return len(done.token_ids)

        scraper = asyncio.create_task(self._scrape()) if self.metrics else None
        before, started = self._cpu_s(), time.perf_counter()
        tokens = sum(await asyncio.gather(*map(one, range(args.sessions))))
        seconds, after = time.perf_counter() - started, self._cpu_s()
        if scraper is not None:
            scraper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await scraper
        if counts:
            self.tokens += tokens
            self.seconds += seconds
            for tier in TIERS:
                self.cpu_s[tier] += after[tier] - before[tier]

    def figures(self) -> dict[str, float]:
        """Tokens a second, and microseconds of CPU a token: of each tier, and of all."""
        cpu = {tier: 1e6 * seconds / self.tokens for tier, seconds in self.cpu_s.items()}
        return {"rate": self.tokens / self.seconds, **cpu, "cpu": sum(cpu.values())}

    def _cpu_s(self) -> dict[str, float]:
        return {tier: cpu_seconds(pid) for tier, pid in self.pids.items()}

    async def _scrape(self) -> None:
        while True:
            found = await scrape_all(self.metrics)
            assert not any(scrape.error for scrape in found), found
            await asyncio.sleep(SCRAPE_EVERY_S)


def cpu_seconds(pid: int) -> float:
    """What a process has had, of user and system, all its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


@contextlib.asynccontextmanager
async def side(args: argparse.Namespace, endpoint: str) -> AsyncIterator[Side]:
    """A stack with telemetry to `endpoint`; without one, off."""
    env = {}
    if endpoint:
        env = {f"OUTRIDER_{tier.upper()}_METRICS_ADDRESS": "127.0.0.1:0" for tier in TIERS}
        env |= {f"OUTRIDER_{tier.upper()}_OTLP_ENDPOINT": endpoint for tier in TIERS}
        env["OTEL_METRIC_EXPORT_INTERVAL"] = str(EXPORT_EVERY_MS)
    config = StackConfig(target=args.target, draft=args.draft, threads=args.threads, env=env)
    async with (
        LocalStack(config) as stack,
        await OutriderClient.connect(address=stack.address) as client,
    ):
        found = tuple(str(s.info["metrics"]) for s in stack.services if "metrics" in s.info)
        assert len(found) == (len(TIERS) if endpoint else 0)
        yield Side(client, {s.role: s.pid for s in stack.services if s.role in TIERS}, found)


async def block(args: argparse.Namespace, number: int, endpoint: str, texts: list[str]) -> Block:
    """Three fresh stacks, asked in turn."""
    orders = list(itertools.permutations(KINDS))
    async with contextlib.AsyncExitStack() as running:
        stacks = (side(args, endpoint if kind == "on" else "") for kind in KINDS)
        started = await asyncio.gather(*map(running.enter_async_context, stacks))
        sides = dict(zip(KINDS, started, strict=True))
        for turn in range(-args.warm_ups, args.turns):
            for kind in orders[(number + turn) % len(orders)]:
                await sides[kind].turn(args, texts, counts=turn >= 0)
        return {kind: each.figures() for kind, each in sides.items()}


async def measure(args: argparse.Namespace) -> list[Block]:
    """The figures of all blocks, each told as it is known."""
    prompts = select_evenly(read_prompts(default_prompts()), args.sessions)
    texts = [prompt.text for prompt in prompts]
    blocks: list[Block] = []
    started, longest = time.monotonic(), 0.0
    with collector() as endpoint:
        while len(blocks) < args.blocks:
            began = time.monotonic()
            if blocks and began + longest > started + 60 * args.minutes:
                break  # The next one would not end in time.
            blocks.append(await block(args, len(blocks), endpoint, texts))
            longest = max(longest, time.monotonic() - began)
            tell(blocks, time.monotonic() - began)
    return blocks


def tell(blocks: Sequence[Block], seconds: float) -> None:
    """The latest block, and what all so far come to."""
    latest = blocks[-1]
    rates = "  ".join(f"{kind} {latest[kind]['rate']:.1f}" for kind in KINDS)
    cpu = "  ".join(f"{kind} {latest[kind]['cpu']:.0f}" for kind in KINDS)
    print(f"{len(blocks):>3} ({seconds:.0f} s)  tok/s: {rates}   CPU us/token: {cpu}", flush=True)
    if len(blocks) >= _LEAST_BLOCKS:
        for name in ("rate", "cpu"):
            on, off = interval(blocks, name, on_over_off), interval(blocks, name, off_over_off)
            print(f"      {name}: on / off {shown(on)}   off / off {shown(off)}", flush=True)


def on_over_off(latest: Block, name: str) -> float:
    """The logarithm of the ratio, to the mean of both that are off."""
    both = math.sqrt(latest["off"][name] * latest["off again"][name])
    return math.log(latest["on"][name] / both)


def off_over_off(latest: Block, name: str) -> float:
    return math.log(latest["off again"][name] / latest["off"][name])


def interval(
    blocks: Sequence[Block],
    name: str,
    ratio: Callable[[Block, str], float],
) -> tuple[float, float, float]:
    """The mean ratio of blocks, and the bounds of its interval by resampling them; wider than the
    quantiles, which are too narrow for ten blocks by what Student's are wider than normal ones."""
    logs = [ratio(each, name) for each in blocks]
    mean, drawn = statistics.fmean(logs), random.Random(0)
    means = sorted(statistics.fmean(drawn.choices(logs, k=len(logs))) for _ in range(_RESAMPLES))
    cut, wider = int((1 - LEVEL) / 2 * _RESAMPLES), _widening(len(logs))
    low, high = (mean + wider * (bound - mean) for bound in (means[cut], means[-1 - cut]))
    return math.exp(mean), math.exp(low), math.exp(high)


def _widening(number: int) -> float:
    """Of an interval by so many resampled values (the expanded percentiles of Hesterberg,
    arXiv:1411.5279, section 5.3), Student's quantile by its expansion."""
    if number < 2:
        return 1.0
    z, free = statistics.NormalDist().inv_cdf((1 + LEVEL) / 2), number - 1
    student = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    return student / z * math.sqrt(number / free)


def shown(found: tuple[float, float, float]) -> str:
    mean, low, high = found
    return f"{mean:.4f} ({low:.4f} to {high:.4f})"


def verdict(found: tuple[float, float, float], num_blocks: int) -> str:
    """Whether on over off, in tokens a second, is above the bar."""
    _, low, high = found
    if num_blocks < _LEAST_BLOCKS:
        return f"not decided: fewer than {_LEAST_BLOCKS} blocks"
    if low >= BAR:
        return "held"
    return "missed" if high < BAR else "not decided: more blocks, or a quieter machine"


def report(blocks: Sequence[Block]) -> dict[str, Any]:
    """Print what came of it; as an object."""
    found: dict[str, Any] = {"blocks": list(blocks)}
    print(f"{len(blocks)} blocks; mean ratio (and its {LEVEL:.0%} interval)")
    for name, meaning in (
        ("rate", "tokens/s"),
        ("cpu", "CPU a token, all"),
        *((tier, f"CPU a token, {tier}") for tier in TIERS),
    ):
        on, off = interval(blocks, name, on_over_off), interval(blocks, name, off_over_off)
        found[name] = {"on / off": on, "off / off": off}
        print(f"{meaning:>26}: on / off {shown(on)}   off / off {shown(off)}")
    found["verdict"] = verdict(found["rate"]["on / off"], len(blocks))
    print(f"on / off of tokens/s at least {BAR}: {found['verdict']}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", default="demo")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--sessions", type=int, default=4, help="streams at once")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--k", type=int, default=3, help="guesses of a round")
    parser.add_argument("--blocks", type=int, default=40, help="of three fresh stacks, at most")
    parser.add_argument("--minutes", type=float, default=9.5, help="no block that would end later")
    parser.add_argument("--turns", type=int, default=3, help="that count, of each stack")
    parser.add_argument("--warm-ups", type=int, default=1, help="turns before that")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    # What this shell is told of telemetry is not for the sides that have none.
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        del os.environ[name]
    found = report(asyncio.run(measure(args)))
    if args.json:
        settings = {k: str(v) for k, v in vars(args).items()}
        found |= {"settings": settings, "machine": describe_machine(), "git": describe_git()}
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
