"""Where a generation ends: reason, usage, ids, text and log probabilities, exact inside proposals.

The tiny tokenizer has a token a byte, so that a stop string can be put anywhere in the plain text.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tokenizers import Tokenizer

from outrider.client import Completion, collect
from outrider.types import FinishReason
from scripted_workers import Rig, total

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

K = 4
LENGTH = 3 * K + 8
PROMPTS = [f"prompt number {number}" for number in range(6)]


@pytest.fixture(scope="session")
def tokenizer(tiny_models: dict[str, Path]) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_models["target"] / "tokenizer.json"))


class End(NamedTuple):
    """How a generation ought to end."""

    token_ids: tuple[int, ...]
    text: str
    reason: FinishReason


def expected_end(
    tokenizer: Tokenizer,
    plain: Sequence[int],
    max_tokens: int,
    stop_string: str | None = None,
    stop_id: int | None = None,
    eos: int | None = None,
) -> End:
    """Go through the unlimited plain output token by token."""
    for count in range(1, max_tokens + 1):
        ids = tuple(plain[:count])
        text = tokenizer.decode(ids, skip_special_tokens=True)
        if stop_string and stop_string in text:
            start = text.index(stop_string)
            kept = max(n for n in range(count) if len(tokenizer.decode(ids[:n])) <= start)
            return End(ids[:kept], text[:start], FinishReason.STOP_STRING)
        for token_id, reason in ((eos, FinishReason.EOS), (stop_id, FinishReason.STOP_TOKEN)):
            if ids[-1] == token_id:
                return End(ids, text, reason)
    return End(ids, text, FinishReason.MAX_TOKENS)


def check(tokenizer: Tokenizer, done: Completion, expected: End) -> None:
    assert (done.token_ids, done.text, done.finish_reason) == expected
    assert done.usage.completion_tokens == len(done.token_ids)
    assert len(done.logprobs) == len(done.token_ids) == len(done.sources)
    assert [entry.token_id for entry in done.logprobs] == list(done.token_ids)
    whole = tokenizer.decode(done.token_ids, skip_special_tokens=True)
    assert whole == done.text + done.cut_text


async def test_max_tokens_is_exact_for_every_length(stack: Rig, tokenizer: Tokenizer) -> None:
    plain = await stack.complete(PROMPTS[0], max_tokens=3 * 8, num_speculative_tokens=0)
    for k in (0, 1, K, 8):
        seen = []
        for max_tokens in range(1, 3 * k + 1 if k else 4):
            done = await stack.complete(
                PROMPTS[0], max_tokens=max_tokens, num_speculative_tokens=k, logprobs=0
            )
            check(tokenizer, done, expected_end(tokenizer, plain.token_ids, max_tokens))
            assert done.stats.proposed <= max(max_tokens - 2, 0) * max(k, 1)
            seen.append(done)
        assert k < 2 or total(seen).accepted > k
        assert done.usage.prompt_tokens == len(PROMPTS[0])


async def test_stop_strings_anywhere_in_a_proposal(stack: Rig, tokenizer: Tokenizer) -> None:
    kinds = set()
    for prompt in PROMPTS[:3]:
        plain = await stack.complete(prompt, max_tokens=LENGTH, num_speculative_tokens=0)
        chunks = await stack.chunks(prompt, max_tokens=LENGTH, num_speculative_tokens=K)
        assert collect(chunks).token_ids == plain.token_ids
        starts = {chunk.offset for chunk in chunks}  # of rounds
        runs = ascii_runs(tokenizer, plain.token_ids)
        for k in (0, K):
            stopped = await asyncio.gather(
                *(
                    stack.complete(
                        prompt,
                        max_tokens=LENGTH,
                        num_speculative_tokens=k,
                        stop_strings=(string, "never comes"),
                        logprobs=1,
                    )
                    for _, string in runs
                )
            )
            for (_, string), done in zip(runs, stopped, strict=True):
                check(tokenizer, done, expected_end(tokenizer, plain.token_ids, LENGTH, string))
                assert done.finish_reason is FinishReason.STOP_STRING
                assert done.matched_stop == string
        for (start, string), done in zip(runs, stopped, strict=True):
            stop = start + len(string)
            if len(done.token_ids) == start:
                kinds |= {"begins at the start" if start in starts else "begins inside"}
                kinds |= {"ends at the end" if stop in starts else "ends inside"}
                kinds |= {"straddles"} if starts & set(range(start + 1, stop)) else set()
    assert kinds >= {"begins inside", "ends inside", "straddles", "ends at the end"}


async def test_the_earliest_of_stop_string_and_max_tokens_wins(
    stack: Rig, tokenizer: Tokenizer
) -> None:
    """Every max_tokens around a stop string, before, inside and behind it."""
    reasons = set()
    plain = await stack.complete(PROMPTS[1], max_tokens=LENGTH, num_speculative_tokens=0)
    runs = [run for run in ascii_runs(tokenizer, plain.token_ids) if len(run[1]) > 1]
    _, string = runs[len(runs) // 2]
    for max_tokens in range(1, 3 * K + 1):
        done = await stack.complete(
            PROMPTS[1],
            max_tokens=max_tokens,
            num_speculative_tokens=K,
            stop_strings=(string,),
            logprobs=0,
        )
        check(tokenizer, done, expected_end(tokenizer, plain.token_ids, max_tokens, string))
        reasons.add(done.finish_reason)
    assert reasons == {FinishReason.MAX_TOKENS, FinishReason.STOP_STRING}


async def test_stop_ids_at_every_place(stack: Rig, tokenizer: Tokenizer) -> None:
    accepted = 0
    for prompt in PROMPTS[:2]:
        plain = await stack.complete(prompt, max_tokens=LENGTH, num_speculative_tokens=0)
        for max_tokens in range(1, 3 * K + 1):
            stop_id = plain.token_ids[max_tokens * 5 % LENGTH]
            done = await stack.complete(
                prompt,
                max_tokens=max_tokens,
                num_speculative_tokens=K,
                stop_token_ids=(stop_id,),
                logprobs=0,
            )
            expected = expected_end(tokenizer, plain.token_ids, max_tokens, stop_id=stop_id)
            check(tokenizer, done, expected)
            accepted += done.stats.accepted
    assert accepted > 20


async def test_the_end_of_sequence_inside_a_proposal(stack: Rig, tokenizer: Tokenizer) -> None:
    """At a high temperature the model ends soon; draft and target share the noise."""
    [model] = await stack.client.list_models()
    [eos] = model.eos_token_ids
    sampling = {"temperature": 4.0, "num_speculative_tokens": 8, "logprobs": 0, "max_tokens": 60}
    prompts = [f"an end {number}" for number in range(28)]
    free = await stack.complete_all(prompts, seeds=True, ignore_eos=True, **sampling)
    ended = [(n, done) for n, done in enumerate(free) if eos in done.token_ids[1:-1]]
    assert len(ended) >= 4 and sum(done.stats.accepted for _, done in ended) > 40
    assert all(done.finish_reason is FinishReason.MAX_TOKENS for done in free)
    ended.sort(key=lambda item: item[1].token_ids.index(eos))
    for number, plain in ended[:4]:
        place = plain.token_ids.index(eos)
        for max_tokens in (max(place, 1), place + 1, place + 2, 60):
            for k in (0, 8):
                options = {**sampling, "max_tokens": max_tokens, "num_speculative_tokens": k}
                done = await stack.complete(prompts[number], seed=number, **options)
                check(
                    tokenizer, done, expected_end(tokenizer, plain.token_ids, max_tokens, eos=eos)
                )
        assert done.finish_reason is FinishReason.EOS
        assert done.token_ids[-1] == eos and "<|im_end|>" not in done.text


async def test_min_tokens_forbids_an_end_and_hides_earlier_stop_strings(
    stack: Rig, tokenizer: Tokenizer
) -> None:
    plain = await stack.complete(PROMPTS[2], max_tokens=LENGTH, num_speculative_tokens=0)
    start, string = ascii_runs(tokenizer, plain.token_ids)[0]
    for min_tokens in range(LENGTH):
        done = [
            await stack.complete(
                PROMPTS[2],
                max_tokens=LENGTH,
                min_tokens=min_tokens,
                stop_strings=(string,),
                num_speculative_tokens=k,
            )
            for k in (0, K)
        ]
        assert done[0].token_ids == done[1].token_ids
        assert done[0].finish_reason is done[1].finish_reason
        assert len(done[0].token_ids) >= min_tokens
        if min_tokens <= start:
            assert done[0].token_ids == plain.token_ids[:start]


async def test_logprobs_are_the_targets_own(
    stack: Rig, reference: Callable[[Sequence[int]], torch.Tensor]
) -> None:
    """Equal with and without speculation, and to a teacher-forced rescoring of the text."""
    options = {"max_tokens": 40, "seeds": True, "temperature": 1.0, "top_k": 20, "logprobs": 5}
    plain = await stack.complete_all(PROMPTS, num_speculative_tokens=0, **options)
    guessed = await stack.complete_all(PROMPTS, num_speculative_tokens=8, **options)
    assert total(guessed).accepted > 60 and total(guessed).recovered > 10
    for prompt, one, other in zip(PROMPTS, plain, guessed, strict=True):
        prompt_ids = await stack.client.tokenize(prompt)
        assert one.token_ids == other.token_ids
        rescored = reference([*prompt_ids, *one.token_ids])[len(prompt_ids) - 1 : -1]
        for row, a, b in zip(rescored, one.logprobs, other.logprobs, strict=True):
            values, ids = row.topk(5)
            assert a.token_id == b.token_id
            for entry in (a, b):
                assert math.isclose(entry.logprob, float(row[entry.token_id]), abs_tol=2e-4)
                assert [token_id for token_id, _ in entry.top] == ids.tolist()
                for (_, value), right in zip(entry.top, values.tolist(), strict=True):
                    assert math.isclose(value, right, abs_tol=2e-4)


async def test_text_is_streamed_without_broken_characters(stack: Rig, tokenizer: Tokenizer) -> None:
    """Bytes of one character may lie in several rounds; the chunks' texts make the whole text.

    A busy machine puts rounds together in one chunk: there are enough for some to be left."""
    for prompt in PROMPTS:
        chunks = await stack.chunks(prompt, max_tokens=160, num_speculative_tokens=K, logprobs=0)
        done = collect(chunks)
        assert len(chunks) > 5
        text = tokenizer.decode(done.token_ids)
        check(tokenizer, done, End(done.token_ids, text, FinishReason.MAX_TOKENS))
        said, count = "", 0
        for chunk in chunks:
            said, count = said + chunk.text, count + len(chunk.token_ids)
            assert tokenizer.decode(done.token_ids[:count]).startswith(said)


def ascii_runs(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[tuple[int, str]]:
    """Strings of the text that are a run of one-byte characters: (first token, string)."""
    pieces = [tokenizer.decode([token_id]) for token_id in token_ids]
    runs = []
    for start in range(1, len(pieces) - 1):
        for length in (1, 2, 3, 5):
            string = "".join(pieces[start : start + length])
            if start + length < len(pieces) and string.isascii() and len(string) == length:
                runs.append((start, string))
    return runs
