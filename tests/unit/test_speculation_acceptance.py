"""Acceptance by position: what a round tells, what is presumed, how fast it is forgotten."""

import random

import pytest

from outrider.speculation.acceptance import AcceptanceModel, PoolPrior, expected_tokens
from outrider.speculation.load import Kind, ProposerPool


def draw(rates: list[float], rng: random.Random) -> int:
    for accepted, rate in enumerate(rates):
        if rng.random() >= rate:
            return accepted
    return len(rates)


def learned(rates: list[float], *, rounds: int = 3000, seed: int = 1) -> AcceptanceModel:
    model, rng = AcceptanceModel(PoolPrior(), discount=0.999), random.Random(seed)
    for _ in range(rounds):
        model.observe(len(rates), draw(rates, rng))
    return model


def test_expected_tokens_are_one_and_the_chances_to_survive():
    assert expected_tokens([]) == 1.0
    assert expected_tokens([0.8, 0.5, 0.25]) == pytest.approx(1 + 0.8 + 0.8 * 0.5 + 0.1)
    a, k = 0.7, 6
    assert expected_tokens([a] * k) == pytest.approx((1 - a ** (k + 1)) / (1 - a))


def test_expected_tokens_are_what_rounds_bring():
    rates, rng = [0.9, 0.6, 0.7, 0.3], random.Random(3)
    mean = sum(draw(rates, rng) + 1 for _ in range(20_000)) / 20_000
    assert expected_tokens(rates) == pytest.approx(mean, abs=0.03)


def test_positions_behind_a_rejection_tell_nothing():
    rates = [0.8, 0.6, 0.4, 0.7]
    found = learned(rates).survival(4)
    assert found == pytest.approx(rates, abs=0.06)

    # The control: guesses behind a rejection counted as rejected.
    rng, accepted, rounds = random.Random(1), [0] * 4, 3000
    for _ in range(rounds):
        for i in range(draw(rates, rng)):
            accepted[i] += 1
    biased = [count / rounds for count in accepted]
    assert biased[2] < 0.25 and biased[3] < 0.2
    assert biased != pytest.approx(rates, abs=0.06)


def test_a_full_acceptance_tells_of_no_further_position():
    model = AcceptanceModel(PoolPrior())
    for _ in range(200):
        model.observe(2, 2)
    a_1, a_2, a_3 = model.survival(3)
    assert a_1 > 0.9 and a_2 > 0.9 and a_3 <= a_2


@pytest.mark.parametrize("rate", [0.15, 0.5, 0.9])
def test_positions_never_tried_go_on_as_the_last_known_one(rate: float):
    found = learned([rate] * 2).survival(8)
    assert found[2:] == pytest.approx([found[1]] * 6, abs=1e-9)


def test_the_pool_knows_how_acceptance_goes_on_behind_what_a_session_tried():
    pool, rng = PoolPrior(), random.Random(5)
    for _ in range(3000):
        pool.observe(4, draw([0.8, 0.8, 0.4, 0.4], rng))
    model, found = AcceptanceModel(pool), []
    for _ in range(1000):
        model.observe(2, draw([0.8, 0.8], rng))
        found.append(model.survival(4))
    means = [sum(rates) / len(found) for rates in zip(*found, strict=True)]
    assert means == pytest.approx([0.8, 0.8, 0.4, 0.4], abs=0.1)


def test_a_new_session_starts_where_the_others_are():
    pool, rng = PoolPrior(), random.Random(6)
    assert AcceptanceModel(pool).survival(1) == [0.5]
    for _ in range(20):
        session = AcceptanceModel(pool)
        for _ in range(50):
            session.observe(3, draw([0.85] * 3, rng))
    assert AcceptanceModel(pool).survival(3) == pytest.approx([0.85] * 3, abs=0.05)


def test_a_session_departs_from_the_others():
    pool, rng = PoolPrior(), random.Random(7)
    for _ in range(2000):
        pool.observe(3, draw([0.85] * 3, rng))
    session = AcceptanceModel(pool)
    for _ in range(60):
        session.observe(3, draw([0.2] * 3, rng))
    assert session.survival(1)[0] < 0.4
    assert AcceptanceModel(pool).survival(1)[0] > 0.75


@pytest.mark.parametrize(("before", "after"), [(0.9, 0.2), (0.2, 0.9)])
def test_a_change_of_the_text_is_noticed(before: float, after: float):
    model, rng = AcceptanceModel(PoolPrior()), random.Random(8)
    for _ in range(300):
        model.observe(1, draw([before], rng))
    assert model.survival(1)[0] == pytest.approx(before, abs=0.12)
    changes = model.num_changes
    for _ in range(20):
        model.observe(1, draw([after], rng))
    assert model.num_changes > changes
    assert abs(model.survival(1)[0] - after) < 0.3


def test_steady_text_is_rarely_taken_for_changed():
    model, rng = AcceptanceModel(PoolPrior()), random.Random(9)
    for _ in range(2000):
        model.observe(3, draw([0.6] * 3, rng))
    assert model.num_changes < 30


def test_plain_rounds_make_nothing_forgotten():
    model = learned([0.3, 0.3])
    before = model.survival(4)
    for _ in range(100):
        model.observe(0, 0)
    assert model.survival(4) == before


def test_a_new_session_starts_from_what_its_kind_found_and_a_new_kind_from_what_all_did():
    pool = ProposerPool("draft")
    chat, summaries = Kind.of(0.0, 60), Kind.of(0.0, 900)
    assert len({chat, summaries, Kind.of(1.0, 60)}) == 3 and Kind.of(0.0, 80) == chat
    for seed in range(12):
        for kind, rate in ((chat, 0.8), (summaries, 0.2)):
            session, rng = AcceptanceModel(pool.of_kind(kind)), random.Random(seed)
            for _ in range(60):
                session.observe(1, int(rng.random() < rate))
    assert AcceptanceModel(pool.of_kind(chat)).survival(1)[0] == pytest.approx(0.8, abs=0.08)
    assert AcceptanceModel(pool.of_kind(summaries)).survival(1)[0] == pytest.approx(0.2, abs=0.08)
    new = AcceptanceModel(pool.of_kind(Kind.of(1.0, 5000))).survival(1)[0]
    assert new == pytest.approx(pool.acceptance.survival(1)[0]) == pytest.approx(0.5, abs=0.1)
