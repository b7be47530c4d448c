"""Schedules of faults, drawn by seed: what happens to which part, when, and for how long."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from .link import HERE
from .points import ACTIONS, POINTS
from .stack import DRAFTS, ORCHESTRATORS, RANKS, STORE, TARGETS, links, role_of


class Kind(StrEnum):
    """What may happen."""

    KILL = "kill"
    """SIGKILL; started again after a while."""
    RESTART = "restart"
    """SIGTERM, and started again when it has drained."""
    PAUSE = "pause"
    """SIGSTOP, SIGCONT after a while."""
    VANISH = "vanish"
    """Killed while nobody can hear it: its connections stay half-open until the host is back."""
    CUT = "cut"
    """A link drops everything, in both directions or in one."""
    SLOW = "slow"
    """A link delays everything."""
    LOSE = "lose"
    """A link loses some of what it carries."""
    POINT = "point"
    """At a named point of its code a process is killed, put to sleep, or told a lie."""
    RACE = "race"
    """Two clients resume the same running generation at once, at different orchestrators."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that happens, `at_s` seconds into a schedule. `part` is a process, or the first
    host of a link, whose second one is `other`."""

    kind: Kind
    at_s: float
    duration_s: float
    part: str
    other: str = ""
    amount: float = 0.0
    """Of `slow` the delay in milliseconds, of `lose` the share, of `point` the passage."""
    point: str = ""
    action: str = ""
    one_way: bool = False
    rank: int | None = None
    """Of `kill` and `pause` which rank of a group; None where the part is none."""

    @property
    def until_s(self) -> float:
        return self.at_s + self.duration_s

    @property
    def label(self) -> str:
        """What it is counted under."""
        if self.kind is Kind.RACE:
            return "race of two readers"
        if self.other:
            return f"{self.kind} {_side(self.part)}-{_side(self.other)}"
        if self.kind is Kind.POINT:
            return f"{self.action} {role_of(self.part)} {self.point}"
        return f"{self.kind} {role_of(self.part)}{self.of_group}"

    @property
    def of_group(self) -> str:
        return "" if self.rank is None else f" rank {self.rank}"

    def describe(self) -> str:
        span = f"{self.at_s:5.2f} s, for {self.duration_s:.2f} s:"
        match self.kind:
            case Kind.RACE:
                return f"{self.at_s:5.2f} s: two clients resume one generation, {self.amount:g}"
            case Kind.POINT:
                passage = f"passage {self.amount:g}"
                return f"{span} {self.action} {self.part} {self.point}, {passage}"
            case Kind.SLOW:
                return f"{span} slow {self.part}-{self.other}, {self.amount:.1f} ms each way"
            case Kind.LOSE:
                return f"{span} lose {self.amount:.0%} of {self.part}-{self.other}"
            case Kind.CUT:
                way = " one way" if self.one_way else ""
                return f"{span} cut {self.part}-{self.other}{way}"
            case _:
                return f"{span} {self.kind} {self.part}{self.of_group}"


_WEIGHTS = {
    Kind.KILL: 5,
    Kind.RESTART: 2,
    Kind.PAUSE: 3,
    Kind.VANISH: 2,
    Kind.CUT: 4,
    Kind.SLOW: 2,
    Kind.LOSE: 2,
    Kind.POINT: 5,
    Kind.RACE: 2,
}
_PROCESS_FAULTS = (Kind.KILL, Kind.RESTART, Kind.PAUSE, Kind.VANISH, Kind.POINT)
_LATEST_S = 1.8
"""Streams take about three seconds; what comes later than this disturbs few of them."""


def schedule(seed: int, kinds: Sequence[Kind] = ()) -> tuple[Fault, ...]:
    """One to four faults, in order. `kinds` limits them, for who wants to look at one alone."""
    rng = random.Random(f"schedule {seed}")
    wanted = rng.choice([1, 1, 2, 2, 3, 4])
    weights = {kind: weight for kind, weight in _WEIGHTS.items() if not kinds or kind in kinds}
    faults: list[Fault] = []
    while len(faults) < wanted:
        kind = rng.choices(list(weights), list(weights.values()))[0]
        fault = _draw(rng, kind)
        if not any(_collide(fault, other) for other in faults):
            faults.append(fault)
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def _draw(rng: random.Random, kind: Kind) -> Fault:
    at_s = round(rng.uniform(0.05, _LATEST_S), 2)
    if kind is Kind.RACE:
        return Fault(kind, at_s, 0.0, HERE, amount=rng.randint(1, 60))
    if kind is Kind.POINT:
        return _draw_point(rng, at_s)
    if kind in _PROCESS_FAULTS:
        part = _draw_part(rng)
        limits = {Kind.PAUSE: (0.1, 4.0), Kind.RESTART: (0.0, 0.5)}.get(kind, (0.0, 1.5))
        duration_s, rank = round(rng.uniform(*limits), 2), None
        if kind in (Kind.KILL, Kind.PAUSE) and part in RANKS:
            rank = round(100 * at_s) % RANKS[part]
        return Fault(kind, at_s, duration_s, part, rank=rank)
    part, other = rng.choice(links())
    duration_s = round(rng.uniform(0.2, 4.5 if kind is Kind.CUT else 3.0), 2)
    amount = {
        Kind.SLOW: round(rng.uniform(1, 40), 1),
        Kind.LOSE: round(rng.uniform(0.01, 0.15), 3),
    }.get(kind, 0.0)
    one_way = kind is Kind.CUT and rng.random() < 0.3
    if one_way and rng.random() < 0.5:
        part, other = other, part
    return Fault(kind, at_s, duration_s, part, other, amount, one_way=one_way)


def _draw_part(rng: random.Random) -> str:
    tier = rng.choice([ORCHESTRATORS, ORCHESTRATORS, TARGETS, TARGETS, DRAFTS, (STORE,)])
    return rng.choice(tier)


def _draw_point(rng: random.Random, at_s: float) -> Fault:
    tier = rng.choice([ORCHESTRATORS, ORCHESTRATORS, ORCHESTRATORS, TARGETS, DRAFTS])
    part = rng.choice(tier)
    point = rng.choice(sorted(POINTS[role_of(part)]))
    action = rng.choice(ACTIONS[point])
    duration_s = round(rng.uniform(0.1, 4.0) if action == "stop" else rng.uniform(0.0, 1.5), 2)
    passage = rng.randint(1, 3) if "takeover" in point else rng.randint(1, 120)
    return Fault(Kind.POINT, at_s, duration_s, part, amount=passage, point=point, action=action)


_MARGIN_S = 1.0
"""Between two faults of one part: for it to have come back."""


def _collide(one: Fault, other: Fault) -> bool:
    """Whether two faults would undo each other."""
    if Kind.RACE in (one.kind, other.kind):
        return one.kind is other.kind
    same_link = bool(one.other) and {one.part, one.other} == {other.part, other.other}
    both_processes = not one.other and not other.other and one.part == other.part
    # What vanishes takes its links along.
    shared = Kind.VANISH in (one.kind, other.kind) and {one.part, one.other} & {
        other.part,
        other.other,
    } - {""}
    if Kind.POINT in (one.kind, other.kind) and both_processes:
        return True  # When a point comes by is not known.
    overlap = one.at_s < other.until_s + _MARGIN_S and other.at_s < one.until_s + _MARGIN_S
    return bool((same_link or both_processes or shared) and overlap)


def _side(name: str) -> str:
    return "client" if name == HERE else role_of(name)
