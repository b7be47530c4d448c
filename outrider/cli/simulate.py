"""`outrider simulate`: controllers against recorded acceptance and costs, without any model."""

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.bench.plot import check_plot_library
from outrider.cli import options, simulate_by
from outrider.errors import InvalidArgument
from outrider.speculation import plot, traces
from outrider.speculation.examples import demo_trace
from outrider.speculation.length import Mode
from outrider.speculation.replay import OURS, PLAIN, Scenario, compare, world_of
from outrider.speculation.world import Load
from outrider.types import MAX_SPECULATIVE_TOKENS

_WITH_SHARE = 3
"""With more delays than this, the table has no room for shares of the oracle."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "simulate", help="replay recorded acceptance against controllers"
    )
    parser.add_argument(
        "trace",
        type=Path,
        nargs="?",
        metavar="TRACE.jsonl",
        help="of `outrider bench --record`; default: the demo pair, from measured figures",
    )
    parser.add_argument(
        "--mode", choices=[mode.value for mode in Mode], help="default: as recorded"
    )
    parser.add_argument("--k-max", type=options.positive, default=8, metavar="K")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    simulate_by.add_options(parser)
    group = parser.add_argument_group("injected")
    group.add_argument(
        "--delay-ms",
        type=_numbers,
        default=(0.0,),
        metavar="MS,MS,...",
        help="each way between orchestrator and draft; several make a sweep",
    )
    group.add_argument(
        "--slow-draft", type=_positive_number, default=1.0, metavar="X", help="times as slow"
    )
    group.add_argument(
        "--sessions", type=options.positive, default=1, metavar="N", help="of the trace at once"
    )
    group.add_argument(
        "--load", type=options.count, default=0, metavar="ROWS", help="of sessions beside them"
    )
    group.add_argument(
        "--load-swing-s",
        type=_positive_number,
        metavar="SECONDS",
        help="the load comes and goes every so often; default: it stays",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the report")
    parser.add_argument("--plot", type=Path, metavar="OUT.png", help="draw the report")
    parser.set_defaults(run_sync=run)


def _numbers(text: str) -> tuple[float, ...]:
    values = tuple(float(part) for part in text.split(","))
    if any(value < 0 for value in values):
        raise argparse.ArgumentTypeError(f"{text} holds a number below 0")
    return values


def _positive_number(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def run(args: argparse.Namespace) -> int:
    if args.plot:
        check_plot_library()
        if args.by_category:
            raise InvalidArgument("there is no plot by category", field="plot")
    if args.k_max > MAX_SPECULATIVE_TOKENS:
        raise InvalidArgument(f"at most {MAX_SPECULATIVE_TOKENS}", field="k_max")
    out = Console(highlight=False)
    trace = traces.read(args.trace) if args.trace else demo_trace()
    mode = Mode(args.mode) if args.mode else _recorded_mode(trace.mode)
    if args.by_category:
        report = simulate_by.build_report(args, trace, mode)
        out.print(simulate_by.table(report))
    else:
        report = build_report(args, trace, mode)
        for table in tables(report):
            out.print(table)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    if args.plot:
        plot.draw(report, args.plot)
    return 0


def build_report(args: argparse.Namespace, trace: traces.Trace, mode: Mode) -> dict[str, Any]:
    """The settings, and a scenario for each delay with a row a policy."""
    world = world_of(trace, mode)
    swing = args.load_swing_s
    load = Load(0, args.load, swing) if swing else Load(args.load)
    scenarios = [
        {
            "delay_ms": delay,
            "rows": compare(
                trace,
                world,
                Scenario(delay / 1000, args.slow_draft, load, args.sessions),
                k_max=args.k_max,
                seed=args.seed,
            ),
        }
        for delay in args.delay_ms
    ]
    settings = {
        "trace": args.trace.name if args.trace else "demo pair, made up",
        "mode": mode.value,
        "k_max": args.k_max,
        "sessions": args.sessions,
        "slow_draft": args.slow_draft,
        "load": f"0 to {args.load} every {swing:g} s" if swing else str(args.load),
        "seed": args.seed,
    }
    return {"settings": settings, "scenarios": scenarios}


def _recorded_mode(name: str) -> Mode:
    try:
        return Mode(name)
    except ValueError as error:
        known = ", ".join(mode.value for mode in Mode)
        raise InvalidArgument(f"the trace's mode is {name!r}, not {known}", field="mode") from error


def tables(report: dict[str, Any]) -> list[Table]:
    """Policies over the delays; then, of the first delay, categories."""
    scenarios = report["scenarios"]
    table = Table(box=None, header_style="bold", pad_edge=False)
    shares = " (of oracle)" if len(scenarios) <= _WITH_SHARE else ""
    table.add_column(f"\ntokens/s{shares}", no_wrap=True)
    table.add_column("mean k\n(first)", justify="right", no_wrap=True)
    for scenario in scenarios:
        table.add_column(f"delay\n{scenario['delay_ms']:g} ms", justify="right", no_wrap=True)
    for number, row in enumerate(scenarios[0]["rows"]):
        cells = [
            _cell(scenario["rows"][number], with_share=len(scenarios) <= _WITH_SHARE)
            for scenario in scenarios
        ]
        table.add_row(row["policy"], f"{row['mean_length']:.1f}", *cells)
    return [table, _categories(scenarios[0]["rows"])]


def _cell(row: dict[str, Any], *, with_share: bool) -> str:
    share = f" ({row['of_oracle']:.0%})" if with_share and row["of_oracle"] is not None else ""
    return f"{row['tokens_per_s']:.1f}{share}"


def _categories(rows: list[dict[str, Any]]) -> Table:
    by_name = {row["policy"]: row["per_category"] for row in rows}
    fixed = {name: found for name, found in by_name.items() if name.startswith("k=")}
    table = Table(box=None, header_style="bold", pad_edge=False)
    for number, title in enumerate(
        ("\nby category", "\nplain", "\nbest fixed", "\nours", "of best\nfixed", "mean\nk")
    ):
        table.add_column(title, justify="right" if number else "left", no_wrap=True)
    for category, plain in by_name[PLAIN].items():
        ours = by_name[OURS][category]
        best, rate = max(
            ((name, found[category]["tokens_per_s"]) for name, found in fixed.items()),
            key=lambda choice: choice[1],
        )
        best, rate = max((best, rate), (PLAIN, plain["tokens_per_s"]), key=lambda c: c[1])
        table.add_row(
            category,
            f"{plain['tokens_per_s']:.1f}",
            f"{rate:.1f} ({best})",
            f"{ours['tokens_per_s']:.1f}",
            f"{ours['tokens_per_s'] / rate:.0%}",
            f"{ours['mean_length']:.1f}",
        )
    return table
