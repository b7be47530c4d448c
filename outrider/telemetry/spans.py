"""Spans: requests as they run, and everything below them once it is over.

Nothing is put into OpenTelemetry's current context: a parent is always named.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from outrider.telemetry.context import TraceContext
from outrider.telemetry.later import Later

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

Attribute = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Attribute]


class SpanIds:
    """Gives the next span of a thread the id that was asked for."""

    def __init__(self) -> None:
        self._local = threading.local()

    def take(self) -> int:
        """The id asked for; 0: any."""
        wanted: int = getattr(self._local, "wanted", 0)
        self._local.wanted = 0
        return wanted

    def ask(self, span_id: int) -> None:
        self._local.wanted = span_id


class Spans:
    """Writes the spans of a process; from any thread. Times are on the monotonic clock."""

    def __init__(self, tracer: "Tracer", ids: SpanIds) -> None:
        self.later = Later()
        """For spans of a thread that has better things to do: each takes some 30 µs."""
        self._tracer = tracer
        self._ids = ids

    def start(self, name: str, carrier: Mapping[str, str], attributes: Attributes) -> "Span":
        """The span of a call from outside, which has just arrived with these headers."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract(carrier, _no_context())
        return self._tracer.start_span(
            name, context=parent, kind=SpanKind.SERVER, attributes=attributes
        )

    def write(
        self,
        name: str,
        parent: TraceContext,
        start: float,
        end: float,
        attributes: Attributes,
        *,
        span_id: int = 0,
        served: bool = False,
        error: str = "",
    ) -> TraceContext:
        """A span that is over, below a sampled parent; `served`: the parent is another process's.

        Returns its own context, for those below it. `error` is the type of what went wrong.
        """
        from opentelemetry.trace import SpanKind, Status, StatusCode

        start_ns, end_ns = wall_ns(start, end)
        self._ids.ask(span_id)
        span = self._tracer.start_span(
            name,
            context=_context_of(parent, remote=served),
            kind=SpanKind.SERVER if served else SpanKind.INTERNAL,
            attributes=attributes,
            start_time=start_ns,
        )
        if error:
            span.set_attribute("error.type", error)
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_ns)
        return context_of(span)


def context_of(span: "Span") -> TraceContext:
    """Where a span stands."""
    context = span.get_span_context()
    return TraceContext(context.trace_id, context.span_id, context.trace_flags.sampled)


def wall_ns(start: float, end: float) -> tuple[int, int]:
    """Nanoseconds since 1970 of two times on the monotonic clock, in their order."""
    shift = time.time_ns() - time.monotonic_ns()
    start_ns = int(start * 1e9) + shift
    return start_ns, start_ns + max(int((end - start) * 1e9), 0)


def _no_context() -> "Context":
    from opentelemetry.context import Context

    return Context()


def _context_of(parent: TraceContext, *, remote: bool) -> "Context":
    from opentelemetry.trace import (
        NonRecordingSpan,
        SpanContext,
        TraceFlags,
        set_span_in_context,
    )

    flags = TraceFlags(TraceFlags.SAMPLED if parent.sampled else TraceFlags.DEFAULT)
    context = SpanContext(parent.trace_id, parent.span_id, is_remote=remote, trace_flags=flags)
    return set_span_in_context(NonRecordingSpan(context), _no_context())
