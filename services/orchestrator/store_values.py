"""What the session store holds, as frozen values, and their form in Redis."""

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from outrider.errors import InvalidArgument
from outrider.types import Fence, FinishReason, SamplingParams, VerificationMode


@dataclass(frozen=True, slots=True)
class GenerationRecord:
    """One generation of a session: all that another orchestrator needs to continue it.

    `start` and `prompt_end` are lengths of the log in tokens. `finish_reason` is None while it
    runs and when it was cut off; the store keeps it apart and ignores it in `begin`.
    """

    request_id: str
    start: int
    prompt_end: int
    sampling: SamplingParams
    mode: VerificationMode = VerificationMode.COUPLED
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    engine_versions: Mapping[str, str] = field(default_factory=dict)
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class StoredSession:
    """A session as Redis has it.

    `fence` is what its owner writes with; from `get` its nonce is 0, which no owner has.
    `running` is the request id of the generation that runs, or was running when its owner died;
    `lease_s` is how long its owner still has. `token_ids` has `durable_len` ids, or none where
    they were not asked for. `prefix_hash` is the chained hash at `durable_len`.
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
    del values["finish_reason"]
    values["mode"] = record.mode.value
    values["engine_versions"] = dict(record.engine_versions)
    return json.dumps(values, sort_keys=True, separators=(",", ":"))


def record_from_json(text: str | bytes, finish_reason: str | None = None) -> GenerationRecord:
    """Fields that this version does not know are left out: a newer one may have written them."""
    values = _known(GenerationRecord, json.loads(text))
    values["sampling"] = SamplingParams(**_known(SamplingParams, values["sampling"]))
    values["mode"] = VerificationMode(values["mode"])
    values["stop_ids"] = tuple(values.get("stop_ids", ()))
    values["stop_strings"] = tuple(values.get("stop_strings", ()))
    values["finish_reason"] = FinishReason(finish_reason) if finish_reason else None
    return GenerationRecord(**values)


def session_from_reply(
    session_id: str, flat: list[bytes], log: bytes, ttl_ms: int, now_ms: int, *, nonce: int
) -> StoredSession:
    """Read the meta hash (field, value, field, …) and the log."""
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
            record_from_json(meta[f"gen:{i}"], meta.get(f"fin:{i}"))
            for i in range(int(meta["gens"]))
        ),
        running=meta["request"] if running else None,
        lease_s=max(lease_ms, 0) / 1000,
        ttl_s=ttl_ms / 1000,
        token_ids=unpack_tokens(log),
    )


def _known(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    names = {f.name for f in fields(cls)}
    return {name: value for name, value in values.items() if name in names}
