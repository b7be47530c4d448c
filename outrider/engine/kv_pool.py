"""The KV pools, and where the rows of a pass belong in them: one kind a device."""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.engine import cpu_kernels

_TASK_ROWS = 16
"""Rows of a sequence that one task of the attention kernel takes: long chunks spread over cores."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one sequence: `token_ids` at positions start, start+1, …, whose KV is written.

    `num_logits` of them, the last ones, give logits.
    """

    token_ids: Tokens[int]
    start: int
    blocks: Tokens[int]
    num_logits: int


@dataclass(frozen=True, slots=True)
class KvShape:
    """What KV of one token consists of."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype) -> "KvShape":
        """From a model's configuration (`transformers`)."""
        head_dim = getattr(config, "head_dim", None)
        return cls(
            layers=config.num_hidden_layers,
            # Configs of models without grouped queries do not name the number, or set it to None.
            kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
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

    def layout(self, batch: Tokens[Rows]) -> "CpuLayout":
        """Where the rows of a pass belong."""
        size = self.block_tokens
        slots: list[int] = []
        tasks: list[tuple[int, int, int, int]] = []
        tables: list[int] = []
        for rows in batch:
            first_row, table = len(slots), len(tables)
            stop = rows.start + len(rows.token_ids)
            for position in range(rows.start, stop):
                slots.append(rows.blocks[position // size] * size + position % size)
            for start in range(rows.start, stop, _TASK_ROWS):
                count = min(_TASK_ROWS, stop - start)
                tasks.append((first_row + start - rows.start, count, start, table))
            tables.extend(rows.blocks[: -(-stop // size)])
        return CpuLayout(
            self.keys,
            self.values,
            torch.tensor(slots),
            torch.tensor(tasks),
            torch.tensor(tables, dtype=torch.int32),
        )


@dataclass(frozen=True, slots=True)
class CpuLayout:
    """A `RowLayout` (outrider.engine.attention) for the CPU kernels."""

    keys: Tensor  # [layers, blocks, kv_heads, head_dim, block_tokens]
    values: Tensor  # [layers, blocks, kv_heads, block_tokens, head_dim]
    slots: Tensor  # [rows] int64: block * block_tokens + place in it
    tasks: Tensor  # [tasks, 4] int64: first row, rows, start position, place in tables
    tables: Tensor  # [blocks of all sequences] int32

    def attend(
        self,
        layer: int,
        query: Tensor,  # [rows, heads, head_dim]
        key: Tensor,  # [rows, kv_heads, head_dim]
        value: Tensor,  # [rows, kv_heads, head_dim]
        scaling: float,
    ) -> Tensor:  # [rows, heads, head_dim]
        output: Tensor = torch.ops.outrider_cpu.paged_attention(
            query,
            key,
            value,
            self.keys[layer],
            self.values[layer],
            self.slots,
            self.tasks,
            self.tables,
            scaling,
        )
        return output


class CudaPool:
    """The same on a CUDA device, for the Triton kernel: keys and values [layers, slots, …]."""

    def __init__(self, shape: KvShape, num_blocks: int, device: torch.device) -> None:
        from outrider.engine import cuda_kernels

        self._kernels = cuda_kernels
        self.block_tokens = cuda_kernels.BLOCK_TOKENS
        size = (shape.layers, num_blocks * self.block_tokens, shape.kv_heads, shape.head_dim)
        self.keys = torch.zeros(size, dtype=shape.dtype, device=device)
        self.values = torch.zeros(size, dtype=shape.dtype, device=device)

    def layout(self, batch: Tokens[Rows]) -> "CudaLayout":
        """Where the rows of a pass belong."""
        size = self.block_tokens
        slots: list[int] = []
        positions: list[int] = []
        tiles: list[tuple[int, int, int, int]] = []
        tables: list[list[int]] = []
        for number, rows in enumerate(batch):
            first_row = len(slots)
            stop = rows.start + len(rows.token_ids)
            positions.extend(range(rows.start, stop))
            slots.extend(rows.blocks[p // size] * size + p % size for p in range(rows.start, stop))
            tables.append(list(rows.blocks[: -(-stop // size)]))
            for start in range(rows.start, stop, self._kernels.TILE_ROWS):
                count = min(self._kernels.TILE_ROWS, stop - start)
                tiles.append((number, first_row + start - rows.start, count, start))
        width = max(len(table) for table in tables)
        device = self.keys.device
        return CudaLayout(
            self,
            torch.tensor(slots, device=device),
            torch.tensor(positions, dtype=torch.int32, device=device),
            torch.tensor(tiles, dtype=torch.int32).T.contiguous().to(device),
            torch.tensor(
                [table + [0] * (width - len(table)) for table in tables],
                dtype=torch.int32,
                device=device,
            ),
            max_context=max(positions) + 1,
        )

    def attend(
        self,
        layout: "CudaLayout",
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
    ) -> Tensor:
        keys, values = self.keys[layer], self.values[layer]
        keys.index_copy_(0, layout.slots, key)
        values.index_copy_(0, layout.slots, value)
        return self._kernels.paged_attention(
            query,
            keys,
            values,
            layout.tables,
            layout.positions,
            layout.tiles,
            scale,
            layout.max_context,
        )


@dataclass(frozen=True, slots=True)
class CudaLayout:
    """A `RowLayout` (outrider.engine.attention) for the Triton kernel."""

    pool: CudaPool
    slots: Tensor  # [rows] int64
    positions: Tensor  # [rows] int32
    tiles: Tensor  # [4, tiles] int32: sequence, first row, rows, first position
    tables: Tensor  # [sequences, blocks] int32
    max_context: int

    def attend(
        self,
        layer: int,
        query: Tensor,  # [rows, heads, head_dim]
        key: Tensor,  # [rows, kv_heads, head_dim]
        value: Tensor,  # [rows, kv_heads, head_dim]
        scaling: float,
    ) -> Tensor:  # [rows, heads, head_dim]
        return self.pool.attend(self, layer, query, key, value, scaling)


def make_pool(
    shape: KvShape, num_blocks: int, block_tokens: int, device: torch.device
) -> CpuPool | CudaPool:
    """The pool for a device."""
    if device.type == "cuda":
        return CudaPool(shape, num_blocks, device)
    return CpuPool(shape, num_blocks, block_tokens)
