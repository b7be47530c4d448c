"""What guesses: a draft model on another tier, or n-gram lookup in the session's own tokens."""

import time
from dataclasses import dataclass
from typing import Protocol

from outrider.errors import FailedPrecondition, InvalidArgument, OutriderError, Unsupported
from outrider.remote.session import NOTHING_SPENT, RemoteSession, Spent
from outrider.token_log import TokenLog
from outrider.types import Proposal
from outrider.v1 import worker_pb2
from outrider.wire import proposal_from_proto
from services.orchestrator.ngram import NgramProposer

DRAFT = "draft"
NGRAM = "ngram"
AUTO = "auto"
"""Whichever of them does best, in the controller's view."""
PROPOSER_NAMES = (DRAFT, NGRAM, AUTO)

_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Proposed:
    """A proposal for the log as it is, and what it cost the worker that made it."""

    proposal: Proposal
    spent: Spent = NOTHING_SPENT


class Proposer(Protocol):
    """Guesses what follows the session's log."""

    async def propose(self, num_tokens: int, deadline: float) -> Proposed:
        """At most `num_tokens` guesses; none where nothing comes to mind.

        Raises OutriderError when it cannot; the caller decodes plainly then.
        """

    def close(self) -> None:
        """The session ends or is cancelled: free what is held for it."""


class NgramLookup:
    """Guesses what followed the last time that the log's last tokens came."""

    def __init__(self, log: TokenLog) -> None:
        self._log = log
        self._index = NgramProposer()

    async def propose(self, num_tokens: int, deadline: float) -> Proposed:
        started = time.perf_counter()
        self._index.extend(self._log.tokens[len(self._index) :])
        guesses = self._index.propose(num_tokens)
        elapsed_us = int((time.perf_counter() - started) * 1e6)
        return Proposed(Proposal(guesses, proposer=NGRAM), Spent(elapsed_us, elapsed_us))

    def close(self) -> None:
        pass


class DraftModel:
    """Asks a draft worker. After a failure it is left alone for a second, so that a draft that
    is away or stuck costs its session one timeout a second at most."""

    def __init__(
        self,
        remote: RemoteSession,
        *,
        vocab_size: int,
        timeout_s: float,
        num_alternatives: int = 0,
    ) -> None:
        """`num_alternatives` next-best guesses are asked for beside each guess."""
        self._remote = remote
        self._num_alternatives = num_alternatives
        self._vocab_size = vocab_size
        self._timeout_s = timeout_s
        self._not_before = 0.0
        self._unfit: OutriderError | None = None

    async def propose(self, num_tokens: int, deadline: float) -> Proposed:
        if self._unfit:
            raise self._unfit
        now = time.monotonic()
        if now < self._not_before and self._remote.link.up:
            raise Unsupported("the draft failed a moment ago")
        try:
            return await self._propose(num_tokens, min(deadline, now + self._timeout_s))
        except (FailedPrecondition, InvalidArgument, Unsupported) as error:
            # It cannot serve this session and never will: its context is full, say.
            self._unfit = error
            raise
        except OutriderError:
            self._not_before = time.monotonic() + _RETRY_AFTER_S
            raise

    async def _propose(self, num_tokens: int, deadline: float) -> Proposed:
        def set_op(entry: worker_pb2.Entry, delta: worker_pb2.TokenDelta) -> None:
            entry.propose.delta.CopyFrom(delta)
            entry.propose.num_speculative_tokens = num_tokens
            entry.propose.alternatives = self._num_alternatives

        reply = await self._remote.call(set_op, deadline)
        if not reply.HasField("proposed"):
            raise Unsupported("the draft's reply holds no proposal")
        proposal = proposal_from_proto(reply.proposed.proposal, vocab_size=self._vocab_size)
        # A draft that guesses on unasked would fill the target's passes.
        proposal = proposal.within(num_tokens, self._num_alternatives)
        return Proposed(proposal, Spent.of(reply, reply.proposed.timing))

    def close(self) -> None:
        self._remote.cancel()
        self._remote.close()
