"""Sampling parameters and the coupled race on a CPU: what `logits.py` and `verify.py` say, fused in
the engine's kernels (`engine/cpu_sampler.cpp`), which the caller must have loaded.

Ranks, sums and noise are those of `cuda_sampler.py`. A row is worked on by one thread, in an order
fixed by the vocabulary, so that no bit of it depends on other rows or on the number of threads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.sampling.row_params import packed_rows
from outrider.types import SamplingParams


def takes(logits: Tensor) -> bool:
    """Whether these can be sampled from here: a CPU's, and the kernels are loaded."""
    return logits.device.type == "cpu" and hasattr(torch.ops.outrider_cpu, "sample_rows")


def pack_rows(rows: Sequence[tuple[SamplingParams, int]]) -> Tensor:  # [rows, ROW_WORDS] int32
    """Each row's parameters, and the position in the log that it decides about."""
    runs: list[tuple[SamplingParams, list[int]]] = []
    for sampling, position in rows:
        if not runs or runs[-1][0] is not sampling:
            runs.append((sampling, []))
        runs[-1][1].append(position)
    return torch.from_numpy(packed_rows(runs))


def sample_rows(
    logits: Tensor,  # [rows, vocab] float32 or bfloat16, rows contiguous
    params: Tensor,  # [rows, ROW_WORDS] int32
) -> Tensor:  # [rows] int64
    """`coupled_picks` of `processed_log_probs`; greedy rows: argmax, the lowest id among equals."""
    picks: Tensor = torch.ops.outrider_cpu.sample_rows(logits, params)
    return picks


def processed_rows(
    logits: Tensor,  # [rows, vocab] float32 or bfloat16, rows contiguous
    params: Tensor,  # [rows, ROW_WORDS] int32
) -> Tensor:  # [rows, vocab] float32
    """`processed_log_probs`: normalised, -inf where cut; a greedy row is a point mass."""
    log_probs: Tensor = torch.ops.outrider_cpu.processed_rows(logits, params)
    return log_probs
