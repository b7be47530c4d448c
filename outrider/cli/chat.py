"""`outrider chat`: a conversation in one session; each turn sends only the new message."""

import argparse
import asyncio
import dataclasses

from rich.console import Console
from rich.text import Text

from outrider.cli import options
from outrider.cli.backend import Backend, open_backend
from outrider.cli.render import LEGEND, StreamPrinter, stats_line
from outrider.client import GenerationChunk, GenerationOptions, Message, OutriderClient, collect
from outrider.errors import NotFound, OutriderError

HELP = "/new starts over · /quit leaves · Ctrl-C stops an answer"


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("chat", help="talk with the model")
    parser.add_argument("--session", default="", metavar="ID", help="continue a kept session")
    parser.add_argument("--show-speculation", action="store_true", help="colour tokens by source")
    options.add_sampling(parser)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="may be repeated")
    options.add_speculation(parser)
    options.add_connection(parser)
    options.add_models(parser)
    parser.set_defaults(run_sync=run_sync)


class Conversation:
    """One session that grows turn by turn; `session_id` is empty until the first answer."""

    def __init__(self, client: OutriderClient, request: GenerationOptions) -> None:
        self._client = client
        self._request = dataclasses.replace(request, keep_session=True)
        self.session_id = request.session_id

    async def say(self, text: str, printer: StreamPrinter) -> list[GenerationChunk]:
        """Stream the answer; what was said of it stays in the session when it is cut off."""
        request = dataclasses.replace(self._request, session_id=self.session_id)
        chunks = []
        async for chunk in self._client.generate([Message("user", text)], request):
            self.session_id = chunk.session_id
            chunks.append(chunk)
            printer.show(chunk)
        return chunks

    def start_over(self) -> None:
        self.session_id = ""


def run_sync(args: argparse.Namespace) -> int:
    """Lines are read outside the event loop, so that Ctrl-C means one thing at a time."""
    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    with asyncio.Runner() as runner:
        context = open_backend(args, err)
        backend = runner.run(context.__aenter__())
        try:
            _converse(args, runner, backend, out, err)
        finally:
            runner.run(context.__aexit__(None, None, None))
    return 0


def _converse(
    args: argparse.Namespace, runner: asyncio.Runner, backend: Backend, out: Console, err: Console
) -> None:
    request = dataclasses.replace(options.generation_options(args), session_id=args.session)
    conversation = Conversation(backend.client, request)
    printer = StreamPrinter(out, show_speculation=args.show_speculation)
    err.print(HELP, style="dim")
    if args.show_speculation:
        err.print(LEGEND)
    while True:
        try:
            line = out.input("[bold]>[/] ").strip()
        except EOFError:
            return
        if line == "/quit":
            return
        if line == "/new":
            conversation.start_over()
            err.print("a new session", style="dim")
        elif line.startswith("/"):
            err.print(HELP, style="dim")
        elif line:
            _answer(runner, conversation, line, printer, err)
        if backend.stack is not None and backend.stack.failure is not None:
            raise backend.stack.failure


def _answer(
    runner: asyncio.Runner,
    conversation: Conversation,
    line: str,
    printer: StreamPrinter,
    err: Console,
) -> None:
    try:
        chunks = runner.run(conversation.say(line, printer))
    except KeyboardInterrupt:
        printer.end()
        err.print("stopped", style="dim")
        return
    except OutriderError as error:
        printer.end()
        if isinstance(error, NotFound):  # It expired, or the server forgot it.
            conversation.start_over()
        err.print(Text(f"error: {error}", style="red"), soft_wrap=True)
        return
    printer.end()
    err.print(stats_line(collect(chunks)), style="dim", soft_wrap=True)
