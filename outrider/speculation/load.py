"""What the sessions of one target share: what they learned, and who loses time to a row."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.speculation.acceptance import PoolPrior
from outrider.speculation.costs import CostLine
from outrider.speculation.fan_out import RankCounts
from outrider.speculation.gate import Gate, load_level
from outrider.speculation.observation import Observation

_MOST_SAMPLING = 4
_LENGTHS = (128, 512, 2048, 8192)

_KIND_WEIGHT = 12.0
"""Looked-at guesses that what all sessions found counts for where a kind is new."""

_OVERLAP_FIRST = 8
"""Rounds with the draft at work that only tell what this costs, not what a pass does."""

_OVERLAP_PACE = 1 / 64

_CONTEXT_PACE = 0.02
_ROUND_PACE = 0.02

MOST_SCOUTS = 2
"""Sessions that try a proposer of which nothing is known, at once: a first proposal waits until the
draft has the prompt, and all who share the pass with that."""

_RATE_KEPT = 0.95


class Kind(NamedTuple):
    """What can be known of a session before it begins that its acceptance goes with: how it is
    sampled, and how long its prompt is, which sets summaries and retrieval apart from chat."""

    sampling: int = 0
    length: int = 0

    @classmethod
    def of(cls, temperature: float, prompt_len: int) -> "Kind":
        """Temperatures by halves, lengths by fours."""
        sampling = min(math.ceil(2.0 * temperature), _MOST_SAMPLING)
        return cls(sampling, sum(prompt_len >= length for length in _LENGTHS))


@dataclass(slots=True)
class ProposerPool:
    """What all sessions of one (target, proposer) learn together."""

    name: str
    acceptance: PoolPrior = field(default_factory=PoolPrior)
    ranks: RankCounts = field(default_factory=RankCounts)
    num_scouts: int = 0
    _drafts: dict[int, CostLine] = field(default_factory=dict)
    _kinds: dict[Kind, PoolPrior] = field(default_factory=dict)

    def of_kind(self, kind: Kind) -> PoolPrior:
        """What sessions of this kind found, beginning with what all did."""
        prior = self._kinds.get(kind)
        if prior is None:
            prior = self._kinds[kind] = PoolPrior(weight=_KIND_WEIGHT, parent=self.acceptance)
        return prior

    def draft(self, num_sessions: int) -> CostLine:
        """The time from asking for a proposal to having it: over steps, and over outcomes prepared
        beyond the first. The sessions share a draft, so what it takes is another line with more of
        them; about so many are taken together."""
        load = load_level(max(num_sessions, 1))
        line = self._drafts.get(load)
        if line is None:
            line = self._drafts[load] = CostLine(relative_slope=0.5, relative_other=0.02)
        return line


class TargetLoad:
    """One target as the sessions of this process see it; one object for all of them.

    Sessions that weigh a guess each for itself find that its row costs them little, take it all
    at once, and are all slower. So they weigh it as if those of this process did alike, and plain
    decoding is what it would be if all decoded plainly.

    `verify` is a pass over its rows, and over rows times thousands of tokens of `context` before
    them: on a CPU a row behind a long prompt costs several short ones. `waits` is the rest of a
    round but for the wait for its proposal, over the share of sessions that guess: their trips,
    which a target that goes on by itself does not make, and their drafts, where passes wait for
    them. Where a pass alone is not known, `verify` is fitted to all of it.
    """

    def __init__(self, verify: CostLine | None = None) -> None:
        self.verify = verify or CostLine()
        self.waits = CostLine(relative_slope=0.0, prior=(0.5, 0.5))
        self.gate = Gate()
        self.context = self.overlap_s = 0.0
        self._num_sessions = self._num_guessing = 0
        self.rounds_since_plain = self._num_overlaps = 0
        self._tokens_per_s = 0.0
        self._rows_per_round = self._tokens_per_round = 1.0

    def join(self, *, decides: bool = True) -> "Share":
        """A session begins; it leaves by `Share.leave`. One that does not decide how much it
        guesses is to the others what the sessions of another process are."""
        self._num_sessions += decides
        if decides:
            self.gate.joined(self._num_sessions)
        return Share(self, decides=decides)

    @property
    def tokens_per_s(self) -> float:
        """Of the sessions of this process."""
        return self._tokens_per_s

    @property
    def num_sessions(self) -> int:
        return self._num_sessions

    @property
    def share_guessing(self) -> float:
        """Of the sessions of this process, those whose round may carry guesses."""
        return self._num_guessing / self._num_sessions if self._num_sessions else 0.0

    def round_s(self, rows: float, guessing: float, context: float) -> float:
        """The target's part of a round, with this share of sessions that guess; `context` is what
        is before each row, in thousands of tokens."""
        return self.verify.predict(rows, rows * context) + self.waits.predict(guessing)

    def row_s(self, context: float) -> float:
        """What one more row costs."""
        return self.verify.slope + self.verify.other_slope * context

    def observe(
        self, target_s: float, compute_s: float, rows: int, own: tuple[int, float], *, ahead: bool
    ) -> None:
        """A round without the wait for its proposal; `own` are the session's rows and its context;
        `ahead`: the draft worked meanwhile."""
        guessing = self.share_guessing
        self.rounds_since_plain = self.rounds_since_plain + 1 if guessing else 0
        own_rows, context = own
        self.context += _CONTEXT_PACE * (context - self.context) if self.context else context
        behind = own_rows * context + (rows - own_rows) * self.context
        if ahead:
            expected = self.verify.predict(rows, behind) + self.waits.predict(guessing)
            excess = target_s - expected
            self._num_overlaps += 1
            pace = max(1.0 / self._num_overlaps, _OVERLAP_PACE)
            self.overlap_s += pace * (excess - self.overlap_s)
            target_s -= self.overlap_s
            if self._num_overlaps <= _OVERLAP_FIRST:
                return
        if compute_s > 0.0:
            self.waits.observe(max(target_s - compute_s, 0.0), guessing)
        self.verify.observe(compute_s or target_s, rows, behind)

    def remote_rows(self, other_rows: float) -> float:
        """Of the rows beside a session's own, those of sessions of other processes."""
        return max(other_rows - max(self._num_sessions - 1, 0) * self._rows_per_round, 0.0)

    def plain_rows(self, other_rows: float) -> float:
        """Rows of a pass if all sessions of this process decoded plainly."""
        return max(self._num_sessions, 1) + self.remote_rows(other_rows)

    def plain_s(self, other_rows: float, context: float) -> float:
        """Seconds of a round if all decoded plainly: as last measured, or as the line has it."""
        expected = self.round_s(self.plain_rows(other_rows), 0.0, context)
        measured = self.gate.plain_round()
        if measured is None or expected <= 0.0:
            return expected
        seconds, rows = measured
        return seconds * expected / (self.round_s(rows, 0.0, context) or expected)

    def remote_tokens_per_s(self, other_rows: float, pass_s: float) -> float:
        """What sessions of other processes make, where their rows bring what ours do."""
        if pass_s <= 0.0:
            return 0.0
        tokens_per_row = self._tokens_per_round / self._rows_per_round
        return self.remote_rows(other_rows) * tokens_per_row / pass_s

    def count_guessing(self, change: int) -> None:
        self._num_guessing += change

    def count_round(self, tokens: float, rows: int, rate_change: float) -> None:
        self._tokens_per_s = max(self._tokens_per_s + rate_change, 0.0)
        self._tokens_per_round += _ROUND_PACE * (tokens - self._tokens_per_round)
        self._rows_per_round += _ROUND_PACE * (rows - self._rows_per_round)

    def leave(self, tokens_per_s: float) -> None:
        self._num_sessions -= 1
        self._tokens_per_s = max(self._tokens_per_s - tokens_per_s, 0.0)


class Share:
    """One session's part in the load of its target."""

    __slots__ = ("_decides", "_guesses", "_load", "_seconds", "_tokens", "tokens_per_s")

    def __init__(self, load: TargetLoad, *, decides: bool) -> None:
        self._load = load
        self._decides = decides
        self._guesses = False
        self._tokens = self._seconds = 0.0
        self.tokens_per_s = 0.0

    def begin_round(self, *, guesses: bool) -> None:
        if self._decides and guesses != self._guesses:
            self._guesses = guesses
            self._load.count_guessing(1 if guesses else -1)

    def end_rounds(self, seen: Observation, tokens: float, seconds: float, rounds: int) -> None:
        """`tokens` is what they stand for, whatever luck made of it; `seen` is the last one."""
        if not self._decides:
            return
        self._tokens = _RATE_KEPT * self._tokens + tokens
        self._seconds = _RATE_KEPT * self._seconds + seconds
        before = self.tokens_per_s
        if self._seconds > 0.0:
            self.tokens_per_s = self._tokens / self._seconds
        load = self._load
        load.count_round(tokens / rounds, seen.num_rows, self.tokens_per_s - before)
        rows = rounds * max(seen.batch_rows, seen.num_rows)
        load.gate.observe(
            tokens,
            seconds,
            rows,
            load.share_guessing,
            load.num_sessions,
            rounds=rounds,
            guesses=self._guesses,
        )

    @property
    def sessions_alike(self) -> float:
        """How many sessions like this one make what those of this process make."""
        if self.tokens_per_s <= 0.0:
            return 1.0
        return max(self._load.tokens_per_s / self.tokens_per_s, 1.0)

    def leave(self) -> None:
        """The session ends."""
        if self._decides:
            self.begin_round(guesses=False)
            self._load.leave(self.tokens_per_s)
