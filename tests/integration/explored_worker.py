"""A real target worker that is asked what an event makes of it, without a model and a thread.

Sessions, log, sequence, scheduler, blocks and verifier are those of production. In place of the
model there is a memory in which each place of KV holds the text that it came from, so that what a
pass really sees can be compared with what its worker believes.
"""

import copy
import functools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from explored_store import PROMPT, Broken
from outrider.engine.rows import Drawn, Output, Rows
from outrider.engine.sequence import common_prefix
from outrider.types import GenerationSpec, Proposal, SamplingParams, chain_hash
from outrider.v1 import worker_pb2
from outrider.wire import proposal_to_proto, spec_to_proto
from outrider.worker.worker import Worker, WorkerLimits
from owner_lives import Life
from services.target.verifier import Verifier

SESSION_ID = "e" * 22
KEY = (SESSION_ID, 0)
VOCAB = 10_000


class Sent(NamedTuple):
    """An entry that an owner has sent; it arrives at any time, any number of times, or never."""

    life: Life
    number: int
    op: str
    base_len: int
    start: int = 0
    """Where the tokens that it brings begin."""


PASS, TAKE_KV, EVICT = "pass", "take KV", "evict"
"""The worker runs a pass; it takes the KV of the session, which has no work, for another one; it
forgets that session."""
Event = Sent | str


class Step(NamedTuple):
    """What an event led to: the state, and in whose names something was carried out there."""

    key: Any
    carried_out: tuple[Life, ...] = ()
    number: int | None = None
    """Of the entry that was."""


@functools.cache
def message_of(sent: Sent) -> worker_pb2.Entry | worker_pb2.BulkRequest:
    """What stands on the wire."""
    life, tokens = sent.life, sent.life.tokens(sent.base_len)
    header = worker_pb2.EntryHeader(
        session_id=SESSION_ID,
        epoch=life.epoch,
        owner_nonce=life.owner_nonce,
        number=sent.number,
        base_len=sent.base_len,
        base_hash=chain_hash(0, tokens),
        timeout_ms=60_000,
        request_id=str(_index_of(life)),
    )
    delta = worker_pb2.TokenDelta(start=sent.start, token_ids=tokens[sent.start :])
    if sent.op == "bulk":
        return worker_pb2.BulkRequest(header=header, delta=delta)
    entry = worker_pb2.Entry(header=header)
    if sent.op == "open":
        sampling = SamplingParams(seed=_index_of(life))
        entry.open.spec.CopyFrom(spec_to_proto(GenerationSpec(sampling, prompt_len=len(PROMPT))))
    elif sent.op == "close":
        entry.close.SetInParent()
    else:
        entry.verify.delta.CopyFrom(delta)
        entry.verify.proposal.CopyFrom(proposal_to_proto(Proposal(_guesses(sent))))
        entry.verify.more_rounds = int(sent.start == sent.base_len)
    return entry


def _guesses(sent: Sent) -> tuple[int, ...]:
    """A right one, or what the next owner will say there: rejected KV that may come right."""
    if sent.start == 0:
        return ()
    wrong = sent.start == sent.base_len
    return (sent.life.own(sent.base_len) + 1000 * wrong,)


_lives: dict[Life, int] = {}
"""Each by a number, which its entries bear as request id and its draws as seed."""


def _index_of(life: Life) -> int:
    return _lives.setdefault(life, len(_lives))


def _life(index: int) -> Life:
    return next(life for life, its in _lives.items() if its == index)


_NO_LOGITS = torch.empty(64, 0)
"""Nobody looks at them: the memory draws."""


class Memory:
    """A `Runner` whose KV is the text that it came from."""

    block_tokens = 2

    def __init__(self) -> None:
        self.places: dict[tuple[int, int], tuple[int, ...]] = {}
        self.wrong = ""
        """What was seen that should not have been."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Memory":
        other = Memory()
        other.places, other.wrong = dict(self.places), self.wrong
        return other

    def run(self, batch: list[Rows]) -> Output:
        drawn: list[Drawn | None] = []
        for rows in batch:
            seen = self.text(rows.blocks, rows.start)
            for place, token in enumerate(rows.token_ids, rows.start):
                seen = (*seen, token)
                self.places[self._slot(rows.blocks, place)] = seen
            drawn.append(self._draw(rows, seen))
        return Output(_NO_LOGITS, drawn)

    def text(self, blocks: Sequence[int], length: int) -> tuple[int, ...]:
        """What attention over the first places sees; -1 where that is KV of another prefix."""
        found = [self.places.get(self._slot(blocks, place), (-1,)) for place in range(length)]
        whole = found[-1] if found else ()
        return tuple(
            text[-1] if text == whole[: place + 1] else -1 for place, text in enumerate(found)
        )

    def _slot(self, blocks: Sequence[int], place: int) -> tuple[int, int]:
        return blocks[place // self.block_tokens], place % self.block_tokens

    def _draw(self, rows: Rows, seen: tuple[int, ...]) -> Drawn | None:
        if rows.draw is None:
            return None
        life = _life(rows.draw.spec.sampling.seed)
        base = life.tokens(rows.draw.base_len)
        if seen[: len(base)] != base:
            self.wrong = f"a pass for {life} on {base} saw {seen}"
        return Drawn([life.own(place) for place in rows.drawn_positions(rows.draw)])


class ExploredWorker:
    """A worker to which the given events have happened. Raises Broken, then and later."""

    def __init__(self, history: Sequence[Event] = ()) -> None:
        self.memory = Memory()
        self.verifier = Verifier(vocab_size=VOCAB, context_length=64)
        limits = WorkerLimits(num_blocks=24, max_rows=2, context_length=64)
        self.worker = Worker(self.memory, self.verifier, limits, vocab_size=VOCAB)
        for event in history:
            self._happens(event)

    def copy(self) -> "ExploredWorker":
        """Another one in the same state. What they share is never changed, or only counts."""
        worker = self.worker
        shared = [worker._thread, worker._inbox, worker.limits, worker.counters, worker._window]
        shared += [self.verifier._decider, self.verifier.buffer_use]
        shared += [work.owner.entry for work in self._works]
        return copy.deepcopy(self, {id(part): part for part in shared})

    def apply(self, event: Event) -> Step:
        carried_out = self._happens(event)
        self._check()
        number = event.number if isinstance(event, Sent) and carried_out else None
        return Step(self.key, carried_out, number)

    def _happens(self, event: Event) -> tuple[Life, ...]:
        """In whose names something was carried out."""
        if isinstance(event, Sent):
            return (event.life,) if self._deliver(event) else ()
        if event == PASS:
            owners = tuple(_life(int(w.owner.entry.header.request_id)) for w in self._works)
            self.worker._step()
            return owners
        session = self._session
        if session is not None and not session.works:
            if event == EVICT:
                self.worker._forget(KEY)
            else:
                self.worker.engine.scheduler.release(session.sequence)
        return ()

    @property
    def _works(self) -> list[Any]:
        return self.worker.engine.scheduler.works

    @property
    def _session(self) -> Any:
        return self.worker._sessions._sessions.get(KEY)

    def _deliver(self, sent: Sent) -> bool:
        """Whether it was carried out."""
        replies: list[Any] = []
        message = message_of(sent)
        if isinstance(message, worker_pb2.BulkRequest):
            self.worker._handle_bulk(message, replies.append)
        else:
            self.worker._handle(message, replies.append, time.monotonic())
        reply = next((r for r in replies if _names(r.header, sent)), None)
        result = reply.WhichOneof("result") if reply is not None else "begun"
        if result == "refused" and reply.refused.reason == worker_pb2.REFUSAL_REASON_INTERNAL:
            raise Broken(f"the worker broke: {reply.refused.message}")
        if result in ("refused", "need_tokens"):
            return False
        if result == "opened":
            self._check_opened(reply.opened)
        elif result in ("begun", "held"):
            log, meant = tuple(self._session.sequence.log.tokens), sent.life.tokens(sent.base_len)
            if log != meant:
                raise Broken(f"{log} was taken for the {meant} of {sent.life}")
        return True

    def _check_opened(self, opened: worker_pb2.Opened) -> None:
        """What its owner is told that it has."""
        sequence = self._session.sequence
        log, cached = sequence.log.tokens, sequence.cached
        if (opened.have_len, opened.cached_len) != (len(log), common_prefix(cached, log)):
            raise Broken(f"of {log} and KV of {cached} it told {opened}")

    def _check(self) -> None:
        """KV is believed to be what it is: the session's own, and what others may share."""
        if self.memory.wrong:
            raise Broken(self.memory.wrong)
        assert self.worker.engine.blocks._free, "no block may lose its prefix"
        if self._session is not None:
            cached = tuple(self._session.sequence.cached)
            found = self.memory.text(self._session.sequence.blocks, len(cached))
            if found != cached:
                raise Broken(f"KV of {found} is taken for that of {cached}")
        for text, (_, prefix_hash) in self._offered():
            if -1 in text or chain_hash(0, text) != prefix_hash:
                raise Broken(f"KV of {text} is offered as that of another prefix")

    def _offered(self) -> list[tuple[tuple[int, ...], Any]]:
        """Of each registered block the text that its KV came from, and what it is found by."""
        last = self.memory.block_tokens - 1
        contents = self.worker.engine.blocks._contents
        return [
            (self.memory.places.get((block, last), (-1,)), content.key)
            for block, content in contents.items()
        ]

    @property
    def key(self) -> Any:
        """All that what comes next depends on. Free blocks are alike, and there are enough."""
        blocks, closed = self.worker.engine.blocks, self.worker._sessions._closed.get(KEY)
        serials = {content.serial: content.key for content in blocks._contents.values()}
        session = None
        if self._session is not None:
            seq, own = self._session.sequence, self._session
            session = (
                (own.epoch, own.owner_nonce, own.last_number, own.works),
                seq.spec and seq.spec.sampling.seed,
                (tuple(seq.log.tokens), seq.log._stood),
                (tuple(seq.cached), tuple(seq._line), seq._in_line, seq._in_log),
                tuple(block in blocks._contents for block in seq.blocks),
                (seq.offered, seq.chain.borrowed, tuple(map(serials.get, seq.chain.serials))),
            )
        works = tuple(
            (
                (work.owner.entry.header.request_id, work.owner.entry.header.number),
                (tuple(work.tokens), work.computed, work.num_logits, work.looked_up),
                (work.context.base_len, work.context.more_rounds),
                work in self.worker.engine.scheduler.running,
            )
            for work in self._works
        )
        offered = frozenset(text for text, _ in self._offered())
        return session, closed, works, offered


def _names(reply: worker_pb2.ReplyHeader, sent: Sent) -> bool:
    fence = (reply.epoch, reply.owner_nonce, reply.number)
    return fence == (sent.life.epoch, sent.life.owner_nonce, sent.number)
