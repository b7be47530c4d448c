"""Who may speak for a session, and which tokens are ever taken for its base."""

import queue

import pytest
from worker_harness import (
    GREEDY,
    Owner,
    coupled,
    plain_greedy,
    random_tokens,
    refusal,
    serving,
    verdict_of,
)

from outrider.types import GenerationSpec, SamplingParams, new_nonce
from outrider.v1 import worker_pb2


@pytest.fixture(scope="module")
def folder(tiny_models):
    return tiny_models["target"]


@pytest.fixture(scope="module")
def bench(folder):
    with serving(folder) as bench:
        yield bench


@pytest.fixture
def owner(bench):
    owner = Owner(bench, random_tokens(12)).opened()
    yield owner
    owner.close()


def log_of(owner):
    return list(owner.bench.session(owner).sequence.log.tokens)


def successor(owner, **changes):
    """Another owner of the same session."""
    fields = {"session_id": owner.session_id, "epoch": owner.epoch + 1} | changes
    return Owner(owner.bench, list(owner.tokens), **fields)


@pytest.mark.parametrize("what", ["open", "verify", "close"])
def test_entries_of_a_past_epoch_are_refused(owner, what):
    newer = successor(owner).opened()
    assert refusal(getattr(owner, what)()) == ("stale_epoch", "epoch")
    verdict_of(newer.verify())
    newer.close()


@pytest.mark.parametrize("what", ["open", "verify", "close"])
def test_an_equal_epoch_with_another_nonce_is_refused(owner, what):
    twin = successor(owner, epoch=owner.epoch)
    assert refusal(getattr(twin, what)()) == ("nonce_mismatch", "owner_nonce")
    verdict_of(owner.verify())


@pytest.mark.parametrize("number", [0, 1, 2])
def test_repeated_and_late_numbers_are_refused(owner, number):
    verdict_of(owner.verify())
    before = log_of(owner)
    reply = owner.verify(tokens=[*owner.tokens, 5], number=number)
    assert refusal(reply) == ("stale_number", "number")
    assert reply.header.number == number
    assert log_of(owner) == before
    verdict_of(owner.verify())


def test_a_new_owner_counts_from_one_again(owner):
    for _ in range(3):
        verdict_of(owner.verify())
    newer = successor(owner).opened()
    assert newer.number == 1
    verdict_of(newer.verify())
    newer.close()


def test_a_new_owner_must_open_first(owner):
    newer = successor(owner)
    assert refusal(newer.verify()) == ("unknown_session", "")
    verdict_of(owner.verify())
    assert newer.open(number=9).opened.have_len == len(owner.tokens)
    newer.number = 9
    verdict_of(newer.verify(start=len(newer.tokens)))
    newer.close()


def test_unknown_sessions_are_refused_and_closing_them_is_no_error(bench):
    stranger = Owner(bench, random_tokens(4))
    assert refusal(stranger.verify()) == ("unknown_session", "")
    assert stranger.close().HasField("closed")


def test_a_closed_session_is_not_revived_by_its_former_owner(bench):
    former = Owner(bench, random_tokens(4), epoch=4).opened()
    owner = successor(former).opened()
    assert owner.close().HasField("closed")
    assert refusal(former.open()) == ("stale_epoch", "epoch")
    twin = successor(former)
    assert refusal(twin.open()) == ("nonce_mismatch", "owner_nonce")
    assert owner.open().opened.have_len == 0
    owner.close()


def test_a_new_owner_that_closes_without_opening_frees_the_session(bench):
    """Closed promises that the KV is free; the former owner must not keep it either."""
    before = bench.blocks_used
    owner = Owner(bench, random_tokens(20)).opened()
    verdict_of(owner.verify())
    assert successor(owner).close().HasField("closed")
    assert bench.session(owner) is None and bench.blocks_used == before
    assert refusal(owner.open()) == ("stale_epoch", "epoch")


def test_taking_over_drops_the_former_owners_work(bench):
    """Its reply says so, and only once."""
    owner = Owner(bench, random_tokens(8)).opened()
    blocked = bench.worker._tier.begin
    try:
        # The new owner's Open comes while the entry is queued.
        bench.worker._tier.begin = lambda *args: (
            bench.worker.submit([newer.open_entry()], lambda reply: None),
            blocked(*args),
        )[1]
        newer = successor(owner)
        replies = bench.post(owner.verify_entry())
        first = replies.get(timeout=10)
    finally:
        bench.worker._tier.begin = blocked
    bench.settle()
    assert refusal(first) == ("cancelled", "") and replies.empty()
    verdict_of(newer.verify())
    newer.close()


def test_replies_name_the_entry_that_they_answer(owner):
    reply = owner.verify()
    header = reply.header
    assert (header.session_id, header.completion) == (owner.session_id, 0)
    assert (header.epoch, header.owner_nonce) == (owner.epoch, owner.nonce)
    assert header.number == owner.number


def test_completions_of_a_session_are_apart(bench, folder):
    first = Owner(bench, random_tokens(9, seed=1)).opened()
    second = Owner(
        bench, random_tokens(9, seed=2), session_id=first.session_id, completion=1
    ).opened()
    for owner in (first, second, first):
        expected = plain_greedy(folder, owner.tokens, 1)
        assert list(verdict_of(owner.verify()).token_ids) == expected
    first.close()
    assert second.bench.session(second) is not None
    second.close()


# --- base by length and hash ----------------------------------------------------------------


def missing(reply):
    assert reply.HasField("need_tokens"), reply
    return getattr(reply.need_tokens, "from")


def test_tokens_behind_a_gap_are_asked_for_from_the_gap(owner):
    verdict_of(owner.verify())
    longer = [*owner.tokens, *random_tokens(8, seed=3)]
    before = log_of(owner)
    assert missing(owner.verify(tokens=longer, start=15)) == 12
    assert missing(owner.verify(tokens=longer, delta=())) == 12
    assert log_of(owner) == before
    verdict_of(owner.verify(tokens=longer, start=12))
    assert log_of(owner) == longer


def test_equal_length_with_another_prefix_is_asked_for_from_the_start(owner, folder):
    verdict_of(owner.verify())
    other = [*owner.tokens[:3], owner.tokens[3] ^ 1, *owner.tokens[4:]]
    before = log_of(owner)
    assert missing(owner.verify(tokens=other, delta=())) == 0
    assert missing(owner.verify(tokens=[*other, 7], start=12)) == 0
    assert log_of(owner) == before
    verdict = verdict_of(owner.verify(tokens=other))
    assert list(verdict.token_ids) == plain_greedy(folder, other, 1)


def test_a_base_that_its_own_tokens_contradict_is_refused_and_not_applied(owner):
    verdict_of(owner.verify())
    before, cached = log_of(owner), list(owner.cached)
    reply = owner.verify(tokens=random_tokens(12, seed=9), base_hash=12345)
    assert refusal(reply) == ("invalid_argument", "base_hash")
    reply = owner.verify(tokens=random_tokens(12, seed=9), base_len=11)
    assert refusal(reply) == ("invalid_argument", "base_hash")
    assert log_of(owner) == before and owner.cached == cached
    assert list(verdict_of(owner.verify(delta=())).token_ids)


def test_a_shorter_base_rolls_back(owner, folder):
    verdict_of(owner.verify([1, 2, 3]))
    short = owner.tokens[:7]
    verdict = verdict_of(owner.verify(tokens=short, delta=()))
    assert list(verdict.token_ids) == plain_greedy(folder, short, 1)
    assert log_of(owner) == short and owner.cached == short


def test_a_delta_that_is_already_there_changes_nothing(owner):
    """A repeated entry under a new number: the base matches, so its delta is not looked at."""
    first = verdict_of(owner.verify())
    assert verdict_of(owner.verify()) == first
    assert verdict_of(owner.verify(start=5)) == first


@pytest.mark.parametrize("where", ["delta", "bulk"])
def test_token_ids_outside_the_vocabulary_are_refused(owner, where):
    tokens = [*owner.tokens, 258]
    if where == "delta":
        reply = owner.verify(tokens=tokens)
    else:
        owner.tokens = tokens
        reply = owner.bench.ask_bulk(owner.bulk_request(0, 13))
    assert refusal(reply) == ("invalid_argument", "delta.token_ids")
    assert log_of(owner) == []


def test_an_empty_base_is_refused(owner):
    assert refusal(owner.verify(tokens=[])) == ("invalid_argument", "base_len")


# --- bulk -----------------------------------------------------------------------------------


def test_long_prompts_arrive_in_pieces(owner, folder):
    owner.tokens = random_tokens(100, seed=4)
    for start, stop in ((0, 40), (40, 80), (80, 100)):
        answer = owner.bench.ask_bulk(owner.bulk_request(start, stop))
        assert answer.held.have_len == stop and answer.header.number == owner.number
    verdict = verdict_of(owner.verify(delta=()))
    assert list(verdict.token_ids) == plain_greedy(folder, owner.tokens, 1)


def test_a_lost_piece_is_asked_for(owner):
    owner.tokens = random_tokens(60, seed=5)
    assert owner.bench.ask_bulk(owner.bulk_request(0, 20)).held.have_len == 20
    assert missing(owner.bench.ask_bulk(owner.bulk_request(40, 60))) == 20
    assert owner.bench.ask_bulk(owner.bulk_request(20, 60)).held.have_len == 60


def test_a_corrupted_piece_is_not_applied(owner):
    owner.tokens = random_tokens(30, seed=6)
    request = owner.bulk_request(0, 30)
    request.delta.token_ids[17] ^= 1
    assert refusal(owner.bench.ask_bulk(request)) == ("invalid_argument", "base_hash")
    assert log_of(owner) == []
    assert owner.bench.ask_bulk(owner.bulk_request(0, 30)).held.have_len == 30


def test_bulk_ends_what_its_session_has_under_way(folder):
    """It stands on a log that is no longer the session's; what cannot be taken ends nothing."""
    text = random_tokens(40)
    with serving(folder, threaded=False) as bench:
        owner = Owner(bench, text)
        bench.ask(owner.open_entry())
        entry = owner.verify_entry()
        entry.verify.more_rounds = 8
        replies = bench.post(entry)
        assert replies.get(timeout=5).header.more
        answers: queue.SimpleQueue[worker_pb2.BulkResponse] = queue.SimpleQueue()
        beyond = owner.entry(tokens=[*text, 1, 2]).header
        gap = worker_pb2.BulkRequest(
            header=beyond, delta=worker_pb2.TokenDelta(start=41, token_ids=[2])
        )
        for request in (gap, owner.bulk_request(0, 10)):
            assert replies.empty()
            bench.worker.submit_bulk(request, answers.put)
            bench.worker._read_inbox(0.0)
        assert answers.get(timeout=5).HasField("need_tokens")
        assert answers.get(timeout=5).held.have_len == 10
        assert refusal(replies.get(timeout=5))[0] == "cancelled"
        owner.tokens = text[:10]
        told = bench.ask(owner.verify_entry(start=10))
        assert list(verdict_of(told).token_ids) == plain_greedy(folder, owner.tokens, 1)


def test_pieces_are_fenced(owner):
    newer = successor(owner)
    assert refusal(owner.bench.ask_bulk(newer.bulk_request(0, 5)))[0] == "unknown_session"
    newer.opened()
    assert refusal(owner.bench.ask_bulk(owner.bulk_request(0, 5)))[0] == "stale_epoch"
    newer.close()


def test_bulk_is_bounded_by_the_message_and_by_the_context(owner):
    big = owner.bulk_request(0, 12)
    big.delta.token_ids.extend([1] * 65_600)
    assert refusal(owner.bench.ask_bulk(big)) == ("invalid_argument", "delta")
    context = owner.bench.worker.limits.context_length
    owner.tokens = [1] * (context + 1)
    assert owner.bench.ask_bulk(owner.bulk_request(0, context - 1)).held.have_len == context - 1
    for stop in (context, context + 1):
        answer = owner.bench.ask_bulk(owner.bulk_request(context - 1, stop))
        assert refusal(answer) == ("context_exceeded", "base_len")
    assert len(log_of(owner)) == context - 1


def test_a_delta_has_at_most_8192_ids(owner):
    for count, expected in ((8192, ("invalid_argument", "base_hash")),
                            (8193, ("invalid_argument", "delta.token_ids"))):  # fmt: skip
        assert refusal(owner.verify(delta=[1] * count)) == expected


# --- what may be opened, and what an entry may say --------------------------------------------


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ({"session_id": "short"}, ("invalid_argument", "session_id")),
        ({"session_id": "{" * 22}, ("invalid_argument", "session_id")),
        ({"completion": 256}, ("invalid_argument", "completion")),
        ({"epoch": 0}, ("invalid_argument", "epoch")),
        ({"adapter": "lora"}, ("unsupported", "adapter")),
        ({"number": 0}, ("stale_number", "number")),
        ({"tenant": "t" * 129}, ("invalid_argument", "tenant")),
        ({"tenant": "é" * 65}, ("invalid_argument", "tenant")),
        ({"request_id": "r" * 129}, ("invalid_argument", "request_id")),
        ({"traceparent": "t" * 65}, ("invalid_argument", "traceparent")),
        ({"model": "m" * 257}, ("invalid_argument", "model")),
    ],
)
def test_opening_checks_the_header(bench, header, expected):
    sessions = bench.worker.load.sessions
    assert refusal(Owner(bench, [1]).open(**header)) == expected
    assert bench.worker.load.sessions == sessions


def test_names_of_the_longest_kind_are_taken(bench):
    names = {"tenant": "é" * 64, "request_id": "r" * 128, "traceparent": "t" * 64}
    assert Owner(bench, [1]).open(**names, model="m" * 256).HasField("opened")


def test_names_are_checked_on_every_entry(owner):
    assert refusal(owner.verify(request_id="r" * 129)) == ("invalid_argument", "request_id")
    request = owner.bulk_request(0, 5, tenant="t" * 129)
    assert refusal(owner.bench.ask_bulk(request)) == ("invalid_argument", "tenant")


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (GenerationSpec(SamplingParams(temperature=-1.0)), "temperature"),
        (GenerationSpec(SamplingParams(temperature=float("nan"))), "temperature"),
        (GenerationSpec(SamplingParams(), prompt_len=0), "prompt_len"),
        (GenerationSpec(SamplingParams(), stop_ids=(258,)), "stop_ids"),
        (GenerationSpec(SamplingParams(), logprobs=21), "logprobs"),
    ],
)
def test_opening_checks_the_generation(bench, spec, field):
    owner = Owner(bench, [1], spec=spec)
    assert refusal(owner.open()) == ("invalid_argument", field)
    assert bench.session(owner) is None


@pytest.mark.parametrize("timeout_ms", [0, 86_400_001])
def test_deadlines_outside_their_range_are_refused(owner, timeout_ms):
    assert refusal(owner.verify(timeout_ms=timeout_ms)) == ("invalid_argument", "timeout_ms")


def test_an_entry_that_says_nothing_is_refused(owner):
    assert refusal(owner.bench.ask(owner.entry())) == ("invalid_argument", "op")


def test_a_target_does_not_propose(owner):
    assert refusal(owner.propose(2)) == ("unsupported", "op")


def test_a_draft_does_not_verify(tiny_models):
    with serving(tiny_models["draft"], "draft") as bench:
        owner = Owner(bench, [1, 2]).opened()
        assert refusal(owner.verify()) == ("unsupported", "op")
        for count in (0, 17):
            expected = ("invalid_argument", "num_speculative_tokens")
            assert refusal(owner.propose(count)) == expected


def test_a_new_generation_of_an_open_session_keeps_its_tokens(owner):
    plain = verdict_of(owner.verify())
    owner.spec = coupled(7, temperature=3.0, top_p=1.0)
    assert owner.open().opened.have_len == 12
    held = list(owner.cached)
    noisy = [verdict_of(owner.verify(delta=())).token_ids]
    for seed in range(8, 12):
        owner.spec = coupled(seed, temperature=3.0, top_p=1.0)
        owner.opened()
        noisy.append(verdict_of(owner.verify(delta=())).token_ids)
    assert held == owner.tokens and len(set(noisy)) > 1
    owner.spec = GREEDY
    owner.opened()
    assert verdict_of(owner.verify(delta=())) == plain


def test_one_nonce_is_not_enough_to_be_the_owner(owner):
    """An intruder that guesses the epoch still needs the nonce."""
    for nonce in (0, 1, new_nonce(), owner.nonce ^ 1):
        reply = owner.verify(owner_nonce=nonce)
        assert refusal(reply) == ("nonce_mismatch", "owner_nonce")
