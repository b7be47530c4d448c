"""Addresses from settings and DNS, sources joined, and workers that follow them."""

import asyncio
import contextlib
import socket
import threading
import time

import pytest

from outrider.errors import InvalidArgument
from outrider.rpc.channel import ChannelSecurity
from services.orchestrator.config import OrchestratorConfig
from services.orchestrator.discovery import dns as dns_module
from services.orchestrator.discovery import kube_api
from services.orchestrator.discovery import watcher as watcher_module
from services.orchestrator.discovery.dns import DnsSource
from services.orchestrator.discovery.endpoints import Endpoint, Standing, StaticSource
from services.orchestrator.discovery.kube_api import KubeAccess
from services.orchestrator.discovery.kubernetes import KubernetesSource
from services.orchestrator.discovery.sources import DiscoveryOptions, source_of
from services.orchestrator.discovery.watcher import Discovery
from services.orchestrator.workers import Tier

READY, RESTING, LEAVING = Standing.READY, Standing.RESTING, Standing.LEAVING


# --- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind", "name"),
    [
        ("127.0.0.1:50051", StaticSource, "127.0.0.1:50051"),
        ("target-0.targets:50051", StaticSource, "target-0.targets:50051"),
        ("[::1]:50051", StaticSource, "[::1]:50051"),
        ("unix:/tmp/a.sock", StaticSource, "unix:/tmp/a.sock"),
        ("dns:///targets.ns.svc:50051", DnsSource, "dns:///targets.ns.svc:50051"),
        ("kubernetes:///targets", KubernetesSource, "kubernetes:///targets.home"),
        ("kubernetes:///targets.ns", KubernetesSource, "kubernetes:///targets.ns"),
        ("kubernetes:///targets.ns:grpc", KubernetesSource, "kubernetes:///targets.ns:grpc"),
        ("kubernetes:///targets:50051", KubernetesSource, "kubernetes:///targets.home:50051"),
    ],
)
def test_each_form_of_address_makes_its_source(text, kind, name):
    options = DiscoveryOptions(kubernetes=KubeAccess("http://127.0.0.1:1", namespace="home"))
    source = source_of(text, options, field="targets")
    assert type(source) is kind and source.name == name
    assert source.is_static == (kind is StaticSource)


@pytest.mark.parametrize(
    "text",
    [
        "target",
        "http://target:50051",
        "dns://target:50051",
        "dns:///target",
        "dns:///target:port",
        "kubernetes:///",
        "kubernetes:///a/b",
        "kubernetes:///Targets",
        "kubernetes:///a.b.c",
        "kubernetes://targets",
        "::1:50051",
        "a b:1",
    ],
)
def test_what_is_no_address_is_refused_with_what_is_allowed(text):
    options = DiscoveryOptions(kubernetes=KubeAccess("http://127.0.0.1:1"))
    with pytest.raises(InvalidArgument, match="kubernetes:///SERVICE") as caught:
        source_of(text, options, field="drafts")
    assert caught.value.field == "drafts"


def test_without_its_client_kubernetes_is_refused(monkeypatch):
    options = DiscoveryOptions(kubernetes=KubeAccess("http://127.0.0.1:1"))
    monkeypatch.setattr(kube_api.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidArgument, match=r"outrider\[kubernetes\]") as caught:
        source_of("kubernetes:///targets", options, field="targets")
    assert caught.value.field == "targets"


def test_settings_make_sources_and_kubernetes_needs_a_cluster(monkeypatch):
    config = OrchestratorConfig(
        targets=("dns:///t:1", "h:2"),
        drafts=("kubernetes:///d",),
        kubernetes_api="http://127.0.0.1:8001",
        kubernetes_namespace="ns",
    )
    assert [source.name for source in config.sources("targets")] == ["dns:///t:1", "h:2"]
    assert [source.name for source in config.sources("drafts")] == ["kubernetes:///d.ns"]
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(InvalidArgument, match="no pod"):
        OrchestratorConfig(targets=("kubernetes:///t",)).sources("targets")


# --- DNS ----------------------------------------------------------------------------------------


class Resolver:
    """Answers what it is told to."""

    def __init__(self, *answer: str) -> None:
        self.answer: list[str] | Exception = list(answer)
        self.asked = 0
        self.hold = threading.Event()
        self.hold.set()

    def __call__(self, name: str) -> list[str]:
        self.asked += 1
        self.hold.wait(10)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@contextlib.asynccontextmanager
async def watching(source):
    """What it tells, in a list that grows."""
    told: list[tuple[Endpoint, ...]] = []

    async def read() -> None:
        async with contextlib.aclosing(source.watch()) as news:
            async for endpoints in news:
                told.append(endpoints)

    task = asyncio.create_task(read())
    try:
        yield told
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition, timeout_s: float = 5) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


def addresses(endpoints) -> list[str]:
    return [endpoint.address for endpoint in endpoints]


async def test_all_addresses_of_a_name_are_followed_and_the_last_known_hold():
    resolver = Resolver("10.0.0.2", "10.0.0.1", "10.0.0.1", "fd00::1")
    async with watching(DnsSource("n", 7, refresh_s=0.01, resolver=resolver)) as told:
        await until(lambda: told)
        assert addresses(told[0]) == ["10.0.0.1:7", "10.0.0.2:7", "[fd00::1]:7"]
        for failure in (socket.gaierror(-2, "no such name"), [], UnicodeError("label")):
            asked = resolver.asked
            resolver.answer = failure
            await until(lambda a=asked: resolver.asked > a + 2)
            assert len(told) == 1, "no answer is no news"
        resolver.answer = ["10.0.0.3"]
        await until(lambda: len(told) == 2)
        assert addresses(told[1]) == ["10.0.0.3:7"]


async def test_a_resolver_that_hangs_holds_up_nothing_and_is_asked_once(monkeypatch):
    monkeypatch.setattr(dns_module, "_ANSWER_S", 0.02)
    resolver = Resolver("10.0.0.1")
    resolver.hold.clear()
    async with watching(DnsSource("n", 7, refresh_s=0.005, resolver=resolver)) as told:
        await asyncio.sleep(0.1)
        assert told == [] and resolver.asked == 1
        resolver.hold.set()
        await until(lambda: told)
        assert addresses(told[0]) == ["10.0.0.1:7"]


async def test_a_real_name_is_resolved():
    async with watching(DnsSource("localhost", 7)) as told:
        await until(lambda: told)
        assert "127.0.0.1:7" in addresses(told[0])


# --- all together -------------------------------------------------------------------------------


class Script:
    """A source that tells what a test gives it; an exception breaks it off."""

    is_static = False

    def __init__(self, name: str = "script") -> None:
        self.name = name
        self.news: asyncio.Queue[object] = asyncio.Queue()
        self.started = 0

    async def watch(self):
        self.started += 1
        while True:
            item = await self.news.get()
            if isinstance(item, Exception):
                raise item
            yield item


async def test_sources_are_merged_and_one_that_fails_is_started_again(monkeypatch):
    monkeypatch.setattr(watcher_module, "_AGAIN_S", 0.01)
    script, told = Script(), []
    discovery = Discovery([StaticSource("s:1"), script], told.append)
    discovery.start()
    try:
        await discovery.first(0.05)
        assert told == [(Endpoint("s:1"),)], "what is known so far is used"
        script.news.put_nowait((Endpoint("s:1", "z", LEAVING), Endpoint("d:1")))
        await discovery.first(5)
        assert told[-1] == (Endpoint("s:1"), Endpoint("d:1")), "the first one's word counts"
        script.news.put_nowait(RuntimeError("broken"))
        await until(lambda: script.started == 2)
        assert addresses(told[-1]) == ["s:1", "d:1"]
        script.news.put_nowait(())
        await until(lambda: addresses(told[-1]) == ["s:1"])
    finally:
        await discovery.close()


async def test_no_sources_tell_nothing_and_are_complete():
    discovery = Discovery([], lambda endpoints: pytest.fail("nothing to tell"))
    discovery.start()
    started = time.monotonic()
    await discovery.first(5)
    await discovery.close()
    assert time.monotonic() - started < 1


# --- workers that follow ------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def tier():
    """Workers that are all away: nothing listens at their addresses."""
    counts = {"told": 0}

    async def examine(worker) -> None:
        pass

    def tell() -> None:
        counts["told"] += 1

    one = Tier("target", ChannelSecurity(), examine=examine, tell=tell)
    try:
        yield one
    finally:
        await one.close()


def names(one: Tier) -> dict[str, Standing]:
    return {worker.address: worker.standing for worker in one.workers}


async def test_workers_come_and_go_with_their_endpoints():
    async with tier() as one:
        one.apply([Endpoint("127.0.0.1:1"), Endpoint("127.0.0.1:2", "z")])
        first, second = one.workers
        assert (first.zone, second.zone) == ("", "z")
        first.sessions = 1
        one.apply([Endpoint("127.0.0.1:3"), Endpoint("127.0.0.1:4", "", RESTING)])
        assert names(one) == {"127.0.0.1:1": RESTING, "127.0.0.1:3": READY}
        assert not first.is_named
        first.sessions = 0
        one.let_go()
        assert names(one) == {"127.0.0.1:3": READY}
        assert one.counters == {"came": 3, "gone": 2}


async def test_a_worker_that_is_named_again_is_the_same_one():
    async with tier() as one:
        one.apply([Endpoint("127.0.0.1:1")])
        [worker] = one.workers
        worker.sessions = 1
        one.apply([])
        assert worker.standing is RESTING
        one.apply([Endpoint("127.0.0.1:1")])
        assert one.workers == (worker,) and worker.standing is READY and worker.is_named


async def test_one_that_was_leaving_stays_so_until_it_is_named_again():
    async with tier() as one:
        one.apply([Endpoint("127.0.0.1:1")])
        [worker] = one.workers
        worker.sessions = 1
        one.apply([Endpoint("127.0.0.1:1", "", LEAVING)])
        assert worker.leaving
        one.apply([])
        assert worker.leaving
