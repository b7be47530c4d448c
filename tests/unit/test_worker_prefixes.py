"""KV that sessions share: what is found, what it saves, and that nobody notices otherwise."""

import pytest
from worker_harness import Owner, plain_greedy, random_tokens, serving, verdict_of

BLOCK = 8
SHARED = random_tokens(40, seed=11)


@pytest.fixture
def bench(tiny_models):
    with serving(tiny_models["target"], block_tokens=BLOCK, num_blocks=32) as made:
        yield made


def cached_of(owner, guesses=()):
    """Tokens whose KV was there for a session's first round."""
    return owner.verify(guesses).verified.timing.cached_tokens


def test_a_second_session_computes_only_what_is_new(bench, tiny_models):
    first = Owner(bench, [*SHARED, 1, 2, 3]).opened()
    assert cached_of(first) == 0
    second = Owner(bench, [*SHARED, 7, 8]).opened()
    reply = second.verify()
    assert reply.verified.timing.cached_tokens == 40
    expected = plain_greedy(tiny_models["target"], second.tokens, 1)
    assert list(verdict_of(reply).token_ids) == expected


def test_a_prefix_outlives_the_session_that_made_it(bench):
    first = Owner(bench, [*SHARED, 1]).opened()
    first.verify()
    first.close()
    assert bench.blocks_used == 0
    assert cached_of(Owner(bench, [*SHARED, 2]).opened()) == 40


def test_rows_whose_logits_are_wanted_are_computed(bench):
    Owner(bench, [*SHARED, 1]).opened().verify()
    assert cached_of(Owner(bench, SHARED).opened()) == 32


def test_tenants_share_nothing(bench):
    first = Owner(bench, [*SHARED, 1])
    first.open(tenant="a")
    first.verify(tenant="a")
    other = Owner(bench, [*SHARED, 1])
    other.open(tenant="b")
    assert cached_of(other) == 0
    same = Owner(bench, [*SHARED, 1])
    same.open(tenant="a")
    assert cached_of(same) == 40


def test_guesses_are_not_offered_before_they_are_committed(bench):
    guesses = random_tokens(BLOCK, seed=5)
    Owner(bench, [*SHARED, 1]).opened().verify(guesses)
    assert cached_of(Owner(bench, [*SHARED, 1, *guesses, 2]).opened()) == 40


def test_a_session_that_turns_back_leaves_the_others_kv_alone(bench, tiny_models):
    folder = tiny_models["target"]
    first = Owner(bench, [*SHARED, 1]).opened()
    first.verify()
    second = Owner(bench, [*SHARED, 1]).opened()
    assert cached_of(second) == 40
    second.tokens = [*SHARED[:20], 9, 9, 9, 9]
    reply = second.verify(start=20)
    assert reply.verified.timing.cached_tokens == 16  # Its third block is shared: computed anew.
    assert list(verdict_of(reply).token_ids) == plain_greedy(folder, second.tokens, 1)
    first.tokens.append(5)
    reply = first.verify(start=len(first.tokens) - 1)
    assert reply.verified.timing.cached_tokens == 41
    assert list(verdict_of(reply).token_ids) == plain_greedy(folder, first.tokens, 1)


def test_info_counts_what_was_looked_for_and_found(bench):
    Owner(bench, [*SHARED, 1]).opened().verify()
    Owner(bench, [*SHARED, 2]).opened().verify()
    load = bench.worker.load
    assert (load.prefix_tokens, load.prefix_hit_tokens) == (80, 40)
