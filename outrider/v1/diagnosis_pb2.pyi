from outrider.v1 import facts_pb2 as _facts_pb2
from outrider.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DiagnoseRequest(_message.Message):
    __slots__ = ("samples",)
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    samples: int
    def __init__(self, samples: _Optional[int] = ...) -> None: ...

class WorkerFacts(_message.Message):
    __slots__ = ("tier", "address", "standing", "up", "trouble", "info", "vitals", "probe", "probe_error", "round_trips", "clock", "certificate", "takes_plaintext", "takes_anyone")
    TIER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    UP_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    VITALS_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    PROBE_ERROR_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIPS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    TAKES_PLAINTEXT_FIELD_NUMBER: _ClassVar[int]
    TAKES_ANYONE_FIELD_NUMBER: _ClassVar[int]
    tier: str
    address: str
    standing: str
    up: bool
    trouble: str
    info: _worker_pb2.InfoResponse
    vitals: _worker_pb2.WatchResponse
    probe: _worker_pb2.ProbeResponse
    probe_error: str
    round_trips: _facts_pb2.RoundTrips
    clock: _facts_pb2.Clock
    certificate: _facts_pb2.CertificateFacts
    takes_plaintext: bool
    takes_anyone: bool
    def __init__(self, tier: _Optional[str] = ..., address: _Optional[str] = ..., standing: _Optional[str] = ..., up: bool = ..., trouble: _Optional[str] = ..., info: _Optional[_Union[_worker_pb2.InfoResponse, _Mapping]] = ..., vitals: _Optional[_Union[_worker_pb2.WatchResponse, _Mapping]] = ..., probe: _Optional[_Union[_worker_pb2.ProbeResponse, _Mapping]] = ..., probe_error: _Optional[str] = ..., round_trips: _Optional[_Union[_facts_pb2.RoundTrips, _Mapping]] = ..., clock: _Optional[_Union[_facts_pb2.Clock, _Mapping]] = ..., certificate: _Optional[_Union[_facts_pb2.CertificateFacts, _Mapping]] = ..., takes_plaintext: bool = ..., takes_anyone: bool = ...) -> None: ...

class DiagnoseResponse(_message.Message):
    __slots__ = ("received_unix_us", "sent_unix_us", "version", "protocol_min", "protocol_max", "known_capabilities", "owner", "listens", "tls", "client_certificates", "callers_authenticated", "worker_tls", "machine", "store", "workers", "waiting", "max_waiting", "running", "max_running", "drafting", "jwt_leeway_s", "sources")
    RECEIVED_UNIX_US_FIELD_NUMBER: _ClassVar[int]
    SENT_UNIX_US_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MIN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MAX_FIELD_NUMBER: _ClassVar[int]
    KNOWN_CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    LISTENS_FIELD_NUMBER: _ClassVar[int]
    TLS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_CERTIFICATES_FIELD_NUMBER: _ClassVar[int]
    CALLERS_AUTHENTICATED_FIELD_NUMBER: _ClassVar[int]
    WORKER_TLS_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    DRAFTING_FIELD_NUMBER: _ClassVar[int]
    JWT_LEEWAY_S_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    received_unix_us: int
    sent_unix_us: int
    version: str
    protocol_min: int
    protocol_max: int
    known_capabilities: _containers.RepeatedScalarFieldContainer[str]
    owner: str
    listens: str
    tls: bool
    client_certificates: bool
    callers_authenticated: bool
    worker_tls: bool
    machine: _facts_pb2.MachineFacts
    store: _facts_pb2.StoreFacts
    workers: _containers.RepeatedCompositeFieldContainer[WorkerFacts]
    waiting: int
    max_waiting: int
    running: int
    max_running: int
    drafting: str
    jwt_leeway_s: float
    sources: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, received_unix_us: _Optional[int] = ..., sent_unix_us: _Optional[int] = ..., version: _Optional[str] = ..., protocol_min: _Optional[int] = ..., protocol_max: _Optional[int] = ..., known_capabilities: _Optional[_Iterable[str]] = ..., owner: _Optional[str] = ..., listens: _Optional[str] = ..., tls: bool = ..., client_certificates: bool = ..., callers_authenticated: bool = ..., worker_tls: bool = ..., machine: _Optional[_Union[_facts_pb2.MachineFacts, _Mapping]] = ..., store: _Optional[_Union[_facts_pb2.StoreFacts, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[WorkerFacts, _Mapping]]] = ..., waiting: _Optional[int] = ..., max_waiting: _Optional[int] = ..., running: _Optional[int] = ..., max_running: _Optional[int] = ..., drafting: _Optional[str] = ..., jwt_leeway_s: _Optional[float] = ..., sources: _Optional[_Iterable[str]] = ...) -> None: ...
