"""Sessions as their callers see them: listed, shown, exported, counted, removed from every tier."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from outrider.client import GenerationOptions
from outrider.errors import InvalidArgument, NotFound, OutriderError, ResourceExhausted
from outrider.types import Durability, FinishReason, SessionState
from scripted_workers import Parts, Rig, Stream, until
from services.orchestrator.store_index import index_key
from test_resume import callers

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

ENDLESS: dict[str, Any] = {"max_tokens": 450, "ignore_eos": True}


async def index_of(rig: Rig, tenant: str) -> dict[str, float]:
    """Members of a caller's index, by the ms that they expire in; its own life is the longest."""
    async with (
        Redis.from_url(rig.store_url) as redis,
        redis.pipeline(transaction=True) as pipe,
    ):
        pipe.zrange(index_key(tenant), 0, -1, withscores=True)
        pipe.pexpiretime(index_key(tenant))
        pipe.time()
        members, ends_at, (seconds, micros) = await pipe.execute()
    assert ends_at == max((at for _, at in members), default=-2)
    now = seconds * 1000 + micros / 1000
    return {name.decode(): at - now for name, at in members}


async def test_a_deleted_session_leaves_nothing_on_any_tier(stack: Rig, parts: Parts) -> None:
    """A kept one, one that waits to be resumed, and one that runs, by another orchestrator."""
    async with parts.orchestrator(
        stack.store_url, targets=stack.targets, drafts=stack.drafts
    ) as rig:
        await asyncio.sleep(0.2)
        before, keys = await stack.held(), await stack.keys(lasting=True)
        kept = await rig.complete("kept " * 20, max_tokens=30, keep_session=True)
        stream = await Stream(rig, "running " * 20, **ENDLESS).reaches(20)
        running = stream.chunks[0].session_id
        during = await stack.held()
        assert all(d > b for d, b in zip(during.blocks_used, before.blocks_used, strict=True))
        for session_id in (kept.session_id, running):
            await stack.client.delete_session(session_id)
            with pytest.raises(NotFound):
                await stack.client.get_session(session_id)
            with pytest.raises(NotFound):
                await stack.client.delete_session(session_id)
            assert not any(session_id.encode() in key for key in await stack.keys())
        error = await stream.error()
        assert isinstance(error, OutriderError) and "does not exist" in str(error), error
        await stack.returns_to(before)
        assert await stack.keys(lasting=True) <= keys


async def test_live_sessions_are_listed_for_their_caller(
    stack: Rig, parts: Parts, tmp_path: Path
) -> None:
    """In pages, with what they are doing; those that have ended are not live."""
    async with callers(stack, parts, tmp_path) as (alice, bob):
        assert await index_of(alice, "alice") == {}
        kept = [
            await alice.complete(
                f"kept {n}", max_tokens=4 + n, keep_session=True, request_id=f"k{n}"
            )
            for n in range(5)
        ]
        await alice.complete("not kept", max_tokens=3)
        async for _ in bob.generate("of bob's", GenerationOptions(keep_session=True, max_tokens=2)):
            pass
        stream = await Stream(alice, "running", **ENDLESS, request_id="now").reaches(5)
        pages, token = [], ""
        while True:
            page = await alice.client.list_sessions(page_size=4, page_token=token)
            pages.append(page)
            token = page.next_page_token
            if not token:
                break
        assert [len(page.sessions) for page in pages] == [4, 2]
        assert [page.total for page in pages] == [6, 6]
        found = {summary.session_id: summary for page in pages for summary in page.sessions}
        running = stream.chunks[0].session_id
        assert set(found) == {running, *(done.session_id for done in kept)}
        assert found[running].state is SessionState.RUNNING
        assert found[running].request_id == "now"
        for n, done in enumerate(kept):
            summary = found[done.session_id]
            assert summary.state is SessionState.IDLE and summary.request_id == f"k{n}"
            assert summary.length == done.usage.prompt_tokens + 4 + n
            assert summary.num_generations == 1 and summary.model == "target"
            assert 3500 < summary.ttl_seconds <= 3600 and summary.age_seconds < 60
        whole = await alice.client.list_sessions()
        assert len(whole.sessions) == 6 and not whole.next_page_token
        [theirs] = (await bob.list_sessions()).sessions
        assert theirs.session_id not in found

        # Nobody lists what is gone: deleted, evicted, expired.
        for done in kept[:3]:
            await alice.client.delete_session(done.session_id)
        async with Redis.from_url(alice.store_url) as redis:
            await redis.delete(f"outrider:{{{kept[3].session_id}}}:log")
            await redis.zadd(index_key("alice"), {"A" * 22: 1.0})
        await alice.client.delete_session(running)
        left = await alice.client.list_sessions()
        assert [s.session_id for s in left.sessions] == [kept[4].session_id]
        assert set(await index_of(alice, "alice")) == {kept[4].session_id}
        await alice.client.delete_session(kept[4].session_id)
        await bob.delete_session(theirs.session_id)
        assert await index_of(alice, "alice") == await index_of(alice, "bob") == {}

        for options in ({"page_size": 1001}, {"page_token": "nonsense"}):
            with pytest.raises(InvalidArgument, match="page_"):
                await alice.client.list_sessions(**options)
        with pytest.raises(OutriderError):
            await stream.end()


async def test_the_index_keeps_up_with_what_lives(stack: Rig, parts: Parts, tmp_path: Path) -> None:
    """A running session is renewed with its lease, a kept one lives for its time, one whose
    orchestrator died for as long as its keys do."""
    async with callers(stack, parts, tmp_path, lease_s=0.3, session_resume_s=0.3) as (alice, _):
        started = time.monotonic()
        stream = await Stream(alice, "running", **ENDLESS, num_speculative_tokens=0).reaches(5)
        running = stream.chunks[0].session_id
        seen = 0.0
        while stream.num_tokens < 400:
            assert 0 < (await index_of(alice, "alice"))[running] <= 650
            seen = time.monotonic() - started
            await asyncio.sleep(0.05)
        print(f"renewed for {seen:.2f} s")
        await stream.end()

        async def empty() -> bool:
            return await index_of(alice, "alice") == {}

        await until(empty, "what has ended is not live")
        kept = await alice.complete("kept", max_tokens=2, keep_session=True)

        async def is_kept() -> bool:
            return (await index_of(alice, "alice"))[kept.session_id] > 3_500_000

        await until(is_kept, "a kept session lives for its time")
        await alice.client.delete_session(kept.session_id)
        stream = await Stream(alice, "orphaned", **ENDLESS).reaches(5)
        assert alice.process is not None
        alice.process._process.kill()
        await stream.error()

        async def gone() -> bool:
            held = await alice.keys()
            return not any(stream.chunks[0].session_id.encode() in key for key in held)

        await until(gone, "an orphan goes with its lease and the time to resume it", 5)
        assert await index_of(alice, "alice") == {}


async def test_a_caller_has_so_many_live_sessions_and_no_more(
    stack: Rig, parts: Parts, tmp_path: Path
) -> None:
    async with callers(stack, parts, tmp_path, max_sessions_per_caller=3) as (alice, bob):
        kept = [
            await alice.complete(f"kept {n}", max_tokens=2, keep_session=True) for n in range(2)
        ]
        stream = await Stream(alice, "running", **ENDLESS).reaches(5)
        for keep in (False, True):
            with pytest.raises(ResourceExhausted, match=r"3 live sessions; at most 3 .*max_sess"):
                await alice.complete("one more", max_tokens=2, keep_session=keep)
        # Turns of the sessions that there are, other callers, and what is freed meanwhile go on.
        turn = await alice.complete("next", session_id=kept[0].session_id, keep_session=True)
        assert turn.session_id == kept[0].session_id
        async for _ in bob.generate("another", GenerationOptions(max_tokens=2)):
            pass
        await alice.client.delete_session(kept[1].session_id)
        assert len((await alice.complete("one more", max_tokens=2)).token_ids) == 2
        await stream.end()
        # Many at once do not slip by each other.
        results = await asyncio.gather(
            *(alice.complete(f"at once {n}", **ENDLESS) for n in range(6)), return_exceptions=True
        )
        refused = [r for r in results if isinstance(r, ResourceExhausted)]
        assert len(refused) == 4 and sum(isinstance(r, Exception) for r in results) == 4
        await alice.client.delete_session(kept[0].session_id)
        assert await index_of(alice, "alice") == {}


async def test_a_session_is_shown_with_all_that_it_was_asked(stack: Rig) -> None:
    plain = await stack.complete("shown", max_tokens=40, temperature=1.0, seed=4)
    stop = plain.text[20:23]
    first = await stack.complete(
        "shown",
        max_tokens=40,
        min_tokens=2,
        temperature=1.0,
        top_k=0,
        seed=4,
        stop_strings=(stop, "never"),
        logprobs=1,
        keep_session=True,
        durability=Durability.BEST_EFFORT,
    )
    assert first.finish_reason is FinishReason.STOP_STRING
    second = await stack.complete(
        " more", session_id=first.session_id, max_tokens=8, keep_session=True
    )
    session = await stack.client.get_session(
        first.session_id, include_tokens=True, include_text=True
    )
    one, two = session.generations
    assert (one.text, one.matched_stop, one.cut_text) == (first.text, stop, first.cut_text)
    assert two.text == second.text and two.finish_reason is second.finish_reason
    assert one.stop.stop_strings == (stop, "never") and one.stop.min_tokens == 2
    assert one.sampling.temperature == 1.0 and one.sampling.seed == one.seed == 4
    assert one.logprobs == 1 and two.logprobs is None
    assert one.durability is Durability.BEST_EFFORT and two.durability is Durability.REQUIRE
    [model] = await stack.client.list_models()
    assert one.engine_versions["model"] == model.model_fingerprint
    assert session.tokenizer_fingerprint == model.tokenizer_fingerprint
    assert session.state is SessionState.IDLE and session.owner
    bare = await stack.client.get_session(first.session_id)
    assert bare.token_ids == () and bare.generations[0].text == ""
    await stack.client.delete_session(first.session_id)
