"""The table of metrics: the page shows what the code has, and names are those of Prometheus."""

import importlib.util
import re
from pathlib import Path

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from outrider.telemetry.catalog import (
    BY_NAME,
    LABELS,
    METRICS,
    MORE_ROWS,
    Kind,
    prometheus_label,
    prometheus_names,
    rows_label,
)
from outrider.telemetry.metrics import Metrics

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_shows_what_the_code_has():
    spec = importlib.util.spec_from_file_location("write_metrics", DOCS / "write_metrics.py")
    write_metrics = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(write_metrics)
    page = (DOCS / "metrics.md").read_text()
    assert page == write_metrics.written(page), "run python docs/write_metrics.py"
    for metric in METRICS:
        assert f"`{metric.prometheus_name}`" in page
    queries = set(re.findall(r"outrider_[a-z_]+", page.partition(write_metrics.START)[0]))
    assert len(queries) > 10 and queries <= set(prometheus_names())


def test_no_metric_stands_there_twice_and_every_label_is_known():
    assert len(BY_NAME) == len(METRICS)
    assert len(set(prometheus_names())) == len(prometheus_names())
    for metric in METRICS:
        assert metric.meaning and metric.unit and metric.services
        assert set(metric.labels) <= set(LABELS), metric.name
        assert bool(metric.buckets) is (metric.kind is Kind.HISTOGRAM)
        assert list(metric.buckets) == sorted(set(metric.buckets))


def test_labels_have_few_values():
    """Whatever happens, no metric can have more series than a scrape can carry."""
    for metric in METRICS:
        series = 1
        for label in metric.labels:
            _, values = LABELS[label]
            series *= len(values) if values is not None else 2  # Say two models are served.
        assert series <= 1000, f"{metric.name} may have {series} series"


def test_names_are_those_that_the_exporter_makes():
    from opentelemetry.exporter.prometheus import PrometheusMetricReader

    registry = CollectorRegistry()
    reader = PrometheusMetricReader(scope_info_enabled=False, registry=registry)
    metrics = Metrics(MeterProvider([reader], shutdown_on_exit=False).get_meter("test"))
    for metric in METRICS:
        labels = {label: "x" for label in metric.labels}
        if metric.kind is Kind.HISTOGRAM:
            metrics.recorder(metric.name)(0.5, labels)
        else:
            metrics.observe(metric.name, lambda labels=labels: [(1, labels)])
    text = generate_latest(registry).decode()
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    names = {sample.name for sample in samples if sample.name != "target_info"}
    assert names == set(prometheus_names())
    keys = {key for sample in samples if sample.name != "target_info" for key in sample.labels}
    assert keys == {*map(prometheus_label, LABELS), "le"}


def test_a_metric_has_one_source():
    metrics = Metrics(MeterProvider(shutdown_on_exit=False).get_meter("test"))
    metrics.observe("outrider.streams", list)
    with pytest.raises(RuntimeError, match="two sources"):
        metrics.observe("outrider.streams", list)
    with pytest.raises(KeyError):
        metrics.observe("outrider.unheard_of", list)


@pytest.mark.parametrize(
    ("rows", "label"),
    [(0, "1"), (1, "1"), (2, "2"), (3, "4"), (4, "4"), (5, "8"), (512, "512"), (513, "1024")],
)
def test_rows_fall_into_powers_of_two(rows, label):
    assert rows_label(rows) == label


def test_every_number_of_rows_has_a_known_label():
    _, known = LABELS["rows"]
    assert {rows_label(rows) for rows in range(10_000)} == set(known)
    assert rows_label(4096) == "4096" and rows_label(4097) == MORE_ROWS
