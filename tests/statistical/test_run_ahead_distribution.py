"""A run-ahead guess that is there before the verdict takes the bonus's place, and the emitted text
still has the target's joint distribution.

As in `test_joint_distribution`: 4 tokens over at least 2 rounds, drafts cut to 4 tokens of 16, k
changing between rounds and sometimes 0. Arrivals are random, and no value has a part in them.
"""

import pytest
from run_ahead import Wrong, build_blind, simulate_ahead
from simulation import Models, joint_p_value

pytestmark = pytest.mark.slow

SAMPLES = 24_000
LENGTHS = (3, 8, 1, 0, 2, 7, 0, 5)
PASS, FAIL = 1e-4, 1e-6

# Of all sessions, at least this share saw a run-ahead guess accepted.
CAUGHT = {"near": 0.4, "flat": 0.4, "sure": 0.2, "opposite": 0.02}


@pytest.mark.parametrize("kind", list(CAUGHT))
def test_joint_distribution_is_the_targets(kind):
    models = Models.build(kind)
    run = simulate_ahead(models, SAMPLES, LENGTHS)
    assert joint_p_value(run, models.target) > PASS
    counts = run.counts
    assert counts["rounds"] > 2 * SAMPLES
    assert counts["caught"] > CAUGHT[kind] * SAMPLES
    # Rejected behind an accepted block, and behind the last guess rejected too.
    assert counts["failed"] > 0.2 * SAMPLES and counts["before"] > 0.1 * SAMPLES
    # Late ones, and those that made a round of a plain one.
    assert counts["bonus"] > 0.2 * SAMPLES and counts["plain"] > 0.2 * SAMPLES


@pytest.mark.parametrize(
    ("ks", "arrivals"), [((0,), 0.5), ((0,), 1.0), ((1,), 1.0), ((4, 2), 1.0), ((4, 2), 0.0)]
)
def test_joint_distribution_with_few_lengths(ks, arrivals):
    models = build_blind() if ks == (1,) else Models.build("near")
    run = simulate_ahead(models, SAMPLES, ks, arrivals=arrivals)
    assert joint_p_value(run, models.target) > PASS
    assert (run.counts["caught"] > 0.4 * SAMPLES) is (arrivals > 0)
    assert (run.counts["bonus"] > 0.4 * SAMPLES) is (arrivals < 1)


@pytest.mark.parametrize(
    "wrong",
    [Wrong(likely_alone=True), Wrong(equal_alone=True)],
    ids=["where the target likes it", "where it is the bonus"],
)
def test_negative_control_used_by_value_fails(wrong):
    models = Models.build("near")
    run = simulate_ahead(models, SAMPLES, (1,), wrong, arrivals=1.0)
    assert joint_p_value(run, models.target) < FAIL
    assert run.counts["caught"] > 0.1 * SAMPLES and run.counts["bonus"] > 0.1 * SAMPLES


def test_negative_control_noise_of_a_round_that_starts_there_fails():
    """It was looked at; where the guess before is rejected a round does start there."""
    models = build_blind()
    wrong = Wrong(noise_of_its_own_round=True)
    run = simulate_ahead(models, SAMPLES, (1,), wrong, arrivals=1.0)
    assert run.counts["before"] > SAMPLES
    assert joint_p_value(run, models.target) < FAIL


@pytest.mark.parametrize(
    "wrong",
    [Wrong(bonus_for_recovered=True), Wrong(bonus_besides=True)],
    ids=["for a rejected one", "behind an accepted one"],
)
def test_negative_control_a_bonus_all_the_same_fails(wrong):
    models = Models.build("near")
    run = simulate_ahead(models, SAMPLES, LENGTHS, wrong)
    assert joint_p_value(run, models.target) < FAIL
