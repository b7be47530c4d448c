"""The controller against the best fixed length: by category, and on text that changes.

Sessions of a category, and mixtures of all, are run by every fixed length, by an oracle and by the
controller: *warm*, one stack that serves all of them in a shuffled order, and *cold*, each session
the first of a stack that knows nothing.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.speculation.processes import AcceptanceProcess, spliced
from outrider.speculation.replay import ORACLE, OURS, PLAIN, Scenario, fixed, policy, run
from outrider.speculation.world import Result, World

CHANGING, BACK_AND_FORTH = "changing", "back and forth"
"""Mixtures: stretches of any categories, and of the easiest and the hardest in turn."""

WARM, COLD = "warm", "cold"
"""The controller, as it is told of in rows."""

_STRETCH = (24, 96)
"""Tokens of one category in a mixture."""

_NOTHING = Scenario()


@dataclass(frozen=True, slots=True)
class Sessions:
    """How many sessions of each category and mixture, and how long they are, in tokens."""

    count: int = 24
    shortest: int = 64
    longest: int = 256


def evaluate(
    world: World,
    processes: Sequence[AcceptanceProcess],
    sessions: Sessions,
    *,
    k_max: int,
    seeds: Sequence[int],
) -> list[dict[str, Any]]:
    """A row a category or mixture: tokens per second of each policy, and ours over the best fixed.

    Every policy serves the same sessions, others for each seed; each session has its own luck.
    Time that prompts take is left out: it is the same for all.
    """
    found: dict[str, dict[str, Result]] = {}
    for seed in seeds:
        for name, results in _of_seed(world, processes, sessions, k_max, seed).items():
            before = found.setdefault(name, {})
            for category, result in results.items():
                before[category] = before.get(category, Result()) + result
    return [
        _row(category, {name: results[category] for name, results in found.items()})
        for category in found[PLAIN]
    ]


def _of_seed(
    world: World,
    processes: Sequence[AcceptanceProcess],
    sessions: Sessions,
    k_max: int,
    seed: int,
) -> dict[str, dict[str, Result]]:
    """Results by policy, then by category."""
    served = list(_sessions(processes, sessions, random.Random(f"{seed}/sessions")))
    fixed_ones = [PLAIN, *(fixed(k) for k in range(1, k_max + 1))]
    found = {name: _warm(world, served, name, k_max, seed) for name in (*fixed_ones, ORACLE)}
    found[WARM] = _warm(world, served, OURS, k_max, seed)
    found[COLD] = _cold(world, served, k_max, seed)
    return {
        name: {
            category: results[category] for category in dict.fromkeys(p.category for p in served)
        }
        for name, results in found.items()
    }


def _row(category: str, found: dict[str, Result]) -> dict[str, Any]:
    rates = {name: result.decoded_per_s for name, result in found.items()}
    lengths = [name for name in rates if name not in (ORACLE, WARM, COLD)]
    best = max(lengths, key=lambda name: rates[name])
    return {
        "category": category,
        "best_fixed": best,
        "tokens_per_s": rates,
        "warm_of_best": rates[WARM] / rates[best],
        "cold_of_best": rates[COLD] / rates[best],
        "warm_of_oracle": rates[WARM] / rates[ORACLE],
        "mean_length": found[WARM].mean_length,
    }


def _warm(
    world: World, served: Sequence[AcceptanceProcess], name: str, k_max: int, seed: int
) -> dict[str, Result]:
    order = list(served)
    random.Random(f"{seed}/order").shuffle(order)
    return run(world, order, policy(name, world, k_max), _NOTHING, seed)


def _cold(
    world: World, served: Sequence[AcceptanceProcess], k_max: int, seed: int
) -> dict[str, Result]:
    found: dict[str, Result] = {}
    for number, process in enumerate(served):
        alone = run(world, [process], policy(OURS, world, k_max), _NOTHING, 1000 * seed + number)
        found[process.category] = found.get(process.category, Result()) + alone[process.category]
    return found


def _sessions(
    processes: Sequence[AcceptanceProcess], sessions: Sessions, rng: random.Random
) -> Iterable[AcceptanceProcess]:
    """Of each category, then of the mixtures."""
    categories: dict[str, list[AcceptanceProcess]] = {}
    for process in processes:
        categories.setdefault(process.category, []).append(process)

    def length() -> int:
        return rng.randint(sessions.shortest, sessions.longest)

    for category, group in categories.items():
        for number in range(sessions.count):
            first = group[number % len(group)]
            yield _filled(category, first, group, length(), rng)
    names = list(categories)
    ends = sorted(names, key=lambda name: _mean_rate(categories[name]))
    ends = [ends[0], ends[-1]]
    for mixture, turns in ((CHANGING, None), (BACK_AND_FORTH, ends)):
        for _ in range(2 * sessions.count):
            yield _mixed(mixture, categories, turns, length(), rng)


def _filled(
    category: str,
    first: AcceptanceProcess,
    group: Sequence[AcceptanceProcess],
    num_tokens: int,
    rng: random.Random,
) -> AcceptanceProcess:
    """A recorded session, and where it is too short, further ones behind it."""
    parts = []
    process = first
    while num_tokens > 0:
        taken = min(num_tokens, process.num_tokens)
        parts.append((process, 0, taken))
        num_tokens -= taken
        process = rng.choice(list(group))
    return spliced(parts, category=category)


def _mixed(
    name: str,
    categories: dict[str, list[AcceptanceProcess]],
    turns: Sequence[str] | None,
    num_tokens: int,
    rng: random.Random,
) -> AcceptanceProcess:
    """Stretches of any category, or of two in turn."""
    parts: list[tuple[AcceptanceProcess, int, int]] = []
    start = rng.randrange(2)
    while num_tokens > 0:
        category = turns[(start + len(parts)) % 2] if turns else rng.choice(list(categories))
        process = rng.choice(categories[category])
        taken = min(rng.randint(*_STRETCH), num_tokens, process.num_tokens)
        begin = rng.randint(0, process.num_tokens - taken)
        parts.append((process, begin, begin + taken))
        num_tokens -= taken
    return spliced(parts, category=name)


def _mean_rate(group: Sequence[AcceptanceProcess]) -> float:
    rates = [rate[0] for process in group for rate in process.rates]
    return sum(rates) / len(rates)


def halves(
    processes: Sequence[AcceptanceProcess],
) -> tuple[list[AcceptanceProcess], list[AcceptanceProcess]]:
    """Every other one of each category: what a policy was tuned on, and what it was not."""
    counts: dict[str, int] = {}
    found: tuple[list[AcceptanceProcess], list[AcceptanceProcess]] = ([], [])
    for process in processes:
        number = counts.get(process.category, 0)
        counts[process.category] = number + 1
        found[number % 2].append(process)
    return found
