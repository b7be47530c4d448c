"""From a GenerateRequest to checked values; everything wrong with it is said here."""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.errors import InvalidArgument, Unsupported
from outrider.types import (
    MAX_FAN_OUT,
    MAX_LOGPROBS,
    MAX_SPECULATIVE_TOKENS,
    Durability,
    GenerationSpec,
    SamplingParams,
    VerificationMode,
    is_session_id,
    new_nonce,
    new_session_id,
)
from outrider.v1 import generation_pb2
from outrider.wire import (
    check_alternatives,
    check_token_ids,
    durability_from_proto,
    mode_from_proto,
    require,
    sampling_from_proto,
)
from services.orchestrator.models import ServedModel
from services.orchestrator.proposers import PROPOSER_NAMES
from services.orchestrator.stopping import StopRules

DEFAULT_MAX_TOKENS = 512
MAX_TEXT_BYTES = 1 << 20
MAX_MESSAGES = 1024
MAX_PARTS = 1024
_MAX_ID_BYTES = 128


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """A checked request on its session: what to append, how to sample, when to stop."""

    request_id: str
    session_id: str
    continues: bool
    keep: bool
    prompt_ids: tuple[int, ...]
    prompt_len: int
    """Length of the log with the prompt."""
    sampling: SamplingParams
    mode: VerificationMode
    rules: StopRules
    num_speculative_tokens: int | None
    """None: the controller chooses, at most `max_speculative_tokens` (None: the server's)."""
    max_speculative_tokens: int | None
    proposer: str
    fan_out: int | None
    """None: where it pays, as many as the server's default."""
    alternatives: int | None
    """None: the server's default."""
    report_rounds: bool
    logprobs: int | None
    durability: Durability = Durability.REQUIRE
    resumable: bool = False
    idempotency_key: str = ""

    @property
    def stays(self) -> bool:
        """The session outlives a generation that is cut off."""
        return self.keep or self.continues

    @property
    def spec(self) -> GenerationSpec:
        """What the workers need to know."""
        stops = set(self.rules.stop_token_ids)
        if not self.rules.ignore_eos:
            stops |= self.rules.eos_token_ids
        return GenerationSpec(
            sampling=self.sampling,
            mode=self.mode,
            prompt_len=self.prompt_len,
            min_tokens=self.rules.min_tokens,
            stop_ids=tuple(sorted(stops)) if self.rules.min_tokens else (),
            logprobs=self.logprobs,
        )


@dataclass(frozen=True, slots=True)
class Defaults:
    """What holds where a request says nothing."""

    num_speculative_tokens: int | None
    proposer: str
    durability: Durability = Durability.REQUIRE


def check_ids(request: generation_pb2.GenerateRequest) -> None:
    """What can be checked before the session is known."""
    if request.session_id:
        require(
            is_session_id(request.session_id),
            "is not 22 characters of [A-Za-z0-9_-]",
            "session_id",
        )
    check_length(request.request_id, "request_id")
    check_length(request.idempotency_key, "idempotency_key")
    if request.adapter:
        raise Unsupported(f"adapter {request.adapter!r}: no adapters are served", field="adapter")


def check_length(text: str, field: str) -> None:
    require(len(text.encode()) <= _MAX_ID_BYTES, f"is longer than {_MAX_ID_BYTES} bytes", field)


def session_id_for(tenant: str, idempotency_key: str) -> str:
    """The id of a new session: drawn, or for a request with a key one that it gets again, at any
    orchestrator."""
    if not idempotency_key:
        return new_session_id()
    digest = hashlib.blake2b(f"{tenant}\0{idempotency_key}".encode(), digest_size=16).digest()
    text = base64.urlsafe_b64encode(digest).decode().rstrip("=")
    return "_" + text[1:] if text.startswith("-") else text


def plan_generation(
    request: generation_pb2.GenerateRequest,
    model: ServedModel,
    defaults: Defaults,
    *,
    session_id: str,
    log_len: int,
    last_token: int | None,
) -> GenerationPlan:
    """Check a request against its model and its session's log (empty for a new session, which is to
    have this id).

    Raises InvalidArgument with the field's name.
    """
    room = model.context_length - 1 - log_len
    prompt_ids = tokenize_prompt(
        request.prompt, model, continues=log_len > 0, last_token=last_token, max_tokens=room
    )
    prompt_len = log_len + len(prompt_ids)
    if len(prompt_ids) > room:
        raise InvalidArgument(
            f"{prompt_len} tokens; a context of {model.context_length} takes at most "
            f"{model.context_length - 1} before generation",
            field="prompt",
        )
    logprobs = request.logprobs if request.HasField("logprobs") else None
    require(
        logprobs is None or logprobs <= MAX_LOGPROBS,
        f"{logprobs} is not in [0, {MAX_LOGPROBS}]",
        "logprobs",
    )
    options = request.speculation
    length, proposer = _speculation(options, defaults)
    plan = GenerationPlan(
        request_id=request.request_id or new_session_id(),
        session_id=session_id,
        continues=bool(request.session_id),
        keep=request.keep_session,
        prompt_ids=tuple(prompt_ids),
        prompt_len=prompt_len,
        sampling=sampling_from_proto(request.sampling, default_seed=new_nonce()),
        mode=mode_from_proto(options.mode),
        rules=_stop_rules(request.stop, model, prompt_len),
        num_speculative_tokens=length,
        max_speculative_tokens=(
            options.max_speculative_tokens if options.HasField("max_speculative_tokens") else None
        ),
        proposer=proposer,
        fan_out=options.fan_out if options.HasField("fan_out") else None,
        alternatives=options.alternatives if options.HasField("alternatives") else None,
        report_rounds=options.report_rounds,
        logprobs=logprobs,
        durability=durability_from_proto(request.durability, defaults.durability),
        resumable=request.resumable,
        idempotency_key=request.idempotency_key,
    )
    if plan.alternatives and plan.spec.uses_distributions:
        raise Unsupported(
            "alternatives are verified at temperature 0 and in coupled mode",
            field="speculation.alternatives",
        )
    return plan


def tokenize_prompt(
    parts: Sequence[generation_pb2.PromptPart],
    model: ServedModel,
    *,
    continues: bool,
    last_token: int | None = None,
    max_tokens: int | None = None,
) -> list[int]:
    """Token ids that a prompt appends to the log; not all of them where they are more than
    `max_tokens`. For a thread: a megabyte takes a second."""
    require(len(parts) > 0, "is empty; give at least one part", "prompt")
    require(len(parts) <= MAX_PARTS, f"{len(parts)} parts; at most {MAX_PARTS}", "prompt")
    kinds = [part.WhichOneof("part") for part in parts]
    if "chat" in kinds:
        require(len(parts) == 1, "chat must be the only part of its prompt", "prompt")
        token_ids = _render(parts[0].chat, model, continues, last_token)
    else:
        token_ids = []
        for part, kind in zip(parts, kinds, strict=True):
            if max_tokens is not None and len(token_ids) > max_tokens:
                break
            is_start = not continues and not token_ids
            token_ids += _part_ids(part, kind, model, is_start=is_start)
    require(bool(token_ids), "holds no token", "prompt")
    return token_ids


def _part_ids(
    part: generation_pb2.PromptPart, kind: str | None, model: ServedModel, *, is_start: bool
) -> list[int]:
    if kind == "text":
        _check_text(part.text, "prompt.text")
        return model.tokenizer.encode(part.text, add_special_tokens=is_start)
    if kind == "tokens":
        require(bool(part.tokens.ids), "is empty", "prompt.tokens")
        check_token_ids(part.tokens.ids, model.vocab_size, "prompt.tokens")
        return list(part.tokens.ids)
    raise InvalidArgument("a part must be text, tokens or chat", field="prompt")


def _render(
    chat: generation_pb2.ChatMessages,
    model: ServedModel,
    continues: bool,
    last_token: int | None,
) -> list[int]:
    require(
        1 <= len(chat.messages) <= MAX_MESSAGES,
        f"{len(chat.messages)} messages; 1 to {MAX_MESSAGES} are allowed",
        "prompt.chat",
    )
    for message in chat.messages:
        require(1 <= len(message.role.encode()) <= 32, "takes 1 to 32 bytes", "prompt.chat.role")
        _check_text(message.content, "prompt.chat.content")
    messages = [(message.role, message.content) for message in chat.messages]
    if continues:
        return model.tokenizer.render_continuation(messages, last_token)
    return model.tokenizer.render_chat(messages)


def _check_text(text: str, field: str) -> None:
    require(len(text.encode()) <= MAX_TEXT_BYTES, f"is longer than {MAX_TEXT_BYTES} bytes", field)


def _speculation(
    options: generation_pb2.SpeculationOptions, defaults: Defaults
) -> tuple[int | None, str]:
    length = (
        options.num_speculative_tokens
        if options.HasField("num_speculative_tokens")
        else defaults.num_speculative_tokens
    )
    for name, value in (
        ("num_speculative_tokens", length or 0),
        ("max_speculative_tokens", options.max_speculative_tokens),
    ):
        require(
            value <= MAX_SPECULATIVE_TOKENS,
            f"{value} is not in [0, {MAX_SPECULATIVE_TOKENS}]",
            f"speculation.{name}",
        )
    require(
        options.fan_out <= MAX_FAN_OUT,
        f"{options.fan_out} is not in [0, {MAX_FAN_OUT}]",
        "speculation.fan_out",
    )
    check_alternatives(options.alternatives, "speculation.alternatives")
    proposer = options.proposer or defaults.proposer
    require(
        proposer in PROPOSER_NAMES,
        f"{proposer!r} is not one of {', '.join(PROPOSER_NAMES)}",
        "speculation.proposer",
    )
    return length, proposer


def _stop_rules(
    stop: generation_pb2.StopCriteria, model: ServedModel, prompt_len: int
) -> StopRules:
    room = model.context_length - prompt_len
    max_tokens = stop.max_tokens if stop.HasField("max_tokens") else min(DEFAULT_MAX_TOKENS, room)
    check_token_ids(stop.stop_token_ids, model.vocab_size, "stop.stop_token_ids")
    return StopRules(
        max_tokens=max_tokens,
        context_length=model.context_length,
        eos_token_ids=frozenset(model.info.eos_token_ids),
        stop_token_ids=frozenset(stop.stop_token_ids),
        stop_strings=tuple(stop.stop_strings),
        min_tokens=stop.min_tokens,
        ignore_eos=stop.ignore_eos,
    )
