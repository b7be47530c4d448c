"""The figures of `outrider top`: rates between two scrapes, and tables of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from outrider.cli.scrape import Scrape
from outrider.types import MAX_SPECULATIVE_TOKENS

_POSITIONS = 8
"""Places of guesses that are shown."""
_LENGTHS = tuple(map(str, range(MAX_SPECULATIVE_TOKENS + 1)))


class _Change:
    """What was added between two scrapes of the same processes."""

    def __init__(self, before: Sequence[Scrape], now: Sequence[Scrape]) -> None:
        self._pairs = [(b, n) for b, n in zip(before, now, strict=True) if not (b.error or n.error)]
        self.seconds = max((n.at - b.at for b, n in self._pairs), default=0.0)

    def of(self, name: str, **labels: str) -> float:
        """By how much a counter grew; from 0 in a process that was started anew."""
        grown = 0.0
        for before, now in self._pairs:
            old, new = before.total(name, **labels), now.total(name, **labels)
            grown += new - old if new >= old else new
        return grown

    def per_s(self, name: str, **labels: str) -> float | None:
        return ratio(self.of(name, **labels), self.seconds)

    def now(self, name: str, **labels: str) -> float:
        """The value of a gauge, of all processes."""
        return sum(now.total(name, **labels) for _, now in self._pairs)


def ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def summary(before: Sequence[Scrape], now: Sequence[Scrape]) -> dict[str, Any]:
    """All figures; None where nothing happened to tell by."""
    change = _Change(before, now)
    return {
        "seconds": change.seconds,
        "requests": _requests(change),
        "speculation": _speculation(change),
        "processes": [_process(b, n) for b, n in zip(before, now, strict=True)],
    }


def _requests(change: _Change) -> dict[str, Any]:
    def mean(name: str) -> float | None:
        return ratio(change.of(f"{name}_sum"), change.of(f"{name}_count"))

    ended, good = (
        change.of("outrider_requests_total"),
        change.of("outrider_requests_total", status="OK"),
    )
    return {
        "streams": change.now("outrider_streams"),
        "ended_per_s": ratio(ended, change.seconds),
        "failed_per_s": ratio(ended - good, change.seconds),
        "tokens_per_s": change.per_s("outrider_round_tokens_total"),
        "time_to_first_token_s": mean("gen_ai_server_time_to_first_token_seconds"),
        "time_per_output_token_s": mean("gen_ai_server_time_per_output_token_seconds"),
        "commits_per_s": change.per_s("outrider_store_operations_total", operation="commit"),
        "store_errors_per_s": change.per_s("outrider_store_errors_total"),
    }


def _speculation(change: _Change) -> dict[str, Any]:
    rounds = change.of("outrider_rounds_total")
    proposed = change.of("outrider_guesses_proposed_total")
    round_s = change.of("outrider_round_time_seconds_total")
    by_position = []
    for position in map(str, range(_POSITIONS)):
        asked = change.of("outrider_guesses_proposed_total", position=position)
        kept = change.of("outrider_guesses_accepted_total", position=position)
        by_position.append(ratio(kept, asked))
    decisions = change.of("outrider_controller_decisions_total")
    chosen = {k: change.of("outrider_controller_decisions_total", k=k) for k in _LENGTHS}
    return {
        "rounds_per_s": ratio(rounds, change.seconds),
        "round_s": ratio(round_s, rounds),
        "mean_acceptance_length": ratio(change.of("outrider_round_tokens_total"), rounds),
        "guesses_a_round": ratio(proposed, rounds),
        "k_chosen": {k: count / decisions for k, count in chosen.items() if count},
        "acceptance": ratio(change.of("outrider_guesses_accepted_total"), proposed),
        "acceptance_by_position": by_position,
        "buffer_hits": ratio(
            change.of("outrider_buffer_lookups_total", result="hit"),
            change.of("outrider_buffer_lookups_total"),
        ),
        "exposed_draft_time": ratio(
            change.of("outrider_draft_exposed_time_seconds_total"), round_s
        ),
        "fallback_rounds": ratio(change.of("outrider_fallback_rounds_total"), rounds),
    }


def _process(before: Scrape, now: Scrape) -> dict[str, Any]:
    if now.error or before.error:
        return {"address": now.address, "error": now.error or before.error}
    change = _Change([before], [now])
    passes = change.of("outrider_pass_duration_seconds_count")
    blocks = now.total("outrider_kv_blocks")
    return {
        "address": now.address,
        "tier": _tier(now),
        "model": now.label("model") or now.label("gen_ai_request_model"),
        "sessions": now.total("outrider_sessions"),
        "streams": now.total("outrider_streams"),
        "running": now.total("outrider_works", state="running"),
        "waiting": now.total("outrider_works", state="waiting"),
        "parked": now.total("outrider_works", state="parked"),
        "kv_used": ratio(now.total("outrider_kv_blocks", state="used"), blocks),
        "kv_cached": ratio(now.total("outrider_kv_blocks", state="cached"), blocks),
        "prefix_hits": ratio(
            change.of("outrider_prefix_tokens_total", result="shared"),
            change.of("outrider_prefix_tokens_total"),
        ),
        "passes_per_s": ratio(passes, change.seconds),
        "busy": change.per_s("outrider_pass_duration_seconds_sum"),
        "rows_a_pass": ratio(change.of("outrider_pass_rows_total"), passes),
        "preemptions": change.of("outrider_kv_preemptions_total"),
        "refusals": change.of("outrider_refusals_total"),
        "fences": change.of("outrider_fences_total"),
        "links_up": now.total("outrider_links_up"),
        "kv_store": _kv_store(change, now),
    }


def _kv_store(change: _Change, now: Scrape) -> dict[str, Any] | None:
    """The block store, as a worker that has one uses it."""
    if "outrider_kv_store_up" not in now.samples:
        return None

    def blocks(result: str) -> float | None:
        return change.per_s("outrider_kv_store_blocks_total", result=result)

    def restores(result: str) -> float:
        return change.of("outrider_kv_store_restores_total", result=result)

    return {
        "up": now.total("outrider_kv_store_up") > 0,
        "blocks_written_per_s": blocks("written"),
        "blocks_restored_per_s": blocks("restored"),
        "bytes_written_per_s": change.per_s("outrider_kv_store_io_bytes_total", result="written"),
        "bytes_restored_per_s": change.per_s("outrider_kv_store_io_bytes_total", result="restored"),
        "tokens_restored_per_s": change.per_s("outrider_kv_store_tokens_total"),
        "restores": restores("done"),
        "restores_late": restores("late"),
        "restores_declined": restores("declined"),
        "refused": change.of("outrider_kv_store_refusals_total"),
        "errors": change.of("outrider_kv_store_errors_total"),
    }


def _tier(now: Scrape) -> str:
    """Only a worker has passes, and says of which tier it is."""
    limits = now.samples.get("outrider_pass_rows_limit", ())
    return limits[0].labels.get("tier", "") if limits else "orchestrator"


# --- tables -----------------------------------------------------------------------------------


def render(figures: dict[str, Any]) -> RenderableType:
    """Figures as tables for a terminal."""
    return Group(
        _pairs("requests", figures["requests"], _REQUEST_UNITS),
        _pairs("speculation", figures["speculation"], _SPECULATION_UNITS),
        _acceptance(figures["speculation"]["acceptance_by_position"]),
        _lengths(figures["speculation"]["k_chosen"]),
        _processes(figures["processes"]),
        *_kv_stores(figures["processes"]),
    )


_REQUEST_UNITS = {
    "streams": ("streams", 1, ""),
    "tokens_per_s": ("tokens", 1, "/s"),
    "ended_per_s": ("ended", 1, "/s"),
    "failed_per_s": ("failed", 1, "/s"),
    "time_to_first_token_s": ("first token", 1e3, " ms"),
    "time_per_output_token_s": ("a token", 1e3, " ms"),
    "commits_per_s": ("commits", 1, "/s"),
    "store_errors_per_s": ("store errors", 1, "/s"),
}
_SPECULATION_UNITS = {
    "rounds_per_s": ("rounds", 1, "/s"),
    "round_s": ("a round", 1e3, " ms"),
    "mean_acceptance_length": ("tokens a round", 1, ""),
    "guesses_a_round": ("guesses a round", 1, ""),
    "acceptance": ("accepted", 100, "%"),
    "buffer_hits": ("buffer hits", 100, "%"),
    "exposed_draft_time": ("exposed drafting", 100, "%"),
    "fallback_rounds": ("without a draft", 100, "%"),
}


def _pairs(title: str, figures: dict[str, Any], units: dict[str, tuple[str, float, str]]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, expand=False)
    for label, _, _ in units.values():
        table.add_column(label, justify="right")
    table.add_row(*(_number(figures[key], scale, unit) for key, (_, scale, unit) in units.items()))
    return table


def _acceptance(by_position: Sequence[float | None]) -> Text:
    """How many guesses survive at each place."""
    shown = [_number(rate, 100, "%") for rate in by_position if rate is not None]
    return Text("accepted by position: " + ("  ".join(shown) or "-"), style="dim")


def _lengths(chosen: Mapping[str, float]) -> Text:
    """How often the controller wanted so many guesses."""
    shown = [f"{k}: {_number(share, 100, '%')}" for k, share in chosen.items()]
    return Text("k chosen: " + ("  ".join(shown) or "-") + "\n", style="dim")


_COLUMNS = (
    ("sessions", "sessions", 1, ""),
    ("running", "running", 1, ""),
    ("waiting", "waiting", 1, ""),
    ("KV used", "kv_used", 100, "%"),
    ("cached", "kv_cached", 100, "%"),
    ("prefix hits", "prefix_hits", 100, "%"),
    ("passes", "passes_per_s", 1, "/s"),
    ("busy", "busy", 100, "%"),
    ("rows", "rows_a_pass", 1, ""),
    ("preempted", "preemptions", 1, ""),
    ("refused", "refusals", 1, ""),
    ("fenced", "fences", 1, ""),
    ("links", "links_up", 1, ""),
)


def _processes(processes: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="processes", title_justify="left", box=None, pad_edge=False)
    for name in ("tier", "model", "metrics at"):
        table.add_column(name, no_wrap=True)
    for name, *_ in _COLUMNS:
        table.add_column(name, justify="right")
    order = ("orchestrator", "target", "draft")
    for process in sorted(processes, key=lambda p: order.index(p.get("tier", "draft"))):
        if process.get("error"):
            table.add_row("?", Text(process["error"], style="red"), process["address"])
            continue
        numbers = [_number(process[key], scale, unit) for _, key, scale, unit in _COLUMNS]
        table.add_row(process["tier"], process["model"], process["address"], *numbers)
    return table


_KV_STORE_COLUMNS = (
    ("written", "blocks_written_per_s", 1, "/s"),
    ("MB", "bytes_written_per_s", 1e-6, "/s"),
    ("restored", "blocks_restored_per_s", 1, "/s"),
    ("MB", "bytes_restored_per_s", 1e-6, "/s"),
    ("tokens", "tokens_restored_per_s", 1, "/s"),
    ("restores", "restores", 1, ""),
    ("late", "restores_late", 1, ""),
    ("declined", "restores_declined", 1, ""),
    ("refused", "refused", 1, ""),
    ("errors", "errors", 1, ""),
)


def _kv_stores(processes: Sequence[dict[str, Any]]) -> list[Table]:
    """A table of those that use the block store, where there is one."""
    users = [process for process in processes if process.get("kv_store")]
    if not users:
        return []
    table = Table(title="KV blocks in the store", title_justify="left", box=None, pad_edge=False)
    table.add_column("metrics at", no_wrap=True)
    table.add_column("store")
    for name, *_ in _KV_STORE_COLUMNS:
        table.add_column(name, justify="right")
    for process in users:
        store = process["kv_store"]
        state = Text("used") if store["up"] else Text("away", style="red")
        numbers = [_number(store[key], scale, unit) for _, key, scale, unit in _KV_STORE_COLUMNS]
        table.add_row(process["address"], state, *numbers)
    return [table]


def _number(value: float | None, scale: float, unit: str) -> str:
    if value is None:
        return "-"
    value *= scale
    digits = 0 if value == int(value) or abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f}{unit}"
