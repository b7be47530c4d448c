"""Requests as an on-call engineer sees them: counted, timed, traced, and named in logs.

A `RequestWatch` is entered when a call comes and left when it has ended, however it ends. Where
metrics or traces are off it does nothing for them.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

import grpc.aio

from outrider.errors import Cancelled, DeadlineExceeded, OutriderError
from outrider.telemetry.catalog import NO_MODEL
from outrider.telemetry.context import TraceContext, enter_trace
from outrider.telemetry.gen_ai import PROVIDER, operation_of, request_attributes, span_name
from outrider.telemetry.service import OFF, Telemetry
from outrider.types import MAX_SPECULATIVE_TOKENS, FinishReason
from outrider.v1 import generation_pb2
from services.orchestrator.decoder import RoundRecord
from services.orchestrator.metrics import (
    Key,
    Progress,
    RequestMetrics,
    Sums,
    watch_generations,
)
from services.orchestrator.requests import GenerationPlan
from services.orchestrator.store_commit import OnCommit
from services.orchestrator.traces import RequestTrace

Context = grpc.aio.ServicerContext


class Watched(Protocol):
    """A generation, as far as it is told of."""

    @property
    def progress(self) -> Progress: ...

    @property
    def finish_reason(self) -> FinishReason | None: ...


class Watch:
    """What the orchestrator tells of its requests. `model_names` gives the models served now."""

    def __init__(
        self,
        telemetry: Telemetry = OFF,
        *,
        trace_every: int = 0,
        model_names: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self.spans = telemetry.spans
        self.trace_every = trace_every
        self.sums: Sums | None = None
        self.requests: RequestMetrics | None = None
        self._model_names = model_names
        if telemetry.metrics is not None:
            self.sums = Sums()
            self.requests = RequestMetrics(telemetry.metrics)
            watch_generations(telemetry.metrics, self.sums)

    def request(
        self, request: generation_pb2.GenerateRequest, context: "Context[Any, Any]"
    ) -> "RequestWatch":
        """A call has come."""
        return RequestWatch(self, request, context)

    def served_name(self, asked: str) -> str:
        """The served model that a request means; a name that is not served never gets out."""
        names = self._model_names()
        if not asked and len(names) == 1:
            return next(iter(names))
        return asked if asked in names else NO_MODEL


class RequestWatch:
    """One request; its task owns it."""

    def __init__(
        self,
        watch: Watch,
        request: generation_pb2.GenerateRequest,
        context: "Context[Any, Any]",
    ) -> None:
        self.key = Key("", "")
        self._chosen = [0] * (MAX_SPECULATIVE_TOKENS + 1)
        self._watch = watch
        self._request = request
        self._context = context
        self._arrived = time.monotonic()
        self._first_token_at = 0.0
        self._generation: Watched | None = None
        self._error: OutriderError | None = None
        self._trace: RequestTrace | None = None
        self._incoming: TraceContext | None = None
        self._operation, self._model = "", NO_MODEL

    def __enter__(self) -> Self:
        watch, request = self._watch, self._request
        headers = {
            key: value
            for key, value in self._context.invocation_metadata() or ()
            if key in ("traceparent", "tracestate") and isinstance(value, str)
        }
        self._incoming = TraceContext.parse(headers.get("traceparent", ""))
        if watch.spans is not None or watch.requests is not None:
            self._operation = operation_of(request)
            self._model = watch.served_name(request.model)
        if watch.spans is not None:
            attributes = request_attributes(request, self._operation, self._model)
            name = span_name(self._operation, self._model)
            span = watch.spans.start(name, headers, attributes)
            self._trace = RequestTrace(watch.spans, span, watch.trace_every)
        enter_trace(self.trace)
        return self

    @property
    def trace(self) -> TraceContext | None:
        """What everything below this request belongs to."""
        return self._trace.context if self._trace is not None else self._incoming

    @property
    def traceparent(self) -> str:
        return str(self.trace) if self.trace is not None else ""

    @property
    def trace_every(self) -> int:
        """Which rounds workers trace; none of requests that are not traced here."""
        return self._watch.trace_every if self._told_rounds is not None else 0

    @property
    def on_commit(self) -> OnCommit | None:
        return self._told_rounds.committed if self._told_rounds is not None else None

    @property
    def progress(self) -> Progress:
        """What its generation has counted so far, and what was chosen for it."""
        counted = self._generation.progress if self._generation is not None else Progress()
        return counted._replace(chosen=tuple(self._chosen))

    def begins(self, generation: Watched, plan: GenerationPlan, model: str) -> None:
        """The request is a generation of a served model now."""
        self._generation, self._model = generation, model
        self.key = Key(model, plan.proposer)
        if self._watch.sums is not None:
            self._watch.sums.begin(self)
        if self._trace is not None:
            attributes = {
                "gen_ai.conversation.id": plan.session_id,
                "gen_ai.response.model": self._model,
                "outrider.request_id": plan.request_id,
                "outrider.mode": plan.mode.value,
                "outrider.proposer": plan.proposer,
            }
            self._trace.begins(attributes, plan.prompt_len)

    def first_token(self) -> None:
        """The first response is about to be sent."""
        self._first_token_at = time.monotonic()
        if self._watch.requests is not None:
            seconds = self._first_token_at - self._arrived
            self._watch.requests.first_token(seconds, self._labels())
        if self._trace is not None:
            self._trace.first_token()

    def rounds(self, records: Sequence[RoundRecord]) -> None:
        """Rounds have ended."""
        for record in records:
            self._chosen[record.next_length] += 1
        if self._told_rounds is not None:
            self._told_rounds.rounds(records)

    def failed(self, error: OutriderError) -> None:
        """Why the call is about to end."""
        self._error = error

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        enter_trace(None)
        status = self._status(error)
        generation = self._generation
        reason = generation.finish_reason if generation is not None else None
        self._count(status, reason)
        if self._trace is not None:
            progress = self.progress
            tokens = progress.input_tokens, progress.cached_tokens, progress.output_tokens
            self._trace.ended(
                status=status, stats=progress.stats, tokens=tokens, finish_reason=reason
            )

    @property
    def _told_rounds(self) -> RequestTrace | None:
        """The trace, if it is sampled."""
        return self._trace if self._trace is not None and self._trace.context.sampled else None

    def _labels(self) -> dict[str, str]:
        return {
            "gen_ai.operation.name": self._operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": self._model,
        }

    def _count(self, status: str, reason: FinishReason | None) -> None:
        watch, now = self._watch, time.monotonic()
        if watch.sums is not None:
            watch.sums.end(self)
        if watch.requests is None:
            return
        labels = self._labels()
        name = reason.value if reason is not None else ""
        watch.requests.ended(now - self._arrived, labels, status=status, finish_reason=name)
        later = self.progress.output_tokens - 1
        if reason is not None and later > 0:
            watch.requests.per_token((now - self._first_token_at) / later, labels)

    def _status(self, error: BaseException | None) -> str:
        """The gRPC status that the call ends with."""
        if self._error is not None:
            return self._error.grpc_name
        if error is None:
            return "OK"
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            left = self._context.time_remaining()
            late = left is not None and left <= 0
            return DeadlineExceeded.grpc_name if late else Cancelled.grpc_name
        return "UNKNOWN"
