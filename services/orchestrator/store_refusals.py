"""Why the store's script did not do what it was asked, as errors that say what to do."""

from typing import Any

from outrider.errors import (
    AlreadyRunning,
    DataLoss,
    FailedPrecondition,
    Fenced,
    InternalError,
    NotFound,
    OutriderError,
    PermissionDenied,
)


def refusal(session_id: str, status: bytes, *detail: Any) -> OutriderError:
    """The error that a status of `session.lua` stands for."""
    session = f"session {session_id}"
    match status, *detail:
        case b"not_found", *_:
            return NotFound(f"{session} does not exist; it expired, was deleted or evicted")
        case b"denied", *_:
            return PermissionDenied(f"{session} belongs to another caller")
        case b"exists", *_:
            return AlreadyRunning(f"{session} exists already; draw a new id")
        case b"used", *_:
            return AlreadyRunning(
                f"the last generation of {session} has this request id; draw a new one",
                field="request_id",
            )
        case b"other_request", *_:
            return FailedPrecondition(
                f"the last generation of {session} is not this request's", field="request_id"
            )
        case b"cut_off", *_:
            return FailedPrecondition(
                f"the last generation of {session} was cut off and given up; begin another"
            )
        case b"lost", told:
            return DataLoss(
                f"{session} has {told} tokens of this generation, fewer than were told: the "
                "session store has lost the rest",
                field="offset",
            )
        case b"notes", width:
            return InternalError(f"each token needs {width} bytes of notes")
        case b"running", 0:
            return AlreadyRunning(f"a generation of {session} is running; finish it first")
        case b"running", int(lease_ms):
            return AlreadyRunning(
                f"a generation of {session} is running; wait for its end, or "
                f"{lease_ms / 1000:.1f} s for the lease of its owner to run out"
            )
        case b"fenced", b"owner", epoch:
            return Fenced(f"{session} has another owner, of epoch {epoch}")
        case b"fenced", b"gap", length, known:  # Its owner, who was told that they are stored.
            return DataLoss(
                f"{session} has {length} of the {known} tokens that were stored: the session store "
                "has lost the rest, as in a failover to a replica that lagged"
            )
        case b"fenced", b"gap", length:
            return Fenced(f"{session} ends at {length}, elsewhere than these tokens begin")
        case b"fenced", b"prefix", length:
            return Fenced(f"the log of {session} has another prefix hash; its length is {length}")
        case b"fenced", b"tokens", length:
            return Fenced(f"the log of {session} has other tokens there; its length is {length}")
        case b"fenced", b"idle", length:
            return Fenced(f"no generation of {session} is running; it ended at {length}")
    return InternalError(f"the session store answered {status!r}")
