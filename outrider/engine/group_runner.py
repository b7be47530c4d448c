"""A `Runner` whose passes all ranks of a group run: rank 0 leads, the others follow.

Rank 0 has scheduler, blocks and sessions; what it decides travels as steps (`steps.py`). A `Shard`
is a rank's own part: model, KV and device. All ranks call the same methods of their shards in the
same order, so that their collectives meet.
"""

import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Tokens
from typing import Protocol, TypeVar, cast

from torch import Tensor

from outrider.engine import drawing
from outrider.engine.engine import StreamingRunner
from outrider.engine.rows import Draw, Output, Rows
from outrider.engine.steps import Kind, Listener, Step, Teller
from outrider.engine.watch import Watch
from outrider.errors import Unavailable

logger = logging.getLogger(__name__)

_CAUSE_S = 1.0
"""How long to wait for the cause of a failed operation to be known."""

T = TypeVar("T")


class Shard(Protocol):
    """A rank's part of model and KV. Results count on rank 0 alone."""

    @property
    def block_tokens(self) -> int:
        """Tokens of a KV block."""

    def takes(self, batch: Tokens[Rows]) -> bool:
        """Whether every rank can draw what the batch asks for by itself."""

    def run(self, batch: Tokens[Rows]) -> Output:
        """A pass and its draws; the logits of the output are this rank's only."""

    def forward(self, batch: Tokens[Rows]) -> Tensor:  # [logits rows of all, vocab] float32
        """A pass; rank 0 gets the logits of all ranks."""

    def copy_blocks(self, pairs: Tokens[tuple[int, int]]) -> None:
        """Copy whole KV blocks, of all layers: (from, to)."""

    def close(self) -> None:
        """Let go of what holds on to the group."""


class Leader:
    """Rank 0's runner. An operation that fails leaves the group out of step: it raises Unavailable,
    and so does everything after it."""

    def __init__(self, shard: Shard, teller: Teller, watch: Watch) -> None:
        self._shard = shard
        self._teller = teller
        self._watch = watch
        self._lost = ""

    @property
    def block_tokens(self) -> int:
        return self._shard.block_tokens

    def run(self, batch: list[Rows]) -> Output:
        """A pass, what it draws, and the further passes that draws ask for."""
        if self._shard.takes(batch):
            return self._together(lambda: self._shard.run(batch), Kind.RUN, batch)
        return drawing.run(batch, self)

    def forward(self, batch: Tokens[Rows]) -> Tensor:  # [logits rows of all, vocab] float32
        """Run the rows; logits come in the order of `batch`, float32, valid until the next pass."""
        bare = [
            Rows(r.token_ids, r.start, r.blocks, r.num_logits, parents=r.parents) for r in batch
        ]
        return self._together(lambda: self._shard.forward(bare), Kind.FORWARD, bare)

    def copy_blocks(self, pairs: Tokens[tuple[int, int]]) -> None:
        if pairs:
            self._together(lambda: self._shard.copy_blocks(pairs), Kind.COPY, pairs=pairs)

    def end(self) -> None:
        """Let the other ranks go."""
        if not self._lost:
            self._tell(Kind.END)
            self._shard.close()

    def _together(
        self,
        own: Callable[[], T],
        kind: Kind,
        rows: Tokens[Rows] = (),
        pairs: Tokens[tuple[int, int]] = (),
    ) -> T:
        """The others hear of a step first, so that they make ready while this rank does."""
        self._tell(kind, rows, pairs)
        return self._guarded(own)

    def _tell(
        self, kind: Kind, rows: Tokens[Rows] = (), pairs: Tokens[tuple[int, int]] = ()
    ) -> None:
        if self._lost:
            raise Unavailable(self._lost)
        try:
            self._teller.tell(kind, rows, pairs)
        except OSError as error:
            raise self._failed(error) from error

    def _guarded(self, own: Callable[[], T]) -> T:
        try:
            with self._watch.passing():
                return own()
        except Exception as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> Unavailable:
        if self._lost:
            return Unavailable(self._lost)
        cause = self._watch.verdict(_CAUSE_S)
        if not cause:
            logger.error("a pass of the group failed", exc_info=error)
        self._lost = cause or f"a pass of the group failed: {error}"
        return Unavailable(self._lost)


class StreamingLeader(Leader):
    """Of a shard whose device feeds each drawn token to the next pass by itself."""

    def __init__(self, shard: Shard, teller: Teller, watch: Watch) -> None:
        super().__init__(shard, teller, watch)
        self._streaming = cast(StreamingRunner, shard)
        self.max_stream = self._streaming.max_stream

    def can_stream(self, draw: Draw) -> bool:
        return self._streaming.can_stream(draw)

    def stream(self, batch: list[Rows], stop: Callable[[], bool]) -> Iterator[list[int]]:
        """As `StreamingRunner.stream`; the others hear of each further pass before it starts."""

        def stops() -> bool:
            stopping = stop()
            self._tell(Kind.HALT if stopping else Kind.GO)
            return stopping

        self._tell(Kind.STREAM, batch)
        picks = self._streaming.stream(batch, stops)
        while (found := self._guarded(lambda: next(picks, None))) is not None:
            yield found


def lead(shard: Shard, teller: Teller, watch: Watch) -> Leader:
    """Rank 0's runner for a shard."""
    kind = StreamingLeader if isinstance(shard, StreamingRunner) else Leader
    return kind(shard, teller, watch)


def follow(shard: Shard, listener: Listener) -> None:
    """Do what rank 0 says, until it ends the group. Raises what an operation raises."""
    while (step := listener.hear()).kind is not Kind.END:
        _carry_out(step, shard, listener)
    shard.close()


def _carry_out(step: Step, shard: Shard, listener: Listener) -> None:
    batch = list(step.rows)
    if step.kind is Kind.RUN:
        shard.run(batch)
    elif step.kind is Kind.FORWARD:
        shard.forward(batch)
    elif step.kind is Kind.COPY:
        shard.copy_blocks(step.pairs)
    elif step.kind is Kind.STREAM:
        for _ in cast(StreamingRunner, shard).stream(batch, lambda: not listener.goes_on()):
            pass
    else:
        raise Unavailable(f"a step of kind {step.kind.name} came where none is under way")
