"""What switches telemetry on, and that nothing is imported or run while it is off."""

import ast
import http.server
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest

from outrider.errors import InvalidArgument, Unavailable
from outrider.telemetry.service import OFF, TelemetrySettings, start_telemetry
from outrider.telemetry.spans import context_of
from outrider.worker.service import WorkerConfig
from services.orchestrator.config import OrchestratorConfig

ROOT = Path(__file__).parents[2]
COLLECTOR = "http://127.0.0.1:9"
"""Nobody listens there."""

IMPORTS_ALL = """
import sys
from types import SimpleNamespace
sys.modules["opentelemetry"] = sys.modules["prometheus_client"] = None  # Importing them fails.
import outrider.client, services.orchestrator.service
from outrider.telemetry.calls import GenerateCall
from outrider.telemetry.service import OFF, start_telemetry
from outrider.v1 import generation_pb2
from services.orchestrator.config import OrchestratorConfig
from services.orchestrator.observed import Watch

assert start_telemetry(OrchestratorConfig().telemetry, tier="orchestrator", env={}) is OFF
request = generation_pb2.GenerateRequest()
with GenerateCall(request) as call:
    call.responded(generation_pb2.GenerateResponse())
context = SimpleNamespace(invocation_metadata=lambda: (), time_remaining=lambda: None)
with Watch(OFF).request(request, context) as watch:
    watch.first_token()
    watch.rounds(())
print("fine")
"""


def start(env=None, tier="target", **settings):
    return start_telemetry(TelemetrySettings(**settings), tier=tier, env=env or {})


def test_off_needs_no_opentelemetry():
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS_ALL], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "fine\n", done.stderr


def test_one_module_imports_opentelemetry_and_it_is_imported_when_needed():
    """For workers too, whose imports take too long to try."""
    users = {"opentelemetry", "prometheus_client"}
    for path in [*ROOT.glob("outrider/**/*.py"), *ROOT.glob("services/**/*.py")]:
        tree = ast.parse(path.read_text())
        for node in tree.body:  # Those of functions and of `if TYPE_CHECKING` are below.
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            roots = {name.partition(".")[0] for name in names}
            if path.name == "exporting.py" and path.parent.name == "telemetry":
                continue
            assert not roots & users, path
            assert "outrider.telemetry.exporting" not in names, path


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"OTEL_SERVICE_NAME": "x", "OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": COLLECTOR, "OTEL_SDK_DISABLED": "TRUE "},
        {
            "OTEL_EXPORTER_OTLP_ENDPOINT": COLLECTOR,
            "OTEL_TRACES_EXPORTER": "none",
            "OTEL_METRICS_EXPORTER": "none",
        },
    ],
)
def test_it_stays_off(env):
    assert start(env) is OFF


@pytest.mark.parametrize(
    ("settings", "env", "metrics", "spans"),
    [
        ({"metrics_address": "127.0.0.1:0"}, {}, True, False),
        ({"otlp_endpoint": COLLECTOR}, {}, True, True),
        ({}, {"OTEL_EXPORTER_OTLP_ENDPOINT": COLLECTOR}, True, True),
        ({}, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": COLLECTOR}, False, True),
        ({}, {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": COLLECTOR}, True, False),
        ({"otlp_endpoint": COLLECTOR}, {"OTEL_METRICS_EXPORTER": "none"}, False, True),
    ],
)
def test_each_part_is_switched_on_by_itself(monkeypatch, settings, env, metrics, spans):
    monkeypatch.setattr("outrider.telemetry.exporting._CLOSE_S", 0.1)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with closing(start(env, **settings)) as telemetry:
        assert (telemetry.metrics is not None, telemetry.spans is not None) == (metrics, spans)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"metrics_address": "9464"}, "metrics_address"),
        ({"metrics_address": ":9464"}, "metrics_address"),
        ({"metrics_address": "localhost:http"}, "metrics_address"),
        ({"metrics_address": "localhost:65536"}, "metrics_address"),
        ({"otlp_endpoint": "collector:4317"}, "otlp_endpoint"),
        ({"sample_rate": 1.5}, "trace_sample_rate"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(settings, field):
    with pytest.raises(InvalidArgument) as caught:
        start(**settings)
    assert caught.value.field == field


def test_a_port_that_is_taken_is_an_error():
    with closing(start(metrics_address="127.0.0.1:0")) as first:
        with pytest.raises(Unavailable) as caught:
            start(metrics_address=first.metrics_address)
    assert caught.value.field == "metrics_address"


def test_without_the_package_settings_are_refused_and_variables_are_not(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "outrider.telemetry.exporting", None)
    monkeypatch.delattr("outrider.telemetry.exporting", raising=False)
    for settings in ({"metrics_address": "127.0.0.1:0"}, {"otlp_endpoint": COLLECTOR}):
        with pytest.raises(InvalidArgument, match="extra `telemetry`") as caught:
            start(**settings)
        assert caught.value.field in settings
    # A cluster may set these for all its processes.
    assert start({"OTEL_EXPORTER_OTLP_ENDPOINT": COLLECTOR}) is OFF
    assert "extra `telemetry`" in caplog.text


def test_settings_reach_telemetry():
    worker = WorkerConfig(metrics_address="h:1", otlp_endpoint="http://x", otlp_protocol="http")
    assert worker.telemetry == TelemetrySettings("h:1", "http://x", "http")
    assert OrchestratorConfig(trace_sample_rate=0.25).telemetry.sample_rate == 0.25
    with pytest.raises(InvalidArgument, match="trace_every"):
        OrchestratorConfig(trace_every=-1)


def test_the_endpoint_serves_metrics_until_it_is_closed():
    telemetry = start(metrics_address="127.0.0.1:0", tier="draft")
    telemetry.metrics.observe("outrider.streams", lambda: [(3, {})])
    url = f"http://{telemetry.metrics_address}/metrics"
    with urllib.request.urlopen(url, timeout=5) as answer:
        text = answer.read().decode()
    assert "outrider_streams 3.0" in text and 'service_name="outrider-draft"' in text
    telemetry.close()
    with pytest.raises(OSError):
        urllib.request.urlopen(url, timeout=5)


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ({}, "outrider-target"),
        ({"OTEL_SERVICE_NAME": "mine"}, "mine"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "a=b,service.name=yours"}, "yours"),
    ],
)
def test_the_environment_has_the_last_word_on_the_name(monkeypatch, env, name):
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    with closing(start(env, metrics_address="127.0.0.1:0")) as telemetry:
        telemetry.metrics.observe("outrider.streams", lambda: [(3, {})])
        url = f"http://{telemetry.metrics_address}/metrics"
        with urllib.request.urlopen(url, timeout=5) as answer:
            assert f'service_name="{name}"' in answer.read().decode()


class Collector(http.server.BaseHTTPRequestHandler):
    paths: list

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.paths.append(self.path)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.mark.parametrize("by_setting", [True, False])
def test_otlp_goes_over_http_too(monkeypatch, by_setting):
    Collector.paths = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    settings, env = {"otlp_endpoint": endpoint, "otlp_protocol": "http"}, {}
    if not by_setting:
        settings, env = (
            {},
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            },
        )
        for key, value in env.items():
            monkeypatch.setenv(key, value)
    telemetry = start(env, **settings)
    telemetry.metrics.observe("outrider.streams", lambda: [(3, {})])
    telemetry.spans.start("a call", {}, {}).end()
    telemetry.close()  # Sends what is there.
    server.shutdown()
    server.server_close()
    assert sorted(Collector.paths) == ["/v1/metrics", "/v1/traces"]


def test_closing_does_not_wait_for_a_collector_that_is_away(monkeypatch):
    monkeypatch.setattr("outrider.telemetry.exporting._CLOSE_S", 0.3)
    telemetry = start(otlp_endpoint="http://127.0.0.1:9", otlp_protocol="grpc")
    telemetry.spans.start("a call", {}, {}).end()
    started = time.monotonic()
    telemetry.close()
    assert time.monotonic() - started < 2


PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-0"


@pytest.mark.parametrize(
    ("rate", "parent", "expected"),
    [
        (0.0, "", False),
        (1.0, "", True),
        (None, "", True),
        (0.0, PARENT + "1", True),
        (1.0, PARENT + "0", False),
    ],
)
def test_whose_trace_it_is_decides_before_the_rate_does(monkeypatch, rate, parent, expected):
    monkeypatch.setattr("outrider.telemetry.exporting._CLOSE_S", 0.1)
    with closing(start(otlp_endpoint=COLLECTOR, sample_rate=rate)) as telemetry:
        span = telemetry.spans.start("a call", {"traceparent": parent} if parent else {}, {})
        assert context_of(span).sampled is expected
        if parent:
            assert f"{context_of(span).trace_id:032x}" == parent[3:35]
