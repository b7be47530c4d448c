"""`outrider plan`: what a pair of models would bring, from a sample of text, before deployment."""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import shlex
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from outrider import errors
from outrider.bench.machine import describe_git, describe_machine
from outrider.bench.plot import check_plot_library
from outrider.bench.prompts import BenchPrompt, default_prompts, read_prompts, select_evenly
from outrider.cli import options
from outrider.cli.process import guarded
from outrider.errors import InvalidArgument, OutriderError, Unavailable
from outrider.planner import plot
from outrider.planner.report import Question, build_report, tables
from outrider.planner.values import Measurement, Prompt, Request, read_costs
from outrider.types import MAX_SPECULATIVE_TOKENS, SamplingParams
from outrider.v1 import common_pb2
from outrider.wire import sampling_from_proto

_MAX_LINE_BYTES = 256 * 1024 * 1024
_PROMPT_FILES = (".jsonl", ".json")

_COMMAND = (sys.executable, "-m", "outrider.planner.measure")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "plan", help="what a pair of models would bring, from a sample of text"
    )
    kinds = "a hub id, a local folder, a GGUF file, or demo"
    parser.add_argument("--target", default="demo", metavar="REF", help=f"target model: {kinds}")
    parser.add_argument("--draft", default="demo", metavar="REF", help="draft model, likewise")
    parser.add_argument("--dtype", default="auto", choices=options.DTYPES, help="of both")
    parser.add_argument("--threads", type=options.count, default=0, metavar="N", help="CPU threads")
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="prompts for the target to answer (.jsonl, Spec-Bench's or HumanEval's format), or "
        "a text as it is, which tells less; default: the Spec-Bench prompts that are shipped",
    )
    parser.add_argument(
        "--limit",
        type=options.positive,
        default=24,
        metavar="N",
        help="texts, default: %(default)s",
    )
    _add_sampling(parser)
    group = parser.add_argument_group("deployment")
    group.add_argument(
        "--sessions", type=options.positive, default=1, metavar="N", help="of a target, at once"
    )
    group.add_argument("--k-max", type=options.positive, default=8, metavar="K", help="longest k")
    group.add_argument(
        "--devices",
        choices=("separate", "shared"),
        help="whether the draft has a device of its own; default: separate on GPUs, shared on CPU",
    )
    group.add_argument(
        "--costs",
        type=Path,
        metavar="FILE.json",
        help="seconds of passes and proposals, or a report with them; default: measured here",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the report")
    parser.add_argument("--plot", type=Path, metavar="OUT.png", help="draw the report")
    parser.set_defaults(run=run)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens", type=options.positive, default=64, metavar="N", help="of each answer"
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        metavar="T",
        help="beside 0, which is measured always; default: %(default)s",
    )
    group.add_argument("--top-k", type=options.count, default=0, metavar="K")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P")
    group.add_argument("--seed", type=options.count, default=0, metavar="N")
    group.add_argument("--ignore-eos", action="store_true", help="go on past the end of text")


async def run(args: argparse.Namespace) -> int:
    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    _check(args)
    costs = read_costs(args.costs) if args.costs else None
    found = await measured(request(args), err)
    question = Question(args.sessions, args.k_max, _shared(args, found))
    known = costs or found.costs
    assert known is not None
    report = build_report(found, known, question, _settings(args, found, question))
    report |= {"machine": describe_machine(), "git": describe_git()}
    report["command"] = shlex.join(["outrider", *sys.argv[1:]])
    for table in tables(report):
        out.print(table)
    out.print()
    for line in report["words"]:
        out.print(line, soft_wrap=True)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    if args.plot:
        plot.draw(report, args.plot)
    return 0


def _check(args: argparse.Namespace) -> None:
    """What can be known before minutes are spent."""
    if args.plot:
        check_plot_library()
    for flag in ("json", "plot"):
        path = getattr(args, flag)
        if path is not None and not path.absolute().parent.is_dir():
            raise InvalidArgument(f"the folder of {path} does not exist", field=flag)
    if args.k_max > MAX_SPECULATIVE_TOKENS:
        raise InvalidArgument(f"at most {MAX_SPECULATIVE_TOKENS}", field="k_max")


def request(args: argparse.Namespace) -> Request:
    """What the measuring process is to do."""
    path = args.text or default_prompts()
    is_prompts = path.suffix in _PROMPT_FILES
    prompts = select_evenly(_prompts(path), args.limit) if is_prompts else ()
    return Request(
        target=args.target,
        draft=args.draft,
        dtype=args.dtype,
        threads=args.threads,
        prompts=[Prompt(p.id, p.category, p.text, p.chat) for p in prompts],
        given="" if is_prompts else _given(path),
        limit=args.limit,
        max_tokens=args.max_tokens,
        ignore_eos=args.ignore_eos,
        sampling=_sampling(args),
        sessions=args.sessions,
        k_max=args.k_max,
        with_costs=args.costs is None,
    )


def _prompts(path: Path) -> Sequence[BenchPrompt]:
    try:
        return read_prompts(path)
    except InvalidArgument as error:
        raise InvalidArgument(error.message, field="text") from error


def _given(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"cannot read {path}: {error}", field="text") from error
    if not text.strip():
        raise InvalidArgument(f"{path} holds no text", field="text")
    return text


def _sampling(args: argparse.Namespace) -> SamplingParams:
    """Checked, and with the precision that parameters have after their way to a worker."""
    try:
        message = common_pb2.SamplingParams(
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            min_p=args.min_p,
            seed=args.seed,
        )
    except ValueError as error:
        raise InvalidArgument(f"out of range: {error}", field="sampling") from error
    return sampling_from_proto(message)


def _shared(args: argparse.Namespace, found: Measurement) -> bool:
    if args.devices:
        return bool(args.devices == "shared")
    return found.device == "CPU"


def _settings(args: argparse.Namespace, found: Measurement, question: Question) -> dict[str, Any]:
    return {
        "target": args.target,
        "draft": args.draft,
        "text": (args.text or default_prompts()).name,
        "texts": len({sample.id for sample in found.samples}),
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "seed": args.seed,
        "ignore_eos": args.ignore_eos,
        "threads": args.threads,
        "costs": str(args.costs) if args.costs else "measured",
        **dataclasses.asdict(question),
    }


async def measured(asked: Request, err: Console) -> Measurement:
    """What a process with torch finds; its errors are raised as they were there."""
    with tempfile.NamedTemporaryFile(prefix="outrider-plan-", suffix=".log") as log:
        process = await asyncio.create_subprocess_exec(
            *guarded(_COMMAND),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            limit=_MAX_LINE_BYTES,
        )
        try:
            with err.status("starting") as status:
                async for line in _lines(process, asked):
                    if "progress" in line:
                        status.update(line["progress"])
                    elif "error" in line:
                        raise _error(line["error"])
                    else:
                        return Measurement.from_json(line["result"])
            tail = Path(log.name).read_text(errors="replace").strip().splitlines()[-1:]
            raise Unavailable(f"the measuring process ended: {' '.join(tail)}")
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await process.wait()


async def _lines(
    process: asyncio.subprocess.Process, asked: Request
) -> AsyncIterator[dict[str, Any]]:
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(ConnectionError):  # Its death shows when the answer is read.
        process.stdin.write(json.dumps(dataclasses.asdict(asked)).encode())
        await process.stdin.drain()
        process.stdin.close()
    while line := await process.stdout.readline():
        yield json.loads(line)


def _error(told: dict[str, str]) -> OutriderError:
    kind = getattr(errors, told["kind"], errors.InternalError)
    error: OutriderError = kind(told["message"], field=told["field"])
    return error
