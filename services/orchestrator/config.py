"""What the orchestrator can be told."""

import os
from dataclasses import dataclass, replace

from outrider.config import setting
from outrider.errors import InvalidArgument
from outrider.kv_store.access import KvStoreAccess
from outrider.kv_store.connection import StoreAddress
from outrider.rpc.channel import ChannelSecurity
from outrider.rpc.server import ServerConfig
from outrider.telemetry.service import TelemetrySettings
from outrider.types import MAX_ALTERNATIVES, MAX_FAN_OUT, MAX_SPECULATIVE_TOKENS, Durability
from services.orchestrator.admission import AdmissionLimits
from services.orchestrator.callers import Callers
from services.orchestrator.discovery.endpoints import Source
from services.orchestrator.discovery.kube_api import KubeAccess
from services.orchestrator.discovery.sources import (
    FORMS,
    DiscoveryOptions,
    needs_kubernetes,
    source_of,
)
from services.orchestrator.proposers import PROPOSER_NAMES
from services.orchestrator.seating import Room

DIRECT, RELAYED = "direct", "relayed"
"""Who asks a draft: the target, or the orchestrator between two verifications."""


@dataclass(frozen=True)
class OrchestratorConfig(KvStoreAccess, ServerConfig):
    """Settings of the orchestrator; see `ServerConfig` for those of its server."""

    targets: tuple[str, ...] = setting((), help=f"where target workers are: {FORMS}")
    drafts: tuple[str, ...] = setting((), help=f"where draft workers are: {FORMS}")
    dns_refresh_s: float = setting(5.0, help="seconds after which names are looked up again")
    kubernetes_api: str = setting(
        "", help="URL of the Kubernetes API server; default: that of the cluster of this pod"
    )
    kubernetes_token_file: str = setting("", help="token for the API server at that URL")
    kubernetes_ca: str = setting("", help="PEM CA of the API server at that URL")
    kubernetes_namespace: str = setting(
        "", help="namespace of services that name none; default: that of this pod"
    )
    zone: str = setting("", help="zone of this orchestrator; workers of the same one are preferred")
    store_url: str = setting(
        "redis://127.0.0.1:6379",
        help="session store: redis://, rediss:// or unix://; of several servers "
        "redis+sentinel://HOST,HOST/SERVICE or redis+cluster://HOST,HOST (rediss+… with TLS)",
        secret=True,
    )
    store_password_file: str = setting(
        "", help="file with the store's password, where its URL holds none"
    )
    store_sentinel_password_file: str = setting(
        "", help="file with the sentinels' own password, where they have one and its URL holds none"
    )
    store_ca: str = setting("", help="PEM CA of the store's certificate")
    store_cert: str = setting("", help="PEM client certificate for the store")
    store_key: str = setting("", help="PEM key of that certificate")
    store_timeout_s: float = setting(2.0, help="seconds that one store operation may take")
    kv_store_url: str = setting(
        "",
        help="where the workers keep KV blocks: its index of prefixes tells where to place a "
        "session; redis://, rediss:// or unix://. Empty: each orchestrator goes by what it has "
        "placed itself",
        secret=True,
    )
    kv_store_ttl_s: float = setting(
        3600.0, help="seconds for which a worker's word that it has a prefix is believed"
    )
    kv_index_wait_s: float = setting(
        0.01, help="seconds that a request waits for the index of prefixes at most"
    )
    store_retry_s: float = setting(
        10.0, help="seconds that a commit is repeated while the store is away"
    )
    worker_ca: str = setting("", help="PEM CA of the workers' certificates; switches TLS on")
    worker_cert: str = setting("", help="PEM client certificate for the workers (mTLS)")
    worker_key: str = setting("", help="PEM key of that certificate")
    worker_token_file: str = setting("", help="file with the bearer token for the workers")
    worker_tls_name: str = setting(
        "",
        help="name that the workers' certificates have, where workers are found by IP address",
    )
    num_speculative_tokens: int = setting(
        -1, help="guesses per round unless a request says; -1: what pays best, round by round"
    )
    max_speculative_tokens: int = setting(
        8, help="guesses per round at most where the controller chooses"
    )
    proposer: str = setting("draft", help="what guesses by default", choices=PROPOSER_NAMES)
    draft_timeout_s: float = setting(
        2.0, help="seconds a proposal may take before the round goes on without"
    )
    drafting: str = setting(
        DIRECT,
        help="who asks the drafts: the target, which saves a trip a round, or the orchestrator "
        "(relayed), where targets cannot reach drafts",
        choices=(DIRECT, RELAYED),
    )
    fan_out: int = setting(
        8,
        help="outcomes of a running verification that a draft prepares for, where it has a device "
        "of its own; 0: it is asked after each verdict",
    )
    alternatives: int = setting(
        -1,
        help="next-best guesses of a draft that are verified beside each of its guesses, where "
        "nothing is prepared ahead; -1: 1 where the target is a GPU, to which a row more is nearly "
        "free, else 0",
    )
    target_wait_s: float = setting(10.0, help="seconds to wait for a target that went away")
    store_start_timeout_s: float = setting(
        30.0, help="seconds to wait for the session store at start"
    )
    start_timeout_s: float = setting(120.0, help="seconds to wait for targets at start")
    draft_start_timeout_s: float = setting(15.0, help="seconds to wait for drafts at start")
    max_generations: int = setting(1024, help="generations at once; more requests wait")
    max_target_sessions: int = setting(
        0,
        help="generations at once at a target, those of all orchestrators; 0: as many as its pass "
        "has rows",
    )
    kv_overcommit: float = setting(
        1.0,
        help="share of a target's KV that its generations may come to need, each at its longest; "
        "above 1 they may have to wait for each other",
    )
    max_waiting: int = setting(
        256, help="requests of a class of priority that wait for room; more are refused"
    )
    max_wait_s: float = setting(30.0, help="seconds that a request waits for room at most")
    caller_limits: tuple[str, ...] = setting(
        (),
        help="what a caller may have, as NAME:running=8:waiting=32:weight=2:priority=normal; "
        "NAME * is for all others",
    )
    admin_callers: tuple[str, ...] = setting(
        (),
        help="caller that may ask what `outrider doctor` asks; where callers are not authenticated "
        "everyone may",
    )
    max_request_s: float = setting(3600.0, help="longest deadline of a request, and the default")
    session_ttl_s: float = setting(3600.0, help="seconds that a kept session lives unused")
    session_linger_s: float = setting(60.0, help="seconds that other sessions outlive their end")
    lease_s: float = setting(30.0, help="seconds after which a silent owner loses a session")
    session_resume_s: float = setting(
        30.0, help="seconds that a resumable session waits for its client when its stream broke off"
    )
    max_sessions_per_caller: int = setting(
        10_000, help="live sessions of one caller (running, interrupted, kept); 0: no limit"
    )
    durability: str = setting(
        Durability.REQUIRE.value,
        help="while the store is away, unless a request says: tell nothing that is not stored, or "
        "go on from memory (best-effort)",
        choices=tuple(durability.value for durability in Durability),
    )
    store_wait_s: float = setting(
        0.5, help="seconds that a best-effort chunk waits for a store that has kept up so far"
    )
    trace_sample_rate: float | None = setting(
        None,
        help="share of requests that are traced, where they are not part of a trace already; "
        "default: as OTEL_TRACES_SAMPLER says, else all",
    )
    trace_every: int = setting(
        32,
        help="of a traced request, one place in so many has its round traced on all tiers, besides "
        "the first two; 0: no round",
    )

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("num_speculative_tokens", self.num_speculative_tokens, -1, MAX_SPECULATIVE_TOKENS),
            ("max_speculative_tokens", self.max_speculative_tokens, 0, MAX_SPECULATIVE_TOKENS),
            ("fan_out", self.fan_out, 0, MAX_FAN_OUT),
            ("alternatives", self.alternatives, -1, MAX_ALTERNATIVES),
            ("max_sessions_per_caller", self.max_sessions_per_caller, 0, 1_000_000),
            ("trace_every", self.trace_every, 0, (1 << 31) - 1),
        ):
            if not least <= value <= most:
                raise InvalidArgument(f"{value} is not in [{least}, {most}]", field=name)
        for name, amount, minimum in (
            ("max_generations", self.max_generations, 1),
            ("max_target_sessions", self.max_target_sessions, 0),
            ("max_waiting", self.max_waiting, 0),
            ("max_wait_s", self.max_wait_s, 0.0),
            ("kv_overcommit", self.kv_overcommit, 0.01),
            ("dns_refresh_s", self.dns_refresh_s, 0.1),
            ("store_start_timeout_s", self.store_start_timeout_s, 0.0),
            ("kv_store_ttl_s", self.kv_store_ttl_s, 1.0),
            ("kv_index_wait_s", self.kv_index_wait_s, 0.001),
        ):
            if not amount >= minimum:
                raise InvalidArgument(f"{amount} is not at least {minimum:g}", field=name)
        Callers.parse(self.caller_limits)

    def sources(self, field: str) -> list[Source]:
        """What `targets` or `drafts` name. Raises InvalidArgument."""
        texts: tuple[str, ...] = getattr(self, field)
        wants_kubernetes = any(map(needs_kubernetes, texts))
        options = DiscoveryOptions(
            self.dns_refresh_s, self._kubernetes() if wants_kubernetes else None
        )
        return [source_of(text, options, field=field) for text in texts]

    def _kubernetes(self) -> KubeAccess:
        if not self.kubernetes_api:
            access = KubeAccess.in_cluster(os.environ)
            return replace(access, namespace=self.kubernetes_namespace or access.namespace)
        return KubeAccess(
            self.kubernetes_api,
            self.kubernetes_token_file,
            self.kubernetes_ca,
            self.kubernetes_namespace or "default",
        )

    @property
    def authenticates(self) -> bool:
        """Callers need a token."""
        return bool(self.auth_token_file or self.jwt_keys)

    @property
    def kv_store(self) -> StoreAddress | None:
        """Raises InvalidArgument."""
        return self.kv_store_at()

    @property
    def room(self) -> Room:
        return Room(self.max_target_sessions, self.kv_overcommit, self.zone)

    @property
    def admission_limits(self) -> AdmissionLimits:
        return AdmissionLimits(
            max_running=self.max_generations,
            max_waiting=self.max_waiting,
            max_wait_s=self.max_wait_s,
            target_wait_s=self.target_wait_s,
        )

    @property
    def pinned_length(self) -> int | None:
        """Guesses per round; None where the controller chooses."""
        return None if self.num_speculative_tokens < 0 else self.num_speculative_tokens

    @property
    def telemetry(self) -> TelemetrySettings:
        return replace(super().telemetry, sample_rate=self.trace_sample_rate)

    @property
    def worker_security(self) -> ChannelSecurity:
        return ChannelSecurity(
            ca_file=self.worker_ca,
            cert_file=self.worker_cert,
            key_file=self.worker_key,
            token_file=self.worker_token_file,
            server_name=self.worker_tls_name,
        )
