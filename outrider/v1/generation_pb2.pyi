from outrider.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Durability(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DURABILITY_UNSPECIFIED: _ClassVar[Durability]
    DURABILITY_REQUIRE: _ClassVar[Durability]
    DURABILITY_BEST_EFFORT: _ClassVar[Durability]

class Priority(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRIORITY_UNSPECIFIED: _ClassVar[Priority]
    PRIORITY_LOW: _ClassVar[Priority]
    PRIORITY_NORMAL: _ClassVar[Priority]
    PRIORITY_HIGH: _ClassVar[Priority]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_EOS: _ClassVar[FinishReason]
    FINISH_REASON_STOP_TOKEN: _ClassVar[FinishReason]
    FINISH_REASON_STOP_STRING: _ClassVar[FinishReason]
    FINISH_REASON_MAX_TOKENS: _ClassVar[FinishReason]
    FINISH_REASON_CONTEXT_FULL: _ClassVar[FinishReason]

class SessionState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SESSION_STATE_UNSPECIFIED: _ClassVar[SessionState]
    SESSION_STATE_RUNNING: _ClassVar[SessionState]
    SESSION_STATE_INTERRUPTED: _ClassVar[SessionState]
    SESSION_STATE_IDLE: _ClassVar[SessionState]
DURABILITY_UNSPECIFIED: Durability
DURABILITY_REQUIRE: Durability
DURABILITY_BEST_EFFORT: Durability
PRIORITY_UNSPECIFIED: Priority
PRIORITY_LOW: Priority
PRIORITY_NORMAL: Priority
PRIORITY_HIGH: Priority
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_EOS: FinishReason
FINISH_REASON_STOP_TOKEN: FinishReason
FINISH_REASON_STOP_STRING: FinishReason
FINISH_REASON_MAX_TOKENS: FinishReason
FINISH_REASON_CONTEXT_FULL: FinishReason
SESSION_STATE_UNSPECIFIED: SessionState
SESSION_STATE_RUNNING: SessionState
SESSION_STATE_INTERRUPTED: SessionState
SESSION_STATE_IDLE: SessionState

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class ChatMessages(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PromptPart(_message.Message):
    __slots__ = ("text", "tokens", "chat")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    text: str
    tokens: TokenIds
    chat: ChatMessages
    def __init__(self, text: _Optional[str] = ..., tokens: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[ChatMessages, _Mapping]] = ...) -> None: ...

class StopCriteria(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "stop_token_ids", "stop_strings", "ignore_eos")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_STRINGS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    stop_strings: _containers.RepeatedScalarFieldContainer[str]
    ignore_eos: bool
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., stop_strings: _Optional[_Iterable[str]] = ..., ignore_eos: bool = ...) -> None: ...

class SpeculationOptions(_message.Message):
    __slots__ = ("mode", "num_speculative_tokens", "proposer", "fan_out", "report_rounds", "max_speculative_tokens", "alternatives")
    MODE_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROPOSER_FIELD_NUMBER: _ClassVar[int]
    FAN_OUT_FIELD_NUMBER: _ClassVar[int]
    REPORT_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    MAX_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    mode: _common_pb2.VerificationMode
    num_speculative_tokens: int
    proposer: str
    fan_out: int
    report_rounds: bool
    max_speculative_tokens: int
    alternatives: int
    def __init__(self, mode: _Optional[_Union[_common_pb2.VerificationMode, str]] = ..., num_speculative_tokens: _Optional[int] = ..., proposer: _Optional[str] = ..., fan_out: _Optional[int] = ..., report_rounds: bool = ..., max_speculative_tokens: _Optional[int] = ..., alternatives: _Optional[int] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("session_id", "model", "adapter", "prompt", "sampling", "stop", "speculation", "logprobs", "keep_session", "request_id", "durability", "resumable", "idempotency_key", "priority")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    KEEP_SESSION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    RESUMABLE_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    model: str
    adapter: str
    prompt: _containers.RepeatedCompositeFieldContainer[PromptPart]
    sampling: _common_pb2.SamplingParams
    stop: StopCriteria
    speculation: SpeculationOptions
    logprobs: int
    keep_session: bool
    request_id: str
    durability: Durability
    resumable: bool
    idempotency_key: str
    priority: Priority
    def __init__(self, session_id: _Optional[str] = ..., model: _Optional[str] = ..., adapter: _Optional[str] = ..., prompt: _Optional[_Iterable[_Union[PromptPart, _Mapping]]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., stop: _Optional[_Union[StopCriteria, _Mapping]] = ..., speculation: _Optional[_Union[SpeculationOptions, _Mapping]] = ..., logprobs: _Optional[int] = ..., keep_session: bool = ..., request_id: _Optional[str] = ..., durability: _Optional[_Union[Durability, str]] = ..., resumable: bool = ..., idempotency_key: _Optional[str] = ..., priority: _Optional[_Union[Priority, str]] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("session_id", "request_id", "offset", "text_chars", "tokens_hash")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TEXT_CHARS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_HASH_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    request_id: str
    offset: int
    text_chars: int
    tokens_hash: int
    def __init__(self, session_id: _Optional[str] = ..., request_id: _Optional[str] = ..., offset: _Optional[int] = ..., text_chars: _Optional[int] = ..., tokens_hash: _Optional[int] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("session_id", "request_id", "idempotency_key")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    request_id: str
    idempotency_key: str
    def __init__(self, session_id: _Optional[str] = ..., request_id: _Optional[str] = ..., idempotency_key: _Optional[str] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SpeculationStats(_message.Message):
    __slots__ = ("rounds", "proposed", "accepted", "recovered", "bonus", "plain", "proposed_by_position", "accepted_by_position", "dropped_proposals", "fallback_rounds", "buffer_hits", "buffer_misses")
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    RECOVERED_FIELD_NUMBER: _ClassVar[int]
    BONUS_FIELD_NUMBER: _ClassVar[int]
    PLAIN_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_BY_POSITION_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_BY_POSITION_FIELD_NUMBER: _ClassVar[int]
    DROPPED_PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    BUFFER_HITS_FIELD_NUMBER: _ClassVar[int]
    BUFFER_MISSES_FIELD_NUMBER: _ClassVar[int]
    rounds: int
    proposed: int
    accepted: int
    recovered: int
    bonus: int
    plain: int
    proposed_by_position: _containers.RepeatedScalarFieldContainer[int]
    accepted_by_position: _containers.RepeatedScalarFieldContainer[int]
    dropped_proposals: int
    fallback_rounds: int
    buffer_hits: int
    buffer_misses: int
    def __init__(self, rounds: _Optional[int] = ..., proposed: _Optional[int] = ..., accepted: _Optional[int] = ..., recovered: _Optional[int] = ..., bonus: _Optional[int] = ..., plain: _Optional[int] = ..., proposed_by_position: _Optional[_Iterable[int]] = ..., accepted_by_position: _Optional[_Iterable[int]] = ..., dropped_proposals: _Optional[int] = ..., fallback_rounds: _Optional[int] = ..., buffer_hits: _Optional[int] = ..., buffer_misses: _Optional[int] = ...) -> None: ...

class TimeStats(_message.Message):
    __slots__ = ("draft_us", "verify_us", "draft_compute_us", "verify_compute_us", "first_token_us", "total_us", "draft_worker_us", "verify_worker_us", "rounds_us")
    DRAFT_US_FIELD_NUMBER: _ClassVar[int]
    VERIFY_US_FIELD_NUMBER: _ClassVar[int]
    DRAFT_COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    VERIFY_COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_US_FIELD_NUMBER: _ClassVar[int]
    TOTAL_US_FIELD_NUMBER: _ClassVar[int]
    DRAFT_WORKER_US_FIELD_NUMBER: _ClassVar[int]
    VERIFY_WORKER_US_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_US_FIELD_NUMBER: _ClassVar[int]
    draft_us: int
    verify_us: int
    draft_compute_us: int
    verify_compute_us: int
    first_token_us: int
    total_us: int
    draft_worker_us: int
    verify_worker_us: int
    rounds_us: int
    def __init__(self, draft_us: _Optional[int] = ..., verify_us: _Optional[int] = ..., draft_compute_us: _Optional[int] = ..., verify_compute_us: _Optional[int] = ..., first_token_us: _Optional[int] = ..., total_us: _Optional[int] = ..., draft_worker_us: _Optional[int] = ..., verify_worker_us: _Optional[int] = ..., rounds_us: _Optional[int] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_prompt_tokens", "completion_tokens", "speculation", "time", "takeovers", "tokens_sent_undurable")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    TAKEOVERS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_SENT_UNDURABLE_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    speculation: SpeculationStats
    time: TimeStats
    takeovers: int
    tokens_sent_undurable: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., speculation: _Optional[_Union[SpeculationStats, _Mapping]] = ..., time: _Optional[_Union[TimeStats, _Mapping]] = ..., takeovers: _Optional[int] = ..., tokens_sent_undurable: _Optional[int] = ...) -> None: ...

class TextSegment(_message.Message):
    __slots__ = ("length", "source")
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    length: int
    source: _common_pb2.TokenSource
    def __init__(self, length: _Optional[int] = ..., source: _Optional[_Union[_common_pb2.TokenSource, str]] = ...) -> None: ...

class RoundReport(_message.Message):
    __slots__ = ("proposed", "accepted", "draft_us", "verify_us", "round_us", "batch_rows", "context_len", "hit", "next_num_speculative_tokens", "next_fan_out", "next_proposer", "expected_tokens_per_s", "plain_tokens_per_s", "inputs", "run_ahead", "proposal_us")
    class InputsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    PROPOSED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DRAFT_US_FIELD_NUMBER: _ClassVar[int]
    VERIFY_US_FIELD_NUMBER: _ClassVar[int]
    ROUND_US_FIELD_NUMBER: _ClassVar[int]
    BATCH_ROWS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LEN_FIELD_NUMBER: _ClassVar[int]
    HIT_FIELD_NUMBER: _ClassVar[int]
    NEXT_NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FAN_OUT_FIELD_NUMBER: _ClassVar[int]
    NEXT_PROPOSER_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PLAIN_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    RUN_AHEAD_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_US_FIELD_NUMBER: _ClassVar[int]
    proposed: int
    accepted: int
    draft_us: int
    verify_us: int
    round_us: int
    batch_rows: int
    context_len: int
    hit: bool
    next_num_speculative_tokens: int
    next_fan_out: int
    next_proposer: str
    expected_tokens_per_s: float
    plain_tokens_per_s: float
    inputs: _containers.ScalarMap[str, float]
    run_ahead: bool
    proposal_us: int
    def __init__(self, proposed: _Optional[int] = ..., accepted: _Optional[int] = ..., draft_us: _Optional[int] = ..., verify_us: _Optional[int] = ..., round_us: _Optional[int] = ..., batch_rows: _Optional[int] = ..., context_len: _Optional[int] = ..., hit: bool = ..., next_num_speculative_tokens: _Optional[int] = ..., next_fan_out: _Optional[int] = ..., next_proposer: _Optional[str] = ..., expected_tokens_per_s: _Optional[float] = ..., plain_tokens_per_s: _Optional[float] = ..., inputs: _Optional[_Mapping[str, float]] = ..., run_ahead: bool = ..., proposal_us: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("session_id", "completion_index", "offset", "token_ids", "token_sources", "text", "logprobs", "durable", "finish_reason", "seed", "speculation", "usage", "cut_text", "matched_stop", "text_segments", "rounds")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_INDEX_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_SOURCES_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    CUT_TEXT_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_FIELD_NUMBER: _ClassVar[int]
    TEXT_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    completion_index: int
    offset: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    token_sources: _containers.RepeatedScalarFieldContainer[_common_pb2.TokenSource]
    text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.PositionLogprobs]
    durable: bool
    finish_reason: FinishReason
    seed: int
    speculation: SpeculationStats
    usage: Usage
    cut_text: str
    matched_stop: str
    text_segments: _containers.RepeatedCompositeFieldContainer[TextSegment]
    rounds: _containers.RepeatedCompositeFieldContainer[RoundReport]
    def __init__(self, session_id: _Optional[str] = ..., completion_index: _Optional[int] = ..., offset: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., token_sources: _Optional[_Iterable[_Union[_common_pb2.TokenSource, str]]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.PositionLogprobs, _Mapping]]] = ..., durable: bool = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., seed: _Optional[int] = ..., speculation: _Optional[_Union[SpeculationStats, _Mapping]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., cut_text: _Optional[str] = ..., matched_stop: _Optional[str] = ..., text_segments: _Optional[_Iterable[_Union[TextSegment, _Mapping]]] = ..., rounds: _Optional[_Iterable[_Union[RoundReport, _Mapping]]] = ...) -> None: ...

class GetSessionRequest(_message.Message):
    __slots__ = ("session_id", "include_tokens", "include_text")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_TEXT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    include_tokens: bool
    include_text: bool
    def __init__(self, session_id: _Optional[str] = ..., include_tokens: bool = ..., include_text: bool = ...) -> None: ...

class Generation(_message.Message):
    __slots__ = ("request_id", "start", "prompt_end", "seed", "mode", "sampling", "finish_reason", "stop", "logprobs", "durability", "text", "matched_stop", "cut_text", "engine_versions")
    class EngineVersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    PROMPT_END_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_FIELD_NUMBER: _ClassVar[int]
    CUT_TEXT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    start: int
    prompt_end: int
    seed: int
    mode: _common_pb2.VerificationMode
    sampling: _common_pb2.SamplingParams
    finish_reason: FinishReason
    stop: StopCriteria
    logprobs: int
    durability: Durability
    text: str
    matched_stop: str
    cut_text: str
    engine_versions: _containers.ScalarMap[str, str]
    def __init__(self, request_id: _Optional[str] = ..., start: _Optional[int] = ..., prompt_end: _Optional[int] = ..., seed: _Optional[int] = ..., mode: _Optional[_Union[_common_pb2.VerificationMode, str]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., stop: _Optional[_Union[StopCriteria, _Mapping]] = ..., logprobs: _Optional[int] = ..., durability: _Optional[_Union[Durability, str]] = ..., text: _Optional[str] = ..., matched_stop: _Optional[str] = ..., cut_text: _Optional[str] = ..., engine_versions: _Optional[_Mapping[str, str]] = ...) -> None: ...

class SessionSummary(_message.Message):
    __slots__ = ("session_id", "model", "length", "num_generations", "state", "ttl_seconds", "age_seconds", "request_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    model: str
    length: int
    num_generations: int
    state: SessionState
    ttl_seconds: int
    age_seconds: int
    request_id: str
    def __init__(self, session_id: _Optional[str] = ..., model: _Optional[str] = ..., length: _Optional[int] = ..., num_generations: _Optional[int] = ..., state: _Optional[_Union[SessionState, str]] = ..., ttl_seconds: _Optional[int] = ..., age_seconds: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("sessions", "next_page_token", "total")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionSummary]
    next_page_token: str
    total: int
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionSummary, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., total: _Optional[int] = ...) -> None: ...

class DeleteSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class DeleteSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PurgeSessionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PurgeSessionsResponse(_message.Message):
    __slots__ = ("sessions", "kv_blocks")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    sessions: int
    kv_blocks: int
    def __init__(self, sessions: _Optional[int] = ..., kv_blocks: _Optional[int] = ...) -> None: ...

class GetSessionResponse(_message.Message):
    __slots__ = ("session_id", "model", "length", "epoch", "generations", "token_ids", "ttl_seconds", "state", "owner", "age_seconds", "tokenizer_fingerprint")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    model: str
    length: int
    epoch: int
    generations: _containers.RepeatedCompositeFieldContainer[Generation]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    ttl_seconds: int
    state: SessionState
    owner: str
    age_seconds: int
    tokenizer_fingerprint: str
    def __init__(self, session_id: _Optional[str] = ..., model: _Optional[str] = ..., length: _Optional[int] = ..., epoch: _Optional[int] = ..., generations: _Optional[_Iterable[_Union[Generation, _Mapping]]] = ..., token_ids: _Optional[_Iterable[int]] = ..., ttl_seconds: _Optional[int] = ..., state: _Optional[_Union[SessionState, str]] = ..., owner: _Optional[str] = ..., age_seconds: _Optional[int] = ..., tokenizer_fingerprint: _Optional[str] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "model_fingerprint", "tokenizer_fingerprint", "vocab_size", "context_length", "dtype", "device", "proposers", "default_num_speculative_tokens", "eos_token_ids", "max_speculative_tokens", "adaptive")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PROPOSERS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADAPTIVE_FIELD_NUMBER: _ClassVar[int]
    name: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    vocab_size: int
    context_length: int
    dtype: str
    device: str
    proposers: _containers.RepeatedScalarFieldContainer[str]
    default_num_speculative_tokens: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_speculative_tokens: int
    adaptive: bool
    def __init__(self, name: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., tokenizer_fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., context_length: _Optional[int] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., proposers: _Optional[_Iterable[str]] = ..., default_num_speculative_tokens: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., max_speculative_tokens: _Optional[int] = ..., adaptive: bool = ...) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "prompt")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    model: str
    prompt: _containers.RepeatedCompositeFieldContainer[PromptPart]
    def __init__(self, model: _Optional[str] = ..., prompt: _Optional[_Iterable[_Union[PromptPart, _Mapping]]] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...
