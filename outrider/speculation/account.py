"""What a session may lose to trying, and when it may try.

Losses are counted in rounds of plain decoding. Each plain round earns a fiftieth of one, so
that what trying costs stays below 2% of plain decoding plus a constant, whatever the models of
acceptance and cost believe.
"""

import math
from dataclasses import dataclass

EARNED = 0.02
"""What a plain round earns for trying."""

_MOST = 3.0
"""More is not saved: what was gained before pays for no long loss now."""

_OVERDRAWN = -2.0

_FIRST_INTERVAL = 8
_LONGEST_INTERVAL = 32


@dataclass(slots=True)
class Account:
    """Tokens won or lost against plain decoding, in plain rounds, at most `_MOST`."""

    balance: float = 1.5

    def plain_rounds(self, count: int) -> None:
        self.add(count * EARNED)

    def add(self, gain: float) -> None:
        self.balance = min(self.balance + gain, _MOST)

    @property
    def overdrawn(self) -> bool:
        return self.balance < _OVERDRAWN

    def rounds_until(self, cost: float) -> int:
        """Plain rounds until `cost` can be paid."""
        return max(math.ceil((cost - self.balance) / EARNED), 0)


@dataclass(slots=True)
class Probes:
    """When plain decoding tries a guess: rarer after each failure, at once after a success."""

    interval: int = _FIRST_INTERVAL
    due_in: int = _FIRST_INTERVAL

    def rounds_passed(self, count: int) -> None:
        self.due_in = max(self.due_in - count, 0)

    def ended(self, *, paid: bool) -> None:
        """A probe brought more than it cost, or did not."""
        if paid:
            self.reset()
            self.due_in = 0
        else:
            self.due_in = self.interval
            self.interval = min(2 * self.interval, _LONGEST_INTERVAL)

    def reset(self) -> None:
        """What is known is out of date."""
        self.interval = _FIRST_INTERVAL
        self.due_in = min(self.due_in, _FIRST_INTERVAL)
