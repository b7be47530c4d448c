"""Policies compared on a trace: its acceptance drawn from again, its costs, and what is injected.

Sessions follow each other as they were recorded, or several of a category at a time; what a
policy learns of one is there for the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.errors import InvalidArgument
from outrider.speculation.controller import Limits
from outrider.speculation.costs import CostLine, Line
from outrider.speculation.length import Mode
from outrider.speculation.policies import adaptive, oracle
from outrider.speculation.processes import AcceptanceProcess, estimate
from outrider.speculation.simulator import simulate
from outrider.speculation.traces import Trace, TracedRound
from outrider.speculation.world import Load, MakePolicy, Result, World

PLAIN, OURS, ORACLE = "plain", "ours", "oracle"

_NO_LOAD = Load()


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is injected: delay each way to the draft, slower drafts, other sessions' rows."""

    delay_s: float = 0.0
    draft_factor: float = 1.0
    load: Load = _NO_LOAD
    sessions: int = 1


def fixed(k: int) -> str:
    """The name of the policy that always guesses k."""
    return f"k={k}"


def policy_names(k_max: int) -> list[str]:
    return [PLAIN, *(fixed(k) for k in range(1, k_max + 1)), OURS, ORACLE]


def world_of(trace: Trace, mode: Mode) -> World:
    """Costs as the trace's header has them; what it lacks is fitted to its rounds."""
    lines = {"verify": _fitted_verify(trace), "draft": _fitted_draft(trace)}
    for name, values in trace.cost_lines.items():
        try:
            lines[name] = Line(**values)
        except TypeError as error:
            raise InvalidArgument(f"cost line {name!r}: {error}", field="trace") from error
    verify = lines["verify"]
    plain_trip, guess_trip, context, prompt = (
        lines.get(name, Line(0.0)) for name in ("plain_trip", "guess_trip", "context", "prompt")
    )
    return World(
        Line(verify.base, verify.slope),
        lines["draft"],
        mode,
        plain_trip_s=plain_trip.base,
        # A fitted verification has its trips in it.
        guess_trip_s=guess_trip.base + verify.other_slope,
        context_s=context.base,
        prompt_s=prompt.base,
    )


def compare(
    trace: Trace, world: World, scenario: Scenario, *, k_max: int, seed: int
) -> list[dict[str, Any]]:
    """A row a policy: tokens per second, in all and by category, and its share of the oracle's."""
    world = replace(
        world,
        delay_s=scenario.delay_s,
        draft=_scaled(world.draft, scenario.draft_factor),
    )
    processes = estimate(trace, k_max=k_max + 1)
    results = {
        name: run(world, processes, policy(name, world, k_max), scenario, seed)
        for name in policy_names(k_max)
    }
    best = _total(results[ORACLE]).tokens_per_s
    return [_row(name, found, best) for name, found in results.items()]


def policy(name: str, world: World, k_max: int) -> MakePolicy:
    """By its name."""
    if name == ORACLE:
        return oracle(world, k_max)
    if name == OURS:
        return adaptive(world.mode, Limits(cap=k_max))
    k = 0 if name == PLAIN else int(name.removeprefix("k="))
    return adaptive(world.mode, Limits(pinned=k))


def run(
    world: World,
    processes: Sequence[AcceptanceProcess],
    make_policy: MakePolicy,
    scenario: Scenario,
    seed: int,
) -> dict[str, Result]:
    """Results by category, the sessions one group after the other."""
    found: dict[str, Result] = {}
    now = 0.0
    for number, group in enumerate(_groups(processes, scenario.sessions)):
        result = simulate(
            world,
            group,
            make_policy,
            load=scenario.load,
            seed=seed + number,
            start_s=now,
        )
        now += result.seconds
        category = group[0].category
        found[category] = found.get(category, Result()) + result
    return found


def _groups(processes: Sequence[AcceptanceProcess], size: int) -> list[Sequence[AcceptanceProcess]]:
    """One by one as recorded; several at once are of one category."""
    if size == 1:
        return [[process] for process in processes]
    categories: dict[str, list[AcceptanceProcess]] = {}
    for process in processes:
        categories.setdefault(process.category, []).append(process)
    return [
        found[start : start + size]
        for found in categories.values()
        for start in range(0, len(found), size)
    ]


def _row(name: str, found: dict[str, Result], best: float) -> dict[str, Any]:
    total = _total(found)
    return {
        "policy": name,
        "tokens_per_s": total.tokens_per_s,
        "of_oracle": total.tokens_per_s / best if best else None,
        "mean_length": total.mean_length,
        "per_category": {
            category: {"tokens_per_s": result.tokens_per_s, "mean_length": result.mean_length}
            for category, result in found.items()
        },
    }


def _total(found: dict[str, Result]) -> Result:
    return sum(found.values(), Result())


def _scaled(line: Line, factor: float) -> Line:
    return Line(line.base * factor, line.slope * factor, line.other_slope * factor)


def _usual(rounds: Sequence[TracedRound]) -> Sequence[TracedRound]:
    """Without those that wait for the prompt: at the target, then at the draft."""
    first = next((i for i, entry in enumerate(rounds) if entry.proposed), 0)
    return rounds[first + 1 :]


def _fitted_verify(trace: Trace) -> Line:
    line = CostLine()
    for session in trace.sessions:
        for entry in _usual(session.rounds):
            if entry.verify_us:
                rows = max(entry.batch_rows, entry.proposed + 1)
                line.observe(entry.verify_us / 1e6, rows, float(entry.proposed > 0))
    return line.line()


def _fitted_draft(trace: Trace) -> Line:
    line = CostLine(relative_slope=0.5)
    for session in trace.sessions:
        for entry in _usual(session.rounds):
            # Where drafting was hidden, what was waited for says little of it.
            took_us = entry.draft_us if entry.hit is None else entry.proposal_us
            if entry.proposed and took_us:
                line.observe(took_us / 1e6, entry.proposed)
    return line.line()
