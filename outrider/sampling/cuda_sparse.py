"""Guesses of `rejection` mode on a CUDA device, so that a CUDA graph can hold it: what `sparse.py`
and `draft.py` say, the race over the truncated distribution as one kernel."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.random import philox_impl

from outrider.sampling.cuda_noise import _exponential, _long
from outrider.sampling.cuda_sampler import _WORDS, processed_rows, sample_candidates
from outrider.sampling.noise import Stream
from outrider.sampling.sparse import SparseRows, truncate_rows
from outrider.types import MAX_SPARSE_ENTRIES

_WEIGHT_BITS = 16


class SparseDraws(NamedTuple):
    """What was drawn at each row, and what it was drawn from."""

    picks: Tensor  # [rows] int64
    packed: Tensor  # [rows, entries] int64: id and weight of each entry, for `unpack`
    likeliest: Tensor | None = None  # [rows, CANDIDATES] int64, in order, lowest id among equals


def sample_sparse(
    logits: Tensor,  # [rows, vocab] float32 or bfloat16, rows contiguous
    params: Tensor,  # [rows, ROW_WORDS] int32
    round_starts: Tensor,  # [rows] int32
    *,
    cuts: bool = True,
    ranked: bool = False,
) -> SparseDraws:
    """`sample_sparse_rows` of `truncate_rows` of the processed probabilities, and if `ranked` the
    likeliest tokens. The vocabulary has no fewer ids than a distribution has entries.

    `cuts=False` as for `sample_rows`.
    """
    log_probs = processed_rows(logits, params, cuts=cuts)
    rows = truncate_rows(log_probs.exp())
    picks = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    _race_sparse[(len(logits),)](
        rows.ids,
        rows.weights,
        params,
        round_starts,
        picks,
        STREAM=int(Stream.DRAFT),
        ENTRIES=MAX_SPARSE_ENTRIES,
        num_warps=2,
    )
    likeliest = None
    if ranked:  # Of rows that are greedy the candidates are the highest.
        likeliest = sample_candidates(log_probs, torch.zeros_like(params), cuts=False)
    return SparseDraws(picks, rows.ids << _WEIGHT_BITS | rows.weights, likeliest)


def unpack(packed: Tensor) -> SparseRows:  # [..., entries] int64
    """The distributions of `SparseDraws`."""
    return SparseRows(packed >> _WEIGHT_BITS, packed & ((1 << _WEIGHT_BITS) - 1))


@triton.jit  # type: ignore[untyped-decorator]
def _race_sparse(  # type: ignore[no-untyped-def]
    ids,
    weights,
    words,
    round_starts,
    picks,
    STREAM: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    row = tl.program_id(0)
    entry = tl.arange(0, ENTRIES)
    token = tl.load(ids + row * ENTRIES + entry)
    weight = tl.load(weights + row * ENTRIES + entry)
    zero = (token * 0).to(tl.uint64)
    counter = (token // 8 + 1).to(tl.uint64)  # numpy counts up before its first block.
    seed = _long(words + row * _WORDS + 5).to(tl.uint64) + zero
    position = _long(words + row * _WORDS + 7).to(tl.uint64) + zero
    start = tl.load(round_starts + row).to(tl.uint64) + zero
    a, b, c, d = philox_impl(counter, position, start, zero, seed, zero + STREAM, 10)
    place = token % 8
    long = tl.where(place < 2, a, tl.where(place < 4, b, tl.where(place < 6, c, d)))
    word = tl.where(place % 2 == 0, long & 0xFFFFFFFF, long >> 32)
    arrival = tl.div_rn(_exponential(word), weight.to(tl.float32))
    arrival = tl.where(weight > 0, arrival, float("inf"))
    first = tl.argmin(arrival, 0)
    tl.store(picks + row, tl.sum(tl.where(entry == first, token, 0)))
