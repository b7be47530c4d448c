"""Answers of a draft that come when their sessions have lost their KV, or have it again."""

import asyncio
import random
from typing import Any

import pytest

from outrider.types import Proposal
from scripted_workers import Ask, Parts, Rig, Say, ScriptedDraft, Truth, total

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.timeout(150)  # It starts a target of its own.
async def test_answers_that_outlast_a_preemption_change_nothing(
    stack: Rig, looping: Rig, parts: Parts
) -> None:
    """Eight sessions share KV for three; answers, some of them wrong, come half a second late,
    when many a session has lost its KV meanwhile, or has got it back."""
    prompts = [[(n * 31 + 7 * i) % 250 for i in range(200 + 9 * n)] for n in range(8)]
    chance = random.Random(11)
    truth = Truth()

    async def script(ask: Ask, say: Say) -> None:
        await asyncio.sleep(chance.choice((0.0, 0.02, 0.1, 0.5)))
        guesses = truth.after(ask)
        if chance.random() < 0.3:
            guesses = [(guess + 1) % 250 for guess in guesses]
        say(ask.reply(Proposal(tuple(guesses), proposer="scripted")))

    options: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    before = await looping.held()
    async with ScriptedDraft(await looping.info(looping.targets[0]), script) as draft:
        async with parts.orchestrator(
            stack.store_url,
            targets=looping.targets,
            drafts=[draft.address],
            kv_overcommit=100,
            draft_timeout_s=0.3,
        ) as rig:
            plain = await truth.learn(rig, prompts, **options)
            guessed = await rig.complete_all(prompts, num_speculative_tokens=4, **options)
    assert [d.token_ids for d in guessed] == [d.token_ids for d in plain]
    stats = total(guessed)
    assert stats.accepted > 20 and stats.recovered > 0 and stats.fallback_rounds > 0, stats
    await looping.returns_to(before)
