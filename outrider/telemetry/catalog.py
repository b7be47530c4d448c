"""All metrics: names, kinds, units, labels, and what they mean. docs/metrics.md shows this table.

A service may export only what stands here, with exactly these labels; `metrics.Metrics` sees to
it. Every label has a few values that are known beforehand, or one for each served model: never a
session, a request, a caller or an address.
"""

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from outrider import errors
from outrider.types import (
    MAX_PROPOSAL_TOKENS,
    MAX_SPECULATIVE_TOKENS,
    FinishReason,
    TokenSource,
)
from outrider.v1 import worker_pb2

ORCHESTRATOR, TARGET, DRAFT = "orchestrator", "target", "draft"
WORKERS = (TARGET, DRAFT)
TIERS = (ORCHESTRATOR, *WORKERS)

NO_MODEL = ""
"""Model of requests that named none, or one that is not served."""
MAX_ROWS_LABEL = 4096
MORE_ROWS = "more"


class Kind(enum.Enum):
    """What a metric's values are."""

    COUNTER = "counter"
    """Only grows."""
    SIZE = "up-down counter"
    """How many there are now; sums over processes have a meaning."""
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `unit` is as in UCUM; `buckets` are the upper bounds of a histogram's."""

    name: str
    kind: Kind
    unit: str
    labels: tuple[str, ...]
    services: tuple[str, ...]
    meaning: str
    buckets: tuple[float, ...] = ()

    @property
    def prometheus_name(self) -> str:
        """As Prometheus' exporter of OpenTelemetry makes it."""
        name = prometheus_label(self.name)
        suffix = {"s": "_seconds", "By": "_bytes"}.get(self.unit, "")
        name = name if name.endswith(suffix) else name + suffix
        return f"{name}_total" if self.kind is Kind.COUNTER else name

    @property
    def series(self) -> tuple[str, ...]:
        """The names that queries use."""
        name = self.prometheus_name
        if self.kind is Kind.HISTOGRAM:
            return f"{name}_bucket", f"{name}_sum", f"{name}_count"
        return (name,)


def prometheus_label(key: str) -> str:
    """A label's key as Prometheus has it."""
    return re.sub(r"[^a-zA-Z0-9]+", "_", key)


def prometheus_names() -> tuple[str, ...]:
    """Every name that a query, a dashboard or an alert can ask for."""
    return tuple(name for metric in METRICS for name in metric.series)


def rows_label(rows: int) -> str:
    """The bucket of a pass by its rows: the least power of two that they fit in."""
    if rows > MAX_ROWS_LABEL:
        return MORE_ROWS
    return str(1 << max(rows - 1, 0).bit_length())


def refusal_name(reason: int) -> str:
    """A refusal's reason as labels have it."""
    name = worker_pb2.RefusalReason.Name(reason)
    return name.removeprefix("REFUSAL_REASON_").lower()


_CODES = tuple(
    sorted({c.grpc_name for c in vars(errors).values() if hasattr(c, "grpc_name")} | {"UNKNOWN"})
)
_OTHER_REASON = "store"
FENCE_REASONS = ("stale_epoch", "nonce_mismatch", "stale_number")

LABELS: Mapping[str, tuple[str, tuple[str, ...] | None]] = {
    "tier": ("whose process, or whose workers, it is about", TIERS),
    "model": ("name of a served model; empty where a request named none of them", None),
    "proposer": ("who may guess, by the request", ("draft", "ngram", "auto")),
    "status": ("gRPC status of the call", ("OK", *_CODES)),
    "error.type": ("gRPC status of what went wrong; absent or empty where nothing did", _CODES),
    "finish_reason": (
        "why a generation ended; none where it was cut off",
        (*(reason.value for reason in FinishReason), "none"),
    ),
    "type": (
        "input: tokens of the log before the first generated one; cached: those of them whose KV "
        "was there; output: generated ones",
        ("input", "cached", "output"),
    ),
    "source": ("where emitted tokens came from", tuple(source.value for source in TokenSource)),
    "position": (
        "place of a guess in its proposal, from 0",
        tuple(map(str, range(MAX_PROPOSAL_TOKENS))),
    ),
    "k": ("num_speculative_tokens", tuple(map(str, range(MAX_SPECULATIVE_TOKENS + 1)))),
    "rows": (
        "rows of a pass, rounded up to a power of two",
        (*(str(1 << i) for i in range(MAX_ROWS_LABEL.bit_length())), MORE_ROWS),
    ),
    "result": (
        "what became of it",
        (
            *("hit", "miss", "used", "unused", "shared", "computed"),
            *("written", "restored", "missed", "gone", "done", "late", "declined"),
            *("known", "unknown", "failed", "began", "full", "no_target"),
        ),
    ),
    "change": (
        "what happened to workers: they came, went, or were refused (other weights, another "
        "tokenizer or protocol)",
        ("came", "gone", "refused"),
    ),
    "state": (
        "of work, waiting for KV, running or parked until its draft answers; of KV blocks, used by "
        "a sequence, cached for a prefix that may come again, or free",
        ("waiting", "running", "parked", "used", "cached", "free"),
    ),
    "reason": (
        "why entries were refused, fenced or sessions closed; of KV blocks of the block store: "
        "damaged, of another layout (foreign) or of other tokens; of that store: failed or full",
        (
            *map(refusal_name, worker_pb2.RefusalReason.values()),
            _OTHER_REASON,
            "evicted",
            "expired",
            *("damaged", "foreign", "other_tokens", "failed", "full"),
        ),
    ),
    "for": ("what a draft guessed for", ("chain", "outcome")),
    "chosen_for": (
        "why this target: KV of a kept session; a prefix that this orchestrator sent there, or "
        "that the index of KV blocks alone knows of; its load, where none had anything",
        ("session", "prefix", "index", "load"),
    ),
    "operation": ("an operation of the session store", None),
    "gen_ai.operation.name": (
        "chat, or text_completion for a prompt without messages",
        ("chat", "text_completion"),
    ),
    "gen_ai.provider.name": ("always outrider", ("outrider",)),
    "gen_ai.request.model": ("as model", None),
}
"""Each label's meaning, and the values that it may have; None: as many as the code or the
deployment names."""

_GEN_AI = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model")
_SPECULATION = ("model", "proposer")
_WORKER = ("tier", "model")

# Boundaries that the GenAI conventions ask for, with finer ones below: a token may take 2 ms here.
_REQUEST_S = tuple(0.01 * 2**i for i in range(14))
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    10.0,
)
_PER_TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3),
    *(0.4, 0.5, 0.75, 1.0, 2.5),
)
_PASS_S = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1),
    *(0.2, 0.5, 1.0, 2.5),
)


def _metric(
    name: str,
    kind: Kind,
    unit: str,
    labels: Iterable[str],
    services: tuple[str, ...],
    meaning: str,
    buckets: tuple[float, ...] = (),
) -> Metric:
    return Metric(name, kind, unit, tuple(labels), services, meaning, buckets)


def _counter(
    name: str, unit: str, labels: Iterable[str], services: tuple[str, ...], meaning: str
) -> Metric:
    return _metric(name, Kind.COUNTER, unit, labels, services, meaning)


def _size(
    name: str, unit: str, labels: Iterable[str], services: tuple[str, ...], meaning: str
) -> Metric:
    return _metric(name, Kind.SIZE, unit, labels, services, meaning)


_ORCHESTRATOR_METRICS = (
    _metric(
        "gen_ai.server.request.duration",
        Kind.HISTOGRAM,
        "s",
        (*_GEN_AI, "error.type"),
        (ORCHESTRATOR,),
        "From the arrival of a request to its end, failed ones included.",
        _REQUEST_S,
    ),
    _metric(
        "gen_ai.server.time_to_first_token",
        Kind.HISTOGRAM,
        "s",
        _GEN_AI,
        (ORCHESTRATOR,),
        "From the arrival of a request to its first token, which is in the store by then.",
        _FIRST_TOKEN_S,
    ),
    _metric(
        "gen_ai.server.time_per_output_token",
        Kind.HISTOGRAM,
        "s",
        _GEN_AI,
        (ORCHESTRATOR,),
        "Of each completed request, the time after its first token over the tokens after it.",
        _PER_TOKEN_S,
    ),
    _counter(
        "outrider.requests",
        "{request}",
        ("model", "status", "finish_reason"),
        (ORCHESTRATOR,),
        "Generate calls that have ended.",
    ),
    _size("outrider.streams", "{stream}", (), (ORCHESTRATOR,), "Generations that run now."),
    _counter(
        "outrider.admissions",
        "{request}",
        ("result",),
        (ORCHESTRATOR,),
        "Requests that got a place at a target (began), or did not: too many waited (full), their "
        "turn would have come or came too late (late), or no target was there (no_target).",
    ),
    _counter(
        "outrider.placements",
        "{generation}",
        ("chosen_for",),
        (ORCHESTRATOR,),
        "Targets that were chosen for generations, at their beginning or when one had to go.",
    ),
    _counter(
        "outrider.moves",
        "{generation}",
        ("tier",),
        (ORCHESTRATOR,),
        "Generations that went on with another worker of a tier: theirs was lost, is to go or, of "
        "drafts, failed or had far more to do.",
    ),
    _counter(
        "outrider.prefix_index.lookups",
        "{prompt}",
        ("result",),
        (ORCHESTRATOR,),
        "Prompts that the index of KV blocks was asked about: somebody holds a part of it (known) "
        "or nobody (unknown), or the answer was late or failed.",
    ),
    _counter(
        "outrider.workers.changes",
        "{worker}",
        ("tier", "change"),
        (ORCHESTRATOR,),
        "Workers that discovery brought, that were let go, and that do not fit the others.",
    ),
    _size(
        "outrider.requests.waiting",
        "{request}",
        ("model",),
        (ORCHESTRATOR,),
        "Requests that wait for a place at a target.",
    ),
    _counter(
        "outrider.tokens", "{token}", ("model", "type"), (ORCHESTRATOR,), "Tokens of generations."
    ),
    _counter(
        "outrider.rounds",
        "{round}",
        _SPECULATION,
        (ORCHESTRATOR,),
        "Rounds, with and without a proposal. Tokens of rounds over this is the mean acceptance "
        "length.",
    ),
    _counter(
        "outrider.round.tokens",
        "{token}",
        (*_SPECULATION, "source"),
        (ORCHESTRATOR,),
        "Tokens that rounds brought, by where they came from.",
    ),
    _counter(
        "outrider.round.time",
        "s",
        _SPECULATION,
        (ORCHESTRATOR,),
        "All rounds, each from the verdict before to its own.",
    ),
    _counter(
        "outrider.draft.exposed_time",
        "s",
        _SPECULATION,
        (ORCHESTRATOR,),
        "Of it, waiting for proposals: draft time that nothing hid.",
    ),
    _counter(
        "outrider.verify.wait_time",
        "s",
        _SPECULATION,
        (ORCHESTRATOR,),
        "Of it, waiting for verdicts.",
    ),
    _counter(
        "outrider.guesses.proposed",
        "{guess}",
        (*_SPECULATION, "position"),
        (ORCHESTRATOR,),
        "Guesses that were verified.",
    ),
    _counter(
        "outrider.guesses.accepted",
        "{guess}",
        (*_SPECULATION, "position"),
        (ORCHESTRATOR,),
        "Guesses that survived. What is missing to those proposed is draft work wasted by "
        "rejection.",
    ),
    _counter(
        "outrider.controller.decisions",
        "{decision}",
        (*_SPECULATION, "k"),
        (ORCHESTRATOR,),
        "How many guesses the controller wanted after a round; one decision may stand for several "
        "plain rounds that came together.",
    ),
    _counter(
        "outrider.buffer.lookups",
        "{verdict}",
        (*_SPECULATION, "result"),
        (ORCHESTRATOR,),
        "Verdicts that the outcome buffer was asked for: hit, the next verification started at "
        "once; miss, a plain round followed.",
    ),
    _counter(
        "outrider.proposals.dropped",
        "{proposal}",
        _SPECULATION,
        (ORCHESTRATOR,),
        "Proposals that came too late, did not match or were malformed.",
    ),
    _counter(
        "outrider.fallback_rounds",
        "{round}",
        _SPECULATION,
        (ORCHESTRATOR,),
        "Rounds decoded plainly because the proposer failed or was away.",
    ),
    _counter(
        "outrider.store.operations",
        "{operation}",
        ("operation",),
        (ORCHESTRATOR,),
        "Calls of the session store that have ended, failed and repeated ones included.",
    ),
    _counter(
        "outrider.store.time", "s", ("operation",), (ORCHESTRATOR,), "The time that they took."
    ),
    _counter(
        "outrider.store.errors",
        "{operation}",
        ("operation", "error.type"),
        (ORCHESTRATOR,),
        "Those that failed.",
    ),
    _counter(
        "outrider.store.commit.retries",
        "{operation}",
        (),
        (ORCHESTRATOR,),
        "Commits that were repeated because the store did not answer.",
    ),
    _counter(
        "outrider.takeovers",
        "{generation}",
        (),
        (ORCHESTRATOR,),
        "Generations that were gone on with from the store, at their clients' offsets.",
    ),
    _counter(
        "outrider.tokens.sent_undurable",
        "{token}",
        (),
        (ORCHESTRATOR,),
        "Tokens that best-effort streams told before the store had them.",
    ),
)

_WORKER_METRICS = (
    _metric(
        "outrider.pass.duration",
        Kind.HISTOGRAM,
        "s",
        (*_WORKER, "rows"),
        WORKERS,
        "Passes with all that they draw: verification on a target, k steps of guessing on a draft, "
        "chunks of prompts on both.",
        _PASS_S,
    ),
    _counter(
        "outrider.pass.rows",
        "{row}",
        _WORKER,
        WORKERS,
        "Rows of passes. Over the number of passes it is the batch.",
    ),
    _metric(
        "outrider.pass.rows.limit",
        Kind.GAUGE,
        "{row}",
        _WORKER,
        WORKERS,
        "Rows of one pass at most.",
    ),
    _size(
        "outrider.works",
        "{work}",
        (*_WORKER, "state"),
        WORKERS,
        "Entries under way: the queue is those that wait for KV.",
    ),
    _counter(
        "outrider.work.waiting_time",
        "s",
        _WORKER,
        WORKERS,
        "Time that entries waited for KV while passes ran, summed over entries: its rate is the "
        "mean length of the queue.",
    ),
    _size("outrider.sessions", "{session}", _WORKER, WORKERS, "Sessions that the worker holds."),
    _counter(
        "outrider.session.closures",
        "{session}",
        (*_WORKER, "reason"),
        WORKERS,
        "Sessions that it closed unasked: evicted by a new one, or unused for too long.",
    ),
    _size("outrider.kv.blocks", "{block}", (*_WORKER, "state"), WORKERS, "KV blocks."),
    _counter(
        "outrider.kv.preemptions",
        "{sequence}",
        _WORKER,
        WORKERS,
        "Times that a session lost its KV to another.",
    ),
    _counter(
        "outrider.prefix.tokens",
        "{token}",
        (*_WORKER, "result"),
        WORKERS,
        "Tokens, in whole KV blocks, that sessions lacked when their work was admitted: KV shared "
        "with another session, or to be computed.",
    ),
    _counter(
        "outrider.need_tokens",
        "{reply}",
        _WORKER,
        WORKERS,
        "Entries whose base the worker lacked tokens of.",
    ),
    _counter(
        "outrider.refusals",
        "{reply}",
        (*_WORKER, "reason"),
        WORKERS,
        "Entries that were not carried out.",
    ),
    _counter(
        "outrider.draft.proposals",
        "{proposal}",
        ("model", "for"),
        (DRAFT,),
        "Proposals that the draft made: one for a base, or for each outcome.",
    ),
    _counter(
        "outrider.draft.guesses",
        "{guess}",
        ("model", "for"),
        (DRAFT,),
        "Guesses in them. What is missing of those accepted is wasted draft work of every kind: "
        "rejected, for outcomes that did not come about, late.",
    ),
    _counter(
        "outrider.buffer.outcomes",
        "{outcome}",
        ("model", "result"),
        (ORCHESTRATOR, TARGET),
        "Outcomes that drafts had prepared when the verdict fell: the one that came about, and "
        "those for nothing.",
    ),
    _counter(
        "outrider.buffer.guesses",
        "{guess}",
        ("model", "result"),
        (ORCHESTRATOR, TARGET),
        "Guesses prepared with them, likewise.",
    ),
)

_KV_STORE_METRICS = (
    _size(
        "outrider.kv_store.up",
        "{worker}",
        _WORKER,
        WORKERS,
        "Workers that use the block store; one that failed is left alone for up to 30 s.",
    ),
    _counter(
        "outrider.kv_store.blocks",
        "{block}",
        (*_WORKER, "result"),
        WORKERS,
        "KV blocks of the block store: written, restored, missed (a restore ended where one was "
        "not there), or gone from the pool before they were written.",
    ),
    _counter(
        "outrider.kv_store.io",
        "By",
        (*_WORKER, "result"),
        WORKERS,
        "Bytes of the blocks written and restored.",
    ),
    _counter(
        "outrider.kv_store.tokens",
        "{token}",
        _WORKER,
        WORKERS,
        "Tokens whose KV was restored rather than computed.",
    ),
    _counter(
        "outrider.kv_store.restores",
        "{restore}",
        (*_WORKER, "result"),
        WORKERS,
        "Prefixes that were brought back (done), came too late, or were not asked for because "
        "computing them was thought to be faster (declined).",
    ),
    _counter(
        "outrider.kv_store.refusals",
        "{block}",
        (*_WORKER, "reason"),
        WORKERS,
        "Blocks from the store that were not what they should be, and were not used.",
    ),
    _counter(
        "outrider.kv_store.errors",
        "{operation}",
        (*_WORKER, "reason"),
        WORKERS,
        "Operations that failed, or found the store full.",
    ),
    _counter(
        "outrider.kv_store.offers_dropped",
        "{prefix}",
        _WORKER,
        WORKERS,
        "Prefixes that were not written because the store was away or the queue to it was full.",
    ),
)

_SHARED_METRICS = (
    _counter(
        "outrider.fences",
        "{operation}",
        ("tier", "reason"),
        TIERS,
        "What was refused because epoch, nonce, number or prefix did not match: entries by "
        "workers, writes by the store.",
    ),
    _counter(
        "outrider.cancellations",
        "{request}",
        ("tier",),
        TIERS,
        "Generations whose caller went away; on workers, cancel entries.",
    ),
    _size(
        "outrider.links.up",
        "{worker}",
        ("tier",),
        (ORCHESTRATOR, TARGET),
        "Workers of a tier that this process is connected to.",
    ),
    _size(
        "outrider.links.waiting",
        "{entry}",
        ("tier",),
        (ORCHESTRATOR, TARGET),
        "Entries sent to workers of a tier that replies are awaited for.",
    ),
    _counter(
        "outrider.links.losses",
        "{connection}",
        ("tier",),
        (ORCHESTRATOR, TARGET),
        "Connections to workers of a tier that ended.",
    ),
    _counter(
        "outrider.links.late_replies",
        "{reply}",
        ("tier",),
        (ORCHESTRATOR, TARGET),
        "Replies that nobody waited for any more, and that were dropped.",
    ),
    _counter(
        "outrider.spans.dropped",
        "{round}",
        ("tier",),
        TIERS,
        "Rounds whose spans were not written because too many waited for it; where traces are on.",
    ),
)

METRICS = (*_ORCHESTRATOR_METRICS, *_WORKER_METRICS, *_KV_STORE_METRICS, *_SHARED_METRICS)
BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}


def markdown() -> str:
    """The tables of docs/metrics.md."""
    head = "| metric | in Prometheus | kind | unit | labels | from | meaning |"
    lines = [head, "|" + "---|" * 7]
    for metric in METRICS:
        cells = (
            f"`{metric.name}`",
            f"`{metric.prometheus_name}`",
            metric.kind.value,
            metric.unit,
            ", ".join(map(prometheus_label, metric.labels)),
            ", ".join(metric.services),
            metric.meaning,
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| label | values | meaning |", "|---|---|---|"]
    for key, (meaning, values) in LABELS.items():
        lines.append(f"| {prometheus_label(key)} | {_shown(values)} | {meaning} |")
    return "\n".join(lines) + "\n"


def _shown(values: tuple[str, ...] | None) -> str:
    if values is None:
        return ""
    if len(values) > 16 and values[0].isdigit():
        return f"{values[0]} … {values[-1]}"
    return ", ".join(values)
