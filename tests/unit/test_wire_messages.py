"""Values to messages and back, and every range that a field's comment states."""

import math
import random

import pytest

from outrider import wire
from outrider.errors import InvalidArgument
from outrider.types import (
    DraftPlan,
    FinishReason,
    GenerationSpec,
    PositionLogprobs,
    Priority,
    Proposal,
    SamplingParams,
    SparseDistribution,
    SpeculationStats,
    TokenSource,
    Verdict,
    VerificationMode,
    WorkTiming,
)
from outrider.v1 import common_pb2, worker_pb2

NAN, INF = math.nan, math.inf


def fp32(value):
    return common_pb2.SamplingParams(temperature=value).temperature


def over_the_wire(message):
    return type(message).FromString(message.SerializeToString())


SAMPLING = SamplingParams(fp32(0.7), top_k=40, top_p=fp32(0.9), min_p=fp32(0.1), seed=2**64 - 1)


@pytest.mark.parametrize("params", [SamplingParams(), SAMPLING, SamplingParams(10.0, 2**31 - 1)])
def test_sampling_comes_back(params):
    message = over_the_wire(wire.sampling_to_proto(params))
    assert wire.sampling_from_proto(message, default_seed=99) == params


def test_unset_sampling_fields_have_their_documented_defaults():
    message = common_pb2.SamplingParams()
    assert wire.sampling_from_proto(message, default_seed=5) == SamplingParams(seed=5)
    message.seed = 0
    assert wire.sampling_from_proto(message, default_seed=5).seed == 0


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-1e-6, 10.001, NAN, INF, -INF]),
        ("top_p", [0.0, -0.1, 1.001, NAN, INF]),
        ("min_p", [-0.1, 1.001, NAN, INF]),
        ("top_k", [2**31, 2**32 - 1]),
    ],
)
def test_sampling_outside_its_ranges_is_refused_by_name(field, values):
    for value in values:
        message = over_the_wire(common_pb2.SamplingParams(**{field: value}))
        with pytest.raises(InvalidArgument) as refused:
            wire.sampling_from_proto(message)
        assert refused.value.field == field and "is not in" in refused.value.message


def test_sampling_at_the_ends_of_its_ranges_is_taken():
    for values in ({"temperature": 10.0, "top_p": 1.0, "min_p": 1.0}, {"top_p": 1e-30}):
        wire.sampling_from_proto(common_pb2.SamplingParams(**values))


SPECS = [
    GenerationSpec(SamplingParams()),
    GenerationSpec(
        SAMPLING,
        mode=VerificationMode.REJECTION,
        prompt_len=2**31 - 1,
        min_tokens=2**31 - 1,
        stop_ids=(0, 9),
        logprobs=20,
    ),
    GenerationSpec(SAMPLING, logprobs=0),
]


@pytest.mark.parametrize("spec", SPECS)
def test_generation_specs_come_back(spec):
    message = over_the_wire(wire.spec_to_proto(spec))
    assert wire.spec_from_proto(message, vocab_size=10) == spec


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt_len": 0}, "prompt_len"),
        ({"prompt_len": 2**31}, "prompt_len"),
        ({"min_tokens": 2**31}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop_ids": [10]}, "stop_ids"),
        ({"stop_ids": [1] * 65}, "stop_ids"),
        ({"mode": 7}, "mode"),
        ({"sampling": common_pb2.SamplingParams(temperature=NAN)}, "temperature"),
    ],
)
def test_specs_outside_their_ranges_are_refused_by_name(changes, field):
    fields = {"prompt_len": 1, "stop_ids": [9]} | changes
    with pytest.raises(InvalidArgument) as refused:
        wire.spec_from_proto(worker_pb2.GenerationSpec(**fields), vocab_size=10)
    assert refused.value.field == field


def test_priorities_come_back_and_unspecified_is_normal():
    for priority in Priority:
        assert wire.priority_from_proto(wire.priority_to_proto(priority)) is priority
    assert wire.priority_from_proto(0) is Priority.NORMAL
    with pytest.raises(InvalidArgument) as unknown:
        wire.priority_from_proto(9)
    assert unknown.value.field == "priority"


def test_modes_come_back_and_unspecified_is_coupled():
    for mode in VerificationMode:
        assert wire.mode_from_proto(wire.mode_to_proto(mode)) is mode
    assert wire.mode_from_proto(0) is VerificationMode.COUPLED


def test_sources_and_reasons_come_back():
    numbers = wire.sources_to_proto(TokenSource)
    assert 0 not in numbers and [wire.source_from_proto(n) for n in numbers] == list(TokenSource)
    for reason in FinishReason:
        number = wire.reason_to_proto(reason)
        assert number and wire.reason_from_proto(number) is reason
    assert wire.reason_from_proto(0) is None


def random_distribution(rng, guess):
    ids = {guess} | set(rng.sample(range(1000), rng.randrange(63)))
    return SparseDistribution(
        tuple(sorted(ids)), tuple(rng.randrange(1, 65536) for _ in range(len(ids)))
    )


def test_proposals_come_back():
    rng = random.Random(0)
    for _ in range(50):
        ids = tuple(rng.choices(range(1000), k=rng.randrange(2, 65)))
        # The last guess is a child of the base: no chain.
        tree = (*(rng.randrange(-1, i) for i in range(len(ids) - 1)), -1)
        proposal = Proposal(
            ids,
            parents=tree if rng.random() < 0.3 else (),
            distributions=tuple(random_distribution(rng, i) for i in ids),
            proposer="ü" * 32,
        )
        message = over_the_wire(wire.proposal_to_proto(proposal))
        assert wire.proposal_from_proto(message, vocab_size=1000) == proposal


def test_a_tree_that_is_a_chain_comes_as_one():
    for count in (0, 1, 5):
        ids = list(range(count))
        message = common_pb2.Proposal(token_ids=ids, parents=range(-1, count - 1))
        assert wire.proposal_from_proto(message, vocab_size=10) == Proposal(tuple(ids))


def sparse(ids, weights):
    return common_pb2.SparseDistribution(ids=ids, weights=weights)


GOOD = sparse([1, 2], [1, 65535])


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"token_ids": [1] * 65}, "token_ids"),
        ({"token_ids": [10]}, "token_ids"),
        ({"token_ids": [1, 2], "parents": [-1]}, "parents"),
        ({"parents": [-1]}, "parents"),
        ({"token_ids": [1], "parents": [0]}, "parents"),
        ({"token_ids": [1], "parents": [-2]}, "parents"),
        ({"token_ids": [1, 2, 3], "parents": [-1, 2, 0]}, "parents"),
        ({"token_ids": [1, 2, 3], "parents": [-1, 0, 3]}, "parents"),
        ({"token_ids": [1, 2], "distributions": [GOOD]}, "distributions"),
        ({"distributions": [GOOD]}, "distributions"),
        ({"token_ids": [1], "distributions": [sparse([], [])]}, "distributions"),
        ({"token_ids": [1], "distributions": [sparse([1, 2], [1])]}, "distributions"),
        ({"token_ids": [1], "distributions": [sparse([1], [1, 1])]}, "distributions"),
        ({"token_ids": [1], "distributions": [sparse([2, 1], [1, 1])]}, "distributions"),
        ({"token_ids": [1], "distributions": [sparse([1, 1], [1, 1])]}, "distributions"),
        ({"token_ids": [1], "distributions": [sparse([1, 10], [1, 1])]}, "distributions"),
        ({"token_ids": [1], "distributions": [sparse([1], [0])]}, "distributions"),
        ({"token_ids": [1], "distributions": [sparse([1], [65536])]}, "distributions"),
        ({"token_ids": [3], "distributions": [GOOD]}, "distributions"),
        ({"token_ids": [1], "proposer": "ü" * 33}, "proposer"),
    ],
)
def test_malformed_proposals_are_refused_by_name(fields, field):
    with pytest.raises(InvalidArgument) as refused:
        wire.proposal_from_proto(common_pb2.Proposal(**fields), vocab_size=10)
    assert refused.value.field == f"proposal.{field}"


def test_a_distribution_has_at_most_64_entries():
    for count in (64, 65):
        ids = list(range(count))
        message = common_pb2.Proposal(token_ids=[0], distributions=[sparse(ids, [1] * count)])
        if count == 64:
            wire.proposal_from_proto(message, vocab_size=100)
        else:
            with pytest.raises(InvalidArgument, match="65 entries"):
                wire.proposal_from_proto(message, vocab_size=100)


LOGPROBS = (
    PositionLogprobs(3, -0.5, ((3, -0.5), (4, -1.25))),
    PositionLogprobs(4, -2.0),
)


def test_verdicts_and_timings_come_back():
    timing = WorkTiming(queue_us=1, compute_us=2, batch_rows=3, prompt_rows=4)
    ahead = [Verdict((3, 4), 1, 1, run_ahead=told) for told in (True, False)]
    tree = Verdict((3, 4), 1, 5, num_beside=7)
    for verdict in (Verdict((3, 4), 1, 5, LOGPROBS), Verdict((7,), 0, 0), *ahead, tree):
        message = over_the_wire(wire.verified_to_proto(verdict, timing))
        assert wire.verdict_from_proto(message) == verdict
        assert wire.timing_from_proto(message.timing) == timing


@pytest.mark.parametrize(
    ("tokens", "accepted", "proposed"),
    [((), 0, 0), ((1,), 1, 1), ((1, 2, 3), 1, 4), ((1, 2), 1, 0), ((1,), 0, 65)],
)
def test_verdicts_that_contradict_themselves_are_refused(tokens, accepted, proposed):
    message = worker_pb2.Verified(token_ids=tokens, num_accepted=accepted, num_proposed=proposed)
    with pytest.raises(InvalidArgument) as refused:
        wire.verdict_from_proto(message)
    assert refused.value.field == "num_accepted"


def test_a_run_ahead_guess_is_not_accepted_behind_a_rejected_one():
    verdict = Verdict((3, 4), 1, 2, run_ahead=True)
    with pytest.raises(InvalidArgument) as refused:
        wire.verdict_from_proto(wire.verified_to_proto(verdict, WorkTiming()))
    assert refused.value.field == "run_ahead"


def test_run_ahead_guesses_come_back_with_their_distributions():
    distribution = SparseDistribution((2, 9), (5, 7))
    outcome = worker_pb2.Outcome(token_id=9, distribution=wire.distribution_to_proto(distribution))
    guess = wire.run_ahead_from_proto(outcome, vocab_size=10)
    assert guess == Proposal((9,), distributions=(distribution,))
    for token_id, vocab_size in ((3, 10), (9, 9)):
        outcome.token_id = token_id
        with pytest.raises(InvalidArgument):
            wire.run_ahead_from_proto(outcome, vocab_size=vocab_size)


PLAN = DraftPlan("draft:1", 16, 64, 60.0, 2**31 - 1, 3)


def test_plans_come_back_at_the_ends_of_their_ranges():
    for plan in (PLAN, DraftPlan("é" * 128, 0, 0, 0.001, 1)):
        assert wire.plan_from_proto(over_the_wire(wire.plan_to_proto(plan))) == plan


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("address", ""),
        ("address", "é" * 129),
        ("num_speculative_tokens", 17),
        ("fan_out", 65),
        ("timeout_ms", 0),
        ("timeout_ms", 60_001),
        ("end_len", 0),
        ("end_len", 2**31),
        ("alternatives", 4),
    ],
)
def test_plans_outside_their_ranges_are_refused_by_name(field, value):
    message = wire.plan_to_proto(PLAN)
    setattr(message, field, value)
    with pytest.raises(InvalidArgument) as refused:
        wire.plan_from_proto(message)
    assert refused.value.field.removeprefix("draft.") == field
    if field in ("num_speculative_tokens", "fan_out"):
        with pytest.raises(InvalidArgument) as refused:
            wire.check_lengths(worker_pb2.TuneEntry(**{field: value}))
        assert refused.value.field == field


def test_statistics_come_back_field_by_field():
    stats = SpeculationStats(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, (11, 12), (13,))
    assert wire.stats_from_proto(over_the_wire(wire.stats_to_proto(stats))) == stats


def test_token_ids_are_checked_against_the_vocabulary():
    wire.check_token_ids([], 1, "ids")
    wire.check_token_ids([0, 9], 10, "ids")
    with pytest.raises(InvalidArgument, match="ids: token id 10"):
        wire.check_token_ids([3, 10, 4], 10, "ids")
