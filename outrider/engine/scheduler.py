"""Continuous batching: which rows of which sequences go into the next pass.

Work stands in a queue until the KV that it may need at worst is reserved; then it takes part in
every pass until its last row is computed. Short work (decode, verification) goes first, long
prompts fill what is left of the row budget in chunks, so that they never stall others' rounds. A
share of the rows belongs to the oldest work, so that it ends however much short work comes.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Protocol

from outrider.engine.block_manager import BlockManager
from outrider.engine.rows import Draw, Drawn
from outrider.engine.sequence import Sequence


@dataclass(slots=True, eq=False)
class Work:
    """Rows to compute for one sequence: KV of `tokens`, logits of the last `num_logits`.

    Where `tokens` are the sequence's own `line`, none of them is compared twice.
    `parents` makes a tree of the last tokens, as in `Rows`; KV of its spine alone is kept.
    `draw` says what to draw there, `drawn` is what came of it. `reserve` is the length in tokens
    for which KV is taken before the work starts. `ahead` counts the rounds of one plain row that
    are sure to follow unless a token ends them. `context` belongs to the tier that made the work,
    `owner` to the worker that runs it. `computed` counts the tokens whose KV exists.
    """

    sequence: Sequence
    tokens: list[int]
    num_logits: int
    reserve: int
    deadline: float
    draw: Draw | None = None
    parents: tuple[int, ...] = ()
    drawn: Drawn | None = None
    ahead: int = 0
    context: Any = None
    owner: Any = None
    computed: int = 0
    arrived: float = field(default_factory=time.monotonic)
    started: float | None = None
    batch_rows: int = 0
    prompt_rows: int = 0
    """Rows without logits in its passes, those of others included."""
    reused: int = 0
    """Tokens whose KV was there when the work started."""
    looked_up: bool = False
    """The shared prefixes have been searched for it."""
    lacked: range | None = None
    """Places whose KV is computed before its first results, where a store looks at that."""
    scratch: list[int] = field(default_factory=list)
    """Blocks of the draw's branches, while the work runs."""
    known: list[list[int]] = field(default_factory=list)
    """As in `Rows`: nothing is left to compute before the branches."""

    @property
    def pending(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self.tokens) - self.computed

    @property
    def logits_rows(self) -> int:
        """Rows of logits that its last chunk brings."""
        return 0 if self.known else self.num_logits


class PrefixStore(Protocol):
    """Keeps KV of full blocks elsewhere and brings it back; called on the engine's thread, and
    never waits."""

    def begin(self, work: Work) -> float | None:
        """Start to bring KV that an admitted work lacks into its blocks; until when that may take
        (monotonic). None: it is computed."""

    def offer(self, work: Work, num_blocks: int) -> None:
        """The first blocks of the work's sequence are full and registered, some of them newly."""


@dataclass(slots=True)
class PrefixCounts:
    """Tokens of whole blocks that a sequence lacked at admission, and those found with others."""

    asked: int = 0
    found: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """`count` tokens of a work's pending ones, for the next pass; `completes`: they are all."""

    work: Work
    count: int
    completes: bool

    @property
    def prompt_rows(self) -> int:
        """Rows that bring no logits."""
        return max(self.count - self.work.logits_rows, 0) if self.completes else self.count


class Scheduler:
    """Owns the queue and the running work. `find_idle` yields sequences that may lose their KV,
    the one that is missed least first."""

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_rows: int,
        find_idle: Callable[[], Iterable[Sequence]],
    ) -> None:
        self.blocks = blocks
        self.max_rows = max_rows
        self.waiting: deque[Work] = deque()
        self.running: list[Work] = []
        self.restoring: dict[Work, float] = {}
        """Work that has its place and waits for KV from the store, until when at most."""
        self.store: PrefixStore | None = None
        self._stuck = False
        """The first in the queue has no place, and none has become free since."""
        self.preemptions = 0
        self.prefix = PrefixCounts()
        self._find_idle = find_idle

    @property
    def works(self) -> list[Work]:
        """All work, running first."""
        return [*self.running, *self.restoring, *self.waiting]

    def submit(self, work: Work) -> None:
        self.waiting.append(work)

    def drop(self, is_dead: Callable[[Work], bool]) -> list[Work]:
        """Take out and return the work for which `is_dead` holds; what it computed stays KV."""
        dead = [work for work in self.works if is_dead(work)]
        for work in dead:
            if self.restoring.pop(work, None) is None:
                (self.running if work in self.running else self.waiting).remove(work)
            self._trim(work)
        return dead

    def patience_s(self) -> float:
        """How long there is nothing to do unless something comes from outside."""
        if self.running or not self.restoring or (self.waiting and not self._stuck):
            return 0.0
        return max(min(self.restoring.values()) - time.monotonic(), 0.0)

    def restored(self, work: Work, stop: int) -> None:
        """KV of the tokens up to `stop` of a work that waits for it is there."""
        work.sequence.wrote(work.computed, work.tokens[work.computed : stop])
        work.computed = work.reused = stop

    def end_restore(self, work: Work) -> None:
        """What a work still lacks is computed."""
        if self.restoring.pop(work, None) is not None:
            self.running.append(work)
            self._register(work)

    def next_batch(self) -> list[Chunk]:
        """The chunks of the next pass; empty when nothing can run."""
        if self.restoring:
            now = time.monotonic()
            for work in [work for work, until in self.restoring.items() if until <= now]:
                self.end_restore(work)
        self._admit()
        if not self.running:
            return []
        oldest = self.running[0]
        owed = _fitting(oldest, max(self.max_rows // 4, 1)) or oldest.pending
        budget = max(self.max_rows - owed, 0)
        batch = []
        for work in sorted(self.running, key=attrgetter("pending")):
            share = budget + owed if work is oldest else budget
            count = _fitting(work, share)
            if count or work.known:
                batch.append(Chunk(work, count, completes=count == work.pending))
            budget = share - count
        return batch

    def go_on(self, work: Work) -> bool:
        """Keep work running that has got more tokens; False where KV is short. Then it must
        finish, and what waits gets its turn."""
        self._register(work)
        if self.waiting or not self.blocks.extend(work.sequence.blocks, work.reserve):
            return False
        self.running.remove(work)
        self.running.append(work)  # Behind those who have waited longer for a pass.
        return True

    def finish(self, work: Work) -> None:
        self.running.remove(work)
        self._stuck = False
        self._trim(work)
        self._register(work)

    def _register(self, work: Work) -> None:
        """Offer blocks that have become full of committed tokens."""
        sequence = work.sequence
        size = self.blocks.block_tokens
        if len(sequence.cached) // size <= sequence.offered:
            return  # No further block is full: comparing the tokens can wait.
        full = sequence.committed_kv() // size
        if full > sequence.offered:
            self.blocks.register(sequence.salt, sequence.log, sequence.blocks, full, sequence.chain)
            sequence.offered = full
            if self.store is not None:
                self.store.offer(work, full)

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence's KV."""
        self._drop_kept(sequence)
        sequence.let_go()
        self.blocks.truncate(sequence.blocks, 0)

    def _admit(self) -> None:
        while self.waiting:
            work = self.waiting[0]
            self._stuck = not self._reserve(work)
            if self._stuck:
                return
            self.waiting.popleft()
            work.started = time.monotonic()
            until = self.store.begin(work) if self.store is not None else None
            if until is None:
                self.running.append(work)
            else:
                self.restoring[work] = until

    def _reserve(self, work: Work) -> bool:
        """Take KV for the worst case, from idle sequences or from later work in the queue.

        Running work keeps its KV and comes to an end, so the first in the queue never starves.
        """
        self._adopt_kept(work)
        self._adopt_prefix(work)
        if self._take_place(work):
            return True
        for victim in self._victims(work.sequence):
            self.release(victim)
            self.preemptions += 1
            if self._take_place(work):
                return True
        return False

    def _adopt_kept(self, work: Work) -> None:
        """Make the branch that a work is about the sequence, and drop all others."""
        sequence, draw = work.sequence, work.draw
        if sequence.kept is None:
            return
        for branch in sequence.kept.branches if draw and draw.branches else ():
            start = branch.start
            known = branch.known_for(work.tokens, draw) if draw else None
            if known is None or sequence.usable_kv(work.tokens, 0) < start:
                continue
            work.known = known
            size = self.blocks.block_tokens
            self.blocks.truncate(sequence.blocks, start // size * size)
            sequence.blocks.extend(branch.blocks)
            sequence.wrote(start, work.tokens[start:])
            branch.blocks = []
            break
        self._drop_kept(sequence)

    def _drop_kept(self, sequence: Sequence) -> None:
        kept, sequence.kept = sequence.kept, None
        for branch in kept.branches if kept else ():
            self.blocks.truncate(branch.blocks, 0)

    def _adopt_prefix(self, work: Work) -> None:
        """Take over KV that others have computed for the same tokens, where it reaches further."""
        if work.looked_up or work.known:
            return
        sequence, size = work.sequence, self.blocks.block_tokens
        own = sequence.usable_kv(work.tokens, work.num_logits)
        most = min(len(work.tokens) - work.num_logits, len(sequence.log)) // size
        if most * size <= own:
            return
        work.looked_up = True
        self.prefix.asked += most * size - own
        chain = sequence.chain.start(own // size)
        found = self.blocks.find(sequence.salt, sequence.log, most, chain)
        stop = len(chain) * size
        if stop <= own:
            return
        self.prefix.found += stop - own
        start = stop - len(found) * size
        shared = self.blocks.share(found)
        self.blocks.truncate(sequence.blocks, start)
        sequence.blocks.extend(shared)
        sequence.wrote(start, work.tokens[start:stop])
        sequence.offered, sequence.chain = len(chain), chain

    def _take_place(self, work: Work) -> bool:
        """Reserve the blocks that the work writes; what KV is there decides where it starts."""
        sequence = work.sequence
        if work.known and sequence.usable_kv(work.tokens, 0) < len(work.tokens):
            work.known = []  # Its KV went to others while it waited.
        start: int | None = len(work.tokens)
        if not work.known:
            usable = sequence.usable_kv(work.tokens, work.num_logits)
            start = self.blocks.own(sequence.blocks, usable)
        if start is None:
            return False
        work.computed = work.reused = start
        sequence.forget(start)
        size = self.blocks.block_tokens
        sequence.offered = min(sequence.offered, start // size)
        sequence.chain.cut(start // size)
        if not self.blocks.extend(sequence.blocks, work.reserve):
            return False
        if work.draw is None or not work.draw.branches:
            return True
        return self.blocks.extend(work.scratch, work.draw.scratch_blocks(size) * size)

    def _victims(self, sequence: Sequence) -> Iterator[Sequence]:
        yield from self._find_idle()
        for work in reversed(self.waiting):
            if work.sequence is not sequence and work.sequence.blocks:
                yield work.sequence

    def _trim(self, work: Work) -> None:
        self.blocks.truncate(work.sequence.blocks, len(work.sequence.cached))
        self.blocks.truncate(work.scratch, 0)


def _fitting(work: Work, rows: int) -> int:
    """How many of the pending tokens to compute when there is room for `rows`.

    Rows whose logits are wanted are never split: logits come from one pass.
    """
    pending = work.pending
    return pending if pending <= rows else min(rows, pending - work.num_logits)
