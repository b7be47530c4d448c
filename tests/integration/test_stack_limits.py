"""The context's end, pairs that fit and pairs that do not: never wrong, at most slower."""

import asyncio
from pathlib import Path

import pytest

from outrider.client import collect
from outrider.engine.loading import read_tokenizer
from outrider.errors import InvalidArgument
from outrider.types import FinishReason
from scripted_workers import Ask, Parts, Rig, Say, ScriptedDraft, total

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

CONTEXT = 512
K = 8


def prompt_of(length: int) -> list[int]:
    return [(7 * i * i + 3 * i) % 250 for i in range(length)]


@pytest.mark.parametrize("k", [1, K])
async def test_every_prompt_length_up_to_the_context(stack: Rig, k: int) -> None:
    before = await stack.held()
    proposed = accepted = 0
    for length in range(CONTEXT - k - 2, CONTEXT):
        options = {"max_tokens": 64, "ignore_eos": True, "logprobs": 0}
        plain = await stack.complete(prompt_of(length), num_speculative_tokens=0, **options)
        guessed = await stack.complete(prompt_of(length), num_speculative_tokens=k, **options)
        assert guessed.token_ids == plain.token_ids
        assert len(plain.token_ids) == CONTEXT - length
        for done in (plain, guessed):
            assert done.finish_reason is FinishReason.CONTEXT_FULL
            assert len(done.logprobs) == done.usage.completion_tokens == len(done.token_ids)
            assert done.usage.prompt_tokens == length
        proposed += guessed.stats.proposed
        accepted += guessed.stats.accepted
    assert proposed > 0 and (accepted > 0 or k == 1)
    for length in (CONTEXT, CONTEXT + 1):
        with pytest.raises(InvalidArgument, match=f"{CONTEXT - 1}") as over:
            await stack.complete(prompt_of(length), num_speculative_tokens=k)
        assert over.value.field == "prompt" and str(length) in over.value.message
    await stack.returns_to(before)


async def test_max_tokens_that_fills_the_context_exactly_says_so(stack: Rig) -> None:
    for max_tokens, reason in ((3, FinishReason.MAX_TOKENS), (5, FinishReason.CONTEXT_FULL)):
        done = await stack.complete(prompt_of(CONTEXT - 4), max_tokens=max_tokens, ignore_eos=True)
        assert done.finish_reason is reason
        assert len(done.token_ids) == min(max_tokens, 4)


async def test_a_draft_with_a_shorter_context_speculates_until_it_is_full(
    stack: Rig, parts: Parts, twin_draft: str
) -> None:
    async with parts.orchestrator(
        stack.store_url, targets=stack.targets, drafts=[twin_draft]
    ) as rig:
        short = (await rig.info(twin_draft)).context_length
        assert short < CONTEXT
        for length in range(short - K - 2, short + 3):
            options = {"max_tokens": 24, "ignore_eos": True}
            plain = await rig.complete(prompt_of(length), num_speculative_tokens=0, **options)
            chunks = await rig.chunks(prompt_of(length), num_speculative_tokens=K, **options)
            guessed = collect(chunks)
            assert guessed.token_ids == plain.token_ids and len(plain.token_ids) == 24
            for chunk in chunks:
                # The last guess is drawn from the draft's last position.
                assert chunk.speculation.proposed <= max(short - length - chunk.offset + 1, 0)
            # Its guesses end with its context, are right till then, and nothing fails or waits.
            assert guessed.stats.fallback_rounds > 0
            assert guessed.stats.accepted == guessed.stats.proposed
            assert (guessed.stats.proposed > 0) == (length < short - 1), length


async def test_a_padded_vocabulary_works(stack: Rig, looping: Rig, parts: Parts) -> None:
    """The target's head has more rows than tokenizer and draft."""
    prompts = [f"padded {number}" for number in range(8)]
    async with parts.orchestrator(
        looping.store_url, targets=looping.targets, drafts=stack.drafts
    ) as rig:
        target_info, draft_info = await rig.info(rig.targets[0]), await rig.info(stack.drafts[0])
        assert target_info.vocab_size == 320 > draft_info.vocab_size
        for sampling in ({}, {"temperature": 1.5, "top_k": 40}):
            options = {"max_tokens": 40, "seeds": True, **sampling}
            plain = await rig.complete_all(prompts, num_speculative_tokens=0, **options)
            guessed = await rig.complete_all(prompts, num_speculative_tokens=4, **options)
            assert [d.token_ids for d in guessed] == [d.token_ids for d in plain]
            stats = total(guessed)
            assert stats.proposed > 100 and stats.fallback_rounds == stats.dropped_proposals == 0
        # Ids of the padding are the target's to take; a draft without them costs speed only.
        options = {"max_tokens": 16, "min_tokens": 2, "stop_token_ids": (300, 319)}
        for prompt in ([65, 66], [65, 310, 66]):
            plain_one = await rig.complete(prompt, num_speculative_tokens=0, **options)
            guessed_one = await rig.complete(prompt, num_speculative_tokens=4, **options)
            assert guessed_one.token_ids == plain_one.token_ids
            assert (guessed_one.stats.proposed > 0) == (310 not in prompt)


async def test_a_draft_with_another_tokenizer_is_refused_at_start(
    stack: Rig, parts: Parts, tiny_models: dict[str, Path]
) -> None:
    info = await stack.info(stack.targets[0])
    known = info.tokenizer_fingerprint
    other = info.tokenizer_fingerprint = read_tokenizer(tiny_models["other-tokenizer"]).fingerprint

    async def silent(ask: Ask, say: Say) -> None:
        pass

    async with ScriptedDraft(info, silent) as draft:
        flags = ["--targets", stack.targets[0], "--drafts", draft.address]
        flags += ["--store-url", stack.store_url]
        async with parts.process("orchestrator", *flags, wait=False) as (child, _):
            assert await asyncio.wait_for(child.wait(), 20) == 1
            last = child.log.read_text().splitlines()[-1]
    assert last.startswith("error: ") and "tokenizer" in last
    assert known in last and other in last and known != other
