"""The client's side of a trace: a span a call, where the application has OpenTelemetry.

The application's own tracer and propagator are used, if it has imported them; nothing is imported
for it, and without them a call is not told of.
"""

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

from outrider.errors import OutriderError
from outrider.telemetry.gen_ai import (
    finish_attributes,
    operation_of,
    request_attributes,
    span_name,
    usage_attributes,
)
from outrider.v1 import generation_pb2
from outrider.wire import reason_from_proto

if TYPE_CHECKING:
    from opentelemetry.trace import Span

SCOPE = "outrider"


class GenerateCall:
    """A Generate call from its start to its end; enter it. It is no current span: that of the
    application stays."""

    def __init__(self, request: generation_pb2.GenerateRequest) -> None:
        self.metadata: tuple[tuple[str, str], ...] = ()
        """What takes the trace to the server."""
        self._span: Span | None = None
        self._begun = False
        trace = sys.modules.get("opentelemetry.trace")
        if trace is None:
            return
        from opentelemetry import propagate

        operation = operation_of(request)
        self._span = trace.get_tracer(SCOPE).start_span(
            span_name(operation, request.model),
            kind=trace.SpanKind.CLIENT,
            attributes=request_attributes(request, operation, request.model),
        )
        carrier: dict[str, str] = {}
        propagate.inject(carrier, trace.set_span_in_context(self._span))
        self.metadata = tuple(carrier.items())

    def __enter__(self) -> Self:
        return self

    def responded(self, response: generation_pb2.GenerateResponse) -> None:
        """A response has come."""
        span = self._span
        if span is None:
            return
        if not self._begun:
            self._begun = True
            span.add_event("first token")
            span.set_attribute("gen_ai.conversation.id", response.session_id)
        if response.HasField("usage"):
            usage = response.usage
            attributes = usage_attributes(
                usage.prompt_tokens, usage.cached_prompt_tokens, usage.completion_tokens
            )
            span.set_attributes(attributes)
            reason = reason_from_proto(response.finish_reason)
            if reason is not None:
                span.set_attributes(finish_attributes(reason.value))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        span = self._span
        if span is None:
            return
        if isinstance(error, OutriderError):
            from opentelemetry.trace import Status, StatusCode

            span.set_attribute("error.type", error.grpc_name)
            span.set_status(Status(StatusCode.ERROR, error.message))
        span.end()
