"""The way of a token: rounds of propose → verify, until the generation ends.

The decoder knows no client and no store. It appends verified tokens to the log, and hands what
may be told (`Piece`) to whoever iterates; committing and sending follow behind it.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from outrider.errors import DeadlineExceeded, OutriderError, Unavailable
from outrider.remote.session import RemoteSession, Spent
from outrider.token_log import TokenLog
from outrider.types import Proposal, SpeculationStats, TokenSource, Verdict
from outrider.v1 import worker_pb2
from outrider.wire import proposal_to_proto, verdict_from_proto
from services.orchestrator.controller import Controller, RoundOutcome
from services.orchestrator.proposers import Proposed, Proposer
from services.orchestrator.stopping import OutputStream, Released

logger = logging.getLogger(__name__)

_MAX_PLAIN_ROUNDS = 64
"""Plain rounds that a target is asked for at once."""

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
class Piece:
    """What some rounds brought: what may be told, how it came about, how long it took."""

    released: Released
    stats: SpeculationStats
    times: RoundTimes

    def __add__(self, later: "Piece") -> "Piece":
        return Piece(
            self.released + later.released, self.stats + later.stats, self.times + later.times
        )


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a round brought, before anyone is told; several where a target went on by itself."""

    verdicts: tuple[Verdict, ...]
    times: RoundTimes
    dropped: int
    failed: bool

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token for verdict in self.verdicts for token in verdict.token_ids)


@dataclass(slots=True)
class Decoder:
    """One generation. `find_target` is called for a target, again when the last one is lost."""

    log: TokenLog
    output: OutputStream
    controller: Controller
    proposer: Proposer | None
    find_target: Callable[[], RemoteSession]
    wait_for_target: Callable[[], Awaitable[None]]
    deadline: float
    context_length: int
    with_logprobs: bool = False
    target: RemoteSession | None = None
    _round_ended: float = 0.0
    _untold: int = 0
    """Tokens of the log that the output has not been given yet."""

    async def pieces(self) -> AsyncIterator[Piece]:
        """Rounds until the generation ends; the last piece has the finish reason.

        Raises OutriderError when it cannot go on. Closing the iterator stops the work.
        """
        self._round_ended = time.perf_counter()
        running = asyncio.create_task(self._round(0))
        try:
            while self.output.finish_reason is None:
                outcome = await running
                goes_on = self.output.goes_on_after(outcome.token_ids)
                if goes_on:
                    # The next round starts first: text and statistics are made while it computes.
                    self._untold = len(outcome.token_ids)
                    running = asyncio.create_task(self._round(self._length()))
                    for _ in range(_STEPS_TO_SEND):
                        await asyncio.sleep(0)
                piece = self._piece(outcome)
                self._untold = 0
                if not goes_on and self.output.finish_reason is None:
                    running = asyncio.create_task(self._round(self._length()))
                yield piece
        finally:
            running.cancel()
            await asyncio.wait([running])

    def _length(self) -> int:
        """Guesses for the next round: not more than could be emitted before the last token."""
        left = self.output.remaining - self._untold - 1
        room = self.context_length - len(self.log) - 1
        return max(min(self.controller.next_length(), left, room), 0)

    async def _round(self, length: int) -> "_Outcome":
        proposed, draft_us, failure = await self._propose(length)
        started = time.perf_counter()
        verified, dropped = await self._verify(proposed.proposal)
        verify_us = _elapsed_us(started)
        for verdict, _ in verified:
            self.log.append(verdict.token_ids)
            self.controller.observe(
                RoundOutcome(
                    verdict.num_proposed,
                    verdict.num_accepted,
                    draft_us / 1e6,
                    verify_us / 1e6 / len(verified),
                )
            )
        times = RoundTimes(
            rounds_us=_elapsed_us(self._round_ended),
            draft_us=draft_us,
            verify_us=verify_us,
            draft_compute_us=proposed.spent.compute_us,
            verify_compute_us=sum(spent.compute_us for _, spent in verified),
            draft_worker_us=proposed.spent.worker_us,
            verify_worker_us=sum(spent.worker_us for _, spent in verified),
        )
        self._round_ended = time.perf_counter()
        # A proposal that did not come in time still comes, and is dropped then.
        dropped += isinstance(failure, DeadlineExceeded)
        verdicts = tuple(verdict for verdict, _ in verified)
        return _Outcome(verdicts, times, dropped, failed=failure is not None)

    def _piece(self, outcome: "_Outcome") -> Piece:
        before = self.output.num_taken
        verdicts = outcome.verdicts
        released = self.output.push(
            outcome.token_ids,
            [source for verdict in verdicts for source in verdict.sources],
            [p for verdict in verdicts for p in verdict.logprobs] if self.with_logprobs else None,
        )
        dropped = SpeculationStats(
            dropped_proposals=outcome.dropped, fallback_rounds=int(outcome.failed)
        )
        # Rounds that a target went on with behind the end have told nothing.
        ends = itertools.accumulate(len(verdict.token_ids) for verdict in verdicts)
        starts = [0, *ends][:-1]
        taken = self.output.num_taken - before
        told = [v for v, start in zip(verdicts, starts, strict=True) if start < taken]
        return Piece(released, sum(map(round_stats, told), dropped), outcome.times)

    def _more_rounds(self, num_guesses: int) -> int:
        """Plain rounds that the target is to go on with by itself after this one."""
        if self.target is None or not self.target.offers("more_rounds"):
            return 0
        left = self.output.remaining - self._untold - num_guesses - 1
        return max(min(self.controller.plain_rounds(), left, _MAX_PLAIN_ROUNDS), 0)

    async def _propose(self, length: int) -> tuple[Proposed, int, OutriderError | None]:
        """A proposal, how long it took, and why there is none if the proposer failed."""
        nothing = Proposed(Proposal())
        if length == 0 or self.proposer is None:
            return nothing, 0, None
        started = time.perf_counter()
        try:
            proposed = await self.proposer.propose(length, self.deadline)
        except OutriderError as error:
            if time.monotonic() >= self.deadline:
                raise
            logger.debug("decoding plainly: %s", error)
            return nothing, _elapsed_us(started), error
        return proposed, _elapsed_us(started), None

    async def _verify(self, proposal: Proposal) -> tuple[list[tuple[Verdict, Spent]], int]:
        """The verdict and the target's time, further ones if it went on by itself, and how many
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

    async def _verify_once(self, proposal: Proposal) -> list[tuple[Verdict, Spent]]:
        def set_op(entry: worker_pb2.Entry, delta: worker_pb2.TokenDelta) -> None:
            entry.verify.delta.CopyFrom(delta)
            entry.verify.proposal.CopyFrom(proposal_to_proto(proposal))
            entry.verify.more_rounds = self._more_rounds(len(proposal))

        if self.target is None:
            self.target = self.find_target()
        replies = []
        if self.target.has_more and not proposal:
            replies = await self.target.next_replies(self.deadline)
        if not replies:
            replies = [await self.target.call(set_op, self.deadline)]
        return [
            (verdict_from_proto(reply.verified), Spent.of(reply, reply.verified.timing))
            for reply in replies
        ]


def round_stats(verdict: Verdict) -> SpeculationStats:
    """The counts of one round."""
    own = verdict.sources[-1]
    positions = range(verdict.num_proposed)
    return SpeculationStats(
        rounds=1,
        proposed=verdict.num_proposed,
        accepted=verdict.num_accepted,
        recovered=int(own is TokenSource.RECOVERED),
        bonus=int(own is TokenSource.BONUS),
        plain=int(own is TokenSource.PLAIN),
        proposed_by_position=(1,) * verdict.num_proposed,
        accepted_by_position=tuple(int(i < verdict.num_accepted) for i in positions),
    )


def _elapsed_us(started: float) -> int:
    return int((time.perf_counter() - started) * 1e6)
