"""Sessions in real servers: fences, idempotency, leases, ends of life."""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from outrider.errors import (
    AlreadyRunning,
    DataLoss,
    Fenced,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
)
from outrider.types import Fence, FinishReason, chain_hash, new_session_id
from services.orchestrator.store import SessionStore
from services.orchestrator.store_values import Outcome
from store_servers import (
    Server,
    begin,
    commit,
    create,
    log_of,
    open_store,
    record,
)


@pytest.fixture
async def store(server: Server) -> AsyncIterator[SessionStore]:
    async with open_store(server.url) as opened:
        yield opened


@pytest.fixture
async def redis(server: Server) -> AsyncIterator[Redis]:
    async with Redis.from_url(server.url) as client:
        yield client


async def test_session_is_read_back_as_written(store: SessionStore) -> None:
    fence = await create(store)
    assert fence.epoch >= 1 and fence.owner_nonce
    assert await begin(store, fence, [1, 2, 3]) == 3
    assert await commit(store, fence, [1, 2, 3], [4, 2**32 - 1]) == 5
    session = await store.get(fence.session_id, tenant="alice", include_tokens=True)
    assert session.token_ids == (1, 2, 3, 4, 2**32 - 1)
    assert session.prefix_hash == chain_hash(0, session.token_ids)
    assert (session.model, session.adapter, session.tokenizer_fingerprint) == ("demo", "", "f00d")
    assert session.generations == (record("r1", 0, 3),)
    assert session.running == "r1" and 29 < session.lease_s <= 30 and 599 < session.ttl_s <= 600
    assert session.fence == replace(fence, owner_nonce=0)
    bare = await store.get(fence.session_id, tenant="alice")
    assert bare.token_ids == () and bare.durable_len == 5


async def test_log_is_packed_little_endian(store: SessionStore, redis: Redis) -> None:
    fence = await create(store)
    await begin(store, fence, [1, 258])
    data = await redis.get(f"outrider:{{{fence.session_id}}}:log")
    assert data == b"\x01\0\0\0\x02\x01\0\0"


async def test_existing_id_is_refused(store: SessionStore) -> None:
    fence = await create(store)
    with pytest.raises(AlreadyRunning):
        await create(store, fence.session_id)


@pytest.mark.parametrize("bad", ["", "short", "a" * 21 + "}", "a" * 23])
async def test_malformed_id_is_refused(store: SessionStore, bad: str) -> None:
    with pytest.raises(InvalidArgument, match="session_id"):
        await store.get(bad, tenant="alice")


async def test_repeated_commit_is_success(store: SessionStore) -> None:
    fence = await create(store)
    await begin(store, fence, [1, 2])
    for _ in range(3):
        assert await commit(store, fence, [1, 2], [3, 4]) == 4
    assert await commit(store, fence, [1, 2, 3, 4], [5]) == 5
    assert await commit(store, fence, [1, 2], [3, 4]) == 5  # a very late copy
    assert await log_of(store, fence) == [1, 2, 3, 4, 5]


async def test_partial_overlap_appends_the_rest(store: SessionStore) -> None:
    fence = await create(store)
    await begin(store, fence, [1])
    await commit(store, fence, [1], [2, 3])
    assert await commit(store, fence, [1], [2, 3, 4, 5]) == 5
    with pytest.raises(Fenced, match="prefix"):  # the boundary before the overlap is still known
        await store.commit(fence, from_len=1, from_hash=9, token_ids=[2], new_hash=9)
    assert await commit(store, fence, [1], [2, 3, 4, 5, 6]) == 6  # same boundary again
    assert await commit(store, fence, [1, 2], [3, 4, 5, 6, 7]) == 7  # inside an older commit
    assert await log_of(store, fence) == [1, 2, 3, 4, 5, 6, 7]


async def refused(store: SessionStore, fence: Fence, match: str, **commit: object) -> None:
    before = await log_of(store, fence)
    with pytest.raises(Fenced, match=match):
        await store.commit(fence, **commit)  # type: ignore[arg-type]
    assert await log_of(store, fence) == before


async def test_other_bytes_gap_and_prefix_are_fenced(store: SessionStore) -> None:
    fence = await create(store)
    await begin(store, fence, [1, 2])
    await commit(store, fence, [1, 2], [3, 4])
    good = {"from_len": 2, "from_hash": chain_hash(0, [1, 2])}
    after = {"from_len": 4, "from_hash": chain_hash(0, [1, 2, 3, 4])}
    await refused(store, fence, "other tokens", **good, token_ids=[3, 9, 5], new_hash=77)
    await refused(store, fence, "other tokens", **good, token_ids=[9], new_hash=77)
    await refused(store, fence, "prefix", **good, token_ids=[3, 4], new_hash=77)
    await refused(
        store, fence, "prefix", **{**good, "from_hash": 5}, token_ids=[3, 4, 5], new_hash=77
    )
    await refused(store, fence, "prefix", **{**after, "from_hash": 5}, token_ids=[5], new_hash=77)
    await refused(store, fence, "prefix", **after, token_ids=[], new_hash=77)
    with pytest.raises(DataLoss, match="has 4 of the 5 tokens"):  # its owner knows of more
        await store.commit(fence, **{**after, "from_len": 5}, token_ids=[5], new_hash=7)
    assert await log_of(store, fence) == [1, 2, 3, 4]


async def test_hashes_that_a_double_cannot_hold_are_told_apart(store: SessionStore) -> None:
    fence = await create(store)
    await store.begin(
        fence,
        from_len=0,
        from_hash=0,
        token_ids=[1],
        new_hash=2**64 - 1,
        generation=record("r", 0, 1),
    )
    with pytest.raises(Fenced):
        await store.commit(fence, from_len=1, from_hash=2**64 - 2, token_ids=[2], new_hash=1)
    assert (
        await store.commit(fence, from_len=1, from_hash=2**64 - 1, token_ids=[2], new_hash=1) == 2
    )


async def test_other_epoch_and_other_nonce_are_fenced(store: SessionStore) -> None:
    fence = await create(store)
    await begin(store, fence, [1])
    for stale in (
        replace(fence, epoch=fence.epoch + 1),
        replace(fence, owner_nonce=fence.owner_nonce ^ 2),
    ):
        with pytest.raises(Fenced):
            await commit(store, stale, [1], [2])
        with pytest.raises(Fenced):
            await begin(store, stale, [1], request_id="r2")
        with pytest.raises(Fenced):
            await store.renew(stale)
        with pytest.raises(Fenced):
            await store.finish(stale, finish_reason=None, keep=True)
        with pytest.raises(Fenced):
            await store.delete(stale)
    assert await log_of(store, fence) == [1]


async def test_other_tenant_is_refused_and_learns_nothing(store: SessionStore) -> None:
    fence = await create(store, tenant="alice-secret")
    with pytest.raises(PermissionDenied) as denied:
        await store.take(fence.session_id, tenant="mallory", owner="o")
    with pytest.raises(PermissionDenied):
        await store.get(fence.session_id, tenant="mallory", include_tokens=True)
    assert "alice-secret" not in str(denied.value) and "demo" not in str(denied.value)
    await begin(store, fence, [1])  # still the owner


async def test_unknown_session_is_not_found(store: SessionStore) -> None:
    gone = Fence(new_session_id(), 1, 1)
    with pytest.raises(NotFound):
        await store.take(gone.session_id, tenant="alice", owner="o")
    with pytest.raises(NotFound):
        await commit(store, gone, [], [1])
    with pytest.raises(NotFound):
        await store.finish(gone, finish_reason=None, keep=False)
    await store.delete(gone)


async def test_begin_may_be_repeated_but_not_reused(store: SessionStore) -> None:
    fence = await create(store)
    for _ in range(2):
        assert await begin(store, fence, [1, 2]) == 2
    await commit(store, fence, [1, 2], [3])
    assert await begin(store, fence, [1, 2]) == 3
    with pytest.raises(AlreadyRunning):  # same id, other prompt
        await begin(store, fence, [1, 7])
    with pytest.raises(AlreadyRunning):  # another request
        await begin(store, fence, [4], prefix=[1, 2, 3], request_id="r2")
    await store.finish(fence, finish_reason=FinishReason.EOS, keep=True)
    with pytest.raises(AlreadyRunning):  # finished
        await begin(store, fence, [1, 2])
    with pytest.raises(Fenced):  # another prefix of that length
        await begin(store, fence, [4], prefix=[1, 2, 8], request_id="r2")
    with pytest.raises(Fenced):  # not at the end, even with the same tokens
        await begin(store, fence, [3, 4], prefix=[1, 2], request_id="r2")
    assert await begin(store, fence, [4], prefix=[1, 2, 3], request_id="r2") == 4
    session = await store.get(fence.session_id, tenant="alice", include_tokens=True)
    assert session.token_ids == (1, 2, 3, 4)
    assert session.generations == (
        replace(record("r1", 0, 2), outcome=Outcome(FinishReason.EOS)),
        record("r2", 3, 4),
    )


async def test_begin_checks_its_record(store: SessionStore) -> None:
    fence = await create(store)
    with pytest.raises(InvalidArgument, match="prompt_end"):
        await store.begin(
            fence,
            from_len=0,
            from_hash=0,
            token_ids=[1],
            new_hash=chain_hash(0, [1]),
            generation=record("r", 0, 2),
        )
    with pytest.raises(InvalidArgument, match="request_id"):
        await begin(store, fence, [1], request_id="")
    with pytest.raises(InvalidArgument, match="token_ids"):
        await store.commit(fence, from_len=0, from_hash=0, token_ids=[2**32], new_hash=0)


async def test_new_tokens_need_a_running_generation(store: SessionStore) -> None:
    fence = await create(store)
    await begin(store, fence, [1])
    await commit(store, fence, [1], [2])
    await store.finish(fence, finish_reason=None, keep=False)
    assert await commit(store, fence, [1], [2]) == 2  # a late copy is harmless
    with pytest.raises(Fenced, match="no generation"):
        await commit(store, fence, [1, 2], [3])
    session = await store.get(fence.session_id, tenant="alice")
    assert session.ttl_s <= 60  # and did not lengthen the linger


async def test_running_session_is_taken_only_after_its_lease(server: Server) -> None:
    async with open_store(server.url, lease_s=0.3) as store:
        old = await create(store)
        await begin(store, old, [1])
        with pytest.raises(AlreadyRunning, match="lease"):
            await store.take(old.session_id, tenant="alice", owner="orchestrator-2")
        await asyncio.sleep(0.2)
        await store.renew(old)
        await asyncio.sleep(0.2)
        with pytest.raises(AlreadyRunning):
            await store.take(old.session_id, tenant="alice", owner="orchestrator-2")
        await commit(store, old, [1], [2])
        await asyncio.sleep(0.35)
        taken = await store.take(old.session_id, tenant="alice", owner="orchestrator-2")
        assert taken.fence.epoch == old.epoch + 1 and taken.fence.owner_nonce != old.owner_nonce
        assert taken.token_ids == (1, 2) and taken.running == "r1"
        assert taken.owner == "orchestrator-2" and taken.generations == (record("r1", 0, 1),)
        with pytest.raises(AlreadyRunning):  # the new owner has a lease of its own
            await store.take(old.session_id, tenant="alice", owner="orchestrator-3")
        for late in ([1], [1, 2]):
            with pytest.raises(Fenced, match=f"epoch {old.epoch + 1}"):
                await commit(store, old, late, [2])
        assert await commit(store, taken.fence, [1, 2], [3]) == 3


async def test_owner_goes_on_after_its_lease_if_nobody_took_over(server: Server) -> None:
    async with open_store(server.url, lease_s=0.05) as store:
        fence = await create(store)
        await begin(store, fence, [1])
        await asyncio.sleep(0.1)
        assert await commit(store, fence, [1], [2]) == 2


async def test_taker_begins_anew_or_resumes_the_same_request(server: Server) -> None:
    async with open_store(server.url, lease_s=0.05) as store:
        fence = await create(store)
        await begin(store, fence, [1])
        await commit(store, fence, [1], [2])
        await asyncio.sleep(0.1)
        second = (await store.take(fence.session_id, tenant="alice", owner="o2")).fence
        assert await begin(store, second, [1]) == 2  # the same request, resubmitted
        with pytest.raises(AlreadyRunning):
            await begin(store, second, [3], prefix=[1, 2], request_id="r2")
        await asyncio.sleep(0.1)
        third = (await store.take(fence.session_id, tenant="alice", owner="o3")).fence
        assert await begin(store, third, [3], prefix=[1, 2], request_id="r2") == 3
        session = await store.get(fence.session_id, tenant="alice")
        assert [g.finish_reason for g in session.generations] == [None, None]
        assert session.running == "r2"


async def test_idle_session_goes_to_the_last_taker(store: SessionStore) -> None:
    first = await create(store)
    second = (await store.take(first.session_id, tenant="alice", owner="o2")).fence
    third = (await store.take(first.session_id, tenant="alice", owner="o3")).fence
    assert third.epoch == first.epoch + 2
    for stale in (first, second):
        with pytest.raises(Fenced):
            await begin(store, stale, [1])
    assert await begin(store, third, [1]) == 1


async def test_finish_sets_the_life_left(server: Server, redis: Redis) -> None:
    async with open_store(server.url, session_ttl_s=500, linger_s=0.2) as store:
        fence = await create(store)
        await begin(store, fence, [1])
        await store.finish(fence, finish_reason=FinishReason.MAX_TOKENS, keep=True)
        kept = await store.get(fence.session_id, tenant="alice")
        assert 499 < kept.ttl_s <= 500 and kept.running is None and kept.lease_s == 0
        assert kept.generations[0].finish_reason is FinishReason.MAX_TOKENS
        ttls = {await redis.pexpiretime(k) for k in await redis.keys(f"*{fence.session_id}*")}
        assert len(ttls) == 1  # both keys end in the same millisecond
        await store.finish(fence, finish_reason=FinishReason.EOS, keep=False)
        again = await store.get(fence.session_id, tenant="alice")
        assert again.generations[0].finish_reason is FinishReason.MAX_TOKENS
        await asyncio.sleep(0.3)
        with pytest.raises(NotFound):
            await commit(store, fence, [1], [2])
        assert await redis.keys(f"*{fence.session_id}*") == []


@pytest.mark.parametrize("lease_s", [1, 100])
async def test_a_late_renewal_does_not_bring_an_ended_session_back_to_a_long_life(
    server: Server, lease_s: float
) -> None:
    async with open_store(server.url, session_ttl_s=500, linger_s=10, lease_s=lease_s) as store:
        fence = await create(store)
        await begin(store, fence, [1])
        await store.renew(fence)
        await store.finish(fence, finish_reason=FinishReason.EOS, keep=False)
        await store.renew(fence)
        assert (await store.get(fence.session_id, tenant="alice")).ttl_s <= 10
        await store.finish(fence, finish_reason=FinishReason.EOS, keep=True)
        await store.renew(fence)
        assert (await store.get(fence.session_id, tenant="alice")).ttl_s > 490


async def test_every_key_has_an_end(store: SessionStore, redis: Redis) -> None:
    fence = await create(store)
    await begin(store, fence, [1])
    await commit(store, fence, [1], [2])
    await store.take((await create(store)).session_id, tenant="alice", owner="o")
    keys = await redis.keys("outrider:*")
    assert keys and all([await redis.pttl(key) > 0 for key in keys])


async def test_delete_removes_every_key(store: SessionStore, redis: Redis) -> None:
    fence = await create(store)
    await begin(store, fence, [1])
    assert len(await redis.keys(f"outrider:{{{fence.session_id}}}:*")) == 3
    await store.delete(fence)
    assert await redis.keys(f"*{fence.session_id}*") == []
    await store.delete(fence)


@pytest.mark.parametrize("evicted", ["meta", "log"])
async def test_evicted_key_ends_the_session(
    store: SessionStore, redis: Redis, evicted: str
) -> None:
    fence = await create(store)
    await begin(store, fence, [1])
    await redis.delete(f"outrider:{{{fence.session_id}}}:{evicted}")
    with pytest.raises(NotFound):
        await commit(store, fence, [1], [2])
    with pytest.raises(NotFound):
        await store.take(fence.session_id, tenant="alice", owner="o")
    with pytest.raises(NotFound):
        await store.get(fence.session_id, tenant="alice")
    await store.delete(fence)
    assert await redis.keys(f"*{fence.session_id}*") == []


async def test_script_flush_is_survived(store: SessionStore, redis: Redis) -> None:
    fence = await create(store)
    await begin(store, fence, [1])
    await redis.script_flush()
    assert await commit(store, fence, [1], [2]) == 2


async def test_full_memory_changes_nothing_and_finish_still_works(
    store: SessionStore, redis: Redis
) -> None:
    fence = await create(store)
    await begin(store, fence, [1])
    await commit(store, fence, [1], [2])
    await redis.config_set("maxmemory", 1)
    try:
        with pytest.raises(ResourceExhausted, match="maxmemory"):
            await commit(store, fence, [1, 2], [3])
        with pytest.raises(ResourceExhausted):
            await create(store)
        assert await log_of(store, fence) == [1, 2]
        assert await commit(store, fence, [1], [2]) == 2  # durable already: needs no memory
        await store.renew(fence)
        await store.finish(fence, finish_reason=FinishReason.EOS, keep=False)
        taken = await store.take(fence.session_id, tenant="alice", owner="o2")
        with pytest.raises(ResourceExhausted):
            await begin(store, taken.fence, [3], prefix=[1, 2], request_id="r2")
        after = await store.get(fence.session_id, tenant="alice")
        assert after.ttl_s <= 60 and after.running is None and len(after.generations) == 1
        await store.delete(taken.fence)
    finally:
        await redis.config_set("maxmemory", 0)


@pytest.mark.parametrize("seed", range(6))
async def test_interleaved_owners_never_lose_or_alter_a_token(server: Server, seed: int) -> None:
    """Two owners commit, repeat, overlap and take over at random; the log is what was acknowledged.

    Each owner believes its own log: what it took, then what was acknowledged to it. Tokens are
    drawn afresh, so that two owners never happen to write the same.
    """
    rng = random.Random(seed)
    seen = {"acknowledged": 0, "repeated": 0, "fenced": 0, "taken": 0}
    async with open_store(server.url, lease_s=0.001) as store:
        fence = await create(store)
        await begin(store, fence, [7])
        truth = [7]
        owners: list[tuple[Fence, list[int]]] = [(fence, [7]), (replace(fence, epoch=99), [7])]
        for _ in range(250):
            who = rng.randrange(2)
            mine, log = owners[who]
            step = rng.random()
            if step < 0.08:
                await asyncio.sleep(0.002)
                session = await store.take(fence.session_id, tenant="alice", owner=f"o{who}")
                assert list(session.token_ids) == truth
                owners[who] = (session.fence, list(truth))
                seen["taken"] += 1
                continue
            start = len(log) if step < 0.6 else rng.randrange(len(log) + 1)
            fresh = [rng.randrange(2**32) for _ in range(rng.randrange(4))]
            tokens = log[start:] + fresh
            try:
                durable = await commit(store, mine, log[:start], tokens)
            except Fenced:
                assert mine.epoch != session_epoch(owners)
                seen["fenced"] += 1
                continue
            log = log + fresh
            owners[who] = (mine, log)
            truth = log
            assert durable == len(truth)
            seen["acknowledged" if fresh else "repeated"] += 1
        assert await log_of(store, fence) == truth
    assert min(seen.values()) > 5, seen


def session_epoch(owners: list[tuple[Fence, list[int]]]) -> int:
    """Epoch of the owner that holds the session; 99 is an owner that never did."""
    return max(fence.epoch for fence, _ in owners if fence.epoch != 99)
