"""The engine: schedule, run, hand out logits. One thread owns it and everything below it."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outrider.engine.block_manager import BlockManager
from outrider.engine.kv_pool import Rows
from outrider.engine.scheduler import Chunk, Scheduler, Work
from outrider.engine.sequence import Sequence

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """What runs a pass: `ModelRunner` on a CPU, `CudaRunner` on a GPU."""

    @property
    def block_tokens(self) -> int:
        """Tokens of a KV block."""

    def forward(self, batch: list[Rows]) -> Tensor:
        """Logits [logits rows of all, vocab] float32, in the order of `batch`, valid until the
        next pass."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one pass brought: work whose logits are there, and work that broke."""

    ready: tuple[tuple[Work, Tensor], ...]  # logits [num_logits, vocab] float32
    failed: tuple[tuple[Work, Exception], ...] = ()


class Engine:
    """Runs work to its logits. Whoever called `submit` then calls `finish`, or extends the work."""

    def __init__(
        self,
        runner: Runner,
        *,
        num_blocks: int,
        max_rows: int,
        find_idle: Callable[[], Iterable[Sequence]],
    ) -> None:
        self.runner = runner
        self.blocks = BlockManager(num_blocks, runner.block_tokens)
        self.scheduler = Scheduler(self.blocks, max_rows=max_rows, find_idle=find_idle)

    @property
    def capacity_tokens(self) -> int:
        """Longest sequence that fits into the KV pool."""
        return self.blocks.num_blocks * self.blocks.block_tokens

    def step(self) -> StepResult:
        """One pass over the next batch. Work that is ready stays in the scheduler until the
        caller finishes or extends it."""
        batch = self.scheduler.next_batch()
        if not batch:
            return StepResult(())
        try:
            logits = self._run(batch)
        except Exception as error:
            if len(batch) == 1:
                return self._fail(batch[0].work, error)
            logger.exception("a pass over %d sequences failed; running them one by one", len(batch))
            return self._run_one_by_one(batch)
        return StepResult(tuple(self._collect(batch, logits)))

    def _run(self, batch: list[Chunk]) -> Tensor:
        total = sum(chunk.count for chunk in batch)
        rows = []
        for chunk in batch:
            work = chunk.work
            work.batch_rows = total
            stop = work.computed + chunk.count
            rows.append(
                Rows(
                    token_ids=work.tokens[work.computed : stop],
                    start=work.computed,
                    blocks=work.sequence.blocks,
                    num_logits=work.num_logits if chunk.completes else 0,
                )
            )
        return self.runner.forward(rows)

    def _collect(self, batch: list[Chunk], logits: Tensor) -> list[tuple[Work, Tensor]]:
        ready = []
        row = 0
        for chunk in batch:
            work = chunk.work
            completes = chunk.completes
            stop = work.computed + chunk.count
            work.sequence.cached[work.computed :] = work.tokens[work.computed : stop]
            work.computed = stop
            if completes:
                ready.append((work, logits[row : row + work.num_logits]))
                row += work.num_logits
        return ready

    def _run_one_by_one(self, batch: list[Chunk]) -> StepResult:
        ready: list[tuple[Work, Tensor]] = []
        failed: list[tuple[Work, Exception]] = []
        for chunk in batch:
            try:
                ready += self._collect([chunk], self._run([chunk]))
            except Exception as error:
                failed += self._fail(chunk.work, error).failed
        return StepResult(tuple(ready), tuple(failed))

    def _fail(self, work: Work, error: Exception) -> StepResult:
        logger.error("a pass over one sequence failed", exc_info=error)
        # The KV of its rows may be half written.
        del work.sequence.cached[work.computed :]
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
        return StepResult((), ((work, error),))
