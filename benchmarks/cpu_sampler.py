"""The fused CPU sampler against the eager chain: microseconds a row, for picks of [rows, vocab].

    python benchmarks/cpu_sampler.py [threads]

`fused` is `drawing.picks_of` with its kernels, from call to result, packing of parameters included;
`log probs` the same for `drawing.log_probs_of`; `eager` is processed_log_probs and coupled_picks
(greedy: argmax). `peaked` rows are like a language model's: 40 likely tokens over a tail; `normal`
ones have the standard deviation given. One thread unless another number is given. Medians.
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from outrider.engine import cpu_kernels
from outrider.engine.drawing import log_probs_of, picks_of
from outrider.engine.model_files import default_cache_dir
from outrider.sampling import RowParams, coupled_picks, greedy_picks, processed_log_probs
from outrider.types import SamplingParams

VOCABS = (49152, 128256)
ROWS = (1, 4, 8)
CASES = {
    "greedy": SamplingParams(0.0),
    "T=1": SamplingParams(1.0),
    "top_p 0.95": SamplingParams(1.0, top_p=0.95),
    "top_k 50": SamplingParams(1.0, top_k=50),
}


def main() -> None:
    threads = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    torch.set_num_threads(threads)
    cpu_kernels.load(default_cache_dir())
    print(f"torch {torch.__version__}, {threads} threads; us a row")
    for vocab in VOCABS:
        for shape in ("peaked", "normal, std 3", "normal, std 1"):
            for name, sampling in CASES.items():
                for rows in ROWS:
                    measure(f"{vocab} {shape}, {name}", sampling, make_logits(shape, rows, vocab))


def make_logits(shape: str, rows: int, vocab: int) -> Tensor:
    logits = torch.randn(rows, vocab) * (1 if shape.endswith("1") else 3)
    if shape == "peaked":
        logits -= 8
        logits[:, torch.randperm(vocab)[:40]] += 16
    return logits


@torch.inference_mode()
def measure(name: str, sampling: SamplingParams, logits: Tensor) -> None:
    rows = len(logits)

    def fused() -> Tensor:
        return picks_of(logits, [(sampling, position) for position in range(rows)])

    def log_probs() -> Tensor:
        return log_probs_of(logits, [(sampling, rows)])

    def eager() -> Tensor:
        if sampling.greedy:
            return greedy_picks(logits)
        processed = processed_log_probs(logits, RowParams.build([(sampling, rows)]))
        return coupled_picks(processed, [sampling.seed] * rows, range(rows))

    times = [
        call_us(run, times) / rows for run, times in ((fused, 30), (log_probs, 30), (eager, 8))
    ]
    print(
        f"{name:34} {rows} rows: fused {times[0]:6.0f}, log probs {times[1]:6.0f}, "
        f"eager {times[2]:6.0f}",
        flush=True,
    )


def call_us(run: Callable[[], Tensor], times: int) -> float:
    found = []
    for _ in range(times + 2):
        started = time.perf_counter()
        run()
        found.append(time.perf_counter() - started)
    return statistics.median(found[2:]) * 1e6


if __name__ == "__main__":
    main()
