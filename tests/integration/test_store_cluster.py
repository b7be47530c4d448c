"""Sessions in a Redis Cluster: a session's keys in one slot, which may move while it is written."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from redis import Redis
from redis.crc import key_slot

from outrider.errors import FailedPrecondition, Unavailable
from outrider.types import Fence, chain_hash, new_session_id
from services.orchestrator.store import SessionStore
from services.orchestrator.store_commit import CommitQueue
from store_fleets import Fleet, ask, caught_up, running_cluster, wait
from store_servers import Server, begin, commit, create, log_of, open_store

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def store(fleet: Fleet) -> AsyncIterator[SessionStore]:
    async with open_store(fleet.url) as opened:
        yield opened


def id_at(fleet: Fleet, node: Server) -> str:
    """A session id whose slot this node has."""
    while True:
        session_id = new_session_id()
        if fleet.owner(session_id) is node:
            return session_id


def queue_of(store: SessionStore, fence: Fence, log: list[int]) -> CommitQueue:
    return CommitQueue(store, fence, durable_len=len(log), prefix_hash=chain_hash(0, log))


async def test_sessions_are_spread_and_each_has_one_slot(fleet: Fleet, store: SessionStore) -> None:
    fences = [await create(store) for _ in range(24)]
    for fence in fences:
        await begin(store, fence, [1])
        assert await commit(store, fence, [1], [2, 3]) == 3
        await store.index.reserve("alice", fence.session_id, ttl_s=60, limit=0)
    assert {fleet.owner(fence.session_id).port for fence in fences} == {
        node.port for node in fleet.primaries
    }
    assert set(await store.index.members("alice")) >= {fence.session_id for fence in fences}
    for fence in fences:
        assert await log_of(store, fence) == [1, 2, 3]
        keys = ask(fleet.owner(fence.session_id), "KEYS", f"*{{{fence.session_id}}}*")
        assert len(keys) == 3
        await store.delete(fence)
    for node in fleet.primaries:
        assert not ask(node, "KEYS", "outrider:{*")


async def test_a_node_named_alone_says_what_to_do(fleet: Fleet) -> None:
    async with open_store(fleet.primaries[0].url) as alone:
        with pytest.raises(FailedPrecondition, match=r"redis\+cluster://"):
            await create(alone, id_at(fleet, fleet.primaries[1]))


async def test_a_session_is_written_while_its_slot_moves(fleet: Fleet, store: SessionStore) -> None:
    """MOVED and ASK, and TRYAGAIN while its keys are on both nodes."""
    source, target = fleet.primaries[1], fleet.primaries[2]
    session_id = id_at(fleet, source)
    fence = await create(store, session_id)
    await begin(store, fence, [1])  # Its notes have no width: that key is an empty one.
    slot = key_slot(f"{{{session_id}}}".encode())
    keys = ask(source, "CLUSTER", "GETKEYSINSLOT", slot, 10)
    assert len(keys) == 3
    ask(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", fleet.id_of(source))
    ask(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", fleet.id_of(target))
    queue = queue_of(store, fence, [1])

    queue.append([2])  # Nothing has moved yet.
    await queue.drain()
    migrate = ("MIGRATE", "127.0.0.1", target.port, "", 0, 2000, "KEYS")
    ask(source, *migrate, keys[0])
    torn = asyncio.create_task(commit(store, fence, [1, 2], [3]))  # Neither node can run it.
    await asyncio.sleep(0.1)
    assert not torn.done()
    ask(source, *migrate, *keys[1:])
    assert await torn == 3  # ASK
    queue.append([3])  # It is there already.
    await queue.drain()
    others = [create(store), log_of(store, fence)]
    await asyncio.gather(*others)  # ASKING holds for one command alone, of many at once.
    for node in (target, source, *fleet.nodes):
        with contextlib.suppress(Exception):  # A replica takes no such command.
            ask(node, "CLUSTER", "SETSLOT", slot, "NODE", fleet.id_of(target))
    queue.append([4])  # MOVED
    await queue.drain()
    assert await log_of(store, fence) == [1, 2, 3, 4]
    assert fleet.owner(session_id) is target
    await queue.close()
    await store.delete(fence)


async def test_nobody_has_the_slots(tmp_path: Path) -> None:
    from store_servers import free_port, running_server

    options = ("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    with running_server("valkey", tmp_path, *options) as node:
        async with open_store(f"redis+cluster://127.0.0.1:{node.port}") as store:
            with pytest.raises(Unavailable, match="no node has slot"):
                await create(store)


async def test_the_replica_of_a_node_that_dies_takes_its_sessions(
    fleet: Fleet, store: SessionStore
) -> None:
    """Last of all: the first node does not come back."""
    dying, staying = fleet.primaries[0], fleet.primaries[1]
    fence = await create(store, id_at(fleet, dying))
    await begin(store, fence, [1])
    elsewhere = await create(store, id_at(fleet, staying))
    await begin(store, elsewhere, [1])
    caught_up(fleet.replica)
    with Redis.from_url(dying.url) as redis:
        redis.execute_command("WAIT", 1, 2000)
    queue = queue_of(store, fence, [1])
    dying.stop()
    queue.append([2])
    await asyncio.sleep(0.1)
    assert queue.durable_len == 1
    await queue.drain()
    assert await log_of(store, fence) == [1, 2]
    assert fleet.owner(fence.session_id) is fleet.replica
    wait(fleet.is_whole, "the cluster is whole again")
    assert await commit(store, elsewhere, [1], [2]) == 2
    await queue.close()
