"""The `outrider` command.

Exit codes: 0 done, 1 an error, 2 wrong usage, 130 Ctrl-C, 143 SIGTERM (0 for `up`, which is ended
so). Of `doctor`: 0 all is well, 1 worth a look, 2 something fails.
"""

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import Coroutine, Sequence

from rich.console import Console
from rich.text import Text

from outrider import __version__, errors
from outrider.cli import chat, doctor, generate, sessions, top, up
from outrider.cli.measuring import MEASURING
from outrider.cli.progress import show_log
from outrider.cli.stack import StackError

_HINTS: dict[type[errors.OutriderError], str] = {
    StackError: "see the log lines above, or keep all logs with --log-dir DIR",
    errors.Unavailable: "is it running? start one with `outrider up`, or leave out --address",
    errors.InvalidArgument: "`outrider {command} --help` lists what is allowed",
    errors.Unauthenticated: "give a token with --token-file or a certificate with --cert-file",
    errors.NotFound: "it may have expired; sessions are kept with --keep-session",
    errors.AlreadyRunning: "wait until the session's running request has ended",
    errors.ResourceExhausted: "the server is full: try again later, or ask for fewer tokens",
    errors.DeadlineExceeded: "give it more time with --timeout SECONDS",
    errors.DataLoss: "the session store has lost it: is Redis persistent, and not evicting?",
    errors.InternalError: "a fault of Outrider's; the logs of the services say more",
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="outrider", description="Speculative decoding as a distributed service."
    )
    parser.add_argument("--version", action="version", version=f"outrider {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (up, generate, chat, sessions, *MEASURING, top, doctor):
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        if hasattr(args, "run_sync"):
            return int(args.run_sync(args))
        return asyncio.run(_until_terminated(args.run(args), 0 if args.command == "up" else 143))
    except errors.OutriderError as error:
        _report(error, args.command)
        return 1
    except OSError as error:
        _say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        return 130


async def _until_terminated(command: Coroutine[None, None, int], terminated_code: int) -> int:
    """Run the command; SIGTERM ends it as Ctrl-C does, with everything stopped, by that code."""
    task = asyncio.ensure_future(command)
    terminated = False

    def terminate() -> None:
        nonlocal terminated
        terminated = True
        task.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
    try:
        return await task
    except asyncio.CancelledError:
        if terminated:
            return terminated_code
        raise


def _report(error: errors.OutriderError, command: str) -> None:
    if isinstance(error, StackError):
        show_log(Console(stderr=True, highlight=False), error.detail)
    kinds = (kind for kind in type(error).__mro__ if kind in _HINTS)
    hint = next((_HINTS[kind] for kind in kinds), "")
    line = " ".join(str(error).split())
    _say(f"error: {line}" + (f" / {hint.format(command=command)}" if hint else ""))


def _say(line: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        Console(stderr=True, highlight=False).print(Text(line, style="red"), soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
