"""What may become of a disturbed stream: what it would have said anyway, or an error that the
policy allows (docs/design.md §6). Which errors those are stands here and nowhere else."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from outrider.errors import DataLoss, NotFound, OutriderError, Unavailable
from outrider.types import Durability

from .link import HERE
from .stack import ORCHESTRATORS, STORE, TARGETS
from .streams import Ended

UNDURABLE = "told without the store, and its owner is gone"
"""`best-effort`: after a chunk with durable=false a takeover is forfeited. DATA_LOSS, or NOT_FOUND
where not even the session was stored."""

NO_SERVICE = "nobody could serve it at its start"
"""A request that nobody answers is tried for about two seconds. UNAVAILABLE, before anything was
told, while no orchestrator could be reached that reaches the store and a target."""

MAX_SHARE = 0.05
"""Of all streams of many schedules that may end by an error."""
MAX_SHARE_OF_ONE = 0.6
"""Of the streams of one schedule: those that start while nothing is there may be that many."""


_NOTICED_S = 0.5
"""Without a token: longer than an undisturbed stream ever waits, on a machine that is not busy."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """On one stream. `allowed` names the policy that its error comes of."""

    ended: Ended
    allowed: str = ""
    problem: str = ""

    @property
    def hit(self) -> bool:
        """It has noticed something of the faults."""
        ended = self.ended
        noticed = ended.resumes or ended.error or ended.undurable
        return bool(noticed) or ended.longest_gap_s > _NOTICED_S


class Outages:
    """When which parts and links were not there, as far as it matters to streams that begin."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._spans: list[tuple[frozenset[str], float, float]] = []

    @contextlib.contextmanager
    def of(self, *what: str) -> Iterator[None]:
        """A part, or the two ends of a link, is away until the context ends."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._spans.append((frozenset(what), began, time.monotonic()))

    def close(self, now: float) -> None:
        self._ended = now

    def no_service(self, start: float, end: float) -> bool:
        """Whether at some time in between no orchestrator could have begun a stream."""
        moments = {start, end, *(t for _, a, b in self._spans for t in (a, b) if start <= t <= end)}
        return any(not self._is_served(moment) for moment in moments)

    def _is_served(self, moment: float) -> bool:
        # Who was away a moment ago has not found everybody again.
        away = {what for what, a, b in self._spans if a <= moment <= b + _REUNION_S}

        def is_away(*what: str) -> bool:
            return frozenset(what) in away

        return not is_away(STORE) and any(
            not is_away(o)
            and not is_away(HERE, o)
            and not is_away(o, STORE)
            and any(not is_away(t) and not is_away(o, t) for t in TARGETS)
            for o in ORCHESTRATORS
        )


_REUNION_S = 3.0
"""Connections are tried again with growing pauses, lost packets sent again likewise."""


def judge(ended: Ended, outages: Outages) -> Verdict:
    """Whether a stream may have ended so."""
    if ended.problem:
        return Verdict(ended, problem=ended.problem)
    if ended.error is None:
        return Verdict(ended)
    allowed = _policy(ended, ended.error, outages)
    if allowed:
        return Verdict(ended, allowed=allowed)
    tokens = sum(len(chunk.token_ids) for chunk in ended.chunks)
    kind = type(ended.error).__name__
    return Verdict(ended, problem=f"{kind} after {tokens} tokens: {ended.error.message}")


def _policy(ended: Ended, error: OutriderError, outages: Outages) -> str:
    if isinstance(error, DataLoss | NotFound):
        is_best_effort = ended.plan.durability is Durability.BEST_EFFORT
        return UNDURABLE if is_best_effort and ended.undurable else ""
    if isinstance(error, Unavailable) and not ended.chunks:
        return NO_SERVICE if outages.no_service(ended.started, ended.ended) else ""
    return ""
