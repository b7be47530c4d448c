"""Which trace something belongs to: W3C trace context, and the places that rounds have in it.

A target goes on with rounds that the orchestrator learns of later, and asks a draft for them. So
that their spans hang together all the same, the span of a round has no random id but one that
every tier can work out: from the context that its entries carry and the round's base length. The
orchestrator's round is `round_id` of the request's context; the verification of the round is its
child, with an id of the context `below`, which is the one that a target asks drafts with.
"""

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?\Z")
_MAX_LENGTH = 64
_SAMPLED = 1
_BELOW = (1 << 64) - 1
"""No base length."""


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span of a trace. `sampled`: its spans are recorded."""

    trace_id: int
    span_id: int
    sampled: bool = False

    @classmethod
    def parse(cls, traceparent: str) -> "TraceContext | None":
        """None for what is no valid `traceparent`, the empty text included."""
        if not traceparent or len(traceparent) > _MAX_LENGTH:
            return None
        match = _TRACEPARENT.match(traceparent)
        if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
            return None
        trace_id, span_id = int(match[2], 16), int(match[3], 16)
        if not trace_id or not span_id:
            return None
        return cls(trace_id, span_id, bool(int(match[4], 16) & _SAMPLED))

    def __str__(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"

    def tells(self, base_len: int, prompt_len: int, every: int) -> bool:
        """Whether the round on a base of this length gets spans: the first two after a prompt of
        `prompt_len`, then one place in `every`; none for 0. Equal on all tiers."""
        if not every:
            return False
        return base_len <= prompt_len + 1 or (base_len - self.trace_id) % every == 0

    def round_id(self, base_len: int) -> int:
        """Id of the span of the round on a base of this length."""
        return self._derived(base_len)

    def below(self) -> "TraceContext":
        """The context of a target's part in the rounds of this one."""
        return replace(self, span_id=self._derived(_BELOW))

    def _derived(self, number: int) -> int:
        parts = ((self.trace_id, 16), (self.span_id, 8), (number, 8))
        data = b"".join(value.to_bytes(size, "little") for value, size in parts)
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") or 1


_current: ContextVar[TraceContext | None] = ContextVar("outrider_trace", default=None)


def current_trace() -> TraceContext | None:
    """What this task or thread works for, as far as it was told."""
    return _current.get()


def enter_trace(context: TraceContext | None) -> None:
    """From here on this task, and those that it starts, work for a span: logs say so."""
    _current.set(context)


@contextmanager
def within_trace(traceparent: str) -> Iterator[None]:
    """Work for the span that an entry names, then for what was before."""
    token = _current.set(TraceContext.parse(traceparent))
    try:
        yield
    finally:
        _current.reset(token)
