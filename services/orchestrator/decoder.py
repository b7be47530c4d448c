"""The way of a token: rounds of propose → verify, until the generation ends.

The decoder knows no client and no store. It appends verified tokens to the log, and hands what
may be told (`Piece`) to whoever iterates; committing and sending follow behind it.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from outrider.errors import DeadlineExceeded, OutriderError, Unavailable
from outrider.remote.outcomes import Chosen
from outrider.remote.session import RemoteSession, Spent
from outrider.speculation.length import Decision
from outrider.speculation.observation import Observation
from outrider.token_log import TokenLog
from outrider.types import (
    NOTHING_TO_REPORT,
    DraftPlan,
    DraftReport,
    Proposal,
    SpeculationStats,
    TokenSource,
    Verdict,
)
from outrider.v1 import worker_pb2
from outrider.wire import (
    plan_to_proto,
    proposal_to_proto,
    report_from_proto,
    verdict_from_proto,
)
from services.orchestrator.controller import Controller
from services.orchestrator.proposers import DRAFT, Proposer, Wanted
from services.orchestrator.stopping import OutputStream, Released

logger = logging.getLogger(__name__)

_MAX_ROUNDS = 64
"""Rounds that a target is asked to go on with at once."""

_STEPS_TO_SEND = 2
"""Turns of the event loop until a new round's entry is with gRPC: the round's, the link's."""


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Microseconds of some rounds: waits as seen here, the rest as the workers saw it.

    The names are those of TimeStats in generation.proto, which says what they mean.
    """

    rounds_us: int = 0
    draft_us: int = 0
    verify_us: int = 0
    draft_compute_us: int = 0
    verify_compute_us: int = 0
    draft_worker_us: int = 0
    verify_worker_us: int = 0

    def __add__(self, other: "RoundTimes") -> "RoundTimes":
        return RoundTimes(
            self.rounds_us + other.rounds_us,
            self.draft_us + other.draft_us,
            self.verify_us + other.verify_us,
            self.draft_compute_us + other.draft_compute_us,
            self.verify_compute_us + other.verify_compute_us,
            self.draft_worker_us + other.draft_worker_us,
            self.verify_worker_us + other.verify_worker_us,
        )


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """A round as it was seen, and what the controller wants after it; the last of `count` plain
    rounds where it speaks for several. It ended at `ended` on the monotonic clock."""

    seen: Observation
    next_length: int
    next_fan_out: int
    decision: Decision | None
    ended: float = 0.0
    count: int = 1


@dataclass(frozen=True, slots=True)
class Piece:
    """What some rounds brought: what may be told, how it came about, how long it took."""

    released: Released
    stats: SpeculationStats
    times: RoundTimes
    rounds: tuple[RoundRecord, ...] = ()

    @classmethod
    def joined(cls, pieces: "Sequence[Piece]") -> "Piece":
        """Several, told as one."""
        return cls(
            Released.joined([piece.released for piece in pieces]),
            sum((piece.stats for piece in pieces), SpeculationStats()),
            sum((piece.times for piece in pieces), RoundTimes()),
            tuple(itertools.chain.from_iterable(piece.rounds for piece in pieces)),
        )


class _Outcome(NamedTuple):
    """What a round brought, before anyone is told; several where a target went on by itself."""

    verdicts: Sequence[Verdict]
    token_ids: Sequence[int]
    times: RoundTimes
    dropped: int
    failed: int
    """Rounds that went without a proposal because the proposer failed."""
    records: Sequence[RoundRecord]


@dataclass(frozen=True, slots=True)
class DirectDraft:
    """A draft that the target may ask by itself, and how."""

    address: str
    timeout_s: float
    alternatives: int = 0


class Whereabouts(Protocol):
    """Which workers a session is to go on with. They come and go; asked between rounds."""

    def target_should_change(self) -> bool:
        """The target is about to go, and there is another one."""

    def direct_draft(self) -> DirectDraft | None:
        """The draft that the target may ask by itself."""

    def drafted(self, *, failed: bool) -> None:
        """How the last round went in which the target asked it."""


class _Round(NamedTuple):
    """One verdict, what the target spent on it, and how it came by the proposal if it `asked`."""

    verdict: Verdict
    spent: Spent
    report: DraftReport = NOTHING_TO_REPORT
    asked: bool = False

    @classmethod
    def of(cls, reply: worker_pb2.Reply) -> "_Round":
        verified = reply.verified
        verdict, spent = verdict_from_proto(verified), Spent.of(reply, verified.timing)
        if not verified.HasField("draft"):
            return cls(verdict, spent)
        if not verified.draft.ByteSize():  # A plain round of a plan.
            return cls(verdict, spent, asked=True)
        report = report_from_proto(verified.draft)
        # While the draft was asked the session was not with the target.
        spent = replace(spent, worker_us=max(spent.worker_us - report.trip_us, 0))
        return cls(verdict, spent, report, asked=True)


@dataclass(slots=True)
class Decoder:
    """One generation. `find_target` is called for a target, again when the last one is lost.

    Proposals come from the one of `proposers` that the controller names; a target that can ask the
    `direct` draft does so itself. `whereabouts` say when it is time for other workers.
    """

    log: TokenLog
    output: OutputStream
    controller: Controller
    proposers: Mapping[str, Proposer]
    find_target: Callable[[], RemoteSession]
    wait_for_target: Callable[[], Awaitable[None]]
    deadline: float
    context_length: int
    with_logprobs: bool = False
    report_rounds: bool = False
    direct: DirectDraft | None = None
    whereabouts: Whereabouts | None = None
    target: RemoteSession | None = None
    _round_ended: float = 0.0
    _planned: tuple[int, int] = (0, 0)
    """Length and fan-out that the target goes on with."""
    _by_plan: bool = False
    """The entry under way has a plan: the target asks its draft by itself."""
    _after_bonus: bool = True
    """All guesses that the last verdict's round carried were accepted."""
    _untold: int = 0
    """Tokens of the log that the output has not been given yet."""
    _to_come: int = 0
    """Rounds that the target still goes on with by itself."""
    _last: Verdict | None = None
    """That the log ends with; None: it is as it was given."""

    async def pieces(self) -> AsyncIterator[Piece]:
        """Rounds until the generation ends; the last piece has the finish reason.

        Raises OutriderError when it cannot go on. Closing the iterator stops the work.
        """
        self._round_ended = time.perf_counter()
        ahead: asyncio.Task[_Outcome] | None = None
        length = 0
        try:
            while self.output.finish_reason is None:
                outcome = await (ahead or self._round(length))
                ahead = None
                if self._starts_at_once(outcome):
                    # The next round starts first: text and statistics are made while it computes.
                    self._untold = len(outcome.token_ids)
                    ahead = asyncio.create_task(self._round(self._length()))
                    for _ in range(_STEPS_TO_SEND):
                        await asyncio.sleep(0)
                piece = self._piece(outcome)
                self._untold = 0
                self._extend()
                yield piece
                length = self._length()
        finally:
            if ahead is not None:
                ahead.cancel()
                await asyncio.wait([ahead])

    @property
    def follows(self) -> bool:
        """Further rounds come without being asked for."""
        return self.target is not None and self.target.has_more

    def _starts_at_once(self, outcome: "_Outcome") -> bool:
        """Whether the next round has to be asked for, and is known to come."""
        return not self.follows and self.output.goes_on_after(outcome.token_ids)

    def _length(self) -> int:
        """Guesses for the next round: not more than could be emitted before the last token."""
        return max(min(self.controller.next_length(), self._left - 1), 0)

    async def _round(self, length: int) -> "_Outcome":
        proposed = await self._propose(length)
        started = time.perf_counter()
        rounds, dropped = await self._verify(proposed.proposal)
        ended = time.perf_counter()
        took = _Took(
            rounds_us=int((ended - self._round_ended) * 1e6),
            verify_us=int((ended - started) * 1e6),
        )
        self._round_ended = ended
        if self.whereabouts is not None and rounds[-1].asked:
            self.whereabouts.drafted(failed=rounds[-1].report.failed)
        if not rounds[0].asked:  # Only the first of several can have a proposal from here.
            rounds[0] = rounds[0]._replace(report=proposed.report)
        token_ids = [token for round_ in rounds for token in round_.verdict.token_ids]
        records = self._records(rounds, took)
        self._last = rounds[-1].verdict
        self._tune()
        failed = 0
        for round_ in rounds:
            dropped += round_.report.dropped
            failed += round_.report.failed
        verdicts = [round_.verdict for round_ in rounds]
        return _Outcome(verdicts, token_ids, took.times(rounds), dropped, failed, records)

    def _records(self, rounds: "list[_Round]", took: "_Took") -> list[RoundRecord]:
        """Append rounds to the log, and let the controller know. Of plain rounds that came together
        one speaks for all, unless each is to be told of."""
        count = len(rounds)
        asked = [round_.report.asked for round_ in rounds]
        alike = count > 1 and not self.report_rounds and not any(asked)
        ended, round_s = time.monotonic(), took.rounds_us / 1e6 / count
        verify_s = took.verify_us_of(rounds) / 1e6 / count
        records = []
        for number, (verdict, spent, report, _) in enumerate(rounds, 1):
            self.log.append(verdict.token_ids)
            if alike and number < count:
                continue
            seen = Observation(
                num_proposed=verdict.num_proposed,
                num_accepted=verdict.num_accepted,
                draft_s=report.wait_us / 1e6,
                verify_s=verify_s,
                batch_rows=spent.batch_rows,
                context_len=len(self.log),
                hit=report.hit,
                round_s=round_s,
                compute_s=spent.compute_us / 1e6,
                proposal_s=(report.took_us or report.worker_us) / 1e6,
                num_asked=report.asked,
                prepared=report.prepared,
                rank=report.rank,
                after_bonus=self._after_bonus,
                run_ahead=verdict.run_ahead,
                num_beside=verdict.num_beside,
                prompt_rows=spent.prompt_rows,
            )
            speaks_for = count if alike else 1
            records.append(self._observe(seen, ended - round_s * (count - number), speaks_for))
            self._after_bonus = verdict.num_accepted == verdict.num_proposed
        return records

    def _observe(self, seen: Observation, ended: float, count: int) -> RoundRecord:
        controller = self.controller
        controller.observe(seen)
        return RoundRecord(
            seen, controller.next_length(), controller.fan_out, controller.decision, ended, count
        )

    def _piece(self, outcome: "_Outcome") -> Piece:
        before = self.output.num_taken
        verdicts = outcome.verdicts
        released = self.output.push(
            outcome.token_ids,
            [source for verdict in verdicts for source in verdict.sources],
            [p for verdict in verdicts for p in verdict.logprobs] if self.with_logprobs else None,
        )
        # Rounds that a target went on with behind the end have told nothing.
        taken, told = self.output.num_taken - before, 0
        while taken > 0:
            taken -= len(verdicts[told].token_ids)
            told += 1
        stats = stats_of(
            verdicts[:told],
            dropped_proposals=outcome.dropped,
            fallback_rounds=outcome.failed,
            hits=[record.seen.hit for record in outcome.records],
        )
        return Piece(released, stats, outcome.times, tuple(outcome.records[:told]))

    @property
    def _left(self) -> int:
        """Tokens that may still be added to the log."""
        room = self.context_length - len(self.log)
        return min(self.output.remaining - self._untold, room)

    def _more_rounds(self, target: RemoteSession, num_guesses: int) -> int:
        """Rounds that the target is to go on with by itself after this one."""
        return max(min(self._rounds_by_itself(target), self._left - num_guesses - 1), 0)

    def _rounds_by_itself(self, target: RemoteSession) -> int:
        if self._by_plan:
            return _MAX_ROUNDS
        if target.offers("more_rounds"):
            return min(self.controller.plain_rounds(), _MAX_ROUNDS)
        return 0

    def _extend(self) -> None:
        """Let a target go on before it is through with the rounds that it was asked for. Sessions
        whose rounds end together would ask together, and come back over several passes."""
        target = self.target
        if target is None or not target.has_more or self.output.finish_reason is not None:
            return
        left = self._left
        if self._to_come > _MAX_ROUNDS // 2 or self._to_come >= left:
            return
        rounds = min(self._rounds_by_itself(target), left) if target.offers("extend") else 0
        if rounds > self._to_come:
            self._to_come = rounds
            target.extend(len(self.log) + rounds)

    def _asks(self, target: RemoteSession | None) -> bool:
        """Whether the target asks the draft by itself."""
        wanted = self.direct is not None and self.controller.proposer == DRAFT
        return wanted and target is not None and target.offers("drafts")

    async def _propose(self, length: int) -> Chosen:
        """A proposal of at most this length, if guesses come from here."""
        proposer = self.proposers.get(self.controller.proposer)
        first = self._last is None
        if proposer is None or self._asks(self.target) or (first and not self._begins_ahead):
            return Chosen()
        wanted = Wanted(
            num_tokens=self.controller.next_length() if first else length,
            fan_out=self.controller.fan_out,
            end_len=len(self.log) + self._left,
            last=self._last,
        )
        started = time.perf_counter()
        proposed = await proposer.propose(wanted, self.deadline)
        report = replace(proposed.report, wait_us=_elapsed_us(started))
        return replace(proposed, report=report)

    @property
    def _begins_ahead(self) -> bool:
        """Whether a draft may prepare for the first token, which comes without guesses."""
        return self.direct is None and self.controller.fan_out > 0

    async def _verify(self, proposal: Proposal) -> tuple[list[_Round], int]:
        """The round that this makes, further ones if the target went on by itself, and how many
        proposals were dropped.

        A proposal that the target finds malformed is dropped, a target that goes away is
        replaced: both cost time only.
        """
        dropped = 0
        while True:
            try:
                return await self._verify_once(proposal), dropped
            except Unavailable:
                if time.monotonic() >= self.deadline:
                    raise DeadlineExceeded("the request's time is over") from None
                self.target = None
                await self.wait_for_target()
            except OutriderError as error:
                if not proposal or not error.field.startswith("proposal"):
                    raise
                logger.warning("proposal dropped: %s", error)
                proposal = Proposal()
                dropped += 1

    def _change_workers(self) -> None:
        """Leave a target that is about to go; a plan with another draft is a new one. Rounds that
        the target went on with meanwhile are made again: nobody has seen them."""
        if self.whereabouts is None:
            return
        target, direct = self.target, self.whereabouts.direct_draft()
        leaves = target is not None and self.whereabouts.target_should_change()
        if target is not None and (leaves or (self._by_plan and direct != self.direct)):
            target.settle()
        self.target, self.direct = None if leaves else target, direct

    async def _verify_once(self, proposal: Proposal) -> list[_Round]:
        self._change_workers()
        target = self.target = self.target or self.find_target()

        def set_op(entry: worker_pb2.Entry, delta: worker_pb2.TokenDelta) -> None:
            entry.verify.delta.CopyFrom(delta)
            entry.verify.proposal.CopyFrom(proposal_to_proto(proposal))
            self._by_plan = self._asks(target) and self._goes_by_plan(target)
            entry.verify.more_rounds = self._to_come = self._more_rounds(target, proposal.length)
            if self.direct and self._by_plan:
                entry.verify.draft.CopyFrom(plan_to_proto(self._plan(self.direct)))

        replies = []
        if self._by_plan and not self._asks(target):
            target.settle()  # Another proposer has the next word.
        if target.has_more and not proposal:
            replies = await target.next_replies(self.deadline)
            self._to_come -= len(replies)
        if not replies:
            replies = [await target.call(set_op, self.deadline)]
        return [_Round.of(reply) for reply in replies]

    def _goes_by_plan(self, target: RemoteSession) -> bool:
        """Whether there is anything that the target can go on with by itself."""
        return self.controller.next_length() > 0 or target.offers("more_rounds")

    def _plan(self, draft: DirectDraft) -> DraftPlan:
        self._planned = self.controller.next_length(), self.controller.fan_out
        length, fan_out = self._planned
        return DraftPlan(
            address=draft.address,
            num_speculative_tokens=length,
            fan_out=fan_out,
            timeout_s=draft.timeout_s,
            end_len=len(self.log) + self._left,
            alternatives=draft.alternatives,
        )

    def _tune(self) -> None:
        """Let a target that goes on by itself know what the controller wants now."""
        if self.target is None or not self._by_plan or not self.target.has_more:
            return
        wanted = self.controller.next_length(), self.controller.fan_out
        if wanted != self._planned:
            self._planned = wanted
            self.target.tune(*wanted)


class _Took(NamedTuple):
    """Microseconds that rounds which came together took as seen here: from the end of the ones
    before, and from the verification on."""

    rounds_us: int
    verify_us: int

    def verify_us_of(self, rounds: "list[_Round]") -> int:
        """Without the waits for a draft that the target asked."""
        waited_us = sum([round_.report.wait_us for round_ in rounds if round_.asked])
        return max(self.verify_us - waited_us, 0)

    def times(self, rounds: "list[_Round]") -> RoundTimes:
        draft_us = draft_compute_us = draft_worker_us = verify_compute_us = verify_worker_us = 0
        for _, spent, report, _ in rounds:
            draft_us += report.wait_us
            draft_compute_us += report.compute_us
            # Of the time in the draft, what the session waited for.
            draft_worker_us += min(report.worker_us, report.wait_us)
            verify_compute_us += spent.compute_us
            verify_worker_us += spent.worker_us
        return RoundTimes(
            rounds_us=self.rounds_us,
            draft_us=draft_us,
            verify_us=self.verify_us_of(rounds),
            draft_compute_us=draft_compute_us,
            verify_compute_us=verify_compute_us,
            draft_worker_us=draft_worker_us,
            verify_worker_us=verify_worker_us,
        )


def stats_of(
    verdicts: Sequence[Verdict],
    *,
    dropped_proposals: int = 0,
    fallback_rounds: int = 0,
    hits: Sequence[bool | None] = (),
) -> SpeculationStats:
    """The counts of some rounds; `hits` are the verdicts that an outcome buffer was asked for."""
    guessed = [verdict for verdict in verdicts if verdict.num_guesses]
    proposed = [verdict.num_guesses for verdict in guessed]
    accepted = [verdict.num_survived for verdict in guessed]
    last = [verdict.sources[-1] for verdict in guessed]
    positions = range(max(proposed, default=0))
    return SpeculationStats(
        rounds=len(verdicts),
        proposed=sum(proposed),
        accepted=sum(accepted),
        recovered=last.count(TokenSource.RECOVERED),
        bonus=last.count(TokenSource.BONUS),
        plain=len(verdicts) - len(guessed),
        dropped_proposals=dropped_proposals,
        fallback_rounds=fallback_rounds,
        buffer_hits=hits.count(True),
        buffer_misses=hits.count(False),
        proposed_by_position=tuple([sum([n > i for n in proposed]) for i in positions]),
        accepted_by_position=tuple([sum([n > i for n in accepted]) for i in positions]),
    )


def _elapsed_us(started: float) -> int:
    return int((time.perf_counter() - started) * 1e6)
