"""A sequence: the committed tokens of one completion, and the KV that exists of them.

The committed tokens are the truth, KV is a cache of a prefix. `cached` names the token ids that
the KV really came from, rejected guesses included; before new work it is cut to the longest
prefix that it shares with the tokens the work stands on, which is all that rollback is.

A round changes the last few of many tokens, so what is known to be equal is not compared again:
the log, the tokens of the work and the ids of the KV each say from where they have changed, and
only what stands behind that is looked at. A round costs the same behind any context.
"""

import array
import time
from collections.abc import MutableSequence
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Any

from outrider.engine.block_manager import Chain
from outrider.engine.kept import Kept
from outrider.token_log import TokenLog
from outrider.types import GenerationSpec


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one completion; owned by the engine's thread."""

    spec: GenerationSpec | None = None
    log: TokenLog = field(default_factory=TokenLog)
    blocks: MutableSequence[int] = field(default_factory=lambda: array.array("i"))
    """Its table of KV blocks, as passes read it: a copy is one of memory."""
    salt: str = ""
    """Prefixes are shared among sequences of one salt only (the tenant)."""
    offered: int = 0
    """Blocks at the start that others may share."""
    chain: Chain = field(default_factory=Chain)
    """What is known of the first of them."""
    kept: Kept | None = None
    """Branches of the last work, one of which the next may go on with."""
    in_store: Any = None
    """What a store of prefixes remembers about it."""
    last_used: float = field(default_factory=time.monotonic)
    _cached: list[int] = field(default_factory=list, init=False)
    _line: list[int] = field(default_factory=list, init=False)
    """The tokens of its last work: those of the log, and guesses."""
    _in_line: int = field(default=0, init=False)
    """Of `cached` so many are known to be those of the line."""
    _in_log: int = field(default=0, init=False)
    """Of the line so many were those of the log when it was last looked at."""

    @property
    def cached(self) -> Tokens[int]:
        """The token ids that the KV came from, by place."""
        return self._cached

    def wrote(self, start: int, token_ids: Tokens[int]) -> None:
        """KV of these tokens is at the places from `start` on, and none behind them."""
        self.forget(start)
        self._cached.extend(token_ids)

    def forget(self, start: int) -> None:
        """There is no KV from place `start` on."""
        del self._cached[start:]
        self._in_line = min(self._in_line, start)

    def line(self, guesses: Tokens[int] = ()) -> list[int]:
        """The committed tokens and then the guesses: what a work stands on.

        It is the sequence's own list, and that of its work until it makes the next one.
        """
        same = self._follow_log()
        del self._line[same:]
        self._in_line = min(self._in_line, same)
        self._line += self.log.tokens[same:]
        self._in_log = len(self._line)
        self._line += guesses
        return self._line

    def let_go(self) -> None:
        """There is no KV any more. A work that still waits keeps its tokens."""
        self.forget(0)
        self.chain.cut(0)
        self.offered = self._in_log = 0
        self._line = []

    def usable_kv(self, tokens: Tokens[int], num_logits: int) -> int:
        """Length of the cached prefix that `tokens` share.

        The last `num_logits` tokens are left out: they are computed, because their logits are
        wanted.
        """
        own = tokens is self._line
        shared = self._follow_line() if own else common_prefix(self._cached, tokens)
        return min(shared, len(tokens) - num_logits)

    def committed_kv(self) -> int:
        """Committed tokens whose KV exists."""
        in_line, in_log = self._follow_line(), self._follow_log()
        if in_line != in_log:
            return min(in_line, in_log)  # There the line parts from one of them alone.
        return common_prefix(self._cached, self.log.tokens, in_line)

    def _follow_line(self) -> int:
        """What the line and the ids of the KV have in common."""
        self._in_line = common_prefix(self._cached, self._line, self._in_line)
        return self._in_line

    def _follow_log(self) -> int:
        """What the line and the log have in common."""
        known = min(self._in_log, self.log.stood())
        self._in_log = common_prefix(self._line, self.log.tokens, known)
        return self._in_log


def common_prefix(one: Tokens[int], other: Tokens[int], known: int = 0) -> int:
    """Length of the longest common prefix, of which the first `known` are known to be."""
    low, high = known, min(len(one), len(other))
    if low < high and one[low] != other[low]:
        return low
    if one[low:high] == other[low:high]:
        return high
    while high - low > 1:  # They part between these; slices are compared fast.
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
