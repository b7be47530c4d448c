"""Which live sessions a caller has: a sorted set for each, by when its members expire.

Live is what runs, waits to be resumed, or is kept; what has ended and only lingers is not. The set
is no part of a session: it lies in a slot of its own, and is brought up to date beside the
session's keys, at begin, with each renewal of the lease, at the end. So it may name a session that
is gone, until the time it gave itself is over, and is to be checked against the session.
"""

import hashlib
from pathlib import Path
from typing import Any

from outrider.errors import InternalError, ResourceExhausted
from services.orchestrator.store_client import ScriptClient
from services.orchestrator.store_tally import StoreTally


class SessionIndex:
    """The index of all callers; Redis's errors as in `SessionStore`."""

    def __init__(self, client: ScriptClient, tally: StoreTally) -> None:
        script = Path(__file__).with_name("index.lua").read_text(encoding="utf-8")
        self._client = client.sibling(script)
        self._tally = tally

    async def reserve(self, tenant: str, session_id: str, *, ttl_s: float, limit: int) -> bool:
        """Count a session, which is to be new; whether it is. `limit` 0: there is none. Raises
        ResourceExhausted above it."""
        reply = await self._call(tenant, "reserve", session_id, _ms(ttl_s), limit)
        if reply[0] == b"full":
            raise ResourceExhausted(
                f"you have {reply[1]} live sessions; at most {limit} are allowed at once "
                "(max_sessions_per_caller): end, delete or let expire some of them"
            )
        return bool(reply[1])

    async def touch(self, tenant: str, session_id: str, *, ttl_s: float) -> None:
        """The session goes on to live."""
        await self._call(tenant, "touch", session_id, _ms(ttl_s))

    async def remove(self, tenant: str, *session_ids: str) -> None:
        if session_ids:
            await self._call(tenant, "remove", *session_ids)

    async def members(self, tenant: str) -> list[str]:
        """Ids of all live sessions, sorted; at most as many as the limit lets be."""
        reply = await self._call(tenant, "list")
        return sorted(session_id.decode() for session_id in reply[1])

    async def _call(self, tenant: str, operation: str, *args: str | int) -> list[Any]:
        with self._tally.operation(f"index_{operation}"):
            reply = await self._client.call((index_key(tenant),), (operation, *args))
            if reply[0] not in (b"ok", b"full"):
                raise InternalError(f"the session index answered {reply[0]!r}")
        return reply


def index_key(tenant: str) -> str:
    """A tenant may have any characters in its name, a hash has not."""
    digest = hashlib.blake2b(tenant.encode(), digest_size=16).hexdigest()
    return f"outrider:sessions:{{{digest}}}"


def _ms(seconds: float) -> int:
    return max(round(seconds * 1000), 1)
