"""A target that goes on with plain rounds unasked: the same tokens as asking round by round.

It ends where the generation may, where others need the memory, and where its owner says so; what
it has told by then stands, and whatever is asked next goes on from there.
"""

import contextlib
import dataclasses
import random
import time

import pytest
import torch
from worker_harness import (
    GREEDY,
    Owner,
    coupled,
    generate,
    plain_greedy,
    plain_logits,
    random_tokens,
    refusal,
    rejection,
    serving,
    verdict_of,
)

torch.set_num_threads(1)
PROMPT = random_tokens(21, seed=31)
SPECS = {
    "greedy": dataclasses.replace(GREEDY, logprobs=2),
    "coupled": coupled(5),
    "rejection": rejection(6),
    "logprobs": dataclasses.replace(coupled(7, top_k=9), logprobs=3),
}


@pytest.fixture(scope="module")
def folder(tiny_models):
    return tiny_models["target"]


@pytest.fixture(scope="module")
def target(folder):
    with serving(folder) as bench:
        yield bench


@contextlib.contextmanager
def session(bench, spec=GREEDY, tokens=PROMPT):
    owner = Owner(bench, list(tokens), spec=spec).opened()
    try:
        yield owner
    finally:
        owner.close()


def run_entry(owner, more, guesses=(), **kwargs):
    """A verification after which the target is to go on for `more` rounds."""
    entry = owner.verify_entry(guesses, **kwargs)
    entry.verify.more_rounds = more
    return entry


def rest(replies):
    """All replies to an entry, to the last one."""
    got = [replies.get(timeout=20)]
    while got[-1].header.more:
        got.append(replies.get(timeout=20))
    assert replies.empty()
    return got


def run(owner, more, guesses=(), **kwargs):
    """The replies to such an entry, their tokens taken into the owner's log."""
    replies = rest(owner.bench.post(run_entry(owner, more, guesses, **kwargs)))
    for reply in replies:
        assert (reply.header.session_id, reply.header.number) == (owner.session_id, owner.number)
    owner.tokens.extend(tokens_of(replies))
    return replies


def tokens_of(replies):
    return [token for reply in replies for token in verdict_of(reply).token_ids]


def taken(replies):
    """What has arrived so far."""
    got = []
    while not replies.empty():
        got.append(replies.get())
    return got


def plain(bench, spec, count, tokens=PROMPT):
    with session(bench, spec, tokens) as owner:
        return generate(owner, count)


def one_by_one(owner, count, guesses=()):
    """Verdicts of a verification and the plain rounds after it, each asked for."""
    verdicts = []
    while len(verdicts) < count:
        verdicts.append(verdict_of(owner.verify(guesses)))
        owner.tokens.extend(verdicts[-1].token_ids)
        guesses = ()
    return verdicts


def cancel(owner):
    entry = owner.entry()
    entry.cancel.through_number = owner.number - 1
    return owner.bench.post(entry)


# --- the same tokens --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["no guesses", "wrong", "partly right", "right"])
@pytest.mark.parametrize("name", SPECS)
def test_replies_are_those_of_asking_round_by_round(target, folder, name, kind):
    """Also where rejected guesses have left KV behind."""
    spec, more = SPECS[name], 30
    own = plain(target, spec, 6)
    wrong = [token ^ 1 for token in own]
    guesses = {"no guesses": [], "wrong": wrong, "partly right": own[:2] + wrong[2:], "right": own}
    with session(target, spec) as owner:
        expected = one_by_one(owner, more + 1, guesses[kind])
        tokens = owner.tokens
    if name != "rejection":
        accepted = {"no guesses": 0, "wrong": 0, "partly right": 2, "right": 6}
        assert expected[0].num_accepted == accepted[kind]
    with session(target, spec) as owner:
        replies = run(owner, more, guesses[kind])
        assert owner.tokens == tokens
        assert owner.cached == tokens[:-1]
        assert [reply.header.more for reply in replies] == [True] * more + [False]
        verdicts = [verdict_of(reply) for reply in replies]
        without = [dataclasses.replace(verdict, logprobs=()) for verdict in verdicts]
        assert without == [dataclasses.replace(verdict, logprobs=()) for verdict in expected]
    if spec.logprobs is None:
        assert all(verdict.logprobs == () for verdict in verdicts)
        return
    scores = plain_logits(folder, tokens).log_softmax(-1)[len(PROMPT) - 1 : -1]
    reported = [entry for verdict in verdicts for entry in verdict.logprobs]
    for entry, token, row in zip(reported, tokens[len(PROMPT) :], scores, strict=True):
        assert entry.token_id == token and len(entry.top) == spec.logprobs
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-3)


def test_runs_follow_one_another_with_verifications_between(target):
    """Each stands on what the last one left, KV included."""
    spec = coupled(8)
    own = plain(target, spec, 120)
    with session(target, spec) as owner:
        chance, accepted, held = random.Random(3), 0, 0
        while (done := len(owner.tokens) - len(PROMPT)) < 100:
            right = own[done : done + chance.randrange(5)]
            more = chance.choice((0, 1, 2, 7))
            replies = run(owner, more, [*right, 1, 2], start=held)
            assert len(replies) == more + 1
            assert not more or len(owner.cached) == len(owner.tokens) - 1
            # The tokens of the last reply are the owner's to keep or not.
            held = len(owner.tokens) - len(verdict_of(replies[-1]).token_ids)
            accepted += verdict_of(replies[0]).num_accepted
        assert owner.tokens[len(PROMPT) :] == own[: len(owner.tokens) - len(PROMPT)]
    assert accepted > 20


def test_sessions_that_join_and_leave_do_not_disturb_each_other(folder):
    starts = {0: (0, 60), 1: (2, 5), 2: (2, 45), 3: (9, 0), 4: (11, 30), 5: (20, 25)}
    specs = [*SPECS.values(), coupled(5), GREEDY]
    prompts = [random_tokens(9 + 4 * n, seed=50 + n) for n in starts]
    with serving(folder, threaded=False) as bench:
        owners = [Owner(bench, list(prompts[n]), spec=specs[n]) for n in starts]
        for owner in owners:
            assert owner.open().HasField("opened")
        got = {n: [] for n in starts}
        queues, passes = {}, 0
        while len(queues) < len(starts) or any(r[-1:] and r[-1].header.more for r in got.values()):
            for n, (start, more) in starts.items():
                if start == passes:
                    queues[n] = bench.worker.submit([run_entry(owners[n], more)], got[n].append)
            bench.pump()
            passes += 1
        rows = [reply.verified.timing.batch_rows for replies in got.values() for reply in replies]
        assert passes == 61 and bench.worker.load.queued == 0
        for owner in owners:
            owner.close()
        assert bench.blocks_used == 0
    assert max(rows) > 20 and rows.count(4) > 10 and 1 in rows
    with serving(folder) as alone:
        for n, (_, more) in starts.items():
            assert len(got[n]) == more + 1
            assert tokens_of(got[n]) == plain(alone, specs[n], more + 1, prompts[n]), n


def test_a_long_prompt_is_prefilled_beside_a_run(folder):
    prompt, chunk = random_tokens(200, seed=4), 8
    with serving(folder, threaded=False, max_rows=chunk) as bench:
        runner, comer = Owner(bench, list(PROMPT)), Owner(bench, list(prompt))
        runner.open(), comer.open()
        replies, other = [], []
        bench.worker.submit([run_entry(runner, 80)], replies.append)
        while len(replies) < 3:
            bench.pump()
        bench.worker.submit([run_entry(comer, 10)], other.append)
        passes = 0
        while not other:
            bench.pump()
            passes += 1
        assert passes == pytest.approx(200 / (chunk - 1), abs=1)
        assert len(replies) == 3 + passes, "the run had a round in each of these passes"
        while replies[-1].header.more:
            bench.pump()
    assert tokens_of(replies) == plain_greedy(folder, PROMPT, 81)
    assert tokens_of(other) == plain_greedy(folder, prompt, 11)


def test_runs_beyond_the_row_budget_take_turns(folder):
    """And a prompt that comes later gets the share of the oldest."""
    with serving(folder, threaded=False, max_rows=4) as bench:
        owners = [Owner(bench, random_tokens(3, seed=n)) for n in range(6)]
        got = [[] for _ in owners]
        for owner, replies in zip(owners, got, strict=True):
            owner.open()
            bench.worker.submit([run_entry(owner, 100)], replies.append)
        comer, told = Owner(bench, random_tokens(20)), []
        comer.open()
        bench.worker.submit([comer.verify_entry()], told.append)
        for _ in range(60):
            bench.pump()
        assert told and all(replies for replies in got)


# --- where a run ends -------------------------------------------------------------------------


def first_of_its_kind(tokens, least):
    """An index of `least` or more whose token does not come before."""
    return next(i for i in range(least, len(tokens)) if tokens[i] not in tokens[:i])


@pytest.mark.parametrize("spec", [GREEDY, coupled(9), rejection(9)], ids=["t0", "c", "r"])
def test_a_run_ends_after_a_stop_id(target, spec):
    own = plain(target, spec, 60)
    last = first_of_its_kind(own, 8)
    spec = dataclasses.replace(spec, stop_ids=(own[last], 257))
    with session(target, spec) as owner:
        replies = run(owner, 50)
        assert tokens_of(replies) == own[: last + 1]
        assert [reply.header.more for reply in replies] == [True] * last + [False]
        # Whether it is the end is the orchestrator's affair: asked again, it goes on.
        assert generate(owner, 5) == own[last + 1 : last + 6]


def test_a_stop_id_among_accepted_guesses_ends_it_too(target):
    own = plain(target, GREEDY, 20)
    last = first_of_its_kind(own, 1)
    spec = dataclasses.replace(GREEDY, stop_ids=(own[last],))
    with session(target, spec) as owner:
        [reply] = run(owner, 9, own[: last + 3])
        assert tokens_of([reply]) == own[: last + 4] and not reply.header.more


@pytest.mark.parametrize("spec", [GREEDY, coupled(10), rejection(10)], ids=["t0", "c", "r"])
@pytest.mark.parametrize("guesses", [0, 3])
def test_before_min_tokens_no_stop_id_ends_it(target, spec, guesses):
    tempting = tuple(sorted(set(plain(target, spec, 40)))[:64])
    spec = dataclasses.replace(spec, prompt_len=len(PROMPT), min_tokens=12, stop_ids=tempting)
    own = plain(target, spec, 60)
    last = next(i for i, token in enumerate(own) if token in tempting)
    assert 12 <= last < 40
    with session(target, spec) as owner:
        replies = run(owner, 59, [token ^ 1 for token in own[:guesses]])
        # In rejection mode guesses change the draws, never where they may end.
        if spec.mode is not rejection(0).mode or not guesses:
            assert tokens_of(replies) == own[: last + 1]
        stops = [i for i, token in enumerate(tokens_of(replies)) if token in tempting]
        assert stops == [len(tokens_of(replies)) - 1] and stops[0] >= 12


@pytest.mark.parametrize("guesses", [0, 1, 4])
def test_a_run_ends_at_the_contexts_end(folder, guesses):
    end = 40
    with serving(folder, context_length=end) as bench:
        for base in range(end - guesses - 3, end):
            prompt = random_tokens(base, seed=base)
            own = plain_greedy(folder, prompt, end - base)
            with session(bench, GREEDY, prompt) as owner:
                replies = run(owner, 1000, own[:guesses])
                assert owner.tokens == [*prompt, *own] and len(owner.tokens) == end
                assert len(replies) == end - base - verdict_of(replies[0]).num_accepted
                assert refusal(owner.verify()) == ("context_exceeded", "base_len")
        assert bench.blocks_used == 0


@pytest.mark.parametrize("blocks", [8, 9, 11])
def test_where_kv_is_short_a_run_ends_and_nothing_is_lost(folder, blocks):
    """Two runs that do not fit together: whoever ends asks anew, and waits in the queue."""
    prompts = [random_tokens(14, seed=60 + n) for n in range(2)]
    specs, count = (coupled(3), GREEDY), 40
    with serving(folder, threaded=False, num_blocks=blocks) as bench:
        owners = [Owner(bench, list(prompts[n]), spec=specs[n]) for n in range(2)]
        for owner in owners:
            owner.open()
        got = [[], []]
        early = 0

        def left(n):
            return count - (len(owners[n].tokens) - len(prompts[n]))

        def ask(n):
            bench.worker.submit([run_entry(owners[n], left(n) - 1)], got[n].append)

        ask(0), ask(1)
        for _ in range(400):
            bench.pump()
            for n, owner in enumerate(owners):
                replies, got[n][:] = list(got[n]), []
                owner.tokens.extend(tokens_of(replies))
                if replies and not replies[-1].header.more and left(n):
                    early += 1
                    ask(n)
            if not left(0) and not left(1):
                break
        for owner in owners:
            owner.close()
        assert bench.blocks_used == 0 and bench.worker.load.queued == 0
    assert early > 0
    with serving(folder) as alone:
        for n, owner in enumerate(owners):
            assert owner.tokens[len(prompts[n]) :] == plain(alone, specs[n], count, prompts[n])


def test_a_run_makes_room_for_those_who_wait_for_kv(folder):
    long = random_tokens(40, seed=7)
    with serving(folder, threaded=False, num_blocks=8) as bench:
        runner, comer = Owner(bench, list(PROMPT)), Owner(bench, list(long))
        runner.open(), comer.open()
        replies, other = [], []
        bench.worker.submit([run_entry(runner, 1000)], replies.append)
        for _ in range(6):
            bench.pump()
        assert len(replies) == 6 and replies[-1].header.more
        bench.worker.submit([comer.verify_entry()], other.append)
        bench.pump()
        assert len(replies) == 7 and not replies[-1].header.more and not other
        bench.pump()
        assert tokens_of(other) == plain_greedy(folder, long, 1)
        runner.tokens.extend(tokens_of(replies))
        runner.bench.worker.submit([runner.verify_entry(delta=())], replies.append)
        bench.pump()
        assert tokens_of(replies) == plain_greedy(folder, PROMPT, 8)


# --- where its owner ends it ------------------------------------------------------------------


@contextlib.contextmanager
def underway(folder, spec, passes=6, guesses=()):
    """An owner whose run has had some passes, its replies, and what they will be."""
    with serving(folder) as alone:
        own = plain(alone, spec, 60)
    with serving(folder, threaded=False) as bench:
        owner = Owner(bench, list(PROMPT), spec=spec)
        assert owner.open().HasField("opened")
        replies = bench.post(run_entry(owner, 1000, guesses))
        for _ in range(passes - 1):
            bench.pump()
        got = taken(replies)
        assert len(got) == passes and all(reply.header.more for reply in got)
        assert tokens_of(got) == own[: len(tokens_of(got))]
        owner.tokens.extend(tokens_of(got))
        yield owner, replies, own
        assert bench.worker.load.queued == 0
        closing = owner.entry()
        closing.close.SetInParent()
        assert bench.post(closing).get(timeout=1).HasField("closed")
        assert bench.blocks_used == 0 and bench.worker.load.sessions == 0


def ended_by(replies, number):
    """The reason of the one reply that ends a run."""
    [last] = taken(replies)
    assert last.header.number == number and not last.header.more
    reason, field = refusal(last)
    assert field == ""
    return reason


@pytest.mark.parametrize("back", [0, 1, 3, 5])
@pytest.mark.parametrize("spec", [GREEDY, coupled(11), rejection(11)], ids=["t0", "c", "r"])
def test_after_a_cancel_any_base_goes_on_as_ever(folder, spec, back):
    with underway(folder, spec) as (owner, replies, own):
        number = owner.number
        nothing = cancel(owner)
        assert ended_by(replies, number) == "cancelled" and nothing.empty()
        owner.bench.pump()
        assert replies.empty()
        del owner.tokens[len(owner.tokens) - back :]
        again = owner.bench.post(run_entry(owner, 20, delta=()))
        for _ in range(20):
            owner.bench.pump()
        got = taken(again)
        done = len(owner.tokens) - len(PROMPT)
        assert tokens_of(got) == own[done : done + 21] and not got[-1].header.more


def test_a_cancel_right_after_rejected_guesses_leaves_no_kv_of_theirs(folder):
    wrong = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    with underway(folder, GREEDY, passes=1, guesses=wrong) as (owner, replies, own):
        cancel(owner)
        assert ended_by(replies, 1 + 1) == "cancelled"
        assert owner.cached == PROMPT
        assert owner.bench.blocks_used == -(-len(PROMPT) // 8)
        again = owner.bench.post(owner.verify_entry(delta=()))
        assert tokens_of(taken(again)) == own[1:2]


def test_a_cancel_of_earlier_numbers_does_not_end_it(folder):
    with underway(folder, GREEDY) as (owner, replies, own):
        entry = owner.entry()
        entry.cancel.through_number = owner.number - 2
        owner.bench.post(entry)
        assert tokens_of(taken(replies)) == own[6:7]
        cancel(owner)


def test_closing_ends_it(folder):
    with underway(folder, GREEDY) as (owner, replies, _):
        number = owner.number
        closing = owner.entry()
        closing.close.SetInParent()
        assert owner.bench.post(closing).get(timeout=1).HasField("closed")
        assert ended_by(replies, number) == "cancelled"
        assert owner.bench.blocks_used == 0


def test_a_new_owner_ends_it_and_goes_on_where_it_likes(folder):
    with underway(folder, coupled(12)) as (owner, replies, own):
        number, owner.epoch, owner.nonce = owner.number, 2, owner.nonce ^ 1
        opened = owner.bench.post(owner.open_entry()).get(timeout=1).opened
        assert (opened.have_len, opened.cached_len) == (len(PROMPT) + 6, len(PROMPT) + 5)
        assert ended_by(replies, number) == "cancelled"
        del owner.tokens[-2:]
        again = owner.bench.post(owner.verify_entry(delta=()))
        assert tokens_of(taken(again)) == own[4:5]


def test_another_tenant_ends_it_for_its_kv_is_not_theirs(folder):
    with underway(folder, GREEDY) as (owner, replies, own):
        number = owner.number
        opened = owner.bench.post(owner.open_entry(tenant="another")).get(timeout=1).opened
        assert (opened.have_len, opened.cached_len) == (len(PROMPT) + 6, 0)
        assert ended_by(replies, number) == "cancelled" and owner.bench.blocks_used == 0
        again = owner.bench.post(owner.verify_entry(delta=(), tenant="another"))
        assert tokens_of(taken(again)) == own[6:7]


def test_a_stream_that_ends_ends_its_runs(folder):
    with underway(folder, GREEDY) as (owner, replies, _):
        owner.bench.worker.abandon(replies.put)
        owner.bench.pump()
        assert ended_by(replies, owner.number) == "cancelled"


def test_a_run_ends_at_its_deadline(folder):
    with serving(folder) as bench, session(bench) as owner:
        forward = bench.runner.forward
        bench.runner.forward = lambda batch: (time.sleep(0.01), forward(batch))[1]
        replies = rest(bench.post(run_entry(owner, 1000, timeout_ms=200)))
        bench.runner.forward = forward
        assert refusal(replies[-1]) == ("deadline_exceeded", "") and 1 < len(replies) < 25
        owner.tokens.extend(tokens_of(replies[:-1]))
        assert generate(owner, 5) == plain_greedy(folder, owner.tokens[:-5], 5)
        assert tokens_of(replies[:-1]) == plain_greedy(folder, PROMPT, len(replies) - 1)


def test_a_pass_that_fails_ends_it_and_what_was_told_stands(folder):
    with underway(folder, coupled(13)) as (owner, replies, own):
        runner = owner.bench.runner
        forward = runner.forward

        def broken(batch):
            raise RuntimeError("broken on purpose")

        runner.forward = broken
        owner.bench.pump()
        [last] = taken(replies)
        assert refusal(last)[0] == "internal" and not last.header.more
        runner.forward = forward
        again = owner.bench.post(owner.verify_entry(delta=()))
        assert tokens_of(taken(again)) == own[6:7]


# --- what is asked and answered ---------------------------------------------------------------


def test_another_entry_of_the_session_is_refused_while_it_runs(folder):
    with underway(folder, GREEDY) as (owner, replies, own):
        other = owner.bench.post(owner.verify_entry())
        assert refusal(other.get(timeout=1)) == ("invalid_argument", "")
        assert tokens_of(taken(replies)) == own[6:7], "the run goes on"
        entry = owner.entry()
        entry.cancel.through_number = owner.number - 1
        owner.bench.post(entry)


def test_more_rounds_has_a_range(target):
    with session(target) as owner:
        for count in (1025, 1 << 31):
            reply = target.ask(run_entry(owner, count))
            assert refusal(reply) == ("invalid_argument", "more_rounds")
        assert target.session(owner).works == 0
        spec = dataclasses.replace(GREEDY, stop_ids=tuple(plain(target, GREEDY, 1)))
    with session(target, spec) as owner:
        assert len(run(owner, 1024)) == 1


@pytest.mark.parametrize("more", [0, 1, 7])
def test_a_run_has_one_reply_a_round(target, more):
    with session(target) as owner:
        replies = run(owner, more)
        assert [reply.header.more for reply in replies] == [True] * more + [False]
        assert all(len(verdict_of(reply).token_ids) == 1 for reply in replies)
        assert {reply.header.owner_nonce for reply in replies} == {owner.nonce}
        assert target.session(owner).works == target.worker.load.queued == 0


def test_each_reply_tells_of_its_own_round_only(folder):
    with serving(folder) as bench, session(bench) as owner:
        forward = bench.runner.forward
        bench.runner.forward = lambda batch: (time.sleep(0.005), forward(batch))[1]
        started = time.monotonic()
        replies = run(owner, 20)
        took_us = (time.monotonic() - started) * 1e6
        elapsed = [reply.header.elapsed_us for reply in replies]
        computed = [reply.verified.timing.compute_us for reply in replies]
        assert min(elapsed) >= min(computed) >= 5000
        assert sum(computed) <= sum(elapsed) <= took_us
        assert max(reply.verified.timing.queue_us for reply in replies[1:]) == 0
        assert [reply.verified.timing.batch_rows for reply in replies] == [len(PROMPT)] + [1] * 20
        prompts = [reply.verified.timing.prompt_rows for reply in replies]
        assert prompts == [len(PROMPT) - 1] + [0] * 20


def test_a_draft_never_goes_on(tiny_models):
    with serving(tiny_models["draft"], "draft") as bench, session(bench) as owner:
        assert not owner.propose(3).header.more


def test_memory_comes_back(folder):
    with serving(folder) as bench:
        for n in range(5):
            with session(bench, coupled(n)) as owner:
                run(owner, 40, [1, 2, 3])
                assert bench.blocks_used == -(-len(owner.cached) // 8)
            assert bench.blocks_used == 0 and bench.worker.load.sessions == 0
