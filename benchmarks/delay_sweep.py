"""Speculation across a slow network: tokens/s over plain decoding for each delay to the draft.

    python benchmarks/delay_sweep.py    # about 12 minutes; needs root, ip, nsenter and cc
    python benchmarks/delay_sweep.py --pairs small --delays 0,2,10 --repeats 3 --max-tokens 64

Orchestrator, target and draft are processes on hosts of their own (network namespaces, joined by
tests/chaos/link.py); what goes between the draft and either of the others is late by the delay,
each way. Each worker computes on one thread, in float32. Answers are drawn in `coupled` mode: those
of every variant must be the ids of plain decoding, or the benchmark fails.

Variants, in turn and in another order each time: plain decoding first and last, a fixed k where
the draft is asked after each verdict, the same with outcomes prepared ahead (`--fan-out`), and the
controller, which may choose either, or plain decoding. A ratio is that of a pair, to both plain
runs of the same turn together; the median of the turns counts. Of the second plain run the ratio
to the first is told: that much of a ratio is noise. After each change of the delay every variant
runs once unmeasured: none meets it new then. Where a fixed length still beats plain decoding at the
last delay, longer ones are tried (`--beyond`), in fewer turns, to find the crossover alone.

Pairs: `demo`, whose draft is cheap and whose target's pass is long against any of these delays, and
`small`, a synthetic one whose pass takes a few milliseconds, as one of a large model on a GPU does.
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from outrider.bench.machine import describe_machine
from outrider.bench.prompts import default_prompts, read_prompts, select_evenly
from outrider.bench.systems import client_prompt
from outrider.cli.process import Child
from outrider.cli.stack import PROGRAMS
from outrider.cli.store import store_command, store_program
from outrider.client import Completion, GenerationOptions, OutriderClient, Prompt
from outrider.types import SpeculationStats

ROOT = Path(__file__).resolve().parent.parent
HOSTS = ("orchestrator", "target", "draft")
PORTS = {"target": 50053, "draft": 50052}
LEAST = 0.97
"""Of plain decoding, with the controller on."""
START_S = 180.0
BEYOND_TURNS = 2
PLAIN, AGAIN, OURS = "plain", "plain again", "controller"


class Pair(NamedTuple):
    """What runs on both tiers."""

    target: str
    draft: str
    max_tokens: int
    """Of an answer, so that one takes a second or less."""
    vocabulary: int = 0
    """Of a synthetic one; prompts are random ids then."""


PAIRS = {
    "demo": Pair("demo", "demo", 24),
    "small": Pair("synthetic:small,eps=1", "synthetic:small-draft", 80, 4096),
}


class Variant(NamedTuple):
    """Guesses a round (None: the controller chooses), and outcomes that are prepared for."""

    name: str
    k: int | None
    fan_out: int


@dataclass
class Runs:
    """What a variant made of a delay."""

    rates: list[float] = field(default_factory=list)
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    def add(self, done: Sequence[Completion], seconds: float) -> None:
        self.rates.append(sum(len(one.token_ids) for one in done) / seconds)
        self.stats = sum((one.stats for one in done), self.stats)

    def ratios(self, *plain: "Runs") -> list[float]:
        """To plain decoding before and after, of each turn."""
        bases = [statistics.mean(rates) for rates in zip(*(p.rates for p in plain), strict=True)]
        return [own / base for own, base in zip(self.rates, bases, strict=True)]


Found = dict[str, Runs]
"""What the variants made of a delay, by name."""


def ratios_of(name: str, found: Found) -> list[float]:
    """Of a variant to plain decoding in each turn."""
    plain, again = found[PLAIN], found[AGAIN]
    return found[AGAIN].ratios(plain) if name == AGAIN else found[name].ratios(plain, again)


async def main() -> int:
    args = parse()
    machine, started = describe_machine(), time.monotonic()
    print(f"{machine['processor']}, {machine['cores']} cores; {args.repeats} turns", flush=True)
    failures = []
    for name in args.pairs:
        failures += await sweep(name, PAIRS[name], args)
    for failure in failures:
        print(f"FAILED: {failure}")
    verdict = "bars missed" if failures else f"all bars held (identical, at least {LEAST} x plain)"
    print(f"{verdict}; {time.monotonic() - started:.0f} s")
    return 1 if failures else 0


async def sweep(name: str, pair: Pair, args: argparse.Namespace) -> list[str]:
    """One pair over all delays; what it should have shown and did not."""
    variants = variants_of(args)
    table: dict[float, Found] = {}
    differing = 0
    with new_network() as network:
        async with serving(network, pair, args) as client:
            prompts = prompts_of(pair, args)
            common = GenerationOptions(
                max_tokens=args.max_tokens or pair.max_tokens,
                ignore_eos=True,
                temperature=args.temperature,
            )
            for delay in (*args.delays, *args.beyond):
                if delay not in args.delays and not still_faster(table):
                    break
                repeats = args.repeats if delay in args.delays else min(args.repeats, BEYOND_TURNS)
                for host in ("orchestrator", "target"):
                    network.slow(host, "draft", delay_ms=delay)
                runs, different = await measure(client, variants, prompts, common, repeats)
                table[delay] = runs
                differing += different
                print(row(name, delay, runs), flush=True)
    print(summary(name, table), flush=True)
    failures = [f"{name}: {differing} answers differ from plain decoding"] if differing else []
    for delay in args.delays:
        ratio = statistics.median(ratios_of(OURS, table[delay]))
        if ratio < LEAST:
            failures.append(f"{name}, {delay:g} ms: the controller makes {ratio:.3f} of plain")
        if not table[delay][f"k={args.k}"].stats.accepted:
            failures.append(f"{name}, {delay:g} ms: no guess was accepted, so this shows nothing")
    return failures


def still_faster(table: dict[float, Found]) -> bool:
    """Whether a fixed length beats plain decoding at the last delay."""
    found = table[max(table)]
    return any(
        statistics.median(ratios_of(name, found)) >= 1.0
        for name in found
        if name not in (PLAIN, AGAIN, OURS)
    )


async def measure(
    client: OutriderClient,
    variants: Sequence[Variant],
    prompts: Sequence[Prompt],
    common: GenerationOptions,
    repeats: int,
) -> tuple[Found, int]:
    """All variants by turns; and how many answers were not those of plain decoding."""
    runs = {variant.name: Runs() for variant in variants}
    differing = 0
    for turn in range(-1, repeats):
        answers = {}
        first, *between, last = variants
        for variant in (first, *(between if turn % 2 else between[::-1]), last):
            done, seconds = await answer(client, variant, prompts, turn, common)
            answers[variant.name] = [one.token_ids for one in done]
            if turn >= 0:
                runs[variant.name].add(done, seconds)
        expected = answers[PLAIN]
        differing += sum(
            own != other
            for found in answers.values()
            for own, other in zip(found, expected, strict=True)
        )
    return runs, differing


async def answer(
    client: OutriderClient,
    variant: Variant,
    prompts: Sequence[Prompt],
    turn: int,
    common: GenerationOptions,
) -> tuple[list[Completion], float]:
    """One prompt after the other; seconds without the prompts', which no guess makes faster."""
    done, seconds = [], 0.0
    for number, prompt in enumerate(prompts):
        options = replace(
            common,
            seed=1000 * (turn + 2) + number,
            num_speculative_tokens=variant.k,
            fan_out=variant.fan_out,
        )
        completion = await client.complete(prompt, options)
        done.append(completion)
        seconds += (completion.last_token_s or 0.0) - (completion.ttft_s or 0.0)
    return done, seconds


# --- what is told ---------------------------------------------------------------------------------


def row(name: str, delay: float, runs: Found) -> str:
    parts = [f"{name:5s} {delay:4g} ms: plain {statistics.median(runs[PLAIN].rates):6.1f} tok/s"]
    for variant, own in runs.items():
        if variant == PLAIN:
            continue
        ratios, stats = ratios_of(variant, runs), own.stats
        told = f"{variant} {statistics.median(ratios):.2f} x ({min(ratios):.2f}-{max(ratios):.2f}"
        if stats.proposed:
            length = stats.mean_acceptance_length or 0.0
            told += f", {length:.2f} tokens a round, {stats.plain / stats.rounds:.0%} plain"
        if stats.buffer_hit_rate is not None:
            told += f", hit {stats.buffer_hit_rate:.2f}"
        parts.append(f"{told})")
    return "; ".join(parts)


def summary(name: str, table: dict[float, Found]) -> str:
    """The table of ratios, and where each variant crosses plain decoding."""
    variants = [variant for variant in next(iter(table.values())) if variant != PLAIN]
    width = max(map(len, variants)) + 2
    lines = ["", f"{name}: tokens/s over plain decoding, median of pairs"]
    lines.append("ms each way" + "".join(f"{variant:>{width}}" for variant in variants))
    medians: dict[str, list[float]] = {variant: [] for variant in variants}
    for delay, runs in table.items():
        for variant in variants:
            medians[variant].append(statistics.median(ratios_of(variant, runs)))
        cells = "".join(f"{medians[variant][-1]:>{width}.2f}" for variant in variants)
        lines.append(f"{delay:>11g}{cells}")
    crossings = [
        crossover(list(table), medians[variant]) if variant != AGAIN else "" for variant in variants
    ]
    lines.append(f"{'crossover':>11}" + "".join(f"{text:>{width}}" for text in crossings))
    lines.append("")
    return "\n".join(lines)


def crossover(delays: Sequence[float], ratios: Sequence[float]) -> str:
    """The delay, by straight lines between those measured, from which on plain decoding is as
    fast."""
    if ratios[-1] >= 1.0:
        return f"> {delays[-1]:g} ms"
    above = [number for number, ratio in enumerate(ratios) if ratio >= 1.0]
    if not above:
        return f"< {delays[0]:g} ms" if delays[0] else "slower"
    last = above[-1]
    share = (ratios[last] - 1.0) / (ratios[last] - ratios[last + 1])
    return f"{delays[last] + share * (delays[last + 1] - delays[last]):.1f} ms"


# --- what runs ------------------------------------------------------------------------------------


def new_network() -> Any:
    sys.path.insert(0, str(ROOT))
    from tests.chaos.link import Network

    return Network(HOSTS)


@contextlib.asynccontextmanager
async def serving(network: Any, pair: Pair, args: argparse.Namespace) -> AsyncIterator[Any]:
    """A client of an orchestrator, on a Unix socket: between client and orchestrator nothing is
    late. So is the store, which is the orchestrator's neighbour."""
    with tempfile.TemporaryDirectory(prefix="outrider-sweep-") as name:
        folder = Path(name)
        async with contextlib.AsyncExitStack() as stack:

            async def start(host: str, role: str, command: Sequence[str], there: Path) -> None:
                child = await Child.start(
                    role, network.command(host, command), folder / f"{role}.log"
                )
                stack.push_async_callback(child.stop, 10.0)
                deadline = time.monotonic() + START_S
                while not there.exists():
                    if child.returncode is not None or time.monotonic() > deadline:
                        raise SystemExit(f"{role} does not start:\n{child.log_tail()}")
                    await asyncio.sleep(0.05)

            store = folder / "store.sock"
            command = store_command((store_program(),), 0, folder, persist=False)
            await start("orchestrator", "store", (*command, "--unixsocket", str(store)), store)
            await asyncio.gather(
                *(
                    start(
                        role, role, worker(network, role, model, folder), folder / f"{role}.ready"
                    )
                    for role, model in (("target", pair.target), ("draft", pair.draft))
                )
            )
            socket = folder / "orchestrator.sock"
            ready = folder / "orchestrator.ready"
            flags = ["--socket", str(socket), "--ready-file", str(ready)]
            flags += ["--store-url", f"unix://{store}", "--drafting", args.drafting]
            for role, port in PORTS.items():
                flags += [f"--{role}s", f"{network.address(role)}:{port}"]
            await start("orchestrator", "orchestrator", (*PROGRAMS["orchestrator"], *flags), ready)
            address = json.loads(ready.read_text())["address"]
            client = await OutriderClient.connect(address=address)
            stack.push_async_callback(client.close)
            yield client


def worker(network: Any, role: str, model: str, folder: Path) -> list[str]:
    return [
        *PROGRAMS[role],
        *("--host", network.address(role), "--port", str(PORTS[role])),
        *("--model", model, "--dtype", "float32", "--threads", "1", "--kv-memory", "256MiB"),
        *("--ready-file", str(folder / f"{role}.ready")),
    ]


def prompts_of(pair: Pair, args: argparse.Namespace) -> list[Prompt]:
    if not pair.vocabulary:
        chosen = select_evenly(read_prompts(default_prompts()), args.prompts)
        return [client_prompt(prompt) for prompt in chosen]
    numbers = range(args.prompts)
    return [random.Random(n).choices(range(pair.vocabulary), k=32) for n in numbers]


def variants_of(args: argparse.Namespace) -> list[Variant]:
    k, fan_out = args.k, args.fan_out
    return [
        Variant(PLAIN, 0, 0),
        Variant(f"k={k}", k, 0),
        Variant(f"k={k} ahead", k, fan_out),
        Variant(OURS, None, fan_out),
        Variant(AGAIN, 0, 0),
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=names, default=list(PAIRS), help=", ".join(PAIRS))
    parser.add_argument("--delays", type=numbers, default=[0, 0.5, 1, 2, 5, 10], help="ms each way")
    parser.add_argument("--beyond", type=numbers, default=[20, 40], help="for the crossover alone")
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--fan-out", type=int, default=4, help="outcomes that are prepared for")
    parser.add_argument("--repeats", type=int, default=5, help="turns of all variants")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--prompts", type=int, default=2, help="answers of a variant in a turn")
    parser.add_argument("--max-tokens", type=int, help="of an answer; default: as the pair says")
    parser.add_argument(
        "--drafting", choices=("direct", "relayed"), default="direct", help="who asks the draft"
    )
    return parser.parse_args()


def names(text: str) -> list[str]:
    unknown = set(text.split(",")) - set(PAIRS)
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is not one of {', '.join(PAIRS)}")
    return text.split(",")


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",") if part]


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
