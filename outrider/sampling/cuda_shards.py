"""`shards.py` on a CUDA device: the best of a rank's tokens, and the pick among all ranks' bests.

A few launches with no host sync, so that a CUDA graph can hold them, the collective in between
included.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from outrider.sampling.cuda_sampler import (
    _LEVELS,
    _RACE_BLOCKS,
    _STATS,
    _WORDS_PER_BLOCK,
    _find_cuts,
    _is_last,
    _load,
    _noise,
    _temperature,
)
from outrider.sampling.shards import CANDIDATE

_NUMBERS = tl.constexpr(CANDIDATE)
_LOWEST = tl.constexpr(-3.4028234663852886e38)


def shard_candidates(
    logits: Tensor,  # [rows, vocabulary of this rank] float32 or bfloat16, rows contiguous
    params: Tensor,  # [rows, ROW_WORDS] int32
    first: int,
) -> Tensor:  # [rows, CANDIDATE] float64
    """The best of this rank's tokens at each row; column 0 is global token id `first`."""
    found = _find_cuts(logits, params, False)
    rows, vocab = logits.shape
    # Noise comes in blocks; a rank's part of the vocabulary may begin inside one.
    first_block, skip = divmod(first, _WORDS_PER_BLOCK)
    parts = triton.cdiv(skip + vocab, _RACE_BLOCKS * _WORDS_PER_BLOCK)
    scores = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    candidates = torch.empty(rows, CANDIDATE, dtype=torch.float64, device=logits.device)
    _race_part[(rows, parts)](
        logits,
        logits.stride(0),
        params,
        vocab,
        first,
        first_block,
        skip,
        found.stats,
        found.picks,
        scores,
        ids,
        found.tickets,
        candidates,
        BLOCKS=_RACE_BLOCKS,
        PADDED=triton.next_power_of_2(parts),
    )
    return candidates


def join_candidates(
    candidates: Tensor,  # [ranks, rows, CANDIDATE] float64, ranks in the order of the vocabulary
    params: Tensor,  # [rows, ROW_WORDS] int32
) -> Tensor:  # [rows] int64
    """The pick of each row: the best candidate, of the lowest id among equals."""
    ranks, rows, _ = candidates.shape
    picks = torch.empty(rows, dtype=torch.int64, device=candidates.device)
    _join[(rows,)](candidates.contiguous(), params, picks, rows, RANKS=ranks)
    return picks


@triton.jit(do_not_specialize=["first", "first_block", "skip"])  # type: ignore[untyped-decorator]
def _race_part(  # type: ignore[no-untyped-def]
    logits,
    stride,
    words,
    vocab,
    first,
    first_block,
    skip,
    stats,
    picks,
    scores,
    winners,
    tickets,
    candidates,
    BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """The rank's token with the highest score, and what its score is relative to."""
    row, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    # A rank of nothing but -inf has no peak to subtract.
    top = tl.maximum(tl.load(stats + row * _STATS), _LOWEST)
    candidate = candidates + row * _NUMBERS
    temperature = _temperature(words, row)
    if temperature == 0.0:
        if part == 0:
            tl.store(candidate, top.to(tl.float64))
            tl.store(candidate + 1, tl.zeros([], tl.float64))
            tl.store(candidate + 2, (tl.load(picks + row) + first).to(tl.float64))
        return
    ids = part * BLOCKS * 8 + tl.arange(0, BLOCKS * 8) - skip
    logit = _load(logits, stride, row, tl.where(ids < 0, vocab, ids), vocab)
    score = tl.div_rn(logit - top, temperature)
    if tl.max(score) > -float("inf"):
        score -= libdevice.log(_noise(words, row, first_block + part * BLOCKS, BLOCKS))
    best = tl.max(score)
    tl.store(scores + row * parts + part, best)
    tl.store(winners + row * parts + part, tl.min(tl.where(score == best, ids, vocab - 1)))
    if _is_last(tickets, row, 2 + 2 * _LEVELS):
        there = tl.arange(0, PADDED)
        exists = there < parts
        bests = tl.load(scores + row * parts + there, mask=exists, other=-float("inf"))
        winner = tl.load(winners + row * parts + there, mask=exists, other=vocab)
        best = tl.max(bests)
        winner = tl.min(tl.where(bests == best, winner, vocab - 1))
        tl.store(candidate, top.to(tl.float64))
        tl.store(candidate + 1, best.to(tl.float64))
        tl.store(candidate + 2, (tl.maximum(winner, 0) + first).to(tl.float64))


@triton.jit  # type: ignore[untyped-decorator]
def _join(candidates, words, picks, rows, RANKS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    temperature = _temperature(words, row)
    divisor = tl.where(temperature == 0.0, 1.0, temperature).to(tl.float64)
    top = tl.load(candidates + row * _NUMBERS)
    for rank in tl.static_range(1, RANKS):
        top = tl.maximum(top, tl.load(candidates + (rank * rows + row) * _NUMBERS))
    best = tl.full([], -float("inf"), tl.float64)
    pick = tl.load(candidates + row * _NUMBERS + 2)
    for rank in tl.static_range(RANKS):
        candidate = candidates + (rank * rows + row) * _NUMBERS
        score = (tl.load(candidate) - top) / divisor + tl.load(candidate + 1)
        # Among equals the first rank's, whose ids are lower.
        better = score > best
        pick = tl.where(better, tl.load(candidate + 2), pick)
        best = tl.where(better, score, best)
    tl.store(picks + row, pick.to(tl.int64))
