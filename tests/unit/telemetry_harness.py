"""Telemetry that stays in the test: what was counted, and what spans there were."""

from dataclasses import dataclass, field

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased

from outrider.telemetry.catalog import BY_NAME, LABELS
from outrider.telemetry.exporting import _Ids
from outrider.telemetry.metrics import Metrics
from outrider.telemetry.service import Telemetry
from outrider.telemetry.spans import SpanIds, Spans


@dataclass
class Kept:
    """A Telemetry, and what went into it."""

    reader: InMemoryMetricReader = field(default_factory=InMemoryMetricReader)
    exporter: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)
    root: object = ALWAYS_ON

    def __post_init__(self):
        meters = MeterProvider([self.reader], shutdown_on_exit=False)
        ids = SpanIds()
        tracers = TracerProvider(
            ParentBased(self.root), shutdown_on_exit=False, id_generator=_Ids(ids)
        )
        tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.telemetry = Telemetry(
            Metrics(meters.get_meter("test")), Spans(tracers.get_tracer("test"), ids)
        )

    def points(self, name):
        """Value (of a histogram its count) by labels, which must be those of the catalog."""
        data = self.reader.get_metrics_data()
        found = {}
        for resource in data.resource_metrics if data else ():
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    if metric.name != name:
                        continue
                    for point in metric.data.data_points:
                        check_labels(name, point.attributes)
                        key = frozenset(point.attributes.items())
                        found[key] = point.count if hasattr(point, "count") else point.value
        return found

    def value(self, name, **labels):
        """The sum over all points with these labels."""
        wanted = set(labels.items())
        return sum(value for key, value in self.points(name).items() if wanted <= key)

    @property
    def spans(self) -> list[ReadableSpan]:
        """Those that have ended, in this order."""
        self.telemetry.spans.later.finish()
        return list(self.exporter.get_finished_spans())

    def named(self, name) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]


def check_labels(name, labels):
    assert set(labels) <= set(BY_NAME[name].labels), (name, labels)
    for label, value in labels.items():
        _, known = LABELS[label]
        assert known is None or value in known, (name, label, value)
