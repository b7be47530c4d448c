"""What goes into the store beside the log, and comes out of it again for another orchestrator."""

import dataclasses
import random
from typing import Any

import pytest
from test_stopping_rules import SOURCES, TOY, random_ids, random_stop, run

from outrider.errors import (
    AlreadyRunning,
    DataLoss,
    FailedPrecondition,
    Fenced,
    ResourceExhausted,
    Unavailable,
)
from outrider.types import (
    Durability,
    FinishReason,
    GenerationSpec,
    PositionLogprobs,
    SamplingParams,
    SpeculationStats,
    TokenSource,
    VerificationMode,
    chain_hash,
    is_session_id,
)
from outrider.v1 import worker_pb2
from services.orchestrator.decoder import RoundTimes
from services.orchestrator.models import ServedModel
from services.orchestrator.notes import NoteFormat
from services.orchestrator.records import asks_the_same, plan_of, record_of
from services.orchestrator.requests import GenerationPlan, session_id_for
from services.orchestrator.responses import in_parts
from services.orchestrator.running import Running
from services.orchestrator.stopping import Released, StopRules
from services.orchestrator.store_values import Outcome, record_from_json, record_to_json
from services.orchestrator.takeover import EndedGeneration, Taken, Told, check_told
from services.orchestrator.totals import Totals

INFO = worker_pb2.InfoResponse(version="0.1", model_fingerprint="abc", context_length=512)
MODEL = ServedModel("toy", INFO, TOY)
PLAN = GenerationPlan(
    request_id="r",
    session_id="s" * 22,
    continues=True,
    keep=True,
    prompt_ids=(4, 5),
    prompt_len=9,
    sampling=SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=2**64 - 1),
    mode=VerificationMode.REJECTION,
    rules=StopRules(
        max_tokens=77,
        context_length=512,
        eos_token_ids=frozenset({2, 3}),
        stop_token_ids=frozenset({7, 1}),
        stop_strings=("b", "a\n"),
        min_tokens=3,
        ignore_eos=True,
    ),
    num_speculative_tokens=None,
    max_speculative_tokens=4,
    proposer="auto",
    fan_out=3,
    alternatives=0,
    report_rounds=True,
    logprobs=2,
    durability=Durability.BEST_EFFORT,
    resumable=True,
    idempotency_key="k",
)


def test_another_orchestrator_makes_the_same_plan_of_a_record() -> None:
    record = record_from_json(record_to_json(record_of(PLAN, MODEL, epoch=5)))
    again = plan_of(record, PLAN.session_id, MODEL)
    assert again == dataclasses.replace(PLAN, prompt_ids=())
    assert again.spec == PLAN.spec and isinstance(again.spec, GenerationSpec)
    assert (record.start, record.prompt_end, record.epoch) == (7, 9, 5)
    # Nothing that a plan says is missing in a record, or a field was added to one of them alone.
    for name in {field.name for field in dataclasses.fields(GenerationPlan)} - {
        "session_id",
        "continues",
        "prompt_ids",
        "prompt_len",
        "rules",
    }:
        other: Any = object()
        assert record_of(dataclasses.replace(PLAN, **{name: other}), MODEL, epoch=5) != record, name
    for name in {field.name for field in dataclasses.fields(StopRules)}:
        rules = dataclasses.replace(PLAN.rules)
        object.__setattr__(rules, name, (1, 9) if name.endswith("s") else object())
        assert record_of(dataclasses.replace(PLAN, rules=rules), MODEL, epoch=5) != record, name


def test_a_generation_goes_on_with_its_own_model_only() -> None:
    record = record_of(PLAN, MODEL, epoch=5)
    other = worker_pb2.InfoResponse(version="0.1", model_fingerprint="xyz")
    with pytest.raises(FailedPrecondition, match="abc"):
        plan_of(record, PLAN.session_id, ServedModel("toy", other, TOY))


def test_a_request_that_comes_again_may_have_another_seed_only_if_it_gave_none() -> None:
    begun = record_of(PLAN, MODEL, epoch=5)
    drawn = dataclasses.replace(PLAN, sampling=dataclasses.replace(PLAN.sampling, seed=1))
    asked = record_of(drawn, MODEL, epoch=9)
    assert asks_the_same(asked, begun, seed_given=False)
    assert not asks_the_same(asked, begun, seed_given=True)
    other = record_of(dataclasses.replace(drawn, logprobs=3), MODEL, epoch=9)
    assert not asks_the_same(other, begun, seed_given=False)


def test_session_ids_of_a_key_are_the_same_and_each_callers_own() -> None:
    ids = {session_id_for(tenant, f"{n}") for tenant in ("a", "b") for n in range(300)}
    assert len(ids) == 600 and all(map(is_session_id, ids))
    assert not any(session_id.startswith("-") for session_id in ids)
    assert session_id_for("a", "7") == session_id_for("a", "7")
    assert session_id_for("a", "") != session_id_for("a", "")
    assert session_id_for("a", "b") != session_id_for("", "a\0b")  # no tenant holds a NUL


@pytest.mark.parametrize("num_top", [None, 0, 1, 20])
def test_notes_give_back_sources_and_log_probabilities(num_top: int | None) -> None:
    rng = random.Random(5)
    ids = [rng.randrange(2**31) for _ in range(7)]
    sources = tuple(rng.choice(SOURCES) for _ in ids)
    logprobs = tuple(
        PositionLogprobs(i, -0.5 * i % 7, tuple((rng.randrange(9), -0.25 * t) for t in range(top)))
        for i, top in zip(ids, (num_top or 0,) * 7, strict=True)
    )
    if num_top == 20:  # A target with few tokens names fewer.
        logprobs = tuple(dataclasses.replace(p, top=p.top[: p.token_id % 20]) for p in logprobs)
    notes = NoteFormat(num_top)
    packed = notes.pack(sources, logprobs if num_top is not None else ())
    assert len(packed) == notes.width * 7
    assert notes.width == (1 if num_top is None else 5 + 8 * num_top)
    again = NoteFormat(num_top).unpack(packed, ids)
    assert again == (sources, () if num_top is None else logprobs)
    with pytest.raises(DataLoss):
        notes.unpack(packed[1:], ids)


TOTALS = Totals(
    stats=SpeculationStats(
        rounds=3, proposed=9, accepted=4, bonus=1, proposed_by_position=(3, 3, 3)
    ),
    times=RoundTimes(1, 2, 3, 4, 5, 6, 7),
    first_token_us=8,
    total_us=9,
    cached=10,
    sent_undurable=11,
    target="unix:/t",
    draft="d:1",
)


def test_totals_survive_json_and_newer_releases() -> None:
    text = TOTALS.to_json()
    assert Totals.from_json(text) == TOTALS and len(text) < 200
    newer = text.replace("[1,2,3,4,5,6,7]", "[1,2,3,4,5,6,7,8]")[:-1] + ",77]"
    assert Totals.from_json(newer) == TOTALS
    for damaged in ("", "{}", "[]", "[[],[]]", "nonsense", "[1,2]"):
        assert Totals.from_json(damaged).stats == SpeculationStats()


def test_what_was_told_is_compared_with_what_is_there() -> None:
    ids = (5, 6, 7)
    for told in (Told(), Told(3), Told(2, 9, chain_hash(0, (5, 6))), Told(0, 0, 0)):
        check_told(ids, told)
    for lost in (Told(4), Told(2, 0, chain_hash(0, (5, 7))), Told(0, 0, 1)):
        with pytest.raises(DataLoss):
            check_told(ids, lost)


def taken(ids: list[int], sources: list[TokenSource], told: Told) -> Taken:
    return Taken(tuple(ids), tuple(sources), (), TOTALS, told, takeovers=2, elapsed_s=1.0)


async def test_an_ended_generation_is_told_again_from_any_place() -> None:
    rng = random.Random(4)
    seen: dict[FinishReason, int] = {}
    for _ in range(300):
        stop, ids = random_stop(rng), random_ids(rng, TOY.vocab_size - 1)
        done = run(TOY, stop, ids)
        if done.reason is None:
            continue
        seen[done.reason] = seen.get(done.reason, 0) + 1
        told = Told(rng.randint(0, len(done.token_ids)), rng.randint(0, len(done.text)))
        ended = EndedGeneration(
            PLAN,
            Outcome(done.reason, done.matched_stop, done.cut_text),
            taken(done.token_ids, done.sources, told),
            TOY,
        )
        responses = [response async for response in ended.responses()]
        assert [t for r in responses for t in r.token_ids] == done.token_ids[told.offset :]
        text = "".join(response.text for response in responses)
        assert done.text[: told.text_chars] + text == done.text
        assert sum(s.length for r in responses for s in r.text_segments) == len(text)
        last = responses[-1]
        assert (last.cut_text, last.matched_stop) == (done.cut_text, done.matched_stop)
        assert last.usage.completion_tokens == len(done.token_ids) and last.usage.takeovers == 2
        assert last.usage.speculation.proposed == 9 and last.usage.time.total_us == 9
    assert len(seen) >= 4, seen


def test_long_stretches_are_told_in_parts() -> None:
    ids = tuple(range(1300))
    sources = tuple(SOURCES[i % 4] for i in ids)
    text = "".join(chr(0x100 + i % 500) for i in range(100_000))
    segments = ((70_000, TokenSource.PLAIN), (1, TokenSource.BONUS), (29_999, TokenSource.PLAIN))
    whole = Released(ids, sources, (), text, segments, FinishReason.EOS, "cut", "stop")
    parts = list(in_parts(whole))
    assert len(parts) > 4 and all(len(p.token_ids) <= 512 and len(p.text) <= 32_768 for p in parts)
    assert sum((p.token_ids for p in parts), ()) == ids
    assert sum((p.sources for p in parts), ()) == sources
    assert "".join(p.text for p in parts) == text
    assert all(sum(n for n, _ in p.segments) == len(p.text) for p in parts)
    for source, length in ((TokenSource.BONUS, 1), (TokenSource.PLAIN, 99_999)):
        assert sum(n for p in parts for n, s in p.segments if s is source) == length
    assert [p.finish_reason for p in parts] == [None] * (len(parts) - 1) + [FinishReason.EOS]
    assert (parts[-1].cut_text, parts[-1].matched_stop) == ("cut", "stop")
    # No text before the tokens that it comes from.
    assert all(not p.text for p in parts[:2])
    short = Released((1,), (TokenSource.PLAIN,), (), "x", ((1, TokenSource.PLAIN),))
    assert list(in_parts(short)) == [short]


@dataclasses.dataclass
class FakeGeneration:
    plan: Any = PLAN
    superseded: list[Exception] = dataclasses.field(default_factory=list)
    epoch: int = 1

    def supersede(self, error: Exception) -> None:
        self.superseded.append(error)


def test_a_call_takes_the_place_of_the_stream_that_it_resumes() -> None:
    running = Running(limit=2)
    old, new = FakeGeneration(), FakeGeneration()
    with running.admitted("t", "r", idempotency_key="k") as first:
        first.fill(old)
        for key in ("", "other"):
            with pytest.raises(AlreadyRunning), running.admitted("t", "r", idempotency_key=key):
                pass
        with running.admitted("t", "r", resumes=True) as second:
            assert not old.superseded  # not before it has been taken
            second.fill(new)
            assert isinstance(old.superseded[0], Fenced) and not new.superseded
        with running.admitted("t", "r") as third:  # the one that was resumed has ended
            third.fill(FakeGeneration())
        assert len(old.superseded) == 1
    # A key again is as good as a resume; the same request id of another session is not the same.
    with running.admitted("t", "r", idempotency_key="k") as first:
        first.fill(old := FakeGeneration())
        with running.admitted("t", "r", idempotency_key="k") as second:
            other = FakeGeneration(dataclasses.replace(PLAN, session_id="o" * 22))
            second.fill(other)
            assert not old.superseded
            with pytest.raises(AlreadyRunning), running.admitted("t", "r"):
                pass
        with running.admitted("u", "r"):
            pass


def test_of_two_that_were_resumed_the_one_of_the_later_epoch_goes_on() -> None:
    """Whichever is ready first: the other one does not own the session any more."""
    for epochs in ((2, 3), (3, 2)):
        running = Running(limit=3)
        first, second = (FakeGeneration(epoch=epoch) for epoch in epochs)
        older, newer = sorted((first, second), key=lambda generation: generation.epoch)
        with running.admitted("t", "r", resumes=True) as one:
            with running.admitted("t", "r", resumes=True) as other:
                one.fill(first)
                other.fill(second)
                assert isinstance(older.superseded[0], Fenced) and not newer.superseded


async def test_places_are_limited_and_given_back() -> None:
    running = Running(limit=1)
    with running.admitted("t", "a"):
        with pytest.raises(ResourceExhausted) as refused, running.admitted("t", "b"):
            pass
        assert refused.value.retry_after_s
        with pytest.raises(ResourceExhausted), running.admitted("t", "a", resumes=True):
            pass
    with pytest.raises(ZeroDivisionError), running.admitted("t", "a"):
        1 / 0  # noqa: B018
    await running.drain(0.0)
    with pytest.raises(Unavailable, match="another"), running.admitted("t", "a", resumes=True):
        pass
