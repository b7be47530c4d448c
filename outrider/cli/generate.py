"""`outrider generate`: one prompt, one answer, streamed."""

import argparse
import dataclasses
import json
import sys

from rich.console import Console

from outrider.cli import options
from outrider.cli.backend import open_backend
from outrider.cli.render import LEGEND, StreamPrinter, completion_json, stats_line
from outrider.client import Completion, Message, Prompt, collect
from outrider.errors import InvalidArgument


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("generate", help="answer one prompt")
    parser.add_argument("prompt", nargs="?", default="-", help="default, and -: read from stdin")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--chat", dest="chat", action="store_true", default=True, help="a user message (default)"
    )
    kind.add_argument("--raw", dest="chat", action="store_false", help="text without a template")
    parser.add_argument("--session", default="", metavar="ID", help="continue a kept session")
    parser.add_argument("--keep-session", action="store_true", help="so that it can be continued")
    parser.add_argument("--show-speculation", action="store_true", help="colour tokens by source")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    options.add_sampling(parser)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="may be repeated")
    parser.add_argument("--logprobs", type=int, metavar="N", help="most likely tokens to report")
    options.add_speculation(parser)
    options.add_connection(parser)
    options.add_models(parser)
    parser.set_defaults(run=run)


async def run(args: argparse.Namespace) -> int:
    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    prompt = _prompt(args)
    request = dataclasses.replace(
        options.generation_options(args),
        session_id=args.session,
        keep_session=args.keep_session,
    )
    chunks = []
    printer = StreamPrinter(out, show_speculation=args.show_speculation)
    async with open_backend(args, err, quiet=args.json) as backend:
        async for chunk in backend.client.generate(prompt, request):
            chunks.append(chunk)
            if not args.json:
                printer.show(chunk)
        completion = collect(chunks)
        if not args.json:
            printer.end()
            _print_totals(args, completion, err)
    if args.json:
        sys.stdout.write(json.dumps(completion_json(completion)) + "\n")
    return 0


def _print_totals(args: argparse.Namespace, completion: Completion, err: Console) -> None:
    if args.show_speculation:
        err.print(LEGEND)
    err.print(stats_line(completion), style="dim", soft_wrap=True)
    if args.keep_session and args.address:  # A session ends with a stack of our own.
        err.print(f"session {completion.session_id}", style="dim", soft_wrap=True)


def _prompt(args: argparse.Namespace) -> Prompt:
    text = args.prompt
    if text == "-":
        if sys.stdin.isatty():
            raise InvalidArgument('none given: outrider generate "..."', field="prompt")
        text = sys.stdin.read()
    return [Message("user", text)] if args.chat else str(text)
