"""Sessions through the public API: continued, looked at, taken over, lost KV rebuilt, gone."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from outrider.client import Completion, GenerationOptions, Message
from outrider.errors import AlreadyRunning, FailedPrecondition, NotFound, Unavailable
from outrider.types import FinishReason
from scripted_workers import LINGER_S, Parts, Rig, Stream, until
from store_servers import free_port

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

COUPLED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "seed": 5}
FIRST = "the first turn of a longer talk, which fills a block and more of KV"
SECOND = " and the second"


async def log_of(rig: Rig, done: Completion) -> tuple[int, ...]:
    return (await rig.client.get_session(done.session_id, include_tokens=True)).token_ids


@pytest.mark.parametrize("sampling", [{}, COUPLED], ids=["greedy", "coupled"])
async def test_a_continued_session_says_what_one_request_would(
    stack: Rig, sampling: dict[str, Any]
) -> None:
    """The second turn finds its KV on the target, and equals a single long prompt."""
    before = await stack.held()
    options = {"max_tokens": 24, **sampling}
    first = await stack.complete(FIRST, keep_session=True, **options)
    kept = await stack.held()
    assert kept.blocks_used[0] > before.blocks_used[0]
    # Meta, log, notes, and the index of live sessions if there was none.
    assert kept.keys - before.keys in (3, 4)
    second = await stack.complete(SECOND, session_id=first.session_id, **options)
    first_ids, second_ids = [await stack.client.tokenize(text) for text in (FIRST, SECOND)]
    whole = (*first_ids, *first.token_ids, *second_ids)
    assert second.usage.prompt_tokens == len(whole)
    # The target has what its last round stood on; that round's tokens come anew.
    assert second.usage.cached_prompt_tokens >= len(first_ids) + len(first.token_ids) - 5
    # Others may have left the start of the first prompt, nobody what follows it.
    assert first.usage.cached_prompt_tokens < len(first_ids)
    once = await stack.complete(whole, num_speculative_tokens=0, **options)
    assert second.token_ids == once.token_ids
    assert second.stats.accepted > 0
    # Its last turn was not to be kept: everything is free again.
    await stack.returns_to(before)


async def test_a_turn_that_ends_inside_a_block_leaves_no_kv_of_the_rest(stack: Rig) -> None:
    """A stop id inside an accepted block: what was verified behind it is no part of the log."""
    verified_behind = 0
    for number in range(6):
        prompt = f"{number} {FIRST}"
        prompt_ids = await stack.client.tokenize(prompt)
        plain = await stack.complete(prompt, max_tokens=24, num_speculative_tokens=0)
        for place in (4, 8):
            first = await stack.complete(
                prompt,
                max_tokens=24,
                stop_token_ids=(plain.token_ids[place],),
                num_speculative_tokens=8,
                keep_session=True,
            )
            stats = first.stats
            in_all = stats.accepted + stats.recovered + stats.bonus + stats.plain
            verified_behind += in_all - len(first.token_ids)
            second = await stack.complete(SECOND, session_id=first.session_id, max_tokens=16)
            whole = [*prompt_ids, *first.token_ids, *await stack.client.tokenize(SECOND)]
            once = await stack.complete(whole, max_tokens=16, num_speculative_tokens=0)
            assert second.token_ids == once.token_ids, (number, place)
    assert verified_behind > 4


async def test_noise_belongs_to_places_in_the_log(stack: Rig) -> None:
    """A text cut anywhere and given as a prompt goes on as it did: what takeover stands on."""
    prompt_ids = await stack.client.tokenize(FIRST)
    whole = await stack.complete(FIRST, max_tokens=40, num_speculative_tokens=0, **COUPLED)
    for cut in (1, 7, 20):
        prefix = [*prompt_ids, *whole.token_ids[:cut]]
        rest = await stack.complete(prefix, max_tokens=40 - cut, **COUPLED)
        assert rest.token_ids == whole.token_ids[cut:] and rest.stats.accepted > 0


async def test_a_chat_is_continued_by_its_new_messages(stack: Rig) -> None:
    options = {"max_tokens": 12, "temperature": 1.0, "seed": 1}
    first = await stack.complete([Message("user", "Hi")], keep_session=True, **options)
    first_ids = await stack.client.tokenize([Message("user", "Hi")])
    second = await stack.complete(
        [Message("user", "And?")], session_id=first.session_id, keep_session=True, **options
    )
    log = await log_of(stack, second)
    assert log[: len(first_ids)] == first_ids
    assert log[len(first_ids) :][:12] == first.token_ids
    assert log[-12:] == second.token_ids
    assert second.usage.cached_prompt_tokens > 0
    once = await stack.complete(log[:-12], num_speculative_tokens=0, **options)
    assert once.token_ids == second.token_ids
    # What was added is the end of the assistant's turn, and a whole user turn.
    added = await stack.client.tokenize(
        "<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    )
    between = log[len(first_ids) + 12 : -12]
    assert between == (added[1:] if first.finish_reason is FinishReason.EOS else added)


async def test_get_session_tells_what_was_streamed(stack: Rig) -> None:
    options = {"max_tokens": 10, "num_speculative_tokens": 4, "keep_session": True}
    first = await stack.complete(FIRST, request_id="turn-1", seed=8, **options)
    epoch = (await stack.client.get_session(first.session_id)).epoch
    stop = first.token_ids[3]
    second = await stack.complete(
        SECOND, session_id=first.session_id, request_id="turn-2", stop_token_ids=(stop,), **options
    )
    session = await stack.client.get_session(first.session_id, include_tokens=True)
    assert session.epoch == epoch + 1  # the second turn has an owner of its own
    prompts = [await stack.client.tokenize(text) for text in (FIRST, SECOND)]
    expected = (*prompts[0], *first.token_ids, *prompts[1], *second.token_ids)
    assert session.token_ids == expected and session.length == len(expected)
    assert session.model == "target"
    assert 3500 < session.ttl_seconds <= 3600
    one, two = session.generations
    assert (one.request_id, two.request_id) == ("turn-1", "turn-2")
    assert (one.start, one.prompt_end) == (0, len(prompts[0]))
    assert two.start == one.prompt_end + 10
    assert two.prompt_end == two.start + len(prompts[1])
    assert (one.seed, two.seed) == (8, second.seed)
    assert one.finish_reason is FinishReason.MAX_TOKENS
    assert two.finish_reason is second.finish_reason
    bare = await stack.client.get_session(first.session_id)
    assert bare.token_ids == () and bare.length == session.length


async def test_what_the_client_has_is_in_the_store(stack: Rig) -> None:
    """Every chunk says durable, and at its arrival the store has its tokens."""
    prompt_len = len(await stack.client.tokenize(FIRST))
    options = GenerationOptions(max_tokens=40, stop_strings=("never to be seen",))
    seen = 0
    async for chunk in stack.client.generate(FIRST, options):
        assert chunk.durable and chunk.offset == seen
        seen += len(chunk.token_ids)
        session = await stack.client.get_session(chunk.session_id)
        assert session.length >= prompt_len + seen
    assert seen == 40


async def test_a_session_that_is_not_kept_expires(stack: Rig) -> None:
    done = await stack.complete(FIRST, max_tokens=8)

    async def gone() -> bool:
        try:
            session = await stack.client.get_session(done.session_id)
        except NotFound:
            return True
        assert session.ttl_seconds <= LINGER_S
        return False

    await until(gone, "the session expires", LINGER_S + 5)
    assert not {key for key in await stack.keys() if done.session_id.encode() in key}
    with pytest.raises(NotFound, match="does not exist"):
        await stack.complete(SECOND, session_id=done.session_id)


async def test_a_kept_session_survives_a_client_that_leaves(stack: Rig) -> None:
    """As far as it is durable; its next turn goes on from there."""
    plain = await stack.complete(FIRST, max_tokens=300, ignore_eos=True, num_speculative_tokens=0)
    stream = stack.client.generate(
        FIRST, GenerationOptions(max_tokens=300, ignore_eos=True, keep_session=True)
    )
    seen: list[int] = []
    session_id = ""
    async for chunk in stream:
        seen += chunk.token_ids
        session_id = chunk.session_id
        if len(seen) > 10:
            break
    await stream.aclose()

    async def ended() -> bool:
        try:
            await stack.complete(SECOND, session_id=session_id, keep_session=True, max_tokens=5)
        except AlreadyRunning:
            return False
        return True

    await until(ended, "the session is free for its next turn")
    session = await stack.client.get_session(session_id, include_tokens=True)
    cut, last = session.generations
    said = session.token_ids[cut.prompt_end : last.start]
    assert said == plain.token_ids[: len(said)] and list(said[: len(seen)]) == seen
    assert len(said) < 300
    assert cut.finish_reason is None and last.finish_reason is FinishReason.MAX_TOKENS


async def test_a_session_takes_one_turn_at_a_time(stack: Rig) -> None:
    first = await stack.complete(FIRST, max_tokens=4, keep_session=True)
    stream = stack.client.generate(
        SECOND,
        GenerationOptions(max_tokens=300, ignore_eos=True, session_id=first.session_id),
    )
    await anext(stream)
    with pytest.raises(AlreadyRunning, match="running"):
        await stack.complete(SECOND, session_id=first.session_id, max_tokens=4)
    rest = [chunk async for chunk in stream]
    assert sum(len(chunk.token_ids) for chunk in rest) == 299


async def test_another_orchestrator_continues_a_session(stack: Rig, parts: Parts) -> None:
    first = await stack.complete(FIRST, max_tokens=16, keep_session=True, **COUPLED)
    ids = [*await stack.client.tokenize(FIRST), *first.token_ids]
    ids += await stack.client.tokenize(SECOND)
    once = await stack.complete(ids, max_tokens=32, num_speculative_tokens=0, **COUPLED)
    async with parts.orchestrator(
        stack.store_url, targets=stack.targets, drafts=stack.drafts
    ) as rig:
        options = {"session_id": first.session_id, "max_tokens": 32, **COUPLED}
        epoch = (await stack.client.get_session(first.session_id)).epoch
        second = await rig.complete(SECOND, keep_session=True, **options)
        assert second.token_ids == once.token_ids and second.stats.accepted > 0
        # And back again; the epoch grows with each owner, late words of the last one are fenced.
        third = await stack.complete(SECOND, **options)
        assert (await rig.client.get_session(first.session_id)).epoch == epoch + 2
        assert len(third.token_ids) == 32


async def test_a_session_outlives_its_target(
    stack: Rig, parts: Parts, tiny_models: dict[str, Path]
) -> None:
    """The only target dies: streams end clearly and in time. A new one at its place rebuilds the
    session from the log."""
    before = await stack.held()
    port = free_port()
    whole = [*await stack.client.tokenize(FIRST)]
    async with parts.worker("target", tiny_models["target"], port=port) as (child, address):
        async with parts.orchestrator(
            stack.store_url, targets=[address], drafts=stack.drafts, target_wait_s=0.5
        ) as rig:
            first = await rig.complete(FIRST, max_tokens=24, keep_session=True, **COUPLED)
            whole += [*first.token_ids, *await rig.client.tokenize(SECOND)]
            once = await stack.complete(whole, max_tokens=24, num_speculative_tokens=0, **COUPLED)
            stream = await Stream(rig, "cut off", max_tokens=400, ignore_eos=True).reaches(20)
            os.kill(child.pid, signal.SIGKILL)
            started = time.monotonic()
            error = await stream.error()
            assert isinstance(error, Unavailable) and "target" in error.message
            with pytest.raises(Unavailable, match="target"):
                await rig.complete(FIRST, timeout_s=2)
            assert time.monotonic() - started < 10
            async with parts.worker("target", tiny_models["target"], port=port):
                await asyncio.sleep(0)

                async def back() -> bool:
                    try:
                        await rig.complete("back?", max_tokens=1)
                    except Unavailable:
                        return False
                    return True

                await until(back, "the orchestrator finds the target again")
                second = await rig.complete(
                    SECOND, session_id=first.session_id, max_tokens=24, **COUPLED
                )
                assert second.token_ids == once.token_ids
                assert second.usage.cached_prompt_tokens == 0
                assert second.usage.prompt_tokens == len(whole)
    await stack.returns_to(before)


async def test_a_session_stays_with_its_model(stack: Rig) -> None:
    first = await stack.complete(FIRST, max_tokens=4, keep_session=True)
    with pytest.raises(NotFound):
        await stack.complete(SECOND, session_id=first.session_id, model="another")
    again = await stack.complete(SECOND, session_id=first.session_id, model="target", max_tokens=4)
    assert len(again.token_ids) == 4


async def test_a_tiny_kv_pool_preempts_and_changes_nothing(looping: Rig) -> None:
    """Eight sessions of seven blocks and more each share twenty blocks."""
    info = await looping.info(looping.targets[0])
    assert info.kv_blocks_total == 20
    prompts = [[(n * 31 + 7 * i) % 250 for i in range(200 + 9 * n)] for n in range(8)]
    options = {"max_tokens": 40, "proposer": "ngram", **COUPLED}
    alone = await looping.complete_all(prompts, concurrency=1, num_speculative_tokens=0, **options)
    together = await looping.complete_all(prompts, num_speculative_tokens=8, **options)
    assert [d.token_ids for d in together] == [d.token_ids for d in alone]
    assert sum(done.stats.accepted for done in together) > 0

    async def free() -> bool:
        info = await looping.info(looping.targets[0])
        return info.kv_blocks_free == 20 and info.sessions == 0

    await until(free, "all blocks are free")


async def test_tokenizers_must_be_those_of_the_session(stack: Rig, looping: Rig) -> None:
    """A session of one model is refused by an orchestrator that does not serve it."""
    first = await stack.complete(FIRST, max_tokens=4, keep_session=True)
    with pytest.raises((NotFound, FailedPrecondition), match="target"):
        await looping.complete(SECOND, session_id=first.session_id, max_tokens=4)
    assert len((await stack.client.get_session(first.session_id)).generations) == 1
