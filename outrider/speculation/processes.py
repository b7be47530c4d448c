"""Acceptance as a process: the chance of each guess, by where in the text it is made.

Estimated from recorded rounds, or made up; drawn from again with a seed, so that any policy can
be tried on it.
"""

import bisect
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.speculation.traces import Trace, TracedSession

_MEMORY = 0.93
"""How much of what a round tells about the text holds for the round beside it."""

_WEIGHT = 2.0
"""Looked-at guesses that the rate of the whole category stands for."""


@dataclass(frozen=True, slots=True)
class AcceptanceProcess:
    """a_1 … a_n, each given that all before it were accepted, from `starts[i]` tokens on.

    `num_tokens` follow a prompt of `prompt_len`.
    """

    category: str
    starts: tuple[int, ...]
    rates: tuple[tuple[float, ...], ...]
    num_tokens: int
    prompt_len: int = 0

    def rates_at(self, token: int) -> tuple[float, ...]:
        """The chances of guesses that follow so many tokens of the generation."""
        return self.rates[bisect.bisect_right(self.starts, token) - 1]

    def draw(self, token: int, k: int, rng: random.Random) -> int:
        """How many of k guesses are accepted."""
        rates = self.rates_at(token)
        for accepted in range(k):
            if rng.random() >= rates[min(accepted, len(rates) - 1)]:
                return accepted
        return k


def constant(rate: float, num_tokens: int, *, category: str = "") -> AcceptanceProcess:
    """The same chance everywhere."""
    return mixture([(rate, num_tokens)], category=category)


def mixture(parts: Sequence[tuple[float, int]], *, category: str = "mixture") -> AcceptanceProcess:
    """Stretches of (chance, tokens) one after the other."""
    starts, total = [], 0
    for _, length in parts:
        starts.append(total)
        total += length
    return AcceptanceProcess(category, tuple(starts), tuple((rate,) for rate, _ in parts), total)


def spliced(
    parts: Sequence[tuple[AcceptanceProcess, int, int]], *, category: str
) -> AcceptanceProcess:
    """Stretches of processes, each from one token to another, behind the first one's prompt."""
    starts: list[int] = []
    rates: list[tuple[float, ...]] = []
    total = 0
    for process, begin, end in parts:
        first = bisect.bisect_right(process.starts, begin) - 1
        last = bisect.bisect_left(process.starts, end)
        starts += [total + max(start - begin, 0) for start in process.starts[first:last]]
        rates += process.rates[first:last]
        total += end - begin
    prompt_len = parts[0][0].prompt_len
    return AcceptanceProcess(category, tuple(starts), tuple(rates), total, prompt_len)


def estimate(trace: Trace, *, k_max: int) -> list[AcceptanceProcess]:
    """A process a session: counts of neighbouring rounds, towards the rates of its category."""
    categories: dict[str, list[TracedSession]] = {}
    for session in trace.sessions:
        categories.setdefault(session.category, []).append(session)
    base = {
        name: _category_rates(group, k_max)
        for name, group in categories.items()
        if any(session.rounds for session in group)
    }
    return [
        _session_process(session, base[session.category], k_max)
        for session in trace.sessions
        if session.rounds
    ]


def _counts(session: TracedSession, k_max: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Accepted and looked-at guesses: two arrays of [num_rounds, k_max]."""
    proposed = np.array([r.proposed for r in session.rounds])[:, None]
    accepted = np.array([r.accepted for r in session.rounds])[:, None]
    position = np.arange(k_max)
    seen = (position < proposed) & (position <= accepted)
    return (seen & (position < accepted)).astype(float), seen.astype(float)


def _category_rates(sessions: Sequence[TracedSession], k_max: int) -> NDArray[np.float64]:
    """a_1 … a_{k_max} of all rounds; each position starts from the one before it."""
    pairs = [_counts(session, k_max) for session in sessions if session.rounds]
    accepted = np.sum([counts.sum(axis=0) for counts, _ in pairs], axis=0, keepdims=True)
    seen = np.sum([counts.sum(axis=0) for _, counts in pairs], axis=0, keepdims=True)
    rates: NDArray[np.float64] = _chained(accepted, seen, np.full((1, k_max), np.nan))[0]
    return rates


def _session_process(
    session: TracedSession, base: NDArray[np.float64], k_max: int
) -> AcceptanceProcess:
    accepted, seen = _counts(session, k_max)
    rates = _chained(_smoothed(accepted), _smoothed(seen), np.broadcast_to(base, accepted.shape))
    emitted = np.array([r.accepted + 1 for r in session.rounds])
    starts = np.concatenate([[0], np.cumsum(emitted)[:-1]])
    return AcceptanceProcess(
        session.category,
        tuple(int(start) for start in starts),
        tuple(tuple(float(rate) for rate in row) for row in rates),
        int(emitted.sum()),
        max(session.rounds[0].context_len - int(emitted[0]), 0),
    )


def _smoothed(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each round's counts with those of the rounds around it, fading both ways."""
    ahead, back = counts.copy(), counts.copy()
    for i in range(1, len(counts)):
        ahead[i] += _MEMORY * ahead[i - 1]
        back[-1 - i] += _MEMORY * back[-i]
    return ahead + back - counts


def _chained(
    accepted: NDArray[np.float64], seen: NDArray[np.float64], base: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Rates of [num_rounds, k_max]; where `base` is NaN a position starts from the one before."""
    rates = np.empty_like(accepted)
    last = np.full(len(accepted), 0.5)
    for i in range(accepted.shape[1]):
        prior = np.where(np.isnan(base[:, i]), last, base[:, i])
        last = (accepted[:, i] + _WEIGHT * prior) / (seen[:, i] + _WEIGHT)
        rates[:, i] = last
    return np.clip(rates, 0.005, 0.995)
