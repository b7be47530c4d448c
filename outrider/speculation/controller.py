"""The controller of one session: how much the next round guesses.

Learn from the round, weigh the lengths, move by at most two. k = 0 is a normal answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.errors import InvalidArgument
from outrider.speculation.beliefs import Beliefs
from outrider.speculation.course import MAX_STEP, Course, Trial
from outrider.speculation.fan_out import FanOut, allocate
from outrider.speculation.gate import REST_ROUNDS, Phase
from outrider.speculation.length import Decision, Mode, explain, plain_plan, plans
from outrider.speculation.load import Kind, ProposerPool, TargetLoad
from outrider.speculation.observation import Observation
from outrider.types import MAX_SPECULATIVE_TOKENS, SpeculationStats

ALWAYS = 1 << 31
"""As many rounds as there are."""

_FIRST_ROUNDS = 3
"""Plain rounds before anything is known of a target; rounds of a proposer that is not known."""

_DECIDE_EVERY, _EARLY = 4, 16
"""Rounds between decisions where a length is settled, but for the first ones of a session."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request asked for: a pinned length (0: off), or at most `cap`."""

    pinned: int | None = None
    cap: int = 8

    def __post_init__(self) -> None:
        for name, value in (("pinned", self.pinned), ("cap", self.cap)):
            if value is not None and not 0 <= value <= MAX_SPECULATIVE_TOKENS:
                raise InvalidArgument(
                    f"{value} is not in 0 to {MAX_SPECULATIVE_TOKENS}", field=name
                )


_NO_LIMITS = Limits()
_NO_KIND = Kind()
_NO_OUTCOMES = FanOut((), 0.0)


class AdaptiveController:
    """Chooses the lengths of one generation; `close` when it ends.

    `next_length` before each round, `observe` after it. `decision` tells why; `proposer` and
    `outcomes` tell what else the round needs. Arithmetic only: no clock, no randomness, no I/O.
    """

    def __init__(
        self,
        load: TargetLoad,
        pools: Sequence[ProposerPool],
        *,
        mode: Mode = Mode.SEQUENTIAL,
        limits: Limits = _NO_LIMITS,
        kind: Kind = _NO_KIND,
    ) -> None:
        self._load, self._mode = load, mode
        self._pinned = limits.pinned if pools and limits.cap else 0
        self._cap = self._pinned if self._pinned is not None else limits.cap
        self._beliefs = Beliefs(load, pools, kind, decides=self._pinned is None)
        self._course = Course(load, pools[0].name if pools else "")
        self._undecided = True
        self._length = self._fan_out = 0
        self._promised = self._rounds = self._changes = self._age = 0
        self._rests = False
        self._rest_rounds, self._rest_s = 0, 0.0
        self._outcomes: FanOut | None = _NO_OUTCOMES
        costs = self._beliefs.costs()
        self.decision: Decision = explain(plain_plan(costs), None, costs)

    @property
    def proposer(self) -> str:
        """Who is to guess in the next round, if anyone."""
        return self._course.proposer

    @property
    def fan_out(self) -> int:
        """How many outcomes of the next round are worth preparing for."""
        return self._fan_out

    def close(self) -> None:
        """The generation has ended."""
        self._beliefs.leave()

    def moves_to(self, load: TargetLoad) -> None:
        """The session goes on at this target: what it knows of its guesses stays true."""
        if load is self._load:
            return
        if self._rests:
            self._wake()
        self._load, self._undecided = load, True
        self._beliefs.move(load)
        self._course.move(load)

    def recall(self, history: SpeculationStats) -> None:
        """Start from what a former owner of the generation has counted, whoever guessed then."""
        guesser = self._beliefs.guessers.get(self.proposer)
        if guesser is not None:
            guesser.acceptance.recall(history.proposed_by_position, history.accepted_by_position)

    def next_length(self) -> int:
        """Guesses for the next round; 0 decodes plainly."""
        if self._rests:
            if self._load.gate.phase is Phase.CLOSED:
                return 0
            self._wake()
        if self._undecided:
            self._undecided = False
            if self._promised > 0 or self._cap == 0:
                self._length = 0
            elif self._decides_now():
                self._decide()
            self._beliefs.begin_round(self._length)
        return self._length

    def plain_rounds(self) -> int:
        """Rounds after this one, at most, that are certain to carry no guesses."""
        if self._pinned is not None:
            return 0 if self._pinned else ALWAYS
        if self._length == 0 and self._load.verify.num_observations >= _FIRST_ROUNDS:
            # This round is one of them, and is counted when it has passed.
            self._promised = max(self._promised, self._course.plain_ahead() + 1)
        return max(self._promised - 1, 0)

    def outcomes(self) -> FanOut:
        """What to prepare for while the next round is verified."""
        if self._outcomes is None:
            guesser = self._beliefs.guessers[self.proposer]
            acceptance = guesser.acceptance.survival(self._length + 1)
            self._outcomes = allocate(acceptance, guesser.pool.ranks, self._fan_out)
        return self._outcomes

    def observe(self, seen: Observation) -> None:
        """Learn from a round."""
        if self._rests:
            if not seen.num_asked and not seen.num_proposed:
                self._rest(seen)
                return
            self._wake()
        self._undecided = True
        self._rounds += 1
        self._age += 1
        self._promised = max(self._promised - 1, 0)
        guesser = self._beliefs.guessers.get(self.proposer)
        guessed = guesser is not None and max(seen.num_asked, seen.num_proposed) > 0
        if guesser is None or not guessed:
            self._beliefs.observe_plain(seen, 1, seen.total_s)
            self._course.plain_rounds(1)
            return
        waited_s, seen = seen.total_s, guesser.without_opening(seen)
        if waited_s > seen.total_s:
            self._load.gate.opened(waited_s - seen.total_s)
        if seen.hit is not None:
            guesser.observe_hit(seen.hit, self.outcomes().hit_probability)
            if seen.prepared:
                rank = seen.rank if seen.hit else None
                guesser.pool.ranks.observe(rank, prepared=seen.prepared, bonus=seen.after_bonus)
        gain = self._beliefs.observe(seen, guesser, self._fan_out)
        won = seen.num_tokens - seen.total_s * self.decision.plain_tokens_per_s
        self._course.guessing_round(gain, paid=won >= 0.0)
        if guesser.acceptance.num_changes != self._changes:
            self._changes = guesser.acceptance.num_changes
            self._course.text_changed()

    def _rest(self, seen: Observation) -> None:
        """A plain round of a session that may do nothing else: looked at every few rounds, because
        a target with many sessions leaves the orchestrator little time for each."""
        self._rest_rounds += 1
        self._rest_s += seen.round_s or seen.total_s
        self._promised -= self._promised > 0
        if self._rest_rounds >= REST_ROUNDS:
            rounds, seconds = self._rest_rounds, self._rest_s
            self._rest_rounds, self._rest_s = 0, 0.0
            self._beliefs.observe_plain(seen, rounds, seconds)
            self._course.plain_rounds(rounds)

    def _wake(self) -> None:
        """Guesses may come: of the rounds since the last look only their number counts."""
        self._rounds += self._rest_rounds
        self._course.plain_rounds(self._rest_rounds)
        self._rests, self._rest_rounds, self._rest_s = False, 0, 0.0
        self._undecided = True

    def _decides_now(self) -> bool:
        """Every round, but where a length is settled and no try is under way."""
        if self._length == 0 and self._pinned is None and self._course.is_closed:
            self._rests = True
            return False
        settled = self._course.settled if self._pinned is None else self._pinned
        goes_on = self._pinned is not None or self._course.is_settled
        due = self._rounds >= _DECIDE_EVERY or self._age < _EARLY
        return not goes_on or self._length != settled or due

    def _decide(self) -> None:
        costs = self._beliefs.costs()
        offers = {offer.proposer: offer for offer in self._beliefs.offers(self._cap)}
        table = {name: plans(offer, costs, self._mode) for name, offer in offers.items()}
        plain, before = plain_plan(costs), self._length
        unknown = self._unknown_proposer()
        if self._pinned is not None:
            self._length = self._pinned
        elif self._load.verify.num_observations < _FIRST_ROUNDS:
            self._length = 0
        else:
            course = self._course
            chosen = (
                course.try_first(unknown) if unknown else course.choose(table, plain, self._rounds)
            )
            self._length = min(max(chosen, before - MAX_STEP), before + MAX_STEP, self._cap)
        self._rounds = 0
        plan = table[self.proposer][self._length - 1] if self._length else plain
        self._fan_out = 0 if self._course.trial is Trial.FIRST else plan.fan_out
        self._outcomes = None if self._fan_out else _NO_OUTCOMES
        self.decision = explain(plan, offers[self.proposer], costs)

    def _unknown_proposer(self) -> str:
        """One that is to be tried for what it costs; few sessions do that for all."""
        guessers = self._beliefs.guessers
        for guesser in guessers.values():
            if guesser.scouts and guesser.draft.num_observations >= _FIRST_ROUNDS:
                guesser.stop_scouting()
        if not self._course.may_try_first():
            return ""
        for name, guesser in guessers.items():
            if guesser.draft.num_observations < _FIRST_ROUNDS and guesser.may_scout():
                return name
        return ""
