"""A check and its outcome, as `outrider doctor` tells it."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class Status(enum.Enum):
    """How a check ended. What could not be looked at is no good news."""

    OK = "ok"
    UNKNOWN = "unknown"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """`area` is what it is about, `subject` which part; `fix` what to do unless it is ok."""

    area: str
    subject: str
    status: Status
    detail: str
    fix: str = ""


def ok(area: str, subject: str, detail: str) -> Check:
    return Check(area, subject, Status.OK, detail)


def warn(area: str, subject: str, detail: str, fix: str) -> Check:
    return Check(area, subject, Status.WARN, detail, fix)


def fail(area: str, subject: str, detail: str, fix: str) -> Check:
    return Check(area, subject, Status.FAIL, detail, fix)


def unknown(area: str, subject: str, detail: str, fix: str) -> Check:
    return Check(area, subject, Status.UNKNOWN, detail, fix)


def exit_status(checks: Iterable[Check]) -> int:
    """0: all is well; 1: something to look at, or that could not be; 2: something fails."""
    found = {check.status for check in checks}
    if Status.FAIL in found:
        return 2
    return 1 if found - {Status.OK} else 0
