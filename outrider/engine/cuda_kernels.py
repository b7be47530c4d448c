"""The engine's CUDA kernels, in Triton: attention over paged KV, and copies of KV blocks.

The context is cut at fixed places; a program attends with a few rows of one sequence to a piece, or
to several one after the other, and a second kernel joins the pieces in order (flash decoding, Dao
et al. 2023). Which pieces there are depends on places alone, never on who shares the pass.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_TOKENS = 32
"""Tokens of a KV block."""

TILE_ROWS = 4
"""Rows of a sequence that one program takes."""

_LEAST_SPLIT = 128
_MOST_SPLITS = 32
"""The pieces of the longest context: what they leave lies in memory until it is joined."""
_KEYS_AT_ONCE = 128
_PROGRAMS = 4096
"""So many of a pass attend at most; each then takes several pieces."""
_JOINED_AT_ONCE = 8
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
    query, key, value = (_with_dense_rows(rows) for rows in (query, key, value))
    rows, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    groups = heads // kv_heads
    padded_groups = triton.next_power_of_2(groups)
    padded_dim = triton.next_power_of_2(head_dim)
    split = _split_of(max_context)
    splits = triton.cdiv(max_context, split)
    sums = torch.empty(rows, heads, splits, head_dim, dtype=torch.float32, device=query.device)
    peaks = torch.empty(rows, heads, splits, dtype=torch.float32, device=query.device)
    weights = torch.empty_like(peaks)
    output = query.new_empty(rows, heads, head_dim)
    width = kv_heads * head_dim
    _store_rows[(rows,)](
        key,
        value,
        keys,
        values,
        slots,
        key.stride(0),
        value.stride(0),
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
    )
    lanes = max(1, min(splits, _PROGRAMS // (tiles.shape[1] * kv_heads)))
    _attend_piece[(tiles.shape[1], kv_heads, lanes)](
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
        query.stride(0),
        tables.stride(0),
        keys.stride(0),
        HEADS=heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        GROUPS=groups,
        PADDED_GROUPS=padded_groups,
        TILE=max(TILE_ROWS, _MIN_DOT_ROWS // padded_groups),
        BLOCK=BLOCK_TOKENS,
        KEYS=min(_KEYS_AT_ONCE, split),
        SPLIT=split,
        SPLITS=splits,
        LANES=lanes,
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
        PADDED_DIM=padded_dim,
        SPLIT=split,
        SPLITS=splits,
        AT_ONCE=_JOINED_AT_ONCE,
        num_warps=1,
    )
    return output


@paged_attention.register_fake
def _(query: Tensor, *_: object) -> Tensor:
    return query.new_empty(query.shape)


def _with_dense_rows(rows: Tensor) -> Tensor:  # [rows, heads, head_dim]
    """With the heads of a row one behind the other; rows may lie apart."""
    dense = rows.stride()[1:] == (rows.shape[2], 1)
    return rows if dense else rows.contiguous()


def _split_of(max_context: int) -> int:
    """Tokens of a piece; it hangs on the longest context that there may be alone."""
    needed: int = triton.next_power_of_2(triton.cdiv(max_context, _MOST_SPLITS))
    return max(_LEAST_SPLIT, needed)


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
def _store_rows(  # type: ignore[no-untyped-def]
    key,
    value,
    keys,
    values,
    slots,
    key_stride,
    value_stride,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    at = tl.arange(0, PADDED)
    inside = at < WIDTH
    k = tl.load(key + row * key_stride + at, mask=inside)
    v = tl.load(value + row * value_stride + at, mask=inside)
    tl.store(keys + slot * WIDTH + at, k, mask=inside)
    tl.store(values + slot * WIDTH + at, v, mask=inside)


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
    query_stride,
    table_stride,
    slot_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    LANES: tl.constexpr,
):
    tile, kv_head, lane = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_rows = tl.load(tiles + 2 * num_tiles + tile)
    context = tl.load(tiles + 3 * num_tiles + tile) + num_rows
    if (num_rows == 0) | (lane * SPLIT >= context):
        return
    sequence = tl.load(tiles + tile)
    first_row = tl.load(tiles + num_tiles + tile)
    m = tl.arange(0, TILE * PADDED_GROUPS)
    row = m // PADDED_GROUPS
    group = m % PADDED_GROUPS
    head = kv_head * GROUPS + group
    d = tl.arange(0, PADDED_DIM)
    is_row = row < num_rows
    is_head = is_row & (group < GROUPS)
    is_dim = d < HEAD_DIM
    at_query = ((first_row + row) * query_stride + head * HEAD_DIM)[:, None] + d[None, :]
    q = tl.load(query + at_query, mask=is_head[:, None] & is_dim[None, :], other=0.0)
    sight = sights + first_row + row
    full = tl.load(sight + all_rows, mask=is_row, other=0)[:, None]
    low = tl.load(sight + 2 * all_rows, mask=is_row, other=0)[:, None]
    high = tl.load(sight + 3 * all_rows, mask=is_row, other=0)[:, None]
    for split in range(lane, tl.cdiv(context, SPLIT), LANES):
        total = tl.zeros([TILE * PADDED_GROUPS, PADDED_DIM], tl.float32)
        peak = tl.full([TILE * PADDED_GROUPS], -float("inf"), tl.float32)
        weight = tl.zeros([TILE * PADDED_GROUPS], tl.float32)
        start = split * SPLIT
        end = tl.minimum(start + SPLIT, context)
        for first in range(start, end, KEYS):
            token = first + tl.arange(0, KEYS)
            exists = token < end
            block = tl.load(tables + sequence * table_stride + token // BLOCK, mask=exists, other=0)
            slot = block.to(tl.int64) * BLOCK + token % BLOCK
            at_slot = slot[:, None] * slot_stride + kv_head * HEAD_DIM + d[None, :]
            is_there = exists[:, None] & is_dim[None, :]
            k = tl.load(keys + at_slot, mask=is_there, other=0.0)
            v = tl.load(values + at_slot, mask=is_there, other=0.0)
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
            total = total * shrink[:, None] + tl.dot(p.to(v.dtype), v)
            weight = weight * shrink + tl.sum(p, 1)
            peak = new_peak
        piece = ((first_row + row) * HEADS + head) * SPLITS + split
        at_piece = piece[:, None] * HEAD_DIM + d[None, :]
        tl.store(sums + at_piece, total, mask=is_head[:, None] & is_dim[None, :])
        tl.store(peaks + piece, peak, mask=is_head)
        tl.store(weights + piece, weight, mask=is_head)


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
    PADDED_DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, PADDED_DIM)
    is_dim = d < HEAD_DIM
    target = output + (row * HEADS + head) * HEAD_DIM + d
    if tl.load(slots + row) < 0:  # Padding: its output is never looked at, but must be a number.
        tl.store(target, tl.zeros([PADDED_DIM], output.dtype.element_ty), mask=is_dim)
        return
    total = tl.zeros([PADDED_DIM], tl.float32)
    peak = -float("inf")
    weight = 0.0
    first = (row * HEADS + head) * SPLITS
    pieces = tl.load(sights + row) // SPLIT + 1
    for start in range(0, pieces, AT_ONCE):
        piece = start + tl.arange(0, AT_ONCE)
        exists = piece < pieces
        others = tl.load(peaks + first + piece, mask=exists, other=-float("inf"))
        there = exists[:, None] & is_dim[None, :]
        at_piece = (first + piece)[:, None] * HEAD_DIM + d[None, :]
        parts = tl.load(sums + at_piece, mask=there, other=0.0)
        own = tl.load(weights + first + piece, mask=exists, other=0.0)
        # Every row sees the first token, so from the first piece on there is a peak.
        new_peak = tl.maximum(peak, tl.max(others, 0))
        shrink, grow = tl.exp(peak - new_peak), tl.exp(others - new_peak)
        total = total * shrink + tl.sum(parts * grow[:, None], 0)
        weight = weight * shrink + tl.sum(own * grow, 0)
        peak = new_peak
    tl.store(target, (total / weight).to(output.dtype.element_ty), mask=is_dim)
