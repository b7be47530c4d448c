"""A rank's part of passes and draws on a CUDA device.

The sums over ranks are captured in the pass's graph, what ranks tell each other about their parts
of the vocabulary in the graphs that draw. Every rank captures the same graphs in the same order and
then replays those that rank 0 replays, so that every collective meets its peers. Picks are the same
on all ranks without the host: the loops that feed them to further passes run on each device.
"""

from collections.abc import Sequence as Tokens

import torch
from torch import Tensor

from outrider.engine.cuda_runner import CudaRunner, _Bucket
from outrider.engine.group import Group
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.rows import Draw, Rows
from outrider.engine.shard_runner import takes_picks
from outrider.sampling.cuda_shards import join_candidates, shard_candidates


class CudaShard(CudaRunner):
    """A `Shard` (outrider.engine.group_runner) that streams."""

    # Threads of NCCL ask the device things while another one captures.
    _capture_mode = "thread_local"

    def __init__(
        self,
        loaded: LoadedModel,
        group: Group,
        *,
        num_blocks: int,
        max_rows: int,
        max_context: int,
    ) -> None:
        super().__init__(
            loaded,
            num_blocks=num_blocks,
            max_rows=max_rows,
            max_context=max_context,
            leaves_distributions=False,
        )
        self._group = group
        self._dtype = loaded.dtype
        self._first = group.seat.rank * (loaded.vocab_size // group.seat.size)

    def takes(self, batch: Tokens[Rows]) -> bool:
        return takes_picks(batch) and self._takes(batch)

    def can_stream(self, draw: Draw) -> bool:
        return super().can_stream(draw) and draw.spec.logprobs is None

    @torch.inference_mode()
    def forward(self, batch: Tokens[Rows]) -> Tensor:  # [logits rows of all, vocab] float32
        return self._join_logits(self._run_rows(batch))

    def close(self) -> None:
        """NCCL waits for the graphs that hold its operations before it ends."""
        torch.cuda.synchronize()
        for bucket in self._buckets:
            bucket.graph = None
            bucket.draw_graphs.clear()

    def _join_logits(self, part: Tensor) -> Tensor:  # [rows, vocabulary of a rank] -> [rows, vocab]
        # They came as the model's type, so nothing is lost, and half as much travels.
        return self._group.join_columns(part.to(self._dtype)).float()

    def _pick(self, bucket: _Bucket, cuts: bool, candidates: int) -> None:
        if bucket.logits is None:
            raise RuntimeError("nothing was computed yet")
        logits, params = bucket.logits, bucket.inputs.params
        if not cuts and candidates == 1:
            everyone = self._group.all_gather(shard_candidates(logits, params, self._first))
            self._note(join_candidates(everyone, params))
            return
        # What is cut off or comes next depends on all tokens. Rank 0 looks at them for all.
        whole = self._join_logits(logits)  # [rows, vocab]
        if self._group.seat.rank == 0:
            self._note(self._pick_among(whole, params, cuts, candidates))
        self._group.broadcast(self._buffers.picks[: len(logits) * candidates])
