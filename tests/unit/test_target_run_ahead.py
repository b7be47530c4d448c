"""Run-ahead guesses between a draft and a target: what is there when the pass is over is verified
in the bonus's place. Both workers are real, only the wire between them is not."""

from dataclasses import replace

import pytest
from test_target_speculation import PROMPT, SPECS, rigs
from worker_harness import (
    Owner,
    coupled,
    plain_logits,
    random_tokens,
    refusal,
    rejection,
    serving,
    verdict_of,
)

from outrider.errors import DeadlineExceeded
from outrider.remote.asking import Ask, fill_for
from outrider.sampling import Chain, verify_blocks
from outrider.speculation.forecast import Forecast, Shared
from outrider.types import Proposal, SamplingParams, TokenSource
from outrider.v1 import worker_pb2
from outrider.wire import proposal_from_proto, run_ahead_from_proto

SPEC = SPECS["rejection"]
LONG = {"rounds": 200, "end_len": len(PROMPT) + 120}


@pytest.fixture
def make_rig(tiny_models):
    with rigs(tiny_models) as make_any:

        def make(spec=SPEC, *, arrival="early", **options):
            rig = make_any(spec, **options)
            rig.drafts.arrival = arrival
            return rig

        yield make


# --- the draft --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def draft(tiny_models):
    with serving(tiny_models["draft"], "draft") as bench:
        yield bench


def ahead_entry(owner, pending, fan_out, *, run_ahead=True, count=3):
    entry = owner.propose_entry(count)
    entry.propose.ahead.pending.token_ids.extend(pending)
    entry.propose.ahead.fan_out.extend(fan_out)
    entry.propose.ahead.run_ahead = run_ahead
    return entry


def guesses_of(draft, tokens, count):
    """A plain proposal after some tokens, with its distributions."""
    owner = Owner(draft, list(tokens), SPEC).opened()
    message = owner.propose(count).proposed.proposal
    return proposal_from_proto(message, vocab_size=1 << 20)


@pytest.mark.parametrize("num_pending", [0, 1, 4])
def test_a_draft_goes_on_with_its_chain(draft, num_pending):
    chain = guesses_of(draft, PROMPT, num_pending + 1)
    owner = Owner(draft, list(PROMPT), SPEC).opened()
    fan_out = [1] * num_pending + [3]
    pending = chain.token_ids[:num_pending]
    outcomes = draft.ask(ahead_entry(owner, pending, fan_out)).proposed.outcomes
    first, *others = outcomes
    assert len(outcomes) == sum(fan_out)
    assert (first.num_accepted, first.token_id) == (num_pending, chain.token_ids[-1])
    guess = run_ahead_from_proto(first, vocab_size=1 << 20)
    assert guess.distributions[0].ids == chain.distributions[-1].ids
    behind = [*PROMPT, *chain.token_ids]
    assert tuple(first.proposal.token_ids) == guesses_of(draft, behind, 3).token_ids
    assert len(first.proposal.distributions) == 3
    assert not any(outcome.HasField("distribution") for outcome in others)
    places = [(outcome.num_accepted, outcome.token_id) for outcome in outcomes]
    assert len(set(places)) == len(places)
    assert [place for place, _ in places].count(num_pending) == 3


def test_a_draft_that_is_not_asked_to_does_not_run_ahead(draft):
    owner = Owner(draft, list(PROMPT), SPEC).opened()
    entry = ahead_entry(owner, [1, 2], [1, 1, 3], run_ahead=False)
    outcomes = draft.ask(entry).proposed.outcomes
    assert len(outcomes) == 5
    assert not any(outcome.HasField("distribution") for outcome in outcomes)


@pytest.mark.parametrize(
    ("spec", "fan_out", "expected"),
    [
        (coupled(3), [1, 1], ("unsupported", "ahead.run_ahead")),
        (replace(SPEC, sampling=SamplingParams()), [1, 1], ("unsupported", "ahead.run_ahead")),
        (SPEC, [2, 0], ("invalid_argument", "ahead.fan_out")),
    ],
    ids=["coupled", "temperature 0", "no place"],
)
def test_running_ahead_is_refused_where_it_cannot_be(draft, spec, fan_out, expected):
    owner = Owner(draft, list(PROMPT), spec).opened()
    assert refusal(draft.ask(ahead_entry(owner, [1], fan_out))) == expected


def test_a_draft_runs_ahead_as_far_as_its_context_goes(tiny_models):
    with serving(tiny_models["draft"], "draft", context_length=24) as bench:
        owner = Owner(bench, list(PROMPT), SPEC).opened()
        for pending, left in (([1], 2), ([1, 2], 1)):
            fan_out = [0] * len(pending) + [1]
            (outcome,) = bench.ask(ahead_entry(owner, pending, fan_out)).proposed.outcomes
            assert len(outcome.proposal.token_ids) == left and outcome.HasField("distribution")


# --- the target -------------------------------------------------------------------------------


def last_sources(rig):
    return [verdict.sources[-1] for verdict in rig.verdicts]


def test_a_draft_that_is_the_target_never_misses_and_no_bonus_is_drawn(make_rig):
    """Linear run-ahead, of distributions that are cut no further than they are already. Behind the
    last guess but one nothing is left to prepare for."""
    rig = make_rig(rejection(3, top_k=32), draft="target")
    tokens, reply = rig.run(k=3, fan_out=1)
    assert len(tokens) == 40 and not reply.header.more
    assert set(rig.hits[1:]) == {True} and {report.rank for report in rig.reports} == {0}
    assert {verdict.run_ahead for verdict in rig.verdicts[:-1]} == {True}
    assert [verdict.num_proposed for verdict in rig.verdicts] == [0, *[3] * 9, 2]
    assert all(len(v.token_ids) == v.num_proposed + 1 for v in rig.verdicts)
    assert last_sources(rig)[:-1] == [TokenSource.ACCEPTED] * 10
    # No place of a chain that is longer is left out, and no row is computed twice.
    assert rig.rows[1:] == [4] * 9 + [3]


def test_a_late_answer_leaves_the_bonus_to_the_target(make_rig):
    rig = make_rig(draft="target", arrival="late")
    tokens, _ = rig.run(k=3, fan_out=4, **LONG)
    assert len(tokens) == 120
    assert {verdict.run_ahead for verdict in rig.verdicts} == {None}
    assert {TokenSource.PLAIN, TokenSource.BONUS} == set(last_sources(rig))
    # That is no miss by itself: what was prepared is looked through as ever.
    assert {True, False} <= set(rig.hits)


def test_a_draft_that_is_mostly_late_does_not_run_ahead(make_rig):
    """Until it is in time again. What is late hits less often than the likeliest token."""
    rig = make_rig(arrival="late")
    rig.run(fan_out=1, **LONG)
    flags = [ask.run_ahead for _, ask in rig.drafts.asks]
    assert flags[0] and not any(flags[10:]) and len(flags) > 30
    rig.drafts.arrival = "early"
    rig.owner.tokens = list(PROMPT)
    rig.run(fan_out=1, **LONG)
    later = [ask.run_ahead for _, ask in rig.drafts.asks[len(flags) :]]
    assert not later[0] and all(later[10:]) and len(later) > 30


def test_running_ahead_hits_more_often_than_the_likeliest_tokens(make_rig):
    def hits(arrival):
        rig = make_rig(arrival=arrival)
        rig.run(fan_out=8, **LONG)
        told = [hit for hit in rig.hits if hit is not None]
        return told.count(True) / len(told)

    assert hits("early") > hits("late") + 0.1


def rounds_of(rig, tokens):
    """Each round's verdict, its base, and the chain that the draft's answers make of it."""
    base, pending = len(PROMPT), Proposal()
    text = [*PROMPT, *tokens]
    for verdict in rig.verdicts:
        answer = rig.drafts.answers.get(base)
        ahead = Proposal()
        for outcome in answer.outcomes if answer else ():
            if outcome.HasField("distribution"):
                ahead = run_ahead_from_proto(outcome, vocab_size=1 << 20)
        yield verdict, text[:base], pending, ahead
        chosen = Proposal()
        for outcome in answer.outcomes if answer else ():
            place = (outcome.num_accepted, outcome.token_id)
            if place == (len(verdict.token_ids) - 1, verdict.token_ids[-1]):
                chosen = proposal_from_proto(outcome.proposal, vocab_size=1 << 20)
        base += len(verdict.token_ids)
        pending = chosen.cut(LONG["end_len"] - base - 1)


def test_verdicts_are_those_of_the_chain_with_one_more_guess(make_rig, tiny_models):
    """Worked out from what the draft sent, by block verification on the model as `transformers`
    runs it: with the row of the bonus, and without a bonus."""
    rig = make_rig()
    tokens, _ = rig.run(fan_out=4, **LONG)
    seen = []
    for verdict, base, pending, ahead in rounds_of(rig, tokens):
        assert verdict.num_proposed == len(pending)
        assert verdict.run_ahead is None or len(ahead) == 1
        logits = plain_logits(tiny_models["target"], [*base, *pending.token_ids])
        chain = Chain(
            (*pending.token_ids, *ahead.token_ids),
            SPEC.sampling.seed,
            len(base),
            (*pending.distributions, *ahead.distributions),
            bonus=not ahead,
        )
        (outcome,) = verify_blocks(logits[len(base) - 1 :].log_softmax(-1), [chain])
        final = () if outcome.final is None else (outcome.final,)
        assert verdict.token_ids == (*chain.token_ids[: outcome.num_accepted], *final)
        assert verdict.num_survived == outcome.num_accepted
        seen.append((verdict.run_ahead, verdict.num_proposed > 0, len(final)))
    # Accepted and rejected, in rounds with a proposal and in those that had missed.
    for kind in ((True, True, 0), (True, False, 0), (False, True, 1), (False, False, 1)):
        assert seen.count(kind) > 2, kind


def test_whether_it_is_verified_does_not_depend_on_it(make_rig):
    """One that the target finds unlikely is taken in as well, and then rejected."""
    rig = make_rig()

    def damage(number, proposed):
        for outcome in proposed.outcomes:
            if outcome.HasField("distribution"):
                weights = outcome.distribution.weights
                rarest = min(range(len(weights)), key=lambda i: weights[i])
                outcome.token_id = outcome.distribution.ids[rarest]
                weights[:] = [65535 if i == rarest else 1 for i in range(len(weights))]

    rig.drafts.damage = damage
    rig.run(fan_out=4, **LONG)
    asked = [base for base, _ in rig.drafts.asks]
    assert len(asked) == sum(verdict.run_ahead is not None for verdict in rig.verdicts) > 20
    assert sum(verdict.run_ahead is True for verdict in rig.verdicts) < 10


@pytest.mark.parametrize("kind", ["outside", "empty", "vocabulary"])
def test_a_malformed_run_ahead_guess_is_dropped(make_rig, kind):
    def damage(number, proposed):
        for outcome in proposed.outcomes if number % 2 else ():
            if outcome.HasField("distribution"):
                if kind == "outside":
                    del outcome.distribution.ids[:1], outcome.distribution.weights[:1]
                    outcome.token_id = 1 << 9
                elif kind == "empty":
                    del outcome.distribution.weights[:]
                else:
                    outcome.distribution.ids[-1] = 1 << 19

    rig = make_rig(draft="target")
    rig.drafts.damage = damage
    tokens, _ = rig.run(fan_out=2)
    assert len(tokens) >= 40
    asks, dropped = len(rig.drafts.asks), sum(report.dropped for report in rig.reports)
    verified = sum(verdict.run_ahead is not None for verdict in rig.verdicts)
    assert dropped >= 3 and verified == asks // 2
    # The rest of the answer was of use.
    assert not any(report.failed for report in rig.reports)


def test_a_draft_that_fails_leaves_the_bonus_to_the_target(make_rig):
    rig = make_rig()
    rig.drafts.spoil = lambda number: DeadlineExceeded("late") if number % 3 == 0 else None
    tokens, _ = rig.run(fan_out=2, **LONG)
    assert len(tokens) >= 120
    verified = sum(verdict.run_ahead is not None for verdict in rig.verdicts)
    failed = sum(report.failed for report in rig.reports)
    asks = len(rig.drafts.asks)
    assert failed > 10 and verified == asks - asks // 3


def test_an_answer_to_another_question_is_not_taken(make_rig):
    """The guess of an outcome inside the block is none behind it."""

    def damage(number, proposed):
        for outcome in proposed.outcomes:
            if outcome.HasField("distribution"):
                outcome.num_accepted = 0

    rig = make_rig(draft="target")
    rig.drafts.damage = damage
    rig.run(fan_out=8)
    carried = [verdict for verdict in rig.verdicts if verdict.num_proposed]
    assert carried and {verdict.run_ahead for verdict in carried} == {None}


@pytest.mark.parametrize("mode", ["greedy", "coupled"])
def test_other_modes_do_not_run_ahead(make_rig, mode):
    rig = make_rig(SPECS[mode])
    rig.run(fan_out=4)
    assert not any(ask.run_ahead for _, ask in rig.drafts.asks)
    assert {verdict.run_ahead for verdict in rig.verdicts} == {None}
    assert rig.hits.count(True) > 3


def test_one_of_the_outcomes_is_behind_all_guesses(make_rig):
    rig = make_rig(draft="bad-draft")
    rig.run(fan_out=1, **LONG)
    asks = [ask for _, ask in rig.drafts.asks]
    assert {sum(ask.fan_out) for ask in asks} == {1}
    assert {ask.fan_out[-1] for ask in asks} == {1} and all(ask.run_ahead for ask in asks)


def test_a_forecast_keeps_to_its_budget():
    for budget in (1, 2, 5, 64):
        forecast = Forecast(Shared())
        for _ in range(60):
            forecast._acceptance.observe(3, 0)
        behind = forecast.fan_out(3, budget, run_ahead=True)
        assert sum(behind) == min(budget, 24) and behind[-1] >= 1
        assert budget > 1 or forecast.fan_out(3, budget) == (1, 0, 0, 0)


@pytest.mark.parametrize("fan_out", [1, 8])
def test_no_guess_reaches_past_the_end(make_rig, fan_out):
    for length in range(1, 9):
        rig = make_rig(draft="target")
        tokens, _ = rig.run(k=4, fan_out=fan_out, end_len=len(PROMPT) + length)
        assert len(tokens) == length
        # The last token has nothing behind it that could be prepared.
        assert rig.verdicts[-1].run_ahead is None


def test_no_guess_reaches_past_the_context(make_rig):
    rig = make_rig(draft="target", context_length=len(PROMPT) + 13)
    tokens, _ = rig.run(k=4, fan_out=2, **LONG)
    assert len(tokens) == 13 and rig.verdicts[0].run_ahead


def test_a_stop_id_that_ran_ahead_ends_the_rounds(make_rig):
    rig = make_rig(draft="target")
    tokens, _ = rig.run(fan_out=1)
    ends = [sum(len(v.token_ids) for v in rig.verdicts[: n + 1]) for n in range(8)]
    end = next(e for e in ends if tokens[e - 1] not in tokens[: e - 1])
    spec = replace(SPEC, prompt_len=len(PROMPT), stop_ids=(tokens[end - 1],))
    rig = make_rig(spec, draft="target")
    found, reply = rig.run(fan_out=1)
    assert found == tokens[:end] and rig.verdicts[-1].run_ahead and not reply.header.more


def test_min_tokens_holds_for_run_ahead_guesses(make_rig):
    common = tuple(sorted(set(make_rig().run(fan_out=2)[0])))
    spec = replace(SPEC, prompt_len=len(PROMPT), stop_ids=common, min_tokens=30)
    rig = make_rig(spec)
    tokens, _ = rig.run(fan_out=2, **LONG)
    assert not set(tokens[:30]) & set(common) and tokens[-1] in common
    assert sum(verdict.run_ahead is True for verdict in rig.verdicts) > 2


def test_logprobs_of_run_ahead_guesses_are_those_of_their_places(make_rig, tiny_models):
    rig = make_rig(replace(SPEC, logprobs=2))
    tokens, _ = rig.run(fan_out=2)
    reported = [entry for verdict in rig.verdicts for entry in verdict.logprobs]
    assert [entry.token_id for entry in reported] == tokens
    scores = plain_logits(tiny_models["target"], [*PROMPT, *tokens]).log_softmax(-1)
    for row, entry in zip(scores[len(PROMPT) - 1 :], reported, strict=False):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-3)
    assert sum(verdict.run_ahead is True for verdict in rig.verdicts) > 2


def test_sessions_of_a_batch_are_verified_with_and_without(make_rig):
    """Rows of a chain without a bonus are as many as ever."""
    rig = make_rig(draft="target")
    other = Owner(rig.owner.bench, random_tokens(17, seed=4), rejection(5)).opened()
    replies = rig.owner.bench.post(rig.entry(k=3, fan_out=1))
    beside = [verdict_of(other.verify()).token_ids for _ in range(6)]
    rig.read(replies)
    assert {verdict.run_ahead for verdict in rig.verdicts[:-1]} == {True}
    alone = Owner(rig.owner.bench, random_tokens(17, seed=4), rejection(5)).opened()
    assert set(beside) == {verdict_of(alone.verify()).token_ids}


class Remote:
    """A session on a draft that offers so much."""

    def __init__(self, *capabilities):
        self._capabilities = capabilities

    def offers(self, capability):
        return capability in self._capabilities


@pytest.mark.parametrize("capabilities", [("ahead",), ("ahead", "run_ahead")])
def test_a_draft_that_cannot_is_not_asked_to_run_ahead(capabilities):
    entry = worker_pb2.Entry()
    ask = Ask(3, (1, 2), (1, 0, 1), run_ahead=True)
    fill_for(Remote(*capabilities), ask)(entry, worker_pb2.TokenDelta(start=2))
    assert entry.propose.ahead.run_ahead is ("run_ahead" in capabilities)
    assert list(entry.propose.ahead.fan_out) == [1, 0, 1]
    assert entry.propose.delta.start == 2
