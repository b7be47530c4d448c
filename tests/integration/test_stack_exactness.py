"""Speculation changes nothing that is said: design.md's table, column "fp32", with tiny models.

Counts are asserted beside each identity, so that silent plain decoding fails it.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
import pytest_asyncio
import torch
from scipy.stats import chisquare

from outrider.client import Completion, GenerationChunk, collect
from outrider.types import TokenSource, VerificationMode
from sampled import check_three_tokens, likeliest
from scripted_workers import Parts, Rig, total

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

GREEDY = {"temperature": 0.0}
COUPLED = {"temperature": 1.0, "top_p": 0.95}
SUBJECTS = ("the sky", "ducks", "a river", "Zürich", "x = [1, 2, 3]", "日本", "storms", "an end")
PROMPTS = [f"{number}: tell me about {SUBJECTS[number % 8]}" for number in range(12)]


def ids(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [done.token_ids for done in completions]


def rejected_inside(streams: Sequence[Sequence[GenerationChunk]]) -> int:
    """Rounds whose first rejected guess was not their last one."""
    rounds = [chunk.speculation for chunks in streams for chunk in chunks]
    return sum(stats.recovered for stats in rounds if stats.accepted < stats.proposed - 1)


def check_counts(
    name: str, streams: Sequence[Sequence[GenerationChunk]], k: int, *, seldom: bool = False
) -> None:
    """Speculation took place, in all its kinds; `seldom` where few proposals come at all."""
    stats = total(collect(chunks) for chunks in streams)
    inside = rejected_inside(streams)
    print(
        f"{name} k={k}: {stats.rounds} rounds, accepted {stats.accepted} of {stats.proposed}, "
        f"recovered {stats.recovered}, inside a block {inside}, bonus {stats.bonus}, "
        f"plain {stats.plain}"
    )
    least = 5 if seldom else 40
    assert stats.fallback_rounds == stats.dropped_proposals == 0
    if k == 0:
        assert stats.proposed == 0 and stats.plain == stats.rounds
        return
    assert stats.accepted >= least
    assert stats.bonus >= min(least, 5)
    assert stats.recovered >= least / 2
    assert k == 1 or inside >= least / 4
    sources = Counter(source for chunks in streams for c in chunks for source in c.sources)
    assert sources[TokenSource.ACCEPTED] >= least


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
async def test_a_draft_model_changes_no_token(stack: Rig, sampling: dict[str, Any]) -> None:
    options = {"max_tokens": 36, "seeds": True, "proposer": "draft", **sampling}
    plain = await stack.streams(PROMPTS, num_speculative_tokens=0, **options)
    check_counts("draft", plain, 0)
    expected = ids([collect(chunks) for chunks in plain])
    assert len(set(expected)) == len(PROMPTS)
    for k in (1, 4, 8, 16):
        streams = await stack.streams(PROMPTS, num_speculative_tokens=k, **options)
        check_counts("draft", streams, k)
        assert ids([collect(chunks) for chunks in streams]) == expected, f"k={k}"


@pytest.mark.parametrize("fan_out", [1, 8, 40])
@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
async def test_proposals_prepared_ahead_change_no_token(
    stack: Rig, sampling: dict[str, Any], fan_out: int
) -> None:
    options = {"max_tokens": 36, "seeds": True, "proposer": "draft", **sampling}
    plain = await stack.complete_all(PROMPTS, num_speculative_tokens=0, **options)
    for k in (1, 4, 8) if fan_out == 8 else (4,):
        streams = await stack.streams(PROMPTS, num_speculative_tokens=k, fan_out=fan_out, **options)
        check_counts("draft", streams, k)
        done = [collect(chunks) for chunks in streams]
        stats = total(done)
        print(f"fan-out {fan_out}: {stats.buffer_hits} hits, {stats.buffer_misses} misses")
        assert stats.buffer_hits >= 12 and stats.buffer_misses >= (12 if fan_out == 1 else 1)
        assert ids(done) == ids(plain), f"k={k}"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def relayed(stack: Rig, parts: Parts) -> AsyncIterator[Rig]:
    """The shared workers behind an orchestrator that asks the draft by itself."""
    async with parts.orchestrator(
        stack.store_url, targets=stack.targets, drafts=stack.drafts, drafting="relayed"
    ) as rig:
        yield rig


@pytest.mark.parametrize(("fan_out", "k"), [(1, 4), (8, 1), (8, 4), (40, 8)])
@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
async def test_outcomes_selected_at_the_orchestrator_change_no_token(
    relayed: Rig, sampling: dict[str, Any], fan_out: int, k: int
) -> None:
    options = {"max_tokens": 36, "seeds": True, "proposer": "draft", **sampling}
    plain = await relayed.complete_all(PROMPTS, num_speculative_tokens=0, **options)
    before = await relayed.held()
    streams = await relayed.streams(PROMPTS, num_speculative_tokens=k, fan_out=fan_out, **options)
    check_counts("draft", streams, k)
    done = [collect(chunks) for chunks in streams]
    stats = total(done)
    print(f"fan-out {fan_out}: {stats.buffer_hits} hits, {stats.buffer_misses} misses")
    assert stats.buffer_hits >= 12 and stats.buffer_misses >= (12 if fan_out == 1 else 1)
    assert ids(done) == ids(plain)
    await relayed.returns_to(before)


async def test_outcomes_selected_at_the_orchestrator_bring_their_distributions(
    relayed: Rig, reference: Callable[[Sequence[int]], torch.Tensor]
) -> None:
    """The third token too, which may come of a proposal that was prepared ahead."""
    options = {"temperature": 1.0, "top_k": 3, "max_tokens": 5, "num_speculative_tokens": 1}
    runs = await relayed.complete_all(
        [PROMPTS[2]] * 256, seeds=True, mode=VerificationMode.REJECTION, fan_out=4, **options
    )
    stats = total(runs)
    print(f"rejection: accepted {stats.accepted} of {stats.proposed}, {stats.buffer_hits} hits")
    assert 0 < stats.accepted < stats.proposed and stats.recovered > 20 and stats.bonus > 20
    assert stats.buffer_hits > 100 and stats.buffer_misses > 5
    assert stats.fallback_rounds == stats.dropped_proposals == 0
    prompt_ids = await relayed.client.tokenize(PROMPTS[2])
    check_three_tokens(runs, reference, prompt_ids, top_k=3)


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
async def test_alternatives_change_no_token_and_make_rounds_longer(
    stack: Rig, sampling: dict[str, Any]
) -> None:
    """With one guess a round its alternatives are all that can make up for it."""
    options = {"max_tokens": 36, "seeds": True, "proposer": "draft", "fan_out": 0, **sampling}
    plain = await stack.complete_all(PROMPTS, num_speculative_tokens=0, **options)
    for k in (1, 4):
        lengths = []
        for alternatives in (0, 1, 3):
            done = await stack.complete_all(
                PROMPTS, num_speculative_tokens=k, alternatives=alternatives, **options
            )
            stats = total(done)
            assert ids(done) == ids(plain), f"k={k}, {alternatives} alternatives"
            assert stats.fallback_rounds == stats.dropped_proposals == 0
            assert 40 < stats.accepted < stats.proposed
            lengths.append(stats.mean_acceptance_length or 0)
        print(f"k={k}: mean acceptance lengths {lengths}")
        assert lengths[0] + 0.05 < lengths[1] < lengths[2]


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
async def test_ngram_lookup_changes_no_token(looping: Rig, sampling: dict[str, Any]) -> None:
    options = {"max_tokens": 64, "seeds": True, "proposer": "ngram", **sampling}
    plain = await looping.streams(PROMPTS, num_speculative_tokens=0, **options)
    expected = ids([collect(chunks) for chunks in plain])
    assert len(set(expected)) == len(PROMPTS)
    for k in (1, 4, 16):
        streams = await looping.streams(PROMPTS, num_speculative_tokens=k, **options)
        check_counts("ngram", streams, k, seldom=True)
        assert ids([collect(chunks) for chunks in streams]) == expected, f"k={k}"


async def test_a_repetitive_prompt_is_continued_alike(stack: Rig, looping: Rig) -> None:
    for rig, is_looping in ((stack, False), (looping, True)):
        plain = await rig.complete("serving" * 48, max_tokens=64, num_speculative_tokens=0)
        guessed = await rig.complete(
            "serving" * 48, max_tokens=64, num_speculative_tokens=8, proposer="ngram"
        )
        assert guessed.token_ids == plain.token_ids
        assert guessed.stats.proposed > 0 or not is_looping


PARAMETERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.5},
    "min_p": {"min_p": 0.3},
    "seed": {"seed": 12},
    "min_tokens": {"min_tokens": 20},
}


@pytest.mark.parametrize("name", PARAMETERS)
async def test_each_sampling_parameter_counts_and_speculation_keeps_it(
    stack: Rig, name: str
) -> None:
    base = {"temperature": 1.0, "seed": 11, "max_tokens": 32}
    free = await stack.complete_all(PROMPTS[:6], num_speculative_tokens=0, **base)
    # A token that comes early in every text would end it, if min_tokens did not forbid it.
    base["stop_token_ids"] = tuple({done.token_ids[4] for done in free}) * (name == "min_tokens")
    without = await stack.complete_all(PROMPTS[:6], num_speculative_tokens=0, **base)
    options = {**base, **PARAMETERS[name]}
    plain = await stack.complete_all(PROMPTS[:6], num_speculative_tokens=0, **options)
    guessed = await stack.complete_all(PROMPTS[:6], num_speculative_tokens=8, **options)
    assert ids(guessed) == ids(plain)
    assert total(guessed).accepted > 20 and total(guessed).recovered > 5
    differ = sum(a != b for a, b in zip(ids(plain), ids(without), strict=True))
    assert differ >= 5, f"{name} changed {differ} of 6 texts"
    if name == "min_tokens":
        assert all(len(done.token_ids) >= 20 for done in plain)
        assert all(len(done.token_ids) <= 5 for done in without)


async def test_greedy_is_what_no_temperature_means(stack: Rig) -> None:
    [unset, zero] = [await stack.complete(PROMPTS[0], max_tokens=16, **o) for o in ({}, GREEDY)]
    assert unset.token_ids == zero.token_ids
    warm = await stack.complete(PROMPTS[0], max_tokens=16, temperature=1.0, seed=0)
    assert warm.token_ids != zero.token_ids


@pytest.mark.parametrize("mode", list(VerificationMode))
async def test_a_seed_gives_the_same_alone_and_beside_neighbours(
    stack: Rig, mode: VerificationMode
) -> None:
    """In `rejection` too: the proposals are the same, so the tokens are."""
    options = {"max_tokens": 32, "temperature": 1.0, "mode": mode, "num_speculative_tokens": 4}
    alone = await stack.complete(PROMPTS[0], seed=99, **options)
    together = await stack.complete_all([PROMPTS[0]] * 9, concurrency=9, seeds=True, **options)
    again = await stack.complete_all([PROMPTS[0]] * 9, concurrency=9, seed=99, **options)
    assert ids(again) == [alone.token_ids] * 9
    assert len({*ids(together), alone.token_ids}) == 10, "a seed was ignored"


async def test_the_seed_drawn_by_the_server_replays(stack: Rig) -> None:
    drawn = await stack.complete(PROMPTS[1], max_tokens=24, temperature=1.0)
    other = await stack.complete(PROMPTS[1], max_tokens=24, temperature=1.0)
    again = await stack.complete(
        PROMPTS[1], max_tokens=24, temperature=1.0, seed=drawn.seed, num_speculative_tokens=0
    )
    assert again.token_ids == drawn.token_ids != other.token_ids


async def test_a_draft_like_the_target_is_always_right(
    stack: Rig, parts: Parts, twin_draft: str
) -> None:
    tokens = 0
    async with parts.orchestrator(
        stack.store_url, targets=stack.targets, drafts=[twin_draft]
    ) as rig:
        for k in range(1, 9):
            for sampling in (GREEDY, COUPLED):
                done = await rig.complete_all(
                    PROMPTS[:8], max_tokens=18, seeds=True, num_speculative_tokens=k, **sampling
                )
                stats = total(done)
                tokens += sum(len(d.token_ids) for d in done)
                assert stats.accepted == stats.proposed > 0, (k, sampling, stats)
                assert stats.recovered == 0 and stats.bonus > 0
    print(f"{tokens} tokens, every guess accepted")
    assert tokens >= 2000


async def test_rejection_keeps_the_distribution_and_uses_the_drafts(
    stack: Rig, reference: Callable[[Sequence[int]], torch.Tensor]
) -> None:
    """The first two tokens against the model's own probabilities; the maths has tests of its own.

    The first one comes of a plain pass, the second one of a verification.
    """
    prompt = list(PROMPTS[2].encode())
    options = {"temperature": 1.0, "top_k": 3, "max_tokens": 6, "num_speculative_tokens": 4}
    prompt_ids = await stack.client.tokenize(PROMPTS[2])
    assert len(prompt_ids) == len(prompt)
    runs = await stack.complete_all(
        [PROMPTS[2]] * 256, seeds=True, mode=VerificationMode.REJECTION, **options
    )
    stats = total(runs)
    print(f"rejection: accepted {stats.accepted} of {stats.proposed}, bonus {stats.bonus}")
    assert 0 < stats.accepted < stats.proposed and stats.bonus > 0 and stats.recovered > 0
    assert stats.fallback_rounds == stats.dropped_proposals == 0
    expected: dict[tuple[int, ...], float] = {}
    for first, p in likeliest(reference(prompt_ids)[-1], 3):
        for second, q in likeliest(reference([*prompt_ids, first])[-1], 3):
            expected[first, second] = p * q * len(runs)
    seen = Counter(done.token_ids[:2] for done in runs)
    assert set(seen) <= set(expected)
    often = [pair for pair, count in expected.items() if count >= 5]
    rest = len(runs) - sum(expected[pair] for pair in often)
    observed = [seen[pair] for pair in often]
    wanted = [expected[pair] for pair in often]
    if rest >= 1:
        observed.append(len(runs) - sum(observed))
        wanted.append(rest)
    assert len(observed) >= 4
    assert chisquare(observed, wanted).pvalue > 1e-4, (seen, expected)
