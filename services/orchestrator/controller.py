"""How many guesses the next round carries.

The decoder asks before each round and reports after it. `FixedLength` is the policy of a pinned
k; the adaptive one is `outrider.speculation.AdaptiveController`.
"""

from dataclasses import dataclass
from typing import Protocol

from outrider.speculation.controller import ALWAYS as ALWAYS
from outrider.speculation.length import Decision
from outrider.speculation.load import TargetLoad
from outrider.speculation.observation import Observation


class Controller(Protocol):
    """Chooses the length of proposals for one generation."""

    @property
    def proposer(self) -> str:
        """Who is to guess in the next round; "": nobody can."""

    @property
    def fan_out(self) -> int:
        """Outcomes of the next round that the draft prepares for; 0: none."""

    @property
    def decision(self) -> Decision | None:
        """The numbers behind what it wants; None where that is given."""

    def next_length(self) -> int:
        """Guesses for the next round; 0 decodes plainly."""

    def plain_rounds(self) -> int:
        """Rounds from now on, at most, that are certain to carry no guesses."""

    def observe(self, seen: Observation) -> None:
        """Learn from a round."""

    def moves_to(self, load: TargetLoad) -> None:
        """The generation goes on at this target."""

    def close(self) -> None:
        """The generation has ended."""


@dataclass(frozen=True, slots=True)
class FixedLength:
    """Always the same number of guesses."""

    num_speculative_tokens: int
    proposer: str = ""
    fan_out: int = 0
    decision: Decision | None = None

    def next_length(self) -> int:
        return self.num_speculative_tokens

    def plain_rounds(self) -> int:
        return 0 if self.num_speculative_tokens else ALWAYS

    def observe(self, seen: Observation) -> None:
        pass

    def moves_to(self, load: TargetLoad) -> None:
        pass

    def close(self) -> None:
        pass
