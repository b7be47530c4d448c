from outrider.v1 import common_pb2 as _common_pb2
from outrider.v1 import facts_pb2 as _facts_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RefusalReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REFUSAL_REASON_UNSPECIFIED: _ClassVar[RefusalReason]
    REFUSAL_REASON_STALE_EPOCH: _ClassVar[RefusalReason]
    REFUSAL_REASON_NONCE_MISMATCH: _ClassVar[RefusalReason]
    REFUSAL_REASON_UNKNOWN_SESSION: _ClassVar[RefusalReason]
    REFUSAL_REASON_INVALID_ARGUMENT: _ClassVar[RefusalReason]
    REFUSAL_REASON_RESOURCE_EXHAUSTED: _ClassVar[RefusalReason]
    REFUSAL_REASON_DEADLINE_EXCEEDED: _ClassVar[RefusalReason]
    REFUSAL_REASON_CANCELLED: _ClassVar[RefusalReason]
    REFUSAL_REASON_INTERNAL: _ClassVar[RefusalReason]
    REFUSAL_REASON_DRAINING: _ClassVar[RefusalReason]
    REFUSAL_REASON_CONTEXT_EXCEEDED: _ClassVar[RefusalReason]
    REFUSAL_REASON_UNSUPPORTED: _ClassVar[RefusalReason]
    REFUSAL_REASON_STALE_NUMBER: _ClassVar[RefusalReason]
REFUSAL_REASON_UNSPECIFIED: RefusalReason
REFUSAL_REASON_STALE_EPOCH: RefusalReason
REFUSAL_REASON_NONCE_MISMATCH: RefusalReason
REFUSAL_REASON_UNKNOWN_SESSION: RefusalReason
REFUSAL_REASON_INVALID_ARGUMENT: RefusalReason
REFUSAL_REASON_RESOURCE_EXHAUSTED: RefusalReason
REFUSAL_REASON_DEADLINE_EXCEEDED: RefusalReason
REFUSAL_REASON_CANCELLED: RefusalReason
REFUSAL_REASON_INTERNAL: RefusalReason
REFUSAL_REASON_DRAINING: RefusalReason
REFUSAL_REASON_CONTEXT_EXCEEDED: RefusalReason
REFUSAL_REASON_UNSUPPORTED: RefusalReason
REFUSAL_REASON_STALE_NUMBER: RefusalReason

class EntryHeader(_message.Message):
    __slots__ = ("session_id", "completion", "epoch", "owner_nonce", "number", "base_len", "base_hash", "timeout_ms", "traceparent", "request_id", "tenant", "model", "adapter", "trace_every")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OWNER_NONCE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    BASE_HASH_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    TRACE_EVERY_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    completion: int
    epoch: int
    owner_nonce: int
    number: int
    base_len: int
    base_hash: int
    timeout_ms: int
    traceparent: str
    request_id: str
    tenant: str
    model: str
    adapter: str
    trace_every: int
    def __init__(self, session_id: _Optional[str] = ..., completion: _Optional[int] = ..., epoch: _Optional[int] = ..., owner_nonce: _Optional[int] = ..., number: _Optional[int] = ..., base_len: _Optional[int] = ..., base_hash: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., traceparent: _Optional[str] = ..., request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ..., adapter: _Optional[str] = ..., trace_every: _Optional[int] = ...) -> None: ...

class TokenDelta(_message.Message):
    __slots__ = ("start", "token_ids")
    START_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    start: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, start: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerationSpec(_message.Message):
    __slots__ = ("sampling", "mode", "prompt_len", "min_tokens", "stop_ids", "logprobs")
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    sampling: _common_pb2.SamplingParams
    mode: _common_pb2.VerificationMode
    prompt_len: int
    min_tokens: int
    stop_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: int
    def __init__(self, sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., mode: _Optional[_Union[_common_pb2.VerificationMode, str]] = ..., prompt_len: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[int] = ...) -> None: ...

class OpenEntry(_message.Message):
    __slots__ = ("spec",)
    SPEC_FIELD_NUMBER: _ClassVar[int]
    spec: GenerationSpec
    def __init__(self, spec: _Optional[_Union[GenerationSpec, _Mapping]] = ...) -> None: ...

class CloseEntry(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CancelEntry(_message.Message):
    __slots__ = ("through_number",)
    THROUGH_NUMBER_FIELD_NUMBER: _ClassVar[int]
    through_number: int
    def __init__(self, through_number: _Optional[int] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("reason", "message", "field")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    reason: RefusalReason
    message: str
    field: str
    def __init__(self, reason: _Optional[_Union[RefusalReason, str]] = ..., message: _Optional[str] = ..., field: _Optional[str] = ...) -> None: ...

class NeedTokens(_message.Message):
    __slots__ = ()
    FROM_FIELD_NUMBER: _ClassVar[int]
    def __init__(self, **kwargs) -> None: ...

class ReplyHeader(_message.Message):
    __slots__ = ("session_id", "completion", "epoch", "number", "owner_nonce", "elapsed_us", "more")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OWNER_NONCE_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_US_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    completion: int
    epoch: int
    number: int
    owner_nonce: int
    elapsed_us: int
    more: bool
    def __init__(self, session_id: _Optional[str] = ..., completion: _Optional[int] = ..., epoch: _Optional[int] = ..., number: _Optional[int] = ..., owner_nonce: _Optional[int] = ..., elapsed_us: _Optional[int] = ..., more: bool = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("have_len", "cached_len")
    HAVE_LEN_FIELD_NUMBER: _ClassVar[int]
    CACHED_LEN_FIELD_NUMBER: _ClassVar[int]
    have_len: int
    cached_len: int
    def __init__(self, have_len: _Optional[int] = ..., cached_len: _Optional[int] = ...) -> None: ...

class Closed(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkTiming(_message.Message):
    __slots__ = ("queue_us", "compute_us", "batch_rows", "cached_tokens", "prompt_rows")
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    BATCH_ROWS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ROWS_FIELD_NUMBER: _ClassVar[int]
    queue_us: int
    compute_us: int
    batch_rows: int
    cached_tokens: int
    prompt_rows: int
    def __init__(self, queue_us: _Optional[int] = ..., compute_us: _Optional[int] = ..., batch_rows: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., prompt_rows: _Optional[int] = ...) -> None: ...

class AheadOptions(_message.Message):
    __slots__ = ("pending", "fan_out", "run_ahead")
    PENDING_FIELD_NUMBER: _ClassVar[int]
    FAN_OUT_FIELD_NUMBER: _ClassVar[int]
    RUN_AHEAD_FIELD_NUMBER: _ClassVar[int]
    pending: _common_pb2.Proposal
    fan_out: _containers.RepeatedScalarFieldContainer[int]
    run_ahead: bool
    def __init__(self, pending: _Optional[_Union[_common_pb2.Proposal, _Mapping]] = ..., fan_out: _Optional[_Iterable[int]] = ..., run_ahead: bool = ...) -> None: ...

class ProposeEntry(_message.Message):
    __slots__ = ("delta", "num_speculative_tokens", "ahead", "alternatives")
    DELTA_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    delta: TokenDelta
    num_speculative_tokens: int
    ahead: AheadOptions
    alternatives: int
    def __init__(self, delta: _Optional[_Union[TokenDelta, _Mapping]] = ..., num_speculative_tokens: _Optional[int] = ..., ahead: _Optional[_Union[AheadOptions, _Mapping]] = ..., alternatives: _Optional[int] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("num_accepted", "token_id", "proposal", "distribution")
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    num_accepted: int
    token_id: int
    proposal: _common_pb2.Proposal
    distribution: _common_pb2.SparseDistribution
    def __init__(self, num_accepted: _Optional[int] = ..., token_id: _Optional[int] = ..., proposal: _Optional[_Union[_common_pb2.Proposal, _Mapping]] = ..., distribution: _Optional[_Union[_common_pb2.SparseDistribution, _Mapping]] = ...) -> None: ...

class Proposed(_message.Message):
    __slots__ = ("proposal", "timing", "outcomes")
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    proposal: _common_pb2.Proposal
    timing: WorkTiming
    outcomes: _containers.RepeatedCompositeFieldContainer[Outcome]
    def __init__(self, proposal: _Optional[_Union[_common_pb2.Proposal, _Mapping]] = ..., timing: _Optional[_Union[WorkTiming, _Mapping]] = ..., outcomes: _Optional[_Iterable[_Union[Outcome, _Mapping]]] = ...) -> None: ...

class DraftPlan(_message.Message):
    __slots__ = ("address", "num_speculative_tokens", "fan_out", "timeout_ms", "end_len", "alternatives")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAN_OUT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    END_LEN_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    address: str
    num_speculative_tokens: int
    fan_out: int
    timeout_ms: int
    end_len: int
    alternatives: int
    def __init__(self, address: _Optional[str] = ..., num_speculative_tokens: _Optional[int] = ..., fan_out: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., end_len: _Optional[int] = ..., alternatives: _Optional[int] = ...) -> None: ...

class TuneEntry(_message.Message):
    __slots__ = ("num_speculative_tokens", "fan_out")
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAN_OUT_FIELD_NUMBER: _ClassVar[int]
    num_speculative_tokens: int
    fan_out: int
    def __init__(self, num_speculative_tokens: _Optional[int] = ..., fan_out: _Optional[int] = ...) -> None: ...

class ExtendEntry(_message.Message):
    __slots__ = ("until_len",)
    UNTIL_LEN_FIELD_NUMBER: _ClassVar[int]
    until_len: int
    def __init__(self, until_len: _Optional[int] = ...) -> None: ...

class DraftReport(_message.Message):
    __slots__ = ("wait_us", "worker_us", "compute_us", "failed", "dropped", "hit", "asked", "prepared", "rank", "trip_us", "took_us")
    WAIT_US_FIELD_NUMBER: _ClassVar[int]
    WORKER_US_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    HIT_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TRIP_US_FIELD_NUMBER: _ClassVar[int]
    TOOK_US_FIELD_NUMBER: _ClassVar[int]
    wait_us: int
    worker_us: int
    compute_us: int
    failed: bool
    dropped: int
    hit: bool
    asked: int
    prepared: int
    rank: int
    trip_us: int
    took_us: int
    def __init__(self, wait_us: _Optional[int] = ..., worker_us: _Optional[int] = ..., compute_us: _Optional[int] = ..., failed: bool = ..., dropped: _Optional[int] = ..., hit: bool = ..., asked: _Optional[int] = ..., prepared: _Optional[int] = ..., rank: _Optional[int] = ..., trip_us: _Optional[int] = ..., took_us: _Optional[int] = ...) -> None: ...

class VerifyEntry(_message.Message):
    __slots__ = ("delta", "proposal", "more_rounds", "draft")
    DELTA_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    MORE_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    delta: TokenDelta
    proposal: _common_pb2.Proposal
    more_rounds: int
    draft: DraftPlan
    def __init__(self, delta: _Optional[_Union[TokenDelta, _Mapping]] = ..., proposal: _Optional[_Union[_common_pb2.Proposal, _Mapping]] = ..., more_rounds: _Optional[int] = ..., draft: _Optional[_Union[DraftPlan, _Mapping]] = ...) -> None: ...

class Verified(_message.Message):
    __slots__ = ("token_ids", "num_accepted", "num_proposed", "logprobs", "next_proposal", "timing", "draft", "run_ahead", "num_beside")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    NUM_PROPOSED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    RUN_AHEAD_FIELD_NUMBER: _ClassVar[int]
    NUM_BESIDE_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_accepted: int
    num_proposed: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.PositionLogprobs]
    next_proposal: _common_pb2.Proposal
    timing: WorkTiming
    draft: DraftReport
    run_ahead: bool
    num_beside: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., num_accepted: _Optional[int] = ..., num_proposed: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.PositionLogprobs, _Mapping]]] = ..., next_proposal: _Optional[_Union[_common_pb2.Proposal, _Mapping]] = ..., timing: _Optional[_Union[WorkTiming, _Mapping]] = ..., draft: _Optional[_Union[DraftReport, _Mapping]] = ..., run_ahead: bool = ..., num_beside: _Optional[int] = ...) -> None: ...

class Entry(_message.Message):
    __slots__ = ("header", "open", "propose", "verify", "close", "cancel", "tune", "extend")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    PROPOSE_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    TUNE_FIELD_NUMBER: _ClassVar[int]
    EXTEND_FIELD_NUMBER: _ClassVar[int]
    header: EntryHeader
    open: OpenEntry
    propose: ProposeEntry
    verify: VerifyEntry
    close: CloseEntry
    cancel: CancelEntry
    tune: TuneEntry
    extend: ExtendEntry
    def __init__(self, header: _Optional[_Union[EntryHeader, _Mapping]] = ..., open: _Optional[_Union[OpenEntry, _Mapping]] = ..., propose: _Optional[_Union[ProposeEntry, _Mapping]] = ..., verify: _Optional[_Union[VerifyEntry, _Mapping]] = ..., close: _Optional[_Union[CloseEntry, _Mapping]] = ..., cancel: _Optional[_Union[CancelEntry, _Mapping]] = ..., tune: _Optional[_Union[TuneEntry, _Mapping]] = ..., extend: _Optional[_Union[ExtendEntry, _Mapping]] = ...) -> None: ...

class Reply(_message.Message):
    __slots__ = ("header", "opened", "proposed", "verified", "closed", "need_tokens", "refused")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    NEED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    header: ReplyHeader
    opened: Opened
    proposed: Proposed
    verified: Verified
    closed: Closed
    need_tokens: NeedTokens
    refused: Refused
    def __init__(self, header: _Optional[_Union[ReplyHeader, _Mapping]] = ..., opened: _Optional[_Union[Opened, _Mapping]] = ..., proposed: _Optional[_Union[Proposed, _Mapping]] = ..., verified: _Optional[_Union[Verified, _Mapping]] = ..., closed: _Optional[_Union[Closed, _Mapping]] = ..., need_tokens: _Optional[_Union[NeedTokens, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ...) -> None: ...

class RunRequest(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[Entry]
    def __init__(self, entries: _Optional[_Iterable[_Union[Entry, _Mapping]]] = ...) -> None: ...

class RunResponse(_message.Message):
    __slots__ = ("replies",)
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    replies: _containers.RepeatedCompositeFieldContainer[Reply]
    def __init__(self, replies: _Optional[_Iterable[_Union[Reply, _Mapping]]] = ...) -> None: ...

class BulkRequest(_message.Message):
    __slots__ = ("header", "delta")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    header: EntryHeader
    delta: TokenDelta
    def __init__(self, header: _Optional[_Union[EntryHeader, _Mapping]] = ..., delta: _Optional[_Union[TokenDelta, _Mapping]] = ...) -> None: ...

class BulkResponse(_message.Message):
    __slots__ = ("header", "held", "need_tokens", "refused")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    NEED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    header: ReplyHeader
    held: Opened
    need_tokens: NeedTokens
    refused: Refused
    def __init__(self, header: _Optional[_Union[ReplyHeader, _Mapping]] = ..., held: _Optional[_Union[Opened, _Mapping]] = ..., need_tokens: _Optional[_Union[NeedTokens, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ...) -> None: ...

class InfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InfoResponse(_message.Message):
    __slots__ = ("model", "model_fingerprint", "tokenizer_fingerprint", "vocab_size", "context_length", "dtype", "device", "incarnation", "protocol_min", "protocol_max", "capabilities", "required_capabilities", "kv_blocks_total", "kv_blocks_free", "kv_block_tokens", "sessions", "max_proposal_tokens", "eos_token_ids", "version", "draining", "max_rows", "preemptions", "prefix_tokens", "prefix_hit_tokens", "device_id", "tensor_parallel", "other_device_ids", "kv_store")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MIN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MAX_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_PROPOSAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    OTHER_DEVICE_IDS_FIELD_NUMBER: _ClassVar[int]
    KV_STORE_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    vocab_size: int
    context_length: int
    dtype: str
    device: str
    incarnation: int
    protocol_min: int
    protocol_max: int
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    required_capabilities: _containers.RepeatedScalarFieldContainer[str]
    kv_blocks_total: int
    kv_blocks_free: int
    kv_block_tokens: int
    sessions: int
    max_proposal_tokens: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    version: str
    draining: bool
    max_rows: int
    preemptions: int
    prefix_tokens: int
    prefix_hit_tokens: int
    device_id: str
    tensor_parallel: int
    other_device_ids: _containers.RepeatedScalarFieldContainer[str]
    kv_store: KvStoreInfo
    def __init__(self, model: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., tokenizer_fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., context_length: _Optional[int] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., incarnation: _Optional[int] = ..., protocol_min: _Optional[int] = ..., protocol_max: _Optional[int] = ..., capabilities: _Optional[_Iterable[str]] = ..., required_capabilities: _Optional[_Iterable[str]] = ..., kv_blocks_total: _Optional[int] = ..., kv_blocks_free: _Optional[int] = ..., kv_block_tokens: _Optional[int] = ..., sessions: _Optional[int] = ..., max_proposal_tokens: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., version: _Optional[str] = ..., draining: bool = ..., max_rows: _Optional[int] = ..., preemptions: _Optional[int] = ..., prefix_tokens: _Optional[int] = ..., prefix_hit_tokens: _Optional[int] = ..., device_id: _Optional[str] = ..., tensor_parallel: _Optional[int] = ..., other_device_ids: _Optional[_Iterable[str]] = ..., kv_store: _Optional[_Union[KvStoreInfo, _Mapping]] = ...) -> None: ...

class KvStoreInfo(_message.Message):
    __slots__ = ("up", "blocks_written", "bytes_written", "blocks_restored", "bytes_restored", "tokens_restored", "blocks_refused", "errors")
    UP_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    BYTES_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_RESTORED_FIELD_NUMBER: _ClassVar[int]
    BYTES_RESTORED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_RESTORED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_REFUSED_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    up: bool
    blocks_written: int
    bytes_written: int
    blocks_restored: int
    bytes_restored: int
    tokens_restored: int
    blocks_refused: int
    errors: int
    def __init__(self, up: bool = ..., blocks_written: _Optional[int] = ..., bytes_written: _Optional[int] = ..., blocks_restored: _Optional[int] = ..., bytes_restored: _Optional[int] = ..., tokens_restored: _Optional[int] = ..., blocks_refused: _Optional[int] = ..., errors: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("interval_ms",)
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    interval_ms: int
    def __init__(self, interval_ms: _Optional[int] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("incarnation", "draining", "sessions", "running", "queued", "queue_us", "kv_blocks_free", "pass_us", "busy")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    PASS_US_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    draining: bool
    sessions: int
    running: int
    queued: int
    queue_us: int
    kv_blocks_free: int
    pass_us: int
    busy: float
    def __init__(self, incarnation: _Optional[int] = ..., draining: bool = ..., sessions: _Optional[int] = ..., running: _Optional[int] = ..., queued: _Optional[int] = ..., queue_us: _Optional[int] = ..., kv_blocks_free: _Optional[int] = ..., pass_us: _Optional[int] = ..., busy: _Optional[float] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ("draft_addresses", "samples")
    DRAFT_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    draft_addresses: _containers.RepeatedScalarFieldContainer[str]
    samples: int
    def __init__(self, draft_addresses: _Optional[_Iterable[str]] = ..., samples: _Optional[int] = ...) -> None: ...

class ProbeResponse(_message.Message):
    __slots__ = ("received_unix_us", "sent_unix_us", "machine", "kv_store", "drafts")
    RECEIVED_UNIX_US_FIELD_NUMBER: _ClassVar[int]
    SENT_UNIX_US_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    KV_STORE_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    received_unix_us: int
    sent_unix_us: int
    machine: _facts_pb2.MachineFacts
    kv_store: _facts_pb2.StoreFacts
    drafts: _containers.RepeatedCompositeFieldContainer[DraftFacts]
    def __init__(self, received_unix_us: _Optional[int] = ..., sent_unix_us: _Optional[int] = ..., machine: _Optional[_Union[_facts_pb2.MachineFacts, _Mapping]] = ..., kv_store: _Optional[_Union[_facts_pb2.StoreFacts, _Mapping]] = ..., drafts: _Optional[_Iterable[_Union[DraftFacts, _Mapping]]] = ...) -> None: ...

class DraftFacts(_message.Message):
    __slots__ = ("address", "error", "round_trips")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIPS_FIELD_NUMBER: _ClassVar[int]
    address: str
    error: str
    round_trips: _facts_pb2.RoundTrips
    def __init__(self, address: _Optional[str] = ..., error: _Optional[str] = ..., round_trips: _Optional[_Union[_facts_pb2.RoundTrips, _Mapping]] = ...) -> None: ...
