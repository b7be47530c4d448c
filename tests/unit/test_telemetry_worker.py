"""What a worker tells: passes, blocks, refusals, and its part in the rounds of a traced request."""

import contextlib
import threading
import time

import pytest
from telemetry_harness import Kept
from worker_harness import TIMEOUT_S, Owner, random_tokens, serving

from outrider.telemetry.context import TraceContext
from outrider.telemetry.later import Later
from outrider.types import new_session_id
from outrider.v1 import worker_pb2
from outrider.worker.metrics import watch_worker
from outrider.worker.traces import WorkTraces
from services.target.drafts import DraftPool

PROMPT = random_tokens(21, seed=5)
TRACE = TraceContext(0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7, sampled=True)


@pytest.fixture
def kept():
    return Kept()


@pytest.fixture
def bench(tiny_models, kept):
    with watched(tiny_models, kept, "target") as made:
        yield made


@contextlib.contextmanager
def watched(tiny_models, kept, tier, **limits):
    with serving(tiny_models[tier], tier, num_blocks=48, **limits) as made:
        watch_worker(kept.telemetry.metrics, made.worker, tier=tier, model="tiny")
        made.worker.traces = WorkTraces(kept.telemetry.spans, tier=tier, model="tiny")
        yield made


def test_passes_are_counted_by_their_rows(bench, kept):
    owner = Owner(bench, list(PROMPT)).opened()
    owner.tokens += owner.verify().verified.token_ids
    owner.verify(PROMPT[:3], start=len(PROMPT))
    labels = {"tier": "target", "model": "tiny"}
    assert kept.value("outrider.pass.duration", rows="32", **labels) == 1
    assert kept.value("outrider.pass.duration", rows="4", **labels) == 1
    assert kept.value("outrider.pass.duration") == 2
    assert kept.value("outrider.pass.rows", **labels) == 21 + 4
    assert kept.value("outrider.pass.rows.limit") == 512


def test_blocks_and_sessions_are_those_that_are_there(bench, kept):
    owner = Owner(bench, list(PROMPT)).opened()
    owner.verify()
    bench.settle()
    used = bench.blocks_used
    assert used == 3 == kept.value("outrider.kv.blocks", state="used")
    assert kept.value("outrider.kv.blocks", state="cached") == 0
    assert kept.value("outrider.kv.blocks") == 48
    assert kept.value("outrider.sessions") == 1
    owner.close()
    assert kept.value("outrider.kv.blocks", state="used") == 0
    assert kept.value("outrider.kv.blocks", state="cached") == 2, "full blocks may come again"
    assert kept.value("outrider.kv.blocks") == 48
    assert kept.value("outrider.sessions") == 0
    assert kept.value("outrider.prefix.tokens", result="computed") == 16
    Owner(bench, list(PROMPT)).opened().verify()
    assert kept.value("outrider.prefix.tokens", result="shared") == 16


def test_what_is_refused_is_counted_and_fences_apart(bench, kept):
    owner = Owner(bench, list(PROMPT)).opened()
    owner.verify()
    owner.verify(epoch=0)
    owner.verify(owner_nonce=owner.nonce + 1)
    owner.verify(number=1)
    owner.verify(session_id=new_session_id())
    owner.verify(delta=(), tokens=random_tokens(40))
    owner.cancel(1)
    bench.settle()
    for reason in ("stale_epoch", "nonce_mismatch", "stale_number"):
        assert kept.value("outrider.fences", tier="target", reason=reason) == 1
        assert kept.value("outrider.refusals", reason=reason) == 1
    assert kept.value("outrider.refusals", reason="unknown_session") == 1
    assert kept.value("outrider.refusals") == 4
    assert kept.value("outrider.need_tokens") == 1
    assert kept.value("outrider.cancellations", tier="target") == 1


def test_work_that_waits_for_kv_is_the_queue(tiny_models, kept):
    with watched(tiny_models, kept, "target", threaded=False) as bench:
        owners = [Owner(bench, random_tokens(300, seed=i)) for i in range(2)]
        for owner in owners:
            bench.worker.submit([owner.open_entry(), owner.verify_entry()], lambda reply: None)
        bench.worker._read_inbox(0.0)
        assert kept.value("outrider.works", state="waiting") == 2
        bench.worker._step()  # 38 of 48 blocks: one of them must wait.
        assert kept.value("outrider.works", state="waiting") == 1
        assert kept.value("outrider.work.waiting_time") > 0


def traced(owner, every=1, trace=TRACE):
    """Header fields of an entry of a traced request."""
    return {"traceparent": str(trace), "trace_every": every}


def test_a_round_is_told_below_the_orchestrators(bench, kept):
    owner = Owner(bench, list(PROMPT)).opened()
    before = time.time_ns()
    reply = owner.verify(PROMPT[:2], **traced(owner))
    [verify] = kept.named("verify")
    assert f"{verify.context.trace_id:032x}" == str(TRACE)[3:35]
    assert verify.parent.span_id == TRACE.round_id(len(PROMPT))
    assert verify.context.span_id == TRACE.below().round_id(len(PROMPT))
    assert verify.kind.name == "SERVER"
    said = verify.attributes
    assert said["outrider.tier"] == "target" and said["gen_ai.request.model"] == "tiny"
    assert (said["outrider.base_len"], said["outrider.batch_rows"]) == (21, 23)
    assert said["outrider.proposed"] == 2
    assert said["outrider.accepted"] == reply.verified.num_accepted
    parts = [span for span in kept.spans if span.parent.span_id == verify.context.span_id]
    assert [span.name for span in parts] == ["queue", "pass"]
    assert before <= verify.start_time + 1_000_000 and verify.end_time <= time.time_ns() + 1_000_000
    assert parts[0].start_time == pytest.approx(verify.start_time, abs=1_000_000)
    assert parts[0].end_time == pytest.approx(parts[1].start_time, abs=1_000_000)
    assert parts[1].end_time == pytest.approx(verify.end_time, abs=1_000_000)


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"traceparent": str(TRACE)},
        {"trace_every": 1},
        {"traceparent": str(TRACE)[:-1] + "0", "trace_every": 1},
        {"traceparent": "nonsense", "trace_every": 1},
    ],
)
def test_a_round_of_no_sampled_trace_is_not_told(bench, kept, header):
    Owner(bench, list(PROMPT)).opened().verify(**header)
    assert kept.spans == []


def test_rounds_that_a_target_goes_on_with_are_told_at_the_same_places_everywhere(bench, kept):
    owner = Owner(bench, list(PROMPT)).opened()
    entry = owner.verify_entry(**traced(owner, every=5))
    entry.verify.more_rounds = 39
    replies = bench.post(entry)
    while replies.get(timeout=TIMEOUT_S).header.more:
        pass
    told = [span.attributes["outrider.base_len"] for span in kept.named("verify")]
    # The harness's generation starts at its default prompt of one token.
    assert told == [n for n in range(21, 61) if TRACE.tells(n, 1, 5)] and len(told) == 8
    assert len({span.context.span_id for span in kept.spans}) == len(kept.spans)


def test_a_refused_round_is_told_as_such(bench, kept, monkeypatch):
    def broken(*args):
        raise RuntimeError("no pass today")

    monkeypatch.setattr(bench.worker._engine.runner, "run", broken)
    owner = Owner(bench, list(PROMPT)).opened()
    assert owner.verify(**traced(owner)).HasField("refused")
    [verify] = kept.named("verify")
    assert verify.attributes["error.type"] == "internal" and not verify.status.is_ok
    assert verify.parent.span_id == TRACE.round_id(len(PROMPT))


def test_a_fault_in_telling_is_nobodys_fault(bench, kept, monkeypatch, caplog):
    def broken(*args, **kwargs):
        raise RuntimeError("no spans today")

    monkeypatch.setattr(kept.telemetry.spans, "write", broken)
    owner = Owner(bench, list(PROMPT)).opened()
    assert owner.verify(**traced(owner)).HasField("verified")
    assert kept.spans == [] and "telemetry failed" in caplog.text


def test_a_worker_waits_for_no_span(bench, kept, monkeypatch):
    """The thread that writes them is stuck; rounds go on, and what is too much is dropped."""
    stuck = threading.Event()
    monkeypatch.setattr(
        kept.telemetry.spans, "write", lambda *args, **kwargs: stuck.wait(TIMEOUT_S)
    )
    later = kept.telemetry.spans.later = Later(max_waiting=2)
    owner = Owner(bench, list(PROMPT)).opened()
    for _ in range(6):
        assert owner.verify(**traced(owner)).HasField("verified")
    assert later.dropped in (3, 4)
    stuck.set()
    later.finish()


def test_a_draft_tells_what_it_made(tiny_models, kept):
    with watched(tiny_models, kept, "draft") as bench:
        owner = Owner(bench, list(PROMPT)).opened()
        owner.propose(3, **traced(owner))
        entry = owner.propose_entry(2, start=0, **traced(owner))
        entry.propose.ahead.pending.token_ids.extend(PROMPT[:1])
        entry.propose.ahead.fan_out.extend([2, 1])
        bench.ask(entry)
        made = bench.worker._tier.made
        assert (made.proposals, made.guesses) == (1, 3)
        assert (made.outcomes, made.outcome_guesses) == (3, 6)
    first, ahead = kept.named("propose")
    assert (first.attributes["outrider.outcomes"], first.attributes["outrider.guesses"]) == (0, 3)
    assert (ahead.attributes["outrider.outcomes"], ahead.attributes["outrider.guesses"]) == (3, 6)
    assert first.parent.span_id == ahead.parent.span_id == TRACE.round_id(len(PROMPT))
    assert first.context.span_id != ahead.context.span_id


@pytest.mark.parametrize("told", [True, False])
async def test_a_target_asks_drafts_below_its_own_spans_if_it_has_any(told):
    pool = DraftPool(security=None, traced=told)
    header = worker_pb2.EntryHeader(request_id="r", traceparent=str(TRACE), trace_every=7)
    routing = pool.routing(header)
    assert routing.traceparent == str(TRACE.below() if told else TRACE)
    assert (routing.request_id, routing.trace_every) == ("r", 7)
    header.traceparent = ""
    assert pool.routing(header).traceparent == ""


def test_readers_on_other_threads_do_not_disturb_the_worker(bench, kept):
    stop = threading.Event()
    errors = []

    def read():
        while not stop.is_set():
            try:
                kept.points("outrider.kv.blocks")
            except Exception as error:
                errors.append(error)
                return

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    owners = [Owner(bench, random_tokens(10 + i, seed=i)).opened() for i in range(6)]
    for owner in owners:
        for _ in range(5):
            owner.tokens += owner.verify(start=0).verified.token_ids
    stop.set()
    for reader in readers:
        reader.join()
    assert not errors and kept.value("outrider.pass.duration") >= 30
