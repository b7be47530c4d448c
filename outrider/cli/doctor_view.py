"""The checks of `outrider doctor` as a table, and as JSON."""

import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider import __version__
from outrider.cli.doctor_values import Check, Status, exit_status
from outrider.cli.render import printable

_STYLES = {
    Status.OK: "green",
    Status.UNKNOWN: "magenta",
    Status.WARN: "yellow",
    Status.FAIL: "bold red",
}
_NAMES = {0: "all is well", 1: "worth a look", 2: "needs mending"}


def show(checks: Sequence[Check], console: Console) -> None:
    """A row a check, and in the end how many ended how."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("", "about", "part", "found, and what to do"):
        table.add_column(column, overflow="fold")
    order = list(Status)  # What needs mending stands last, where one looks first.
    for check in sorted(checks, key=lambda check: order.index(check.status)):
        told = Text(printable(check.detail))
        if check.fix:
            told.append(f"\n→ {printable(check.fix)}", style="bold")
        status = Text(check.status.value, style=_STYLES[check.status])
        table.add_row(status, check.area, Text(printable(check.subject)), told)
    console.print(table)
    counts = [
        f"{number} {status.value}"
        for status in Status
        if (number := sum(check.status is status for check in checks))
    ]
    console.print(f"{', '.join(counts)}: {_NAMES[exit_status(checks)]}")


def as_json(checks: Sequence[Check]) -> str:
    """One object: the exit status, and every check."""
    rows = [
        {
            "area": check.area,
            "subject": check.subject,
            "status": check.status.value,
            "detail": check.detail,
            "fix": check.fix,
        }
        for check in checks
    ]
    return json.dumps(
        {"version": __version__, "exit_status": exit_status(checks), "checks": rows}, indent=1
    )
