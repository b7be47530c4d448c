"""One pass of the engine on a GPU, by rows and sequences: the graph alone, and a whole step.

    python benchmarks/gpu_pass.py synthetic:8b,eps=0.01 synthetic:1b

A step fills the inputs, replays the graph and reads the argmax of every row. Medians in ms.
"""

import statistics
import sys
import time

import torch

from outrider.engine.cuda_runner import CudaRunner
from outrider.engine.kv_pool import Rows
from outrider.engine.loading import load_model
from outrider.engine.surgery import optimise

CONTEXT = 200
CASES = ((1, 1), (1, 2), (1, 5), (1, 9), (8, 1), (8, 5), (32, 1), (32, 2))


def main() -> None:
    for reference in sys.argv[1:]:
        loaded = load_model(reference, tier="target", dtype="bfloat16", device="cuda")
        optimise(loaded.model)
        runner = CudaRunner(loaded, num_blocks=512, max_rows=64, max_context=2048)
        print(f"{reference}: compiled and captured in {runner.warm_up():.1f} s", flush=True)
        for sequences, rows in CASES:
            measure(runner, sequences, rows)


def measure(runner: CudaRunner, sequences: int, rows: int) -> None:
    batch = [
        Rows(list(range(rows)), CONTEXT, list(range(8 * i, 8 * i + 16)), rows)
        for i in range(sequences)
    ]
    steps, graphs = [], []
    for _ in range(45):
        started = time.perf_counter()
        runner.forward(batch).argmax(-1).tolist()
        steps.append(time.perf_counter() - started)
    bucket = runner.bucket_for(sequences * rows)
    for _ in range(20):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        bucket.graph.replay()
        after.record()
        after.synchronize()
        graphs.append(before.elapsed_time(after))
    print(
        f"  {sequences} sequences of {rows} rows: graph {statistics.median(graphs):.2f}, "
        f"step {statistics.median(steps[5:]) * 1e3:.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
