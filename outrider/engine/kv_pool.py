"""The KV pool of a CPU, and where the rows of a pass belong in it."""

import array
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.engine import cpu_kernels
from outrider.engine.block_copies import HostCopies
from outrider.engine.rows import Rows

_TASK_ROWS = 16
"""Rows of a sequence that one task of the attention kernel takes: long chunks spread over cores."""


@dataclass(frozen=True, slots=True)
class KvShape:
    """What KV of one token consists of."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype, ranks: int = 1) -> "KvShape":
        """From a model's configuration (`transformers`); of `ranks` each holds a part."""
        head_dim = getattr(config, "head_dim", None)
        # Configs of models without grouped queries do not name the number, or set it to None.
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        return cls(
            layers=config.num_hidden_layers,
            kv_heads=kv_heads // ranks,
            head_dim=head_dim or config.hidden_size // config.num_attention_heads,
            dtype=dtype,
        )

    @property
    def token_bytes(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


class CpuPool:
    """Keys and values of `num_blocks` blocks of `block_tokens` tokens, for all layers."""

    def __init__(self, shape: KvShape, num_blocks: int, block_tokens: int) -> None:
        if block_tokens not in cpu_kernels.BLOCK_SIZES:
            raise ValueError(f"blocks of {block_tokens} tokens; take one of 8, 32")
        cpu_kernels.load()
        self.block_tokens = block_tokens
        per_layer = (shape.layers, num_blocks, shape.kv_heads)
        # One query element meets a block's keys at once, one weight a value's elements. Zeros,
        # because places that no token fills yet are multiplied by 0, and 0 * NaN is NaN.
        self.keys = torch.zeros(*per_layer, shape.head_dim, block_tokens, dtype=shape.dtype)
        self.values = torch.zeros(*per_layer, block_tokens, shape.head_dim, dtype=shape.dtype)
        self.copies = HostCopies(self.keys, self.values, "keys by element, values by token")

    def copy_blocks(self, pairs: Tokens[tuple[int, int]]) -> None:
        """Copy whole blocks, of all layers: (from, to)."""
        for source, copy in pairs:
            self.keys[:, copy] = self.keys[:, source]
            self.values[:, copy] = self.values[:, source]

    def layout(self, batch: Tokens[Rows]) -> "CpuLayout":
        """Where the rows of a pass belong."""
        size = self.block_tokens
        slots: list[int] = []
        tasks: list[tuple[int, int, int, int]] = []
        tables = array.array("i")
        for rows in batch:
            first_row, table = len(slots), len(tables)
            blocks, first, stop = rows.blocks, rows.start, rows.stop
            slots += [blocks[p // size] * size + p % size for p in range(first, stop)]
            for start in range(first, stop, _TASK_ROWS):
                count = min(_TASK_ROWS, stop - start)
                tasks.append((first_row + start - first, count, start, table))
            tables.extend(blocks[: -(-stop // size)])
        return CpuLayout(
            self.keys,
            self.values,
            int64s(slots),
            int64s(tasks),
            torch.frombuffer(tables, dtype=torch.int32),
            _sights(batch),
        )


def int64s(numbers: Tokens[int] | Tokens[Tokens[int]]) -> Tensor:
    """A tensor of these; by way of numpy, which costs a third of `torch.tensor`."""
    return torch.from_numpy(np.array(numbers, dtype=np.int64))


def _sights(batch: Tokens[Rows]) -> Tensor:
    if not any([rows.parents for rows in batch]):
        return torch.empty(0, 2, dtype=torch.int64)
    numbers = np.array([tuple(sight) for rows in batch for sight in rows.sights], dtype=np.uint64)
    return torch.from_numpy(numbers.view(np.int64))


@dataclass(frozen=True, slots=True)
class CpuLayout:
    """A `RowLayout` (outrider.engine.attention) for the CPU kernels."""

    keys: Tensor  # [layers, blocks, kv_heads, head_dim, block_tokens]
    values: Tensor  # [layers, blocks, kv_heads, block_tokens, head_dim]
    slots: Tensor  # [rows] int64: block * block_tokens + place in it
    tasks: Tensor  # [tasks, 4] int64: first row, rows, place of the first, first of tables
    tables: Tensor  # [blocks of all sequences] int32
    sights: Tensor  # [rows, 2] int64: `Sight`; [0, 2]: no row is of a tree

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,  # [rows, heads, head_dim]
        key: Tensor,  # [rows, kv_heads, head_dim]
        value: Tensor,  # [rows, kv_heads, head_dim]
        scaling: float,
    ) -> Tensor:  # [rows, heads, head_dim]
        layer: int = module.layer_idx  # type: ignore[assignment]
        output: Tensor = torch.ops.outrider_cpu.paged_attention(
            query,
            key,
            value,
            self.keys[layer],
            self.values[layer],
            self.slots,
            self.tasks,
            self.tables,
            self.sights,
            scaling,
        )
        return output
