"""One forward pass over ragged rows of many sequences, on a CPU."""

from collections.abc import Sequence as Tokens

import torch
from torch import Tensor

from outrider.engine import drawing
from outrider.engine.cpu_pass import build_pass, inputs_of
from outrider.engine.kv_pool import CpuPool, KvShape
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.rows import Output, Rows


class ModelRunner:
    """Holds a model and its KV pool; `run` and `forward` alone touch them."""

    def __init__(self, loaded: LoadedModel, *, num_blocks: int, block_tokens: int) -> None:
        self.model = loaded.model
        self.block_tokens = block_tokens
        shape = KvShape.of(loaded.config, loaded.dtype, loaded.ranks)
        self._pool = CpuPool(shape, num_blocks, block_tokens)
        self.block_copies = self._pool.copies
        self._pass = build_pass(loaded.model, self._pool, loaded.vocab_size)

    def run(self, batch: Tokens[Rows]) -> Output:
        """A pass, what it draws, and the further passes that draws ask for."""
        return drawing.run(batch, self)

    @torch.inference_mode()
    def forward(self, batch: Tokens[Rows]) -> Tensor:  # [logits rows of all, vocab] float32
        """Run the rows; logits come in the order of `batch`, float32."""
        return self._pass(*inputs_of(batch, self._pool))

    def copy_blocks(self, pairs: Tokens[tuple[int, int]]) -> None:
        """Copy the KV of whole blocks, of all layers: (from, to)."""
        self._pool.copy_blocks(pairs)
