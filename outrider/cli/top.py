"""`outrider top`: what all parts of an Outrider do now, from their metrics."""

import argparse
import asyncio
import itertools
import json
from pathlib import Path

from rich.console import Console
from rich.live import Live

from outrider.cli import options
from outrider.cli.scrape import addresses_of, scrape_all
from outrider.cli.top_view import render, summary
from outrider.errors import InvalidArgument

_FILE_WIDTH = 180
"""Characters of a line where there is no terminal to fit."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("top", help="watch tiers, acceptance, k and hit rates live")
    parser.add_argument(
        "addresses",
        nargs="*",
        metavar="HOST:PORT",
        help="metrics endpoints of the services (their --metrics-address)",
    )
    parser.add_argument("--stack", type=Path, metavar="FILE", help="of `outrider up --json FILE`")
    parser.add_argument("--interval", type=_interval, default=2.0, metavar="SECONDS")
    parser.add_argument("--count", type=options.positive, metavar="N", help="end after N intervals")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each interval")
    parser.set_defaults(run=run)


async def run(args: argparse.Namespace) -> int:
    addresses = [*args.addresses, *(addresses_of(args.stack) if args.stack else ())]
    if not addresses:
        raise InvalidArgument("give metrics endpoints, or --stack FILE", field="addresses")
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    before = await scrape_all(addresses)
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        for number in itertools.count(1):
            await asyncio.sleep(args.interval)
            now = await scrape_all(addresses)
            if args.json:
                print(json.dumps(summary(before, now)), flush=True)
            else:
                live.update(render(summary(before, now)), refresh=True)
            if number == args.count:
                return 0
            before = now
    return 0


def _interval(text: str) -> float:
    """Seconds, a tenth at least."""
    value = float(text)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not in [0.1, 3600]")
    return value
