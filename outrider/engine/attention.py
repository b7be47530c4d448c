"""Attention over paged KV, plugged into `transformers` models by its extension point.

A pass carries rows of many sequences in one ragged line. `RowLayout` says which rows belong to
which sequence and where its KV lies; the attention function writes the rows' keys and values
into the pool and attends over each sequence's own context. Nothing of a model's own code is
touched, so any decoder that follows the common interface works.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface

IMPLEMENTATION = "outrider_paged"
"""Name under which the function is registered (`attn_implementation=`)."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The rows of one sequence in a pass: rows first_row … last_row-1, the last of its context."""

    first_row: int
    last_row: int
    context: int
    first_slot: int | None
    """First KV slot where the context lies in one piece, else None and `slots` names them."""
    slots: Tensor | None  # [context] int64
    mask: Tensor | None  # [groups * rows, context] bool: which slots a row sees; None: all


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Where the rows of one pass belong."""

    keys: Tensor  # [layers, slots, kv_heads, head_dim]
    values: Tensor  # [layers, slots, kv_heads, head_dim]
    write_slots: Tensor  # [rows] int64: KV slot of each row
    segments: tuple[Segment, ...]


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,  # [1, heads, rows, head_dim]
    key: Tensor,  # [1, kv_heads, rows, head_dim]
    value: Tensor,  # [1, kv_heads, rows, head_dim]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    row_layout: RowLayout | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function of `transformers`; returns ([1, rows, heads, head_dim], None)."""
    if row_layout is None:
        raise RuntimeError("paged attention needs a row layout")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    keys, values = row_layout.keys[layer], row_layout.values[layer]
    keys.index_copy_(0, row_layout.write_slots, key[0].transpose(0, 1))
    values.index_copy_(0, row_layout.write_slots, value[0].transpose(0, 1))
    outputs = [_attend(query, keys, values, seg, scaling) for seg in row_layout.segments]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)), None


def _attend(
    query: Tensor,  # [1, heads, rows of all, head_dim]
    keys: Tensor,  # [slots, kv_heads, head_dim]
    values: Tensor,  # [slots, kv_heads, head_dim]
    segment: Segment,
    scaling: float | None,
) -> Tensor:  # [1, rows, heads, head_dim]
    heads, head_dim = query.shape[1], query.shape[3]
    kv_heads = keys.shape[1]
    rows = segment.last_row - segment.first_row
    if segment.first_slot is not None:
        stop = segment.first_slot + segment.context
        keys, values = keys[segment.first_slot : stop], values[segment.first_slot : stop]
    else:
        keys, values = keys[segment.slots], values[segment.slots]
    # Query heads that share a KV head become rows of it, so that nothing is repeated.
    grouped = query[:, :, segment.first_row : segment.last_row].reshape(
        1, kv_heads, heads // kv_heads * rows, head_dim
    )
    output = functional.scaled_dot_product_attention(
        grouped,
        keys.transpose(0, 1).unsqueeze(0),
        values.transpose(0, 1).unsqueeze(0),
        attn_mask=segment.mask,
        scale=scaling,
    )
    by_head = output.view(kv_heads, heads // kv_heads, rows, head_dim)
    return by_head.permute(2, 0, 1, 3).reshape(1, rows, heads, head_dim)


def register() -> None:
    """Make the function known to `transformers`; calling it again changes nothing."""
    AttentionInterface.register(IMPLEMENTATION, paged_attention)
