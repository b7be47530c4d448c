"""What a round costs a worker beside its pass, behind a short context and a long one.

    python benchmarks/round_growth.py                        # contexts of 256 and 16,384 tokens
    python benchmarks/round_growth.py --sessions 8           # eight in every pass
    PYTHONPATH=../before python benchmarks/round_growth.py   # the code of another folder

CPU time of the worker's thread a round and session, in microseconds: entries taken in, blocks and
rows arranged, tokens drawn, replies made. The model's pass alone is left out; its logits are made
up, so that each token is followed by the next number. The kinds of rounds:

* target, asked: verifications of three guesses that an orchestrator asks for one by one, of which
  now all are right and now only the first;
* target, plain: rounds that the target goes on with by itself;
* target, with a draft: the same with three guesses a round, for which the session has to wait;
* draft, asked: three guesses after each verdict;
* draft, ahead: three guesses for each of eight outcomes of a verification.

Of each kind the least of several runs counts, since others may use the machine. What has to
grow with the context is the table of blocks that a pass reads, four bytes for 32 tokens.
"""

import argparse
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outrider.engine import cpu_kernels, drawing
from outrider.engine.cpu_pass import inputs_of
from outrider.engine.kv_pool import CpuPool, KvShape
from outrider.engine.model_files import default_cache_dir
from outrider.engine.rows import Output, Rows
from outrider.remote.asking import Answer, Asked
from outrider.speculation.forecast import Shared
from outrider.token_log import TokenLog
from outrider.types import (
    DraftPlan,
    GenerationSpec,
    Proposal,
    SamplingParams,
    new_nonce,
    new_session_id,
)
from outrider.v1 import worker_pb2
from outrider.wire import plan_to_proto, proposal_to_proto, spec_to_proto
from outrider.worker.worker import Host, Worker, WorkerLimits
from services.draft.drafter import Drafter
from services.target.verifier import Verifier

VOCABULARY = 64
BLOCK = 32
GUESSES = 3
MORE = 1024
SPEC = GenerationSpec(SamplingParams())
FAN_OUT = (1, 1, 1, 5)
LONGEST_INLINE = 4096


class MadeUp:
    """A runner whose pass costs nothing that is counted."""

    block_tokens = BLOCK

    def __init__(self, num_blocks: int) -> None:
        cpu_kernels.load(default_cache_dir())
        self._pool = CpuPool(KvShape(1, 1, 8, torch.float32), num_blocks, BLOCK)
        self._ones = torch.eye(VOCABULARY).roll(1, 1)
        self.pass_s = 0.0
        self.passes = 0

    def run(self, batch: list[Rows]) -> Output:
        return drawing.run(batch, self)

    def forward(self, batch: Tokens[Rows]) -> Tensor:  # [logits rows of all, vocab] float32
        token_ids, _, wanted, *_ = inputs_of(batch, self._pool)
        started = time.thread_time()
        logits = self._ones[token_ids[0, wanted] % VOCABULARY]
        self.pass_s += time.thread_time() - started
        self.passes += 1
        return logits

    def copy_blocks(self, pairs: Tokens[tuple[int, int]]) -> None:
        self._pool.copy_blocks(pairs)


@dataclass
class Session:
    """The owner's side: the log that both have, and the entries about it."""

    log: TokenLog
    session_id: str = field(default_factory=new_session_id)
    nonce: int = field(default_factory=new_nonce)
    number: int = 0
    held: int = 0

    def entry(self) -> worker_pb2.Entry:
        self.number += 1
        header = worker_pb2.EntryHeader(
            session_id=self.session_id,
            epoch=1,
            owner_nonce=self.nonce,
            number=self.number,
            base_len=len(self.log),
            base_hash=self.log.prefix_hash(len(self.log)),
            timeout_ms=600_000,
        )
        return worker_pb2.Entry(header=header)

    def open(self) -> worker_pb2.Entry:
        entry = self.entry()
        entry.open.spec.CopyFrom(spec_to_proto(SPEC))
        return entry

    def delta(self) -> worker_pb2.TokenDelta:
        start, self.held = self.held, len(self.log)
        return worker_pb2.TokenDelta(start=start, token_ids=self.log.tokens[start:])

    def next_ids(self, count: int, *, wrong: int = 0) -> list[int]:
        """What the model says next; the last `wrong` of them are something else."""
        last = self.log.tokens[-1]
        right = [(last + i) % VOCABULARY for i in range(1, count + 1)]
        return [(token + 7 * (i >= count - wrong)) % VOCABULARY for i, token in enumerate(right)]


class OwnDrafts:
    """In the place of a `DraftPool`: a draft that always knows, a moment later."""

    def __init__(self) -> None:
        self._host: Host | None = None

    usable = True

    def attach(self, host: Host) -> None:
        self._host = host

    def session(self, *_: Any) -> "OwnDrafts":
        return self

    def seen(self, _: str) -> Shared:
        return Shared()

    def is_beside(self, _: str) -> bool:
        return False

    def forget(self, _: Any) -> None: ...

    def cancel(self) -> None: ...

    def ask(
        self, log: TokenLog, asked: Asked, timeout_s: float, on_answer: Callable[[], None]
    ) -> None:
        last = log.tokens[-1]
        guesses = tuple((last + i) % VOCABULARY for i in range(1, asked.ask.num_tokens + 1))

        def answer() -> None:
            proposal = proposal_to_proto(Proposal(guesses))
            asked.answer = Answer(worker_pb2.Proposed(proposal=proposal))
            on_answer()

        assert self._host is not None
        self._host.post(answer)


Ask = Callable[[Session, int], worker_pb2.Entry]


def verify(session: Session, turn: int) -> worker_pb2.Entry:
    """Of every second proposal the last guesses are wrong."""
    entry = session.entry()
    guesses = session.next_ids(GUESSES, wrong=(GUESSES - 1) * (turn % 2))
    entry.verify.delta.CopyFrom(session.delta())
    entry.verify.proposal.CopyFrom(proposal_to_proto(Proposal(tuple(guesses))))
    session.log.append(session.next_ids(2 if turn % 2 else GUESSES + 1))
    return entry


def verify_on(session: Session, turn: int, *, plan: DraftPlan | None = None) -> worker_pb2.Entry:
    """One entry, and the target goes on."""
    entry = session.entry()
    entry.verify.delta.CopyFrom(session.delta())
    entry.verify.more_rounds = MORE
    if plan is not None:
        entry.verify.draft.CopyFrom(plan_to_proto(plan))
    return entry


def propose(session: Session, turn: int) -> worker_pb2.Entry:
    entry = session.entry()
    entry.propose.delta.CopyFrom(session.delta())
    entry.propose.num_speculative_tokens = GUESSES
    session.log.append(session.next_ids(2 if turn % 2 else GUESSES + 1))
    return entry


def propose_ahead(session: Session, turn: int) -> worker_pb2.Entry:
    """The draft's own guesses are pending, and one outcome that it prepared for comes true."""
    entry = session.entry()
    entry.propose.delta.CopyFrom(session.delta())
    entry.propose.num_speculative_tokens = GUESSES
    entry.propose.ahead.pending.token_ids.extend(session.next_ids(GUESSES))
    entry.propose.ahead.fan_out.extend(FAN_OUT)
    session.log.append(session.next_ids(GUESSES + 1))
    return entry


def kinds() -> dict[str, tuple[Callable[[int], Any], Ask]]:
    """Of each kind of round the tier, made for a context, and what is asked."""

    def target(context: int) -> Verifier:
        drafts: Any = OwnDrafts()
        return Verifier(vocab_size=VOCABULARY, context_length=context, drafts=drafts)

    def draft(context: int) -> Drafter:
        return Drafter(vocab_size=VOCABULARY, context_length=context)

    plan = DraftPlan("draft:1", GUESSES, 0, 60.0, 1 << 30)
    return {
        "target, asked": (target, verify),
        "target, plain": (target, verify_on),
        "target, with a draft": (target, functools.partial(verify_on, plan=plan)),
        "draft, asked": (draft, propose),
        "draft, ahead": (draft, propose_ahead),
    }


def measure(
    make: Callable[[int], Any], ask: Ask, context: int, rounds: int, count: int = 1
) -> float:
    """Microseconds a round and session, of `count` sessions whose rounds share their passes."""
    most = context + rounds * (GUESSES + 2) + 64
    runner = MadeUp(count * (2 * most // BLOCK + 64))
    limits = WorkerLimits(runner._pool.keys.shape[1], context_length=most, gather_passes=0.0)
    worker = Worker(runner, make(most), limits, vocab_size=VOCABULARY)
    prompts = [[i % VOCABULARY for i in range(n, n + context)] for n in range(count)]
    sessions = [Session(TokenLog(prompt)) for prompt in prompts]
    marks: list[float] = []
    answered = itertools.count(1)

    def spent() -> float:
        return time.thread_time() - runner.pass_s

    def on_reply(reply: worker_pb2.Reply) -> None:
        if not (reply.HasField("verified") or reply.HasField("proposed")):
            raise RuntimeError(f"no round came of it: {reply}")
        if next(answered) % count:
            return
        marks.append(spent())
        if len(marks) > rounds:
            worker.stop()
        elif not reply.header.more:
            worker.submit([ask(session, len(marks)) for session in sessions], on_reply)

    def begin(_: worker_pb2.BulkResponse | None = None) -> None:
        worker.submit([ask(session, 0) for session in sessions], on_reply)

    worker.submit([session.open() for session in sessions], lambda _: None)
    pieces = [piece for session in sessions for piece in bulk(session)]
    for piece in pieces:
        worker.submit_bulk(piece, begin if piece is pieces[-1] else lambda _: None)
    if not pieces:
        begin()
    worker.run()
    steps = [after - before for before, after in itertools.pairwise(marks)]
    # The first ones fill caches; a mean, because some rounds have more to do than others.
    return 1e6 * sum(steps[rounds // 8 :]) / len(steps[rounds // 8 :]) / count


def bulk(session: Session) -> Iterator[worker_pb2.BulkRequest]:
    """A long prompt, in pieces."""
    while len(session.log) - session.held > LONGEST_INLINE:
        start, stop = session.held, session.held + LONGEST_INLINE
        entry = session.entry()
        entry.header.base_len = session.held = stop
        entry.header.base_hash = session.log.prefix_hash(stop)
        delta = worker_pb2.TokenDelta(start=start, token_ids=session.log.tokens[start:stop])
        yield worker_pb2.BulkRequest(header=entry.header, delta=delta)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 16_384])
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--sessions", type=int, default=1, help="in every pass")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", help="one kind of round")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {}
    for name, (make, ask) in kinds().items():
        if args.only in (None, name):
            us = [
                min(
                    measure(make, ask, context, args.rounds, args.sessions)
                    for _ in range(args.runs)
                )
                for context in args.contexts
            ]
            by_context = dict(zip(map(str, args.contexts), map(round, us), strict=True))
            found[name] = {**by_context, "grows_by": round(us[-1] - us[0])}
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
