"""Processes that die, hang or stop: other parts go on, and what cannot go on ends clearly."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from outrider.errors import OutriderError, Unavailable
from outrider.types import Proposal
from scripted_workers import Ask, Parts, Rig, Say, ScriptedDraft, Stream, Truth, total, until
from store_servers import Server, free_port, running_server

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

LONG: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True, "seed": 3}
PROMPTS = [f"interrupted {number}" for number in range(3)]
COUPLED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95}


async def test_a_draft_that_hangs_and_is_killed_later_changes_nothing(
    stack: Rig, parts: Parts, tiny_models: dict[str, Path]
) -> None:
    options = {**LONG, **COUPLED}
    plain = await stack.complete_all(PROMPTS, num_speculative_tokens=0, **options)
    async with (
        parts.worker("draft", tiny_models["draft"]) as (child, draft),
        parts.orchestrator(
            stack.store_url, targets=stack.targets, drafts=[draft], draft_timeout_s=0.3
        ) as rig,
    ):
        # SIGSTOP: the connection stays, nothing answers. SIGCONT: the draft is used again.
        stream = await Stream(rig, PROMPTS[0], **options).reaches(20)
        os.kill(child.pid, signal.SIGSTOP)
        hung = await stream.end()
        os.kill(child.pid, signal.SIGCONT)
        assert hung.token_ids == plain[0].token_ids
        assert hung.stats.fallback_rounds > 0 and hung.stats.accepted > 0

        streams = [Stream(rig, prompt, **options) for prompt in PROMPTS]
        for stream in streams:
            await stream.reaches(20)
        os.kill(child.pid, signal.SIGKILL)
        done = [await stream.end() for stream in streams]
        assert [d.token_ids for d in done] == [d.token_ids for d in plain]
        assert all(d.stats.accepted > 0 and d.stats.fallback_rounds > 0 for d in done)
        # The next request goes without; the model says so.
        [model] = await rig.client.list_models()
        assert model.proposers == ("ngram",)
        later = await rig.complete(PROMPTS[0], **options)
        assert later.token_ids == plain[0].token_ids and later.stats.proposed == 0


@pytest.mark.parametrize("drafts", [0, 1], ids=["no draft", "a dead address"])
async def test_without_a_draft_at_start_there_is_plain_decoding(
    stack: Rig, parts: Parts, drafts: int
) -> None:
    addresses = [f"127.0.0.1:{free_port()}"] * drafts
    plain = await stack.complete_all(PROMPTS, max_tokens=40, num_speculative_tokens=0, **COUPLED)
    started = time.monotonic()
    async with parts.orchestrator(
        stack.store_url, targets=stack.targets, drafts=addresses, draft_start_timeout_s=0.5
    ) as rig:
        assert time.monotonic() - started < 15
        rig.drafts = ()
        [model] = await rig.client.list_models()
        assert model.proposers == ("ngram",)
        seeds = [d.seed for d in plain]
        for prompt, seed, before in zip(PROMPTS, seeds, plain, strict=True):
            done = await rig.complete(
                prompt, max_tokens=40, num_speculative_tokens=8, seed=seed, **COUPLED
            )
            assert done.token_ids == before.token_ids
            assert done.stats.proposed == 0 and done.stats.rounds == 40
            looked_up = await rig.complete(prompt, max_tokens=40, proposer="ngram", seed=seed)
            assert len(looked_up.token_ids) == 40


async def test_a_draft_that_comes_later_is_taken_up(stack: Rig, parts: Parts) -> None:
    truth = Truth()

    async def right(ask: Ask, say: Say) -> None:
        say(ask.reply(Proposal(tuple(truth.after(ask)))))

    draft = ScriptedDraft(await stack.info(stack.targets[0]), right)
    draft.address = f"127.0.0.1:{free_port()}"
    async with parts.orchestrator(
        stack.store_url, targets=stack.targets, drafts=[draft.address], draft_start_timeout_s=0.2
    ) as rig:
        await truth.learn(rig, PROMPTS, max_tokens=40)
        before = await rig.complete(PROMPTS[1], max_tokens=40)
        assert before.stats.proposed == 0
        async with draft:

            async def known() -> bool:
                return "draft" in (await rig.client.list_models())[0].proposers

            await until(known, "the draft is found")
            after = await rig.complete(PROMPTS[1], max_tokens=40)
        assert after.token_ids == before.token_ids
        assert after.stats.accepted == after.stats.proposed > 0


async def test_a_target_that_drains_and_is_killed_then_is_replaced_by_another(
    stack: Rig, parts: Parts, tiny_models: dict[str, Path]
) -> None:
    """While it drains, new sessions go elsewhere; when it is gone, the stream goes on at the
    other target, no token lost, doubled or altered."""
    options = {**LONG, **COUPLED, "max_tokens": 480, "logprobs": 2}
    expected = await stack.complete(PROMPTS[2], num_speculative_tokens=0, **options)
    async with parts.worker("target", tiny_models["target"], drain_s=60) as (child, spare):
        # The first one of equally idle targets gets the session.
        async with parts.orchestrator(
            stack.store_url, targets=[spare, *stack.targets], drafts=stack.drafts
        ) as rig:
            stream = await Stream(rig, PROMPTS[2], **options).reaches(10)
            assert (await rig.info(spare)).sessions == 1
            os.kill(child.pid, signal.SIGTERM)
            others = await rig.complete_all(PROMPTS, max_tokens=4, timeout_s=10)
            assert all(len(other.token_ids) == 4 for other in others)
            await stream.reaches(60)
            os.kill(child.pid, signal.SIGKILL)
            done = await stream.end()
            assert done.token_ids == expected.token_ids and done.text == expected.text
            assert len(done.logprobs) == 480 and done.stats.accepted > 50
            for one, other in zip(done.logprobs, expected.logprobs, strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=2e-4)


async def test_sigterm_drains_a_running_stream(stack: Rig, parts: Parts) -> None:
    expected = await stack.complete(PROMPTS[0], num_speculative_tokens=0, **LONG)
    async with parts.orchestrator(
        stack.store_url, targets=stack.targets, drafts=stack.drafts, drain_s=20
    ) as rig:
        stream = await Stream(rig, PROMPTS[0], **LONG).reaches(20)
        assert rig.process is not None
        os.kill(rig.process.pid, signal.SIGTERM)
        await asyncio.sleep(0.1)
        with pytest.raises(Unavailable):
            await rig.complete("too late", timeout_s=5)
        done = await stream.end()
        assert done.token_ids == expected.token_ids
        assert await asyncio.wait_for(rig.process.wait(), 10) == 0


async def test_sigterm_ends_a_stream_that_outlasts_the_drain(stack: Rig, parts: Parts) -> None:
    """And frees what it holds on workers and in the store."""
    before = await stack.held()
    async with parts.orchestrator(
        stack.store_url, targets=stack.targets, drafts=stack.drafts, drain_s=0.2
    ) as rig:
        stream = await Stream(
            rig, "endless", max_tokens=490, ignore_eos=True, num_speculative_tokens=0
        ).reaches(5)
        assert rig.process is not None
        os.kill(rig.process.pid, signal.SIGTERM)
        error = await stream.error()
        assert isinstance(error, OutriderError) and error.message
        assert await asyncio.wait_for(rig.process.wait(), 10) == 0
    await stack.returns_to(before)


@pytest_asyncio.fixture(loop_scope="session")
async def own_store(stack: Rig, parts: Parts, tmp_path: Path) -> AsyncIterator[tuple[Server, Rig]]:
    """A store of its own before the shared workers."""
    with running_server("valkey", tmp_path) as server:
        async with parts.orchestrator(
            server.url,
            targets=stack.targets,
            drafts=stack.drafts,
            store_timeout_s=0.5,
            store_retry_s=3.0,
        ) as rig:
            yield server, rig


async def test_a_killed_store_ends_streams_and_refuses_new_ones(
    own_store: tuple[Server, Rig], stack: Rig
) -> None:
    server, rig = own_store
    before = await stack.held()
    stream = await Stream(rig, PROMPTS[0], **LONG).reaches(20)
    server.stop()
    started = time.monotonic()
    error = await stream.error()
    took = time.monotonic() - started
    assert isinstance(error, Unavailable) and "session store" in error.message
    assert took < 15
    with pytest.raises(Unavailable, match="session store"):
        await rig.complete("new", timeout_s=10)
    # What was told was durable: the chunks are a prefix of the plain output.
    plain = await stack.complete(PROMPTS[0], num_speculative_tokens=0, **LONG)
    ids = [token_id for chunk in stream.chunks for token_id in chunk.token_ids]
    assert ids == list(plain.token_ids[: len(ids)]) and len(ids) < 300
    await stack.returns_to(before)
    server.restart()
    assert len((await rig.complete("afterwards", max_tokens=8)).token_ids) == 8


async def test_a_store_that_is_away_for_a_moment_costs_time_only(
    own_store: tuple[Server, Rig], stack: Rig
) -> None:
    """SIGSTOP for a second: commits are repeated, the stream goes on with every token."""
    server, rig = own_store
    plain = await stack.complete(PROMPTS[1], num_speculative_tokens=0, **LONG)
    stream = await Stream(rig, PROMPTS[1], **LONG).reaches(20)
    os.kill(server.process.pid, signal.SIGSTOP)
    await asyncio.sleep(1.2)
    os.kill(server.process.pid, signal.SIGCONT)
    done = await stream.end()
    assert done.token_ids == plain.token_ids and done.durable


async def test_a_store_that_forgets_ends_the_stream(
    own_store: tuple[Server, Rig], stack: Rig
) -> None:
    """Restarted without its data: the session is gone, and the client is told so."""
    server, rig = own_store
    before = await stack.held()
    stream = await Stream(rig, PROMPTS[2], **LONG).reaches(20)
    server.restart()
    error = await stream.error()
    assert "session" in error.message
    await stack.returns_to(before)
    assert total([await rig.complete(PROMPTS[2], max_tokens=20)]).rounds > 0


async def test_no_store_at_start_is_one_clear_line(parts: Parts, stack: Rig) -> None:
    url = f"redis://:secret@127.0.0.1:{free_port()}/0"
    flags = ["--targets", stack.targets[0], "--store-url", url, "--store-start-timeout-s", "0.5"]
    async with parts.process("orchestrator", *flags, wait=False) as (child, _):
        assert await asyncio.wait_for(child.wait(), 60) == 1
        tail = child.log_tail()
    assert tail.splitlines()[-1].startswith("error:") and "start Redis" in tail
    assert "Traceback" not in tail and "secret" not in tail


async def test_a_store_that_comes_later_is_waited_for(
    parts: Parts, stack: Rig, tmp_path: Path
) -> None:
    port = free_port()
    url = f"redis://127.0.0.1:{port}/0"
    flags = ["--targets", stack.targets[0], "--store-url", url, "--store-start-timeout-s", "60"]
    async with parts.process("orchestrator", *flags, wait=False) as (child, _):

        async def waits() -> bool:
            return "waiting for the session store" in child.log.read_text()

        await until(waits, "it says what it waits for", 60)
        await asyncio.sleep(2)
        assert child.returncode is None and "serving" not in child.log_tail()
        with running_server("valkey", tmp_path, port=port):

            async def serves() -> bool:
                return "serving" in child.log.read_text()

            await until(serves, "it serves once the store is there", 60)
    assert child.log.read_text().count("waiting for the session store") == 1


async def test_a_store_that_refuses_its_user_is_not_waited_for(
    parts: Parts, stack: Rig, tmp_path: Path
) -> None:
    with running_server("valkey", tmp_path, "--requirepass", "other") as server:
        url = f"redis://:secret@127.0.0.1:{server.port}/0"
        flags = ["--targets", stack.targets[0], "--store-url", url]
        flags += ["--store-start-timeout-s", "600"]
        async with parts.process("orchestrator", *flags, wait=False) as (child, _):
            assert await asyncio.wait_for(child.wait(), 60) == 1
            assert "refuses the credentials" in child.log_tail()
