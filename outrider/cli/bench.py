"""`outrider bench`: systems side by side on the same prompts, in one run."""

import argparse
import contextlib
import dataclasses
import json
import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from outrider.bench.plot import check_plot_library, draw
from outrider.bench.prompts import BenchPrompt, default_prompts, read_prompts, select_evenly
from outrider.bench.recording import record
from outrider.bench.report import build_report
from outrider.bench.runner import run_interleaved
from outrider.bench.summary import of_best_fixed
from outrider.bench.systems import OutriderSystem, System, TransformersSystem
from outrider.cli import options
from outrider.cli.backend import Backend, open_backend
from outrider.cli.process import guarded
from outrider.client import ModelInfo
from outrider.errors import InvalidArgument

SYSTEMS = ("plain", "speculative", "transformers", "transformers-assisted")
_FIXED = re.compile(r"k=(\d+)\Z")
"""Names of further systems: speculation with so many guesses a round."""
PEER_LENGTH = 3
"""Guesses of `transformers-assisted` where the server has no number."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("bench", help="measure systems side by side")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE.jsonl", help="Spec-Bench's or HumanEval's format"
    )
    parser.add_argument("--limit", type=options.positive, metavar="N", help="default: all prompts")
    parser.add_argument("--concurrency", type=options.positive, default=1, metavar="C")
    parser.add_argument(
        "--compare",
        type=_systems,
        default=("plain", "speculative"),
        help=f"{', '.join(SYSTEMS)}, k=N (speculative with N guesses a round)",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the report")
    parser.add_argument("--plot", type=Path, metavar="OUT.png", help="draw the report")
    parser.add_argument(
        "--record", type=Path, metavar="OUT.jsonl", help="write rounds, for outrider simulate"
    )
    options.add_sampling(parser, max_tokens=96)
    options.add_speculation(parser)
    options.add_connection(parser)
    options.add_models(parser)
    parser.set_defaults(run=run)


def _systems(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name for name in text.split(",") if name))
    unknown = [name for name in names if name not in SYSTEMS and not _FIXED.match(name)]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"choose from {', '.join(SYSTEMS)}, k=N; not {text!r}")
    return names


async def run(args: argparse.Namespace) -> int:
    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    _check(args)
    prompts = select_evenly(read_prompts(args.prompts or default_prompts()), args.limit)
    async with open_backend(args, err) as backend:
        report = await _measure(args, backend, prompts, err)
    for line in results_table(report):
        out.print(line)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    if args.plot:
        draw(report, args.plot)
    return 0


def _check(args: argparse.Namespace) -> None:
    """What can be known before minutes are spent."""
    if args.plot:
        check_plot_library()
    for flag in ("json", "plot", "record"):
        path = getattr(args, flag)
        if path is not None and not path.absolute().parent.is_dir():
            raise InvalidArgument(f"the folder of {path} does not exist", field=flag)
    if args.record and "speculative" not in args.compare:
        raise InvalidArgument("there is nothing to record without speculative", field="record")
    if "speculative" in args.compare and args.k == 0:
        raise InvalidArgument("0 is plain decoding; give 1 to 16 or leave it out", field="k")


async def _measure(
    args: argparse.Namespace, backend: Backend, prompts: Sequence[BenchPrompt], err: Console
) -> dict[str, Any]:
    served = await backend.client.list_models()
    async with contextlib.AsyncExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outrider-bench-")))
        with err.status("loading transformers") if _peers(args) else contextlib.nullcontext():
            systems = [
                await _open_system(name, args, backend, served[0], logs, stack)
                for name in args.compare
            ]
        runs = await _run(args, systems, prompts, err)
        if args.record:
            record(args.record, next(run for run in runs if run.system == "speculative"))
        peers = {s.name: s.info for s in systems if isinstance(s, TransformersSystem)}
    models = {
        "target": args.target if backend.stack else None,
        "draft": args.draft if backend.stack else None,
        "dtype": served[0].dtype,
        "served": [dataclasses.asdict(model) for model in served],
        "peers": peers,
    }
    command = shlex.join(["outrider", *sys.argv[1:]])
    settings = _settings(args, len(prompts))
    return build_report(runs, models=models, settings=settings, command=command)


def _peers(args: argparse.Namespace) -> list[str]:
    return [name for name in args.compare if name.startswith("transformers")]


async def _open_system(
    name: str,
    args: argparse.Namespace,
    backend: Backend,
    model: ModelInfo,
    logs: Path,
    stack: contextlib.AsyncExitStack,
) -> System:
    request = options.generation_options(args)
    if name == "plain":
        request = dataclasses.replace(request, num_speculative_tokens=0)
    if fixed := _FIXED.match(name):
        request = dataclasses.replace(request, num_speculative_tokens=int(fixed[1]))
    if not name.startswith("transformers"):
        recorded = args.record is not None and name == "speculative"
        request = dataclasses.replace(request, report_rounds=recorded)
        return OutriderSystem(name, backend.client, request)
    command = [sys.executable, "-m", "outrider.bench.transformers_peer", "--model", args.target]
    command += ["--dtype", model.dtype.partition("+")[0], "--threads", str(args.threads)]
    if name == "transformers-assisted":
        command += ["--assistant", args.draft]
        command += ["--k", str(args.k or model.default_num_speculative_tokens or PEER_LENGTH)]
    peer = TransformersSystem(
        name,
        backend.client,
        request,
        guarded(command),
        logs / f"{name}.log",
        eos_token_ids=model.eos_token_ids,
    )
    return await stack.enter_async_context(peer)


async def _run(
    args: argparse.Namespace,
    systems: Sequence[System],
    prompts: Sequence[BenchPrompt],
    err: Console,
) -> Any:
    columns = (
        TextColumn("{task.description:>22}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True) as progress:
        bars = {s.name: progress.add_task(f"{s.name} warm-up", total=len(prompts)) for s in systems}

        def on_done(system: str, count: int) -> None:
            progress.update(bars[system], advance=count, description=system)

        return await run_interleaved(
            systems,
            prompts,
            concurrency=args.concurrency,
            seed=args.seed or 0,
            on_done=on_done,
        )


def _settings(args: argparse.Namespace, prompts: int) -> dict[str, Any]:
    return {
        "prompts_file": str(args.prompts or default_prompts().name),
        "prompts": prompts,
        "max_tokens": args.max_tokens,
        "temperature": args.temperature or 0.0,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "seed": args.seed or 0,
        "ignore_eos": args.ignore_eos,
        "concurrency": args.concurrency,
        "k": args.k,
        "mode": args.mode or "coupled",
        "proposer": args.proposer,
        "fan_out": args.fan_out,
        "alternatives": args.alternatives,
        "dtype": args.dtype,
        "threads": args.threads,
    }


def results_table(report: dict[str, Any]) -> list[Table]:
    """A column a system, a row a number; then tok/s by category, where there are several."""
    runs, over_plain = report["runs"], report["ratios"].get("vs_plain", {})
    rows: dict[str, list[str]] = {
        "tokens/s": [_number(r["tok_s"], ".1f") for r in runs],
        "over plain": [_number(over_plain.get(r["system"]), ".2f") for r in runs],
        "first token ms, p50/p99": [_pair(r["ttft_ms"], ".0f") for r in runs],
        "per token ms, p50/p99": [_pair(r["tpot_ms"], ".1f") for r in runs],
        "acceptance rate": [_number(r["acceptance_rate"], ".1%") for r in runs],
        "mean acceptance length": [_number(r["mean_acceptance_length"], ".2f") for r in runs],
        "identical to plain": [_of(r["identical_to_plain"]) for r in runs],
        "overhead ms a round": [
            _number((r["time"] or {}).get("overhead_ms_per_round"), ".2f") for r in runs
        ],
    }
    table = _table("", runs)
    for title, values in rows.items():
        table.add_row(title, *values)
    names = list(runs[0]["per_category"])
    return [table] if len(names) < 2 else [table, _categories(runs, names)]


def _table(title: str, runs: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(f"\n{title}", no_wrap=True)
    for run in runs:
        name = run["system"].replace("-", "\n-")
        table.add_column(name if "\n" in name else f"\n{name}", justify="right", no_wrap=True)
    return table


def _categories(runs: Sequence[dict[str, Any]], names: Sequence[str]) -> Table:
    """With the controller over the best of the fixed lengths, where these were run."""
    table = _table("tokens/s by category", runs)
    shares = of_best_fixed(runs)
    if shares:
        table.add_column("of best\nfixed", justify="right", no_wrap=True)
    for name in names:
        values = [run["per_category"][name] for run in runs]
        cells = [_number(value["tok_s"], ".1f") for value in values]
        if shares:
            share = shares[name]
            cells.append("-" if share is None else f"{share['ratio']:.2f} ({share['best']})")
        table.add_row(name, *cells)
    return table


def _of(same: dict[str, int] | None) -> str:
    return f"{same['equal']}/{same['of']}" if same else "-"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _pair(spread: dict[str, float] | None, form: str) -> str:
    return "-" if spread is None else "/".join(format(spread[p], form) for p in ("p50", "p99"))
