"""Draws a report of `outrider plan`: acceptance, speed-up by length, and categories."""

from pathlib import Path
from typing import Any

from outrider.planner.values import COUPLED, GREEDY, REJECTION

_COLOURS = {GREEDY: "#30638e", COUPLED: "#d1495b", REJECTION: "#edae49"}


def draw(report: dict[str, Any], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    acceptance, speed, categories = figure.subplots(1, 3, width_ratios=(1, 1.1, 1.2))
    _acceptance(acceptance, report["modes"])
    _speed(speed, report["modes"])
    _categories(categories, report)
    for axes in (acceptance, speed, categories):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.grid(axis="y", color="#e5e5e5")
    figure.suptitle(_title(report), fontsize=10, x=0.01, ha="left")
    figure.savefig(path, dpi=150)


def _acceptance(axes: Any, modes: dict[str, Any]) -> None:
    for mode, entry in modes.items():
        rates = entry["lengths"][-1]["acceptance"]
        places = range(1, len(rates) + 1)
        axes.plot(places, rates, marker="o", markersize=4, color=_COLOURS[mode], label=_name(mode))
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("guess", fontsize=9)
    axes.set_title("Acceptance, given that all before were accepted", fontsize=10)
    axes.legend(fontsize=8, frameon=False)


def _speed(axes: Any, modes: dict[str, Any]) -> None:
    for mode, entry in modes.items():
        lengths = [length["k"] for length in entry["lengths"]]
        for way, style in (("sequential", "--"), ("pipelined", "-")):
            values = [length[way] for length in entry["lengths"]]
            label = _name(mode) if way == "pipelined" else None
            axes.plot(lengths, values, style, color=_COLOURS[mode], label=label)
    axes.axhline(1.0, color="#8d99ae", linewidth=1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("k", fontsize=9)
    axes.set_title("Over plain (dashed: one device; solid: pipelined)", fontsize=10)
    axes.legend(fontsize=8, frameon=False)


def _categories(axes: Any, report: dict[str, Any]) -> None:
    """Tokens a round at the length that is recommended last."""
    length = report["recommendation"][-1]["length"]
    k = length["k"] if length else 1
    names = list(next(iter(report["categories"].values())))
    width = 0.8 / len(report["categories"])
    for number, (mode, groups) in enumerate(report["categories"].items()):
        shift = (number - (len(report["categories"]) - 1) / 2) * width
        values = [groups[name]["lengths"][k - 1]["mean_acceptance_length"] for name in names]
        places = [place + shift for place in range(len(names))]
        axes.bar(places, values, width, color=_COLOURS[mode], label=_name(mode))
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8)
    axes.set_title(f"Tokens a round with k = {k}", fontsize=10)


def _title(report: dict[str, Any]) -> str:
    models, settings = report["models"], report["settings"]
    return (
        f"{models['draft']} for {models['target']} ({report['dtype']}) on {report['device']}: "
        f"{settings['text']}, {settings['sessions']} at once, "
        f"context {settings['context_len']}"
    )


def _name(mode: str) -> str:
    return "temperature 0" if mode == GREEDY else mode
