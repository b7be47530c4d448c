"""Sessions go where their prefix is, though another orchestrator placed it there; and a caller's
traces are removed from everywhere. All users of both stores have the rights that the docs name, and
no more."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from redis import Redis

from outrider.kv_store.connection import READER_RIGHTS
from outrider.kv_store.connection import RIGHTS as WORKER_RIGHTS
from outrider.kv_store.names import caller_digest
from scripted_workers import Parts, Rig, Stream, until
from services.orchestrator.store_client import RIGHTS
from store_fleets import pause, resume
from store_servers import Server, running_server
from test_resume import callers

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(120),
    pytest.mark.slow,
]

PROMPTS = [f"{n} is the number of this prompt, which is long enough to matter. " * 4
           for n in range(6)]  # fmt: skip
SHORT: dict[str, Any] = {"max_tokens": 4, "num_speculative_tokens": 0, "ignore_eos": True}


class Scene:
    """Two targets that keep KV blocks in a store, and a session store, both with few rights."""

    def __init__(self, sessions: Server, blocks: Server, targets: tuple[str, str]) -> None:
        self.sessions, self.blocks, self.targets = sessions, blocks, targets

    @property
    def store_url(self) -> str:
        return f"redis://orchestrator:pw@127.0.0.1:{self.sessions.port}/0"

    @property
    def index_url(self) -> str:
        return f"redis://orchestrator:pw@127.0.0.1:{self.blocks.port}/0"

    def keys(self, pattern: str) -> set[bytes]:
        with Redis.from_url(self.blocks.url, username="admin", password="pw") as redis:
            return set(redis.scan_iter(match=pattern, count=1000))


def _users(folder: Path, **rules: str) -> tuple[str, str]:
    lines = ["user default off", "user admin on >pw ~* &* +@all"]
    lines += [f"user {name} on >pw resetchannels -@all {rule}" for name, rule in rules.items()]
    (folder / "users").write_text("\n".join(lines) + "\n")
    return "--aclfile", str(folder / "users")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def scene(
    parts: Parts, tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Scene]:
    one, other = tmp_path_factory.mktemp("sessions"), tmp_path_factory.mktemp("blocks")
    sessions = _users(one, orchestrator=f"~outrider:* {RIGHTS}")
    blocks = _users(
        other,
        worker=f"~outrider:kv:* {WORKER_RIGHTS}",
        orchestrator=f"~outrider:kv:* {READER_RIGHTS}",
    )
    with (
        running_server("valkey", one, *sessions) as store,
        running_server("valkey", other, *blocks) as kv_store,
    ):
        url = f"redis://worker:pw@127.0.0.1:{kv_store.port}/0"
        settings = {"kv_store_url": url, "kv_restore": "always", "kv_memory": "16MiB"}
        model = tiny_models["target"]
        async with (
            parts.worker("target", model, **settings) as (_, first),
            parts.worker("target", model, **settings) as (_, second),
        ):
            yield Scene(store, kv_store, (first, second))


@contextlib.asynccontextmanager
async def told(scene: Scene, parts: Parts, *targets: str, **settings: Any) -> AsyncIterator[Rig]:
    values = {"kv_store_url": scene.index_url, "kv_index_wait_s": 5.0, **settings}
    async with parts.orchestrator(
        scene.store_url, targets=targets or scene.targets, **values
    ) as rig:
        yield rig


async def placed(rig: Rig, scene: Scene, prompts: list[str]) -> list[str]:
    """The target of each, one after the other: load is nowhere."""
    where = []
    for prompt in prompts:
        done = await rig.complete(prompt, keep_session=True, **SHORT)
        infos = [await rig.info(target) for target in scene.targets]
        where += [t for t, info in zip(scene.targets, infos, strict=True) if info.sessions]
        await rig.client.delete_session(done.session_id)

        async def idle() -> bool:
            return not any([(await rig.info(target)).sessions for target in scene.targets])

        await until(idle, "no session is anywhere")
    return where


async def test_a_prefix_is_found_by_an_orchestrator_that_never_saw_it(
    scene: Scene, parts: Parts
) -> None:
    """Each prompt has been at one target; which, rendezvous hashing would say for half of them."""
    first, second = scene.targets
    for target, prompts in ((first, PROMPTS[:3]), (second, PROMPTS[3:])):
        async with parts.orchestrator(scene.store_url, targets=[target]) as rig:
            await rig.complete_all(prompts, **SHORT)

    async def known() -> bool:
        return len(scene.keys("outrider:kv:index:*")) >= 7 * len(PROMPTS)

    await until(known, "the index has the prompts")
    expected = [first] * 3 + [second] * 3
    async with told(scene, parts) as rig:
        assert await placed(rig, scene, PROMPTS) == expected
    async with told(scene, parts, kv_store_url="") as rig:  # Nobody tells it.
        assert await placed(rig, scene, PROMPTS) != expected


async def test_a_caller_who_purges_leaves_nothing_in_any_store(
    scene: Scene, parts: Parts, tmp_path: Path
) -> None:
    stack = Rig("", None, scene.store_url, scene.targets)  # type: ignore[arg-type]
    async with callers(stack, parts, tmp_path, kv_store_url=scene.index_url) as (alice, bob):
        for prompt in PROMPTS[:2]:
            await alice.complete(prompt, keep_session=True, **SHORT)
        [kept] = [c async for c in bob.generate(PROMPTS[0] + "of bob's")][-1:]
        blocks = {name: f"outrider:kv:block:*:{caller_digest(name)}:*" for name in ("alice", "bob")}

        async def written() -> bool:
            return all(len(scene.keys(blocks[name])) >= 7 for name in blocks)

        await until(written, "both have blocks in the store")
        index = len(scene.keys("outrider:kv:index:*"))
        stream = await Stream(alice, PROMPTS[2], max_tokens=450, ignore_eos=True).reaches(20)
        purged = await alice.client.purge_sessions()
        assert purged.sessions == 3 and purged.kv_blocks >= 2 * 7
        assert not isinstance(await stream.error(), type(None))
        assert (await alice.client.list_sessions()).sessions == ()

        async def settled() -> bool:
            infos = [await alice.info(target) for target in scene.targets]
            return not any(info.sessions for info in infos)

        await until(settled, "no session is anywhere")
        await alice.client.purge_sessions()  # Of blocks that were on their way meanwhile.
        assert not scene.keys(blocks["alice"])
        assert len(scene.keys(blocks["bob"])) >= 7 and kept.session_id
        assert 0 < len(scene.keys("outrider:kv:index:*")) < index
        with Redis.from_url(scene.sessions.url, username="admin", password="pw") as redis:

            def of_alice() -> list[bytes]:
                tenants = [(key, redis.hget(key, "tenant")) for key in redis.keys("*:meta")]
                return [key for key, tenant in tenants if tenant == b"alice"]

            assert of_alice() == []


async def test_a_request_does_not_wait_for_an_index_that_hangs(scene: Scene, parts: Parts) -> None:
    async with told(scene, parts, kv_index_wait_s=0.02) as rig:
        await rig.complete("warm", **SHORT)
        usual = (await rig.complete(PROMPTS[0], **SHORT)).total_s
        pause(scene.blocks)
        try:
            done = [await rig.complete(prompt, **SHORT) for prompt in PROMPTS]
        finally:
            resume(scene.blocks)
        # Workers may wait for it as long as computing would take.
        assert sorted(d.total_s for d in done)[3] < usual + 0.5
