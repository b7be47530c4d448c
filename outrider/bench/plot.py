"""Draws a report of `outrider bench`: throughput, time per token, acceptance by position."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.errors import FailedPrecondition

_PALETTE = {
    "plain": "#8d99ae",
    "speculative": "#d1495b",
    "transformers": "#30638e",
    "transformers-assisted": "#edae49",
}


def check_plot_library() -> None:
    """Before the run, so that a missing library does not cost its results."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise FailedPrecondition(
            "matplotlib is not installed; pip install 'outrider[plot]'", field="plot"
        ) from error


def draw(report: dict[str, Any], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = report["runs"]
    figure = Figure(figsize=(12, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    throughput, latency, acceptance = figure.subplots(1, 3, width_ratios=(1, 1.1, 1))
    _throughput(throughput, runs, report["ratios"].get("vs_plain", {}))
    _latency(latency, runs)
    _acceptance(acceptance, runs)
    for axes in (throughput, latency, acceptance):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.grid(axis="y", color="#e5e5e5")
    figure.suptitle(_title(report), fontsize=10, x=0.01, ha="left")
    figure.savefig(path, dpi=150)


def _throughput(axes: Any, runs: Sequence[dict[str, Any]], vs_plain: dict[str, float]) -> None:
    values = [run["tok_s"] or 0.0 for run in runs]
    bars = axes.bar(_labels(runs), values, color=_colours(runs), width=0.65)
    labels = [
        f"{value:.1f}" + (f"\n{vs_plain[run['system']]:.2f}x" if run["system"] in vs_plain else "")
        for run, value in zip(runs, values, strict=True)
    ]
    axes.bar_label(bars, labels, padding=3, fontsize=9)
    axes.set_ylim(0, max(values, default=1.0) * 1.25 or 1.0)
    axes.set_title("Tokens per second (x: over plain)", fontsize=10)
    axes.tick_params(axis="x", labelsize=9)


def _latency(axes: Any, runs: Sequence[dict[str, Any]]) -> None:
    samples = [[r["tpot_ms"] for r in run["requests"] if r["tpot_ms"] is not None] for run in runs]
    boxes = axes.boxplot(
        samples,
        tick_labels=_labels(runs),
        patch_artist=True,
        widths=0.5,
        medianprops={"color": "black"},
        flierprops={"markersize": 3},
    )
    for box, colour in zip(boxes["boxes"], _colours(runs), strict=True):
        box.set_facecolor(colour)
        box.set_alpha(0.85)
    axes.set_ylim(bottom=0)
    axes.set_title("Time per token after the first, ms (a value a prompt)", fontsize=10)
    axes.tick_params(axis="x", labelsize=9)


def _acceptance(axes: Any, runs: Sequence[dict[str, Any]]) -> None:
    """Of the guesses that were verified at a position, the share that survived."""
    axes.set_title("Acceptance by position in the proposal", fontsize=10)
    axes.set_ylim(0, 1.08)
    drawn = [run for run in runs if (run["speculation"] or {}).get("proposed_by_position")]
    if not drawn:
        axes.text(0.5, 0.5, "nothing was proposed", ha="center", transform=axes.transAxes)
        return
    width = 0.7 / len(drawn)
    for number, run in enumerate(drawn):
        counts = run["speculation"]
        pairs = zip(counts["accepted_by_position"], counts["proposed_by_position"], strict=True)
        rates = [accepted / proposed if proposed else 0.0 for accepted, proposed in pairs]
        places = [
            position + 1 + (number - (len(drawn) - 1) / 2) * width for position in range(len(rates))
        ]
        name, length = run["system"], run["mean_acceptance_length"]
        bars = axes.bar(
            places, rates, width, color=_colour(name), label=f"{name}: mean length {length:.2f}"
        )
        axes.bar_label(bars, [f"{rate:.2f}" for rate in rates], padding=2, fontsize=8)
    axes.set_xticks(range(1, max(len(r["speculation"]["proposed_by_position"]) for r in drawn) + 1))
    axes.legend(fontsize=8, frameon=False, loc="upper right")


def _title(report: dict[str, Any]) -> str:
    settings, machine = report["settings"], report["machine"]
    names = ", ".join(model["name"] for model in report["models"]["served"])
    place = ", ".join(machine["gpus"]) or f"{machine['processor']}, {machine['cores']} cores"
    return (
        f"{names} ({report['models']['dtype']}) on {place}: {settings['prompts']} prompts, "
        f"{settings['max_tokens']} tokens, temperature {settings['temperature']:g}, "
        f"concurrency {settings['concurrency']}"
    )


def _labels(runs: Sequence[dict[str, Any]]) -> list[str]:
    return [run["system"].replace("-", "\n") for run in runs]


def _colours(runs: Sequence[dict[str, Any]]) -> list[str]:
    return [_colour(run["system"]) for run in runs]


def _colour(system: str) -> str:
    return _PALETTE.get(system, "#6c757d")
