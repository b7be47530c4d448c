"""When bringing KV back is chosen over computing it."""

import pytest

from outrider.kv_store.estimate import Estimate, FetchCost, PrefillCost

BLOCK_BYTES, BLOCK_TOKENS = 1 << 20, 32


def estimate(*, mib_per_s=100.0, trip_s=0.001, tokens_per_s=1000.0):
    made = Estimate(PrefillCost(1 / tokens_per_s), BLOCK_BYTES, BLOCK_TOKENS)
    made.measured(FetchCost(trip_s, 1 / (mib_per_s * (1 << 20))))
    return made


def test_nothing_pays_before_the_store_was_measured():
    made = Estimate(PrefillCost(1.0), BLOCK_BYTES, BLOCK_TOKENS)
    assert not made.pays(0, 3200) and made.gain_s(0, 3200) < 0


@pytest.mark.parametrize(("mib_per_s", "pays"), [(100.0, True), (20.0, False)])
def test_the_faster_way_is_taken(mib_per_s, pays):
    # A second of computing is 1000 tokens, so 31 blocks of 1 MiB.
    assert estimate(mib_per_s=mib_per_s).pays(0, 4096) is pays


def test_a_deep_context_costs_more_to_compute_and_the_same_to_fetch():
    made = Estimate(PrefillCost(0.001, 1e-7), BLOCK_BYTES, BLOCK_TOKENS)
    assert made.recompute_s(0, 1000) == pytest.approx(1.0 + 0.05)
    assert made.recompute_s(9000, 10_000) == pytest.approx(1.0 + 0.95)
    made.measured(FetchCost(0.0, 1 / (25 << 20)))
    assert not made.pays(0, 1024) and made.pays(8192, 9216)


def test_those_who_fetch_already_are_waited_for():
    made = estimate()
    assert made.pays(0, 1024)
    assert not made.pays(0, 1024, backlog_bytes=100 << 20)


def test_a_short_piece_is_not_worth_a_trip_that_may_find_nothing():
    made = estimate(trip_s=0.05)
    assert made.pays(0, 4096) and not made.pays(0, 64)
    for _ in range(20):
        made.looked_up(False)
    assert not made.pays(0, 1024) and made.gain_s(0, 1024) > 0
    for _ in range(10):
        made.looked_up(True)
    assert made.pays(0, 1024)


def test_what_really_happens_counts():
    made = estimate()
    for _ in range(20):
        made.restored(6.0, 128 << 20)  # Predicted: 1.3 s.
    assert not made.pays(0, 4096)
    for _ in range(20):
        made.recomputed(30.0, 0, 4096)  # Predicted: 4.1 s.
    assert made.pays(0, 4096)
    made.measured(FetchCost(0.001, 1 / (100 << 20)))
    assert made.restore_s(0, 4096) == pytest.approx(1.281, abs=0.01)


def test_what_was_given_up_makes_it_slower_never_faster():
    made = estimate()
    before = made.restore_s(0, 4096)
    made.late(0.001, 128 << 20)
    assert made.restore_s(0, 4096) == before
    made.late(13.0, 128 << 20)
    assert made.restore_s(0, 4096) > 2 * before


def test_one_outlier_does_not_decide():
    made = estimate()
    made.restored(1e6, 1)
    assert made.restore_s(0, 4096) < 6.5
