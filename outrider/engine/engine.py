"""The engine: schedule, run, hand out logits. One thread owns it and everything below it."""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from outrider import trees
from outrider.engine.block_manager import BlockManager
from outrider.engine.kept import Kept
from outrider.engine.rows import Draw, Drawn, Output, Rows
from outrider.engine.scheduler import Chunk, Scheduler, Work
from outrider.engine.sequence import Sequence
from outrider.errors import Unavailable

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """What runs a pass: `ModelRunner` on a CPU, `CudaRunner` on a GPU, `Leader` in a group.

    Unavailable means that nothing can be run any more, and ends the engine; any other error is that
    of a work.
    """

    @property
    def block_tokens(self) -> int:
        """Tokens of a KV block."""

    def run(self, batch: list[Rows]) -> Output:
        """A pass over the batch, what it draws, and the further passes that draws ask for."""


@runtime_checkable
class StreamingRunner(Protocol):
    """A runner whose device feeds each drawn token to the next pass by itself."""

    max_stream: int
    """Passes of one stream at most."""

    def can_stream(self, draw: Draw) -> bool:
        """Whether the device draws this by itself."""

    def stream(self, batch: list[Rows], stop: Callable[[], bool]) -> Iterator[list[int]]:
        """What each entry draws in each of its `draw.steps` passes; fewer once `stop` says so.

        The next pass already runs when the tokens of one are handed out.
        """


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one pass brought: work whose logits are there, and work that broke."""

    ready: tuple[tuple[Work, Tensor], ...]  # logits [num_logits, vocab] float32
    failed: tuple[tuple[Work, Exception], ...] = ()


class _Incomplete(NamedTuple):
    """Kept branches that lack what may follow their last tokens, which may be under way."""

    sequence: Sequence
    kept: Kept
    under_way: Callable[[], list[Drawn]] | None


class Engine:
    """Runs work to its logits and draws. Whoever called `submit` then calls `finish`."""

    def __init__(
        self,
        runner: Runner,
        *,
        num_blocks: int,
        max_rows: int,
        find_idle: Callable[[], Iterable[Sequence]],
    ) -> None:
        self.runner = runner
        self._streams = isinstance(runner, StreamingRunner)
        self.blocks = BlockManager(num_blocks, runner.block_tokens)
        self.scheduler = Scheduler(self.blocks, max_rows=max_rows, find_idle=find_idle)
        self._incomplete: list[_Incomplete] = []
        self.batch_rows = 0
        """Rows of the last pass."""

    @property
    def capacity_tokens(self) -> int:
        """Longest sequence that fits into the KV pool."""
        return self.blocks.num_blocks * self.blocks.block_tokens

    def steps(self, stop: Callable[[], bool]) -> Iterator[StepResult]:
        """The next pass; where the device can go on by itself, further ones until `stop`.

        Work that is ready stays in the scheduler until the caller finishes it, or makes it the
        next round of one row, before it asks for the next result.
        """
        self._complete([item for item in self._incomplete if item.under_way])
        batch = self.scheduler.next_batch()
        count = self._rounds_ahead(batch)
        if count > 1:
            yield from self._stream(batch, count, stop)
        elif batch:
            yield self._step(batch)

    @property
    def can_prepare(self) -> bool:
        """Whether `prepare` has something to do."""
        return bool(self._incomplete)

    def prepare(self) -> None:
        """While nothing else is to be done: complete the branches that the last work has left, so
        that the next one about one of them need not begin with a pass."""
        self._complete(self._incomplete)

    def _complete(self, items: list["_Incomplete"]) -> None:
        self._incomplete = [item for item in self._incomplete if item not in items]
        for sequence, kept, under_way in items:
            if sequence.kept is not kept:
                continue  # Dropped meanwhile.
            try:
                kept.complete(under_way() if under_way else self._after(sequence, kept))
            except Exception:
                logger.exception("branches could not be completed")

    def _after(self, sequence: Sequence, kept: Kept) -> list[Drawn | None]:
        """What may follow the last token of each branch, by a pass over these."""
        rows = kept.last_rows(sequence.blocks, self.blocks.block_tokens)
        return self.runner.run(list(rows)).drawn

    def _rounds_ahead(self, batch: list[Chunk]) -> int:
        """Rounds of the whole batch that can run without the host; KV for them is reserved."""
        if not batch or not self._streams:
            return 1
        runner = cast(StreamingRunner, self.runner)
        works = [chunk.work for chunk in batch]
        count = min(1 + min([work.ahead for work in works]), runner.max_stream)
        plain = all(chunk.completes and chunk.work.num_logits == 1 for chunk in batch)
        if count == 1 or not plain:
            return 1
        if not all(work.draw and runner.can_stream(work.draw) for work in works):
            return 1
        fits = [
            self.blocks.extend(work.sequence.blocks, len(work.tokens) + count - 1) for work in works
        ]
        return count if all(fits) else 1

    def _stream(
        self, batch: list[Chunk], count: int, stop: Callable[[], bool]
    ) -> Iterator[StepResult]:
        """Results of rounds that the device goes through by itself, one behind it."""
        works = [chunk.work for chunk in batch]
        rows = [
            replace(rows, draw=replace(rows.draw, steps=count))
            for rows in self._rows(batch)
            if rows.draw
        ]
        no_logits = torch.empty(0)
        picked = cast(StreamingRunner, self.runner).stream(rows, stop)
        while True:
            try:
                picks = next(picked, None)
            except Unavailable:
                raise
            except Exception as error:
                going = [work for work in works if work in self.scheduler.running]
                yield StepResult((), tuple(f for w in going for f in self._fail(w, error).failed))
                return
            if picks is None:
                return
            ready = []
            for work, pick in zip(works, picks, strict=True):
                if work in self.scheduler.running:
                    work.sequence.wrote(work.computed, work.tokens[work.computed :])
                    work.computed = len(work.tokens)
                    work.drawn = Drawn([pick])
                    ready.append((work, no_logits))
            yield StepResult(tuple(ready))

    def _step(self, batch: list[Chunk]) -> StepResult:
        try:
            output = self._run(batch)
        except Unavailable:
            raise
        except Exception as error:
            if len(batch) == 1:
                return self._fail(batch[0].work, error)
            logger.exception("a pass over %d sequences failed; running them one by one", len(batch))
            return self._run_one_by_one(batch)
        return StepResult(tuple(self._collect(batch, output)))

    def _run(self, batch: list[Chunk]) -> Output:
        return self.runner.run(self._rows(batch))

    def _rows(self, batch: list[Chunk]) -> list[Rows]:
        total = self.batch_rows = sum([chunk.count for chunk in batch])
        prompt_rows = sum([chunk.prompt_rows for chunk in batch])
        rows = []
        for chunk in batch:
            work, completes = chunk.work, chunk.completes
            work.batch_rows = total
            work.prompt_rows += prompt_rows
            start = work.computed
            rows.append(
                Rows(
                    token_ids=work.tokens[start : start + chunk.count],
                    start=start,
                    blocks=work.sequence.blocks,
                    num_logits=work.logits_rows if completes else 0,
                    draw=work.draw if completes else None,
                    scratch=work.scratch,
                    parents=work.parents if completes else (),
                    known=work.known,
                )
            )
        return rows

    def _collect(self, batch: list[Chunk], output: Output) -> list[tuple[Work, Tensor]]:
        ready = []
        row = 0
        for chunk, drawn in zip(batch, output.drawn, strict=True):
            work = chunk.work
            stop = work.computed + chunk.count
            work.sequence.wrote(work.computed, work.tokens[work.computed : stop])
            work.computed = stop
            if chunk.completes:
                if work.parents:
                    # Side nodes of a tree lie at places that are not their positions.
                    side_nodes = len(work.parents) - trees.spine_length(work.parents)
                    work.sequence.forget(stop - side_nodes)
                count = work.logits_rows
                ready.append((work, output.logits[row : row + count]))
                row += count
                work.drawn = drawn
                self._keep(work, output)
                if work.draw and drawn and work.draw.steps > 1 and not work.draw.branches:
                    # Every guess but the last was fed to a pass.
                    work.sequence.wrote(stop, drawn.token_ids[:-1])
        return ready

    def _keep(self, work: Work, output: Output) -> None:
        """Let the sequence keep its branches where they were drawn for that."""
        if not (work.draw and work.drawn and work.draw.branches and work.draw.alternatives):
            return
        size, sequence = self.blocks.block_tokens, work.sequence
        kept = sequence.kept = Kept.of(work.draw, work.drawn, work.scratch, size)
        work.scratch = []
        still = [item for item in self._incomplete if item.sequence.kept is item.kept]
        self._incomplete = [*still, _Incomplete(sequence, kept, output.after_branches)]

    def _run_one_by_one(self, batch: list[Chunk]) -> StepResult:
        ready: list[tuple[Work, Tensor]] = []
        failed: list[tuple[Work, Exception]] = []
        for chunk in batch:
            try:
                # Logits are valid until the next pass.
                ready += [
                    (work, logits.clone())
                    for work, logits in self._collect([chunk], self._run([chunk]))
                ]
            except Unavailable:
                raise
            except Exception as error:
                failed += self._fail(chunk.work, error).failed
        return StepResult(tuple(ready), tuple(failed))

    def _fail(self, work: Work, error: Exception) -> StepResult:
        logger.error("a pass over one sequence failed", exc_info=error)
        # The KV of its rows may be half written.
        work.sequence.forget(work.computed)
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
        return StepResult((), ((work, error),))
