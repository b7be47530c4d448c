"""Where a session stands: decoding plainly, guessing at a length it has settled on, or trying.

Moves need a gain beyond what noise makes, seen more than once; tries need to be paid for.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.speculation.account import Account, Probes
from outrider.speculation.gate import REST_ROUNDS, Phase
from outrider.speculation.length import Plan
from outrider.speculation.load import TargetLoad

MAX_STEP = 2
"""Guesses that one decision adds or takes away, at most."""

_MOST_PROMISED, _MOST_PROMISED_CLOSED = 32, 64
"""Plain rounds after which the load is looked at again."""

_ENTER_GAIN, _CHANGE_GAIN = 1.04, 1.02
_ENTER_AFTER, _LEAVE_AFTER, _CHANGE_AFTER = 3, 4, 4
"""Rounds in a row whose decisions agree before they are followed."""

_LONGEST_WAIT = 48
"""The same for entering, after speculation kept losing."""

_CHECK_EVERY, _CHECK_ROUNDS, _CHECKED_GAIN = 64, 4, 1.25
"""Where speculation wins little, plain decoding is measured again now and then."""

_LOOK_EVERY = 8
"""Plain rounds between two looks while entering waits."""

_OTHER_EVERY, _OTHER_MOST = 32, 512
"""Rounds between two tries of another proposer."""

Table = dict[str, list[Plan]]
"""What each length from 1 on is worth, by proposer."""


@dataclass(slots=True)
class _Streak:
    """Rounds in a row whose decisions say the same."""

    count: int = 0
    said: int = 0

    def agreed(self, says: int, times: int, rounds: int = 1) -> bool:
        """Whether `says` (0: nothing) has been said for `times` rounds in a row.

        `rounds` have passed since the last decision.
        """
        if not says:
            self.count = 0
        elif says == self.said:
            self.count += rounds
        else:
            self.count = 1
        self.said = says
        return says != 0 and self.count >= times


class Trial(enum.Enum):
    """Why a round is not what the session has settled on."""

    FIRST = "first rounds of a proposer"
    PROBE = "plain decoding tries a guess"
    CHECK = "plain decoding is measured"
    OTHER = "another proposer is tried"


class Course:
    """The moves of one session; whoever holds it says what the lengths are worth."""

    def __init__(self, load: TargetLoad, proposer: str) -> None:
        self._load = load
        self._account, self._probes = Account(), Probes()
        self._entering, self._leaving, self._changing = _Streak(), _Streak(), _Streak()
        self._enter_after = 1
        self._going_out = self._first_of_trial = False
        self._won = 0.0
        self._rounds = self._turn = 0
        self._check_left = -1
        self._other_every = self._other_due = _OTHER_EVERY
        self._phase = load.gate.phase
        self._trial_joined = 0
        self._settled_proposer = proposer
        self.settled = 0
        self.proposer = proposer
        self.trial: Trial | None = None

    @property
    def is_settled(self) -> bool:
        """Whether nothing but a change of what lengths are worth would change the next one."""
        phase = self._load.gate.phase
        goes_on = phase is self._phase and phase is not Phase.TRIAL and not self._going_out
        return goes_on and self.trial is None and (self.settled > 0 or phase is Phase.CLOSED)

    @property
    def is_closed(self) -> bool:
        """Decoding plainly until the gate opens, whatever lengths are worth."""
        return self._phase is Phase.CLOSED and self.is_settled and not self.settled

    def choose(self, table: Table, plain: Plan, rounds: int) -> int:
        """The next length, `rounds` after the last one was chosen; sets `proposer`, `trial`."""
        phase = self._phase_for_it()
        self._first_of_trial = phase is Phase.TRIAL and self._phase is not phase
        self._phase, self._rounds = phase, rounds
        self.trial, self.proposer = None, self._settled_proposer
        if self.settled:
            return self._from_speculation(table, plain)
        return self._from_plain(table, plain)

    def may_try_first(self) -> bool:
        """Whether a proposer that nothing is known of may be tried now."""
        return self._phase_for_it() in (Phase.OPEN, Phase.TRIAL)

    def _phase_for_it(self) -> Phase:
        """The gate's; closed for a session that has no part in a trial."""
        gate = self._load.gate
        if gate.phase is not Phase.TRIAL:
            return gate.phase
        self._trial_joined = gate.joins_trial(self._trial_joined)
        return Phase.TRIAL if self._trial_joined else Phase.CLOSED

    def try_first(self, proposer: str) -> int:
        """A round of a proposer that nothing is known of."""
        self.trial, self.proposer = Trial.FIRST, proposer
        return self.settled or MAX_STEP

    def move(self, load: TargetLoad) -> None:
        """The session goes on at another target, as settled as it was."""
        self._load, self._phase, self._check_left = load, load.gate.phase, -1
        self._trial_joined = 0

    def plain_rounds(self, count: int) -> None:
        self._account.plain_rounds(count)
        self._probes.rounds_passed(count)

    def guessing_round(self, gain: float, *, paid: bool) -> None:
        """`gain` is what it should have brought, in plain rounds; `paid`: it brought its cost."""
        self._account.add(gain)
        self._won += gain
        self._other_due = max(self._other_due - 1, 0)
        if self.trial is Trial.PROBE:
            self._probes.ended(paid=paid)

    def text_changed(self) -> None:
        """What tries found before says little."""
        self._probes.reset()
        self._other_every = _OTHER_EVERY
        self._other_due = min(self._other_due, _OTHER_EVERY)

    def _from_plain(self, table: Table, plain: Plan) -> int:
        proposer, best = _best(table)
        pays = best.tokens_per_s > _ENTER_GAIN * plain.tokens_per_s
        if self._phase is Phase.TRIAL:
            agreed = pays
        else:
            agreed = self._entering.agreed(int(pays), self._enter_after, self._rounds)
            agreed = agreed and self._phase is Phase.OPEN and self._may_spend()
        if agreed:
            self._settle(proposer, min(best.num_speculative_tokens, MAX_STEP))
            self._won = 0.0
            return self.settled
        if self._phase is Phase.TRIAL:
            return self._probe(table, plain) if self._first_of_trial else 0
        if pays or self._probes.due_in or not self._may_probe():
            return 0
        return self._probe(table, plain)

    def _may_spend(self) -> bool:
        """Of sessions that share passes the gate knows better what they may lose."""
        return self._account.balance >= 0.0 or self._load.num_sessions > 1

    def _may_probe(self) -> bool:
        """A lone guess would hold up all who decode plainly beside it."""
        others = self._load.num_sessions - 1
        guessing = self._load.share_guessing * self._load.num_sessions
        return self._phase is Phase.OPEN and (others == 0 or 2 * guessing >= others)

    def _probe(self, table: Table, plain: Plan) -> int:
        """A guess or two of the proposers in turn, if the account allows it."""
        proposer = list(table)[self._turn % len(table)]
        length = min(_best({proposer: table[proposer]})[1].num_speculative_tokens, MAX_STEP)
        probe = table[proposer][length - 1]
        loss = probe.round_s * (plain.tokens_per_s - probe.tokens_per_s)
        if self._account.balance < loss and self._phase is not Phase.TRIAL:
            return 0
        self._turn += 1
        self.trial, self.proposer = Trial.PROBE, proposer
        return length

    def _from_speculation(self, table: Table, plain: Plan) -> int:
        _, best = _best(table)
        loses = self._leaving.agreed(
            int(best.tokens_per_s < plain.tokens_per_s), _LEAVE_AFTER, self._rounds
        )
        if self._phase is Phase.TRIAL:
            loses = False
        if self._phase is Phase.CLOSED or self._going_out or loses or self._is_overdrawn():
            return self._go_out()
        self._move(table)
        if self._check_is_due(best.tokens_per_s / plain.tokens_per_s):
            self.trial = Trial.CHECK
            return 0
        if len(table) > 1 and not self._other_due:
            self._try_other(list(table))
        return self.settled

    def _is_overdrawn(self) -> bool:
        return self._account.overdrawn and self._load.num_sessions == 1

    def _go_out(self) -> int:
        """Two guesses fewer; at 0, what the time with guesses brought says when to come back."""
        self.settled = max(self.settled - MAX_STEP, 0)
        self._going_out = self.settled > 0
        if not self._going_out:
            longer = min(max(2 * self._enter_after, _ENTER_AFTER), _LONGEST_WAIT)
            self._enter_after = longer if self._won < 0.0 else _ENTER_AFTER
            self._entering, self._leaving = _Streak(), _Streak()
            self._probes.reset()
        return self.settled

    def _move(self, table: Table) -> None:
        """To the best length, since text changes; to another proposer only for a lasting gain."""
        proposer, best = _best(table)
        own = max(table[self._settled_proposer], key=lambda plan: plan.tokens_per_s)
        other = proposer != self._settled_proposer
        gains = other and best.tokens_per_s > _CHANGE_GAIN * own.tokens_per_s
        if not self._changing.agreed(int(gains), _CHANGE_AFTER, self._rounds):
            proposer, best = self._settled_proposer, own
        step = best.num_speculative_tokens - self.settled
        if step or proposer != self._settled_proposer:
            self._settle(proposer, self.settled + min(max(step, -MAX_STEP), MAX_STEP))

    def _settle(self, proposer: str, length: int) -> None:
        if proposer != self._settled_proposer or abs(length - self.settled) > 1:
            self._load.gate.moved()
        self._settled_proposer = self.proposer = proposer
        self.settled = length

    def _check_is_due(self, gain: float) -> bool:
        """Whether plain decoding is measured now: by all together, or as a session alone wants."""
        if self._phase is Phase.CHECK:
            return True
        if self._check_left < 0 and gain < _CHECKED_GAIN and self._load.num_sessions == 1:
            every = _CHECK_EVERY * (1.0 + 10.0 * max(gain - 1.0, 0.0))
            if self._load.rounds_since_plain >= every:
                self._check_left = _CHECK_ROUNDS
        self._check_left = max(self._check_left - 1, -1)
        return self._check_left >= 0

    def _try_other(self, names: Sequence[str]) -> None:
        """The next proposer's turn, for one round; rarer each time."""
        others = [name for name in names if name != self._settled_proposer]
        self.trial, self.proposer = Trial.OTHER, others[self._turn % len(others)]
        self._turn += 1
        self._other_due = self._other_every
        self._other_every = min(2 * self._other_every, _OTHER_MOST)

    def plain_ahead(self) -> int:
        """Rounds after this one that will be plain whatever they bring."""
        if self.trial is Trial.CHECK:
            ahead, self._check_left = self._check_left, -1
            return max(ahead, 0)
        if self._phase is Phase.CLOSED:
            # The gate hears of rounds a little later.
            left = self._load.gate.rounds_until_trial - REST_ROUNDS
            return min(max(left - 1, 0), _MOST_PROMISED_CLOSED)
        if self._phase is Phase.TRIAL:
            return 0
        if self._entering.said:
            left = self._enter_after - self._entering.count
            return min(left, _LOOK_EVERY) if left > _ENTER_AFTER else 0
        ahead = max(self._probes.due_in, self._account.rounds_until(0.0))
        return min(max(ahead - 1, 0), _MOST_PROMISED)


def _best(table: Table) -> tuple[str, Plan]:
    return max(
        ((name, plan) for name, found in table.items() for plan in found),
        key=lambda choice: choice[1].tokens_per_s,
    )
