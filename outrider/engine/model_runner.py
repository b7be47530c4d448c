"""One forward pass over ragged rows of many sequences, and the KV pool that it reads and writes."""

import itertools
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.engine.attention import RowLayout, Segment
from outrider.engine.loading import LoadedModel


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one sequence: `token_ids` at positions start, start+1, …, whose KV is written.

    `num_logits` of them, the last ones, give logits.
    """

    token_ids: Tokens[int]
    start: int
    blocks: Tokens[int]
    num_logits: int


class ModelRunner:
    """Holds a model and its KV pool; `forward` is the only thing that touches either."""

    def __init__(self, loaded: LoadedModel, *, num_blocks: int, block_tokens: int) -> None:
        self.model = loaded.model
        self.device = loaded.device
        self.block_tokens = block_tokens
        self._query_groups = loaded.config.num_attention_heads // kv_shape(loaded, 1)[2]
        shape = kv_shape(loaded, num_blocks * block_tokens)
        self._keys = torch.empty(shape, dtype=loaded.dtype, device=loaded.device)
        self._values = torch.empty(shape, dtype=loaded.dtype, device=loaded.device)

    @torch.inference_mode()
    def forward(self, batch: Tokens[Rows]) -> Tensor:  # [logits rows of all, vocab] float32
        """Run the rows; logits come in the order of `batch`, float32."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[Tensor] = []
        segments: list[Segment] = []
        wanted: list[int] = []
        for rows in batch:
            first = len(token_ids)
            token_ids.extend(rows.token_ids)
            end = rows.start + len(rows.token_ids)
            positions.extend(range(rows.start, end))
            segment, write_slots = self._segment(rows, first)
            segments.append(segment)
            slots.append(write_slots)
            wanted.extend(range(len(token_ids) - rows.num_logits, len(token_ids)))
        layout = RowLayout(
            keys=self._keys,
            values=self._values,
            write_slots=slots[0] if len(slots) == 1 else torch.cat(slots),
            segments=tuple(segments),
        )
        output = self.model(
            input_ids=torch.tensor([token_ids], device=self.device),
            position_ids=torch.tensor([positions], device=self.device),
            use_cache=False,
            logits_to_keep=torch.tensor(wanted, dtype=torch.int64, device=self.device),
            row_layout=layout,
        )
        logits: Tensor = output.logits[0].float()
        return logits

    def _segment(self, rows: Rows, first_row: int) -> tuple[Segment, Tensor]:
        """Where the rows' context lies, and the slots that the rows themselves fill."""
        count = len(rows.token_ids)
        context = rows.start + count
        blocks = rows.blocks[: -(-context // self.block_tokens)]
        if all(after == before + 1 for before, after in itertools.pairwise(blocks)):
            first_slot = blocks[0] * self.block_tokens
            slots = None
            write = torch.arange(first_slot + rows.start, first_slot + context, device=self.device)
        else:
            first_slot = None
            starts = torch.tensor(blocks, device=self.device) * self.block_tokens
            offsets = torch.arange(self.block_tokens, device=self.device)
            slots = (starts[:, None] + offsets).flatten()[:context]
            write = slots[rows.start :]
        mask = self._causal_mask(rows.start, count) if count > 1 else None
        segment = Segment(first_row, first_row + count, context, first_slot, slots, mask)
        return segment, write

    def _causal_mask(self, start: int, count: int) -> Tensor:  # [groups * rows, context] bool
        seen = torch.arange(start + count, device=self.device)
        own = torch.arange(start, start + count, device=self.device)
        return (seen <= own[:, None]).repeat(self._query_groups, 1)


def kv_shape(loaded: LoadedModel, num_tokens: int) -> tuple[int, int, int, int]:
    """[layers, slots, kv_heads, head_dim] of the keys, and of the values."""
    config = loaded.config
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    # Configs of models without grouped queries do not name the number, or set it to None.
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return config.num_hidden_layers, num_tokens, kv_heads, head_dim


def kv_bytes_per_token(loaded: LoadedModel) -> int:
    layers, _, kv_heads, head_dim = kv_shape(loaded, 1)
    return 2 * layers * kv_heads * head_dim * loaded.dtype.itemsize
