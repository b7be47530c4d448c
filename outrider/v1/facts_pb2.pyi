from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RoundTrips(_message.Message):
    __slots__ = ("samples", "least_us", "p50_us", "p99_us")
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LEAST_US_FIELD_NUMBER: _ClassVar[int]
    P50_US_FIELD_NUMBER: _ClassVar[int]
    P99_US_FIELD_NUMBER: _ClassVar[int]
    samples: int
    least_us: int
    p50_us: int
    p99_us: int
    def __init__(self, samples: _Optional[int] = ..., least_us: _Optional[int] = ..., p50_us: _Optional[int] = ..., p99_us: _Optional[int] = ...) -> None: ...

class Clock(_message.Message):
    __slots__ = ("ahead_us", "error_us")
    AHEAD_US_FIELD_NUMBER: _ClassVar[int]
    ERROR_US_FIELD_NUMBER: _ClassVar[int]
    ahead_us: int
    error_us: int
    def __init__(self, ahead_us: _Optional[int] = ..., error_us: _Optional[int] = ...) -> None: ...

class CertificateFacts(_message.Message):
    __slots__ = ("error", "expires_unix_s", "begins_unix_s", "issuer", "names", "client_expires_unix_s")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    BEGINS_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    ISSUER_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    CLIENT_EXPIRES_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    error: str
    expires_unix_s: int
    begins_unix_s: int
    issuer: str
    names: _containers.RepeatedScalarFieldContainer[str]
    client_expires_unix_s: int
    def __init__(self, error: _Optional[str] = ..., expires_unix_s: _Optional[int] = ..., begins_unix_s: _Optional[int] = ..., issuer: _Optional[str] = ..., names: _Optional[_Iterable[str]] = ..., client_expires_unix_s: _Optional[int] = ...) -> None: ...

class MachineFacts(_message.Message):
    __slots__ = ("kernel", "python", "torch", "accelerator", "driver", "cores", "max_open_files", "shared_memory_bytes")
    KERNEL_FIELD_NUMBER: _ClassVar[int]
    PYTHON_FIELD_NUMBER: _ClassVar[int]
    TORCH_FIELD_NUMBER: _ClassVar[int]
    ACCELERATOR_FIELD_NUMBER: _ClassVar[int]
    DRIVER_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    MAX_OPEN_FILES_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    kernel: str
    python: str
    torch: str
    accelerator: str
    driver: str
    cores: int
    max_open_files: int
    shared_memory_bytes: int
    def __init__(self, kernel: _Optional[str] = ..., python: _Optional[str] = ..., torch: _Optional[str] = ..., accelerator: _Optional[str] = ..., driver: _Optional[str] = ..., cores: _Optional[int] = ..., max_open_files: _Optional[int] = ..., shared_memory_bytes: _Optional[int] = ...) -> None: ...

class StoreFacts(_message.Message):
    __slots__ = ("address", "error", "version", "role", "missing_commands", "keys_denied", "told", "max_memory", "used_memory", "eviction_policy", "evicted_keys", "append_only", "append_fsync", "snapshots", "writes_fail", "round_trips", "clock", "certificate", "read_bytes_per_s")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MISSING_COMMANDS_FIELD_NUMBER: _ClassVar[int]
    KEYS_DENIED_FIELD_NUMBER: _ClassVar[int]
    TOLD_FIELD_NUMBER: _ClassVar[int]
    MAX_MEMORY_FIELD_NUMBER: _ClassVar[int]
    USED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    EVICTION_POLICY_FIELD_NUMBER: _ClassVar[int]
    EVICTED_KEYS_FIELD_NUMBER: _ClassVar[int]
    APPEND_ONLY_FIELD_NUMBER: _ClassVar[int]
    APPEND_FSYNC_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    WRITES_FAIL_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIPS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    address: str
    error: str
    version: str
    role: str
    missing_commands: _containers.RepeatedScalarFieldContainer[str]
    keys_denied: bool
    told: bool
    max_memory: int
    used_memory: int
    eviction_policy: str
    evicted_keys: int
    append_only: bool
    append_fsync: str
    snapshots: bool
    writes_fail: bool
    round_trips: RoundTrips
    clock: Clock
    certificate: CertificateFacts
    read_bytes_per_s: int
    def __init__(self, address: _Optional[str] = ..., error: _Optional[str] = ..., version: _Optional[str] = ..., role: _Optional[str] = ..., missing_commands: _Optional[_Iterable[str]] = ..., keys_denied: bool = ..., told: bool = ..., max_memory: _Optional[int] = ..., used_memory: _Optional[int] = ..., eviction_policy: _Optional[str] = ..., evicted_keys: _Optional[int] = ..., append_only: bool = ..., append_fsync: _Optional[str] = ..., snapshots: bool = ..., writes_fail: bool = ..., round_trips: _Optional[_Union[RoundTrips, _Mapping]] = ..., clock: _Optional[_Union[Clock, _Mapping]] = ..., certificate: _Optional[_Union[CertificateFacts, _Mapping]] = ..., read_bytes_per_s: _Optional[int] = ...) -> None: ...
