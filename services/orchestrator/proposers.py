"""What guesses: a draft model on another tier, or n-gram lookup in the session's own tokens."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from outrider.remote.asking import DraftSession
from outrider.remote.link import WorkerLink
from outrider.remote.outcomes import BufferUse, Chosen, Speculation
from outrider.remote.session import RemoteSession
from outrider.speculation.forecast import Forecast
from outrider.token_log import TokenLog
from outrider.types import (
    DraftPlan,
    DraftReport,
    GenerationSpec,
    Proposal,
    Verdict,
)
from services.orchestrator.ngram import NgramProposer

DRAFT = "draft"
NGRAM = "ngram"
AUTO = "auto"
"""Whichever of them does best, in the controller's view."""
PROPOSER_NAMES = (DRAFT, NGRAM, AUTO)

_NOTHING = Proposal()


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a round wants: at most so many guesses, the outcomes of the round that are to be
    prepared for, and the length at which the generation ends. `last` is the verdict that the log
    ends with; None: nothing is verified yet."""

    num_tokens: int
    fan_out: int = 0
    end_len: int = 0
    last: Verdict | None = None


class Proposer(Protocol):
    """Guesses what follows the session's log."""

    async def propose(self, wanted: Wanted, deadline: float) -> Chosen:
        """No more guesses than wanted; none where nothing comes to mind, or where it fails, of
        which the report tells. The caller decodes plainly then."""

    def close(self) -> None:
        """The generation is over: nothing more is asked."""


class NgramLookup:
    """Guesses what followed the last time that the log's last tokens came."""

    def __init__(self, log: TokenLog) -> None:
        self._log = log
        self._index = NgramProposer()

    async def propose(self, wanted: Wanted, deadline: float) -> Chosen:
        if not wanted.num_tokens:
            return Chosen()
        started = time.perf_counter()
        self._index.extend(self._log.tokens[len(self._index) :])
        guesses = self._index.propose(wanted.num_tokens)
        spent_us = int((time.perf_counter() - started) * 1e6)
        return Chosen(
            Proposal(guesses, proposer=NGRAM),
            DraftReport(spent_us, spent_us, spent_us, asked=wanted.num_tokens),
        )

    def close(self) -> None:
        pass


class DraftModel:
    """Asks a draft worker between two verifications, or with fan-out while one runs: the verdict
    then selects what was prepared for it (outrider.remote.outcomes)."""

    def __init__(
        self,
        log: TokenLog,
        draft: DraftSession,
        spec: GenerationSpec,
        forecast: Forecast,
        *,
        vocab_size: int,
        timeout_s: float,
        num_alternatives: int = 0,
        use: BufferUse | None = None,
    ) -> None:
        """`num_alternatives` next-best guesses are asked for beside each guess."""
        self._log = log
        self._timeout_s = timeout_s
        self._speculation = Speculation(
            DraftPlan("", 0, 0, timeout_s, 0, num_alternatives),
            spec,
            draft,
            vocab_size,
            forecast,
            self._resume,
            use=use or BufferUse(),
            # What comes during a pass is not where the verdict is.
            runs_ahead=False,
        )
        self._base_len = -1
        """Of the log when it last had a part in a round."""
        self._chosen: asyncio.Future[Chosen] | None = None
        """What a round waits for."""

    async def propose(self, wanted: Wanted, deadline: float) -> Chosen:
        speculation = self._speculation
        speculation.plan = replace(
            speculation.plan,
            num_speculative_tokens=wanted.num_tokens,
            fan_out=wanted.fan_out,
            end_len=wanted.end_len,
            timeout_s=max(min(self._timeout_s, deadline - time.monotonic()), 0.0),
        )
        base_len, self._base_len = self._base_len, len(self._log)
        if wanted.last is None:
            speculation.starts(self._log, _NOTHING)
            return Chosen()
        if base_len + len(wanted.last.token_ids) != len(self._log):
            speculation.end()  # What was asked is about rounds that others have had since.
        self._chosen = asyncio.get_running_loop().create_future()
        return speculation.choose(self._log, wanted.last) or await self._chosen

    def _resume(self, chosen: Chosen) -> None:
        if self._chosen is not None and not self._chosen.done():
            self._chosen.set_result(chosen)

    def close(self) -> None:
        self._speculation.end()


def draft_session(
    log: TokenLog, link: WorkerLink, remote: RemoteSession, loop: asyncio.AbstractEventLoop
) -> DraftSession:
    """What is asked of a draft from here. `log` is that of `remote`, its own alone."""
    return DraftSession(
        log,
        lambda: link,
        lambda _: remote,
        to_loop=loop.call_soon,  # Behind the verification that starts in this turn.
        to_owner=_at_once,
    )


def _at_once(action: Callable[[], None]) -> None:
    action()
