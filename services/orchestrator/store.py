"""The session store: the only home of a session's state, in Redis.

A session is two keys, `outrider:{sid}:meta` (a hash) and `outrider:{sid}:log` (token ids of 4
bytes). Every operation is one call of `session.lua`, so it happens as a whole or not at all, and
every one may be repeated after a lost reply. Writers name a `Fence`: once another owner has taken
the session, the old one's late writes are refused (docs/design.md §2.3, §6).

Errors of every operation: Unavailable (Redis away, slow, loading, read-only), ResourceExhausted
(Redis out of memory; nothing was changed), FailedPrecondition (credentials, rights, cluster),
and those named with each.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.errors import (
    AlreadyRunning,
    Fenced,
    InternalError,
    InvalidArgument,
    NotFound,
    OutriderError,
    PermissionDenied,
)
from outrider.types import Fence, FinishReason, is_session_id, new_nonce
from services.orchestrator.store_client import ScriptClient
from services.orchestrator.store_tally import StoreTally
from services.orchestrator.store_values import (
    GenerationRecord,
    StoredSession,
    pack_tokens,
    record_to_json,
    session_from_reply,
)

__all__ = ["GenerationRecord", "SessionStore", "StoredSession"]


class SessionStore:
    """Session state in Redis; made by `connect`, ended by `close`.

    `session_ttl_s`: life of a session after its last write. `linger_s`: life of one that is not
    kept, after its end. `lease_s`: how long an owner that says nothing keeps a running session.
    """

    def __init__(
        self, client: ScriptClient, *, session_ttl_s: float, linger_s: float, lease_s: float
    ) -> None:
        self.lease_s = lease_s
        self.tally = StoreTally()
        self._client = client
        self._kept_ms = _to_ms(session_ttl_s, "session_ttl_s")
        self._linger_ms = _to_ms(linger_s, "linger_s")
        self._lease_ms = _to_ms(lease_s, "lease_s")
        # A running session must not expire under its lease.
        self._running_ms = max(self._kept_ms, self._lease_ms)

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        session_ttl_s: float,
        linger_s: float = 60.0,
        lease_s: float = 30.0,
        command_timeout_s: float = 2.0,
        password_file: str | None = None,
        ca_file: str | None = None,
        cert_file: str | None = None,
        key_file: str | None = None,
    ) -> "SessionStore":
        """Connect to redis://, rediss:// (TLS; the files are PEM) or unix://, and look for life.

        The password stands in the URL or in `password_file`.
        `command_timeout_s` bounds every operation as a whole, connecting included.
        """
        times = {
            "session_ttl_s": session_ttl_s,
            "linger_s": linger_s,
            "lease_s": lease_s,
            "command_timeout_s": command_timeout_s,
        }
        for name, seconds in times.items():
            _to_ms(seconds, name)
        script = Path(__file__).with_name("session.lua").read_text(encoding="utf-8")
        client = await ScriptClient.connect(
            url,
            script,
            timeout_s=command_timeout_s,
            password_file=password_file,
            ca_file=ca_file,
            cert_file=cert_file,
            key_file=key_file,
        )
        return cls(client, session_ttl_s=session_ttl_s, linger_s=linger_s, lease_s=lease_s)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.address})"

    @property
    def address(self) -> str:
        """The URL without credentials."""
        return self._client.address

    def running(self, script: str) -> ScriptClient:
        """The store's connections for another script, until `close`."""
        return self._client.running(script)

    async def close(self) -> None:
        await self._client.close()

    async def ping(self) -> None:
        await self._client.ping()

    async def create(
        self,
        session_id: str,
        *,
        tenant: str,
        model: str,
        adapter: str,
        tokenizer_fingerprint: str,
        owner: str,
    ) -> Fence:
        """An empty session in epoch 1. Raises AlreadyRunning where the id is in use."""
        fence = Fence(session_id, 1, new_nonce())
        await self._call(
            session_id,
            "create",
            1,
            fence.owner_nonce,
            self._kept_ms,
            tenant,
            model,
            adapter,
            tokenizer_fingerprint,
            owner,
        )
        return fence

    async def take(self, session_id: str, *, tenant: str, owner: str) -> StoredSession:
        """Become the owner, in the next epoch; the former owner's writes are refused from here on.

        A generation that was running when its owner's lease ran out stays so (`running`): go on
        with `commit`, or `begin` another, which leaves it without a finish reason. A session in
        which nothing runs can be taken by anyone of its tenant until `begin`; the last one wins.

        Raises NotFound, PermissionDenied (another tenant's), AlreadyRunning (its owner is alive).
        """
        nonce = new_nonce()
        reply = await self._call(session_id, "take", tenant, nonce, owner, self._lease_ms)
        return _session(session_id, reply, nonce=nonce)

    async def get(
        self, session_id: str, *, tenant: str, include_tokens: bool = False
    ) -> StoredSession:
        """Look, and change nothing. Raises NotFound, PermissionDenied."""
        reply = await self._call(session_id, "get", tenant, int(include_tokens))
        return _session(session_id, reply, nonce=0)

    async def begin(
        self,
        fence: Fence,
        *,
        from_len: int,
        from_hash: int,
        token_ids: Sequence[int],
        new_hash: int,
        generation: GenerationRecord,
    ) -> int:
        """Append a prompt, record its generation as running, take the lease; the durable length.

        May be repeated with the same request id and content while the generation runs, by a new
        owner too. Raises Fenced, NotFound (expired or evicted), AlreadyRunning (this owner's other
        generation, or a request id that the last generation has used).
        """
        if (generation.start, generation.prompt_end) != (from_len, from_len + len(token_ids)):
            raise InvalidArgument("start and prompt_end differ from the prompt's place")
        if not generation.request_id:
            raise InvalidArgument("is empty", field="request_id")
        reply = await self._write(
            fence,
            "begin",
            self._lease_ms,
            self._running_ms,
            from_len,
            from_hash,
            pack_tokens(token_ids),
            new_hash,
            generation.request_id,
            record_to_json(generation),
        )
        return int(reply[1])

    async def commit(
        self,
        fence: Fence,
        *,
        from_len: int,
        from_hash: int,
        token_ids: Sequence[int],
        new_hash: int,
    ) -> int:
        """Append tokens that follow `from_len`, renew lease and life; the durable length.

        Hashes are `outrider.types.chain_hash` of the log up to `from_len` and to the end of
        `token_ids`. Tokens that are there already are success. Raises Fenced (another owner, a
        gap, another prefix or other tokens there, no generation running; nothing was changed),
        NotFound (expired or evicted).
        """
        reply = await self._write(
            fence,
            "commit",
            self._lease_ms,
            self._running_ms,
            from_len,
            from_hash,
            pack_tokens(token_ids),
            new_hash,
        )
        return int(reply[1])

    async def renew(self, fence: Fence) -> None:
        """Renew the session's life, and the lease where a generation runs: Fenced, NotFound."""
        await self._write(fence, "renew", self._lease_ms, self._running_ms)

    async def finish(self, fence: Fence, *, finish_reason: FinishReason | None, keep: bool) -> None:
        """End the running generation; None: it was cut off. Raises Fenced, NotFound.

        The session lives on for session_ttl_s if kept, else for linger_s. Works with full memory.
        """
        ttl_ms = self._kept_ms if keep else self._linger_ms
        await self._write(fence, "finish", ttl_ms, finish_reason.value if finish_reason else "")

    async def delete(self, fence: Fence) -> None:
        """Remove every key of the session, now; success where none is left. Raises Fenced."""
        await self._write(fence, "delete")

    async def _write(self, fence: Fence, operation: str, *args: str | bytes | int) -> list[Any]:
        return await self._call(fence.session_id, operation, fence.epoch, fence.owner_nonce, *args)

    async def _call(self, session_id: str, operation: str, *args: str | bytes | int) -> list[Any]:
        with self.tally.operation(operation):
            reply = await self._client.call(_keys(session_id), (operation, *args))
            if reply[0] != b"ok":
                raise _refusal(session_id, *reply)
        return reply


def _keys(session_id: str) -> tuple[str, str]:
    if not is_session_id(session_id):
        raise InvalidArgument("is not 22 characters of [A-Za-z0-9_-]", field="session_id")
    return f"outrider:{{{session_id}}}:meta", f"outrider:{{{session_id}}}:log"


def _session(session_id: str, reply: list[Any], *, nonce: int) -> StoredSession:
    _, flat, log, ttl_ms, now_ms = reply
    return session_from_reply(session_id, flat, log, int(ttl_ms), int(now_ms), nonce=nonce)


def _refusal(session_id: str, status: bytes, *detail: Any) -> OutriderError:
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
        case b"running", 0:
            return AlreadyRunning(f"a generation of {session} is running; finish it first")
        case b"running", int(lease_ms):
            return AlreadyRunning(
                f"a generation of {session} is running; wait for its end, or "
                f"{lease_ms / 1000:.1f} s for the lease of its owner to run out"
            )
        case b"fenced", b"owner", epoch:
            return Fenced(f"{session} has another owner, of epoch {epoch}")
        case b"fenced", b"gap", length:
            return Fenced(f"{session} ends at {length}, elsewhere than these tokens begin")
        case b"fenced", b"prefix", length:
            return Fenced(f"the log of {session} has another prefix hash; its length is {length}")
        case b"fenced", b"tokens", length:
            return Fenced(f"the log of {session} has other tokens there; its length is {length}")
        case b"fenced", b"idle", length:
            return Fenced(f"no generation of {session} is running; it ended at {length}")
    return InternalError(f"the session store answered {status!r}")


def _to_ms(seconds: float, field: str) -> int:
    if not 0.001 <= seconds <= 1e9:
        raise InvalidArgument(f"is {seconds} s; allowed are 0.001 to 1e9", field=field)
    return round(seconds * 1000)
