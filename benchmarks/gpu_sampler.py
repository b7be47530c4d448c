"""The CUDA sampler against the eager chain: ms for the picks of some rows of [rows, 128256].

    python benchmarks/gpu_sampler.py

`fused` is the time of a captured graph on the device; `eager` is processed_log_probs and
coupled_picks with the waits for the device that they need, from call to result. Logits are normal
with the standard deviation given. Medians.
"""

import statistics
import time
from collections.abc import Callable

import torch

from outrider.sampling import RowParams, coupled_picks, processed_log_probs
from outrider.sampling.cuda_sampler import SamplerInputs, processed_rows, sample_rows
from outrider.types import SamplingParams

VOCAB = 128256
ROWS = (1, 5, 8, 32, 40)
CASES = {
    "greedy": SamplingParams(0.0),
    "T=1": SamplingParams(1.0),
    "top_p 0.95": SamplingParams(1.0, top_p=0.95),
    "top_k 50, top_p 0.95": SamplingParams(1.0, top_k=50, top_p=0.95),
}


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for spread in (1.0, 3.0):
        for name, sampling in CASES.items():
            for rows in ROWS:
                measure(f"std {spread:g}, {name}", sampling, torch.randn(rows, VOCAB) * spread)


@torch.inference_mode()
def measure(name: str, sampling: SamplingParams, host_logits: torch.Tensor) -> None:
    rows, logits = len(host_logits), host_logits.cuda()
    positions = list(range(rows))
    inputs = SamplerInputs(rows)
    inputs.fill([(sampling, positions)])
    params = RowParams.build([(sampling, rows)], "cuda")
    seeds = [sampling.seed] * rows

    def eager() -> torch.Tensor:
        return coupled_picks(processed_log_probs(logits, params), seeds, positions)

    cuts = sampling.top_k > 0 or sampling.top_p < 1.0
    times = [
        graph_ms(lambda: sample_rows(logits, inputs.params)),
        graph_ms(lambda: sample_rows(logits, inputs.params, cuts=cuts)),
        graph_ms(lambda: processed_rows(logits, inputs.params)),
        call_ms(eager),
    ]
    print(
        f"{name:32} {rows:3} rows: fused {times[0]:.3f}, without unused cuts {times[1]:.3f}, "
        f"log probs {times[2]:.3f}, eager {times[3]:.3f}",
        flush=True,
    )


def graph_ms(run: Callable[[], torch.Tensor], times: int = 20) -> float:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    found = []
    for _ in range(times):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        before.record()
        for _ in range(5):
            graph.replay()
        after.record()
        after.synchronize()
        found.append(before.elapsed_time(after) / 5)
    return statistics.median(found)


def call_ms(run: Callable[[], torch.Tensor], times: int = 10) -> float:
    found = []
    for _ in range(times + 3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return statistics.median(found[3:]) * 1e3


if __name__ == "__main__":
    main()
