"""Endpoints from Kubernetes, against a real HTTP server that lists, watches and fails."""

import asyncio
import contextlib
import datetime
import ipaddress
import ssl
import threading
import time
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kube_server import KubeServer, endpoint, endpoint_slice
from outrider.errors import InvalidArgument
from services.orchestrator.discovery import kube_api
from services.orchestrator.discovery import kubernetes as kubernetes_module
from services.orchestrator.discovery.endpoints import Endpoint, Endpoints, Standing
from services.orchestrator.discovery.kube_api import KubeAccess
from services.orchestrator.discovery.kubernetes import KubernetesSource

A, B, C = "10.0.0.1", "10.0.0.2", "10.0.0.3"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_module, "_BACKOFF_S", (0.01, 0.02, 0.05))


class Watcher:
    """Reads a source; `told` is everything that it said."""

    def __init__(self, source: KubernetesSource) -> None:
        self.source = source
        self.told: list[Endpoints] = []
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async with contextlib.aclosing(self.source.watch()) as news:
            async for endpoints in news:
                self.told.append(endpoints)
                self._news.set()

    async def sees(self, *addresses: str, timeout_s: float = 5) -> Endpoints:
        """Until these are the endpoints."""
        wanted = {f"{ip}:50051" if ":" not in ip else ip for ip in addresses}
        async with asyncio.timeout(timeout_s):
            while not self.told or {e.address for e in self.told[-1]} != wanted:
                self._news.clear()
                await self._news.wait()
        return self.told[-1]

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@contextlib.asynccontextmanager
async def watching(server: KubeServer, port: str = "", access: KubeAccess | None = None):
    source = KubernetesSource(access or KubeAccess(server.url), "targets", "", port)
    watcher = Watcher(source)
    try:
        yield watcher
    finally:
        await watcher.close()
        # Nobody is left behind who goes on asking.
        await until(lambda: not any(t.name == "outrider-kubernetes" for t in threading.enumerate()))


async def until(condition, timeout_s: float = 5) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
def server():
    with KubeServer() as running:
        yield running


# --- what is told -------------------------------------------------------------------------------


async def test_endpoints_come_change_and_go(server: KubeServer):
    server.put(endpoint_slice("one", endpoint(A, zone="z1"), endpoint(B)))
    server.put(endpoint_slice("other", endpoint("10.9.9.9"), service="drafts"))
    async with watching(server) as watcher:
        found = await watcher.sees(A, B)
        assert found[0] == Endpoint(f"{A}:50051", "z1", Standing.READY)
        server.put(endpoint_slice("two", endpoint(C)))
        await watcher.sees(A, B, C)
        server.put(endpoint_slice("one", endpoint(B)))
        await watcher.sees(B, C)
        server.remove("two")
        await watcher.sees(B)
        assert watcher.source.counters["lists"] == 1


async def test_readiness_and_termination_are_told(server: KubeServer):
    async with watching(server) as watcher:
        for conditions, standing in (
            ({"ready": True, "serving": True, "terminating": False}, Standing.READY),
            ({"ready": False, "serving": False, "terminating": False}, Standing.RESTING),
            ({"ready": None}, Standing.READY),
            ({"ready": False, "serving": True, "terminating": True}, Standing.LEAVING),
        ):
            server.put(endpoint_slice("one", endpoint(A, **conditions)))
            await until(lambda s=standing: watcher.told and watcher.told[-1][0].standing is s)


async def test_nothing_is_an_answer_too(server: KubeServer):
    async with watching(server) as watcher:
        await until(lambda: watcher.told == [()])


@pytest.mark.parametrize(
    ("wanted", "found"),
    [("grpc", 50051), ("9000", 9000), ("metrics", 9090), ("", None), ("nothing", None)],
)
async def test_the_port_is_found_by_name_or_given(server: KubeServer, wanted, found):
    ports = [{"name": "grpc", "port": 50051}, {"name": "metrics", "port": 9090}]
    server.put(endpoint_slice("one", endpoint(A), ports=ports))
    async with watching(server, port=wanted) as watcher:
        await until(lambda: len(watcher.told) == 1)
        addresses = [e.address for e in watcher.told[0]]
        assert addresses == ([f"{A}:{found}"] if found else [])


async def test_a_pod_of_both_families_or_in_two_slices_is_one(server: KubeServer):
    server.put(endpoint_slice("v6", endpoint("fd00::1", pod="p1"), family="IPv6"))
    server.put(endpoint_slice("v4", endpoint(A, pod="p1")))
    server.put(endpoint_slice("old", endpoint(A, pod="p1", ready=False)))
    server.put(endpoint_slice("only6", endpoint("fd00::2", pod="p2"), family="IPv6"))
    server.put(endpoint_slice("names", endpoint("a.example"), family="FQDN"))
    async with watching(server) as watcher:
        found = await watcher.sees(A, "[fd00::2]:50051")
        assert all(e.standing is Standing.READY for e in found)


async def test_a_slice_of_nothing_or_of_as_much_as_may_be_is_taken(server: KubeServer):
    nothing = endpoint_slice("one") | {"endpoints": None, "ports": None}
    server.put(nothing)
    async with watching(server) as watcher:
        await until(lambda: watcher.told == [()])
        ips = [f"10.3.{n // 250}.{n % 250}" for n in range(1000)]
        full = [endpoint(ip, pod=f"pod-{ip}", zone="a-zone", serving=True) for ip in ips]
        server.put(endpoint_slice("two", *full))
        await watcher.sees(*ips)
        server.put(nothing)
        await until(lambda: watcher.source.counters["events"] == 2)
        assert watcher.source.counters["failures"] == 0


async def test_long_lists_come_in_pages(server: KubeServer):
    server.page = 7
    ips = [f"10.1.0.{n}" for n in range(1, 31)]
    for n, ip in enumerate(ips):
        server.put(endpoint_slice(f"s{n}", endpoint(ip)))
    async with watching(server) as watcher:
        await watcher.sees(*ips)
        assert [kind for kind, _ in server.requests].count("list") == 5


# --- what goes wrong ----------------------------------------------------------------------------


async def test_a_watch_that_breaks_goes_on_where_it_was(server: KubeServer):
    server.put(endpoint_slice("one", endpoint(A)))
    async with watching(server) as watcher:
        await watcher.sees(A)
        for _ in range(5):
            await until(lambda: server.num_watchers == 1)
            server.disconnect()
        server.put(endpoint_slice("two", endpoint(B)))
        await watcher.sees(A, B)
        assert watcher.source.counters["lists"] == 1, "what was known stands"
        assert watcher.told == [watcher.told[0], watcher.told[-1]], "and nothing else was told"


async def test_a_server_that_was_away_is_asked_for_what_it_missed(server: KubeServer):
    server.put(endpoint_slice("one", endpoint(A)))
    async with watching(server) as watcher:
        await watcher.sees(A)
        await until(lambda: server.num_watchers == 1)
        server.stop()
        await until(lambda: watcher.source.counters["failures"] > 3)
        assert len(watcher.told) == 1
        server.put(endpoint_slice("two", endpoint(B)))
        server.start()
        await watcher.sees(A, B)
        assert watcher.source.counters["lists"] == 1


async def test_a_watch_that_the_server_ends_goes_on_from_the_last_bookmark(server: KubeServer):
    server.watch_s = 0.05
    server.put(endpoint_slice("one", endpoint(A)))
    async with watching(server) as watcher:
        await watcher.sees(A)
        await until(lambda: server.num_watchers == 1)
        server.bookmark()
        await until(lambda: watcher.source.counters["events"] == 1)
        bookmarked = server._version
        await until(
            lambda: any(
                query.get("resourceVersion") == str(bookmarked) for _, query in server.requests
            )
        )
        assert watcher.source.counters["lists"] == 1
        assert watcher.source.counters["failures"] == 0
        server.put(endpoint_slice("two", endpoint(B)))
        await watcher.sees(A, B)


async def test_a_version_that_is_gone_is_listed_anew(server: KubeServer):
    server.put(endpoint_slice("one", endpoint(A)))
    async with watching(server) as watcher:
        await watcher.sees(A)
        await until(lambda: server.num_watchers == 1)
        server.silent = True
        server.disconnect()
        server.put(endpoint_slice("one", endpoint(B)))
        server.put(endpoint_slice("two", endpoint(C)))
        server.remove("two")
        server.forget_history()
        server.silent = False
        await watcher.sees(B)
        assert watcher.source.counters["gone"] == 1
        assert watcher.source.counters["lists"] == 2
        server.put(endpoint_slice("two", endpoint(C)))
        await watcher.sees(B, C)


async def test_a_list_of_which_the_next_page_is_gone_begins_anew(server: KubeServer):
    server.refuse = 410
    server.put(endpoint_slice("one", endpoint(A)))
    async with watching(server) as watcher:
        await until(lambda: watcher.source.counters["gone"] > 2)
        server.refuse = 0
        await watcher.sees(A)
        assert watcher.source.counters["failures"] == 0


async def test_a_connection_that_died_without_a_word_is_made_anew(
    server: KubeServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kube_api, "_GRACE_S", 0.3 - kube_api._WATCH_S)
    monkeypatch.setattr(kube_api, "_CONNECT_S", float(kube_api._WATCH_S))
    server.put(endpoint_slice("one", endpoint(A)))
    async with watching(server) as watcher:
        await watcher.sees(A)
        await until(lambda: watcher.source.counters["watches"] > 2)
        assert watcher.source.counters["failures"] >= 2
        server.put(endpoint_slice("two", endpoint(B)))
        await watcher.sees(A, B)
        assert watcher.source.counters["lists"] == 1


@pytest.mark.parametrize("status", [500, 503, 403, 401, 429])
async def test_while_the_server_refuses_the_last_known_endpoints_hold(server: KubeServer, status):
    server.put(endpoint_slice("one", endpoint(A)))
    async with watching(server) as watcher:
        await watcher.sees(A)
        await until(lambda: server.num_watchers == 1)
        server.refuse = status
        server.disconnect()
        server.remove("one")
        server.put(endpoint_slice("two", endpoint(B)))
        await until(lambda: watcher.source.counters["failures"] > 2)
        assert [e.address for e in watcher.told[-1]] == [f"{A}:50051"] and len(watcher.told) == 1
        server.refuse = 0
        await watcher.sees(B)


async def test_a_server_that_comes_late_is_waited_for(monkeypatch: pytest.MonkeyPatch):
    with KubeServer() as server:
        server.refuse = 503
        server.put(endpoint_slice("one", endpoint(A)))
        async with watching(server) as watcher:
            await until(lambda: watcher.source.counters["failures"] > 2)
            assert watcher.told == []
            server.refuse = 0
            await watcher.sees(A)


@pytest.mark.parametrize(
    "garbage",
    [
        b"{not json}\n",
        b"\xff\xfe\x00\n",
        b"[]\n",
        b'{"type": "ADDED"}\n',
        b'{"type": "ADDED", "object": {"metadata": {}}}\n',
        b'{"type": "WHAT", "object": {"metadata": {"resourceVersion": "99"}}}\n',
        b'{"type": "ADDED", "object": {"metadata": {"resourceVersion": "99", "name": "x"}}}\n',
        b'{"type": "ADDED", "object": {"metadata": {"resourceVersion": "99", "name": "x"},'
        b' "addressType": "IPv4", "endpoints": [{"addresses": []}], "ports": []}}\n',
        b'{"type": "ADDED", "object": {"metadata": {"resourceVersion": "99", "name": "x"},'
        b' "addressType": "IPv4", "endpoints": [7], "ports": [{"port": "x"}]}}\n',
        b'{"type": "ERROR", "object": {"code": 500, "message": "etcd"}}\n',
        b"[" * 100_000 + b"\n",
        b"x" * (5 << 20),
    ],
    ids=lambda raw: raw[:40].decode("latin-1").strip(),
)
async def test_garbage_is_answered_by_a_new_list(server: KubeServer, garbage: bytes):
    server.put(endpoint_slice("one", endpoint(A)))
    async with watching(server) as watcher:
        await watcher.sees(A)
        await until(lambda: server.num_watchers == 1)
        server.say(garbage)
        await until(lambda: watcher.source.counters["lists"] == 2)
        assert watcher.told == [watcher.told[0]], "what is known is still true"
        assert watcher.source.counters["failures"] >= 1
        server.put(endpoint_slice("two", endpoint(B)))
        await watcher.sees(A, B)


async def test_a_list_that_is_garbage_changes_nothing(server: KubeServer):
    broken = endpoint_slice("one", endpoint(A))
    del broken["addressType"]
    server.put(broken)
    async with watching(server) as watcher:
        await until(lambda: watcher.source.counters["failures"] > 2)
        assert watcher.told == []
        server.put(endpoint_slice("one", endpoint(A)))
        await watcher.sees(A)


async def test_a_list_beyond_all_bounds_changes_nothing(
    server: KubeServer, monkeypatch: pytest.MonkeyPatch
):
    server.put(endpoint_slice("one", endpoint(A)))
    with monkeypatch.context() as patch:
        patch.setattr(kube_api, "_MAX_PAGE_BYTES", 100)
        async with watching(server) as watcher:
            await until(lambda: watcher.source.counters["failures"] > 2)
            assert watcher.told == []
            patch.undo()
            await watcher.sees(A)


async def test_a_burst_is_told_by_its_end_and_holds_up_nobody(server: KubeServer):
    """The reader of the source is slow; the watch is not, and the loop goes on turning."""
    server.put(endpoint_slice("one", endpoint(A)))
    async with watching(server) as watcher:
        await watcher.sees(A)
        await until(lambda: server.num_watchers == 1)
        longest, stop = 0.0, False

        async def turn() -> None:
            nonlocal longest
            while not stop:
                started = time.monotonic()
                await asyncio.sleep(0)
                longest = max(longest, time.monotonic() - started)
                await asyncio.sleep(0.001)

        turning = asyncio.create_task(turn())
        for n in range(2000):
            server.put(endpoint_slice("one", endpoint(f"10.2.{n // 250}.{n % 250}")))
            if n % 100 == 0:
                await asyncio.sleep(0)
        last = f"10.2.{1999 // 250}.{1999 % 250}"
        await watcher.sees(last)
        stop = True
        await turning
        assert watcher.source.counters["events"] == 2000
        assert len(watcher.told) < 1500, "what lay in between was left out"
        assert longest < 1.0


async def test_a_reader_that_does_not_come_back_finds_the_newest_and_nothing_piles_up(
    server: KubeServer,
):
    server.put(endpoint_slice("one", endpoint(A)))
    source = KubernetesSource(KubeAccess(server.url), "targets", "", "")
    async with contextlib.aclosing(source.watch()) as news:
        assert [e.address for e in await anext(news)] == [f"{A}:50051"]
        await until(lambda: server.num_watchers == 1)
        for n in range(200):  # Nobody asks the source meanwhile; it listens all the same.
            server.put(endpoint_slice("one", endpoint(f"10.3.0.{n}")))
        await until(lambda: source.counters["events"] == 200)
        assert [e.address for e in await anext(news)] == ["10.3.0.199:50051"]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(news), 0.1)
        assert server.num_watchers == 1 and source.counters["watches"] == 1


async def test_a_server_that_accepts_and_says_nothing_can_be_hung_up_on(server: KubeServer):
    server.silent = True
    try:
        started = time.monotonic()
        async with watching(server) as watcher:
            await until(lambda: len(server.requests) == 1)
            assert watcher.told == []
        assert time.monotonic() - started < 3
    finally:
        server.silent = False


# --- who asks, and whom -------------------------------------------------------------------------


def pem(folder: Path) -> tuple[str, str]:
    """A certificate for 127.0.0.1, its own CA."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kubernetes")])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    certificate, private = folder / "ca.crt", folder / "key.pem"
    certificate.write_bytes(built.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return str(certificate), str(private)


async def test_in_a_cluster_the_service_account_asks_and_its_token_is_renewed(tmp_path: Path):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*pem(tmp_path))
    (tmp_path / "token").write_text("first\n")
    (tmp_path / "namespace").write_text("prod")
    with KubeServer(namespace="prod", token="first", tls=context) as server:
        host, _, port = server.url.removeprefix("https://").partition(":")
        env = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
        access = KubeAccess.in_cluster(env, tmp_path)
        assert access.namespace == "prod"
        server.put(endpoint_slice("one", endpoint(A)))
        async with watching(server, access=access) as watcher:
            assert watcher.source.name == "kubernetes:///targets.prod"
            await watcher.sees(A)
            await until(lambda: server.num_watchers == 1)
            server.token = "second"
            server.disconnect()
            await until(lambda: watcher.source.counters["failures"] > 1)
            (tmp_path / "token").write_text("second")
            server.put(endpoint_slice("two", endpoint(B)))
            await watcher.sees(A, B)
        # A certificate that the cluster's CA has not signed is refused.
        other = tmp_path / "other"
        other.mkdir()
        wrong = KubeAccess(access.url, access.token_file, pem(other)[0], "prod")
        async with watching(server, access=wrong) as distrusting:
            await until(lambda: distrusting.source.counters["failures"] > 1)
            assert distrusting.told == []


def test_access_that_makes_no_sense_is_refused(tmp_path: Path):
    with pytest.raises(InvalidArgument, match="no pod"):
        KubeAccess.in_cluster({}, tmp_path)
    with pytest.raises(InvalidArgument, match="service account"):
        KubeAccess.in_cluster({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, tmp_path)
    with pytest.raises(InvalidArgument, match="https only"):
        KubeAccess("http://127.0.0.1:1", token_file="token")
    for url in ("", "ftp://x", "https://", "127.0.0.1:80"):
        with pytest.raises(InvalidArgument, match="http"):
            KubeAccess(url)
