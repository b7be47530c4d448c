"""The session store: the only home of a session's state, in Redis.

A session is three keys: `outrider:{sid}:meta` (a hash), `outrider:{sid}:log` (token ids of 4
bytes) and `outrider:{sid}:notes` (some bytes about each token of the last generation). Every
operation is one call of `session.lua`, so it happens as a whole or not at all, and every one may be
repeated after a lost reply. Writers name a `Fence`: once another owner has taken the session, the
old one's late writes are refused (docs/design.md §2.3, §6).

Errors of every operation: Unavailable (Redis away, slow, loading, read-only), ResourceExhausted
(Redis out of memory; nothing was changed), FailedPrecondition (credentials, rights, cluster),
and those named with each.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.errors import InvalidArgument
from outrider.types import Fence, FinishReason, is_session_id, new_nonce
from outrider.v1 import facts_pb2
from services.orchestrator.store_client import ScriptClient
from services.orchestrator.store_index import SessionIndex
from services.orchestrator.store_refusals import refusal
from services.orchestrator.store_tally import StoreTally
from services.orchestrator.store_values import (
    GenerationRecord,
    Outcome,
    StoredSession,
    outcome_to_json,
    pack_tokens,
    record_to_json,
    session_from_reply,
)

__all__ = ["GenerationRecord", "SessionStore", "StoredSession"]


_READING = frozenset({"get", "take", "resume"})
"""Operations whose reply may hold the whole log."""


class SessionStore:
    """Session state in Redis; made by `connect`, ended by `close`. `index` tells whose they are.

    `session_ttl_s`: life of a kept session after its last write. `linger_s`: life of one that is
    not kept, after its end. `resume_s`: likewise, after its stream broke off. `lease_s`: how long
    an owner that says nothing keeps a running session.
    """

    def __init__(
        self,
        client: ScriptClient,
        *,
        session_ttl_s: float,
        linger_s: float,
        lease_s: float,
        resume_s: float,
    ) -> None:
        self.lease_s = lease_s
        self.tally = StoreTally()
        self.index = SessionIndex(client, self.tally)
        self._client = client
        self._kept_ms = _to_ms(session_ttl_s, "session_ttl_s")
        self._linger_ms = _to_ms(linger_s, "linger_s")
        self._lease_ms = _to_ms(lease_s, "lease_s")
        self._resume_ms = _to_ms(resume_s, "resume_s")
        self.kept_s, self.resume_s = session_ttl_s, resume_s

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        session_ttl_s: float,
        linger_s: float = 60.0,
        lease_s: float = 30.0,
        resume_s: float = 30.0,
        command_timeout_s: float = 2.0,
        password_file: str | None = None,
        sentinel_password_file: str | None = None,
        ca_file: str | None = None,
        cert_file: str | None = None,
        key_file: str | None = None,
    ) -> "SessionStore":
        """Connect to redis://, rediss:// (TLS; the files are PEM) or unix://, and look for life.

        The password stands in the URL or in `password_file`; so does that of sentinels.
        `command_timeout_s` bounds every operation as a whole, connecting included.
        """
        times = {
            "session_ttl_s": session_ttl_s,
            "linger_s": linger_s,
            "lease_s": lease_s,
            "resume_s": resume_s,
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
            sentinel_password_file=sentinel_password_file,
            ca_file=ca_file,
            cert_file=cert_file,
            key_file=key_file,
        )
        return cls(
            client,
            session_ttl_s=session_ttl_s,
            linger_s=linger_s,
            lease_s=lease_s,
            resume_s=resume_s,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.address})"

    @property
    def address(self) -> str:
        """The URL without credentials."""
        return self._client.address

    def sibling(self, script: str) -> ScriptClient:
        """The store's connections for another script, until `close`."""
        return self._client.sibling(script)

    async def close(self) -> None:
        await self._client.close()

    async def ping(self) -> None:
        await self._client.ping()

    async def look(self, samples: int, timeout_s: float) -> facts_pb2.StoreFacts:
        """What the store is, and what its user may do there. Raises nothing that it may cause."""
        return await self._client.look(samples, timeout_s)

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
        """An empty session, to be begun soon. Raises AlreadyRunning where the id is in use."""
        nonce = new_nonce()
        reply = await self._call(
            session_id,
            "create",
            nonce,
            self._lease_ms + self._resume_ms,
            tenant,
            model,
            adapter,
            tokenizer_fingerprint,
            owner,
        )
        return Fence(session_id, int(reply[1]), nonce)

    async def take(
        self, session_id: str, *, tenant: str, owner: str, request_id: str = ""
    ) -> StoredSession:
        """Become the owner, in the next epoch; the former owner's writes are refused from here on.

        A generation that was running when its owner's lease ran out stays so (`running`): go on
        with `commit`, or `begin` another, which leaves it without a finish reason. Where another
        request (`request_id`) is about to begin it is given up here already: nobody can resume it
        in between. A session in which nothing runs can be taken by anyone of its tenant until
        `begin`; the last one wins.

        Raises NotFound, PermissionDenied (another tenant's), AlreadyRunning (its owner is alive).
        """
        nonce = new_nonce()
        reply = await self._call(
            session_id, "take", tenant, nonce, owner, self._lease_ms, request_id
        )
        return _session(session_id, reply, nonce=nonce)

    async def resume(
        self,
        session_id: str,
        *,
        tenant: str,
        owner: str,
        request_id: str,
        idempotency_key: str = "",
        offset: int = 0,
    ) -> StoredSession:
        """Become the owner of the running generation of this request, in the next epoch, at once;
        where it has ended, just look (`running` is None, the fence nobody's).

        Raises NotFound, PermissionDenied, FailedPrecondition (the last generation is another
        request's, has another key, or was cut off), DataLoss (it has fewer than `offset` tokens).
        """
        nonce = new_nonce()
        reply = await self._call(
            session_id,
            "resume",
            tenant,
            nonce,
            owner,
            self._lease_ms,
            request_id,
            idempotency_key,
            offset,
        )
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
        notes_width: int = 0,
        time_left_s: float = 0.0,
    ) -> int:
        """Append a prompt, record its generation as running, take the lease; the durable length.

        Each of its tokens comes with `notes_width` bytes of notes; `time_left_s` is its request's.
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
            round(self.life_s(kept=generation.keep or generation.start > 0) * 1000),
            from_len,
            from_hash,
            pack_tokens(token_ids),
            new_hash,
            generation.request_id,
            record_to_json(generation),
            generation.idempotency_key,
            notes_width,
            max(round(time_left_s * 1000), 0),
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
        notes: bytes = b"",
        progress: str = "",
    ) -> int:
        """Append tokens that follow `from_len`, renew lease and life; the durable length.

        `notes` has as many bytes a token as `begin` said; `progress` replaces the one before.
        Hashes are `outrider.types.chain_hash` of the log up to `from_len` and to the end of
        `token_ids`. Tokens that are there already are success. Raises Fenced (another owner, a
        gap, another prefix or other tokens there, no generation running; nothing was changed),
        NotFound (expired or evicted).
        """
        reply = await self._write(
            fence,
            "commit",
            self._lease_ms,
            from_len,
            from_hash,
            pack_tokens(token_ids),
            new_hash,
            notes,
            progress,
        )
        return int(reply[1])

    async def renew(self, fence: Fence) -> None:
        """Renew lease and life of a session in which a generation runs; one that is about to begin
        or has ended lives as long as it would: Fenced, NotFound."""
        await self._write(fence, "renew", self._lease_ms)

    async def detach(self, fence: Fence, *, keep: bool) -> None:
        """Let go of the running generation as it is, for whoever resumes it: Fenced, NotFound.

        It waits for session_ttl_s if the session is kept, else for resume_s.
        """
        await self._write(fence, "detach", self._kept_ms if keep else self._resume_ms)

    async def finish(
        self,
        fence: Fence,
        *,
        finish_reason: FinishReason | None,
        keep: bool,
        matched_stop: str = "",
        cut_text: str = "",
        progress: str = "",
    ) -> None:
        """End the running generation; None: it was cut off. Raises Fenced, NotFound.

        The session lives on for session_ttl_s if kept, else for linger_s. Works with full memory.
        """
        ttl_ms = self._kept_ms if keep else self._linger_ms
        outcome = Outcome(finish_reason, matched_stop, cut_text) if finish_reason else None
        text = outcome_to_json(outcome) if outcome else ""
        await self._write(fence, "finish", ttl_ms, text, progress)

    async def delete(self, fence: Fence) -> None:
        """Remove every key of the session, now; success where none is left. Raises Fenced."""
        await self._write(fence, "delete")

    async def remove(self, session_id: str, *, tenant: str) -> Fence:
        """Remove every key of the session, whoever owns it; a fence above all that anyone has had,
        to close with what is left elsewhere. Raises NotFound, PermissionDenied."""
        reply = await self._call(session_id, "remove", tenant)
        return Fence(session_id, int(reply[1]), new_nonce())

    def life_s(self, *, kept: bool) -> float:
        """How long a session lives after each write while a generation of it runs: over its lease,
        and until somebody may have resumed it where its owner has died."""
        if kept:
            return max(self._kept_ms, self._lease_ms) / 1000
        return (self._lease_ms + self._resume_ms) / 1000

    async def _write(self, fence: Fence, operation: str, *args: str | bytes | int) -> list[Any]:
        return await self._call(fence.session_id, operation, fence.epoch, fence.owner_nonce, *args)

    async def _call(self, session_id: str, operation: str, *args: str | bytes | int) -> list[Any]:
        with self.tally.operation(operation):
            ask = self._client.call_alone if operation in _READING else self._client.call
            reply = await ask(_keys(session_id), (operation, *args))
            if reply[0] != b"ok":
                raise refusal(session_id, *reply)
        return reply


def _keys(session_id: str) -> tuple[str, ...]:
    if not is_session_id(session_id):
        raise InvalidArgument("is not 22 characters of [A-Za-z0-9_-]", field="session_id")
    return tuple(f"outrider:{{{session_id}}}:{part}" for part in ("meta", "log", "notes"))


def _session(session_id: str, reply: list[Any], *, nonce: int) -> StoredSession:
    _, flat, log, notes, ttl_ms, now_ms = reply
    return session_from_reply(session_id, flat, log, notes, int(ttl_ms), int(now_ms), nonce=nonce)


def _to_ms(seconds: float, field: str) -> int:
    if not 0.001 <= seconds <= 1e9:
        raise InvalidArgument(f"is {seconds} s; allowed are 0.001 to 1e9", field=field)
    return round(seconds * 1000)
