"""Several targets, drafts and orchestrators: found, shared out, drained, lost, and overloaded.

Two workers of this module join those of the shared stack; a small API server names them.
"""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from kube_server import KubeServer, endpoint, endpoint_slice
from outrider.cli.process import Child
from outrider.client import Completion, GenerationOptions, OutriderClient
from outrider.errors import OutriderError, ResourceExhausted, Unavailable
from outrider.rpc.channel import ChannelSecurity, open_channel
from outrider.types import Priority
from outrider.v1 import draft_pb2_grpc, target_pb2_grpc, worker_pb2
from scripted_workers import Parts, Rig, Stream, total, until

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(120),
    pytest.mark.slow,
]

COUPLED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "ignore_eos": True}


@dataclass
class More:
    """A second target and a second draft, and the API server that names them."""

    target: str
    target_process: Child
    draft: str
    kube: KubeServer

    def name(self, service: str, address: str, **conditions: Any) -> None:
        host, _, port = address.rpartition(":")
        made = endpoint_slice(
            service, endpoint(host, **conditions), service=service, ports=[{"port": int(port)}]
        )
        self.kube.put(made)

    @contextlib.asynccontextmanager
    async def target_held_up(self) -> AsyncIterator[None]:
        """Its target does next to nothing meanwhile: it sleeps but for moments, in which it says
        that it is there."""
        pid = self.target_process.pid

        async def doze() -> None:
            while True:
                os.kill(pid, signal.SIGSTOP)
                await asyncio.sleep(0.9)
                os.kill(pid, signal.SIGCONT)
                await asyncio.sleep(0.02)

        dozing = asyncio.create_task(doze())
        try:
            yield
        finally:
            dozing.cancel()
            await asyncio.wait([dozing])
            os.kill(pid, signal.SIGCONT)

    async def running(self, tier: str) -> int:
        """Work under way there, as it says itself; a pass in between counts as some."""
        stubs: dict[str, Any] = {
            "target": (self.target, target_pb2_grpc.TargetServiceStub),
            "draft": (self.draft, draft_pb2_grpc.DraftServiceStub),
        }
        address, stub = stubs[tier]
        async with open_channel(address) as channel:
            call = stub(channel).Watch(worker_pb2.WatchRequest(interval_ms=20), timeout=10)
            seen = [await call.read() for _ in range(6)]
            call.cancel()
        return max(max(one.running, one.busy > 0) for one in seen)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def more(parts: Parts, tiny_models: dict[str, Path]) -> AsyncIterator[More]:
    async with contextlib.AsyncExitStack() as stack:
        (process, target), (_, draft) = await asyncio.gather(
            stack.enter_async_context(
                parts.worker("target", tiny_models["target"], kv_memory="64MiB", drain_s=60)
            ),
            stack.enter_async_context(
                parts.worker("draft", tiny_models["draft"], kv_memory="64MiB")
            ),
        )
        with KubeServer() as kube:
            yield More(target, process, draft, kube)


def tokens_of(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [done.token_ids for done in completions]


async def test_workers_come_and_go_under_load(stack: Rig, parts: Parts, more: More) -> None:
    """Sessions are shared out to those that come, leave those that go, and say the same."""
    prompts = [f"come and go {number}" for number in range(12)]
    options = {"max_tokens": 400, **COUPLED}
    expected = await stack.complete_all(
        prompts, num_speculative_tokens=0, seeds=True, concurrency=12, **options
    )
    async with parts.orchestrator(
        stack.store_url,
        targets=[stack.targets[0], "kubernetes:///targets"],
        drafts=[stack.drafts[0], "kubernetes:///drafts"],
        kubernetes_api=more.kube.url,
        draft_start_timeout_s=1,
    ) as rig:
        streams = [Stream(rig, prompts[n], seed=n, **options) for n in range(6)]
        for stream in streams:
            await stream.reaches(10)
        assert await more.running("target") == 0

        more.name("targets", more.target)
        more.name("drafts", more.draft)
        async with asyncio.timeout(20):
            while "worker up" not in rig.log.read_text() or more.target not in rig.log.read_text():
                await asyncio.sleep(0.02)
        streams += [Stream(rig, prompts[n], seed=n, **options) for n in range(6, 12)]
        for stream in streams[6:]:
            await stream.reaches(5)
        # The new target has what the others' share demands; sessions that ran before ask the new
        # draft too.
        assert await more.running("target") >= 3

        async def draft_is_asked() -> bool:
            return await more.running("draft") >= 1

        await until(draft_is_asked, "the new draft is asked")

        more.name("targets", more.target, ready=False, serving=True, terminating=True)
        more.name("drafts", more.draft, ready=False, serving=True, terminating=True)

        async def all_have_left() -> bool:
            return await more.running("target") == 0 == await more.running("draft")

        await until(all_have_left, "the sessions have moved")
        unfinished = sum(not stream._task.done() for stream in streams)
        assert unfinished >= 2, "they moved in mid-stream"
        more.kube.remove("targets")
        more.kube.remove("drafts")
        done = [await stream.end() for stream in streams]
        assert tokens_of(done) == tokens_of(expected)
        assert [d.text for d in done] == [d.text for d in expected]
        stats = total(done)
        assert stats.accepted > 500 and stats.fallback_rounds < stats.rounds / 4
        log = rig.log.read_text()
        assert log.count('"worker gone"') == 2, log
        assert more.kube.num_watchers == 2


async def test_a_target_that_is_stopped_is_left_in_seconds_and_used_again(
    stack: Rig, parts: Parts, more: More
) -> None:
    """Its connections stay as they are. What its sessions left there goes when it is back, not when
    it has been idle for an hour."""
    prompts = [f"left alone {number}" for number in range(8)]
    options = {"max_tokens": 300, **COUPLED}
    expected = await stack.complete_all(
        prompts, num_speculative_tokens=0, seeds=True, concurrency=8, **options
    )
    targets = [stack.targets[0], more.target]
    async with parts.orchestrator(stack.store_url, targets=targets, drafts=stack.drafts) as rig:
        before = await rig.info(more.target)
        streams = [Stream(rig, prompt, seed=n, **options) for n, prompt in enumerate(prompts)]
        for stream in streams:
            await stream.reaches(5)
        assert (await rig.info(more.target)).sessions >= before.sessions + 2
        os.kill(more.target_process.pid, signal.SIGSTOP)
        try:
            stopped = time.monotonic()
            done = [await stream.end() for stream in streams]
            assert 1.0 < time.monotonic() - stopped < 10, "gRPC alone would take half a minute"
        finally:
            os.kill(more.target_process.pid, signal.SIGCONT)
        assert tokens_of(done) == tokens_of(expected)

        async def is_used_again() -> bool:
            asked = await rig.info(more.target)
            await rig.complete_all([f"{time.monotonic()} {n}" * 8 for n in range(4)], max_tokens=3)
            return (await rig.info(more.target)).prefix_tokens > asked.prefix_tokens

        async def nothing_is_left() -> bool:
            info = await rig.info(more.target)
            return (info.sessions, info.kv_blocks_free) == (before.sessions, before.kv_blocks_free)

        await until(nothing_is_left, "what was there is closed", timeout_s=20)
        await until(is_used_again, "new sessions go there", timeout_s=20)


@pytest.mark.parametrize("drafting", ["direct", "relayed"])
async def test_a_session_asks_another_draft_in_mid_stream(
    stack: Rig, parts: Parts, more: More, drafting: str
) -> None:
    """From the one that goes to the other and back, token for token as without any."""
    count = 12  # Fewer would be done before the drafts have come and gone.
    prompts = [f"another draft {number}" for number in range(count)]
    options = {"max_tokens": 450, **COUPLED}
    expected = await stack.complete_all(
        prompts, num_speculative_tokens=0, seeds=True, concurrency=count, **options
    )
    more.name("drafts", more.draft)
    async with parts.orchestrator(
        stack.store_url,
        targets=stack.targets,
        drafts=["kubernetes:///drafts", stack.drafts[0]],
        kubernetes_api=more.kube.url,
        drafting=drafting,
    ) as rig:
        streams = [Stream(rig, prompt, seed=n, **options) for n, prompt in enumerate(prompts)]
        for stream in streams:
            await stream.reaches(5)
        for is_asked, conditions in ((True, {}), (False, {"terminating": True}), (True, {})):
            more.name("drafts", more.draft, **conditions)

            async def as_wanted(wanted: bool = is_asked) -> bool:
                return (await more.running("draft") > 0) is wanted

            await until(as_wanted, f"the other draft is asked: {is_asked}")
        more.name("drafts", more.draft, ready=False)
        await asyncio.sleep(0.1)
        asked = await more.running("draft")
        assert asked or all(s._task.done() for s in streams), (
            "one that is merely not ready keeps them"
        )
        assert not all(stream._task.done() for stream in streams)
        done = [await stream.end() for stream in streams]
        assert tokens_of(done) == tokens_of(expected)
        assert total(done).accepted > 100 * count and total(done).fallback_rounds <= 40
    more.kube.remove("drafts")


async def test_equal_prefixes_meet_at_one_target_whoever_sends_them(
    stack: Rig, parts: Parts, more: More
) -> None:
    targets = [stack.targets[0], more.target]
    async with (
        parts.orchestrator(stack.store_url, targets=targets) as first,
        parts.orchestrator(stack.store_url, targets=targets) as second,
    ):
        reused: Counter[str] = Counter()
        for group in range(6):
            shared = [(group * 37 + 5 * i) % 250 for i in range(100)]
            for number, rig in enumerate((first, second, first, second)):
                done = await rig.complete([*shared, number, 7], max_tokens=2)
                reused["first" if not number else "later"] += done.usage.cached_prompt_tokens
        assert reused["first"] == 0
        assert reused["later"] == 6 * 3 * 96
        used = [(await first.info(address)).prefix_hit_tokens for address in targets]
        assert all(used), "and not all of them at the same one"


async def test_a_name_in_dns_is_all_its_workers(stack: Rig, parts: Parts, more: More) -> None:
    port = more.target.rpartition(":")[2]
    async with parts.orchestrator(
        stack.store_url, targets=[f"dns:///localhost:{port}"], dns_refresh_s=0.2
    ) as rig:
        before = (await stack.info(stack.targets[0])).prefix_tokens
        done = await rig.complete("by name", max_tokens=8)
        assert len(done.token_ids) == 8
        assert (await stack.info(stack.targets[0])).prefix_tokens == before


async def test_overload_is_refused_in_time_and_callers_get_equal_parts(
    stack: Rig, parts: Parts, tmp_path: Path
) -> None:
    """Room for three at once and six who wait; sixty requests of one caller, ten of another."""
    (tmp_path / "tokens").write_text("alice:secret-a\nbob:secret-b\n")
    for name in "ab":
        (tmp_path / name).write_text(f"secret-{name}")
    options = GenerationOptions(max_tokens=24, ignore_eos=True)
    expected = await stack.complete("crowd", max_tokens=24, ignore_eos=True)
    before = await stack.held()
    async with parts.orchestrator(
        stack.store_url,
        targets=stack.targets,
        drafts=stack.drafts,
        auth_token_file=str(tmp_path / "tokens"),
        client_token_file=str(tmp_path / "a"),
        max_target_sessions=3,
        max_waiting=8,
        caller_limits="bob:waiting=4",
    ) as rig:
        order: list[str] = []
        refusals: list[OutriderError] = []

        async def ask(client: OutriderClient, name: str) -> None:
            while True:
                try:
                    chunks = [c async for c in client.generate("crowd", options, timeout_s=60)]
                except ResourceExhausted as error:
                    refusals.append(error)
                    assert error.retry_after_s is not None and 0.1 <= error.retry_after_s < 30
                    await asyncio.sleep(0.05)
                    continue
                order.append(name)
                assert tuple(t for c in chunks for t in c.token_ids) == expected.token_ids
                return

        most = 0

        async def look() -> None:
            nonlocal most
            while True:
                most = max(most, (await rig.info(stack.targets[0])).sessions)
                await asyncio.sleep(0.01)

        looking = asyncio.create_task(look())
        bob = await OutriderClient.connect(
            address=rig.address, security=ChannelSecurity(token_file=str(tmp_path / "b"))
        )
        async with bob:
            alices = [asyncio.create_task(ask(rig.client, "a")) for _ in range(40)]
            await asyncio.sleep(0.1)
            bobs = [asyncio.create_task(ask(bob, "b")) for _ in range(10)]
            await asyncio.gather(*bobs)
            while_both = Counter(order)
            await asyncio.gather(*alices)
        looking.cancel()
        assert Counter(order) == {"a": 40, "b": 10}
        assert len(refusals) > 20 and most <= 3 + len(before.sessions)
        assert while_both["a"] <= 10 + 8, "she asks four times as much, and gets no more"
    await stack.returns_to(before)


async def test_a_request_that_cannot_get_its_turn_in_time_is_told_so(
    stack: Rig, parts: Parts, more: More
) -> None:
    async with parts.orchestrator(
        stack.store_url, targets=[more.target], max_target_sessions=1, max_wait_s=1, max_waiting=1
    ) as rig:
        long = await Stream(rig, "long", max_tokens=400, ignore_eos=True).reaches(3)
        async with more.target_held_up():
            started = time.monotonic()
            waits = asyncio.create_task(rig.complete("waits", timeout_s=30))
            await asyncio.sleep(0.05)
            with pytest.raises(ResourceExhausted, match="1 wait"):
                await rig.complete("full", timeout_s=30)
            assert time.monotonic() - started < 1, "at once"
            high = asyncio.create_task(
                rig.complete("first", priority=Priority.HIGH, max_tokens=3, timeout_s=30)
            )
            with pytest.raises(ResourceExhausted, match="no room"):
                await waits
            assert time.monotonic() - started > 0.9
        assert len((await long.end()).token_ids) == 400
        with contextlib.suppress(ResourceExhausted):
            assert len((await high).token_ids) == 3
        assert len((await rig.complete("later", max_tokens=3)).token_ids) == 3


async def test_orchestrators_keep_to_what_a_target_takes_together(
    stack: Rig, parts: Parts, more: More
) -> None:
    """Two of them, four places: the second one waits until the first has left some."""
    settings: dict[str, Any] = {"targets": [more.target], "max_target_sessions": 4}
    async with (
        parts.orchestrator(stack.store_url, **settings) as first,
        parts.orchestrator(stack.store_url, **settings) as second,
        Redis.from_url(stack.store_url) as redis,
    ):

        async def leases() -> list[tuple[int, int]]:
            """Sessions and requests waiting, as each orchestrator has told."""
            found = []
            for key in await redis.keys("outrider:worker:*"):
                for text in (await redis.hgetall(key)).values():
                    load = json.loads(text.partition(b" ")[2])
                    if load["address"] == more.target:
                        found.append((load["sessions"], load["waiting"]))
            return sorted(found)

        streams = [Stream(first, f"long {n}", max_tokens=300, ignore_eos=True) for n in range(4)]
        for stream in streams:
            await stream.reaches(3)
        async with more.target_held_up():
            await until_equal(leases, [(0, 0), (4, 0)])
            await asyncio.sleep(1.1)  # until the second one has read what the first one wrote
            late = Stream(second, "late", max_tokens=5)
            await until_equal(leases, [(0, 1), (4, 0)])
        done = [await stream.end() for stream in streams]
        assert all(len(d.token_ids) == 300 for d in done)
        assert len((await late.end()).token_ids) == 5


async def until_equal(read: Any, wanted: Any) -> None:
    async def equal() -> bool:
        return await read() == wanted

    await until(equal, f"{wanted}")


async def test_a_target_that_drains_is_left_and_ends_soon(
    stack: Rig, parts: Parts, more: More
) -> None:
    """It has a minute for it, and streams that would take longer; they go on elsewhere."""
    options = {"max_tokens": 480, "seed": 5, "logprobs": 1, **COUPLED}
    prompts = [f"drained {n}" for n in range(3)]
    expected = await stack.complete_all(prompts, num_speculative_tokens=0, **options)
    async with parts.orchestrator(
        stack.store_url, targets=[more.target, stack.targets[0]], drafts=stack.drafts
    ) as rig:
        streams = [Stream(rig, prompt, **options) for prompt in prompts]
        for stream in streams:
            await stream.reaches(10)
        assert await more.running("target") >= 1
        os.kill(more.target_process.pid, signal.SIGTERM)
        started = time.monotonic()

        async def is_left() -> bool:
            return await more.running("target") == 0

        await until(is_left, "the sessions have moved")
        assert not all(stream._task.done() for stream in streams), "in mid-stream"
        assert await asyncio.wait_for(more.target_process.wait(), 20) == 0
        assert time.monotonic() - started < 10
        done = [await stream.end() for stream in streams]
        assert tokens_of(done) == tokens_of(expected)
        for one, other in zip(done, expected, strict=True):
            for a, b in zip(one.logprobs, other.logprobs, strict=True):
                assert a.logprob == pytest.approx(b.logprob, abs=2e-4)
        assert total(done).accepted > 100
        with pytest.raises(Unavailable):
            connecting = OutriderClient.connect(address=more.target, timeout_s=0.5)
            async with await connecting as client:
                await client.list_models()
