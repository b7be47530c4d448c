"""The dashboard for Grafana: rows of panels, each a title, a unit and queries with legends."""

from dataclasses import dataclass
from typing import Any

S = 'namespace="$namespace",app_kubernetes_io_instance="$release"'
"""The release's series: what pod monitors and service monitors of the chart label them with."""
RATE = "[$__rate_interval]"

Json = dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """A time series. `queries` are PromQL by legend; labels of the result stand in {{braces}}."""

    title: str
    unit: str
    queries: dict[str, str]
    meaning: str = ""
    stacked: bool = False


def rate(name: str, by: str = "", matchers: str = "") -> str:
    summed = f"sum by ({by})" if by else "sum"
    return f"{summed} (rate({name}{{{S}{matchers}}}{RATE}))"


def quantile(q: float, name: str, by: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, {rate(name + '_bucket', labels)})"


def gauge(name: str, by: str = "", matchers: str = "") -> str:
    summed = f"sum by ({by})" if by else "sum"
    return f"{summed} ({name}{{{S}{matchers}}})"


ROWS: dict[str, tuple[Panel, ...]] = {
    "Service": (
        Panel("Requests", "reqps", {"{{status}}": rate("outrider_requests_total", "status")}),
        Panel("Streams", "short", {"{{pod}}": gauge("outrider_streams", "pod")}, stacked=True),
        Panel(
            "Tokens",
            "short",
            {"{{type}} a second": rate("outrider_tokens_total", "type")},
            "output: generated; input: prompts; cached: those of them whose KV was there",
        ),
        Panel(
            "Time to first token",
            "s",
            {
                f"p{int(q * 100)}": quantile(q, "gen_ai_server_time_to_first_token_seconds")
                for q in (0.5, 0.95, 0.99)
            },
        ),
        Panel(
            "Time per output token",
            "s",
            {
                f"p{int(q * 100)}": quantile(q, "gen_ai_server_time_per_output_token_seconds")
                for q in (0.5, 0.95, 0.99)
            },
        ),
        Panel(
            "Cancelled by callers",
            "short",
            {"a second": rate("outrider_cancellations_total", matchers=',tier="orchestrator"')},
        ),
        Panel(
            "Requests that wait",
            "short",
            {"{{pod}}": gauge("outrider_requests_waiting", "pod")},
            stacked=True,
        ),
        Panel(
            "Requests that got no place",
            "short",
            {"{{result}}": rate("outrider_admissions_total", "result", ',result!="began"')},
            "full: too many waited; late: their turn came too late; no_target: none was there",
        ),
    ),
    "Speculation": (
        Panel(
            "Mean acceptance length",
            "short",
            {
                "{{model}}, {{proposer}}": rate("outrider_round_tokens_total", "model, proposer")
                + " / "
                + rate("outrider_rounds_total", "model, proposer")
            },
            "Tokens a round, the bonus or recovered one included",
        ),
        Panel(
            "Acceptance rate by position",
            "percentunit",
            {
                "{{position}}": rate("outrider_guesses_accepted_total", "position")
                + " / "
                + rate("outrider_guesses_proposed_total", "position")
            },
        ),
        Panel(
            "Guesses that the controller wants",
            "short",
            {"k = {{k}}": rate("outrider_controller_decisions_total", "k")},
            stacked=True,
        ),
        Panel(
            "Exposed draft time",
            "percentunit",
            {
                "of all rounds": rate("outrider_draft_exposed_time_seconds_total")
                + " / "
                + rate("outrider_round_time_seconds_total")
            },
            "Draft time that nothing hid: more drafts help where it is high",
        ),
        Panel(
            "Outcome buffer",
            "percentunit",
            {
                "hits": rate("outrider_buffer_lookups_total", matchers=',result="hit"')
                + " / "
                + rate("outrider_buffer_lookups_total")
            },
        ),
        Panel(
            "Rounds without their draft",
            "short",
            {
                "fallback": rate("outrider_fallback_rounds_total"),
                "proposal dropped": rate("outrider_proposals_dropped_total"),
            },
        ),
    ),
    "Workers": (
        Panel(
            "Time of a pass",
            "s",
            {
                "{{tier}} p50": quantile(0.5, "outrider_pass_duration_seconds", "tier"),
                "{{tier}} p95": quantile(0.95, "outrider_pass_duration_seconds", "tier"),
            },
        ),
        Panel(
            "Rows of a pass",
            "short",
            {
                "{{tier}}": rate("outrider_pass_rows_total", "tier")
                + " / "
                + rate("outrider_pass_duration_seconds_count", "tier")
            },
        ),
        Panel(
            "Work",
            "short",
            {"{{tier}}, {{state}}": gauge("outrider_works", "tier, state")},
            "waiting: for KV; parked: until its draft answers",
        ),
        Panel(
            "KV in use",
            "percentunit",
            {
                "{{pod}}": gauge("outrider_kv_blocks", "pod", ',state="used"')
                + " / "
                + gauge("outrider_kv_blocks", "pod")
            },
        ),
        Panel(
            "Sessions that lost their KV",
            "short",
            {
                "preempted, {{tier}}": rate("outrider_kv_preemptions_total", "tier"),
                "closed, {{tier}}": rate("outrider_session_closures_total", "tier"),
            },
        ),
        Panel(
            "Prefixes found",
            "percentunit",
            {
                "{{tier}}": rate("outrider_prefix_tokens_total", "tier", ',result="shared"')
                + " / "
                + rate("outrider_prefix_tokens_total", "tier")
            },
        ),
    ),
    "Between them": (
        Panel(
            "Workers connected, at each peer",
            "short",
            {"{{pod}}: {{tier}}": gauge("outrider_links_up", "pod, tier")},
        ),
        Panel(
            "Workers that came and went",
            "short",
            {"{{tier}}: {{change}}": rate("outrider_workers_changes_total", "tier, change")},
            "refused: those that do not fit the others",
        ),
        Panel(
            "Why generations went to their targets",
            "short",
            {
                "{{chosen_for}}": rate("outrider_placements_total", "chosen_for"),
                "moved on, {{tier}}": rate("outrider_moves_total", "tier"),
            },
            "session, prefix, index: for KV that was there; load: nothing was",
        ),
        Panel(
            "Connections lost, replies too late",
            "short",
            {
                "lost, {{tier}}": rate("outrider_links_losses_total", "tier"),
                "late, {{tier}}": rate("outrider_links_late_replies_total", "tier"),
            },
        ),
        Panel(
            "Refused and fenced",
            "short",
            {
                "refused, {{tier}}: {{reason}}": rate("outrider_refusals_total", "tier, reason"),
                "fenced, {{tier}}: {{reason}}": rate("outrider_fences_total", "tier, reason"),
            },
        ),
        Panel(
            "Session store: time of an operation",
            "s",
            {
                "{{operation}}": rate("outrider_store_time_seconds_total", "operation")
                + " / "
                + rate("outrider_store_operations_total", "operation")
            },
        ),
        Panel(
            "Session store: trouble",
            "short",
            {
                "{{operation}}: {{error_type}}": rate(
                    "outrider_store_errors_total", "operation, error_type"
                ),
                "commits repeated": rate("outrider_store_commit_retries_total"),
            },
        ),
    ),
}

ROWS["KV blocks in Redis"] = (
    Panel(
        "Tokens restored, of those that sessions lacked",
        "percentunit",
        {
            "{{tier}}": rate("outrider_kv_store_tokens_total", "tier")
            + " / "
            + rate("outrider_prefix_tokens_total", "tier")
        },
        "KV that was brought back rather than computed",
    ),
    Panel(
        "Blocks",
        "short",
        {"{{tier}}: {{result}}": rate("outrider_kv_store_blocks_total", "tier, result")},
        "missed: a restore ended there; gone: lost from the pool before they were written",
    ),
    Panel(
        "Bytes",
        "Bps",
        {"{{tier}}: {{result}}": rate("outrider_kv_store_io_bytes_total", "tier, result")},
    ),
    Panel(
        "Restores",
        "short",
        {"{{tier}}: {{result}}": rate("outrider_kv_store_restores_total", "tier, result")},
        "declined: computing was thought to be faster; late: it was",
    ),
    Panel(
        "Trouble",
        "short",
        {
            "refused: {{reason}}": rate("outrider_kv_store_refusals_total", "reason"),
            "store {{reason}}": rate("outrider_kv_store_errors_total", "reason"),
            "not written": rate("outrider_kv_store_offers_dropped_total"),
        },
    ),
    Panel(
        "What orchestrators hear of prefixes",
        "short",
        {"{{result}}": rate("outrider_prefix_index_lookups_total", "result")},
        "late: the request was placed without",
    ),
    Panel(
        "Workers that use the store",
        "short",
        {"{{tier}}": gauge("outrider_kv_store_up", "tier")},
    ),
)

_WIDTH, _HEIGHT, _A_LINE = 8, 8, 3


def dashboard() -> Json:
    panels: list[Json] = []
    top = 0
    for title, row in ROWS.items():
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": {"h": 1, "w": 24, "x": 0, "y": top},
                "panels": [],
            }
        )
        top += 1
        for place, panel in enumerate(row):
            line, column = divmod(place, _A_LINE)
            position = {
                "h": _HEIGHT,
                "w": _WIDTH,
                "x": column * _WIDTH,
                "y": top + line * _HEIGHT,
            }
            panels.append({"id": len(panels) + 1, "gridPos": position} | _series(panel))
        top += -(-len(row) // _A_LINE) * _HEIGHT
    return {
        "uid": "outrider",
        "title": "Outrider",
        "tags": ["outrider"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "annotations": {"list": []},
        "panels": panels,
    }


def _series(panel: Panel) -> Json:
    custom = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 20 if panel.stacked else 5,
        "showPoints": "never",
        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
    }
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.meaning,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": custom},
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": {"type": "prometheus", "uid": "${datasource}"},
                "expr": query,
                "legendFormat": legend,
            }
            for place, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def _variables() -> list[Json]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    values = {
        "namespace": "label_values(outrider_streams, namespace)",
        "release": 'label_values(outrider_streams{namespace="$namespace"}, '
        "app_kubernetes_io_instance)",
    }
    return [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
        *(
            {
                "name": name,
                "label": name.capitalize(),
                "type": "query",
                "datasource": source,
                "query": {"query": query, "refId": name},
                "refresh": 2,
                "sort": 1,
            }
            for name, query in values.items()
        ),
    ]
