"""Sampling parameters as the fused samplers read them: a line of packed words for each row."""

import functools
import math
import struct
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from outrider.types import SamplingParams

_LAYOUT = struct.Struct("<fidfQQ")
ROW_WORDS = _LAYOUT.size // 4
"""int32 words a row: temperature fp32 (0: greedy), top_k int32 (0: all), top_p float64, log(min_p)
fp32 (-inf: none), seed uint64, position uint64; little endian, unaligned, in this order. All zero
is a greedy row."""

_TINY = float(np.finfo(np.float32).tiny)


def fill_rows(
    params: NDArray[np.int32],  # [rows, ROW_WORDS]
    first: int,
    sampling: SamplingParams,
    positions: Iterable[int],
) -> None:
    """Describe one row for each position (in the log), from row `first` on."""
    lines = packed_rows([(sampling, positions)])
    params[first : first + len(lines)] = lines


def packed_rows(
    runs: Iterable[tuple[SamplingParams, Iterable[int]]],
) -> NDArray[np.int32]:  # [rows, ROW_WORDS]
    """One row for each position, of runs of rows that share their parameters."""
    lines: list[bytes] = []
    for sampling, positions in runs:
        start = _start_of(sampling)
        lines += [start + position.to_bytes(8, "little") for position in positions]
    return np.frombuffer(bytearray().join(lines), dtype="<i4").reshape(-1, ROW_WORDS)


@functools.lru_cache(maxsize=4096)
def _start_of(sampling: SamplingParams) -> bytes:
    """A line up to its position, the same in every round of a generation."""
    return _LAYOUT.pack(
        # A temperature below the smallest normal float would be flushed to 0.
        0.0 if sampling.greedy else max(sampling.temperature, _TINY),
        min(sampling.top_k, 2**31 - 1),
        sampling.top_p,
        math.log(sampling.min_p) if sampling.min_p else -math.inf,
        sampling.seed,
        0,
    )[:-8]
