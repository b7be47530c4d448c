"""One model on one GPU and on a group of them: the same tokens? how much faster?

    python benchmarks/gpu_group.py
    python benchmarks/gpu_group.py --model synthetic:70b --ranks 2 --alone none
    python benchmarks/gpu_group.py --sums nccl

Both run in this process's engine on the same cards and take turns, `--repeats` times; each figure
is printed when it is known, medians with their range. "decode" is plain decoding as a target does
it (`stream`: the device feeds each token to the next pass), in tokens a second. "verify" is one
pass of a round, inputs filled and picks read, in ms: here the other ranks hear of a pass only when
it is due. Tokens are compared over 128 greedy and 128 coupled ones a sequence; where they part, how
close the two best logits of one GPU were there says whether it is a near-tie.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from outrider.engine.cuda_runner import CudaRunner
from outrider.engine.loading import load_model
from outrider.engine.rows import Draw, Rows
from outrider.engine.surgery import optimise
from outrider.types import GenerationSpec, SamplingParams
from outrider.worker.crew import Crew
from outrider.worker.ranks import device_of, layout_of, settings_of
from outrider.worker.service import WorkerConfig, load, make_shard

VOCABULARY = 128_256
PROMPT = 64
BLOCKS_EACH = 16
MAX_CONTEXT = 512
STEPS = 64
COMPARED = 128
SEQUENCES = 8


def main() -> None:
    args = parse()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.model}", flush=True)
    runners: dict[str, Any] = {}
    if args.alone == "one":
        runners["1 GPU"] = timed("1 GPU", lambda: one_gpu(args))
    with group(args) as leader:
        runners[f"{args.ranks} GPUs"] = leader
        for temperature in (0.0, 1.0):
            if len(runners) == 2:
                compare_tokens(*runners.values(), temperature)
        for temperature, top_p in ((0.0, 1.0), (1.0, 1.0), (1.0, 0.95)):
            for batch in args.batches:
                spec = spec_of(temperature, top_p)
                title = f"T={temperature:g} top-p {top_p:g}, batch {batch}"
                measure(
                    f"decode {title}",
                    {
                        name: lambda r=runner, b=batch, s=spec: decode_rate(r, b, s)
                        for name, runner in runners.items()
                    },
                    args.repeats,
                    better=1,
                )
                measure(
                    f"verify k=4 {title}",
                    {
                        name: lambda r=runner, b=batch, s=spec: verify_ms(r, b, s)
                        for name, runner in runners.items()
                    },
                    args.repeats,
                    better=-1,
                )


def one_gpu(args: argparse.Namespace) -> CudaRunner:
    loaded = load_model(args.model, tier="target", dtype="bfloat16", device="cuda:0")
    optimise(loaded.model)
    runner = CudaRunner(
        loaded,
        num_blocks=BLOCKS_EACH * max(args.batches),
        max_rows=5 * max(args.batches),
        max_context=MAX_CONTEXT,
    )
    runner.warm_up()
    return runner


@contextmanager
def group(args: argparse.Namespace) -> Iterator[Any]:
    """Rank 0 of a group, in this process; the other ranks have their own."""
    config = WorkerConfig(
        model=args.model,
        dtype="bfloat16",
        device="cuda",
        tensor_parallel=args.ranks,
        group_sums=args.sums,
        kv_memory=args.kv_memory,
        max_rows=5 * max(args.batches),
        context_length=MAX_CONTEXT,
        log_json=False,
    )
    loop = asyncio.new_event_loop()

    async def make() -> Crew:
        return Crew(config, layout_of(config, {}))

    crew = loop.run_until_complete(make())
    crew.start(settings_of(config, WorkerConfig), "target")

    def build() -> Any:
        device = device_of(config.device, 0, args.ranks)
        joined = crew.meet(torch.device(device))
        loaded, limits = load(config, "target", device, joined)
        if limits.num_blocks < BLOCKS_EACH * max(args.batches):
            sys.exit(f"KV of {args.kv_memory} a rank is too little for these batches")
        made_by = "one kernel" if joined.one_shot_bytes else "NCCL"
        print(f"small sums are made by {made_by}", flush=True)
        leader = crew.lead(make_shard(loaded, limits, joined))
        crew.arm()
        return leader

    try:
        yield timed(f"{args.ranks} GPUs", build)
        crew.end_now()
    finally:
        crew.kill()
        loop.close()


def compare_tokens(alone: CudaRunner, leader: Any, temperature: float) -> None:
    """Of a few sequences, one by one, so that both have passes of the same rows."""
    parted = []
    for seed in range(SEQUENCES):
        spec = spec_of(temperature, 1.0, seed)
        one, other = (
            [row[0] for row in stream(runner, [prompt_rows(spec, seed, 0)], COMPARED)]
            for runner in (alone, leader)
        )
        if one != other:
            place = next(i for i in range(COMPARED) if one[i] != other[i])
            close = "" if temperature else f" (logits {gap(alone, seed, one[:place]):.3f} apart)"
            parted.append(f"after {place} tokens{close}")
    print(
        f"T={temperature:g}: {SEQUENCES - len(parted)} of {SEQUENCES} sequences of {COMPARED} "
        f"tokens are equal; {', '.join(parted) or 'none'} part",
        flush=True,
    )


def gap(alone: CudaRunner, seed: int, generated: list[int]) -> float:
    """Between the two best logits after these tokens."""
    tokens, start = [*prompt(seed, 0), *generated], 0
    while len(tokens) - start > 64:
        alone.forward([Rows(tokens[start : start + 64], start, range(BLOCKS_EACH), 0)])
        start += 64
    logits = alone.forward([Rows(tokens[start:], start, range(BLOCKS_EACH), 1)])
    best = logits[0].topk(2).values
    return float(best[0] - best[1])


def measure(
    title: str, cases: dict[str, Callable[[], float]], repeats: int, *, better: int
) -> None:
    figures: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats + 1):
        for name, case in cases.items():
            figures[name].append(case())
    kept = {name: values[1:] for name, values in figures.items()}
    told = [
        f"{name} {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
        for name, values in kept.items()
    ]
    if len(kept) == 2:
        one, many = (statistics.median(values) for values in kept.values())
        told.append(f"{(many / one) ** better:.2f} x")
    unit = "tok/s" if better > 0 else "ms"
    print(f"{title}, {unit}: {', '.join(told)}", flush=True)


def decode_rate(runner: Any, batch: int, spec: GenerationSpec) -> float:
    """Tokens a second of all sequences; their prompts are there."""
    for index in range(batch):
        runner.run([prompt_rows(spec, 0, index)])
    started = time.perf_counter()
    count = sum(len(row) for row in stream(runner, decode_rows(batch, spec), 2 * STEPS))
    return count / (time.perf_counter() - started)


def verify_ms(runner: Any, batch: int, spec: GenerationSpec) -> float:
    rows = [
        Rows(list(range(5)), PROMPT, blocks(index), 5, Draw(spec, PROMPT + 1))
        for index in range(batch)
    ]
    took = []
    for _ in range(20):
        started = time.perf_counter()
        runner.run(rows)
        took.append(time.perf_counter() - started)
    return statistics.median(took[5:]) * 1e3


def stream(runner: Any, batch: list[Rows], count: int) -> Iterator[list[int]]:
    """So many tokens of each entry, in streams of at most STEPS passes."""
    while count:
        steps = min(count, STEPS)
        asked = [
            Rows(r.token_ids, r.start, r.blocks, 1, Draw(r.draw.spec, r.draw.base_len, steps))
            for r in batch
            if r.draw
        ]
        last: list[int] = []
        for last in runner.stream(asked, lambda: False):
            yield last
        count -= steps
        batch = [
            Rows([pick], r.stop + steps - 1, r.blocks, 1, Draw(r.draw.spec, r.stop + steps))
            for r, pick in zip(asked, last, strict=True)
            if r.draw
        ]


def prompt_rows(spec: GenerationSpec, seed: int, index: int) -> Rows:
    """A whole prompt; the first token after it is to be drawn."""
    return Rows(prompt(seed, index), 0, blocks(index), 1, Draw(spec, PROMPT))


def decode_rows(batch: int, spec: GenerationSpec) -> list[Rows]:
    """The last token of each prompt again."""
    return [
        Rows(prompt(0, index)[-1:], PROMPT - 1, blocks(index), 1, Draw(spec, PROMPT))
        for index in range(batch)
    ]


def prompt(seed: int, index: int) -> list[int]:
    return random.Random(1000 * seed + index).choices(range(VOCABULARY), k=PROMPT)


def blocks(index: int) -> range:
    return range(index * BLOCKS_EACH, (index + 1) * BLOCKS_EACH)


def spec_of(temperature: float, top_p: float, seed: int = 1) -> GenerationSpec:
    return GenerationSpec(SamplingParams(temperature=temperature, top_p=top_p, seed=seed))


def timed(name: str, make: Callable[[], Any]) -> Any:
    started = time.perf_counter()
    made = make()
    print(f"{name}: ready after {time.perf_counter() - started:.1f} s", flush=True)
    return made


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="synthetic:8b,eps=0.01")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batches", type=numbers, default=[1, 32])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sums", default="auto", choices=("auto", "nccl"))
    parser.add_argument("--alone", default="one", choices=("one", "none"), help="one GPU beside it")
    parser.add_argument("--kv-memory", default="4GiB", help="of each rank")
    return parser.parse_args()


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
