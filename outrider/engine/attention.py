"""Attention over paged KV, plugged into `transformers` models by its extension point.

A pass carries rows of many sequences in one ragged line. The `RowLayout` that travels with the
pass knows which rows belong together and where their KV lies; the attention function hands it
each layer's queries, keys and values. Nothing of a model's own code is touched, so any decoder
that follows the common interface works.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

IMPLEMENTATION = "outrider_paged"
"""Name under which the function is registered (`attn_implementation=`)."""


class RowLayout(Protocol):
    """The rows of one pass and their KV."""

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,  # [rows, heads, head_dim]
        key: Tensor,  # [rows, kv_heads, head_dim]
        value: Tensor,  # [rows, kv_heads, head_dim]
        scaling: float,
    ) -> Tensor:  # [rows, heads, head_dim]
        """Write the rows' keys and values into the pool; each row attends to its own context.

        `module` is the model's attention module; its layer's part of the pool is meant.
        """


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
    output = row_layout.attend(
        module,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        query.shape[-1] ** -0.5 if scaling is None else scaling,
    )
    return output.unsqueeze(0), None


def register() -> None:
    """Make the function known to `transformers`; calling it again changes nothing."""
    AttentionInterface.register(IMPLEMENTATION, paged_attention)
