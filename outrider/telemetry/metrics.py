"""Metrics by the names of the catalog.

What changes many times a second is counted in plain numbers of the code that it happens in;
`observe` names a function that reads them when somebody collects. What happens once a request or
a pass may go through `adder` and `recorder`, which take some microseconds.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Generic, TypeVar
from weakref import WeakKeyDictionary

from outrider.telemetry.catalog import BY_NAME, Kind, Metric

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation

T = TypeVar("T")
Labels = Mapping[str, str]
Sample = tuple[float, Labels]
Record = Callable[[float, Labels], None]

NO_LABELS: Labels = {}


class Metrics:
    """The metrics of a process. `observe`'s functions are called from any thread."""

    def __init__(self, meter: "Meter") -> None:
        self._meter = meter
        self._made: set[str] = set()

    def observe(self, name: str, read: Callable[[], Iterable[Sample]]) -> None:
        """Read a counter, size or gauge whenever somebody collects."""
        from opentelemetry.metrics import Observation

        metric = self._take(name)
        make = {
            Kind.COUNTER: self._meter.create_observable_counter,
            Kind.SIZE: self._meter.create_observable_up_down_counter,
            Kind.GAUGE: self._meter.create_observable_gauge,
        }[metric.kind]

        def callback(options: "CallbackOptions") -> "Iterable[Observation]":
            return [Observation(value, labels) for value, labels in read()]

        make(metric.name, [callback], unit=metric.unit, description=metric.meaning)

    def adder(self, name: str) -> Record:
        """Adds to a counter."""
        metric = self._take(name)
        counter = self._meter.create_counter(
            metric.name, unit=metric.unit, description=metric.meaning
        )
        return lambda value, labels: counter.add(value, labels)

    def recorder(self, name: str) -> Record:
        """Records values of a histogram."""
        metric = self._take(name)
        histogram = self._meter.create_histogram(
            metric.name,
            unit=metric.unit,
            description=metric.meaning,
            explicit_bucket_boundaries_advisory=metric.buckets,
        )
        return lambda value, labels: histogram.record(value, labels)

    def _take(self, name: str) -> Metric:
        if name in self._made:
            raise RuntimeError(f"{name} has two sources")
        self._made.add(name)
        return BY_NAME[name]


class Summed(Generic[T]):
    """The sum of a count over things that come and go: what is gone has been counted."""

    def __init__(self, count: Callable[[T], int]) -> None:
        self._count = count
        self._seen: WeakKeyDictionary[T, int] = WeakKeyDictionary()
        self._total = 0
        self._lock = threading.Lock()

    def over(self, things: Iterable[T]) -> int:
        """What all things that ever were given have counted, as of their last time here."""
        with self._lock:
            for thing in things:
                now = self._count(thing)
                self._total += max(now - self._seen.get(thing, 0), 0)
                self._seen[thing] = now
            return self._total
