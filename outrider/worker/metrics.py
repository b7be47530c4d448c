"""The metrics of a worker: passes as they end, all else read from its counters when asked for."""

from collections.abc import Callable, Iterable, Mapping

from outrider.kv_store.blocks import REASONS as BLOCK_REASONS
from outrider.telemetry.catalog import FENCE_REASONS, refusal_name, rows_label
from outrider.telemetry.metrics import Labels, Metrics, Sample
from outrider.v1 import worker_pb2
from outrider.worker.worker import Worker, WorkerLoad

_REASONS = tuple(map(refusal_name, worker_pb2.RefusalReason.values()))
_CLOSURES = ("evicted", "expired")
_BLOCK_RESULTS = ("written", "restored", "missed", "gone")
_RESTORE_RESULTS = ("done", "late", "declined")


def watch_worker(metrics: Metrics, worker: Worker, *, tier: str, model: str) -> None:
    """Tell of a worker from now on; before it runs."""
    own = {"tier": tier, "model": model}
    worker.on_pass = _Passes(metrics, worker, own).passed
    _watch_load(metrics, worker, own)
    _watch_counters(metrics, worker, own)


def watch_kv_store(
    metrics: Metrics,
    counts: Mapping[str, int],
    is_up: Callable[[], bool],
    *,
    tier: str,
    model: str,
) -> None:
    """Tell of the block store that a worker uses: `counts` are its counters, `kv_…`."""
    own = {"tier": tier, "model": model}

    def by(label: str, **names: str) -> Callable[[], list[Sample]]:
        return lambda: [(counts[name], {**own, label: value}) for value, name in names.items()]

    def total(name: str) -> Callable[[], list[Sample]]:
        return lambda: [(counts[name], own)]

    sources: dict[str, Callable[[], list[Sample]]] = {
        "up": lambda: [(int(is_up()), own)],
        "blocks": by("result", **{r: f"kv_blocks_{r}" for r in _BLOCK_RESULTS}),
        "io": by("result", written="kv_bytes_written", restored="kv_bytes_restored"),
        "tokens": total("kv_tokens_restored"),
        "restores": by("result", **{r: f"kv_restores_{r}" for r in _RESTORE_RESULTS}),
        "refusals": by("reason", **{r: f"kv_blocks_{r}" for r in BLOCK_REASONS}),
        "errors": by("reason", failed="kv_store_errors", full="kv_store_full"),
        "offers_dropped": total("kv_offers_dropped"),
    }
    for name, read in sources.items():
        metrics.observe(f"outrider.kv_store.{name}", read)


class _Passes:
    """Counts passes; the worker's thread calls it."""

    def __init__(self, metrics: Metrics, worker: Worker, own: Labels) -> None:
        self._worker = worker
        self._own = own
        self._record = metrics.recorder("outrider.pass.duration")
        self._by_rows: dict[str, Labels] = {}
        self._rows = 0
        self._waited_s = 0.0
        metrics.observe("outrider.pass.rows", lambda: [(self._rows, own)])
        metrics.observe("outrider.work.waiting_time", lambda: [(self._waited_s, own)])

    def passed(self, seconds: float, rows: int) -> None:
        self._rows += rows
        self._waited_s += seconds * self._worker.num_waiting
        label = rows_label(rows)
        labels = self._by_rows.get(label)
        if labels is None:
            labels = self._by_rows[label] = {**self._own, "rows": label}
        self._record(seconds, labels)


def _watch_load(metrics: Metrics, worker: Worker, own: Labels) -> None:
    limits = worker.limits

    def read(samples: Callable[[WorkerLoad], Iterable[Sample]]) -> Callable[[], Iterable[Sample]]:
        return lambda: samples(worker.load)

    def by(label: str, **values: float) -> list[Sample]:
        return [(value, {**own, label: name}) for name, value in values.items()]

    metrics.observe("outrider.pass.rows.limit", lambda: [(limits.max_rows, own)])
    metrics.observe("outrider.sessions", read(lambda load: [(load.sessions, own)]))
    metrics.observe("outrider.kv.preemptions", read(lambda load: [(load.preemptions, own)]))
    metrics.observe(
        "outrider.kv.blocks",
        read(
            lambda load: by(
                "state",
                used=limits.num_blocks - load.blocks_free,
                cached=load.blocks_cached,
                free=load.blocks_free - load.blocks_cached,
            )
        ),
    )
    metrics.observe(
        "outrider.prefix.tokens",
        read(
            lambda load: by(
                "result",
                shared=load.prefix_hit_tokens,
                computed=load.prefix_tokens - load.prefix_hit_tokens,
            )
        ),
    )
    metrics.observe(
        "outrider.works",
        read(
            lambda load: by("state", waiting=load.waiting, running=load.running, parked=load.parked)
        ),
    )


def _watch_counters(metrics: Metrics, worker: Worker, own: Labels) -> None:
    counters, tier = worker.counters, {"tier": own["tier"]}

    def refusals(labels: Labels, reasons: Iterable[str]) -> list[Sample]:
        return [(counters[f"refused_{reason}"], {**labels, "reason": reason}) for reason in reasons]

    metrics.observe("outrider.refusals", lambda: refusals(own, _REASONS))
    metrics.observe("outrider.fences", lambda: refusals(tier, FENCE_REASONS))
    metrics.observe("outrider.need_tokens", lambda: [(counters["need_tokens"], own)])
    metrics.observe("outrider.cancellations", lambda: [(counters["cancelled"], tier)])
    metrics.observe(
        "outrider.session.closures",
        lambda: [(counters[f"sessions_{r}"], {**own, "reason": r}) for r in _CLOSURES],
    )
