"""PromQL as Prometheus reads it: what a query asks for, which must be there."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import promql_parser

from outrider.telemetry.catalog import LABELS, METRICS, prometheus_label

OF_THE_TARGET = frozenset(
    {"namespace", "pod", "app_kubernetes_io_instance", "app_kubernetes_io_component"}
)
"""Labels that monitors add."""
_STAND_INS = {
    "$__rate_interval": "5m",
    "$selector": 'namespace="a",app_kubernetes_io_instance="b"',
}
"""What Grafana and the chart put in."""


class Asked(NamedTuple):
    """One metric in a query: labels it is selected by, with their values, and grouped by."""

    name: str
    selected: Mapping[str, tuple[str, ...]]
    grouped: frozenset[str]


def asked(query: str) -> list[Asked]:
    """Raises ValueError for what Prometheus would refuse."""
    for name, value in _STAND_INS.items():
        query = query.replace(name, value)
    return list(_walk(promql_parser.parse(query), frozenset()))


def _walk(node: Any, grouped: frozenset[str]) -> Iterator[Asked]:
    if isinstance(node, promql_parser.VectorSelector):
        values = {
            m.name: tuple(m.value.split("|")) if m.op == promql_parser.MatchOp.Re else (m.value,)
            for m in node.matchers.matchers
        }
        yield Asked(node.name, values, grouped)
    elif isinstance(node, promql_parser.AggregateExpr):
        labels = node.modifier.labels if node.modifier else ()
        yield from _walk(node.expr, grouped | frozenset(labels))
    else:
        for part in ("lhs", "rhs", "expr", "vector_selector"):
            if hasattr(node, part):
                yield from _walk(getattr(node, part), grouped)
        for argument in getattr(node, "args", ()):
            yield from _walk(argument, grouped)


def faults(query: str) -> list[str]:
    """What of a query is not in the catalog: names, labels, and values of labels."""
    try:
        found = asked(query)
    except ValueError as error:
        return [f"{query}: {error}"]
    if not found:
        return [f"{query}: asks for nothing"]
    return [fault for each in found for fault in _faults(each)]


def _faults(each: Asked) -> Iterator[str]:
    metric = next((m for m in METRICS if each.name in m.series), None)
    if metric is None:
        yield f"{each.name} is no metric"
        return
    known = {prometheus_label(key): LABELS[key][1] for key in metric.labels}
    if each.name.endswith("_bucket"):
        known["le"] = None
    for label in (each.selected.keys() | each.grouped) - known.keys() - OF_THE_TARGET:
        yield f"{each.name} has no label {label}"
    for label, values in each.selected.items():
        possible = known.get(label)
        for value in values if possible else ():
            if value not in possible:
                yield f"{each.name}: {label} is never {value}"
