"""Sessions of one target decide together: by what all made, with guesses and without."""

import dataclasses
import itertools

from outrider.speculation.controller import AdaptiveController, Limits
from outrider.speculation.course import Trial
from outrider.speculation.gate import Gate, Phase, load_level
from outrider.speculation.load import ProposerPool, TargetLoad
from outrider.speculation.observation import Observation


@dataclasses.dataclass
class Crowd:
    """Sessions that do as the gate says; guessing makes `gain` times the tokens of a round."""

    gate: Gate
    sessions: int
    gain: float
    willing: float = 1.0
    log: list[Phase] = dataclasses.field(default_factory=list)

    def rounds(self, count: int) -> "Crowd":
        for _ in range(count * self.sessions):
            guessing = self.willing if self.gate.is_open else 0.0
            tokens = self.gain if guessing else 1.0
            self.gate.observe(tokens, 0.02, 8.0, guessing, self.sessions)
            self.log.append(self.gate.phase)
        return self

    def share(self, phase: Phase, last: int) -> float:
        seen = self.log[-last * self.sessions :]
        return seen.count(phase) / len(seen)


def test_a_session_alone_is_never_held_back():
    assert Crowd(Gate(), 1, gain=0.5).rounds(1000).share(Phase.OPEN, 1000) == 1.0


def test_plain_decoding_is_measured_before_anyone_guesses():
    crowd = Crowd(Gate(), 8, gain=1.5).rounds(100)
    assert crowd.log[0] is Phase.CLOSED
    assert crowd.log.index(Phase.TRIAL) > 8 * 10


def test_the_gate_opens_where_guessing_pays_and_stays_open():
    crowd = Crowd(Gate(), 8, gain=1.5).rounds(2000)
    assert crowd.share(Phase.OPEN, 1500) > 0.95
    assert abs(crowd.gate.gain - 1.5) < 0.1


def test_the_gate_closes_where_it_does_not_and_is_tried_ever_more_rarely():
    crowd = Crowd(Gate(), 8, gain=0.85).rounds(6000)
    assert crowd.share(Phase.CLOSED, 6000) > 0.97
    trials = [
        i
        for i, (a, b) in enumerate(zip(crowd.log, crowd.log[1:], strict=False))
        if b is Phase.TRIAL is not a
    ]
    waits = [b - a for a, b in itertools.pairwise(trials)]
    assert len(trials) >= 3 and waits == sorted(waits)


def test_what_begins_to_pay_is_found_and_what_no_longer_does_is_left():
    crowd = Crowd(Gate(), 4, gain=0.8).rounds(600)
    crowd.gain = 1.4
    assert crowd.rounds(1500).share(Phase.OPEN, 200) > 0.9
    crowd.gain = 0.8
    assert crowd.rounds(100).share(Phase.CLOSED, 10) == 1.0
    assert crowd.rounds(800).share(Phase.OPEN, 800) == 0.0


def test_a_few_that_guess_do_not_hold_up_the_others():
    crowd = Crowd(Gate(), 16, gain=1.1, willing=0.1).rounds(1000)
    assert crowd.share(Phase.CLOSED, 900) > 0.95


def test_a_load_that_was_passed_through_says_nothing_of_the_next():
    """Sessions come one after the other: nobody has found anything with the first few."""
    gate = Gate()
    Crowd(gate, 2, gain=1.5).rounds(5)
    crowd = Crowd(gate, 4, gain=1.5).rounds(40)
    assert Phase.TRIAL in crowd.log


def test_what_was_found_with_fewer_is_presumed_of_more():
    gate = Gate()
    assert Crowd(gate, 2, gain=0.85).rounds(100).log[-1] is Phase.CLOSED
    crowd = Crowd(gate, 4, gain=1.5).rounds(40)
    assert Phase.TRIAL not in crowd.log


def presumed(found: dict[int, float], sessions: int) -> Phase:
    """What a gate that found these gains by numbers of sessions does first with another number."""
    gate = Gate()
    for number, gain in found.items():
        Crowd(gate, number, gain).rounds(200)
    return Crowd(gate, sessions, gain=1.2).rounds(8).log[-1]


def test_what_pays_with_more_is_presumed_to_pay_with_fewer_and_not_the_other_way():
    assert presumed({8: 1.5}, 4) is Phase.OPEN
    assert presumed({8: 1.5}, 12) is Phase.OPEN
    # With four times as many it is tried by few first: a round of all of them may cost dearly.
    assert presumed({8: 1.5}, 32) is Phase.CLOSED
    assert presumed({8: 0.8}, 4) is Phase.CLOSED


def test_a_gate_that_comes_back_to_a_load_compares_nothing_before_guessing_was_measured():
    gate = Gate()
    Crowd(gate, 8, gain=1.5).rounds(300)
    assert gate.phase is Phase.OPEN
    Crowd(gate, 1, gain=1.0).rounds(20)
    # All that was made is forgotten by then, and a check is due at once.
    gate._findings[load_level(8)].rounds = 1e6
    crowd = Crowd(gate, 8, gain=1.5).rounds(100)
    assert Phase.CHECK in crowd.log and Phase.CLOSED not in crowd.log
    assert abs(gate.gain - 1.5) < 0.1


def test_many_that_begin_together_do_not_guess_because_it_paid_for_one():
    load, pool = TargetLoad(), ProposerPool("draft")
    alone = AdaptiveController(load, [pool])
    for _ in range(40):
        k = alone.next_length()
        alone.observe(Observation(k, k, 0.001 * k, 0.02, 1 + k, num_asked=k))
    assert alone.next_length() > 0
    alone.close()
    burst = [AdaptiveController(load, [pool]) for _ in range(16)]
    assert [session.next_length() for session in burst] == [0] * 16


def test_each_load_is_remembered():
    """A burst of sessions does not begin with trials that failed a moment ago."""
    crowd = Crowd(Gate(), 8, gain=0.8).rounds(500)
    crowd.sessions, crowd.gain = 2, 1.5
    assert crowd.rounds(300).share(Phase.OPEN, 50) > 0.8
    crowd.sessions, crowd.gain = 8, 0.8
    crowd.log.clear()
    crowd.rounds(100)
    assert crowd.share(Phase.CLOSED, 90) == 1.0


def test_sessions_that_may_not_guess_are_looked_at_now_and_then():
    """Which costs next to nothing, and does not keep the gate from its trials."""
    load, pool = TargetLoad(), ProposerPool("draft")
    sessions = [AdaptiveController(load, [pool]) for _ in range(8)]
    phases, looks = [], []
    for _ in range(800):
        before = load.verify.num_observations
        for session in sessions:
            k = session.next_length()
            seconds = 0.02 + 0.01 * k
            session.observe(Observation(k, 0, 0.0, seconds, 8 + 8 * k, num_asked=k))
        phases.append(load.gate.phase)
        looks.append(load.verify.num_observations - before)
    closed = [n for n, phase in zip(looks, phases, strict=True) if phase is Phase.CLOSED]
    assert phases.count(Phase.CLOSED) > 700 and phases.count(Phase.TRIAL) > 5
    assert sum(closed) / len(closed) < 8 / 4
    first, *_, last = (i for i, phase in enumerate(phases) if phase is Phase.TRIAL)
    assert first < 40 and last > 300


def test_pinned_sessions_have_no_say():
    load, pool = TargetLoad(), ProposerPool("draft")
    pinned = [AdaptiveController(load, [pool], limits=Limits(pinned=0)) for _ in range(8)]
    for _ in range(500):
        for session in pinned:
            assert session.next_length() == 0
            session.observe(Observation(0, 0, 0.0, 0.02, 8))
    assert load.num_sessions == 0 and load.gate.phase is Phase.OPEN
    assert load.verify.predict(8) > 0.015
    for session in pinned:
        session.close()


def test_sessions_that_end_are_gone():
    load, pool = TargetLoad(), ProposerPool("draft")
    sessions = [AdaptiveController(load, [pool]) for _ in range(5)]
    for _ in range(30):
        for session in sessions:
            k = session.next_length()
            session.observe(Observation(k, k, 0.001 * k, 0.02, 5 + k, num_asked=k))
    assert load.num_sessions == 5 and load.tokens_per_s > 0
    for session in sessions:
        session.close()
    assert load.num_sessions == 0 and load.share_guessing == 0
    assert abs(load.tokens_per_s) < 1e-6


# A trial, and what it may cost


@dataclasses.dataclass
class Fleet:
    """Sessions that share a pass, and slow it down by `cost` of a plain round for each that
    guesses; a guess that is asked for brings `brings` tokens."""

    sessions: int
    cost: float
    brings: int = 1
    load: TargetLoad = dataclasses.field(default_factory=TargetLoad)
    guessing: list[int] = dataclasses.field(default_factory=list)
    phases: list[Phase] = dataclasses.field(default_factory=list)
    lost: float = 0.0

    def __post_init__(self) -> None:
        pool = ProposerPool("draft")
        self.controllers = [AdaptiveController(self.load, [pool]) for _ in range(self.sessions)]

    def rounds(self, count: int) -> "Fleet":
        for _ in range(count):
            lengths = [controller.next_length() for controller in self.controllers]
            guessing = sum(k > 0 for k in lengths)
            seconds = 0.01 * (1.0 + self.cost * guessing)
            rows = self.sessions + sum(lengths)
            for k, controller in zip(lengths, self.controllers, strict=True):
                accepted = min(self.brings, k)
                controller.observe(Observation(k, accepted, 0.0, seconds, rows, num_asked=k))
                self.lost += (seconds / 0.01 - 1.0 - accepted) / self.sessions
            self.guessing.append(guessing)
            self.phases.append(self.load.gate.phase)
        return self


def test_of_many_sessions_few_begin_a_trial():
    fleet = Fleet(64, cost=0.05).rounds(300)
    began = fleet.phases.index(Phase.TRIAL)
    assert sum(fleet.guessing[:began]) <= 2 * 8  # Who finds out what a proposal costs.
    assert 0 < max(fleet.guessing[began : began + 2]) <= 8
    # With each that guesses all are slower: where half of them do, guessing costs too much.
    assert max(fleet.guessing) <= 32
    assert fleet.load.gate.phase is Phase.CLOSED


def test_a_trial_of_many_costs_little_and_little_in_the_long_run():
    for cost in (0.02, 0.2):
        fleet = Fleet(32, cost).rounds(256)
        assert max(fleet.guessing) > 0 and fleet.lost < 0.02 * 256, cost
        assert fleet.rounds(600).lost < 0.015 * 856, cost


def test_all_take_part_where_few_have_lost_nothing_and_what_pays_is_found():
    for sessions in (16, 64):
        fleet = Fleet(sessions, cost=0.3 / sessions, brings=2).rounds(120)
        assert fleet.load.gate.phase in (Phase.OPEN, Phase.CHECK)
        assert max(fleet.guessing) == sessions and fleet.lost < 0.0


def test_an_unknown_proposer_is_tried_by_few():
    load, pool = TargetLoad(), ProposerPool("draft")
    sessions = [AdaptiveController(load, [pool]) for _ in range(32)]
    load.gate.phase = Phase.OPEN
    lengths = [session.next_length() for session in sessions]
    for _ in range(2):
        for k, session in zip(lengths, sessions, strict=True):
            session.observe(Observation(k, 0, 0.001 * k, 0.02, 32 + sum(lengths), num_asked=k))
        load.gate.phase = Phase.OPEN
        lengths = [session.next_length() for session in sessions]
    assert sum(session._course.trial is Trial.FIRST for session in sessions) <= 2
    for session in sessions:
        session.close()
    assert pool.num_scouts == 0
