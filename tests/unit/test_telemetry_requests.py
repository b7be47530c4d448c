"""What the orchestrator tells of requests: how they ended, what they made, and their spans."""

import asyncio
import itertools
import random
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from seat_fakes import FakeRegistry, demand, worker
from telemetry_harness import Kept

from outrider.errors import Fenced, NotFound, OutriderError, Unavailable
from outrider.speculation.length import Decision
from outrider.speculation.observation import Observation
from outrider.telemetry.context import TraceContext, current_trace
from outrider.telemetry.service import OFF
from outrider.types import Fence, FinishReason, SpeculationStats, VerificationMode
from outrider.v1 import generation_pb2
from services.orchestrator.decoder import RoundRecord, RoundTimes
from services.orchestrator.metrics import (
    Key,
    Progress,
    Sums,
    watch_generations,
    watch_placement,
    watch_store,
)
from services.orchestrator.observed import Watch
from services.orchestrator.seating import Room, Seating
from services.orchestrator.store_commit import CommitQueue
from services.orchestrator.store_tally import StoreTally

GIVEN = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
REQUEST = generation_pb2.GenerateRequest(prompt=[generation_pb2.PromptPart(text="hello")])
PLAN = SimpleNamespace(
    session_id="s", request_id="r", mode=VerificationMode.COUPLED, proposer="draft", prompt_len=9
)
PROGRESS = Progress(
    SpeculationStats(
        rounds=5,
        proposed=9,
        accepted=6,
        recovered=2,
        bonus=1,
        plain=2,
        dropped_proposals=1,
        fallback_rounds=1,
        buffer_hits=2,
        buffer_misses=1,
        proposed_by_position=(3, 3, 3),
        accepted_by_position=(3, 2, 1),
    ),
    RoundTimes(rounds_us=9_000_000, draft_us=2_000_000, verify_us=4_000_000),
    output_tokens=11,
    input_tokens=9,
    cached_tokens=4,
)


def context(metadata=(), time_left=None):
    return SimpleNamespace(invocation_metadata=lambda: metadata, time_remaining=lambda: time_left)


def generation(progress=PROGRESS, finish_reason=FinishReason.EOS):
    return SimpleNamespace(progress=progress, finish_reason=finish_reason)


def round_of(base_len, tokens=1, **record):
    seen = Observation(2, tokens - 1, 0.001, 0.004, context_len=base_len + tokens, round_s=0.006)
    return RoundRecord(seen, 3, 0, None, ended=100.0, **record)


@pytest.fixture
def kept():
    return Kept()


@pytest.fixture
def watch(kept, monkeypatch):
    monkeypatch.setattr("services.orchestrator.observed.Sums", lambda: Sums(fresh_s=0.0))
    return Watch(kept.telemetry, trace_every=16, model_names=lambda: ["m", "other"])


def test_a_request_is_counted_with_what_it_made(kept, watch):
    request = generation_pb2.GenerateRequest(model="m", prompt=REQUEST.prompt)
    with watch.request(request, context()) as told:
        told.begins(generation(), PLAN, "m")
        told.first_token()
        told.rounds([round_of(9), round_of(10)])
        assert kept.value("outrider.streams") == 1
        assert kept.value("outrider.requests") == 0
    assert kept.value("outrider.streams") == 0
    ended = {"model": "m", "status": "OK", "finish_reason": "eos"}
    assert kept.points("outrider.requests") == {frozenset(ended.items()): 1}
    of = {"model": "m", "proposer": "draft"}
    assert kept.value("outrider.rounds", **of) == 5
    assert kept.value("outrider.round.tokens", source="accepted", **of) == 6
    assert kept.value("outrider.round.tokens") == 11
    assert kept.value("outrider.round.time", **of) == 9.0
    assert kept.value("outrider.draft.exposed_time", **of) == 2.0
    assert kept.value("outrider.verify.wait_time", **of) == 4.0
    by_position = [
        [kept.value(f"outrider.guesses.{name}", position=str(i), **of) for i in range(3)]
        for name in ("proposed", "accepted")
    ]
    assert by_position == [[3, 3, 3], [3, 2, 1]]
    assert kept.value("outrider.buffer.lookups", result="hit", **of) == 2
    assert kept.value("outrider.buffer.lookups", result="miss", **of) == 1
    assert kept.value("outrider.proposals.dropped", **of) == 1
    assert kept.value("outrider.fallback_rounds", **of) == 1
    assert kept.value("outrider.controller.decisions", k="3", **of) == 2
    assert kept.value("outrider.controller.decisions", **of) == 2
    kinds = {
        kind: kept.value("outrider.tokens", model="m", type=kind)
        for kind in ("input", "cached", "output")
    }
    assert kinds == {"input": 9, "cached": 4, "output": 11}
    of = {"gen_ai.operation.name": "text_completion", "gen_ai.request.model": "m"}
    for name in ("request.duration", "time_to_first_token", "time_per_output_token"):
        assert kept.value(f"gen_ai.server.{name}", **of) == 1


@pytest.mark.parametrize(
    ("raised", "time_left", "status"),
    [
        (NotFound("gone"), None, "NOT_FOUND"),
        (Fenced("other owner"), 5.0, "ABORTED"),
        (asyncio.CancelledError(), None, "CANCELLED"),
        (GeneratorExit(), 5.0, "CANCELLED"),
        (asyncio.CancelledError(), 0.0, "DEADLINE_EXCEEDED"),
        (KeyError("a fault"), None, "UNKNOWN"),
    ],
)
def test_a_request_is_counted_however_it_ends(kept, watch, raised, time_left, status):
    with pytest.raises(type(raised)):
        with watch.request(REQUEST, context(time_left=time_left)) as told:
            told.begins(generation(finish_reason=None), PLAN, "m")
            if isinstance(raised, OutriderError):
                told.failed(raised)
            raise raised
    assert kept.value("outrider.requests", status=status, finish_reason="none", model="m") == 1
    assert kept.value("gen_ai.server.request.duration", **{"error.type": status}) == 1
    assert kept.value("outrider.cancellations") == (status == "CANCELLED")
    assert kept.value("gen_ai.server.time_per_output_token") == 0, "it made no whole answer"
    assert kept.value("outrider.tokens", type="output") == 11, "what it made counts all the same"
    [span] = kept.spans
    assert span.attributes["error.type"] == span.attributes["rpc.response.status_code"] == status
    faults = ("DEADLINE_EXCEEDED", "UNKNOWN")
    assert span.status.is_ok is (status not in faults), "a caller's fault is none of the server's"


def test_models_that_are_not_served_make_no_labels(kept, watch):
    for name in ("", "made up", "x" * 1000):
        request = generation_pb2.GenerateRequest(model=name, prompt=REQUEST.prompt)
        with watch.request(request, context()) as told:
            told.failed(NotFound("not served"))
    assert kept.value("outrider.requests", model="", status="NOT_FOUND") == 3
    assert all("gen_ai.request.model" not in span.attributes for span in kept.spans)
    assert {span.name for span in kept.spans} == {"text_completion"}


def test_the_span_of_a_request_says_what_the_conventions_ask_for(kept, watch):
    request = generation_pb2.GenerateRequest(model="m", request_id="r")
    request.prompt.add().chat.messages.add(role="user", content="secret")
    request.sampling.temperature, request.sampling.seed = 0.5, (1 << 64) - 1
    request.stop.max_tokens = 7
    metadata = (("traceparent", GIVEN), ("tracestate", "a=b"), ("authorization", "Bearer secret"))
    with watch.request(request, context(metadata)) as told:
        assert current_trace() == told.trace, "logs name it"
        told.begins(generation(), PLAN, "m")
        told.first_token()
    assert current_trace() is None
    [span] = kept.spans
    assert (span.name, span.kind.name) == ("chat m", "SERVER")
    assert f"{span.context.trace_id:032x}" == GIVEN[3:35]
    assert f"{span.parent.span_id:016x}" == GIVEN[36:52]
    assert span.context.trace_state.get("a") == "b"
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "outrider",
        "gen_ai.request.model": "m",
        "gen_ai.response.model": "m",
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.conversation.id": "s",
        "gen_ai.response.finish_reasons": ("eos",),
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.usage.output_tokens": 11,
        "outrider.request_id": "r",
        "outrider.rounds": 5,
    }
    assert expected.items() <= span.attributes.items()
    assert "gen_ai.request.seed" not in span.attributes, "it fits into no attribute"
    assert [event.name for event in span.events] == ["first token"]
    assert "secret" not in str(dict(span.attributes))


def test_rounds_are_told_where_workers_tell_them(kept, watch):
    with watch.request(REQUEST, context((("traceparent", GIVEN),))) as told:
        trace = told.trace
        told.begins(generation(), PLAN, "m")
        told.rounds([round_of(9), round_of(10, 3)])
        told.rounds([round_of(n) for n in range(13, 60)])
        # Plain rounds that came together: one record for the bases 60 to 91.
        told.rounds([round_of(91, count=32)])
    assert told.trace_every == 16
    written = kept.named("prefill") + kept.named("round")
    bases = [span.attributes["outrider.base_len"] for span in written]
    expected = [n for n in [9, 10, *range(13, 92)] if trace.tells(n, 9, 16)]
    assert sorted(bases) == expected and len(expected) == 2 + 5
    for span, base_len in zip(written, bases, strict=True):
        assert span.context.span_id == trace.round_id(base_len)
        assert span.parent.span_id == trace.span_id
        assert span.end_time - span.start_time == pytest.approx(6e6, abs=1e4)
    [prefill] = kept.named("prefill")
    assert prefill.attributes["outrider.base_len"] == 9
    together = [span for span in written if span.attributes["outrider.base_len"] >= 60]
    assert len({span.end_time // 1_000_000 for span in together}) == len(together), "one by one"


def test_a_round_says_what_the_controller_wants_and_why(kept, watch):
    decision = Decision(4, 8, "draft", 200.0, 100.0, {"plain_s": 0.01, "acceptance_1": 0.7})
    seen = Observation(3, 2, 0.002, 0.004, context_len=12, round_s=0.006, hit=True, num_asked=3)
    with watch.request(REQUEST, context()) as told:
        told.begins(generation(), PLAN, "m")
        told.rounds([RoundRecord(seen, 4, 8, decision, 100.0)])
    [prefill] = kept.named("prefill")
    expected = {
        "outrider.asked": 3,
        "outrider.proposed": 3,
        "outrider.accepted": 2,
        "outrider.draft_us": 2000,
        "outrider.buffer.hit": True,
        "outrider.next.k": 4,
        "outrider.next.fan_out": 8,
        "outrider.next.proposer": "draft",
        "outrider.next.tokens_per_s": 200.0,
        "outrider.next.plain_tokens_per_s": 100.0,
        "outrider.inputs.plain_s": 0.01,
        "outrider.inputs.acceptance_1": 0.7,
    }
    assert expected.items() <= prefill.attributes.items()


def test_commits_are_told_like_their_rounds(kept, watch):
    with watch.request(REQUEST, context((("traceparent", GIVEN),))) as told:
        trace = told.trace
        told.begins(generation(), PLAN, "m")
        for base_len in range(9, 60):
            told.on_commit(base_len, 1, 100.0)
    bases = [span.attributes["outrider.base_len"] for span in kept.named("commit")]
    assert bases == [n for n in range(9, 60) if trace.tells(n, 9, 16)]
    assert all(span.parent.span_id == trace.span_id for span in kept.named("commit"))


def test_an_unsampled_request_tells_nothing_but_passes_its_trace_on():
    kept = Kept(root=ALWAYS_OFF)
    watch = Watch(kept.telemetry, trace_every=1, model_names=lambda: ["m"])
    with watch.request(REQUEST, context()) as told:
        told.begins(generation(), PLAN, "m")
        told.first_token()
        told.rounds([round_of(9)])
        passed_on = TraceContext.parse(told.traceparent)
        assert passed_on is not None and not passed_on.sampled
        assert told.trace_every == 0 and told.on_commit is None
    assert kept.spans == []


@pytest.mark.parametrize(("given", "passed_on"), [(GIVEN, GIVEN), ("", ""), ("nonsense", "")])
def test_off_the_callers_trace_still_goes_on_and_into_logs(given, passed_on):
    metadata = (("traceparent", given),) if given else ()
    with Watch(OFF).request(REQUEST, context(metadata)) as told:
        assert told.traceparent == passed_on
        assert told.trace_every == 0, "no worker tells rounds below spans that are not there"
        assert str(current_trace() or "") == passed_on


# --- sums over generations ---------------------------------------------------------------------


class Counter:
    """A generation whose counts grow."""

    def __init__(self, key):
        self.key = key
        self.progress = Progress()

    def grow(self, by):
        stats = SpeculationStats(rounds=by, proposed_by_position=(by,) * by)
        before = self.progress
        self.progress = Progress(before.stats + stats, before.times, before.output_tokens + by)


def test_off_a_round_calls_nothing_of_telemetry_and_makes_no_object():
    """Neither spans nor metrics, nor what they would be made of: it is counted what runs."""
    watch = Watch(OFF, model_names=lambda: ["m"])
    called = set()

    def note(frame, event, _):
        if event == "call":
            called.add((Path(frame.f_code.co_filename).stem, frame.f_code.co_name))

    with watch.request(REQUEST, context()) as request:
        request.begins(generation(), PLAN, "m")
        records = [round_of(9 + i) for i in range(3)]
        before = sys.getallocatedblocks()
        for record in records:
            request.rounds([record])
        made = sys.getallocatedblocks() - before
        sys.setprofile(note)
        for record in records:
            request.rounds([record])
        sys.setprofile(None)
    assert called <= {("observed", "rounds"), ("observed", "_told_rounds")}, called
    assert made <= 3, "the lists of this test"
    assert watch.sums is None and watch.requests is None and request.trace is None


def test_sums_never_shrink_while_generations_come_and_go():
    sums, stop = Sums(fresh_s=0.0), threading.Event()
    key = Key("m", "draft")
    read: list[list[int]] = [[], []]

    def reader(values):
        while not stop.is_set():
            found = sums.all().get(key, Progress())
            values.append(found.stats.rounds)
            assert found.output_tokens >= found.stats.rounds - 3

    threads = [threading.Thread(target=reader, args=(values,)) for values in read]
    for thread in threads:
        thread.start()
    choice, total, running = random.Random(1), 0, []
    deadline = time.monotonic() + 10.0
    for turn in itertools.count():
        # On a busy machine a reader may have to wait for its turn.
        done = turn >= 3000 and min(map(len, read)) > 10
        if done or time.monotonic() > deadline:
            break
        if len(running) < 5:
            running.append(Counter(key))
            sums.begin(running[-1])
        by = choice.randint(1, 3)
        running[choice.randrange(len(running))].grow(by)
        total += by
        if choice.random() < 0.2:
            sums.end(running.pop(choice.randrange(len(running))))
    stop.set()
    for thread in threads:
        thread.join()
    for values in read:
        assert len(values) > 10 and values == sorted(values)
    for counter in running:
        sums.end(counter)
        sums.end(counter)
    assert sums.all()[key].stats.rounds == total and sums.num_running == 0


def test_sums_are_by_model_and_proposer(kept):
    sums = Sums()
    watch_generations(kept.telemetry.metrics, sums)
    keys = [Key("m", "draft"), Key("m", "ngram"), Key("other", "draft")]
    for number, key in enumerate(keys, 1):
        counter = Counter(key)
        counter.grow(number)
        sums.begin(counter)
    for number, key in enumerate(keys, 1):
        assert kept.value("outrider.rounds", **key._asdict()) == number
    assert kept.value("outrider.tokens", model="m", type="output") == 3


# --- the store ---------------------------------------------------------------------------------


def test_store_operations_are_counted_and_timed(kept):
    tally = StoreTally()
    watch_store(kept.telemetry.metrics, tally)
    for error in (None, Fenced("other"), Unavailable("away"), asyncio.CancelledError()):
        try:
            with tally.operation("commit"):
                if error is not None:
                    raise error
        except (OutriderError, asyncio.CancelledError):
            pass
    tally.commit_retries += 1
    assert kept.value("outrider.store.operations", operation="commit") == 4
    assert 0 < kept.value("outrider.store.time", operation="commit") < 1
    errors = [
        kept.value("outrider.store.errors", **{"operation": "commit", "error.type": status})
        for status in ("ABORTED", "UNAVAILABLE", "CANCELLED")
    ]
    assert errors == [1, 1, 1]
    assert kept.value("outrider.fences", tier="orchestrator", reason="store") == 1
    assert kept.value("outrider.store.commit.retries") == 1
    tally.takeovers, tally.sent_undurable = 2, 30
    assert kept.value("outrider.takeovers") == 2
    assert kept.value("outrider.tokens.sent_undurable") == 30


class AwayAtFirst:
    """A store that takes commits from the third attempt on."""

    def __init__(self):
        self.tally = StoreTally()
        self.attempts = 0

    async def commit(self, fence, **commit):
        self.attempts += 1
        if self.attempts < 3:
            raise Unavailable("away")


async def test_a_commit_that_is_repeated_is_counted_and_told_once():
    store, told = AwayAtFirst(), []
    queue = CommitQueue(
        store,
        Fence("s", 1, 1),
        durable_len=9,
        prefix_hash=1,
        on_commit=lambda from_len, count, started: told.append((from_len, count)),
    )
    queue.append([1, 2])
    await queue.drain()
    assert store.tally.commit_retries == 2 and told == [(9, 2)]
    queue.append([3])
    await queue.drain()
    assert store.tally.commit_retries == 2 and told == [(9, 2), (11, 1)]


def test_placement_is_told_by_what_targets_were_chosen_for(kept):
    registry = FakeRegistry()
    registry.targets.workers = [worker(f"t{n}", 100 + n) for n in range(2)]
    seating, lookups = Seating(registry, Room()), dict[str, int]()
    tiers = {"target": {"came": 3, "gone": 1}, "draft": {"refused": 2}}
    admissions = {"began": 5, "waited": 4, "refused_late": 2}
    watch_placement(kept.telemetry.metrics, admissions, seating.counters, lookups, tiers)
    found = kept.points("outrider.admissions")
    told = {dict(key)["result"]: n for key, n in found.items()}
    assert told == {"began": 5, "late": 2, "full": 0, "no_target": 0}
    placed = "outrider.placements"
    assert set(kept.points(placed).values()) == {0} and len(kept.points(placed)) == 4

    first = seating.try_seat(demand(session_id="kept", blocks=(1, 2)))
    first.leave(keep=True)
    seating.try_seat(demand(session_id="kept")).leave()
    seating.try_seat(demand(session_id="other", blocks=(1, 9))).leave()
    seating.try_seat(demand(session_id="third", blocks=(3, 4), holders={101: 2})).leave()
    assert {dict(key)["chosen_for"]: n for key, n in kept.points(placed).items()} == {
        "load": 1,
        "session": 1,
        "prefix": 1,
        "index": 1,
    }

    seat = seating.try_seat(demand(session_id="moves", blocks=(1, 2)))
    seat.target.link.draining = True
    seat.find_target()
    assert kept.value("outrider.moves", tier="target") == 1
    assert kept.value("outrider.moves", tier="draft") == 0
    lookups.update(late=2, known=1)
    found = kept.points("outrider.prefix_index.lookups")
    told = {dict(key)["result"]: n for key, n in found.items()}
    assert told == {"known": 1, "unknown": 0, "late": 2, "failed": 0}
    assert kept.value("outrider.workers.changes", tier="target", change="came") == 3
    assert kept.value("outrider.workers.changes", change="refused") == 2
