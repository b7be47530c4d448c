"""What telemetry costs the real stack, in tokens a second: `python benchmarks/telemetry_cost.py`.

Two stacks of the demo pair run side by side: one with telemetry off, one with a Prometheus endpoint
that is scraped every second, and traces and metrics sent by OTLP to a collector on this machine,
which throws them away. They are asked in turn, in pairs whose order alternates, so that whatever
else the machine does falls on both; the figure is the median of the pairs' ratios. All requests are
traced, rounds as `trace_every` has it (32).
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import AsyncIterator
from concurrent import futures
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Side:
    """A stack, and where its metrics are; none where telemetry is off."""

    client: OutriderClient
    metrics: tuple[str, ...]

    async def turn(self, args: argparse.Namespace, texts: list[str]) -> float:
        """Tokens a second of `args.sessions` streams at once, prefills included."""
        options = GenerationOptions(max_tokens=args.max_tokens, ignore_eos=True, temperature=0.0)

        async def one(number: int) -> int:
            text = texts[number % len(texts)]
            done = await self.client.complete([Message("user", text)], options)
            return len(done.token_ids)

        scraper = asyncio.create_task(self._scrape()) if self.metrics else None
        started = time.perf_counter()
        tokens = sum(await asyncio.gather(*map(one, range(args.sessions))))
        rate = tokens / (time.perf_counter() - started)
        if scraper is not None:
            scraper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await scraper
        return rate

    async def _scrape(self) -> None:
        while True:
            found = await scrape_all(self.metrics)
            assert not any(scrape.error for scrape in found), found
            await asyncio.sleep(SCRAPE_EVERY_S)


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
        yield Side(client, found)


async def measure(args: argparse.Namespace) -> list[tuple[float, float]]:
    """Off and on, tokens a second, pair by pair."""
    prompts = select_evenly(read_prompts(default_prompts()), args.sessions)
    texts = [prompt.text for prompt in prompts]
    with collector() as endpoint:
        async with side(args, "") as off, side(args, endpoint) as on:
            for each in (off, on):
                await each.turn(args, texts)
            pairs = []
            for number in range(args.pairs):
                order = (off, on) if number % 2 == 0 else (on, off)
                rates = {id(each): await each.turn(args, texts) for each in order}
                pairs.append((rates[id(off)], rates[id(on)]))
                without, with_it = pairs[-1]
                print(
                    f"{number + 1:>3}  off {without:8.1f}  on {with_it:8.1f} tok/s  "
                    f"{with_it / without:.3f}",
                    flush=True,
                )
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", default="demo")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--sessions", type=int, default=4, help="streams at once")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    # What this shell is told of telemetry is not for the side that has none.
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        del os.environ[name]
    pairs = asyncio.run(measure(args))
    ratios = [on / off for off, on in pairs]
    median, (low, _, high) = statistics.median(ratios), statistics.quantiles(ratios, n=4)
    print(f"on / off: median {median:.4f}, quartiles {low:.4f} to {high:.4f}; bar {BAR}")
    if args.json:
        settings = {k: str(v) for k, v in vars(args).items()}
        report = {"settings": settings, "machine": describe_machine(), "git": describe_git()}
        report |= {"pairs": pairs, "median": median, "quartiles": [low, high]}
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
