"""The emitted text has the target's joint distribution, whatever is proposed.

At least 4 tokens over at least 2 rounds, vocabulary 16, drafts cut to 4 tokens with target mass
outside, k changing between rounds. First-token tests pass with real faults in place, so each
fault that is known has a negative control here that must fail.
"""

import pytest
import torch
from simulation import (
    Faults,
    Models,
    Run,
    block_bound,
    joint_p_value,
    ratios,
    simulate,
    target_rows,
    words,
)

from outrider.sampling import Stream, block, coupled_picks, uniforms
from outrider.sampling.noise import NoiseKeys

SAMPLES = 24_000
ALL_LENGTHS = (3, 8, 1, 6, 2, 7, 4, 5)
PASS, FAIL = 1e-4, 1e-6


# Of all sessions, at least this share saw a bonus, and a rejection inside a block.
SEEN = {"near": 0.1, "flat": 0.02, "far": 0.02, "sure": 0.1, "opposite": 0.0005}


def check_counts(run: Run, kind: str) -> None:
    """It speculated: guesses were accepted, rejected inside a block, and bonuses drawn."""
    counts, sessions = run.counts, len(run.tokens)
    assert counts["bonus"] + counts["recovered"] == counts["rounds"] > 1.5 * sessions
    assert counts["bonus"] > SEEN[kind] * sessions
    assert counts["inside"] > SEEN[kind] * sessions
    assert counts["recovered"] > 0.5 * sessions
    assert SEEN[kind] * sessions < counts["accepted"] < 0.6 * counts["proposed"]


@pytest.mark.parametrize("mode", ["coupled", "rejection", "point_mass"])
@pytest.mark.parametrize("kind", list(SEEN))
def test_joint_distribution_is_the_targets(mode, kind):
    models = Models.build(kind)
    run = simulate(models, mode, SAMPLES, ALL_LENGTHS)
    assert joint_p_value(run, models.target) > PASS
    check_counts(run, kind)


@pytest.mark.parametrize("mode", ["coupled", "rejection"])
@pytest.mark.parametrize("ks", [(1,), (8,), (2, 5)])
def test_joint_distribution_with_few_lengths(mode, ks):
    models = Models.build("near")
    run = simulate(models, mode, SAMPLES, ks)
    assert joint_p_value(run, models.target) > PASS
    assert run.counts["accepted"] > 0.1 * run.counts["proposed"]


@pytest.mark.parametrize(
    "faults",
    [Faults(wrong_report=True), Faults(position_alone=True), Faults(drop_by_value=True)],
    ids=["wrong draft distribution", "noise of a looked-at block again", "dropped by value"],
)
def test_negative_control_fails(faults):
    models = Models.build("near")
    run = simulate(models, "rejection", SAMPLES, ALL_LENGTHS, faults)
    assert joint_p_value(run, models.target) < FAIL


def test_negative_control_residual_noise_of_the_draft_fails(monkeypatch):
    honest = block.exponentials

    def shared(stream, keys, count, first=0, device="cpu"):
        assert stream is Stream.RESIDUAL
        return honest(Stream.DRAFT, keys, count, first, device)

    monkeypatch.setattr(block, "exponentials", shared)
    models = Models.build("flat")
    run = simulate(models, "rejection", SAMPLES, ALL_LENGTHS)
    assert joint_p_value(run, models.target) < FAIL


def test_coupled_output_does_not_depend_on_the_draft_or_k():
    runs = [
        simulate(Models.build(kind), "coupled", 2000, ks)
        for kind, ks in [("near", (8,)), ("far", (3, 1)), ("opposite", ALL_LENGTHS)]
    ]
    assert torch.equal(runs[0].tokens, runs[1].tokens)
    assert torch.equal(runs[0].tokens, runs[2].tokens)
    assert runs[0].counts["accepted"] > 2000


def test_coupled_draft_that_equals_the_target_is_always_accepted():
    models = Models.build("near")
    run = simulate(Models(models.target, models.target), "coupled", 5000, ALL_LENGTHS)
    assert run.counts["recovered"] == 0
    assert run.counts["accepted"] == run.counts["proposed"] > 5000


@pytest.mark.parametrize("kind", list(SEEN))
def test_block_verification_accepts_what_the_theorem_says_and_more_than_token_wise(kind):
    models = Models.build(kind)
    run = simulate(models, "rejection", SAMPLES, ALL_LENGTHS)
    rounds = run.counts["rounds"]
    # At most k per round, so a standard error below 8 / sqrt(rounds); in fact below 2.
    assert abs(run.counts["accepted"] - run.expected_accepted) < 5 * 2 * rounds**0.5

    logs, chains = run.first_round
    base = torch.full((SAMPLES,), 2)
    width = chains.guess_ids.shape[1]
    ratio = ratios(target_rows(models, logs, base, width), chains)
    keys = [
        NoiseKeys.per_round(chains.seeds, words(base + step), chains.round_starts)
        for step in range(width)
    ]
    noise = torch.cat([uniforms(Stream.ACCEPT, key, 1) for key in keys], dim=1)
    token_wise = (noise <= ratio).long().cumprod(1).sum(1)
    assert run.first_accepted.sum() >= token_wise.sum()
    # The exact expectations given the same guesses, without sampling noise.
    token_bound = ratio.clamp(max=1).cumprod(1).sum()
    exact = block_bound(target_rows(models, logs, base, width), chains).sum()
    assert exact >= token_bound
    if kind == "near":
        assert exact > 1.02 * token_bound


@pytest.mark.parametrize("kind", ["near", "far", "opposite"])
def test_coupled_acceptance_is_what_the_race_gives(kind):
    """P(equal picks) = sum_x 1 / sum_y max(t(y)/t(x), d(y)/d(x)) >= (1 - TV) / (1 + TV)."""
    models = Models.build(kind)
    samples = 24_000
    for context in (0, 17, 100):
        target, draft = (m[context].double().exp() for m in (models.target, models.draft))
        pairs = torch.maximum(target[None] / target[:, None], draft[None] / draft[:, None])
        exact = float((1 / pairs.sum(1)).sum())
        overlap = float(torch.minimum(target, draft).sum())
        sessions = words(torch.arange(samples))
        positions = words(torch.full((samples,), 9))
        picks = [
            coupled_picks(m[context].expand(samples, -1), sessions, positions)
            for m in (models.target, models.draft)
        ]
        found = float((picks[0] == picks[1]).double().mean())
        assert abs(found - exact) < 5 * (0.25 / samples) ** 0.5
        assert overlap / (2 - overlap) <= exact <= overlap
