"""The engine on a GPU, by rows and sequences: one pass, what sampling adds, and the draft's loops.

    python benchmarks/gpu_pass.py synthetic:8b,eps=0.01 synthetic:1b

"graph" is the pass alone on the device. The others are whole steps, inputs filled and the tokens
drawn read: greedy, and T=1 with top-p 0.95. Medians in ms.
"""

import statistics
import sys
import time

import torch

from outrider.engine.cuda_runner import CudaRunner
from outrider.engine.loading import load_model
from outrider.engine.rows import Branch, Draw, Rows
from outrider.engine.surgery import optimise
from outrider.types import GenerationSpec, SamplingParams

CONTEXT = 200
PASSES = ((1, 1), (1, 2), (1, 5), (1, 9), (8, 1), (8, 5), (32, 1), (32, 2), (32, 5))
LOOPS = (1, 8, 32)
STEPS = 4
BRANCHING = (1, 8)
PENDING = 3
BRANCHES = tuple(Branch(num_accepted, rank) for num_accepted in range(4) for rank in range(2))
BRANCH_STEPS = 3


def main() -> None:
    for reference in sys.argv[1:]:
        loaded = load_model(reference, tier="target", dtype="bfloat16", device="cuda")
        optimise(loaded.model)
        runner = CudaRunner(loaded, num_blocks=512, max_rows=256, max_context=2048)
        print(f"{reference}: compiled and captured in {runner.warm_up():.1f} s", flush=True)
        for sequences, rows in PASSES:
            graph = graph_ms(runner, sequences * rows)
            greedy, sampled = (step_ms(runner, sequences, rows, 1, t) for t in (0.0, 1.0))
            print(
                f"  {sequences} sequences of {rows} rows: graph {graph:.2f}, step greedy "
                f"{greedy:.2f}, sampled {sampled:.2f}",
                flush=True,
            )
        for sequences in LOOPS:
            greedy, sampled = (step_ms(runner, sequences, 2, STEPS, t) for t in (0.0, 1.0))
            print(
                f"  {sequences} sequences draft {STEPS} tokens: greedy {greedy:.2f}, "
                f"sampled {sampled:.2f}",
                flush=True,
            )
        for sequences in BRANCHING:
            greedy, sampled = (branches_ms(runner, sequences, t) for t in (0.0, 1.0))
            print(
                f"  {sequences} sequences draft branches: {PENDING} pending, {len(BRANCHES)} "
                f"branches, {BRANCH_STEPS} steps: greedy {greedy:.2f}, sampled {sampled:.2f}",
                flush=True,
            )


def step_ms(runner: CudaRunner, sequences: int, rows: int, steps: int, temperature: float) -> float:
    num_logits = rows if steps == 1 else 1
    draw = Draw(spec_of(temperature), CONTEXT + rows - num_logits + 1, steps)
    batch = [
        Rows(list(range(rows)), CONTEXT, list(range(8 * i, 8 * i + 16)), num_logits, draw)
        for i in range(sequences)
    ]
    return round_ms(runner, batch)


def branches_ms(runner: CudaRunner, sequences: int, temperature: float) -> float:
    """A round of a token committed and the pending ones, then the branches' own passes."""
    draw = Draw(spec_of(temperature), CONTEXT + 1, BRANCH_STEPS, BRANCHES)
    count = draw.scratch_blocks(runner.block_tokens)
    batch = []
    for i in range(sequences):
        scratch = range(256 + count * i, 256 + count * (i + 1))
        blocks = range(8 * i, 8 * i + 16)
        batch.append(Rows(range(1 + PENDING), CONTEXT, blocks, 1 + PENDING, draw, scratch))
    return round_ms(runner, batch)


def spec_of(temperature: float) -> GenerationSpec:
    top_p = 0.95 if temperature else 1.0
    return GenerationSpec(SamplingParams(temperature=temperature, top_p=top_p, seed=1))


def round_ms(runner: CudaRunner, batch: list[Rows]) -> float:
    took = []
    for _ in range(45):
        started = time.perf_counter()
        runner.run(batch)
        took.append(time.perf_counter() - started)
    return statistics.median(took[5:]) * 1e3


def graph_ms(runner: CudaRunner, rows: int) -> float:
    bucket = runner.bucket_for(rows)
    assert bucket.graph is not None
    took = []
    for _ in range(20):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        bucket.graph.replay()
        after.record()
        after.synchronize()
        took.append(before.elapsed_time(after))
    return statistics.median(took)


if __name__ == "__main__":
    main()
