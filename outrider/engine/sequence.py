"""A sequence: the committed tokens of one completion, and the KV that exists of them.

The committed tokens are the truth, KV is a cache of a prefix. `cached` names the token ids that
the KV really came from, rejected guesses included; before new work it is cut to the longest
prefix that it shares with the tokens the work stands on, which is all that rollback is.
"""

import time
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Any

from outrider.engine.kept import Kept
from outrider.token_log import TokenLog
from outrider.types import GenerationSpec


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one completion; owned by the engine's thread."""

    spec: GenerationSpec | None = None
    log: TokenLog = field(default_factory=TokenLog)
    cached: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    salt: str = ""
    """Prefixes are shared among sequences of one salt only (the tenant)."""
    offered: int = 0
    """Blocks at the start that others may share."""
    kept: Kept | None = None
    """Branches of the last work, one of which the next may go on with."""
    in_store: Any = None
    """What a store of prefixes remembers about it."""
    last_used: float = field(default_factory=time.monotonic)

    def usable_kv(self, tokens: Tokens[int], num_logits: int) -> int:
        """Length of the cached prefix that `tokens` share.

        The last `num_logits` tokens are left out: they are computed, because their logits are
        wanted.
        """
        return min(self._shared(tokens), len(tokens) - num_logits)

    def committed_kv(self) -> int:
        """Committed tokens whose KV exists."""
        return self._shared(self.log.tokens)

    def _shared(self, tokens: Tokens[int]) -> int:
        low, high = 0, min(len(self.cached), len(tokens))
        if self.cached[:high] == tokens[:high]:
            return high
        while high - low > 1:  # They part between these; slices are compared fast.
            middle = (low + high) // 2
            if self.cached[low:middle] == tokens[low:middle]:
                low = middle
            else:
                high = middle
        return low
