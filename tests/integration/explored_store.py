"""A session's keys as a value, and what the real script makes of them on a real server.

An exploration comes to the same contents of the store by many ways; the server is asked once what
the script does with each.
"""

from dataclasses import dataclass
from typing import Any

from redis import Redis

from outrider.types import chain_hash
from services.orchestrator.store_values import pack_tokens, unpack_tokens

KEYS = tuple(f"outrider:{{{'e' * 22}}}:{part}" for part in ("meta", "log", "notes"))
PROMPT = (7,)
TIMES = ("lease_until", "created", "began", "until")
"""Fields of the session that are as of now; nothing here depends on them."""


class Broken(AssertionError):
    """An invariant that does not hold, and what led there."""


@dataclass(frozen=True, eq=False)
class Stored:
    """The session's keys; there is one object for each content."""

    meta: dict[str, str]
    log: bytes
    notes: bytes
    tokens: tuple[int, ...]
    owner: tuple[int, str]


class ExploredStore:
    """The script, asked what it does in any state of the store."""

    def __init__(self, redis: Redis, script: str) -> None:
        self.redis = redis
        self.calls = 0
        self._sha = str(redis.script_load(script))
        self._known: dict[tuple[Any, ...], tuple[list[Any], Stored]] = {}
        self._contents: dict[tuple[Any, ...], Stored] = {}

    def begun(self) -> Stored:
        """A session whose generation has just begun, owned by "n0"."""
        self.redis.delete(*KEYS)
        first = (int(self._run("create", "n0", 60_000, "t", "m", "", "f", "o")[1]), "n0")
        args = (0, 0, pack_tokens(PROMPT), chain_hash(0, PROMPT), "r", "{}", "", 1, 60_000)
        assert self._run("begin", *first, 1, 60_000, *args)[0] == b"ok"
        return self._read()

    def commit(
        self, stored: Stored, fence: tuple[int, str], start: int, log: tuple[int, ...]
    ) -> tuple[list[Any], Stored]:
        """A commit of the tokens of `log`, which follows the prompt, from `start` on."""
        tokens = log[start:]
        prefix, whole = (*PROMPT, *log[:start]), (*PROMPT, *log)
        return self.ask(
            stored,
            "commit",
            *fence,
            60_000,
            len(prefix),
            chain_hash(0, prefix),
            pack_tokens(tokens),
            chain_hash(0, whole),
            bytes(len(tokens)),
            "",
        )

    def resume(self, stored: Stored, nonce: str, offset: int) -> tuple[list[Any], Stored]:
        """The generation is taken over for a client that has `offset` tokens of it."""
        return self.ask(stored, "resume", "t", nonce, "o", 60_000, "r", "", offset)

    def ask(self, stored: Stored, *args: Any) -> tuple[list[Any], Stored]:
        """What the script answers and does in this state of the store."""
        key = (stored, *args)
        if key not in self._known:
            self.calls += 1
            pipe = self.redis.pipeline(transaction=True)
            pipe.delete(*KEYS)
            pipe.hset(KEYS[0], mapping=stored.meta)
            for name, value in zip(KEYS[1:], (stored.log, stored.notes), strict=True):
                pipe.set(name, value)
            pipe.evalsha(self._sha, 3, *KEYS, *args)
            self._reads(pipe)
            *_, reply, meta, log, notes = pipe.execute()
            self._known[key] = reply, self._stored(meta, log, notes)
        return self._known[key]

    def _run(self, *args: Any) -> list[Any]:
        reply: list[Any] = self.redis.evalsha(self._sha, 3, *KEYS, *args)
        return reply

    def _read(self) -> Stored:
        pipe = self.redis.pipeline(transaction=True)
        self._reads(pipe)
        return self._stored(*pipe.execute())

    def _stored(self, meta: dict[bytes, bytes], log: bytes | None, notes: bytes | None) -> Stored:
        fields = {name.decode(): value.decode() for name, value in meta.items()}
        fields |= {name: "0" for name in TIMES if name in fields}
        if len(log or b"") % 4:
            raise Broken(f"half a token: {log!r}")
        key = (*sorted(fields.items()), log or b"", notes or b"")
        if key not in self._contents:
            owner = int(fields["epoch"]), fields["nonce"]
            tokens = unpack_tokens(log or b"")[len(PROMPT) :]
            self._contents[key] = Stored(fields, log or b"", notes or b"", tokens, owner)
        return self._contents[key]

    @staticmethod
    def _reads(pipe: Any) -> None:
        pipe.hgetall(KEYS[0])
        pipe.get(KEYS[1])
        pipe.get(KEYS[2])
