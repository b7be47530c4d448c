"""The engine's CUDA kernels, in Triton: attention over paged KV, and copies of KV blocks.

The context is cut at fixed places (every `_SPLIT` tokens); a program attends with a few rows of one
sequence to one piece, and a second kernel joins the pieces in order (flash decoding, Dao et al.
2023). Which pieces there are depends on places alone, never on who shares the pass.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_TOKENS = 32
"""Tokens of a KV block."""

TILE_ROWS = 4
"""Rows of a sequence that one program takes."""

_SPLIT = 256
_KEYS_AT_ONCE = 64
_MIN_DOT_ROWS = 16
"""Least rows of a matrix product on tensor cores."""

_COPIED_AT_ONCE = 4096


@torch.library.custom_op("outrider_cuda::paged_attention", mutates_args=("keys", "values"))
def paged_attention(
    query: Tensor,  # [rows, heads, head_dim]
    key: Tensor,  # [rows, kv_heads, head_dim]
    value: Tensor,  # [rows, kv_heads, head_dim]
    keys: Tensor,  # [slots, kv_heads, head_dim]
    values: Tensor,  # [slots, kv_heads, head_dim]
    slots: Tensor,  # [rows] int32, -1: no row
    sights: Tensor,  # [4, rows] int32: place, `Sight.full`, low and high word of `Sight.mask`
    tiles: Tensor,  # [4, tiles] int32: sequence, first row, rows (0: none), place of the first
    tables: Tensor,  # [sequences, blocks] int32
    scale: float,
    max_context: int,
) -> Tensor:  # [rows, heads, head_dim]
    """Write the rows' KV; each row then attends to the places of its sequence that it sees.

    A tile holds at most TILE_ROWS consecutive rows of one sequence.
    """
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    rows, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    groups = heads // kv_heads
    tile_rows = TILE_ROWS
    while tile_rows * groups < _MIN_DOT_ROWS:
        tile_rows *= 2
    splits = -(-max_context // _SPLIT)
    sums = torch.empty(rows, heads, splits, head_dim, dtype=torch.float32, device=query.device)
    peaks = torch.empty(rows, heads, splits, dtype=torch.float32, device=query.device)
    weights = torch.empty_like(peaks)
    output = torch.empty_like(query)
    _store_rows[(rows,)](key, value, keys, values, slots, WIDTH=kv_heads * head_dim)
    _attend_piece[(tiles.shape[1], kv_heads, splits)](
        query,
        keys,
        values,
        tables,
        tiles,
        sights,
        sums,
        peaks,
        weights,
        scale,
        rows,
        tiles.shape[1],
        tables.stride(0),
        keys.stride(0),
        HEADS=heads,
        HEAD_DIM=head_dim,
        GROUPS=groups,
        TILE=tile_rows,
        BLOCK=BLOCK_TOKENS,
        KEYS=_KEYS_AT_ONCE,
        SPLIT=_SPLIT,
        SPLITS=splits,
    )
    _join_pieces[(rows, heads)](
        sums,
        peaks,
        weights,
        slots,
        sights,
        output,
        HEADS=heads,
        HEAD_DIM=head_dim,
        SPLIT=_SPLIT,
        SPLITS=splits,
    )
    return output


@paged_attention.register_fake
def _(query: Tensor, *_: object) -> Tensor:
    return query.new_empty(query.shape)


def copy_blocks(
    keys: Tensor,  # [layers, blocks, block_tokens, kv_heads, head_dim], contiguous
    values: Tensor,  # like keys
    pairs: Tensor,  # [pairs, 2] int32, contiguous: from, to
) -> None:
    """Copy whole blocks, of all layers."""
    if len(pairs):
        _copy_blocks[(len(pairs), len(keys))](
            keys, values, pairs, keys.stride(0), SIZE=keys.stride(1), AT_ONCE=_COPIED_AT_ONCE
        )


@triton.jit  # type: ignore[untyped-decorator]
def _copy_blocks(  # type: ignore[no-untyped-def]
    keys, values, pairs, layer_stride, SIZE: tl.constexpr, AT_ONCE: tl.constexpr
):
    pair, layer = tl.program_id(0), tl.program_id(1)
    first = layer.to(tl.int64) * layer_stride
    source = first + tl.load(pairs + 2 * pair).to(tl.int64) * SIZE
    target = first + tl.load(pairs + 2 * pair + 1).to(tl.int64) * SIZE
    for start in range(0, SIZE, AT_ONCE):
        at = start + tl.arange(0, AT_ONCE)
        inside = at < SIZE
        tl.store(keys + target + at, tl.load(keys + source + at, mask=inside), mask=inside)
        tl.store(values + target + at, tl.load(values + source + at, mask=inside), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _store_rows(key, value, keys, values, slots, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    at = tl.arange(0, WIDTH)
    tl.store(keys + slot * WIDTH + at, tl.load(key + row * WIDTH + at))
    tl.store(values + slot * WIDTH + at, tl.load(value + row * WIDTH + at))


@triton.jit  # type: ignore[untyped-decorator]
def _attend_piece(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    tables,
    tiles,
    sights,
    sums,
    peaks,
    weights,
    scale,
    all_rows,
    num_tiles,
    table_stride,
    slot_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
):
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_rows = tl.load(tiles + 2 * num_tiles + tile)
    context = tl.load(tiles + 3 * num_tiles + tile) + num_rows
    start = split * SPLIT
    if (num_rows == 0) | (start >= context):
        return
    sequence = tl.load(tiles + tile)
    first_row = tl.load(tiles + num_tiles + tile)
    m = tl.arange(0, TILE * GROUPS)
    row = m // GROUPS
    head = kv_head * GROUPS + m % GROUPS
    d = tl.arange(0, HEAD_DIM)
    is_row = row < num_rows
    at_query = ((first_row + row) * HEADS + head)[:, None] * HEAD_DIM + d[None, :]
    q = tl.load(query + at_query, mask=is_row[:, None], other=0.0)
    sight = sights + first_row + row
    full = tl.load(sight + all_rows, mask=is_row, other=0)[:, None]
    low = tl.load(sight + 2 * all_rows, mask=is_row, other=0)[:, None]
    high = tl.load(sight + 3 * all_rows, mask=is_row, other=0)[:, None]
    total = tl.zeros([TILE * GROUPS, HEAD_DIM], tl.float32)
    peak = tl.full([TILE * GROUPS], -float("inf"), tl.float32)
    weight = tl.zeros([TILE * GROUPS], tl.float32)
    end = tl.minimum(start + SPLIT, context)
    for first in range(start, end, KEYS):
        token = first + tl.arange(0, KEYS)
        exists = token < end
        block = tl.load(tables + sequence * table_stride + token // BLOCK, mask=exists, other=0)
        slot = block.to(tl.int64) * BLOCK + token % BLOCK
        at_slot = slot[:, None] * slot_stride + kv_head * HEAD_DIM + d[None, :]
        k = tl.load(keys + at_slot, mask=exists[:, None], other=0.0)
        score = tl.dot(q, tl.trans(k)) * scale
        bit = token[None, :] - full
        marked = (tl.where(bit < 32, low, high) >> (bit & 31)) & 1
        seen = (bit < 0) | ((bit < 64) & (marked == 1))
        score = tl.where(seen & exists[None, :], score, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        # A row that sees nothing of this piece yet has no peak to subtract.
        base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        p = tl.exp(score - base[:, None])
        shrink = tl.exp(peak - base)
        v = tl.load(values + at_slot, mask=exists[:, None], other=0.0)
        total = total * shrink[:, None] + tl.dot(p.to(v.dtype), v)
        weight = weight * shrink + tl.sum(p, 1)
        peak = new_peak
    piece = ((first_row + row) * HEADS + head) * SPLITS + split
    tl.store(sums + piece[:, None] * HEAD_DIM + d[None, :], total, mask=is_row[:, None])
    tl.store(peaks + piece, peak, mask=is_row)
    tl.store(weights + piece, weight, mask=is_row)


@triton.jit  # type: ignore[untyped-decorator]
def _join_pieces(  # type: ignore[no-untyped-def]
    sums,
    peaks,
    weights,
    slots,
    sights,
    output,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, HEAD_DIM)
    target = output + (row * HEADS + head) * HEAD_DIM + d
    if tl.load(slots + row) < 0:  # Padding: its output is never looked at, but must be a number.
        tl.store(target, tl.zeros([HEAD_DIM], output.dtype.element_ty))
        return
    total = tl.zeros([HEAD_DIM], tl.float32)
    peak = -float("inf")
    weight = 0.0
    first = (row * HEADS + head) * SPLITS
    for split in range(tl.load(sights + row) // SPLIT + 1):
        other = tl.load(peaks + first + split)
        new_peak = tl.maximum(peak, other)
        shrink, grow = tl.exp(peak - new_peak), tl.exp(other - new_peak)
        piece = tl.load(sums + (first + split) * HEAD_DIM + d)
        total = total * shrink + piece * grow
        weight = weight * shrink + tl.load(weights + first + split) * grow
        peak = new_peak
    tl.store(target, (total / weight).to(output.dtype.element_ty))
