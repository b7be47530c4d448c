"""`outrider up`: the whole stack on this machine until Ctrl-C."""

import argparse
import asyncio
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from rich.console import Console

from outrider.cli import options
from outrider.cli.progress import StackProgress, services_table
from outrider.cli.stack import LocalStack, StackError


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("up", help="run store, workers and orchestrator here")
    parser.add_argument("--port", type=options.count, default=0, help="default: a free one")
    parser.add_argument("--k", type=options.count, metavar="K", help="default guesses a round")
    parser.add_argument("--proposer", default="", choices=options.PROPOSERS, help="default one")
    parser.add_argument(
        "--store-persist", type=Path, metavar="DIR", help="keep sessions on disk (append-only)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write addresses when serving")
    options.add_models(parser)
    parser.set_defaults(run=run)


async def run(args: argparse.Namespace) -> int:
    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    config = dataclasses.replace(
        options.stack_config(args),
        port=args.port,
        num_speculative_tokens=args.k,
        proposer=args.proposer,
        store_persist=args.store_persist,
    )
    progress = StackProgress(err)
    stack = LocalStack(config, on_event=progress.on_event)
    with progress:
        await stack.__aenter__()
    try:
        if args.json:
            write_atomically(args.json, json.dumps(describe(stack), indent=2) + "\n")
        out.print(services_table(stack.services))
        out.print(
            f"\nserving at {', '.join(stack.addresses)} · logs in {stack.log_dir}", soft_wrap=True
        )
        out.print(f'outrider generate --address {stack.address} "Hello"', soft_wrap=True)
        raise await stack.failed()
    except (asyncio.CancelledError, StackError):
        err.print("stopping", style="dim")
        raise
    finally:
        with progress:
            await stack.__aexit__(None, None, None)


def describe(stack: LocalStack) -> dict[str, Any]:
    """What runs where, as data."""
    return {
        "address": stack.address,
        "addresses": list(stack.addresses),
        "pid": os.getpid(),
        "store_url": stack.store_url,
        "log_dir": str(stack.log_dir),
        "services": [
            {
                "role": service.role,
                "name": service.name,
                "address": service.address,
                "pid": service.pid,
                "log": str(service.log),
                "info": dict(service.info),
            }
            for service in stack.services
        ],
    }


def write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)
