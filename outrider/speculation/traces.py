"""Recorded rounds as a file of JSON lines: a header, then a session a line."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from outrider.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class TracedRound:
    """A round: tokens, microseconds, rows of the pass, tokens of context; `hit` as observed.

    `proposal_us` is from asking for the proposal to having it, of which the round waited for
    `draft_us`; 0: not known.
    """

    proposed: int
    accepted: int
    draft_us: int = 0
    verify_us: int = 0
    round_us: int = 0
    batch_rows: int = 0
    context_len: int = 0
    hit: bool | None = None
    proposal_us: int = 0


@dataclass(frozen=True, slots=True)
class TracedSession:
    """The rounds of one generation, in order."""

    session: str
    category: str
    rounds: tuple[TracedRound, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """Sessions in the order in which they ran.

    `cost_lines` are named lines in seconds, as {"base", "slope", "other_slope"}: `verify` over
    the rows of a pass, `draft` over the steps of a proposal; those left out are fitted.
    """

    mode: str
    cost_lines: Mapping[str, Mapping[str, float]]
    sessions: tuple[TracedSession, ...]


def write(path: Path, header: Mapping[str, Any], sessions: Iterable[TracedSession]) -> None:
    """`header` has "cost_lines" (it may be empty) and "mode"; further keys are kept."""
    with path.open("w", encoding="utf-8") as file:
        for line in ({"cost_lines": {}, "mode": "sequential", **header}, *map(asdict, sessions)):
            file.write(json.dumps(line) + "\n")


def read(path: Path) -> Trace:
    """Raises InvalidArgument, naming the line, where the file is not a trace."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"cannot read {path}: {error}", field="trace") from error
    sessions: list[TracedSession] = []
    try:
        header = json.loads(lines[0]) if lines else {}
        cost_lines = {
            name: {key: float(value) for key, value in line.items()}
            for name, line in header["cost_lines"].items()
        }
        for line in lines[1:]:
            sessions.append(_session(json.loads(line)))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        # The header is line 1.
        where = f"line {len(sessions) + 2}" if lines and sessions else "line 1 or 2"
        raise InvalidArgument(f"{where} of {path} is not of a trace: {error!r}") from error
    if not any(session.rounds for session in sessions):
        raise InvalidArgument(f"{path} holds no rounds", field="trace")
    return Trace(str(header.get("mode", "sequential")), cost_lines, tuple(sessions))


_ROUND_KEYS = frozenset(field.name for field in fields(TracedRound))


def _session(data: Mapping[str, Any]) -> TracedSession:
    rounds = tuple(
        TracedRound(**{key: value for key, value in entry.items() if key in _ROUND_KEYS})
        for entry in data["rounds"]
    )
    for entry in rounds:
        if not 0 <= entry.accepted <= entry.proposed:
            raise ValueError(f"{entry.accepted} accepted of {entry.proposed}")
    return TracedSession(str(data["session"]), str(data.get("category", "")), rounds)
