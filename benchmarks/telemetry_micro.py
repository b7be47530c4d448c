"""What telemetry adds, in microseconds: `python benchmarks/telemetry_micro.py`.

Each figure is the best of several runs, since others may use the machine. A round of a session
takes 2 to 30 ms.
"""

import timeit
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from outrider.engine.rows import Branch, Draw
from outrider.engine.scheduler import Work
from outrider.engine.sequence import Sequence
from outrider.remote.outcomes import BufferUse
from outrider.speculation.length import Decision
from outrider.speculation.observation import Observation
from outrider.telemetry.context import TraceContext
from outrider.telemetry.metrics import Metrics
from outrider.telemetry.service import OFF, Telemetry
from outrider.telemetry.spans import SpanIds, Spans
from outrider.types import GenerationSpec, SamplingParams, SpeculationStats, VerificationMode
from outrider.v1 import generation_pb2, worker_pb2
from outrider.worker.metrics import watch_worker
from outrider.worker.traces import WorkTraces, _Told
from services.draft.drafter import DraftWork
from services.orchestrator.decoder import RoundRecord, RoundTimes
from services.orchestrator.metrics import Progress, Sums
from services.orchestrator.observed import RequestWatch, Watch
from services.orchestrator.store_tally import StoreTally

RUNS = 7
TRACE = TraceContext(0xABC, 0xDEF, sampled=True)


class Nowhere(SpanExporter):
    def export(self, spans: Any) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def record(context_len: int = 500) -> RoundRecord:
    seen = Observation(3, 2, 0.001, 0.005, batch_rows=4, context_len=context_len, round_s=0.006)
    inputs = {name: 1.0 for name in "abcdefghijkl"}
    return RoundRecord(seen, 3, 4, Decision(3, 4, "draft", 100.0, 50.0, inputs), 1.0)


def watched(telemetry: Telemetry, watch: Watch | None = None) -> RequestWatch:
    """A request that has become a generation."""
    watch = watch or Watch(telemetry, trace_every=32, model_names=lambda: ["m"])
    context: Any = SimpleNamespace(invocation_metadata=lambda: (), time_remaining=lambda: None)
    request = watch.request(generation_pb2.GenerateRequest(), context).__enter__()
    stats = SpeculationStats(
        9, 27, 18, proposed_by_position=(9,) * 3, accepted_by_position=(6,) * 3
    )
    generation: Any = SimpleNamespace(
        progress=Progress(stats, RoundTimes(), 30), finish_reason=None
    )
    plan: Any = SimpleNamespace(
        session_id="s",
        request_id="r",
        mode=VerificationMode.COUPLED,
        proposer="draft",
        prompt_len=100,
    )
    request.begins(generation, plan, "m")
    return request


def verification() -> tuple[Work, worker_pb2.Reply]:
    entry = worker_pb2.Entry(verify=worker_pb2.VerifyEntry())
    entry.header.trace_every = 1
    sequence = Sequence()
    sequence.spec = GenerationSpec(SamplingParams(), prompt_len=1)
    work = Work(sequence, [1], 1, 1, 0.0, owner=SimpleNamespace(entry=entry))
    work.started = work.arrived
    return work, worker_pb2.Reply(verified=worker_pb2.Verified(num_accepted=2, num_proposed=3))


class Running:
    """A generation among many."""

    def __init__(self, like: RequestWatch) -> None:
        self.key, self._like = like.key, like

    @property
    def progress(self) -> Progress:
        return self._like.progress


def new_metrics() -> Metrics:
    return Metrics(MeterProvider([InMemoryMetricReader()]).get_meter("bench"))


def show(what: str, action: Callable[[], object], number: int = 2000) -> None:
    best = min(timeit.repeat(action, number=number, repeat=RUNS)) / number * 1e6
    print(f"  {what:<70}{best:>9.2f} us", flush=True)


def orchestrator(spans: Spans) -> None:
    off, counted = watched(OFF), watched(Telemetry(new_metrics()))
    traced = watched(Telemetry(spans=spans))
    assert traced.trace is not None
    told = 32 * 20 + traced.trace.trace_id % 32 + 3
    one, here, away = [record()], [record(told)], [record(told + 1)]
    tally = StoreTally()

    def operation() -> None:
        with tally.operation("commit"):
            pass

    print("a round, in the orchestrator")
    show("telemetry off", lambda: off.rounds(one))
    show("metrics on", lambda: counted.rounds(one))
    show("of a traced request, not told (31 of 32)", lambda: traced.rounds(away))
    show("of a traced request, told (1 of 32)", lambda: traced.rounds(here), 300)
    spans.later.finish()
    trace = traced._trace
    assert trace is not None
    show("  written by another thread", lambda: trace._round(here[0], told, 100.0), 300)
    show("its commit counted, off or on", operation)
    print("a request, all but its rounds")
    show("telemetry off", lambda: watched(OFF).__exit__(None, None, None), 300)
    counted_again = Telemetry(new_metrics())
    watch = Watch(counted_again, model_names=lambda: ["m"])
    show("metrics on", lambda: watched(counted_again, watch).__exit__(None, None, None), 300)
    sums = Sums(fresh_s=0.0)
    for _ in range(1000):
        sums.begin(Running(counted))
    print("a collection")
    show("summing up 1000 running generations", sums.all, 3)


def workers(spans: Spans) -> None:
    use, made = BufferUse(), DraftWork()
    draw = Draw(GenerationSpec(SamplingParams()), 7, 4, (Branch(0, 0),) * 8)
    work, reply = verification()
    traces = WorkTraces(spans, tier="target", model="m")
    worker: Any = SimpleNamespace(num_waiting=0, limits=None, counters={})
    watch_worker(new_metrics(), worker, tier="target", model="m")
    print("a round, in the workers")
    show("target: outcomes of the buffer counted, off or on", lambda: use.count(8, 4, hit=True))
    show("draft: guesses counted, off or on", lambda: made.count(draw))
    show("of a traced request, told (1 of 32)", lambda: traces.tell(TRACE, work, reply), 300)
    spans.later.finish()
    told = _Told(TRACE, 7, "verify", 1.0, 1.1, 1.2, 4, 0, reply)
    show("  written by another thread, while a pass runs", lambda: traces._write(told), 300)
    print("a pass, all sessions together")
    show("metrics on", lambda: worker.on_pass(0.005, 7))


def main() -> None:
    tracers = TracerProvider()
    tracers.add_span_processor(BatchSpanProcessor(Nowhere()))
    spans = Spans(tracers.get_tracer("bench"), SpanIds())
    orchestrator(spans)
    workers(spans)
    tracers.shutdown()


if __name__ == "__main__":
    main()
