"""What the client takes and gives: frozen values, and how the chunks of a stream join."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from outrider.errors import InternalError
from outrider.types import (
    Durability,
    FinishReason,
    PositionLogprobs,
    Priority,
    SamplingParams,
    SessionState,
    SpeculationStats,
    TokenSource,
    VerificationMode,
)


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation; `role` is one that the model's chat template knows."""

    role: str
    content: str


Prompt = str | Sequence[Message] | Sequence[int]
"""Raw text, messages for the chat template, or token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """What generation.proto lets a request say, ranges as there; None leaves it to the server."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    mode: VerificationMode | None = None
    num_speculative_tokens: int | None = None
    max_speculative_tokens: int | None = None
    proposer: str = ""
    fan_out: int | None = None
    alternatives: int | None = None
    report_rounds: bool = False
    logprobs: int | None = None
    model: str = ""
    adapter: str = ""
    session_id: str = ""
    keep_session: bool = False
    request_id: str = ""
    durability: Durability | None = None
    priority: Priority | None = None


@dataclass(frozen=True, slots=True)
class TimeStats:
    """Where the time of a generation went, in microseconds; fields as in generation.proto."""

    draft_us: int = 0
    verify_us: int = 0
    draft_compute_us: int = 0
    verify_compute_us: int = 0
    first_token_us: int = 0
    total_us: int = 0
    draft_worker_us: int = 0
    verify_worker_us: int = 0
    rounds_us: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Totals of a generation; fields as in generation.proto."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    completion_tokens: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    time: TimeStats = field(default_factory=TimeStats)
    takeovers: int = 0
    tokens_sent_undurable: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """One round, and what the controller made of it; fields as in generation.proto."""

    proposed: int = 0
    accepted: int = 0
    draft_us: int = 0
    verify_us: int = 0
    round_us: int = 0
    batch_rows: int = 0
    context_len: int = 0
    hit: bool | None = None
    next_num_speculative_tokens: int = 0
    next_fan_out: int = 0
    next_proposer: str = ""
    expected_tokens_per_s: float = 0.0
    plain_tokens_per_s: float = 0.0
    inputs: Mapping[str, float] = field(default_factory=dict)
    run_ahead: bool | None = None
    proposal_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationChunk:
    """One response of a stream.

    `elapsed_s` is the time from the call to this chunk on the client's clock. `text_segments` cuts
    `text` by where its tokens came from: (characters, source), in order. The last chunk alone has
    `finish_reason`, `usage`, `cut_text` and `matched_stop`. `resumes` says how often the stream had
    broken off before it and was gone on with, `interrupted_s` how long that took in all.
    """

    session_id: str = ""
    offset: int = 0
    token_ids: tuple[int, ...] = ()
    sources: tuple[TokenSource, ...] = ()
    text: str = ""
    text_segments: tuple[tuple[int, TokenSource], ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    durable: bool = False
    seed: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    cut_text: str = ""
    matched_stop: str = ""
    rounds: tuple[RoundReport, ...] = ()
    elapsed_s: float = 0.0
    resumes: int = 0
    interrupted_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole generation. Times are seconds from the call; no tokens, no token times. `resumes` and
    `interrupted_s` as in GenerationChunk."""

    session_id: str
    token_ids: tuple[int, ...]
    sources: tuple[TokenSource, ...]
    text: str
    logprobs: tuple[PositionLogprobs, ...]
    durable: bool
    finish_reason: FinishReason
    seed: int
    usage: Usage
    cut_text: str
    matched_stop: str
    rounds: tuple[RoundReport, ...]
    ttft_s: float | None
    last_token_s: float | None
    total_s: float
    resumes: int = 0
    interrupted_s: float = 0.0

    @property
    def stats(self) -> SpeculationStats:
        return self.usage.speculation

    @property
    def tokens_per_s(self) -> float:
        return len(self.token_ids) / self.total_s if self.total_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A served model; fields as in generation.proto."""

    name: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    vocab_size: int
    context_length: int
    dtype: str
    device: str
    proposers: tuple[str, ...]
    default_num_speculative_tokens: int
    max_speculative_tokens: int
    adaptive: bool
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StopOptions:
    """When a generation was to stop; fields as in generation.proto."""

    max_tokens: int
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    ignore_eos: bool


@dataclass(frozen=True, slots=True)
class GenerationRecord:
    """One generation of a session; fields as in generation.proto. `finish_reason` is None while it
    runs or was cut off, `text` is empty unless asked for."""

    request_id: str
    start: int
    prompt_end: int
    seed: int
    finish_reason: FinishReason | None
    mode: VerificationMode
    sampling: SamplingParams
    stop: StopOptions
    logprobs: int | None
    durability: Durability
    text: str
    matched_stop: str
    cut_text: str
    engine_versions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Session:
    """A session as the server keeps it; `token_ids` only when asked for."""

    session_id: str
    model: str
    length: int
    epoch: int
    ttl_seconds: int
    token_ids: tuple[int, ...]
    generations: tuple[GenerationRecord, ...]
    state: SessionState
    owner: str
    age_seconds: int
    tokenizer_fingerprint: str


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """A session as lists have it; fields as in generation.proto."""

    session_id: str
    model: str
    length: int
    num_generations: int
    state: SessionState
    ttl_seconds: int
    age_seconds: int
    request_id: str


@dataclass(frozen=True, slots=True)
class SessionPage:
    """Some of the caller's live sessions; `next_page_token` is empty on the last page, `total`
    counts those of all pages."""

    sessions: tuple[SessionSummary, ...]
    next_page_token: str
    total: int


@dataclass(frozen=True, slots=True)
class Purged:
    """What was removed of a caller's."""

    sessions: int
    kv_blocks: int


def collect(chunks: Iterable[GenerationChunk]) -> Completion:
    """Join the chunks of one stream; InternalError where they do not make one whole."""
    seen = tuple(chunks)
    ids: list[int] = []
    for chunk in seen:
        if chunk.token_ids and chunk.offset != len(ids):
            raise InternalError(f"token {len(ids)} was due, a chunk starts at {chunk.offset}")
        if len(chunk.sources) != len(chunk.token_ids):
            raise InternalError(f"{len(chunk.token_ids)} tokens with {len(chunk.sources)} sources")
        ids.extend(chunk.token_ids)
    last = seen[-1] if seen else GenerationChunk()
    if last.finish_reason is None or last.usage is None:
        raise InternalError("the stream ended without a finish reason and usage")
    if last.usage.completion_tokens != len(ids):
        raise InternalError(f"{len(ids)} tokens came, {last.usage.completion_tokens} were counted")
    logprobs = tuple(entry for chunk in seen for entry in chunk.logprobs)
    if logprobs and len(logprobs) != len(ids):
        raise InternalError(f"{len(ids)} tokens with {len(logprobs)} log probabilities")
    times = [chunk.elapsed_s for chunk in seen if chunk.token_ids]
    return Completion(
        session_id=last.session_id,
        token_ids=tuple(ids),
        sources=tuple(source for chunk in seen for source in chunk.sources),
        text="".join(chunk.text for chunk in seen),
        logprobs=logprobs,
        durable=all(chunk.durable for chunk in seen),
        finish_reason=last.finish_reason,
        seed=last.seed,
        usage=last.usage,
        cut_text=last.cut_text,
        matched_stop=last.matched_stop,
        rounds=tuple(report for chunk in seen for report in chunk.rounds),
        ttft_s=times[0] if times else None,
        last_token_s=times[-1] if times else None,
        total_s=last.elapsed_s,
        resumes=last.resumes,
        interrupted_s=last.interrupted_s,
    )
