"""The metrics of the orchestrator.

A round adds to nothing here: generations count anyway, and whoever collects sums up those that
run and those that have ended.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import zip_longest
from operator import attrgetter
from typing import NamedTuple, Protocol

from outrider.telemetry.catalog import ORCHESTRATOR, WORKERS
from outrider.telemetry.metrics import NO_LABELS, Labels, Metrics, Sample
from outrider.types import SpeculationStats
from services.orchestrator.admission import OUTCOMES
from services.orchestrator.decoder import RoundTimes
from services.orchestrator.prefix_holders import ANSWERS
from services.orchestrator.seating import CHOSEN_FOR
from services.orchestrator.store_tally import StoreTally
from services.orchestrator.workers import CHANGES

_FRESH_S = 0.1
"""A sum over all generations serves all metrics of one collection."""


class Progress(NamedTuple):
    """How far a generation is, or some are together."""

    stats: SpeculationStats = SpeculationStats()
    times: RoundTimes = RoundTimes()
    output_tokens: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    """Of another target, after the first was lost, it may be fewer."""
    chosen: Sequence[int] = ()
    """Of each length, how often the controller chose it."""


class Key(NamedTuple):
    """What generations are summed up by."""

    model: str
    proposer: str


class Counting(Protocol):
    """A generation that counts."""

    key: Key

    @property
    def progress(self) -> Progress: ...


class Sums:
    """Generations that run, and those that ran, by key."""

    def __init__(self, *, fresh_s: float = _FRESH_S) -> None:
        self._fresh_s = fresh_s
        self._running: set[Counting] = set()
        self._ended: dict[Key, Progress] = {}
        self._lock = threading.Lock()
        """Held for moments: generations begin and end on the event loop."""
        self._latest: dict[Key, Progress] = {}
        self._taken = float("-inf")
        self._reading = threading.Lock()

    @property
    def num_running(self) -> int:
        return len(self._running)

    def begin(self, counting: Counting) -> None:
        with self._lock:
            self._running.add(counting)

    def end(self, counting: Counting) -> None:
        """It counts no further."""
        with self._lock:
            if counting in self._running:
                self._running.discard(counting)
                before = self._ended.get(counting.key, Progress())
                self._ended[counting.key] = total((before, counting.progress))

    def all(self) -> dict[Key, Progress]:
        """Everything so far, at most `fresh_s` old; from any thread. No sum is ever smaller than it
        was before."""
        with self._reading:
            if time.monotonic() - self._taken >= self._fresh_s:
                self._latest = {key: total(parts) for key, parts in self._parts().items()}
                self._taken = time.monotonic()
            return self._latest

    def _parts(self) -> dict[Key, list[Progress]]:
        with self._lock:
            parts = {key: [ended] for key, ended in self._ended.items()}
            for counting in self._running:
                # What need not only grow counts in the end.
                progress = counting.progress._replace(cached_tokens=0)
                parts.setdefault(counting.key, []).append(progress)
            return parts


_COUNTS = tuple(f.name for f in fields(SpeculationStats) if not f.name.endswith("_by_position"))
_TIMES = tuple(f.name for f in fields(RoundTimes))


def total(parts: Sequence[Progress]) -> Progress:
    """Several as one; field by field, because there may be thousands."""
    stats, times = [part.stats for part in parts], [part.times for part in parts]
    return Progress(
        SpeculationStats(
            **{name: sum(map(attrgetter(name), stats)) for name in _COUNTS},
            proposed_by_position=_columns(s.proposed_by_position for s in stats),
            accepted_by_position=_columns(s.accepted_by_position for s in stats),
        ),
        RoundTimes(**{name: sum(map(attrgetter(name), times)) for name in _TIMES}),
        output_tokens=sum(part.output_tokens for part in parts),
        input_tokens=sum(part.input_tokens for part in parts),
        cached_tokens=sum(part.cached_tokens for part in parts),
        chosen=_columns(part.chosen for part in parts),
    )


def _columns(rows: Iterable[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(sum, zip_longest(*rows, fillvalue=0)))


def watch_generations(metrics: Metrics, sums: Sums) -> None:
    """Tell what generations do."""

    def observe(name: str, read: Callable[[Progress], Iterable[Sample]]) -> None:
        def samples() -> list[Sample]:
            return [
                (value, {**key._asdict(), **labels})
                for key, progress in sums.all().items()
                for value, labels in read(progress)
            ]

        metrics.observe(name, samples)

    def count(name: str, read: Callable[[SpeculationStats], float]) -> None:
        observe(name, lambda progress: [(read(progress.stats), NO_LABELS)])

    def seconds(name: str, read: Callable[[RoundTimes], int]) -> None:
        observe(name, lambda progress: [(read(progress.times) / 1e6, NO_LABELS)])

    count("outrider.rounds", lambda stats: stats.rounds)
    count("outrider.proposals.dropped", lambda stats: stats.dropped_proposals)
    count("outrider.fallback_rounds", lambda stats: stats.fallback_rounds)
    seconds("outrider.round.time", lambda times: times.rounds_us)
    seconds("outrider.draft.exposed_time", lambda times: times.draft_us)
    seconds("outrider.verify.wait_time", lambda times: times.verify_us)
    observe("outrider.round.tokens", lambda progress: _sources(progress.stats))
    observe("outrider.buffer.lookups", lambda progress: _lookups(progress.stats))
    observe(
        "outrider.guesses.proposed",
        lambda progress: _numbered("position", progress.stats.proposed_by_position),
    )
    observe(
        "outrider.guesses.accepted",
        lambda progress: _numbered("position", progress.stats.accepted_by_position),
    )
    observe("outrider.controller.decisions", lambda progress: _numbered("k", progress.chosen))
    metrics.observe("outrider.tokens", lambda: _tokens(sums))
    metrics.observe("outrider.streams", lambda: [(sums.num_running, NO_LABELS)])


def watch_store(metrics: Metrics, tally: StoreTally) -> None:
    """Tell what the session store is asked for."""

    def by_operation(values: Callable[[], dict[str, float]]) -> Callable[[], list[Sample]]:
        return lambda: [(value, {"operation": name}) for name, value in values().items()]

    metrics.observe("outrider.store.operations", by_operation(lambda: dict(tally.ended)))
    metrics.observe("outrider.store.time", by_operation(lambda: dict(tally.seconds)))
    metrics.observe(
        "outrider.store.errors",
        lambda: [
            (count, {"operation": name, "error.type": status})
            for (name, status), count in dict(tally.failed).items()
        ],
    )
    metrics.observe("outrider.store.commit.retries", lambda: [(tally.commit_retries, NO_LABELS)])
    metrics.observe("outrider.takeovers", lambda: [(tally.takeovers, NO_LABELS)])
    metrics.observe("outrider.tokens.sent_undurable", lambda: [(tally.sent_undurable, NO_LABELS)])
    metrics.observe(
        "outrider.fences", lambda: [(tally.fenced, {"tier": ORCHESTRATOR, "reason": "store"})]
    )


def watch_placement(
    metrics: Metrics,
    admissions: Mapping[str, int],
    seats: Mapping[str, int],
    lookups: Mapping[str, int],
    workers: Mapping[str, Mapping[str, int]],
) -> None:
    """Tell which requests get a target, which one, and why; the counters of Admission, Seating,
    PrefixHolders and, by name, of each Tier."""

    def observe(name: str, label: str, counts: Mapping[str, int], values: Iterable[str]) -> None:
        # All from the beginning: what is not there yet has no rate.
        metrics.observe(name, lambda: [(counts.get(v, 0), {label: v}) for v in values])

    metrics.observe(
        "outrider.admissions",
        lambda: [(admissions.get(key, 0), {"result": result}) for result, key in OUTCOMES.items()],
    )
    observe("outrider.placements", "chosen_for", seats, CHOSEN_FOR)
    observe("outrider.prefix_index.lookups", "result", lookups, ANSWERS)
    metrics.observe(
        "outrider.moves",
        lambda: [(seats.get(f"{tier}s_changed", 0), {"tier": tier}) for tier in WORKERS],
    )
    metrics.observe(
        "outrider.workers.changes",
        lambda: [
            (counts.get(change, 0), {"tier": tier, "change": change})
            for tier, counts in workers.items()
            for change in CHANGES
        ],
    )


def _sources(stats: SpeculationStats) -> list[Sample]:
    found = {
        "plain": stats.plain,
        "accepted": stats.accepted,
        "recovered": stats.recovered,
        "bonus": stats.bonus,
    }
    return [(count, {"source": source}) for source, count in found.items()]


def _lookups(stats: SpeculationStats) -> list[Sample]:
    return [(stats.buffer_hits, {"result": "hit"}), (stats.buffer_misses, {"result": "miss"})]


def _numbered(label: str, counts: Iterable[int]) -> list[Sample]:
    return [(count, {label: str(number)}) for number, count in enumerate(counts)]


def _tokens(sums: Sums) -> list[Sample]:
    by_model: dict[str, list[Progress]] = {}
    for key, progress in sums.all().items():
        by_model.setdefault(key.model, []).append(progress)
    return [
        (value, {"model": model, "type": kind})
        for model, parts in by_model.items()
        for kind, value in (
            ("input", sum(part.input_tokens for part in parts)),
            ("cached", sum(part.cached_tokens for part in parts)),
            ("output", sum(part.output_tokens for part in parts)),
        )
    ]


class RequestMetrics:
    """What is recorded once a request."""

    def __init__(self, metrics: Metrics) -> None:
        self._count = metrics.adder("outrider.requests")
        self._cancelled = metrics.adder("outrider.cancellations")
        self._duration = metrics.recorder("gen_ai.server.request.duration")
        self._first_token = metrics.recorder("gen_ai.server.time_to_first_token")
        self._per_token = metrics.recorder("gen_ai.server.time_per_output_token")

    def first_token(self, seconds: float, labels: Labels) -> None:
        self._first_token(seconds, labels)

    def ended(self, seconds: float, labels: Labels, *, status: str, finish_reason: str) -> None:
        failed = {} if status == "OK" else {"error.type": status}
        self._duration(seconds, {**labels, **failed})
        model = labels["gen_ai.request.model"]
        self._count(1, {"model": model, "status": status, "finish_reason": finish_reason or "none"})
        if status == "CANCELLED":
            self._cancelled(1, {"tier": ORCHESTRATOR})

    def per_token(self, seconds: float, labels: Labels) -> None:
        self._per_token(seconds, labels)
