"""One forward pass over ragged rows of many sequences, on a CUDA device.

Passes run as captured CUDA graphs, one for each bucket of rows; what a pass needs to know goes to
the device in one copy. Every layer is compiled once a bucket for all layers together: what differs
between layers, weights and KV, are tensors. Nothing compiles or allocates after `warm_up`.
"""

import logging
import time
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from outrider.engine import cuda_kernels
from outrider.engine.kv_pool import KvShape, Rows
from outrider.engine.loaded_model import LoadedModel

logger = logging.getLogger(__name__)

_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
MAX_ROWS = _BUCKETS[-1]
"""Rows of the largest pass."""


@dataclass(frozen=True, slots=True)
class CudaLayout:
    """A `RowLayout` (outrider.engine.attention) for the Triton kernel."""

    slots: Tensor  # [rows] int32, -1: padding
    positions: Tensor  # [rows] int32
    tiles: Tensor  # [4, rows] int32: sequence, first row, rows (0: none), first position
    tables: Tensor  # [sequences, blocks] int32
    max_context: int

    def attend(
        self,
        module: nn.Module,
        query: Tensor,  # [rows, heads, head_dim]
        key: Tensor,  # [rows, kv_heads, head_dim]
        value: Tensor,  # [rows, kv_heads, head_dim]
        scaling: float,
    ) -> Tensor:  # [rows, heads, head_dim]
        # Not by layer number: a number would make every layer compile anew.
        output: Tensor = torch.ops.outrider_cuda.paged_attention(
            query,
            key,
            value,
            module.kv_keys,
            module.kv_values,
            self.slots,
            self.positions,
            self.tiles,
            self.tables,
            scaling,
            self.max_context,
        )
        return output


class _Bucket:
    """The static inputs of a pass of `rows` rows, and its graph."""

    def __init__(self, rows: int, table_width: int, max_context: int, device: torch.device) -> None:
        self.rows = rows
        sizes = {
            "token_ids": rows,
            "positions": rows,
            "slots": rows,
            "tiles": 4 * rows,
            "wanted": rows,
            "tables": rows * table_width,
        }
        total = sum(sizes.values())
        self._staging = torch.zeros(total, dtype=torch.int32).pin_memory()
        self._inputs = torch.zeros(total, dtype=torch.int32, device=device)
        ends = np.cumsum(list(sizes.values()))
        starts = ends - list(sizes.values())
        self.host = {
            name: self._staging.numpy()[start:end]
            for name, start, end in zip(sizes, starts, ends, strict=True)
        }
        on_device = {
            name: self._inputs[start:end]
            for name, start, end in zip(sizes, starts, ends, strict=True)
        }
        self.token_ids = on_device["token_ids"]
        self.wanted = on_device["wanted"]
        self.table_width = table_width
        self.layout = CudaLayout(
            slots=on_device["slots"],
            positions=on_device["positions"],
            tiles=on_device["tiles"].view(4, rows),
            tables=on_device["tables"].view(-1, table_width),
            max_context=max_context,
        )
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits: Tensor | None = None
        self.host["slots"][:] = -1

    def fill(self, batch: Tokens[Rows]) -> int:
        """Describe a pass; the number of logits rows that it wants."""
        host, block_tokens = self.host, cuda_kernels.BLOCK_TOKENS
        tables = host["tables"].reshape(-1, self.table_width)
        tiles = host["tiles"].reshape(4, self.rows)
        row = tile = wanted = 0
        for number, rows in enumerate(batch):
            count = len(rows.token_ids)
            positions = np.arange(rows.start, rows.start + count)
            blocks = np.asarray(rows.blocks[: -(-(rows.start + count) // block_tokens)])
            tables[number, : len(blocks)] = blocks
            host["token_ids"][row : row + count] = rows.token_ids
            host["positions"][row : row + count] = positions
            host["slots"][row : row + count] = (
                blocks[positions // block_tokens] * block_tokens + positions % block_tokens
            )
            for start in range(0, count, cuda_kernels.TILE_ROWS):
                size = min(cuda_kernels.TILE_ROWS, count - start)
                tiles[:, tile] = (number, row + start, size, rows.start + start)
                tile += 1
            row += count
            host["wanted"][wanted : wanted + rows.num_logits] = np.arange(
                row - rows.num_logits, row
            )
            wanted += rows.num_logits
        host["slots"][row:] = -1
        tiles[2, tile:] = 0
        self._inputs.copy_(self._staging, non_blocking=True)
        return wanted


class CudaRunner:
    """Holds a model and its KV pool; `forward` is the only thing that touches either."""

    block_tokens: int = cuda_kernels.BLOCK_TOKENS

    def __init__(
        self, loaded: LoadedModel, *, num_blocks: int, max_rows: int, max_context: int
    ) -> None:
        self.model = loaded.model
        self._device = loaded.device
        # Graphs run one at a time, so they share their memory.
        self._memory = torch.cuda.graph_pool_handle()
        self._attach_pool(KvShape.of(loaded.config, loaded.dtype), num_blocks)
        width = -(-max_context // self.block_tokens)
        self._buckets = [
            _Bucket(rows, width, max_context, loaded.device)
            for rows in _BUCKETS
            if rows < 2 * max_rows
        ]

    def warm_up(self) -> float:
        """Compile and capture every bucket, largest first; seconds that it took."""
        started = time.monotonic()
        # A bucket is a shape of its own for the same code.
        torch._dynamo.config.recompile_limit = 4 * len(_BUCKETS)
        for layer in self._layers():
            layer.forward = torch.compile(layer.forward, dynamic=False)
        for bucket in reversed(self._buckets):
            self._capture(bucket)
            logger.info(
                "captured a graph",
                extra={"rows": bucket.rows, "seconds": round(time.monotonic() - started, 1)},
            )
        return time.monotonic() - started

    @torch.inference_mode()
    def forward(self, batch: Tokens[Rows]) -> Tensor:  # [logits rows of all, vocab] float32
        """Run the rows; logits come in the order of `batch`, float32, valid until the next pass."""
        total = sum(len(rows.token_ids) for rows in batch)
        bucket = self.bucket_for(total)
        wanted = bucket.fill(batch)
        if bucket.graph is None or bucket.logits is None:
            return self._pass(bucket)[:wanted]
        bucket.graph.replay()
        return bucket.logits[:wanted]

    def bucket_for(self, rows: int) -> _Bucket:
        """The smallest bucket that takes so many rows."""
        return next(bucket for bucket in self._buckets if bucket.rows >= rows)

    def _pass(self, bucket: _Bucket) -> Tensor:
        output = self.model(
            input_ids=bucket.token_ids[None],
            position_ids=bucket.layout.positions[None],
            use_cache=False,
            logits_to_keep=bucket.wanted,
            row_layout=bucket.layout,
        )
        logits: Tensor = output.logits[0].float()
        return logits

    @torch.inference_mode()
    def _capture(self, bucket: _Bucket) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._pass(bucket)
        torch.cuda.current_stream().wait_stream(stream)
        bucket.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(bucket.graph, pool=self._memory):
            bucket.logits = self._pass(bucket)

    def _layers(self) -> list[nn.Module]:
        """The decoder layers: modules that hold an attention module."""
        return [
            module
            for module in self.model.modules()
            if any(hasattr(child, "layer_idx") for child in module.children())
        ]

    def _attach_pool(self, shape: KvShape, num_blocks: int) -> None:
        size = (shape.layers, num_blocks * self.block_tokens, shape.kv_heads, shape.head_dim)
        keys = torch.zeros(size, dtype=shape.dtype, device=self._device)
        values = torch.zeros(size, dtype=shape.dtype, device=self._device)
        for module in self.model.modules():
            layer = getattr(module, "layer_idx", None)
            if layer is not None:
                module.register_buffer("kv_keys", keys[layer], persistent=False)
                module.register_buffer("kv_values", values[layer], persistent=False)
