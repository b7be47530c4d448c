"""Whether the sessions of one target guess at all, found by trying both.

Sessions that share passes wait for each other's drafts, queue behind each other's rows and, on a
small machine, share cores. Lines of cost that single sessions fit are too coarse where that
decides: one session that guesses may hold up all others, and half of them guessing may be worse
than none or all. So all decode plainly together for a moment, or guess together for a moment,
and what they make is compared.

Of many sessions few begin a trial, and twice as many are let in every few rounds: what would cost
all of them dearly shows before all take part. A trial ends where it has cost what a trial may, and
the next one comes when plain decoding has paid for it.
"""

import enum
import math
from dataclasses import dataclass, field

_CHECK_ROUNDS, _TRIAL_ROUNDS = 4, 8
"""Rounds of a try that are measured."""

_SETTLING_ROUNDS, _CLIMB_ROUNDS = 2, 7
"""Rounds before them: until sessions are in step, until lengths are what is thought best."""

_LONGEST_CHECK = 24

_FIRST_SHARE, _STAGE_ROUNDS, _STAGE_SETTLING = 8, 4, 2
"""One in so many sessions begins a trial; rounds until twice as many take part, of which the first
are not measured: a target that goes on by itself hears of it a round or two later."""

_MOST_LOST = 1.5
"""Plain rounds of each session that a trial of many may cost; twice as many where all begin at
once, since their first guesses are fewer than pays."""

_PAID_BY = 0.01
"""Share of plain decoding that trials may cost in the long run."""

_SOON = 16
_FIRST_CHECK, _LAST_CHECK = 32, 512
"""Rounds before a check: soon after a change of load, later the more guessing wins."""

_STILL, _STILL_KEPT, _LONGEST_CLIMB = 0.2, 0.8, 32
"""A check waits until few sessions still change their lengths, but not longer."""

_FIRST_WAIT, _LONGEST_WAIT = 192, 3072
"""Rounds before a trial; twice as many after each that failed."""

_OPENS_AT, _CLOSES_AT, _HOPELESS_AT = 1.03, 1.0, 0.8
"""Gains over plain decoding."""

_FELL_TO = 0.9
"""A check comes at once where the gain has become so much less than it was."""

REST_ROUNDS = 8
"""Rounds of a session between two looks at them while the gate is closed."""

_FEW = 0.2
"""A share of sessions that guess: below it they only hold up the others."""

_MEMORY = 0.95
"""How much of what was made counts a round later."""

_OTHER_LOAD, _LOAD_ROUNDS = 1.5, 4
"""With so many times more or fewer sessions for so long, what was measured says nothing."""


class Phase(enum.Enum):
    """What the sessions are to do."""

    OPEN = "guess where it pays"
    CHECK = "decode plainly for a moment"
    CLOSED = "decode plainly"
    TRIAL = "guess for a moment"


def load_level(num_sessions: int) -> int:
    """The same for numbers of sessions that are much the same load; 0 for one."""
    return round(math.log(num_sessions, _OTHER_LOAD))


@dataclass(slots=True)
class _Made:
    """Rounds of all sessions, old ones fading: tokens, seconds, rows of their passes."""

    rounds: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    rows: float = 0.0

    def add(self, tokens: float, seconds: float, rows: float, rounds: int, kept: float) -> None:
        self.rounds = kept * self.rounds + rounds
        self.tokens = kept * self.tokens + tokens
        self.seconds = kept * self.seconds + seconds
        self.rows = kept * self.rows + rows

    @property
    def per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0.0 else 0.0


@dataclass(slots=True)
class _Finding:
    """What is known of a load: whether guessing pays, and when that is looked at again."""

    closed: bool
    gain: float = 1.0
    check_after: float = _SOON
    wait: float = _FIRST_WAIT
    rounds: float = 0.0
    is_found: bool = False
    """By a measurement at this load; else presumed."""


@dataclass(slots=True)
class Gate:
    """One target's. Always open to a session that is alone: it needs nobody to agree with."""

    phase: Phase = Phase.OPEN
    _load: int = 0
    _num_sessions: int = 1
    _findings: dict[int, _Finding] = field(default_factory=dict)
    _now: _Finding = field(default_factory=lambda: _Finding(closed=False))
    _guessing: _Made = field(default_factory=_Made)
    _plain: _Made = field(default_factory=_Made)
    _left_out: float = 0.0
    _moves: float = 0.0
    _other_load: float = 0.0
    _trial: int = 0
    _ramps: bool = False
    _places: int = 0
    _joined: int = 0
    _stage_began: float = 0.0
    _lost: float = 0.0

    @property
    def gain(self) -> float:
        """What guessing made over plain decoding when last measured; 1 before."""
        return self._now.gain

    @property
    def is_open(self) -> bool:
        """Whether sessions may guess."""
        return self.phase in (Phase.OPEN, Phase.TRIAL)

    @property
    def rounds_until_trial(self) -> int:
        """Rounds for which the gate stays closed, if it is."""
        left = math.ceil(self._now.wait - self._now.rounds)
        return max(left, 0) if self.phase is Phase.CLOSED else 0

    def joins_trial(self, joined: int) -> int:
        """The number of the trial under way if a session takes part, else 0; `joined` is what it
        was told last."""
        if joined != self._trial:
            if self.phase is not Phase.TRIAL or self._joined >= self._places:
                return 0
            self._joined += 1
        return self._trial

    def plain_round(self) -> tuple[float, float] | None:
        """Seconds of a round in which all decode plainly, and rows of its pass, as measured."""
        made = self._plain
        if made.rounds < self._num_sessions or self._load == 0:
            return None
        return made.seconds / made.rounds, made.rows / made.rounds

    def joined(self, num_sessions: int) -> None:
        """One more session has begun. Where many do, they must not guess together because it paid
        for few."""
        load = load_level(num_sessions)
        if load > self._load + 1:
            self._change_load(load, num_sessions)

    def opened(self, seconds: float) -> None:
        """A session's first proposal has waited so long for the draft to have its prompt. That
        pays for all rounds that follow; a trial with few counts it, since all would pay it."""
        if self.phase is Phase.TRIAL and self._places < self._num_sessions:
            self._lost += seconds * self._plain.per_s / self._num_sessions

    def moved(self) -> None:
        """A session has changed how much it guesses."""
        self._moves += 1.0 / self._num_sessions

    def observe(
        self,
        tokens: float,
        seconds: float,
        rows: float,
        guessing: float,
        num_sessions: int,
        *,
        rounds: int = 1,
        guesses: bool = True,
    ) -> None:
        """A session's rounds, in sums: tokens that they stand for, seconds, rows of their passes;
        `guessing` is the share of sessions that guess, `guesses` whether it is one of them."""
        part = rounds / num_sessions
        self._follow_load(num_sessions, part)
        if self._load == 0:
            return
        now = self._now
        now.rounds += part
        self._moves *= _STILL_KEPT**part
        if self.phase is Phase.CHECK and guessing > 0.0:
            # Who still guesses, or did a moment ago, holds up the others.
            self._left_out = now.rounds + _SETTLING_ROUNDS
        # Few that guess hold up the others, who gain nothing by it: what counts is what they make.
        counts = guesses or self.phase is not Phase.TRIAL or self._places >= self._num_sessions
        if now.rounds > self._left_out and counts:
            made = self._guessing if self.is_open else self._plain
            made.add(tokens, seconds, rows, rounds, _MEMORY**part)
        if self.phase is Phase.TRIAL:
            self._lost += (seconds * self._plain.per_s - tokens) / num_sessions
        self._go_on(guessing)

    def _go_on(self, guessing: float) -> None:
        now = self._now
        measured = now.rounds - self._left_out
        if self.phase is Phase.OPEN:
            still = self._moves < _STILL
            due = now.check_after + (0 if still else _LONGEST_CLIMB)
            fell = now.rounds >= _SOON and self._measured() < _FELL_TO * now.gain
            # What was made at another load has been forgotten: there is nothing to compare yet.
            compares = self._guessing.rounds >= _CHECK_ROUNDS * self._num_sessions
            if compares and (now.rounds >= due or fell):
                self._enter(Phase.CHECK if guessing >= _FEW else Phase.CLOSED)
        elif self.phase is Phase.CHECK:
            if measured >= _CHECK_ROUNDS or now.rounds >= _LONGEST_CHECK:
                self._checked()
        elif self.phase is Phase.CLOSED:
            if now.rounds >= now.wait:
                self._enter(Phase.TRIAL)
        else:
            part = min(self._places / self._num_sessions, 1.0)
            # Rounds that were promised to be plain come first; meanwhile nothing is lost.
            few = now.rounds > _CLIMB_ROUNDS and guessing < _FEW * part
            hopeless = measured >= _SETTLING_ROUNDS and self._measured() < _HOPELESS_AT
            failed = (
                few or hopeless or self._lost > (_MOST_LOST if self._ramps else 2.0 * _MOST_LOST)
            )
            if failed or (part == 1.0 and measured >= _TRIAL_ROUNDS):
                self._tried(failed=failed)
            elif part < 1.0 and now.rounds - self._stage_began >= _STAGE_ROUNDS:
                self._let_in(2 * self._places)

    def _measured(self) -> float:
        """What guessing makes over plain decoding; 1 before both have been measured."""
        guessing, plain = self._guessing.per_s, self._plain.per_s
        return guessing / plain if guessing and plain else 1.0

    def _checked(self) -> None:
        """Half of the gain is that of the checks before, if there were any and it held."""
        now, measured = self._now, self._measured()
        if not self._plain.rounds:
            # Someone went on guessing: a session that hangs, say.
            self._enter(Phase.OPEN)
            return
        is_new = now.gain == 1.0 or measured < _FELL_TO * now.gain
        now.gain = measured if is_new else math.sqrt(now.gain * measured)
        if now.gain < _CLOSES_AT:
            self._enter(Phase.CLOSED)
        else:
            now.check_after = min(_FIRST_CHECK * (1.0 + 20.0 * (now.gain - 1.0)), _LAST_CHECK)
            self._enter(Phase.OPEN)

    def _tried(self, *, failed: bool) -> None:
        now = self._now
        if not failed:
            now.gain = self._measured()
        if not failed and now.gain > _OPENS_AT:
            now.wait, now.check_after = _FIRST_WAIT, _FIRST_CHECK
            self._enter(Phase.OPEN)
        else:
            paid_after = self._lost / _PAID_BY
            now.wait = min(max(2.0 * now.wait, _FIRST_WAIT, paid_after), _LONGEST_WAIT)
            self._enter(Phase.CLOSED)

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self._now.rounds = 0.0
        self._now.closed = phase in (Phase.CLOSED, Phase.TRIAL)
        self._now.is_found = self._now.is_found or phase is not Phase.TRIAL
        self._left_out = _SETTLING_ROUNDS
        if phase is Phase.CHECK:
            self._plain = _Made()
        elif phase is Phase.TRIAL:
            self._trial += 1
            self._joined, self._lost = 0, 0.0
            few = self._num_sessions // _FIRST_SHARE
            self._ramps = few > 1
            self._let_in(few if self._ramps else self._num_sessions)

    def _let_in(self, count: int) -> None:
        """So many sessions take part in the trial from now on."""
        self._places, self._stage_began = count, self._now.rounds
        all_in = count >= self._num_sessions
        self._left_out = self._stage_began + (_CLIMB_ROUNDS if all_in else _STAGE_SETTLING)
        self._guessing = _Made()

    def _follow_load(self, num_sessions: int, part: float) -> None:
        """Go by what was found with about so many sessions, once there are for some rounds."""
        load = load_level(num_sessions)
        if load == self._load:
            self._other_load, self._num_sessions = 0.0, num_sessions
            return
        self._other_load += part
        if self._other_load > _LOAD_ROUNDS or self._load == 0 or load == 0:
            self._change_load(load, num_sessions)

    def _change_load(self, load: int, num_sessions: int) -> None:
        self._findings[self._load] = self._now
        self._load, self._num_sessions, self._other_load = load, num_sessions, 0.0
        if load == 0:
            self._now = _Finding(closed=False)
        else:
            self._now = self._findings.get(load) or self._presumed()
        self._guessing, self._plain = _Made(), _Made()
        self.phase = Phase.CLOSED if self._now.closed else Phase.OPEN
        self._left_out = self._now.rounds + _SETTLING_ROUNDS

    def _presumed(self) -> _Finding:
        """Of a load that was not seen yet. Guessing pays the less the more sessions share a pass:
        where it pays with more it does here, and where it does not with fewer it does not here.
        Where it pays with a few less it may, which is soon seen.

        Where nothing says so, plain decoding is measured first, and guessing tried soon.
        """
        found = {load: one for load, one in self._findings.items() if load and one.is_found}
        fewer = [load for load in found if load < self._load]
        if any(load > self._load and not one.closed for load, one in found.items()):
            return _Finding(closed=False)
        if fewer and found[max(fewer)].closed:
            return _Finding(closed=True)
        return _Finding(closed=not fewer or max(fewer) < self._load - 1, wait=_SOON)
