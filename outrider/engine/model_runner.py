"""One forward pass over ragged rows of many sequences, on a CPU."""

from collections.abc import Sequence as Tokens

import torch
from torch import Tensor

from outrider.engine.kv_pool import CpuPool, KvShape, Rows
from outrider.engine.loaded_model import LoadedModel


class ModelRunner:
    """Holds a model and its KV pool; `forward` is the only thing that touches either."""

    def __init__(self, loaded: LoadedModel, *, num_blocks: int, block_tokens: int) -> None:
        self.model = loaded.model
        self.block_tokens = block_tokens
        shape = KvShape.of(loaded.config, loaded.dtype)
        self._pool = CpuPool(shape, num_blocks, block_tokens)

    @torch.inference_mode()
    def forward(self, batch: Tokens[Rows]) -> Tensor:  # [logits rows of all, vocab] float32
        """Run the rows; logits come in the order of `batch`, float32."""
        token_ids: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        for rows in batch:
            token_ids.extend(rows.token_ids)
            positions.extend(range(rows.start, rows.start + len(rows.token_ids)))
            wanted.extend(range(len(token_ids) - rows.num_logits, len(token_ids)))
        output = self.model(
            input_ids=torch.tensor([token_ids]),
            position_ids=torch.tensor([positions]),
            use_cache=False,
            logits_to_keep=torch.tensor(wanted, dtype=torch.int64),
            row_layout=self._pool.layout(batch),
        )
        logits: Tensor = output.logits[0].float()
        return logits
