"""`outrider sessions`: the caller's live sessions listed, shown, exported, deleted, purged."""

import argparse
import dataclasses
import enum
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from outrider.cli import options
from outrider.cli.backend import connect
from outrider.cli.render import printable
from outrider.client import OutriderClient, Session, SessionSummary
from outrider.errors import InvalidArgument

EXPORT_VERSION = 1
_PAGE = 500


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("sessions", help="list, show, export and delete sessions")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def add(name: str, run: Callable[..., Awaitable[int]], text: str) -> argparse.ArgumentParser:
        action = actions.add_parser(name, help=text)
        options.add_connection(action, required=True)
        action.set_defaults(run=run)
        return action

    action = add("list", run_list, "your live sessions: running, interrupted, kept")
    action.add_argument(
        "--limit", type=options.positive, metavar="N", help="sessions at most; default: all"
    )
    action.add_argument("--json", action="store_true", help="print a JSON array")
    action = add("show", run_show, "one session: what it was asked, how it ended")
    action.add_argument("session", metavar="ID")
    action.add_argument("--text", action="store_true", help="what was said, too")
    action = add("export", run_export, "a session's log as JSON: token ids, text, parameters")
    action.add_argument("session", metavar="ID")
    action.add_argument("--output", type=Path, metavar="FILE", help="default: stdout")
    action = add("delete", run_delete, "remove sessions, running ones too, from every tier")
    action.add_argument("sessions", nargs="+", metavar="ID")
    action = add(
        "purge", run_purge, "remove all that is kept of you: your live sessions, your KV blocks"
    )
    action.add_argument("--yes", action="store_true", help="really; running sessions end too")


async def run_list(args: argparse.Namespace) -> int:
    async with await connect(args) as client:
        found, total = await _all(client, args.limit)
    if args.json:
        sys.stdout.write(json.dumps([plain(summary) for summary in found]) + "\n")
        return 0
    out = Console(highlight=False)
    if found:
        for line in _table(found):
            out.print(Text(line), soft_wrap=True)
    if len(found) < total:
        out.print(f"{len(found)} of {total}", style="dim")
    elif not found:
        out.print("no live sessions", style="dim")
    return 0


async def _all(client: OutriderClient, limit: int | None) -> tuple[list[SessionSummary], int]:
    """Page by page, and how many there are."""
    found: list[SessionSummary] = []
    token = ""
    while True:
        wanted = _PAGE if limit is None else min(_PAGE, limit - len(found))
        page = await client.list_sessions(page_size=wanted, page_token=token)
        found += page.sessions
        token = page.next_page_token
        if not token or (limit is not None and len(found) >= limit):
            return found, max(page.total, len(found))


def _table(found: list[SessionSummary]) -> list[str]:
    """Lines of aligned columns. Not rich's: it would cut ids to fit the width of a terminal."""
    rows = [("session", "state", "model", "tokens", "turns", "age", "expires in", "request")]
    rows += [
        (
            one.session_id,
            one.state.value,
            one.model,
            str(one.length),
            str(one.num_generations),
            _time(one.age_seconds),
            _time(one.ttl_seconds),
            one.request_id,
        )
        for one in found
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)) for row in rows)
    return [printable(line.rstrip()) for line in lines]


async def run_show(args: argparse.Namespace) -> int:
    async with await connect(args) as client:
        session = await client.get_session(args.session, include_text=args.text)
    out = Console(highlight=False)
    for name, value in (
        ("session", session.session_id),
        ("state", session.state.value),
        ("model", session.model),
        ("tokens", session.length),
        ("age", _time(session.age_seconds)),
        ("expires in", _time(session.ttl_seconds)),
        ("owner", f"{session.owner}, epoch {session.epoch}"),
    ):
        out.print(Text(f"{name:<12}{value}"), soft_wrap=True)
    for number, turn in enumerate(session.generations, 1):
        ended = turn.finish_reason.value if turn.finish_reason else "not finished"
        line = (
            f"turn {number:<7}{turn.request_id}: prompt {turn.start} to {turn.prompt_end}, "
            f"{turn.mode.value}, temperature {turn.sampling.temperature:g}, seed {turn.seed}, "
            f"{ended}"
        )
        out.print(Text(printable(line)), soft_wrap=True)
        if args.text:
            out.print(Text(printable(turn.text)), soft_wrap=True)
    return 0


async def run_export(args: argparse.Namespace) -> int:
    async with await connect(args) as client:
        session = await client.get_session(args.session, include_tokens=True, include_text=True)
    text = json.dumps(export(session), indent=1, ensure_ascii=False) + "\n"
    if args.output:
        args.output.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    return 0


async def run_delete(args: argparse.Namespace) -> int:
    out = Console(highlight=False)
    async with await connect(args) as client:
        for session_id in args.sessions:
            await client.delete_session(session_id)
            out.print(f"deleted {session_id}", soft_wrap=True)
    return 0


async def run_purge(args: argparse.Namespace) -> int:
    out = Console(highlight=False)
    async with await connect(args) as client:
        if not args.yes:
            total = (await client.list_sessions(page_size=1)).total
            raise InvalidArgument(
                f"would remove {total} live sessions and all KV blocks of yours; say --yes",
                field="purge",
            )
        purged = await client.purge_sessions()
    out.print(f"removed {purged.sessions} sessions and {purged.kv_blocks} KV blocks")
    return 0


def export(session: Session) -> dict[str, Any]:
    """A session's log and what made it, as data that JSON can hold."""
    return {"outrider_session": EXPORT_VERSION, **plain(session)}


def plain(value: Any) -> Any:
    """Dataclasses as objects, enums by value, tuples as arrays."""
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


def _time(seconds: int) -> str:
    return str(timedelta(seconds=seconds))
