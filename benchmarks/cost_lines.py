"""What a pass costs, as fitted lines: the controller's maths needs them, and so does a planner.

    python benchmarks/cost_lines.py demo                        # CPU: target and draft of the demo
    python benchmarks/cost_lines.py synthetic:8b,eps=0.01 synthetic:1b

A verification is `sequences` of `rows` rows each over a context, a proposal `steps` passes of one
row. Medians of interleaved repeats; least squares on them, with the largest deviation beside it.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from outrider.engine.engine import Runner
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.loading import load_model
from outrider.engine.rows import Draw, Rows
from outrider.engine.surgery import optimise
from outrider.types import GenerationSpec, SamplingParams

BLOCK = 32
SHAPES = ((1, 1), (1, 2), (1, 3), (1, 5), (1, 9), (2, 1), (2, 5), (4, 1), (4, 5), (8, 1), (8, 5))
CONTEXTS = (64, 512, 1536)
STEPS = (1, 2, 3, 4, 6, 8)
GREEDY = GenerationSpec(SamplingParams(temperature=0.0))


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads or torch.get_num_threads())
    for reference in args.models:
        tiers = ("target", "draft") if reference == "demo" else ("target",)
        for tier in tiers:
            loaded = load_model(reference, tier=tier, dtype="bfloat16")
            optimise(loaded.model)
            runner = make_runner(loaded)
            print(f"{reference} ({tier}), {loaded.device}, bfloat16", flush=True)
            fit_verify(runner, args.repeats)
            fit_draft(runner, args.repeats)


def make_runner(loaded: LoadedModel) -> Runner:
    num_blocks = 8 * (max(CONTEXTS) + 64) // BLOCK + 8
    if loaded.device.type == "cuda":
        from outrider.engine.cuda_runner import CudaRunner

        cuda = CudaRunner(loaded, num_blocks=num_blocks, max_rows=64, max_context=2048)
        cuda.warm_up()
        return cuda
    from outrider.engine.model_runner import ModelRunner

    return ModelRunner(loaded, num_blocks=num_blocks, block_tokens=BLOCK)


def fit_verify(runner: Runner, repeats: int) -> None:
    cases = [(n, rows, context) for context in CONTEXTS for n, rows in SHAPES]
    times = measure([verification(runner, *case) for case in cases], repeats)
    fit(
        "  verify",
        {
            "pass": [1.0 for _ in cases],
            "a row": [n * rows for n, rows, _ in cases],
            "1000 tokens of context a row": [n * rows * c / 1000 for n, rows, c in cases],
        },
        times,
    )


def fit_draft(runner: Runner, repeats: int) -> None:
    cases = [(n, steps) for steps in STEPS for n in (1, 4, 8)]
    times = measure([proposal(runner, *case) for case in cases], repeats)
    fit(
        "  draft",
        {
            "proposal": [1.0 for _ in cases],
            "a step": [float(steps) for _, steps in cases],
            "a step of a further sequence": [(n - 1.0) * steps for n, steps in cases],
        },
        times,
    )


def verification(runner: Runner, sequences: int, rows: int, context: int) -> Callable[[], object]:
    tokens = random.Random(rows).choices(range(1000), k=rows)
    batch = [
        Rows(tokens, context, blocks_of(i), rows, Draw(GREEDY, context + 1))
        for i in range(sequences)
    ]
    return lambda: runner.run(batch)


def proposal(runner: Runner, sequences: int, steps: int) -> Callable[[], object]:
    batch = [Rows([5], 200, blocks_of(i), 1, Draw(GREEDY, 201, steps)) for i in range(sequences)]
    return lambda: runner.run(batch)


def blocks_of(sequence: int) -> list[int]:
    each = (max(CONTEXTS) + 64) // BLOCK
    return list(range(sequence * each, (sequence + 1) * each))


def measure(cases: list[Callable[[], object]], repeats: int) -> list[float]:
    """Median milliseconds of each case; all take turns, so that drift meets all alike."""
    took: list[list[float]] = [[] for _ in cases]
    for repeat in range(repeats + 2):
        for case, times in zip(cases, took, strict=True):
            started = time.perf_counter()
            case()
            if repeat >= 2:
                times.append((time.perf_counter() - started) * 1e3)
    return [statistics.median(times) for times in took]


def fit(name: str, columns: dict[str, list[float]], times: list[float]) -> None:
    matrix = np.array(list(columns.values())).T
    weights = 1 / np.array(times)  # Relative errors count.
    solved, *_ = np.linalg.lstsq(matrix * weights[:, None], np.array(times) * weights, rcond=None)
    off = np.abs(matrix @ solved / np.array(times) - 1)
    terms = " + ".join(f"{value:.3f} {what}" for value, what in zip(solved, columns, strict=True))
    print(f"{name} ms = {terms}; off by {off.max():.0%} at most, {off.mean():.0%} on average")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
