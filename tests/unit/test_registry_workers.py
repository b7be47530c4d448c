"""Which workers serve which model, as they come, go, restart, drain and do not fit."""

import asyncio
import contextlib
import time

import pytest
from test_discovery_sources import Script, until
from worker_fakes import FakeWorker

from outrider.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from outrider.rpc.channel import ChannelSecurity
from services.orchestrator import models as models_module
from services.orchestrator.discovery.endpoints import Endpoint, Standing, StaticSource
from services.orchestrator.models import ModelRegistry


@contextlib.asynccontextmanager
async def serving(*workers: FakeWorker):
    async with contextlib.AsyncExitStack() as stack:
        for worker in workers:
            await stack.enter_async_context(worker)
        yield workers


def static(*workers: FakeWorker) -> list[StaticSource]:
    return [StaticSource(worker.address) for worker in workers]


@contextlib.asynccontextmanager
async def registry_of(targets, drafts=(), *, connect: bool = True, timeout_s: float = 5.0):
    registry = ModelRegistry(list(targets), list(drafts), ChannelSecurity())
    try:
        if connect:
            await registry.connect(target_timeout_s=timeout_s, draft_timeout_s=0.5)
        yield registry
    finally:
        await registry.close()


def there(registry: ModelRegistry, name: str = "m") -> list[str]:
    return [w.address for w in registry.targets_of(registry.model(name)) if w.takes_sessions]


async def test_workers_are_learned_and_told_apart():
    async with serving(
        FakeWorker(),
        FakeWorker(model="n", model_fingerprint="f2"),
        FakeWorker(),
        FakeWorker("draft"),
    ) as (one, other, same, draft):
        async with registry_of(static(one, other, same), static(draft)) as registry:
            assert {model.name for model in registry.models} == {"m", "n"}
            assert there(registry) == [one.address, same.address]
            assert there(registry, "n") == [other.address]
            assert one.tokenizers + same.tokenizers == 1, "once for a model"
            assert registry.proposers(registry.model("m")) == ["draft", "ngram"]
            with pytest.raises(InvalidArgument):
                registry.model("")
            with pytest.raises(NotFound):
                registry.model("x")


async def test_targets_written_down_must_be_there_and_fit_at_the_start():
    with pytest.raises(InvalidArgument, match="target"):
        ModelRegistry([], [], ChannelSecurity())
    async with serving(FakeWorker(), FakeWorker(model_fingerprint="f2")) as (one, other):
        with pytest.raises(FailedPrecondition, match="fingerprint"):
            async with registry_of(static(one, other)):
                pass
        with pytest.raises(Unavailable, match="does not answer"):
            async with registry_of([*static(one), StaticSource("127.0.0.1:1")], timeout_s=0.3):
                pass
    async with serving(FakeWorker(protocol_min=7, protocol_max=8)) as (newer,):
        with pytest.raises(FailedPrecondition, match="protocol"):
            async with registry_of(static(newer)):
                pass
    async with serving(FakeWorker(), FakeWorker("draft", tokenizer_fingerprint="t2")) as (one, bad):
        with pytest.raises(FailedPrecondition, match="share a tokenizer"):
            async with registry_of(static(one), static(bad)):
                pass


async def test_of_targets_that_are_discovered_one_is_enough_and_misfits_are_refused():
    async with serving(
        FakeWorker(),
        FakeWorker(model_fingerprint="f2"),
        FakeWorker("draft", tokenizer_fingerprint="t2"),
    ) as (one, other, draft):
        targets, drafts = Script(), Script()
        targets.news.put_nowait((Endpoint(one.address), Endpoint("127.0.0.1:1")))
        drafts.news.put_nowait((Endpoint(draft.address),))
        async with registry_of([targets], [drafts]) as registry:
            assert there(registry) == [one.address]
            await until(lambda: registry.drafts.counters["refused"] == 1)
            assert registry.proposers(registry.model("m")) == ["ngram"]
            targets.news.put_nowait((Endpoint(one.address), Endpoint(other.address)))
            await until(lambda: registry.targets.counters["refused"] == 1)
            assert there(registry) == [one.address]
            await asyncio.sleep(0.3)
            assert registry.targets.counters["refused"] == 1, "once, not again and again"


async def test_without_any_target_the_start_fails_in_time():
    started = time.monotonic()
    with pytest.raises(Unavailable, match="no target"):
        async with registry_of([Script()], timeout_s=0.2):
            pass
    assert time.monotonic() - started < 2


async def test_workers_come_and_go_at_run_time():
    async with serving(FakeWorker(), FakeWorker(), FakeWorker("draft")) as (one, other, draft):
        targets, drafts = Script(), Script()
        targets.news.put_nowait((Endpoint(one.address),))
        drafts.news.put_nowait(())
        async with registry_of([targets], [drafts]) as registry:
            model = registry.model("m")
            changes = []
            registry.listen(lambda: changes.append(there(registry)))
            targets.news.put_nowait((Endpoint(one.address), Endpoint(other.address)))
            await until(lambda: there(registry) == [one.address, other.address])
            drafts.news.put_nowait((Endpoint(draft.address),))
            await until(lambda: registry.proposers(model) == ["draft", "ngram"])
            # One that is in use is let go with its last session.
            [first, _] = registry.targets.workers
            first.sessions = 1
            targets.news.put_nowait((Endpoint(other.address),))
            await until(lambda: there(registry) == [other.address])
            assert first.link.up and first in registry.targets_of(model)
            first.sessions = 0
            registry.targets.let_go()
            await until(lambda: not first.link.up)
            assert [one.address, other.address] in changes and changes[-1] == [other.address]


async def test_a_restarted_worker_is_another_one_and_looked_at_again():
    async with serving(FakeWorker(), FakeWorker()) as (one, other):
        async with registry_of(static(one, other)) as registry:
            [first, _] = registry.targets.workers
            before = first.incarnation
            await one.stop()
            await until(lambda: there(registry) == [other.address])
            assert first.incarnation == 0
            one.info.model_fingerprint = "f2"
            await one.start()
            await until(lambda: registry.targets.counters["refused"] == 1)
            assert there(registry) == [other.address]
            await one.stop()
            await until(lambda: not first.link.up)
            one.info.model_fingerprint = "f1"
            await one.start()
            await until(lambda: len(there(registry)) == 2)
            assert first.incarnation not in (0, before)


async def test_other_weights_are_taken_once_no_target_serves_the_old_ones(monkeypatch):
    monkeypatch.setattr(models_module, "_REPLACED_AFTER_S", 1.0)
    async with serving(FakeWorker(), FakeWorker(model_fingerprint="f2")) as (old, new):
        targets = Script()
        targets.news.put_nowait((Endpoint(old.address),))
        async with registry_of([targets]) as registry:
            before = registry.model("m")
            targets.news.put_nowait((Endpoint(old.address), Endpoint(new.address)))
            await until(lambda: registry.targets.counters["refused"] == 1)
            await old.stop()
            await until(lambda: not registry.targets_of(before))
            await new.stop()
            await new.start()
            await until(lambda: registry.targets.counters["refused"] == 2)
            await old.start()
            await until(lambda: there(registry) == [old.address])
            await asyncio.sleep(1.2)
            assert registry.model("m") is before, "it was away for a moment only"
            await old.stop()
            await until(lambda: there(registry) == [new.address])
            assert registry.model("m").info.model_fingerprint == "f2"
            assert registry.targets_of(before) == [], "sessions of the old ones find none"


async def test_a_draft_that_was_there_first_is_judged_when_a_model_is():
    async with serving(
        FakeWorker(), FakeWorker("draft"), FakeWorker("draft", tokenizer_fingerprint="x")
    ) as (
        target,
        draft,
        bad,
    ):
        targets, drafts = Script(), Script()
        drafts.news.put_nowait((Endpoint(draft.address), Endpoint(bad.address)))
        async with registry_of([targets], [drafts], connect=False) as registry:
            connecting = asyncio.create_task(
                registry.connect(target_timeout_s=5, draft_timeout_s=0.5)
            )
            await until(lambda: len(registry.drafts.workers) == 2)
            await until(lambda: all(w.link.up for w in registry.drafts.workers))
            assert not any(worker.usable for worker in registry.drafts.workers)
            targets.news.put_nowait((Endpoint(target.address),))
            await connecting
            assert [w.address for w in registry.drafts_of(registry.model("m"))] == [draft.address]
            assert registry.drafts.counters["refused"] == 1


async def test_one_worker_at_two_addresses_is_one():
    async with serving(FakeWorker()) as (one,):
        port = one.address.rpartition(":")[2]
        async with registry_of(
            [StaticSource(one.address), StaticSource(f"localhost:{port}")]
        ) as registry:
            await until(lambda: all(worker.usable for worker in registry.targets.workers))
            assert len(registry.targets_of(registry.model("m"))) == 1


async def test_a_worker_that_says_it_drains_takes_no_sessions():
    async with serving(FakeWorker(), FakeWorker(watches=False)) as (one, older):
        async with registry_of(static(one, older)) as registry:
            [first, second] = registry.targets.workers
            await until(lambda: first.link.vitals is not None)
            assert first.pass_s(time.monotonic()) == 0.001
            assert second.link.vitals is None, (
                "an older worker cannot tell, and serves all the same"
            )
            one.tell(draining=True)
            await until(lambda: there(registry) == [older.address])
            assert first.leaving and first in registry.targets_of(registry.model("m"))
            await one.stop()
            await until(lambda: first.link.vitals is None)
            one.tell()
            await one.start()
            await until(lambda: len(there(registry)) == 2)
            await until(lambda: first.link.vitals is not None)


async def test_standings_of_discovery_are_honoured():
    async with serving(FakeWorker(), FakeWorker()) as (one, other):
        targets = Script()
        targets.news.put_nowait((Endpoint(one.address), Endpoint(other.address)))
        async with registry_of([targets]) as registry:
            await until(lambda: len(there(registry)) == 2)
            for standing in (Standing.RESTING, Standing.LEAVING):
                targets.news.put_nowait(
                    (Endpoint(one.address, "", standing), Endpoint(other.address))
                )
                await until(lambda: there(registry) == [other.address])
                assert registry.targets.workers[0].leaving == (standing is Standing.LEAVING)
                targets.news.put_nowait((Endpoint(one.address), Endpoint(other.address)))
                await until(lambda: len(there(registry)) == 2)


async def test_waiting_for_a_target_ends_when_it_comes_or_in_time():
    async with serving(FakeWorker()) as (one,):
        async with registry_of(static(one)) as registry:
            model, loop = registry.model("m"), asyncio.get_running_loop()
            await one.stop()
            await until(lambda: there(registry) == [])
            with pytest.raises(Unavailable, match="came back"):
                await registry.wait_for_target(model, loop.time() + 0.05)
            waiting = asyncio.create_task(registry.wait_for_target(model, loop.time() + 5))
            await one.start()
            await waiting
            assert there(registry) == [one.address]
