"""How many guesses the next round carries.

The decoder asks before each round and reports after it. `FixedLength` is the policy of a pinned
k; the adaptive one takes its place behind the same two methods.
"""

from dataclasses import dataclass
from typing import Protocol

ALWAYS = 1 << 31
"""As many rounds as there are."""


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """What a round brought, in tokens and seconds."""

    num_proposed: int
    num_accepted: int
    draft_s: float
    verify_s: float


class Controller(Protocol):
    """Chooses the length of proposals for one generation."""

    def next_length(self) -> int:
        """Guesses for the next round; 0 decodes plainly."""

    def plain_rounds(self) -> int:
        """Rounds from now on, at most, that are certain to carry no guesses."""

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn from a round."""


@dataclass(frozen=True, slots=True)
class FixedLength:
    """Always the same number of guesses."""

    num_speculative_tokens: int

    def next_length(self) -> int:
        return self.num_speculative_tokens

    def plain_rounds(self) -> int:
        return 0 if self.num_speculative_tokens else ALWAYS

    def observe(self, outcome: RoundOutcome) -> None:
        pass
