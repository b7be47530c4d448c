"""A rank's part of a pass on a CPU."""

from collections.abc import Sequence as Tokens

import torch
from torch import Tensor

from outrider.engine import drawing
from outrider.engine.group import Group
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.model_runner import ModelRunner
from outrider.engine.rows import Output, Rows
from outrider.sampling import join_candidates, shard_candidates
from outrider.types import SamplingParams


class ShardRunner(ModelRunner):
    """A `Shard` (outrider.engine.group_runner): the traced pass holds the sums over ranks."""

    def __init__(
        self, loaded: LoadedModel, group: Group, *, num_blocks: int, block_tokens: int
    ) -> None:
        super().__init__(loaded, num_blocks=num_blocks, block_tokens=block_tokens)
        self._group = group
        self._first = group.seat.rank * (loaded.vocab_size // group.seat.size)

    def takes(self, batch: Tokens[Rows]) -> bool:
        return takes_picks(batch) and all(drawing.is_pick(rows.draw) for rows in batch if rows.draw)

    def run(self, batch: Tokens[Rows]) -> Output:
        """A pass, picks, and the further passes that these ask for, the same on all ranks."""
        return drawing.run(batch, _Part(self), self._pick)

    def forward(self, batch: Tokens[Rows]) -> Tensor:  # [logits rows of all, vocab] float32
        return self._group.join_columns(self.forward_part(batch))

    def close(self) -> None:
        pass

    def forward_part(self, batch: Tokens[Rows]) -> Tensor:  # [rows, vocabulary of this rank]
        """Run the rows; the logits of this rank."""
        return super().forward(batch)

    @torch.inference_mode()
    def _pick(self, logits: Tensor, rows: Tokens[tuple[SamplingParams, int]]) -> Tensor:
        own = shard_candidates(logits, rows, self._first)  # [rows, 3]
        everyone = self._group.all_gather(own)  # [ranks, rows, 3]
        return join_candidates(everyone, rows)


class _Part:
    """A shard as `drawing` wants it: with the logits of this rank alone."""

    def __init__(self, shard: ShardRunner) -> None:
        self.block_tokens = shard.block_tokens
        self.forward = shard.forward_part
        self.copy_blocks = shard.copy_blocks


def takes_picks(batch: Tokens[Rows]) -> bool:
    """Whether something is drawn at every row of logits, and nobody looks at them otherwise."""
    drawn = any(rows.draw for rows in batch)
    return drawn and all(
        rows.draw is not None and rows.draw.spec.logprobs is None
        for rows in batch
        if rows.num_logits
    )
