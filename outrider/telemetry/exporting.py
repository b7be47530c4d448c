"""OpenTelemetry's SDK, set up: the only module that imports it, and itself imported when needed."""

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from prometheus_client import CollectorRegistry, start_http_server

import outrider
from outrider.errors import Unavailable
from outrider.telemetry.metrics import Metrics
from outrider.telemetry.service import AUTO, GRPC, Telemetry, TelemetrySettings, split_address
from outrider.telemetry.spans import SpanIds, Spans

logger = logging.getLogger(__name__)

SCOPE = "outrider"
_CLOSE_S = 5.0


class _Ids(RandomIdGenerator):
    """Random ids, but for spans that have to have a certain one."""

    def __init__(self, wanted: SpanIds) -> None:
        self._wanted = wanted

    def generate_span_id(self) -> int:
        return self._wanted.take() or super().generate_span_id()


Close = Callable[[], Any]


def start(
    settings: TelemetrySettings, signals: frozenset[str], *, tier: str, env: Mapping[str, str]
) -> Telemetry:
    """Start what was asked for; `signals` of traces and metrics go out by OTLP."""
    resource = _resource(tier, env)
    readers: list[MetricReader] = []
    metrics = spans = None
    address, closers = "", list[Close]()
    if settings.metrics_address:
        registry = CollectorRegistry()
        readers.append(PrometheusMetricReader(scope_info_enabled=False, registry=registry))
        address, stop = _listen(settings.metrics_address, registry)
        closers.append(stop)
    if "metrics" in signals:
        readers.append(PeriodicExportingMetricReader(_exporter("metrics", settings, env)))
    if readers:
        meters = MeterProvider(readers, resource=resource, shutdown_on_exit=False)
        metrics = Metrics(meters.get_meter(SCOPE, outrider.__version__))
        closers.append(meters.shutdown)
    if "traces" in signals:
        spans, close = _start_spans(settings, resource, _exporter("traces", settings, env))
        closers.append(close)
        if metrics is not None:
            own, later = {"tier": tier}, spans.later
            metrics.observe("outrider.spans.dropped", lambda: [(later.dropped, own)])
    return Telemetry(metrics, spans, address, lambda: _close(closers[::-1]))


def _start_spans(
    settings: TelemetrySettings, resource: Resource, exporter: Any
) -> tuple[Spans, Close]:
    ids, rate = SpanIds(), settings.sample_rate
    tracers = TracerProvider(
        None
        if rate is None
        else ParentBasedTraceIdRatio(rate),  # None: as OTEL_TRACES_SAMPLER says.
        resource,
        shutdown_on_exit=False,
        id_generator=_Ids(ids),
    )
    tracers.add_span_processor(BatchSpanProcessor(exporter))
    spans = Spans(tracers.get_tracer(SCOPE, outrider.__version__), ids)

    def close() -> None:
        spans.later.close()
        tracers.shutdown()

    return spans, close


def _resource(tier: str, env: Mapping[str, str]) -> Resource:
    """Who speaks; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES have the last word."""
    own = {
        "service.name": f"outrider-{tier}",
        "service.namespace": "outrider",
        "service.version": outrider.__version__,
        "service.instance.id": str(uuid4()),
    }
    pairs = env.get("OTEL_RESOURCE_ATTRIBUTES", "").split(",")
    told = {pair.partition("=")[0].strip() for pair in pairs}
    if env.get("OTEL_SERVICE_NAME"):
        told.add("service.name")
    return Resource.create({key: value for key, value in own.items() if key not in told})


def _exporter(signal: str, settings: TelemetrySettings, env: Mapping[str, str]) -> Any:
    """An OTLP exporter; what settings do not say it takes from OTEL_* variables."""
    protocol = settings.otlp_protocol
    if protocol == AUTO:
        protocol = (
            env.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL")
            or env.get("OTEL_EXPORTER_OTLP_PROTOCOL")
            or GRPC
        )
    endpoint = settings.otlp_endpoint or None
    if protocol == GRPC:
        return _grpc_exporter(signal, endpoint)
    return _http_exporter(signal, endpoint and f"{endpoint.rstrip('/')}/v1/{signal}")


def _grpc_exporter(signal: str, endpoint: str | None) -> Any:
    from opentelemetry.exporter.otlp.proto.grpc import metric_exporter, trace_exporter

    if signal == "traces":
        return trace_exporter.OTLPSpanExporter(endpoint)
    return metric_exporter.OTLPMetricExporter(endpoint)


def _http_exporter(signal: str, endpoint: str | None) -> Any:
    from opentelemetry.exporter.otlp.proto.http import metric_exporter, trace_exporter

    if signal == "traces":
        return trace_exporter.OTLPSpanExporter(endpoint)
    return metric_exporter.OTLPMetricExporter(endpoint)


def _listen(address: str, registry: CollectorRegistry) -> tuple[str, Close]:
    """Serve Prometheus; where it listens, and what ends it."""
    host, port = split_address(address)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise Unavailable(
            f"cannot listen on {address}: {error}", field="metrics_address"
        ) from error

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    shown = f"[{host}]" if ":" in host else host
    return f"{shown}:{server.server_port}", stop


def _close(closers: list[Close]) -> None:
    """End all within a time: a collector that is away must not hold up the end of a service."""

    def end() -> None:
        for close in closers:
            try:
                close()
            except Exception:
                logger.exception("telemetry did not end well")

    thread = threading.Thread(target=end, name="telemetry-close", daemon=True)
    thread.start()
    thread.join(_CLOSE_S)
