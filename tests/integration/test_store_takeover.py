"""Takeover in real servers: by request id at once, its limits, what waits for it, what is removed;
and the commit queue of a stream that goes on without its store."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from redis.asyncio import Redis

from outrider.errors import (
    AlreadyRunning,
    DataLoss,
    FailedPrecondition,
    Fenced,
    InternalError,
    NotFound,
    OutriderError,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
)
from outrider.types import Fence, FinishReason, SessionState, chain_hash, new_session_id
from services.orchestrator.durable import DurableGeneration
from services.orchestrator.lease import Lease
from services.orchestrator.running import Running
from services.orchestrator.store import SessionStore
from services.orchestrator.store_commit import FOR_EVER
from services.orchestrator.store_index import index_key
from services.orchestrator.store_values import Outcome, StoredSession
from services.orchestrator.totals import Totals
from store_servers import (
    Link,
    Server,
    begin,
    create,
    log_of,
    open_store,
    queue_of,
    record,
    running_link,
)


@pytest.fixture
async def store(server: Server) -> AsyncIterator[SessionStore]:
    async with open_store(server.url, linger_s=5, resume_s=7) as opened:
        yield opened


@pytest.fixture
async def redis(server: Server) -> AsyncIterator[Redis]:
    async with Redis.from_url(server.url) as client:
        yield client


@pytest.fixture
async def link(server: Server) -> AsyncIterator[Link]:
    async with running_link(server) as running:
        yield running


async def resume(
    store: SessionStore, fence: Fence, request_id: str = "r1", **options: object
) -> StoredSession:
    values = {"tenant": "alice", "owner": "o2", **options}
    return await store.resume(fence.session_id, request_id=request_id, **values)  # type: ignore[arg-type]


async def begin_noted(
    store: SessionStore,
    fence: Fence,
    prefix: tuple[int, ...] = (),
    request_id: str = "r1",
    **fields: object,
) -> None:
    """The prompt [1, 2] after a log; two bytes of notes a token."""
    start = len(prefix)
    generation = replace(record(request_id, start, start + 2), **fields)  # type: ignore[arg-type]
    await store.begin(
        fence,
        from_len=start,
        from_hash=chain_hash(0, prefix),
        token_ids=[1, 2],
        new_hash=chain_hash(0, (*prefix, 1, 2)),
        generation=generation,
        notes_width=2,
        time_left_s=9.0,
    )


async def commit_noted(
    store: SessionStore, fence: Fence, prefix: list[int], tokens: list[int], notes: bytes
) -> int:
    return await store.commit(
        fence,
        from_len=len(prefix),
        from_hash=chain_hash(0, prefix),
        token_ids=tokens,
        new_hash=chain_hash(0, prefix + tokens),
        notes=notes,
        progress=f"after {tokens[-1]}",
    )


async def test_its_request_takes_a_running_generation_at_once(store: SessionStore) -> None:
    """Under the lease of an owner that is alive, whose late commits are refused from then on."""
    old = await create(store)
    await begin_noted(store, old)
    await commit_noted(store, old, [1, 2], [3, 4], b"aabb")
    with pytest.raises(AlreadyRunning, match="lease"):  # whoever cannot name the request
        await store.take(old.session_id, tenant="alice", owner="o2")
    taken = await resume(store, old, offset=2)
    assert taken.fence.epoch == old.epoch + 1 and taken.fence.owner_nonce != old.owner_nonce
    assert taken.token_ids == (1, 2, 3, 4) and taken.notes == b"aabb"
    assert taken.progress == "after 4" and taken.running == "r1" and taken.owner == "o2"
    assert 29 < taken.lease_s <= 30 and taken.state is SessionState.RUNNING
    assert 8 < taken.time_left_s <= 9 and taken.elapsed_s < 1
    for late in ([3, 4], [3, 4, 5]):
        with pytest.raises(Fenced, match=f"epoch {taken.fence.epoch}"):
            await commit_noted(store, old, [1, 2], late, b"xx" * len(late))
    for write in (store.renew(old), store.detach(old, keep=True), store.delete(old)):
        with pytest.raises(Fenced):
            await write
    assert await commit_noted(store, taken.fence, [1, 2, 3, 4], [5], b"cc") == 5
    again = await resume(store, old)
    assert again.notes == b"aabbcc" and again.fence.epoch == old.epoch + 2


async def test_who_may_not_resume_changes_nothing(store: SessionStore, redis: Redis) -> None:
    fence = await create(store)
    with pytest.raises(FailedPrecondition, match="not this request's"):  # nothing was begun yet
        await resume(store, fence)
    await begin_noted(store, fence, idempotency_key="k")
    await commit_noted(store, fence, [1, 2], [3], b"aa")
    before = await redis.hgetall(f"outrider:{{{fence.session_id}}}:meta")
    with pytest.raises(FailedPrecondition, match="not this request's"):
        await resume(store, fence, "r2")
    with pytest.raises(FailedPrecondition, match="not this request's"):
        await resume(store, fence, idempotency_key="other")
    with pytest.raises(PermissionDenied):
        await resume(store, fence, tenant="mallory")
    for offset in (2, 2**31):
        with pytest.raises(DataLoss, match="has 1 tokens") as lost:
            await resume(store, fence, offset=offset)
        assert lost.value.field == "offset"
    with pytest.raises(NotFound):
        await resume(store, Fence(new_session_id(), 1, 1))
    assert await redis.hgetall(f"outrider:{{{fence.session_id}}}:meta") == before
    assert (await resume(store, fence, idempotency_key="k", offset=1)).token_ids == (1, 2, 3)


async def test_what_has_ended_is_looked_at_by_its_request(store: SessionStore) -> None:
    fence = await create(store)
    await begin_noted(store, fence)
    await commit_noted(store, fence, [1, 2], [3], b"aa")
    await store.finish(
        fence,
        finish_reason=FinishReason.STOP_STRING,
        keep=False,
        matched_stop="x",
        cut_text="xy",
        progress="all",
    )
    for _ in range(2):
        seen = await resume(store, fence, offset=1)
        assert seen.running is None and seen.fence.epoch == fence.epoch
        assert seen.last is not None and seen.progress == "all" and seen.notes == b"aa"
        assert seen.last.outcome == Outcome(FinishReason.STOP_STRING, "x", "xy")
        assert seen.ttl_s <= 5 and seen.state is SessionState.IDLE
    cut = await create(store)
    await begin_noted(store, cut)
    await store.finish(cut, finish_reason=None, keep=True)
    with pytest.raises(FailedPrecondition, match="given up"):
        await resume(store, cut)


async def test_a_generation_that_waits_has_no_lease_and_little_time(store: SessionStore) -> None:
    for keep, ttl_s in ((False, 7), (True, 600)):
        fence = await create(store)
        await begin_noted(store, fence, keep=keep)
        before = await store.get(fence.session_id, tenant="alice")
        assert ttl_s - 1 < before.ttl_s - 30 * (not keep) <= ttl_s  # and the lease
        await store.detach(fence, keep=keep)
        waits = await store.get(fence.session_id, tenant="alice")
        assert waits.state is SessionState.INTERRUPTED and waits.running == "r1"
        assert ttl_s - 1 < waits.ttl_s <= ttl_s
        taken = await resume(store, fence)
        assert taken.state is SessionState.RUNNING and taken.ttl_s > 30
        await store.detach(taken.fence, keep=keep)
        # Its next turn may begin, too; then there is nothing to go on with any more.
        other = (await store.take(fence.session_id, tenant="alice", owner="o3")).fence
        await begin(store, other, [9], prefix=[1, 2], request_id="r2")
        with pytest.raises(FailedPrecondition):
            await resume(store, fence)
        assert (await resume(store, fence, "r2")).notes == b""


async def test_a_next_turn_gives_up_what_waits_before_it_begins(store: SessionStore) -> None:
    """Nobody can resume, and so take from it, what it has left behind; its own request can."""
    fence = await create(store)
    await begin_noted(store, fence)
    await store.detach(fence, keep=True)
    same = await store.take(fence.session_id, tenant="alice", owner="o2", request_id="r1")
    assert same.running == "r1"
    await store.detach((await resume(store, same.fence)).fence, keep=True)
    turn = await store.take(fence.session_id, tenant="alice", owner="o3", request_id="r2")
    assert turn.running is None and turn.state is SessionState.IDLE
    with pytest.raises(FailedPrecondition, match="given up"):
        await resume(store, turn.fence)
    assert await begin(store, turn.fence, [9], prefix=[1, 2], request_id="r2") == 3


async def test_notes_belong_to_their_tokens(store: SessionStore, redis: Redis) -> None:
    fence = await create(store)
    await begin_noted(store, fence)
    with pytest.raises(InternalError, match="2 bytes"):
        await commit_noted(store, fence, [1, 2], [3, 4], b"abc")
    await commit_noted(store, fence, [1, 2], [3, 4], b"aabb")
    await commit_noted(store, fence, [1, 2], [3, 4], b"xxyy")  # a repeated commit: known already
    await commit_noted(store, fence, [1, 2], [3, 4, 5], b"xxyycc")
    assert (await resume(store, fence)).notes == b"aabbcc"
    # Those of the last generation alone.
    fence = (await resume(store, fence)).fence
    await store.finish(fence, finish_reason=FinishReason.EOS, keep=True)
    await begin_noted(store, fence, (1, 2, 3, 4, 5), "r2")
    await commit_noted(store, fence, [1, 2, 3, 4, 5, 1, 2], [6], b"dd")
    assert (await resume(store, fence, "r2")).notes == b"dd"
    await redis.delete(f"outrider:{{{fence.session_id}}}:notes")
    for gone in (resume(store, fence, "r2"), store.get(fence.session_id, tenant="alice")):
        with pytest.raises(NotFound):
            await gone


async def test_removal_is_for_good_and_gives_the_last_word(
    store: SessionStore, redis: Redis
) -> None:
    fence = await create(store)
    await begin_noted(store, fence)
    await commit_noted(store, fence, [1, 2], [3], b"aa")
    with pytest.raises(PermissionDenied):
        await store.remove(fence.session_id, tenant="mallory")
    last = await store.remove(fence.session_id, tenant="alice")
    assert last.epoch == fence.epoch + 1
    assert await redis.keys(f"*{fence.session_id}*") == []
    for gone in (
        store.remove(fence.session_id, tenant="alice"),
        resume(store, fence),
        store.renew(fence),
    ):
        with pytest.raises(NotFound):
            await gone
    # The same id again is another session: its epochs are above those of the first.
    again = await create(store, fence.session_id)
    assert again.epoch > fence.epoch
    # What is left of an evicted session is removed, too.
    await begin(store, again, [1])
    await redis.delete(f"outrider:{{{fence.session_id}}}:meta")
    with pytest.raises(NotFound):
        await store.remove(fence.session_id, tenant="alice")
    assert await redis.keys(f"*{fence.session_id}*") == []


async def test_takeover_works_with_full_memory(store: SessionStore, redis: Redis) -> None:
    fence = await create(store)
    await begin_noted(store, fence)
    await redis.config_set("maxmemory", 1)
    try:
        taken = await resume(store, fence)
        await store.detach(taken.fence, keep=False)
        taken = await resume(store, fence)
        with pytest.raises(ResourceExhausted):
            await commit_noted(store, taken.fence, [1, 2], [3], b"aa")
        await store.finish(taken.fence, finish_reason=FinishReason.EOS, keep=False)
        await store.remove(fence.session_id, tenant="alice")
    finally:
        await redis.config_set("maxmemory", 0)


@pytest.mark.parametrize("operation", ["resume", "detach", "remove", "reserve"])
async def test_new_operations_survive_a_lost_reply(link: Link, operation: str) -> None:
    async with open_store(link.url) as store:
        fence = await create(store)
        await begin(store, fence, [1])
        await store.index.touch("alice", fence.session_id, ttl_s=5)
        link.lose_replies = 1
        if operation == "resume":
            assert (await resume(store, fence)).fence.epoch == fence.epoch + 1  # not 2
        elif operation == "detach":
            await store.detach(fence, keep=True)
        elif operation == "reserve":
            await store.index.reserve("alice", new_session_id(), ttl_s=5, limit=9)
        else:
            with contextlib.suppress(NotFound):  # It is removed; who did it is not known.
                await store.remove(fence.session_id, tenant="alice")
        assert link.lose_replies == 0


# The index of live sessions


async def test_the_index_counts_what_lives_and_forgets_it_in_time(
    store: SessionStore, redis: Redis
) -> None:
    index, tenant = store.index, f"carol {new_session_id()}"
    ids = sorted(new_session_id() for _ in range(4))
    for session_id in ids[:2]:
        assert await index.reserve(tenant, session_id, ttl_s=50, limit=3)
    assert not await index.reserve(tenant, ids[0], ttl_s=60, limit=3)
    assert await index.reserve(tenant, ids[2], ttl_s=0.05, limit=3)
    with pytest.raises(ResourceExhausted, match=r"3 live sessions; at most 3"):
        await index.reserve(tenant, ids[3], ttl_s=50, limit=3)
    assert not await index.reserve(tenant, ids[0], ttl_s=60, limit=3)  # no new one
    assert await index.members(tenant) == ids[:3]
    await asyncio.sleep(0.06)
    assert await index.reserve(tenant, ids[3], ttl_s=50, limit=3)  # one has expired
    assert await index.members(tenant) == [*ids[:2], ids[3]]
    assert await index.members("dave") == []
    assert 59_000 < await redis.pttl(index_key(tenant)) <= 60_000  # as its longest entry
    await index.touch(tenant, ids[0], ttl_s=10)
    assert 49_000 < await redis.pttl(index_key(tenant)) <= 50_000
    await index.remove(tenant, *ids)
    await index.remove(tenant)
    assert await redis.exists(index_key(tenant)) == 0
    assert "{" in index_key("a}b{c") and index_key("a}b{c").count("{") == 1


# Commit queues of streams that go on without the store


async def test_a_store_that_lags_is_waited_for_once_until_it_keeps_up(link: Link) -> None:
    async with (
        open_store(link.url, command_timeout_s=0.3) as store,
        queue_of(store, retry_for_s=FOR_EVER) as (fence, queue),
    ):
        queue.append([2])
        assert await queue.soon_durable(2, 5.0) and not queue.lagging
        link.hold.clear()
        queue.append([3])
        started = time.monotonic()
        assert not await queue.soon_durable(3, 0.1)
        assert 0.09 < time.monotonic() - started < 1
        for token in (4, 5, 6):  # nobody waits any more, whether it answers or fails meanwhile
            started = time.monotonic()
            queue.append([token])
            assert not await queue.soon_durable(token, 5.0)
            assert time.monotonic() - started < 0.1
            await asyncio.sleep(0.2)
        link.hold.set()
        await queue.drain()
        assert await queue.soon_durable(6, 5.0) and not queue.lagging
        assert await log_of(store, fence) == [1, 2, 3, 4, 5, 6]


async def test_without_the_store_for_ever_a_queue_goes_on_trying_and_still_sees_a_fence(
    server: Server,
) -> None:
    async with (
        open_store(server.url, command_timeout_s=0.2) as store,
        queue_of(store, retry_for_s=FOR_EVER, lease=Lease(0.05)) as (fence, queue),
    ):
        await resume(store, fence)
        queue.append([2])
        with pytest.raises(Fenced):
            await queue.soon_durable(2, 5.0)
    async with (
        open_store(server.url) as store,
        queue_of(store, retry_for_s=FOR_EVER) as (fence, queue),
    ):
        await store.remove(fence.session_id, tenant="alice")
        queue.append([2])
        assert not await queue.soon_durable(2, 5.0)  # gone: it goes on from memory
        assert isinstance(queue.error, NotFound)


async def test_a_lease_that_ran_out_ends_the_queue_before_its_time(link: Link) -> None:
    lease = Lease(0.4)
    async with (
        open_store(link.url, command_timeout_s=0.15) as store,
        queue_of(store, retry_for_s=60.0, lease=lease) as (_, queue),
    ):
        await asyncio.sleep(0.2)
        queue.append([2])
        await queue.drain()
        assert lease.left_s > 0.3  # a commit confirms it
        link.hold.clear()
        queue.append([3])
        started = time.monotonic()
        with pytest.raises(Unavailable, match="lease"):
            await queue.wait_durable(3)
        assert 0.3 < time.monotonic() - started < 3
        link.hold.set()


async def test_a_lease_is_renewed_and_says_when_it_is_lost(server: Server, link: Link) -> None:
    async with open_store(link.url, lease_s=0.3, command_timeout_s=0.1) as store:
        fence = await create(store)
        await begin(store, fence, [1])
        lease = Lease(0.3)
        for _ in range(4):
            await lease.renew(store, fence)
            assert 0.1 < lease.left_s <= 0.3
        link.hold.clear()
        with pytest.raises(Unavailable, match="ran out"):
            for _ in range(10):
                await lease.renew(store, fence)
        link.hold.set()
        async with open_store(server.url) as other:
            await resume(other, fence)
        with pytest.raises(Fenced):
            await lease.renew(store, fence)


class Resumed:
    """What one call has resumed: `fill` its place with it, then `let_go`."""

    def __init__(self, store: SessionStore, session: StoredSession) -> None:
        assert session.last is not None
        self.plan: Any = SimpleNamespace(
            session_id=session.fence.session_id,
            request_id="r1",
            prompt_len=session.last.prompt_end,
            durability=session.last.durability,
            resumable=True,
            keep=False,
            stays=False,
        )
        self.epoch = session.fence.epoch
        self.ended_by: OutriderError | None = None
        self.durable = DurableGeneration(
            self.plan,
            store,
            session.fence,
            tenant="alice",
            deadline=time.monotonic() + 60,
            lease_s=5,
            retry_s=1,
            wait_s=1,
        )
        self.durable.take_up(session.durable_len, chain_hash(0, session.token_ids))

    def supersede(self, error: OutriderError) -> None:
        self.ended_by = error


@pytest.mark.parametrize("turned", [False, True], ids=["in order", "the later one first"])
async def test_two_that_resume_at_one_orchestrator_leave_the_session_to_one_of_them(
    store: SessionStore, turned: bool
) -> None:
    """The store answers the second call before the first; none of them takes it for its own."""
    fence = await create(store)
    await begin_noted(store, fence, resumable=True)
    found = [await resume(store, fence) for _ in range(2)]
    calls = [Resumed(store, session) for session in (reversed(found) if turned else found)]
    running = Running(limit=2)
    with contextlib.ExitStack() as stack:
        for call in calls:
            stack.enter_context(running.admitted("alice", "r1", resumes=True)).fill(call)
        [older], [newer] = (
            [call for call in calls if (call.ended_by is None) == goes_on]
            for goes_on in (False, True)
        )
        await older.durable.let_go(older.ended_by)
        await newer.durable.commit((3,), b"33", Totals())
    assert isinstance(older.ended_by, Fenced) and older.epoch < newer.epoch
    assert await log_of(store, fence) == [1, 2, 3]
