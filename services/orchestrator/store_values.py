"""What the session store holds, as frozen values, and their form in Redis."""

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from outrider.errors import FailedPrecondition, InvalidArgument
from outrider.types import (
    Durability,
    Fence,
    FinishReason,
    SamplingParams,
    SessionState,
    VerificationMode,
)

RECORD_VERSION = 1
"""Raised by what a reader must know to continue a generation as it was begun; what it may do
without is added as it is."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a generation ended; the last two as in GenerateResponse."""

    finish_reason: FinishReason
    matched_stop: str = ""
    cut_text: str = ""


@dataclass(frozen=True, slots=True)
class GenerationRecord:
    """One generation of a session: all that another orchestrator needs to continue it.

    `start` and `prompt_end` are lengths of the log in tokens. `epoch` is the one it was begun in.
    What the speculation options mean is told by `GenerationPlan`. `outcome` is None while it runs
    and when it was cut off; the store keeps it apart and ignores it in `begin`.
    """

    request_id: str
    start: int
    prompt_end: int
    sampling: SamplingParams
    max_tokens: int
    mode: VerificationMode = VerificationMode.COUPLED
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False
    eos_ids: tuple[int, ...] = ()
    context_length: int = 0
    logprobs: int | None = None
    keep: bool = False
    resumable: bool = False
    durability: Durability = Durability.REQUIRE
    idempotency_key: str = ""
    epoch: int = 1
    num_speculative_tokens: int | None = None
    max_speculative_tokens: int | None = None
    proposer: str = ""
    fan_out: int | None = None
    alternatives: int | None = None
    report_rounds: bool = False
    engine_versions: Mapping[str, str] = field(default_factory=dict)
    outcome: Outcome | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outcome.finish_reason if self.outcome else None


@dataclass(frozen=True, slots=True)
class StoredSession:
    """A session as Redis has it; times by the clock of Redis.

    `fence` is what its owner writes with; from `get` its nonce is 0, which no owner has.
    `running` is the request id of the generation that runs, or was running when its owner died;
    `lease_s` is how long its owner still has. `token_ids` has `durable_len` ids, or none where
    they were not asked for; likewise `notes`, on the tokens of the last generation. `prefix_hash`
    is the chained hash at `durable_len`. `progress` is what was given with the last commit,
    `elapsed_s` the age of the last generation, and `time_left_s` its request's.
    """

    fence: Fence
    tenant: str
    model: str
    adapter: str
    tokenizer_fingerprint: str
    owner: str
    durable_len: int
    prefix_hash: int
    generations: tuple[GenerationRecord, ...]
    running: str | None
    lease_s: float
    ttl_s: float
    token_ids: tuple[int, ...]
    notes: bytes = b""
    progress: str = ""
    age_s: float = 0.0
    elapsed_s: float = 0.0
    time_left_s: float = 0.0

    @property
    def last(self) -> GenerationRecord | None:
        return self.generations[-1] if self.generations else None

    @property
    def state(self) -> SessionState:
        if self.running is None:
            return SessionState.IDLE
        return SessionState.RUNNING if self.lease_s > 0 else SessionState.INTERRUPTED


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """4 bytes each, little-endian."""
    ids = tuple(token_ids)
    try:
        return struct.pack(f"<{len(ids)}I", *ids)
    except struct.error:
        raise InvalidArgument("a token id is outside [0, 2^32)", field="token_ids") from None


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // 4}I", data)


def record_to_json(record: GenerationRecord) -> str:
    """The same text for equal records: a repeated `begin` is recognised by it."""
    values = asdict(record)
    del values["outcome"]
    values["mode"] = record.mode.value
    values["durability"] = record.durability.value
    values["engine_versions"] = dict(record.engine_versions)
    return _to_json({"version": RECORD_VERSION, **values})


def record_from_json(
    text: str | bytes, outcome: str | bytes | None = None, *, session_id: str = ""
) -> GenerationRecord:
    """Fields that this version does not know are left out: a newer one may have written them.

    Raises FailedPrecondition for a record of another version, and for a damaged one.
    """
    try:
        values = json.loads(text)
        version = values.get("version")
        if version != RECORD_VERSION:
            raise FailedPrecondition(
                f"session {session_id} has a generation record of version {version}, this "
                f"orchestrator knows version {RECORD_VERSION}; another release of Outrider wrote "
                "it: go on with it there"
            )
        values = _known(GenerationRecord, values)
        values["sampling"] = SamplingParams(**_known(SamplingParams, values["sampling"]))
        values["mode"] = VerificationMode(values["mode"])
        values["durability"] = Durability(values["durability"])
        for name in ("stop_ids", "stop_strings", "eos_ids"):
            values[name] = tuple(values[name])
        return GenerationRecord(**values, outcome=_outcome_from_json(outcome))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FailedPrecondition(
            f"session {session_id} has a damaged generation record ({type(error).__name__}); "
            "delete the session"
        ) from error


def outcome_to_json(outcome: Outcome) -> str:
    values = asdict(outcome)
    values["finish_reason"] = outcome.finish_reason.value
    return _to_json(values)


def _outcome_from_json(text: str | bytes | None) -> Outcome | None:
    if text is None:
        return None
    values = _known(Outcome, json.loads(text))
    values["finish_reason"] = FinishReason(values["finish_reason"])
    return Outcome(**values)


def session_from_reply(
    session_id: str,
    flat: list[bytes],
    log: bytes,
    notes: bytes,
    ttl_ms: int,
    now_ms: int,
    *,
    nonce: int,
) -> StoredSession:
    """Read the meta hash (field, value, field, …), the log and its notes."""
    meta = {flat[i].decode(): flat[i + 1].decode() for i in range(0, len(flat), 2)}
    running = "running" in meta
    lease_ms = int(meta["lease_until"]) - now_ms if running else 0
    return StoredSession(
        fence=Fence(session_id, int(meta["epoch"]), nonce),
        tenant=meta["tenant"],
        model=meta["model"],
        adapter=meta["adapter"],
        tokenizer_fingerprint=meta["tokenizer"],
        owner=meta["owner"],
        durable_len=int(meta["len"]),
        prefix_hash=int(meta["hash"]),
        generations=tuple(
            record_from_json(meta[f"gen:{i}"], meta.get(f"fin:{i}"), session_id=session_id)
            for i in range(int(meta["gens"]))
        ),
        running=meta["request"] if running else None,
        lease_s=max(lease_ms, 0) / 1000,
        ttl_s=ttl_ms / 1000,
        token_ids=unpack_tokens(log),
        notes=notes,
        progress=meta.get("progress", ""),
        age_s=max(now_ms - int(meta["created"]), 0) / 1000,
        elapsed_s=max(now_ms - int(meta.get("began", now_ms)), 0) / 1000,
        time_left_s=max(int(meta.get("until", now_ms)) - now_ms, 0) / 1000,
    )


def _known(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    names = {f.name for f in fields(cls)}
    return {name: value for name, value in values.items() if name in names}


def _to_json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, sort_keys=True, separators=(",", ":"))
