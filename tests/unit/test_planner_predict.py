"""Forecasts from runs of accepted guesses, against rounds played out and arithmetic done again."""

import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest

from outrider.errors import InvalidArgument
from outrider.planner.predict import (
    Setting,
    draft_seconds,
    draft_workers,
    forecast,
    round_costs,
    survival,
    walk,
)
from outrider.planner.values import (
    COUPLED,
    NEVER,
    REJECTION,
    Closeness,
    PairCosts,
    Sample,
    Track,
    read_costs,
)
from outrider.speculation.acceptance import expected_tokens
from outrider.speculation.costs import Line
from outrider.speculation.fan_out import FanOut, allocate
from outrider.speculation.length import Mode

COSTS = PairCosts(Line(0.020, 0.0005, 1e-6), Line(0.0002, 0.002, 0.0001), 0.001, 0.002, 0.001)


def track_of(agrees: str, ranks: list[int] | None = None) -> Track:
    """`+` where the draft picks the target's token; elsewhere the token is its second best."""
    found = ranks or [0 if sign == "+" else 1 for sign in agrees]
    others = [max(rank - 1, 0) for rank in found]
    return Track([0.0 if sign == "+" else NEVER for sign in agrees], found, others)


def sample_of(track: Track, mode: str = COUPLED) -> Sample:
    return Sample("1", "text", 1.0, 100, Closeness(len(track.ranks), *(0.5,) * 5), {mode: track})


def signs(rate: float, length: int, seed: int, sticky: float = 0.0) -> str:
    """Agreement that stays as it was with the chance `sticky`."""
    chance, last, found = random.Random(seed), True, []
    for _ in range(length):
        if chance.random() >= sticky:
            last = chance.random() < rate
        found.append("+" if last else "-")
    return "".join(found)


def played(agrees: str, k: int) -> tuple[list[int], list[int], int]:
    """Guesses looked at and accepted by position, and rounds, as a server goes through a text."""
    looked_at, accepted, rounds, place = [0] * k, [0] * k, 0, 1
    while place < len(agrees):
        rounds += 1
        guesses = agrees[place : place + k]
        run = len(guesses) - len(guesses.lstrip("+"))
        for i in range(min(run + 1, len(guesses))):
            looked_at[i] += 1
            accepted[i] += i < run
        place += run + 1
    return looked_at, accepted, rounds


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("sticky", [0.0, 0.8])
def test_rounds_are_those_that_a_server_goes_through(k: int, sticky: float) -> None:
    texts = [signs(0.6, 150, seed, sticky) for seed in range(5)]
    found = walk([track_of(text) for text in texts], k)
    expected = [played(text, k) for text in texts]
    assert found.looked_at == pytest.approx(np.sum([e[0] for e in expected], axis=0))
    assert found.accepted == pytest.approx(np.sum([e[1] for e in expected], axis=0))
    assert found.rounds == pytest.approx(sum(e[2] for e in expected))


def test_a_draft_that_is_the_target_has_every_guess_accepted() -> None:
    sample = sample_of(track_of("+" * 50))
    for length in forecast([sample], COUPLED, Setting(COSTS), k_max=8).lengths:
        assert length.acceptance == (1.0,) * length.k
        assert length.mean_acceptance_length == length.k + 1
        assert length.hit_probability == pytest.approx(1.0)


def test_a_draft_that_is_never_right_leaves_plain_decoding() -> None:
    hopeless = forecast([sample_of(track_of("-" * 50))], COUPLED, Setting(COSTS), k_max=4)
    assert all(length.mean_acceptance_length == 1.0 for length in hopeless.lengths)
    assert hopeless.best(Mode.SEQUENTIAL) is None is hopeless.best(Mode.PIPELINED)


def test_runs_are_not_independent_guesses() -> None:
    """Half of the tokens agree, in runs of eight: a guess behind an accepted one mostly is too."""
    text = ("+" * 8 + "-" * 8) * 40
    [*_, found] = forecast([sample_of(track_of(text))], COUPLED, Setting(COSTS), k_max=4).lengths
    looked_at, accepted, _ = played(text, 4)
    independent = expected_tokens([text.count("+") / len(text)] * 4)
    first, second = found.acceptance[:2]
    assert first == pytest.approx(accepted[0] / looked_at[0]) and first < 0.25
    assert second > 0.9
    assert abs(found.mean_acceptance_length - independent) > 0.15


def test_texts_that_end_early_do_not_look_rejected() -> None:
    texts = [track_of("+" * 4) for _ in range(200)]
    assert walk(texts, 8).acceptance == [1.0] * 8


def brute_force(text: str, setting: Setting, k: int) -> float:
    """Tokens per second of all rounds with k guesses over those of plain decoding."""
    _, accepted, rounds = played(text, k)
    costs, context = setting.costs, setting.context_len
    draft_s = costs.draft.base + k * costs.draft.slope + costs.ask_s
    verify_s = costs.verify.base + (k + 1) * (
        costs.verify.slope + costs.verify.other_slope * context
    )
    plain_s = costs.verify.predict(1, context) + costs.plain_s
    tokens = rounds + sum(accepted)
    return tokens / (rounds * (draft_s + verify_s + costs.round_s)) * plain_s


@pytest.mark.parametrize("rate", [0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("step_s", [0.0005, 0.002, 0.006])
def test_the_best_length_is_that_of_brute_force(rate: float, step_s: float) -> None:
    text = signs(rate, 4000, seed=3, sticky=0.5)
    setting = Setting(PairCosts(COSTS.verify, Line(0.0002, step_s), 0.001, 0.002, 0.001))
    found = forecast([sample_of(track_of(text))], COUPLED, setting, k_max=8)
    speeds = {k: brute_force(text, setting, k) for k in range(1, 9)} | {0: 1.0}
    for length in found.lengths:
        assert length.sequential == pytest.approx(speeds[length.k], rel=0.01)
    best = found.best(Mode.SEQUENTIAL)
    chosen = best.k if best else 0
    assert speeds[chosen] == pytest.approx(max(speeds.values()), rel=0.005)


def chain_rule(pair: tuple[np.ndarray, np.ndarray], text: tuple[int, ...], which: int) -> float:
    """Probability of a text under one of two first-order chains that start from token 0."""
    return float(np.prod([pair[which][a, b] for a, b in itertools.pairwise((0, *text))]))


def test_rejection_is_accepted_as_block_verification_says() -> None:
    """All texts of three tokens, weighed by the target, against Algorithm 2 over all proposals."""
    generator = np.random.default_rng(5)
    target, draft = (generator.dirichlet([0.7] * 3, size=3) for _ in range(2))
    pair, k = (target, draft), 3
    texts = list(itertools.product(range(3), repeat=k))
    found = np.zeros(k + 1)
    for text in texts:
        ratios = [np.log(draft[a, b] / target[a, b]) for a, b in itertools.pairwise((0, *text))]
        track = Track(ratios, [0] * k, [0] * k)
        found += chain_rule(pair, text, 0) * survival(track, k)[0]
    expected = np.zeros(k + 1)
    for guesses in texts:
        states = (0, *guesses)
        scales = [1.0]
        for a, b in itertools.pairwise(states):
            scales.append(min(scales[-1] * target[a, b] / draft[a, b], 1.0))
        limits = []
        for i in range(1, k):
            residual = np.maximum(scales[i] * target[states[i]] - draft[states[i]], 0).sum()
            limits.append(residual / (residual + 1 - scales[i]) if scales[i] < 1 else 1.0)
        limits.append(scales[k])
        for i in range(k + 1):
            at_least = 1.0 - np.prod([1.0 - limit for limit in limits[max(i, 1) - 1 :]])
            expected[i] += chain_rule(pair, guesses, 1) * (at_least if i else 1.0)
    assert found == pytest.approx(expected)
    tokenwise = sum(
        chain_rule(pair, text, 0)
        * np.prod([min(1, draft[a, b] / target[a, b]) for a, b in itertools.pairwise((0, *text))])
        for text in texts
    )
    assert found[k] > tokenwise + 0.005


def test_rejection_goes_on_from_every_place_that_it_may_stop_at() -> None:
    """The expected rounds are those of many rounds drawn by the chances of each place."""
    ratios = np.random.default_rng(1).normal(-0.3, 0.8, size=400).tolist()
    track = Track(ratios, [0] * 400, [0] * 400)
    found, chances = walk([track], 4), survival(track, 4)
    chance, rounds, accepted, repeats = random.Random(2), 0, 0, 300
    for _ in range(repeats):
        place = 1
        while place < 400:
            limit = min(4, 400 - place)
            drawn = chance.random()
            run = sum(drawn < chances[place, i] for i in range(1, limit + 1))
            rounds, accepted, place = rounds + 1, accepted + run, place + run + 1
    assert found.rounds == pytest.approx(rounds / repeats, rel=0.01)
    assert sum(found.accepted) == pytest.approx(accepted / repeats, rel=0.02)


def test_hits_are_those_of_the_outcomes_that_would_be_prepared() -> None:
    chance = random.Random(4)
    ranks = [min(int(chance.expovariate(0.7)), 9) for _ in range(6000)]
    text = "".join("+" if rank == 0 else "-" for rank in ranks)
    found = walk([track_of(text, ranks)], 3)
    with_next = [*found.acceptance, found.next_acceptance]
    fan_out = allocate(with_next, found.ranks(), 8)
    assert len(fan_out.outcomes) == 8
    assert fan_out.hit_probability == pytest.approx(hits(text, ranks, fan_out), abs=0.01)


def hits(text: str, ranks: list[int], fan_out: FanOut) -> float:
    """The share of rounds of three guesses whose outcome is among the prepared ones."""
    place, rounds, found = 1, 0, 0
    while place + 3 < len(text):
        guesses = text[place : place + 3]
        run = 3 - len(guesses.lstrip("+"))
        rank = ranks[place + run] - (run < 3)
        rounds, found = rounds + 1, found + ((run, rank) in fan_out.outcomes)
        place += run + 1
    return found / rounds


def test_pipelining_hides_the_draft_and_pays_for_misses() -> None:
    text = signs(0.7, 3000, seed=1)
    found = forecast([sample_of(track_of(text))], COUPLED, Setting(COSTS), k_max=6)
    for length in found.lengths:
        assert length.fan_out > 0 and length.pipelined > length.sequential
        verify_s = round_costs(Setting(COSTS)).verify_s + length.k * 0.0005
        hidden = length.mean_acceptance_length / verify_s * round_costs(Setting(COSTS)).plain_s
        assert length.pipelined < hidden * 1.01
        assert 0.0 < length.busy <= 1.0


def test_more_sessions_need_more_drafts_until_steps_alone_are_too_long() -> None:
    slow = PairCosts(Line(0.006, 0.00001), Line(0.0001, 0.001, 0.00004), 0.0, 0.0, 0.0)
    needed = []
    for sessions in (1, 4, 16, 32):
        setting = Setting(slow, sessions)
        verify_s = round_costs(setting).verify_s
        workers = draft_workers(setting, 3, verify_s)
        each = -(-sessions // workers)
        assert draft_seconds(setting, 3, each, 8) <= verify_s
        if workers > 1:
            assert draft_seconds(setting, 3, -(-sessions // (workers - 1)), 8) > verify_s
        needed.append(workers)
    assert needed == sorted(needed) and needed[0] == 1 < needed[-1]
    hopeless = Setting(PairCosts(slow.verify, Line(0.0, 0.010)), 8)
    assert draft_workers(hopeless, 4, 0.006) == 1


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"verify": None}, "costs.verify"),
        ({"draft": {"base": 1.0}}, "costs.draft.slope"),
        ({"draft": {"base": 1.0, "slope": "fast"}}, "costs.draft.slope"),
        ({"draft": {"base": -1.0, "slope": 1.0}}, "costs.draft.base"),
        ({"draft": {"base": 0.0, "slope": 0.0}}, "costs.draft"),
        ({"ask_s": float("nan")}, "costs.ask_s"),
        ({"ask_ms": 1.0}, "costs.ask_ms"),
    ],
)
def test_bad_costs_are_named(tmp_path: Path, change: dict[str, object], field: str) -> None:
    good = {"verify": {"base": 0.02, "slope": 0.001}, "draft": {"base": 0.0, "slope": 0.001}}
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(good))
    assert read_costs(path) == PairCosts(Line(0.02, 0.001), Line(0.0, 0.001))
    path.write_text(json.dumps({"costs": good, "modes": {}}))
    assert read_costs(path).verify == Line(0.02, 0.001)
    path.write_text(json.dumps({**good, **change}))
    with pytest.raises(InvalidArgument) as caught:
        read_costs(path)
    assert caught.value.field == field
    path.write_text("no JSON")
    with pytest.raises(InvalidArgument, match="cannot read"):
        read_costs(path)


def test_both_kinds_of_texts_are_kept_apart() -> None:
    agreed, drawn = sample_of(track_of("+" * 20)), sample_of(track_of("-" * 20), REJECTION)
    assert forecast([agreed, drawn], COUPLED, Setting(COSTS), k_max=1).lengths[0].acceptance == (
        1.0,
    )
    assert forecast([agreed, drawn], REJECTION, Setting(COSTS), k_max=1).lengths[0].acceptance == (
        0.0,
    )
