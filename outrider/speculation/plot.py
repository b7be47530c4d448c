"""Draws a report of `outrider simulate`: tokens per second, regret, and categories."""

from pathlib import Path
from typing import Any

_COLOURS = {"plain": "#8d99ae", "ours": "#d1495b", "oracle": "#222222"}
_FIXED_COLOUR, _BEST_COLOUR = "#c9d6df", "#30638e"


def draw(report: dict[str, Any], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    speed, regret, categories = figure.subplots(1, 3, width_ratios=(1, 1, 1.2))
    _by_delay(speed, report, "tokens_per_s", "Tokens per second")
    _by_delay(regret, report, "of_oracle", "Regret: share of the oracle's tokens/s that is lost")
    _categories(categories, report["scenarios"][0]["rows"])
    for axes in (speed, regret, categories):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.grid(axis="y", color="#e5e5e5")
    figure.suptitle(_title(report), fontsize=10, x=0.01, ha="left")
    figure.savefig(path, dpi=150)


def _by_delay(axes: Any, report: dict[str, Any], key: str, title: str) -> None:
    """A line a policy over the delays; bars where there is one delay only."""
    scenarios = report["scenarios"]
    names = [row["policy"] for row in scenarios[0]["rows"]]
    values = [[_value(row, key) for row in scenario["rows"]] for scenario in scenarios]
    axes.set_title(title, fontsize=10)
    if len(scenarios) == 1:
        axes.bar(names, values[0], color=[_COLOURS.get(name, _FIXED_COLOUR) for name in names])
        axes.tick_params(axis="x", labelsize=8, rotation=60)
        return
    delays = [scenario["delay_ms"] for scenario in scenarios]
    for number, name in enumerate(names):
        line = [column[number] for column in values]
        known = name in _COLOURS
        axes.plot(
            delays,
            line,
            color=_COLOURS.get(name, _FIXED_COLOUR),
            linewidth=2 if known else 1,
            marker="o" if known else None,
            markersize=4,
            label=name if known else "fixed k" if name == "k=1" else None,
        )
    axes.set_xlabel("delay each way to the draft, ms", fontsize=9)
    axes.legend(fontsize=8, frameon=False)


def _value(row: dict[str, Any], key: str) -> float:
    value = float(row[key] or 0.0)
    return 1.0 - value if key == "of_oracle" else value


def _categories(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Plain, the best fixed length, ours and the oracle, category by category."""
    by_name = {row["policy"]: row["per_category"] for row in rows}
    categories = list(by_name["plain"])
    drawn = {
        "plain": [by_name["plain"][c]["tokens_per_s"] for c in categories],
        "best fixed k": [
            max(v[c]["tokens_per_s"] for n, v in by_name.items() if n.startswith("k="))
            for c in categories
        ],
        "ours": [by_name["ours"][c]["tokens_per_s"] for c in categories],
        "oracle": [by_name["oracle"][c]["tokens_per_s"] for c in categories],
    }
    width = 0.8 / len(drawn)
    for number, (name, values) in enumerate(drawn.items()):
        places = [i + (number - (len(drawn) - 1) / 2) * width for i in range(len(categories))]
        axes.bar(places, values, width, color=_COLOURS.get(name, _BEST_COLOUR), label=name)
    axes.set_xticks(range(len(categories)), categories, rotation=30, ha="right", fontsize=8)
    axes.set_title("Tokens per second by category (first scenario)", fontsize=10)
    axes.legend(fontsize=8, frameon=False)


def _title(report: dict[str, Any]) -> str:
    settings = report["settings"]
    return (
        f"{settings['trace']}: {settings['mode']}, {settings['sessions']} at once, "
        f"drafts x{settings['slow_draft']:g}, other rows {settings['load']}, "
        f"seed {settings['seed']}"
    )
