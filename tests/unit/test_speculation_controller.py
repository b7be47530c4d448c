"""The controller of a session: how it moves, what it promises, what trying may cost."""

import itertools
import random
import statistics
from collections.abc import Callable

import pytest

from outrider.errors import InvalidArgument
from outrider.speculation.controller import ALWAYS, AdaptiveController, Limits
from outrider.speculation.costs import CostLine, Line
from outrider.speculation.length import Mode
from outrider.speculation.load import ProposerPool, TargetLoad
from outrider.speculation.observation import Observation
from outrider.types import SpeculationStats

VERIFY, DRAFT = Line(0.019, 0.0006), Line(0.0002, 0.002)


def controller(limits: Limits | None = None, **more) -> AdaptiveController:
    return AdaptiveController(
        TargetLoad(), [ProposerPool("draft")], limits=limits or Limits(), **more
    )


def play(
    policy: AdaptiveController,
    rate: Callable[[int], float],
    rounds: int,
    *,
    verify: Line = VERIFY,
    draft: Line = DRAFT,
    others: Callable[[int], int] = lambda i: 0,
    opening_s: float = 0.0,
    prompt: int = 0,
    noise: float = 0.04,
    seed: int = 0,
) -> tuple[list[int], float, float]:
    """Lengths round by round; tokens of all rounds; their seconds over those of plain decoding."""
    rng = random.Random(seed)
    lengths, tokens, seconds = [], 0, 0.0
    for i in range(rounds):
        k = policy.next_length()
        policy.plain_rounds()
        accepted = 0
        while accepted < k and rng.random() < rate(i):
            accepted += 1
        rows = others(i) + k + 1
        draft_s = draft.predict(k) * rng.gauss(1, noise) if k else 0.0
        if k:
            draft_s, opening_s = draft_s + opening_s, 0.0
        verify_s = verify.predict(rows) * rng.gauss(1, noise)
        if prompt:
            rows, verify_s = rows + prompt, verify_s + 0.001 * prompt
        policy.observe(
            Observation(
                k,
                accepted,
                draft_s,
                verify_s,
                rows,
                round_s=draft_s + verify_s,
                compute_s=verify_s,
                num_asked=k,
                prompt_rows=prompt,
            )
        )
        prompt = 0
        lengths.append(k)
        tokens += accepted + 1
        seconds += (draft_s + verify_s) / verify.predict(others(i) + 1)
    return lengths, tokens, seconds


@pytest.mark.parametrize("seed", range(6))
def test_no_decision_moves_by_more_than_two(seed: int):
    rng = random.Random(seed)
    draft = Line(0.0, rng.uniform(0.0002, 0.008))
    changes = [rng.random() for _ in range(20)]
    loads = [rng.choice([0, 0, 6, 30]) for _ in range(20)]
    lengths, _, _ = play(
        controller(Limits(cap=16)),
        lambda i: changes[i // 40],
        800,
        draft=draft,
        others=lambda i: loads[i // 40],
        seed=seed,
    )
    steps = {abs(b - a) for a, b in zip([0, *lengths], lengths, strict=False)}
    assert max(steps) == 2
    assert max(lengths) > 2


def test_decoding_begins_plainly_and_guesses_soon():
    lengths, _, _ = play(controller(), lambda i: 0.8, 40)
    assert lengths[0] == 0
    assert min(lengths[20:]) >= 3


def test_what_opening_a_session_takes_says_nothing_of_guesses():
    load, pool = TargetLoad(), ProposerPool("draft")
    for _ in range(3):
        policy = AdaptiveController(load, [pool])
        lengths, _, _ = play(policy, lambda i: 0.8, 60, opening_s=0.3)
        policy.close()
        assert min(lengths[30:]) >= 3


def test_a_prompt_says_nothing_of_what_rounds_cost():
    """Its rows are not those of sessions beside this one, its pass is not what passes take."""
    load, pool = TargetLoad(), ProposerPool("draft")
    for _ in range(3):
        policy = AdaptiveController(load, [pool])
        lengths, _, _ = play(policy, lambda i: 0.8, 30, prompt=600)
        policy.close()
        assert lengths.index(2) <= 4 and min(lengths[14:]) >= 3
    assert load.verify.predict(1) == pytest.approx(VERIFY.predict(1), rel=0.05)
    assert policy.decision.inputs["others_tokens_per_s"] == 0.0


def test_a_session_that_moves_goes_by_its_new_target():
    near, far, pool = TargetLoad(), TargetLoad(), ProposerPool("draft")
    beside = AdaptiveController(far, [pool])
    play(beside, lambda i: 0.8, 60, verify=Line(0.010, 0.010))
    policy = AdaptiveController(near, [pool])
    before, _, _ = play(policy, lambda i: 0.8, 60)
    assert before[-1] >= 3 and near.num_sessions == 1
    beside.close()
    policy.moves_to(far)
    assert (near.num_sessions, near.share_guessing, far.num_sessions) == (0, 0.0, 1)
    lengths, _, _ = play(policy, lambda i: 0.8, 40, verify=Line(0.010, 0.010))
    assert policy.decision.inputs["row_s"] == pytest.approx(0.010, rel=0.3)
    assert max(lengths[10:]) <= 2
    policy.close()
    assert far.num_sessions == 0


def test_a_session_that_is_taken_over_starts_from_what_was_counted():
    """Of 200 rounds of 4 guesses: where all but the first rejected one were not looked at."""
    history = SpeculationStats(
        proposed_by_position=(200, 200, 200, 200), accepted_by_position=(180, 162, 146, 131)
    )
    load, pool = TargetLoad(), ProposerPool("draft")
    costly = Line(0.0002, 0.007)
    other = AdaptiveController(load, [pool])
    play(other, lambda i: 0.3, 300, draft=costly)
    other.close()
    believed, lengths = [], []
    for told in (history, SpeculationStats()):
        policy = AdaptiveController(load, [pool])
        policy.recall(told)
        lengths.append(play(policy, lambda i: 0.9, 8, draft=costly)[0])
        believed.append(policy.decision.inputs["acceptance_1"])
        policy.close()
    assert believed[0] > 0.7 > believed[1]
    assert min(lengths[0][1:]) >= 2 > max(lengths[1])


@pytest.mark.parametrize("proposed", [(), (0, 0), (3, 0), (5, 5, 2)])
def test_odd_counts_of_a_former_owner_do_no_harm(proposed: tuple[int, ...]):
    policy = controller()
    accepted = tuple(min(1, count) for count in proposed)
    policy.recall(SpeculationStats(proposed_by_position=proposed, accepted_by_position=accepted))
    lengths, _, _ = play(policy, lambda i: 0.8, 60)
    assert lengths[-1] >= 3


def test_a_pinned_length_is_kept_whatever_it_brings():
    for pinned in (1, 5, 16):
        policy = controller(Limits(pinned=pinned))
        assert play(policy, lambda i: 0.05, 60)[0] == [pinned] * 60
        assert policy.plain_rounds() == 0
        assert policy.decision.num_speculative_tokens == pinned
        assert policy.decision.tokens_per_s < policy.decision.plain_tokens_per_s


def test_off_is_plain_for_as_long_as_it_takes():
    for policy in (
        controller(Limits(pinned=0)),
        controller(Limits(cap=0)),
        AdaptiveController(TargetLoad(), []),
    ):
        assert play(policy, lambda i: 0.99, 100)[0] == [0] * 100
        assert policy.plain_rounds() == ALWAYS


def test_rows_of_ones_own_alternatives_are_nobody_elses():
    """A session that is alone, each of whose guesses has one beside it, thinks itself alone."""
    load, pool = TargetLoad(), ProposerPool("draft")
    policy = AdaptiveController(load, [pool])
    for _ in range(60):
        k = policy.next_length()
        policy.observe(
            Observation(k, k, 0.001, 0.02 + 0.001 * 2 * k, 1 + 2 * k, num_asked=k, num_beside=k)
        )
    assert policy.next_length() > 2
    # With rows of others that were its own a plain round would be thought to have them, too.
    assert policy.decision.inputs["plain_s"] == pytest.approx(0.02, rel=0.03)


def test_a_cap_is_not_exceeded():
    lengths, _, _ = play(controller(Limits(cap=3)), lambda i: 0.97, 200)
    assert max(lengths) == 3 and lengths[-1] == 3
    assert max(play(controller(Limits(cap=1)), lambda i: 0.97, 200)[0]) == 1


@pytest.mark.parametrize("limits", [{"pinned": 17}, {"pinned": -1}, {"cap": 17}])
def test_lengths_that_no_one_serves_are_refused(limits: dict[str, int]):
    with pytest.raises(InvalidArgument):
        Limits(**limits)


@pytest.mark.parametrize("seed", range(4))
def test_plain_rounds_that_were_promised_stay_plain(seed: int):
    """Even where the load goes away meanwhile, and guesses would pay at once."""
    policy, rng, verify = controller(), random.Random(seed), Line(0.015, 0.005)
    promised = most = guessed = 0
    for i in range(3000):
        k = policy.next_length()
        assert not (promised and k), "a promised round carries guesses"
        promised = max(promised - 1, 0)
        told = policy.plain_rounds()
        assert told == 0 or k == 0
        promised, most = max(promised, told), max(most, told)
        accepted = 0
        while accepted < k and rng.random() < 0.7:
            accepted += 1
        rows = 1 + k + (20 if i % 101 > 50 else 0)
        verify_s = verify.predict(rows) * rng.gauss(1, 0.03)
        policy.observe(Observation(k, accepted, 0.002 * k, verify_s, rows, num_asked=k))
        guessed += k > 0
    assert most >= 8 and guessed > 1000


def test_hopeless_text_costs_two_percent_at_most():
    """k = 0 with probes that become rare, whatever the draft costs."""
    for step_s in (0.0005, 0.004, 0.020):
        draft = Line(0.004, step_s)
        lengths, tokens, seconds = play(controller(), lambda i: 0.02, 3000, draft=draft)
        assert seconds / tokens < 1.02 + 8 / 3000
        probes = [i for i, k in enumerate(lengths) if k]
        assert len(probes) > 5
        late = [b - a for a, b in itertools.pairwise(probes) if a > 1000]
        assert statistics.median(late) >= 30


def test_probes_find_text_that_has_become_predictable():
    lengths, _, _ = play(controller(), lambda i: 0.05 if i < 1000 else 0.9, 1200)
    assert sum(lengths[700:1000]) < 40
    assert sum(k > 2 for k in lengths[1100:]) > 90


def test_guessing_ends_soon_after_text_has_become_unpredictable():
    draft = Line(0.001, 0.004)
    lengths, _, _ = play(controller(), lambda i: 0.9 if i < 500 else 0.05, 700, draft=draft)
    assert min(lengths[300:500]) >= 3
    assert sum(k > 0 for k in lengths[530:]) < 30


class Constant(CostLine):
    """The fault: a verification that is thought to cost the same whatever its rows."""

    def observe(self, seconds: float, size: float, other: float = 0.0) -> None:
        super().observe(seconds, 0.0, other)


def test_a_length_does_not_run_away_where_rows_cost():
    """The run-away of length controllers that take the cost of verification for constant."""
    verify, draft, rate = Line(0.016, 0.004), Line(0.0, 0.0004), 0.75

    def worth(k: int) -> float:
        tokens = sum(rate**i for i in range(k + 1))
        return tokens / ((draft.predict(k) if k else 0.0) + verify.predict(k + 1))

    best = max(range(17), key=worth)
    assert best in (2, 3)
    for seed in range(3):
        lengths, _, _ = play(
            controller(Limits(cap=16)),
            lambda i: rate,
            500,
            verify=verify,
            draft=draft,
            seed=seed,
        )
        settled = lengths[100:]
        assert sum(abs(k - best) <= 1 for k in settled) > 0.9 * len(settled)

        faulty = AdaptiveController(
            TargetLoad(Constant()), [ProposerPool("draft")], limits=Limits(cap=16)
        )
        ran, _, _ = play(faulty, lambda i: rate, 500, verify=verify, draft=draft, seed=seed)
        assert sum(ran[100:]) / 400 > best + 4


def test_a_draft_that_fails_is_left_alone():
    policy = controller()
    lengths = []
    for _ in range(600):
        k = policy.next_length()
        lengths.append(k)
        draft_s = 0.050 if k else 0.0
        policy.observe(Observation(0, 0, draft_s, 0.020, 1, num_asked=k))
    assert sum(k > 0 for k in lengths[100:]) < 10


def test_a_proposer_that_mostly_has_nothing_is_no_burden():
    """Lookup in the session's own tokens: free, and mostly empty."""
    policy = AdaptiveController(TargetLoad(), [ProposerPool("ngram")])
    rng, lengths = random.Random(1), []
    for _ in range(500):
        k = policy.next_length()
        lengths.append(k)
        proposed = k if rng.random() < 0.2 else 0
        accepted = proposed and sum(rng.random() < 0.8 for _ in range(1))
        draft_s = 1e-5 if k else 0.0
        verify_s = 0.02 + 0.0005 * proposed
        policy.observe(
            Observation(proposed, accepted, draft_s, verify_s, 1 + proposed, num_asked=k)
        )
    assert sum(k > 0 for k in lengths[100:]) > 300


def test_the_better_proposer_is_found_and_kept():
    for better in ("draft", "ngram"):
        rates = {"draft": 0.5, "ngram": 0.1} | {better: 0.85}
        pools = [ProposerPool("draft"), ProposerPool("ngram")]
        policy, rng, used = AdaptiveController(TargetLoad(), pools), random.Random(2), []
        for _ in range(400):
            k = policy.next_length()
            name = policy.proposer
            accepted = 0
            while accepted < k and rng.random() < rates[name]:
                accepted += 1
            draft_s = 0.001 * k
            verify_s = (0.02 + 0.0005 * k) * rng.gauss(1, 0.03)
            policy.observe(Observation(k, accepted, draft_s, verify_s, 1 + k, num_asked=k))
            used.append(name if k else "")
        assert used[100:].count(better) > 250
        assert policy.decision.proposer == policy.proposer


def test_a_pinned_session_teaches_the_others():
    load, pool = TargetLoad(), ProposerPool("draft")
    pinned = AdaptiveController(load, [pool], limits=Limits(pinned=3))
    play(pinned, lambda i: 0.9, 200)
    pinned.close()
    lengths, _, _ = play(AdaptiveController(load, [pool]), lambda i: 0.9, 12)
    assert lengths[0] > 0 and lengths[-1] >= 6


def test_decisions_are_explained():
    policy = controller()
    play(policy, lambda i: 0.8, 100)
    found = policy.decision
    assert found.num_speculative_tokens > 2 and found.proposer == "draft"
    assert found.tokens_per_s > found.plain_tokens_per_s == pytest.approx(1 / 0.0196, rel=0.1)
    assert found.inputs["acceptance_1"] == pytest.approx(0.8, abs=0.15)
    assert found.inputs["step_s"] == pytest.approx(0.002, rel=0.2)
    assert all(isinstance(number, float) for number in found.inputs.values())


@pytest.mark.parametrize(("survives", "expected"), [(True, 0.95), (False, 0.05), (None, 0.95)])
def test_a_run_ahead_guess_tells_of_the_place_behind_the_others(survives, expected):
    """And of nothing else: the round has its rows and its tokens."""
    pool = ProposerPool("draft")
    policy = AdaptiveController(TargetLoad(), [pool], limits=Limits(pinned=2))
    for _ in range(60):
        policy.next_length()
        seen = Observation(2, 2, 0.0, 0.02, 3, hit=True, num_asked=2, run_ahead=survives)
        policy.observe(seen)
    assert (seen.num_rows, seen.num_tokens) == (3, 3)
    first, second, third = pool.acceptance.survival(3)
    assert min(first, second) > 0.9
    assert third == pytest.approx(expected, abs=0.06)


def test_pipelining_prepares_outcomes_and_learns_of_hits():
    policy, rng = controller(mode=Mode.PIPELINED), random.Random(3)
    prepared, fan_outs = None, []
    for _ in range(300):
        k = policy.next_length()
        fan_out = len(policy.outcomes().outcomes)
        hit = None if prepared is None or not k else rng.random() < prepared.hit_probability
        proposed = 0 if hit is False else k
        accepted = 0
        while accepted < proposed and rng.random() < 0.8:
            accepted += 1
        verify_s = (0.020 + 0.0004 * proposed) * rng.gauss(1, 0.03)
        draft_s = 0.003 * k if hit is None and k else 0.0
        policy.observe(
            Observation(proposed, accepted, draft_s, verify_s, 1 + proposed, hit=hit, num_asked=k)
        )
        prepared = policy.outcomes() if fan_out else None
        fan_outs.append(fan_out)
    assert min(fan_outs[100:]) >= 2
    assert policy.decision.tokens_per_s > 1.8 * policy.decision.plain_tokens_per_s


def test_pipelining_stays_off_where_the_tiers_take_each_others_time():
    """Draft and target on the same cores: a pass takes 70% longer while the draft works."""
    ahead, rates = zip(*(pipelined_on_shared_cores(seed) for seed in range(10)), strict=True)
    assert statistics.mean(ahead) < 0.3
    assert statistics.mean(rates) > 1.2


def pipelined_on_shared_cores(seed: int) -> tuple[float, float]:
    """Share of late rounds that were prepared for; tokens a plain round's time."""
    policy, rng, ahead, seconds, tokens = (
        controller(mode=Mode.PIPELINED),
        random.Random(seed),
        0,
        0.0,
        0,
    )
    prepared = None
    for i in range(400):
        k = policy.next_length()
        outcomes = policy.outcomes()
        hit = None if prepared is None or not k else rng.random() < prepared.hit_probability
        proposed = 0 if hit is False else k
        accepted = 0
        while accepted < proposed and rng.random() < 0.7:
            accepted += 1
        slow = 1.7 if hit is not None else 1.0
        verify_s = (0.020 + 0.0004 * proposed) * slow * rng.gauss(1, 0.03)
        draft_s = 0.004 * k if hit is None and k else 0.0
        policy.observe(
            Observation(proposed, accepted, draft_s, verify_s, 1 + proposed, hit=hit, num_asked=k)
        )
        prepared = outcomes if outcomes.outcomes else None
        if i >= 100:
            ahead += prepared is not None
            seconds += draft_s + verify_s
            tokens += accepted + 1
    return ahead / 300, tokens / seconds * 0.020
