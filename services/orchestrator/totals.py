"""What a generation has cost up to a commit, all its owners together: what its usage is made of.

It goes with each commit, so that whoever takes the generation over goes on counting. Nothing that
is said depends on it: totals that cannot be read count as none.
"""

import functools
import json
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

from outrider.types import SpeculationStats
from services.orchestrator.decoder import RoundTimes

_STATS = attrgetter(*(f.name for f in fields(SpeculationStats)))
_TIMES = attrgetter(*(f.name for f in fields(RoundTimes)))
_NUM_REST = 6


@dataclass(frozen=True, slots=True)
class Totals:
    """Since the generation began. `cached` are prompt tokens whose KV its first target had,
    `target` and `draft` the workers that hold its KV now."""

    stats: SpeculationStats = field(default_factory=SpeculationStats)
    times: RoundTimes = field(default_factory=RoundTimes)
    first_token_us: int = 0
    total_us: int = 0
    cached: int = 0
    sent_undurable: int = 0
    target: str = ""
    draft: str = ""

    def to_json(self) -> str:
        """By hand, since it is made for every commit: `json` takes three times as long."""
        *counts, proposed, accepted = _STATS(self.stats)
        numbers = [
            [*counts, list(proposed), list(accepted)],
            list(_TIMES(self.times)),
            self.first_token_us,
            self.total_us,
            self.cached,
            self.sent_undurable,
        ]
        # Of lists of whole numbers Python's own form is JSON.
        return f"{repr(numbers)[:-1]}, {_quoted(self.target)}, {_quoted(self.draft)}]"

    @classmethod
    def from_json(cls, text: str) -> "Totals":
        try:
            stats, times, *rest = json.loads(text)
            # One more than are known here: a later release counts something else as well.
            return cls(
                _stats(stats), RoundTimes(*times[: len(fields(RoundTimes))]), *rest[:_NUM_REST]
            )
        except (TypeError, ValueError):
            return cls()


@functools.lru_cache(maxsize=256)
def _quoted(text: str) -> str:
    return json.dumps(text)


def _stats(values: list[Any]) -> SpeculationStats:
    known: list[Any] = values[: len(fields(SpeculationStats))]
    known = [tuple(value) if isinstance(value, list) else value for value in known]
    return SpeculationStats(*known)
