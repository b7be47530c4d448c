"""The telemetry of a service: metrics and spans where they are switched on, nothing otherwise.

OpenTelemetry is imported only then, so that a machine without it can run everything else.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from outrider.errors import InvalidArgument
from outrider.telemetry.metrics import Metrics
from outrider.telemetry.spans import Spans

logger = logging.getLogger(__name__)

AUTO, GRPC, HTTP = "auto", "grpc", "http"
PROTOCOLS = (AUTO, GRPC, HTTP)
_HELP = "needs OpenTelemetry: install Outrider's extra `telemetry`"


@dataclass(frozen=True, slots=True)
class TelemetrySettings:
    """What a service was told; each part is off where it was told nothing.

    `metrics_address` is host:port of a Prometheus endpoint (port 0 picks a free one).
    `otlp_endpoint` is the URL of a collector, which OTEL_EXPORTER_OTLP_ENDPOINT gives too.
    `sample_rate` is the share of requests without a trace of their own that are traced; None: as
    OTEL_TRACES_SAMPLER says, else all.
    """

    metrics_address: str = ""
    otlp_endpoint: str = ""
    otlp_protocol: str = AUTO
    sample_rate: float | None = None


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What a service can tell by: None where it is off. `metrics_address` is where the Prometheus
    endpoint listens."""

    metrics: Metrics | None = None
    spans: Spans | None = None
    metrics_address: str = ""
    shut_down: Callable[[], None] = lambda: None

    def close(self) -> None:
        """Send what has not been sent, for some seconds at most."""
        self.shut_down()


OFF = Telemetry()


def start_telemetry(settings: TelemetrySettings, *, tier: str, env: Mapping[str, str]) -> Telemetry:
    """The telemetry that settings and OTEL_* variables switch on (OTEL_SDK_DISABLED: none).

    Raises InvalidArgument (a setting is malformed, or OpenTelemetry is not installed),
    Unavailable (the endpoint's port is taken).
    """
    _check(settings)
    signals = _signals(settings, env)
    disabled = env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if disabled or not (settings.metrics_address or signals):
        return OFF
    try:
        from outrider.telemetry import exporting
    except ImportError as error:
        if settings.metrics_address or settings.otlp_endpoint:
            field = "metrics_address" if settings.metrics_address else "otlp_endpoint"
            raise InvalidArgument(_HELP, field=field) from error
        # A cluster may give every process these variables.
        logger.warning("no telemetry: OTEL_EXPORTER_OTLP_ENDPOINT %s", _HELP)
        return OFF
    return exporting.start(settings, signals, tier=tier, env=env)


def _signals(settings: TelemetrySettings, env: Mapping[str, str]) -> frozenset[str]:
    """Which of traces and metrics go out by OTLP."""
    found = set()
    for signal in ("traces", "metrics"):
        name = signal.upper()
        endpoint = (
            settings.otlp_endpoint
            or env.get("OTEL_EXPORTER_OTLP_ENDPOINT")
            or env.get(f"OTEL_EXPORTER_OTLP_{name}_ENDPOINT")
        )
        if endpoint and env.get(f"OTEL_{name}_EXPORTER", "otlp") == "otlp":
            found.add(signal)
    return frozenset(found)


def _check(settings: TelemetrySettings) -> None:
    endpoint, rate = settings.otlp_endpoint, settings.sample_rate
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise InvalidArgument(
            f"{endpoint!r} is not a URL; write for example http://collector:4317",
            field="otlp_endpoint",
        )
    if rate is not None and not 0.0 <= rate <= 1.0:
        raise InvalidArgument(f"{rate} is not in [0, 1]", field="trace_sample_rate")
    if settings.metrics_address:
        split_address(settings.metrics_address)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of a `metrics_address`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise InvalidArgument(
            f"{address!r} is not host:port; write for example 0.0.0.0:9464",
            field="metrics_address",
        )
    return host.removeprefix("[").removesuffix("]"), int(port)
