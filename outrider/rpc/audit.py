"""Who called what, and how it ended: a line of JSON a call, in a log of its own.

It names callers, sessions and requests, and never holds a prompt, a token or text.
"""

import logging
import logging.handlers
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outrider.errors import InvalidArgument
from outrider.telemetry.logs import JsonFormatter

audit_logger = logging.getLogger("outrider.audit")

OFF, REFUSED, ALL = "off", "refused", "all"
LEVELS = (OFF, REFUSED, ALL)

_REFUSALS = ("UNAUTHENTICATED", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED")
_MAX_ID_CHARS = 128
_REFUSALS_PER_S = 50.0


@dataclass(slots=True)
class CallRecord:
    """What is told of one call. The ids are those of its request, or of its first response."""

    method: str
    peer: str = ""
    tenant: str = ""
    subject: str = ""
    session_id: str = ""
    request_id: str = ""

    def saw(self, message: Any) -> None:
        """Take the ids that a request or a response names."""
        self.session_id = self.session_id or _id_in(message, "session_id")
        self.request_id = self.request_id or _id_in(message, "request_id")


class AuditLog:
    """Writes down calls: none, those that were refused, or all.

    Refused calls of those that nobody knows could come at any rate: of these, and of those over a
    quota, at most 50 a second are written; the next line says how many were not.
    """

    def __init__(self, level: str, clock: Callable[[], float] = time.monotonic) -> None:
        if level not in LEVELS:
            raise InvalidArgument(f"{level!r} is not one of {', '.join(LEVELS)}", field="audit")
        self._level = level
        self._clock = clock
        self._room, self._filled_at = _REFUSALS_PER_S, clock()
        self._suppressed = 0

    def wants(self, outcome: str) -> bool:
        return self._level == ALL or (self._level == REFUSED and outcome in _REFUSALS)

    def write(self, call: CallRecord, outcome: str, seconds: float) -> None:
        """`outcome` is the name of a gRPC status code."""
        if not self.wants(outcome) or (outcome in _REFUSALS and not self._has_room()):
            return
        told = {
            "method": call.method,
            "tenant": call.tenant,
            "subject": call.subject,
            "session_id": call.session_id,
            "request_id": call.request_id,
            "peer": call.peer,
            "outcome": outcome,
            "duration_ms": round(seconds * 1e3, 3),
        }
        if self._suppressed:
            told["suppressed"], self._suppressed = self._suppressed, 0
        audit_logger.info("call", extra=told)

    def _has_room(self) -> bool:
        now = self._clock()
        grown = self._room + (now - self._filled_at) * _REFUSALS_PER_S
        self._room, self._filled_at = min(grown, _REFUSALS_PER_S), now
        if self._room < 1:
            self._suppressed += 1
            return False
        self._room -= 1
        return True


def configure_audit(path: str) -> None:
    """Send the audit log to a file, opened anew when it has been rotated away, or to stderr."""
    try:
        handler: logging.Handler = (
            logging.handlers.WatchedFileHandler(path, encoding="utf-8")
            if path
            else logging.StreamHandler(sys.stderr)
        )
    except OSError as error:
        raise InvalidArgument(
            f"cannot write {path}: {error.strerror}", field="audit_file"
        ) from None
    handler.setFormatter(JsonFormatter())
    for old in audit_logger.handlers[:]:
        audit_logger.removeHandler(old)
        old.close()
    audit_logger.addHandler(handler)
    audit_logger.setLevel(logging.INFO)
    audit_logger.propagate = False


def _id_in(message: Any, field: str) -> str:
    value = getattr(message, field, "")
    return value[:_MAX_ID_CHARS] if isinstance(value, str) else ""
