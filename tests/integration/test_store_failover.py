"""A store whose primary is replaced: sentinels are followed, what was stored is gone on with, and
what a replica had not got yet is missed."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.errors import (
    DataLoss,
    Fenced,
    InvalidArgument,
    NotFound,
    OutriderError,
    Unavailable,
)
from outrider.types import Fence
from services.orchestrator.store import SessionStore
from store_fleets import (
    SERVICE,
    ask,
    promote,
    running_pair,
    running_sentinels,
    wait,
)
from store_servers import (
    Server,
    begin,
    commit,
    create,
    free_port,
    log_of,
    open_store,
    queue_of,
    running_link,
)

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]


def sentinel_url(sentinels: list[Server], *, credentials: str = "", query: str = "") -> str:
    hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in sentinels)
    return f"redis+sentinel://{credentials}{hosts}/{SERVICE}/0{query}"


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Server], Server]]:
    """Sentinels, and the replica that takes over; what was the primary is dead afterwards."""
    folder = tmp_path_factory.mktemp("sentinels")
    password = ("--requirepass", "hunter2", "--masterauth", "hunter2")
    with running_pair(folder, *password, password="hunter2") as (first, _):
        lines = (f"sentinel auth-pass {SERVICE} hunter2", "requirepass hunter3")
        with running_sentinels(folder, first, *lines, password="hunter3") as sentinels:
            yield sentinels, first


async def test_passwords_may_stand_in_files(
    watched: tuple[list[Server], Server], tmp_path: Path
) -> None:
    files = {}
    for name, password in (("password_file", "hunter2"), ("sentinel_password_file", "hunter3")):
        files[name] = str(tmp_path / name)
        (tmp_path / name).write_text(password + "\n")
    url = sentinel_url(watched[0])
    async with open_store(url, **files) as store:
        await begin(store, await create(store), [1])
    # Sentinels ask for it, and nobody else has one.
    with pytest.raises(OutriderError):
        await SessionStore.connect(url, session_ttl_s=60, password_file=files["password_file"])
    for other in (sentinel_url(watched[0], query="?sentinel_password=x"), "redis://h"):
        with pytest.raises(InvalidArgument) as refused:
            await SessionStore.connect(
                other, session_ttl_s=60, sentinel_password_file=files["sentinel_password_file"]
            )
        assert refused.value.field == "store_sentinel_password_file"


async def test_sentinels_lead_to_the_new_primary(watched: tuple[list[Server], Server]) -> None:
    sentinels, first = watched
    # Nobody answers at the first address; the others know.
    url = sentinel_url(
        sentinels, credentials=":hunter2@", query="?sentinel_password=hunter3"
    ).replace("@", f"@127.0.0.1:{free_port()},")
    async with open_store(url, command_timeout_s=1) as store:
        async with queue_of(store, retry_for_s=20) as (fence, queue):
            queue.append([2])
            await queue.drain()
            wait(lambda: ask(first, "WAIT", 1, 1000) == 1, "the replica has it")
            first.stop()
            queue.append([3])
            await asyncio.sleep(0.2)
            assert queue.durable_len == 2
            await queue.drain()
            assert await log_of(store, fence) == [1, 2, 3]
            assert store.tally.commit_retries > 0


async def test_a_primary_that_was_demoted_is_left(tmp_path: Path) -> None:
    """It lives, and refuses to write."""
    with running_pair(tmp_path) as (first, second):
        with running_sentinels(tmp_path, first, count=1) as sentinels:
            async with open_store(sentinel_url(sentinels), command_timeout_s=1) as store:
                async with queue_of(store, retry_for_s=20) as (fence, queue):
                    assert ask(first, "WAIT", 1, 1000) == 1
                    promote(second)
                    ask(first, "REPLICAOF", "127.0.0.1", second.port)
                    ask(sentinels[0], "SENTINEL", "REMOVE", SERVICE)
                    ask(sentinels[0], "SENTINEL", "MONITOR", SERVICE, "127.0.0.1", second.port, 1)
                    queue.append([2])
                    await queue.drain()
                    assert await log_of(store, fence) == [1, 2]


async def test_a_name_that_leads_elsewhere_now_is_followed(tmp_path: Path) -> None:
    """Without sentinels: an address, as a managed Redis has, behind which the primary changes."""
    with running_pair(tmp_path) as (first, second):
        async with running_link(first) as link:
            async with open_store(link.url, command_timeout_s=1) as store:
                async with queue_of(store, retry_for_s=20) as (fence, queue):
                    assert ask(first, "WAIT", 1, 1000) == 1
                    promote(second)
                    ask(first, "REPLICAOF", "127.0.0.1", second.port)
                    link.target_port = second.port  # The connections that stand lead to the first.
                    queue.append([2])
                    await queue.drain()
                    assert await log_of(store, fence) == [1, 2]


async def test_nobody_knows_the_primary(tmp_path: Path) -> None:
    with running_pair(tmp_path) as (first, _):
        with running_sentinels(tmp_path, first, count=1) as sentinels:
            url = sentinel_url(sentinels).replace(SERVICE, "another")
            with pytest.raises(Unavailable, match="no sentinel tells where the primary of another"):
                await SessionStore.connect(url, session_ttl_s=60)
    with pytest.raises(Unavailable, match="no sentinel"):
        await SessionStore.connect(f"redis+sentinel://127.0.0.1:{free_port()}/s", session_ttl_s=60)


# What a replica had not got


async def test_commits_that_a_replica_lacks_are_missed_not_doubled(tmp_path: Path) -> None:
    with running_pair(tmp_path) as (first, second):
        async with running_link(first) as link, open_store(link.url) as store:
            async with queue_of(store) as (fence, queue):
                assert ask(first, "WAIT", 1, 1000) == 1
                promote(second)  # It hears no more of the first.
                queue.append([2, 3])
                await queue.drain()
                first.stop()
                link.target_port = second.port
                queue.append([4])
                with pytest.raises(DataLoss, match="has 1 of the 3 tokens"):
                    await queue.drain()
                assert await log_of(store, fence) == [1]


async def test_a_takeover_that_a_replica_lacks_cannot_be_written_over(tmp_path: Path) -> None:
    """The epoch is drawn again, by another owner: the former ones' writes are refused."""
    with running_pair(tmp_path) as (first, second):
        async with running_link(first) as link, open_store(link.url) as store:
            fence = await create(store)
            await begin(store, fence, [1])
            assert ask(first, "WAIT", 1, 1000) == 1
            promote(second)

            async def take(owner: str) -> Fence:
                taken = await store.resume(
                    fence.session_id, tenant="alice", owner=owner, request_id="r1"
                )
                return taken.fence

            lost = await take("o2")
            await commit(store, lost, [1], [2])
            first.stop()
            link.target_port = second.port
            again = await take("o3")
            assert again.epoch == lost.epoch and again.owner_nonce != lost.owner_nonce
            for former in (fence, lost):
                with pytest.raises(Fenced):
                    await commit(store, former, [1], [5])
            await commit(store, again, [1], [6])
            assert await log_of(store, again) == [1, 6]


async def test_a_session_that_a_replica_lacks_is_not_found(tmp_path: Path) -> None:
    with running_pair(tmp_path) as (first, second):
        async with running_link(first) as link, open_store(link.url) as store:
            promote(second)
            async with queue_of(store) as (_, queue):
                first.stop()
                link.target_port = second.port
                queue.append([2])
                with pytest.raises(NotFound):
                    await queue.drain()


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("redis+sentinel://:hunter2@h:1", "names no service"),
        ("redis+sentinel://:hunter2@h:1/s/x", "no number of a database"),
        ("redis+sentinel://:hunter2@h:1/s?retries=3", "other options"),
        ("redis+cluster://:hunter2@h:1,/0", "cannot be read"),
        ("redis+cluster://:hunter2@h:1/3", "names a database"),
        ("redis+other://:hunter2@h:1", "another scheme"),
    ],
)
async def test_a_url_of_several_servers_that_does_not_do_is_refused(url: str, fault: str) -> None:
    with pytest.raises(InvalidArgument, match=fault) as refused:
        await SessionStore.connect(url, session_ttl_s=60)
    assert "hunter2" not in str(refused.value)
