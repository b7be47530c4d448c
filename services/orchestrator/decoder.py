"""The way of a token: rounds of propose → verify, until the generation ends.

The decoder knows no client and no store. It appends verified tokens to the log, and hands what
may be told (`Piece`) to whoever iterates; committing and sending follow behind it.
"""

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace

from outrider.errors import DeadlineExceeded, OutriderError, Unavailable
from outrider.token_log import TokenLog
from outrider.types import Proposal, SpeculationStats, TokenSource, Verdict
from outrider.v1 import worker_pb2
from outrider.wire import proposal_to_proto, timing_from_proto, verdict_from_proto
from services.orchestrator.controller import Controller, RoundOutcome
from services.orchestrator.proposers import Proposed, Proposer
from services.orchestrator.remote import RemoteSession
from services.orchestrator.stopping import OutputStream, Released

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Microseconds of one round; waits as seen here, computing as the workers saw it."""

    draft_us: int = 0
    verify_us: int = 0
    draft_compute_us: int = 0
    verify_compute_us: int = 0

    def __add__(self, other: "RoundTimes") -> "RoundTimes":
        return RoundTimes(
            self.draft_us + other.draft_us,
            self.verify_us + other.verify_us,
            self.draft_compute_us + other.draft_compute_us,
            self.verify_compute_us + other.verify_compute_us,
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """What one round brought: what may be told, how it came about, how long it took."""

    released: Released
    stats: SpeculationStats
    times: RoundTimes


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

    async def pieces(self) -> AsyncIterator[Piece]:
        """Rounds until the generation ends; the last piece has the finish reason.

        Raises OutriderError when it cannot go on. Closing the iterator stops the work.
        """
        is_first = True
        while self.output.finish_reason is None:
            length = 0 if is_first else self._length()
            yield await self._round(length)
            is_first = False

    def _length(self) -> int:
        """Guesses for the next round: not more than could be emitted before the last token."""
        room = self.context_length - len(self.log) - 1
        return max(min(self.controller.next_length(), self.output.remaining - 1, room), 0)

    async def _round(self, length: int) -> Piece:
        proposed, draft_us, failure = await self._propose(length)
        started = time.perf_counter()
        verdict, compute_us, dropped = await self._verify(proposed.proposal)
        verify_us = _elapsed_us(started)
        self.log.append(verdict.token_ids)
        released = self.output.push(
            verdict.token_ids,
            verdict.sources,
            verdict.logprobs if self.with_logprobs else None,
        )
        self.controller.observe(
            RoundOutcome(
                verdict.num_proposed, verdict.num_accepted, draft_us / 1e6, verify_us / 1e6
            )
        )
        # A proposal that did not come in time still comes, and is dropped then.
        dropped += isinstance(failure, DeadlineExceeded)
        stats = replace(
            round_stats(verdict),
            dropped_proposals=dropped,
            fallback_rounds=int(failure is not None),
        )
        return Piece(
            released,
            stats,
            RoundTimes(draft_us, verify_us, proposed.compute_us, compute_us),
        )

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

    async def _verify(self, proposal: Proposal) -> tuple[Verdict, int, int]:
        """The verdict, the target's computing time, and how many proposals were dropped.

        A proposal that the target finds malformed is dropped, a target that goes away is
        replaced: both cost time only.
        """
        dropped = 0
        while True:
            try:
                verdict, compute_us = await self._verify_once(proposal)
                return verdict, compute_us, dropped
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

    async def _verify_once(self, proposal: Proposal) -> tuple[Verdict, int]:
        def set_op(entry: worker_pb2.Entry, delta: worker_pb2.TokenDelta) -> None:
            entry.verify.delta.CopyFrom(delta)
            entry.verify.proposal.CopyFrom(proposal_to_proto(proposal))

        if self.target is None:
            self.target = self.find_target()
        reply = await self.target.call(set_op, self.deadline)
        timing = timing_from_proto(reply.verified.timing)
        return verdict_from_proto(reply.verified), timing.compute_us


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
