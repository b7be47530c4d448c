"""The noise of `noise.py` on a CUDA device: the same words, in one launch (Triton's Philox)."""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice
from triton.language.random import philox_impl

_WORDS_PER_BLOCK = 8
_BLOCKS_AT_ONCE = 256


def exponentials(
    keys: np.ndarray,  # [3, rows] uint64: seed, position, round start
    stream: int,
    count: int,
    first: int,
    device: torch.device,
) -> Tensor:  # [rows, count] float32
    """Exponentials of the token ids from `first` on, as `noise.exponentials` defines them."""
    rows = keys.shape[1]
    on_device = torch.from_numpy(keys.view(np.int64)).to(device, non_blocking=True)
    output = torch.empty(rows, count, dtype=torch.float32, device=device)
    block, skipped = divmod(first, _WORDS_PER_BLOCK)
    blocks = triton.cdiv(skipped + count, _WORDS_PER_BLOCK)
    _exponentials[(rows, triton.cdiv(blocks, _BLOCKS_AT_ONCE))](
        on_device, output, rows, count, block, skipped, STREAM=stream, BLOCKS=_BLOCKS_AT_ONCE
    )
    return output


@triton.jit  # type: ignore[untyped-decorator]
def _exponentials(  # type: ignore[no-untyped-def]
    keys,
    output,
    rows,
    count,
    first_block,
    skipped,
    STREAM: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0)
    number = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    zero = (number * 0).to(tl.uint64)
    seed = tl.load(keys + row).to(tl.uint64) + zero
    # numpy counts up before its first block.
    counter = (number + first_block + 1).to(tl.uint64)
    position = tl.load(keys + rows + row).to(tl.uint64) + zero
    start = tl.load(keys + 2 * rows + row).to(tl.uint64) + zero
    a, b, c, d = philox_impl(counter, position, start, zero, seed, zero + STREAM, 10)
    at = number * 8 - skipped
    line = output + row.to(tl.int64) * count
    _store_pair(line, at, a, count)
    _store_pair(line, at + 2, b, count)
    _store_pair(line, at + 4, c, count)
    _store_pair(line, at + 6, d, count)


@triton.jit
def _store_pair(line, at, words, count):  # type: ignore[no-untyped-def]
    low, high = words & 0xFFFFFFFF, words >> 32
    tl.store(line + at, _exponential(low), mask=(at >= 0) & (at < count))
    tl.store(line + at + 1, _exponential(high), mask=(at + 1 >= 0) & (at + 1 < count))


@triton.jit
def _exponential(word):  # type: ignore[no-untyped-def]
    return -libdevice.log1p(-_uniform(word))


@triton.jit
def _uniform(word):  # type: ignore[no-untyped-def]
    # 2 word + 1 is exact, its conversion the only rounding; 1 - 2^-24 is the largest below 1.
    return tl.minimum((word * 2 + 1).to(tl.float32) * 1.1641532182693481e-10, 0.9999999403953552)


@triton.jit  # type: ignore[untyped-decorator]
def _exponentials_of(  # type: ignore[no-untyped-def]
    seed, position, start, first_block, STREAM: tl.constexpr, BLOCKS: tl.constexpr
):
    """Exponentials of the 8 BLOCKS tokens from block `first_block` on, of one row's keys."""
    number = first_block + tl.arange(0, BLOCKS)
    zero = (number * 0).to(tl.uint64)
    counter = (number + 1).to(tl.uint64)  # numpy counts up before its first block.
    position = position.to(tl.uint64) + zero
    start = start.to(tl.uint64) + zero
    a, b, c, d = philox_impl(
        counter, position, start, zero, seed.to(tl.uint64) + zero, zero + STREAM, 10
    )
    longs = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    return _exponential(tl.interleave(longs & 0xFFFFFFFF, longs >> 32))


@triton.jit
def _long(word):  # type: ignore[no-untyped-def]
    """64 bits that lie as two words, the low one first."""
    return (tl.load(word).to(tl.int64) & 0xFFFFFFFF) | (tl.load(word + 1).to(tl.int64) << 32)
