"""The draft's tier: k guesses, one forward pass each, for all sessions of the batch at once."""

import functools
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, replace

from torch import Tensor

from outrider.engine.rows import Branch, Draw, Drawn
from outrider.engine.scheduler import Work
from outrider.engine.sequence import Sequence
from outrider.errors import InvalidArgument, Unsupported
from outrider.types import (
    MAX_FAN_OUT,
    MAX_SPECULATIVE_TOKENS,
    GenerationSpec,
    Proposal,
)
from outrider.v1 import worker_pb2
from outrider.wire import (
    check_alternatives,
    distribution_to_proto,
    fill_timing,
    proposal_from_proto,
    proposal_to_proto,
    require,
)
from outrider.worker.sessions import Key, Refusal
from outrider.worker.worker import Host, Made, Next, deadline_of, timing_of

PROPOSER_NAME = "draft"
_KEPT_RANKS = 7
"""Tokens that may follow each guess of a branch that is kept, beside the one that was drawn."""


@dataclass(slots=True)
class DraftWork:
    """Proposals made, and the guesses in them: after bases, and for outcomes ahead."""

    proposals: int = 0
    guesses: int = 0
    outcomes: int = 0
    outcome_guesses: int = 0

    def count(self, draw: Draw) -> None:
        """Something was drawn."""
        if draw.branches:
            self.outcomes += len(draw.branches)
            self.outcome_guesses += len(draw.branches) * draw.steps
        else:
            self.proposals += 1
            self.guesses += draw.steps * (1 + draw.alternatives)


class Drafter:
    """A `Tier` (outrider.worker.worker) that makes proposals with a draft model.

    Guesses are drawn as the verification mode wants them: the argmax at temperature 0, the
    noisy argmax that the target will take (`coupled`), or a sample of the truncated distribution
    that travels with the guess (`rejection`). Asked for alternatives, it sends the runners-up of
    each guess as leaves beside the chain. Asked ahead, it guesses what the target may say next and
    goes on from each of these outcomes, as a branch of the same work; asked to run ahead, it
    samples the next guess too, and goes on from that one.
    """

    def __init__(self, *, vocab_size: int, context_length: int) -> None:
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._host: Host | None = None
        self.made = DraftWork()

    def attach(self, host: Host) -> None:
        self._host = host

    def begin(self, entry: worker_pb2.Entry, sequence: Sequence, spec: GenerationSpec) -> Work:
        if not entry.HasField("propose"):
            raise Refusal(
                worker_pb2.REFUSAL_REASON_UNSUPPORTED, "a draft only proposes", field="op"
            )
        propose = entry.propose
        wanted = propose.num_speculative_tokens
        if not 1 <= wanted <= MAX_SPECULATIVE_TOKENS:
            raise InvalidArgument(
                f"{wanted} is not in [1, {MAX_SPECULATIVE_TOKENS}]", field="num_speculative_tokens"
            )
        require(len(sequence.log) > 0, "a base needs at least one token", "base_len")
        alternatives = _alternatives(propose, spec)
        base_len = len(sequence.log)
        if propose.HasField("ahead"):
            pending, branches = self._ahead(propose.ahead, spec)
            room = self._room(base_len + len(pending) + 1)
            if room < 1:
                raise Refusal(
                    worker_pb2.REFUSAL_REASON_CONTEXT_EXCEEDED,
                    f"{len(pending)} pending tokens leave no room in a context of "
                    f"{self._context_length}",
                    field="ahead.pending",
                )
            steps = min(wanted, room)
            ranks = self._kept_ranks(spec, base_len + len(pending) + steps)
            draw = Draw(spec, base_len, steps, branches, ranks)
            return _work(entry, sequence, pending, draw, reserve=base_len + len(pending))
        wanted = min(wanted, self._room(base_len))
        draw = Draw(spec, base_len, steps=wanted, alternatives=alternatives)
        return _work(entry, sequence, (), draw, reserve=base_len + wanted - 1)

    def advance(self, ready: Tokens[tuple[Work, Tensor]]) -> list[Made]:
        for work, _ in ready:
            if work.draw is not None:
                self.made.count(work.draw)
        return [functools.partial(_proposed, work) for work, _ in ready]

    def go_on(self, work: Work) -> Next:
        return Next.NONE

    def end(self, work: Work) -> None:
        pass

    def tune(self, work: Work, entry: worker_pb2.TuneEntry) -> None:
        raise Refusal(worker_pb2.REFUSAL_REASON_UNSUPPORTED, "a draft only proposes", field="op")

    def extend(self, work: Work, entry: worker_pb2.ExtendEntry) -> None:
        raise Refusal(worker_pb2.REFUSAL_REASON_UNSUPPORTED, "a draft only proposes", field="op")

    def forget(self, key: Key) -> None:
        pass

    def _room(self, base_len: int) -> int:
        """Guesses after a base: guess i is drawn from the row at base_len - 1 + i, which must be
        in the context."""
        return self._context_length - base_len + 1

    def _kept_ranks(self, spec: GenerationSpec, last: int) -> int:
        """Alternatives of each guess of a branch, by which it can be kept, up to place `last`: for
        a session that has the draft to itself. With others there is no time to prepare in."""
        alone = self._host is not None and self._host.under_way == 0
        fits = alone and last < self._context_length and not spec.uses_distributions
        return min(_KEPT_RANKS, self._vocab_size - 1) if fits else 0

    def _ahead(
        self, ahead: worker_pb2.AheadOptions, spec: GenerationSpec
    ) -> tuple[tuple[int, ...], tuple[Branch, ...]]:
        pending = proposal_from_proto(ahead.pending, vocab_size=self._vocab_size)
        require(not pending.parents, "only chains are prepared for", "ahead.pending.parents")
        require(
            len(ahead.fan_out) == len(pending) + 1,
            f"{len(ahead.fan_out)} numbers for {len(pending)} pending guesses; one more is needed",
            "ahead.fan_out",
        )
        total = sum(ahead.fan_out)
        require(1 <= total <= MAX_FAN_OUT, f"{total} is not in [1, {MAX_FAN_OUT}]", "ahead.fan_out")
        counts = [min(count, self._vocab_size - 1) for count in ahead.fan_out]
        first = (Branch(len(pending), run_ahead=True),) if ahead.run_ahead else ()
        if first:
            _check_run_ahead(counts[-1], spec)
            counts[-1] -= 1
        likeliest = (
            Branch(num_accepted, rank)
            for num_accepted, count in enumerate(counts)
            for rank in range(count)
        )
        return pending.token_ids, (*first, *likeliest)


def _check_run_ahead(count: int, spec: GenerationSpec) -> None:
    """Whether one of the `count` tokens behind all guesses can be a run-ahead guess."""
    if not spec.uses_distributions:
        raise Unsupported(
            "only in rejection mode above temperature 0 does a draft run ahead",
            field="ahead.run_ahead",
        )
    require(count > 0, "running ahead needs at least 1 as the last number", "ahead.fan_out")


def _alternatives(asked: worker_pb2.ProposeEntry, spec: GenerationSpec) -> int:
    """How many runners-up of each guess are wanted."""
    wanted = asked.alternatives
    check_alternatives(wanted, "alternatives")
    if wanted and asked.HasField("ahead"):
        raise InvalidArgument("only chains are prepared ahead", field="alternatives")
    if wanted and spec.uses_distributions:
        raise Unsupported(
            "alternatives are given at temperature 0 and in coupled mode", field="alternatives"
        )
    return wanted


def _work(
    entry: worker_pb2.Entry, sequence: Sequence, pending: Tokens[int], draw: Draw, *, reserve: int
) -> Work:
    return Work(
        sequence=sequence,
        tokens=sequence.line(pending),
        num_logits=len(pending) + 1,
        reserve=reserve,
        deadline=deadline_of(entry.header),
        draw=draw,
    )


def _proposed(work: Work) -> worker_pb2.Reply:
    if work.draw is None or work.drawn is None:
        raise RuntimeError("the engine drew nothing")
    reply = worker_pb2.Reply()
    proposed = reply.proposed
    fill_timing(proposed.timing, timing_of(work))
    if work.draw.branches:
        for branch, drawn in zip(work.draw.branches, work.drawn.branches, strict=True):
            proposed.outcomes.append(_outcome(branch, drawn))
    else:
        proposal = _with_leaves(_proposal(work.drawn), work.drawn.alternatives)
        proposed.proposal.CopyFrom(proposal_to_proto(proposal))
    return reply


def _outcome(branch: Branch, drawn: Drawn) -> worker_pb2.Outcome:
    first, *guesses = drawn.token_ids
    following = Drawn(guesses, drawn.distributions[branch.run_ahead :])
    return worker_pb2.Outcome(
        num_accepted=branch.num_accepted,
        token_id=first,
        proposal=proposal_to_proto(_proposal(following)),
        distribution=distribution_to_proto(drawn.distributions[0]) if branch.run_ahead else None,
    )


def _proposal(drawn: Drawn) -> Proposal:
    return Proposal(
        tuple(drawn.token_ids), distributions=tuple(drawn.distributions), proposer=PROPOSER_NAME
    )


def _with_leaves(chain: Proposal, alternatives: list[list[int]]) -> Proposal:
    """The chain, then the alternatives of each of its guesses as leaves beside that guess."""
    leaves = [(token, place - 1) for place, tokens in enumerate(alternatives) for token in tokens]
    if not leaves:
        return chain
    return replace(
        chain,
        token_ids=(*chain.token_ids, *(token for token, _ in leaves)),
        parents=(*range(-1, len(chain) - 1), *(parent for _, parent in leaves)),
    )
