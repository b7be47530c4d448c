"""A collector in the test's own process: keeps what OTLP exporters send to it by gRPC."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class Seen:
    """A span as it came."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start_ns: int
    end_ns: int
    failed: bool
    attributes: dict[str, Any] = field(hash=False)

    @property
    def base_len(self) -> int:
        return self.attributes.get("outrider.base_len", -1)


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """`async with Receiver() as receiver`: exporters send to `endpoint`."""

    def __init__(self) -> None:
        self.spans: list[Seen] = []
        self.metrics: dict[str, set[str]] = {}
        """Names of metrics by service."""
        self.endpoint = ""
        self._server: grpc.aio.Server

    async def __aenter__(self) -> "Receiver":
        self._server = grpc.aio.server()
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        # Both services name their method Export, and a class can have only one.
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(
            _Metrics(self.metrics), self._server
        )
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._server.stop(None)

    async def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            service = attributes_of(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                self.spans += [seen(service, span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def trace(self, trace_id: str) -> list[Seen]:
        return [span for span in self.spans if span.trace_id == trace_id]


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, names: dict[str, set[str]]) -> None:
        self._names = names

    async def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_metrics:
            service = attributes_of(resource.resource.attributes)["service.name"]
            names = self._names.setdefault(service, set())
            names |= {metric.name for scope in resource.scope_metrics for metric in scope.metrics}
        return metrics_service_pb2.ExportMetricsServiceResponse()


def attributes_of(pairs: Iterable[Any]) -> dict[str, Any]:
    found = {}
    for pair in pairs:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        found[pair.key] = [v.string_value for v in value.values] if kind == "array_value" else value
    return found


def seen(service: str, span: Any) -> Seen:
    return Seen(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code == 2,
        attributes_of(span.attributes),
    )
