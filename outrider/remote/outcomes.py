"""Rounds with a draft: where each one's proposal comes from.

Without fan-out a draft is asked after each verdict, and the session waits for the answer. With it
the draft prepares, while a block is being verified, the next proposal for the likeliest outcomes
(the outcome buffer); the verdict selects one at once. Where none fits the round is a plain one, or
the session asks after all and waits, if a pass costs so much more than a proposal that this pays.
This is the same at a target that goes on by itself and at an orchestrator that asks between two
verifications. At the target one more thing is possible, where guesses travel with distributions and
answers mostly come in time: one of the outcomes is a run-ahead guess, and if it is there when the
pass is over, the verdict takes it in as one more guess.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from outrider.errors import DeadlineExceeded, OutriderError, Unsupported
from outrider.remote.asking import Answer, Ask, Asked
from outrider.speculation.forecast import Forecast
from outrider.speculation.misses import AnswerTime, Pace, pays_to_wait
from outrider.token_log import TokenLog
from outrider.types import (
    MAX_ALTERNATIVES,
    NOTHING_TO_REPORT,
    DraftPlan,
    DraftReport,
    GenerationSpec,
    Proposal,
    Verdict,
)
from outrider.v1 import common_pb2, worker_pb2
from outrider.wire import proposal_from_proto, run_ahead_from_proto

logger = logging.getLogger(__name__)

_NOTHING = Proposal()


def proposal_for(
    spec: GenerationSpec, message: common_pb2.Proposal, *, vocab_size: int
) -> Proposal:
    """A proposal that a generation like this can take. Raises InvalidArgument, Unsupported."""
    proposal = proposal_from_proto(message, vocab_size=vocab_size)
    if proposal.parents and spec.uses_distributions:
        raise Unsupported(
            "trees are verified at temperature 0 and in coupled mode", field="proposal.parents"
        )
    return proposal


@dataclass(frozen=True, slots=True)
class Chosen:
    """The proposal of a round (none: it is a plain one), and how it was come by."""

    proposal: Proposal = _NOTHING
    report: DraftReport = NOTHING_TO_REPORT


_PLAIN = Chosen()


@dataclass(slots=True)
class BufferUse:
    """What became of outcomes that drafts had prepared, and of the guesses with them."""

    outcomes_used: int = 0
    outcomes_unused: int = 0
    guesses_used: int = 0
    guesses_unused: int = 0

    def count(self, outcomes: int, guesses: int, *, hit: bool) -> None:
        """A verdict has fallen: so many outcomes were prepared for, with so many guesses each."""
        used = int(hit)
        self.outcomes_used += used
        self.outcomes_unused += outcomes - used
        self.guesses_used += guesses * used
        self.guesses_unused += guesses * (outcomes - used)


class Draft(Protocol):
    """A session on a draft (outrider.remote.asking). One question at a time."""

    @property
    def usable(self) -> bool:
        """Whether asking is of any use now."""

    def ask(
        self, log: TokenLog, asked: Asked, timeout_s: float, on_answer: Callable[[], None]
    ) -> None:
        """Have a question about `log` as it is now answered in `asked`."""

    def cancel(self) -> None:
        """What was asked is not wanted any more."""


@dataclass(slots=True)
class Speculation:
    """The rounds of one session with one draft; one thread owns it.

    `resume` is called with what was chosen, for a round that `choose` had to leave open. `room`
    says how many alternatives each of so many guesses may have now. `runs_ahead`: whoever verifies
    calls `passed`, and takes a run-ahead guess in.
    """

    plan: DraftPlan
    spec: GenerationSpec
    draft: Draft
    vocab_size: int
    forecast: Forecast
    resume: Callable[[Chosen], None]
    room: Callable[[int], int] = lambda length: MAX_ALTERNATIVES
    use: BufferUse = field(default_factory=BufferUse)
    runs_ahead: bool = True
    _asked: Asked | None = None
    _open: Verdict | None = None
    """The verdict whose round waits for the draft."""
    _log: TokenLog = field(default_factory=TokenLog)
    _waiting_since: float = 0.0
    _dropped: int = 0
    """Run-ahead guesses of the answer at hand that were of no use."""
    _pace: Pace = field(default_factory=Pace)
    _answer_time: AnswerTime = field(default_factory=AnswerTime)
    _missed: int | None = None
    """The outcomes that were prepared at the place of the verdict whose round waits, none of which
    it was; None: the round waits for its first answer."""

    @property
    def speculates(self) -> bool:
        return self.plan.num_speculative_tokens > 0

    @property
    def asks(self) -> bool:
        """Whether the draft owes an answer, or has given one that nobody has looked at."""
        return self._asked is not None

    def tune(self, num_speculative_tokens: int, fan_out: int) -> None:
        """Change the plan from the next round on. Where no guesses are wanted any more, a round
        that waits for some goes on without."""
        self.plan = replace(
            self.plan, num_speculative_tokens=num_speculative_tokens, fan_out=fan_out
        )
        if not self.speculates and self._open is not None:
            missed = self._missed
            self._give_up()
            hit = None if missed is None else False
            report = DraftReport(wait_us=self._waited_us(), hit=hit, prepared=missed or 0)
            self.resume(Chosen(report=report))

    def starts(self, log: TokenLog, pending: Proposal) -> None:
        """A pass over `pending` on `log` is about to start, which `choose` has no part in."""
        self._prepare(log, pending)

    def passed(self, pending: Proposal) -> Proposal:
        """The pass over `pending` is over: the run-ahead guess behind it if it is there by now,
        else nothing.

        To be called before anything of the verdict is looked at: whether the guess is verified must
        not depend on values (invariant 5), and does not on its own.
        """
        asked = self._asked
        if asked is None or not asked.ask.fan_out or asked.ask.pending != pending.token_ids:
            return _NOTHING
        proposed = asked.answer.proposed if asked.answer else None
        self.forecast.answered(in_time=proposed is not None)
        if proposed is None or not asked.ask.run_ahead:
            return _NOTHING
        for outcome in proposed.outcomes:
            if outcome.num_accepted == len(pending) and outcome.HasField("distribution"):
                return self._checked(outcome)
        return _NOTHING

    def choose(self, log: TokenLog, verdict: Verdict) -> Chosen | None:
        """The proposal after a verdict, already part of `log`; None: `resume` will tell."""
        asked, self._asked = self._asked, None
        self._log = log
        self._pace.emitted(len(verdict.token_ids))
        if asked is None and not self.speculates and not verdict.num_guesses:
            return _PLAIN  # With many sessions the target has little time for each.
        self.forecast.saw(verdict)
        length = self._length(len(log))
        if length == 0:
            if asked is not None:
                self.draft.cancel()
            return _PLAIN
        if not self.draft.usable:
            return Chosen(report=DraftReport(failed=True))
        if asked is None and self.plan.fan_out:
            return self._plain()
        if asked is None:
            asked = self._ask(Ask(length, num_alternatives=self._num_alternatives(length)))
        self._waiting_since = time.monotonic()
        if asked.answer is None:
            self._asked, self._open = asked, verdict
            return None
        chosen = self._select(asked.ask, asked.answer, verdict)
        self._open = verdict if chosen is None else None
        return chosen

    def end(self) -> None:
        """No further round comes."""
        self._give_up()

    def _give_up(self) -> None:
        """Want no answer."""
        if self._asked is not None and self._asked.answer is None:
            self.draft.cancel()
        self._asked = self._open = self._missed = None

    def _length(self, base_len: int) -> int:
        """Guesses to ask for after a base."""
        return min(self.plan.num_speculative_tokens, self._room_for_guesses(base_len))

    def _room_for_guesses(self, base_len: int) -> int:
        """Not more than could be emitted before the last token."""
        return max(self.plan.end_len - base_len - 1, 0)

    def _num_alternatives(self, length: int) -> int:
        if self.spec.uses_distributions or not self.plan.alternatives:
            return 0
        return min(self.plan.alternatives, self.room(length))

    def _checked(self, outcome: worker_pb2.Outcome) -> Proposal:
        """The run-ahead guess of an outcome, unless it is one that no honest draft sends."""
        try:
            return run_ahead_from_proto(outcome, vocab_size=self.vocab_size)
        except OutriderError as error:
            logger.warning("run-ahead guess dropped: %s", error)
            self._dropped = 1
            return _NOTHING

    def _ask(self, ask: Ask) -> Asked:
        asked = Asked(ask)
        self.draft.ask(self._log, asked, self.plan.timeout_s, lambda: self._arrived(asked))
        return asked

    def _arrived(self, asked: Asked) -> None:
        answer, verdict = asked.answer, self._open
        if self._asked is asked and verdict is not None and answer is not None:
            self._asked = None
            chosen = self._select(asked.ask, answer, verdict, self._waited_us())
            if chosen is None:
                return
            self._open = None
            self.resume(chosen)

    def _waited_us(self) -> int:
        return int((time.monotonic() - self._waiting_since) * 1e6)

    def _select(
        self, ask: Ask, answer: Answer, verdict: Verdict, wait_us: int = 0
    ) -> Chosen | None:
        """What comes of an answer that was waited for so long; None: another question takes its
        place, and is waited for."""
        missed, self._missed = self._missed, None
        dropped, self._dropped = self._dropped, 0
        proposed, spent = answer.proposed, answer.spent
        if proposed is None:
            dropped = int(isinstance(answer.error, DeadlineExceeded))
        report = DraftReport(
            wait_us=wait_us,
            worker_us=spent.worker_us,
            compute_us=spent.compute_us,
            failed=proposed is None,
            dropped=dropped,
            hit=None if missed is None else False,
            asked=ask.num_tokens,
            prepared=missed or 0,
            trip_us=min(answer.trip_us, wait_us),
            took_us=answer.trip_us,
        )
        if proposed is None:
            return Chosen(report=report)
        self._answer_time.took(answer.trip_us / 1e6, ahead=bool(ask.fan_out))
        try:
            if ask.fan_out:
                return self._among(ask, proposed, verdict, report)
            proposal = self._take(proposed.proposal, ask)
        except OutriderError as error:
            logger.warning("proposal dropped: %s", error)
            return Chosen(report=replace(report, failed=True, dropped=dropped + 1))
        self._prepare(self._log, proposal)
        return Chosen(proposal, report)

    def _among(
        self, ask: Ask, proposed: worker_pb2.Proposed, verdict: Verdict, report: DraftReport
    ) -> Chosen | None:
        """The proposal for the outcome that a verdict is. Raises OutriderError for one that cannot
        be taken."""
        prepared = ask.fan_out[verdict.num_accepted]
        rank, message = _find(proposed, verdict)
        self.forecast.found(verdict, rank, prepared)
        self.use.count(len(proposed.outcomes), ask.num_tokens, hit=message is not None)
        if message is None and self._waits():
            self._missed = prepared
            self._asked = self._ask(Ask(self._length(len(self._log))))
            return None
        proposal = self._take(message, ask) if message is not None else _NOTHING
        self._prepare(self._log, proposal)
        report = replace(report, hit=rank is not None, prepared=prepared, rank=rank or 0)
        return Chosen(proposal, report)

    def _waits(self) -> bool:
        """Whether it pays to ask for a proposal after a miss."""
        length, rate = self._length(len(self._log)), self._pace.tokens_per_s
        draft_s = self._answer_time.seconds
        if not length or rate is None or draft_s is None:
            return False
        return pays_to_wait(self.forecast.expected_tokens(length), rate, draft_s)

    def _take(self, message: common_pb2.Proposal, ask: Ask) -> Proposal:
        """What a draft has sent, checked, and no more of it than was asked for and may be. A plan
        that wants fewer guesses meanwhile does not undo those that are there."""
        proposal = proposal_for(self.spec, message, vocab_size=self.vocab_size)
        longest = min(ask.num_tokens, self._room_for_guesses(len(self._log)))
        return proposal.within(longest, ask.num_alternatives)

    def _plain(self) -> Chosen:
        self._prepare(self._log, _NOTHING)
        return _PLAIN

    def _prepare(self, log: TokenLog, pending: Proposal) -> None:
        """Have the draft fill the buffer while `pending` is verified, if it is a chain."""
        longest = len(log) + len(pending) + 1
        wanted = self.plan.fan_out and self._length(longest) and not pending.parents
        if not wanted or not self.draft.usable:
            return
        self._log = log
        ahead = self.runs_ahead and self.spec.uses_distributions and self.forecast.in_time
        fan_out = self.forecast.fan_out(len(pending), self.plan.fan_out, run_ahead=ahead)
        length = self._length(len(log) + 1)
        self._asked = self._ask(Ask(length, pending.token_ids, fan_out, run_ahead=ahead))


def _find(
    proposed: worker_pb2.Proposed, verdict: Verdict
) -> tuple[int | None, common_pb2.Proposal | None]:
    """The outcome that a verdict is: its rank among those of its place, and its proposal."""
    rank, last = 0, verdict.token_ids[-1]
    for outcome in proposed.outcomes:
        if outcome.num_accepted == verdict.num_accepted:
            if outcome.token_id == last:
                return rank, outcome.proposal
            rank += 1
    return None, None
