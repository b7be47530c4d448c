"""What the orchestrator can be told."""

from dataclasses import dataclass, replace

from outrider.config import setting
from outrider.errors import InvalidArgument
from outrider.rpc.channel import ChannelSecurity
from outrider.rpc.server import ServerConfig
from outrider.telemetry.service import TelemetrySettings
from outrider.types import MAX_ALTERNATIVES, MAX_FAN_OUT, MAX_SPECULATIVE_TOKENS
from services.orchestrator.proposers import PROPOSER_NAMES

DIRECT, RELAYED = "direct", "relayed"
"""Who asks a draft: the target, or the orchestrator between two verifications."""


@dataclass(frozen=True)
class OrchestratorConfig(ServerConfig):
    """Settings of the orchestrator; see `ServerConfig` for those of its server."""

    targets: tuple[str, ...] = setting((), help="address of a target worker")
    drafts: tuple[str, ...] = setting((), help="address of a draft worker")
    store_url: str = setting(
        "redis://127.0.0.1:6379", help="session store: redis://, rediss:// or unix://", secret=True
    )
    store_password_file: str = setting(
        "", help="file with the store's password, where its URL holds none"
    )
    store_ca: str = setting("", help="PEM CA of the store's certificate")
    store_cert: str = setting("", help="PEM client certificate for the store")
    store_key: str = setting("", help="PEM key of that certificate")
    store_timeout_s: float = setting(2.0, help="seconds that one store operation may take")
    store_retry_s: float = setting(
        10.0, help="seconds that a commit is repeated while the store is away"
    )
    worker_ca: str = setting("", help="PEM CA of the workers' certificates; switches TLS on")
    worker_cert: str = setting("", help="PEM client certificate for the workers (mTLS)")
    worker_key: str = setting("", help="PEM key of that certificate")
    worker_token_file: str = setting("", help="file with the bearer token for the workers")
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
    start_timeout_s: float = setting(120.0, help="seconds to wait for targets at start")
    draft_start_timeout_s: float = setting(15.0, help="seconds to wait for drafts at start")
    max_generations: int = setting(1024, help="generations at once; more are refused")
    max_request_s: float = setting(3600.0, help="longest deadline of a request, and the default")
    session_ttl_s: float = setting(3600.0, help="seconds that a kept session lives unused")
    session_linger_s: float = setting(60.0, help="seconds that other sessions outlive their end")
    lease_s: float = setting(30.0, help="seconds after which a silent owner loses a session")
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
            ("trace_every", self.trace_every, 0, (1 << 31) - 1),
        ):
            if not least <= value <= most:
                raise InvalidArgument(f"{value} is not in [{least}, {most}]", field=name)

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
        )
