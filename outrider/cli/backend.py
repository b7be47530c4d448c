"""The server that a subcommand talks to: the one at --address, or a stack of its own."""

import argparse
import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from rich.console import Console

from outrider.cli import options
from outrider.cli.progress import StackProgress
from outrider.cli.stack import LocalStack
from outrider.client import OutriderClient
from outrider.errors import Unavailable


@dataclass(frozen=True, slots=True)
class Backend:
    """A client, and the stack behind it when it is ours."""

    client: OutriderClient
    stack: LocalStack | None = None


@contextlib.asynccontextmanager
async def open_backend(
    args: argparse.Namespace, console: Console, *, quiet: bool = False
) -> AsyncGenerator[Backend, None]:
    """Connect; start a stack before and stop it after where no address is given."""
    if args.address:
        async with await connect(args) as client:
            yield Backend(client)
        return
    progress = StackProgress(console, quiet=quiet)
    stack = LocalStack(options.stack_config(args), on_event=progress.on_event)
    with progress:
        await stack.__aenter__()
    try:
        async with await OutriderClient.connect(
            address=stack.address, timeout_s=args.timeout
        ) as client:
            yield Backend(client, stack)
    except Unavailable as error:
        raise await _cause(stack, error) from None
    finally:
        with progress:
            await stack.__aexit__(None, None, None)


async def _cause(stack: LocalStack, error: Unavailable) -> Unavailable:
    """The death of a process when that is why a call failed; it shows a moment after the call."""
    try:
        async with asyncio.timeout(1):
            return await stack.failed()
    except TimeoutError:
        return error


async def connect(args: argparse.Namespace) -> OutriderClient:
    """A client of the servers at --address."""
    return await OutriderClient.connect(
        address=options.addresses(args), security=options.security(args), timeout_s=args.timeout
    )
