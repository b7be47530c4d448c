"""What a simulation takes for true: costs, load, and what a policy is and may see."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from outrider.speculation.costs import Line
from outrider.speculation.fan_out import FanOut
from outrider.speculation.length import Mode
from outrider.speculation.observation import Observation


@dataclass(frozen=True, slots=True)
class World:
    """What is true, and the policies have to find out. Seconds.

    `verify` is a pass over its rows, `draft` a proposal over its steps and the outcomes prepared
    beyond the first. `plain_trip_s` and `guess_trip_s` is what a round spends outside of both: a
    target that goes on by itself saves most of it. Each way to the draft takes `delay_s`. `crowd`
    is what each further session at the draft adds to a proposal, as a share of it; `shared` the
    share by which draft and target slow each other down while both work. The target waits up to
    `gather` of a pass for sessions that are about to come back. A row costs `context_s` more for
    each token before it, and a token of a prompt `prompt_s`. The orchestrator handles one verdict
    after the other, each for `host_s`; what the tiers' own hosts do for a round with guesses adds
    `guess_host_s`. The first proposal of a session waits until the draft has its prompt,
    `opening_s` a token, one session after the other. `noise` is relative.
    """

    verify: Line
    draft: Line
    mode: Mode = Mode.SEQUENTIAL
    plain_trip_s: float = 0.0
    guess_trip_s: float = 0.0
    delay_s: float = 0.0
    crowd: float = 0.0
    shared: float = 0.0
    gather: float = 0.0
    context_s: float = 0.0
    prompt_s: float = 0.0
    host_s: float = 0.0
    guess_host_s: float = 0.0
    opening_s: float = 0.0
    noise: float = 0.05


@dataclass(frozen=True, slots=True)
class Load:
    """Rows of sessions that are not simulated: `low`, and `high` in every other period."""

    low: int = 0
    high: int = 0
    period_s: float = 0.0

    def rows_at(self, seconds: float) -> int:
        if not self.period_s:
            return self.low
        return self.high if int(seconds / self.period_s) % 2 else self.low


class Policy(Protocol):
    """A controller, as far as the simulator needs one."""

    def next_length(self) -> int: ...

    def plain_rounds(self) -> int: ...

    def outcomes(self) -> FanOut: ...

    def observe(self, seen: Observation) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What an oracle may know of a session before a round: chances and costs, not outcomes."""

    rates: Sequence[float]
    other_rows: int
    context_len: int = 0


MakePolicy = Callable[[Callable[[], Surroundings]], Policy]
"""Makes the policy of a session, given a look at its surroundings (an oracle uses it)."""


@dataclass(slots=True)
class Result:
    """What a policy made of it.

    `lost_tokens` are those that the sessions of the load lost to the rows of guesses, `prompt_s`
    what prompts took of the time. `lengths` are the guesses asked for, round by round, all sessions
    together.
    """

    tokens: int = 0
    seconds: float = 0.0
    lost_tokens: float = 0.0
    prompt_s: float = 0.0
    lengths: list[int] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second, those lost by others taken off."""
        return (self.tokens - self.lost_tokens) / self.seconds if self.seconds else 0.0

    @property
    def decoded_per_s(self) -> float:
        """The same without the time that prompts took."""
        seconds = self.seconds - self.prompt_s
        return (self.tokens - self.lost_tokens) / seconds if seconds > 0.0 else 0.0

    @property
    def mean_length(self) -> float:
        return sum(self.lengths) / len(self.lengths) if self.lengths else 0.0

    def __add__(self, later: "Result") -> "Result":
        return Result(
            self.tokens + later.tokens,
            self.seconds + later.seconds,
            self.lost_tokens + later.lost_tokens,
            self.prompt_s + later.prompt_s,
            self.lengths + later.lengths,
        )
