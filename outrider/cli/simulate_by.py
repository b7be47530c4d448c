"""`outrider simulate --by-category`: the controller beside the best fixed length."""

import argparse
from typing import Any

from rich.table import Table

from outrider.cli import options
from outrider.speculation.evaluation import Sessions, evaluate, halves
from outrider.speculation.length import Mode
from outrider.speculation.processes import estimate
from outrider.speculation.replay import world_of
from outrider.speculation.traces import Trace

_HALVES = ("all", "first", "second")


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("by category")
    group.add_argument(
        "--by-category",
        action="store_true",
        help="the controller over the best fixed k of each category and of text that changes, on a "
        "stack that serves them all (warm) and on one that knows nothing (cold)",
    )
    group.add_argument(
        "--half",
        choices=_HALVES,
        default="all",
        help="of the recorded sessions of each category: every other one",
    )
    group.add_argument("--each", type=options.positive, default=24, metavar="N", help="sessions")
    group.add_argument(
        "--tokens", type=_span, default=(64, 256), metavar="MIN-MAX", help="of a session"
    )
    group.add_argument("--seeds", type=options.positive, default=1, metavar="N")


def _span(text: str) -> tuple[int, int]:
    shortest, _, longest = text.partition("-")
    span = options.positive(shortest), options.positive(longest or shortest)
    if span[0] > span[1]:
        raise argparse.ArgumentTypeError(f"{text} has the longer one first")
    return span


def build_report(args: argparse.Namespace, trace: Trace, mode: Mode) -> dict[str, Any]:
    """The settings, and a row a category."""
    world, processes = world_of(trace, mode), estimate(trace, k_max=args.k_max + 1)
    chosen = dict(zip(_HALVES, (processes, *halves(processes)), strict=True))[args.half]
    rows = evaluate(
        world,
        chosen,
        Sessions(args.each, *args.tokens),
        k_max=args.k_max,
        seeds=range(args.seed, args.seed + args.seeds),
    )
    settings = {
        "trace": args.trace.name if args.trace else "demo pair, made up",
        "mode": mode.value,
        "k_max": args.k_max,
        "half": args.half,
        "sessions": args.each,
        "tokens": list(args.tokens),
        "seeds": args.seeds,
    }
    return {"settings": settings, "rows": rows}


def table(report: dict[str, Any]) -> Table:
    """Tokens per second of decoding, and the controller's share of the best fixed length's."""
    titles = (
        "\n", "\nplain", "best\nfixed", "\nwarm", "of\nbest", "\ncold", "of\nbest",
        "of\noracle", "mean\nk",
    )  # fmt: skip
    found = Table(box=None, header_style="bold", pad_edge=False)
    for number, title in enumerate(titles):
        found.add_column(title, justify="right" if number else "left", no_wrap=True)
    for row in report["rows"]:
        rates, best = row["tokens_per_s"], row["best_fixed"]
        found.add_row(
            row["category"],
            f"{rates['plain']:.1f}",
            f"{rates[best]:.1f} ({best})",
            f"{rates['warm']:.1f}",
            f"{row['warm_of_best']:.1%}",
            f"{rates['cold']:.1f}",
            f"{row['cold_of_best']:.1%}",
            f"{row['warm_of_oracle']:.1%}",
            f"{row['mean_length']:.1f}",
        )
    return found
