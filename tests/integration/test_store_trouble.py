"""Redis away, slow, guarded, or losing replies: typed errors in time, and no token lost."""

import asyncio
import datetime
import ipaddress
import logging
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from redis.asyncio import Redis

from outrider.errors import (
    Cancelled,
    FailedPrecondition,
    Fenced,
    InternalError,
    InvalidArgument,
    NotFound,
    OutriderError,
    Unavailable,
)
from outrider.types import Fence, FinishReason, new_session_id
from services.orchestrator.board import SCRIPT as LEASES
from services.orchestrator.store import SessionStore
from services.orchestrator.store_client import RIGHTS
from services.orchestrator.store_commit import CommitQueue
from store_servers import (
    KINDS,
    Link,
    Server,
    begin,
    binary,
    commit,
    create,
    free_port,
    log_of,
    open_store,
    queue_of,
    running_link,
    running_server,
)


def need(kind: str) -> None:
    if binary(kind) is None:
        pytest.skip("Debian's redis-server is not installed (apt-get install redis-server)")


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    need(request.param)
    with running_server(request.param, tmp_path) as running:
        yield running


@pytest.fixture
async def link(server: Server) -> AsyncIterator[Link]:
    async with running_link(server) as running:
        yield running


# Addresses, TLS, users


async def test_nobody_there_is_said_at_connect() -> None:
    url = f"redis://:hunter2@127.0.0.1:{free_port()}"
    with pytest.raises(Unavailable, match="start Redis") as away:
        await SessionStore.connect(url, session_ttl_s=60)
    assert "hunter2" not in repr(away.value) and "127.0.0.1" in str(away.value)


@pytest.mark.parametrize("answers_after_s", [None, 0.2], ids=["silent", "slow"])
async def test_one_deadline_covers_all_round_trips(answers_after_s: float | None) -> None:
    open_connections: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_connections.append(writer)
        try:
            while await reader.read(1 << 16):
                if answers_after_s:
                    await asyncio.sleep(answers_after_s)
                    writer.write(b"+OK\r\n")
        except OSError:
            pass
        finally:
            writer.close()
            open_connections.remove(writer)

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"redis://user:pw@127.0.0.1:{listener.sockets[0].getsockname()[1]}/1"
    started = time.monotonic()
    with pytest.raises(Unavailable, match=r"did not answer within 0\.3 s"):
        await SessionStore.connect(url, session_ttl_s=60, command_timeout_s=0.3)
    assert 0.25 < time.monotonic() - started < 0.5
    listener.close()
    while open_connections:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0)  # transports close in the next turn of the loop


@pytest.mark.parametrize("name", ["session_ttl_s", "linger_s", "lease_s", "command_timeout_s"])
async def test_times_must_be_positive(name: str) -> None:
    with pytest.raises(InvalidArgument, match=name):
        async with open_store(f"redis://127.0.0.1:{free_port()}", **{name: 0}):
            pass


async def test_wrong_tls_settings_are_said() -> None:
    with pytest.raises(InvalidArgument, match="rediss://"):
        await SessionStore.connect("redis://h", session_ttl_s=60, ca_file=__file__)
    with pytest.raises(InvalidArgument, match="not a file"):
        await SessionStore.connect("rediss://h", session_ttl_s=60, ca_file="/nowhere.pem")


async def test_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    with running_server("valkey", tmp_path, "--unixsocket", str(path)):
        async with open_store(f"unix://{path}?db=2") as store:
            fence = await create(store)
            await begin(store, fence, [1])
            assert await log_of(store, fence) == [1]


async def use_everything(store: SessionStore) -> None:
    """Each operation, with all that its script may call."""
    fence = await create(store)
    await begin(store, fence, [1])
    await commit(store, fence, [1], [2])
    await store.renew(fence)
    await store.finish(fence, finish_reason=FinishReason.MAX_TOKENS, keep=True)
    await store.resume(fence.session_id, tenant="alice", owner="o", request_id="r1")
    taken = await store.take(fence.session_id, tenant="alice", owner="o")
    await store.get(fence.session_id, tenant="alice")
    await store.delete(taken.fence)
    fence = await create(store)
    await begin(store, fence, [1])
    resumed = await store.resume(fence.session_id, tenant="alice", owner="o", request_id="r1")
    await store.detach(resumed.fence, keep=False)
    await store.index.reserve("alice", fence.session_id, ttl_s=9, limit=1)
    await store.index.reserve("alice", fence.session_id, ttl_s=9, limit=1)  # again
    await store.index.touch("alice", fence.session_id, ttl_s=9)
    assert await store.index.members("alice") == [fence.session_id]
    await store.index.remove("alice", fence.session_id)
    await store.remove(fence.session_id, tenant="alice")
    board = store.sibling(LEASES)
    for owner in ("o1", "o2"):
        await board.call(["outrider:worker:1"], ["renew", owner, 1000, "{}"])
    await board.call(["outrider:worker:1"], ["leave", "o1"])


async def test_user_with_least_rights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    user = f"user outrider on >hunter2 ~outrider:* -@all {RIGHTS}"
    (tmp_path / "acl").write_text(f"user default off\n{user}\n")
    with running_server("valkey", tmp_path, "--aclfile", str(tmp_path / "acl")) as server:
        address = f"127.0.0.1:{server.port}"
        async with open_store(f"redis://outrider:hunter2@{address}") as store:
            await use_everything(store)
            assert "hunter2" not in repr(store) + repr(store._client) + repr(vars(store))
        for url in (f"redis://outrider:hunter3@{address}", f"redis://{address}"):
            with pytest.raises(FailedPrecondition, match="check user and password") as refused:
                await SessionStore.connect(url, session_ttl_s=60)
            assert "hunter" not in repr(refused.value)
    assert "hunter" not in caplog.text


async def test_the_password_may_come_from_a_file(tmp_path: Path) -> None:
    password_file = tmp_path / "password"
    with running_server("valkey", tmp_path, "--requirepass", "hunter2/@:%") as server:
        password_file.write_text("hunter2/@:%\n")
        async with open_store(server.url, password_file=str(password_file)) as store:
            await create(store)
            assert "hunter2" not in repr(store) + repr(store._client) + repr(vars(store))
        password_file.write_text("hunter3")
        with pytest.raises(FailedPrecondition, match="check user and password") as refused:
            await SessionStore.connect(
                server.url, session_ttl_s=60, password_file=str(password_file)
            )
        assert "hunter" not in repr(refused.value)


@pytest.mark.parametrize(
    ("url", "text", "fault"),
    [
        ("redis://h", None, "cannot read"),
        ("redis://h", "\n", "is empty"),
        ("redis://user:pw@h", "pw", "holds a password already"),
    ],
)
async def test_a_password_file_that_does_not_do_is_refused(
    tmp_path: Path, url: str, text: str | None, fault: str
) -> None:
    path = tmp_path / "password"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidArgument, match=fault) as refused:
        await SessionStore.connect(url, session_ttl_s=60, password_file=str(path))
    assert refused.value.field == "store_password_file"


async def test_missing_rights_are_named(tmp_path: Path) -> None:
    user = "user outrider on >pw ~outrider:* -@all +ping"
    (tmp_path / "acl").write_text(f"user default off\n{user}\n")
    with running_server("valkey", tmp_path, "--aclfile", str(tmp_path / "acl")) as server:
        async with open_store(f"redis://outrider:pw@127.0.0.1:{server.port}") as store:
            with pytest.raises(FailedPrecondition, match=r"grant .*evalsha"):
                await create(store)


async def test_none_of_the_rights_is_one_too_many(tmp_path: Path) -> None:
    rights = [right for right in RIGHTS.split() if right != "+info"]  # `outrider doctor`'s
    with running_server("valkey", tmp_path) as server:
        async with Redis.from_url(server.url, decode_responses=True) as admin:
            for dropped in rights:
                left = [right for right in rights if right != dropped]
                rules = ("reset", "on", ">pw", "~outrider:*", *left)
                await admin.execute_command("ACL", "SETUSER", "outrider", *rules)
                await admin.flushall()
                await admin.script_flush()
                await admin.execute_command("ACL", "LOG", "RESET")
                with pytest.raises(FailedPrecondition, match="grant"):
                    url = f"redis://outrider:pw@127.0.0.1:{server.port}"
                    async with open_store(url) as store:
                        await use_everything(store)
                        pytest.fail(f"{dropped} is not needed")
                [denied] = await admin.acl_log(1)
                assert str(denied["object"]).casefold() == dropped[1:]


def write_certificates(folder: Path) -> None:
    """A CA, and a certificate of it for 127.0.0.1 that serves both ends."""
    now = datetime.datetime.now(datetime.UTC)
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca_name, name = (
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in ("test CA", "test")
    )

    def builder(subject: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder(ca_name, subject, public, x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
        )

    key_id = x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key())
    usage = x509.KeyUsage(
        digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip
    ca = (
        builder(ca_name, ca_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(key_id, critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(key_id)
    leaf = (
        builder(name, key.public_key())
        .add_extension(here, critical=False)
        .add_extension(issuer, critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "ca.pem").write_bytes(ca.public_bytes(pem))
    (folder / "cert.pem").write_bytes(leaf.public_bytes(pem))
    (folder / "key.pem").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


async def test_mutual_tls(tmp_path: Path) -> None:
    need("redis-server")
    write_certificates(tmp_path)
    ca, cert, key = (str(tmp_path / f"{name}.pem") for name in ("ca", "cert", "key"))
    port = free_port()
    options = ["--tls-port", str(port), "--tls-ca-cert-file", ca, "--tls-cert-file", cert]
    options += ["--tls-key-file", key, "--tls-auth-clients", "yes"]
    url = f"rediss://127.0.0.1:{port}/0"
    with running_server("redis-server", tmp_path, *options, port=port, plain_port=False):
        async with open_store(url, ca_file=ca, cert_file=cert, key_file=key) as store:
            fence = await create(store)
            await begin(store, fence, [1])
            assert await commit(store, fence, [1], [2]) == 2
        with pytest.raises(Unavailable, match=r"(?i)certificate"):  # the CA is not known
            await SessionStore.connect(url, session_ttl_s=60, cert_file=cert, key_file=key)
        with pytest.raises(Unavailable):  # no client certificate
            await SessionStore.connect(url, session_ttl_s=60, ca_file=ca)


async def test_one_slot_per_session_in_cluster_mode(tmp_path: Path) -> None:
    need("redis-server")
    options = ["--cluster-enabled", "yes", "--cluster-port", str(free_port())]
    with running_server("redis-server", tmp_path, *options) as server:
        async with Redis.from_url(server.url) as redis:
            async with open_store(server.url, command_timeout_s=1) as store:
                with pytest.raises(Unavailable):  # no slot is served
                    await create(store)
                await redis.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
                async with asyncio.timeout(10):
                    while (await redis.execute_command("CLUSTER INFO"))["cluster_state"] != "ok":
                        await asyncio.sleep(0.05)
                fence = await create(store)
                await begin(store, fence, [1])
                await commit(store, fence, [1], [2])
                taken = await store.get(fence.session_id, tenant="alice", include_tokens=True)
                assert taken.token_ids == (1, 2)
                await store.index.reserve("alice", fence.session_id, ttl_s=9, limit=1)
                await store.delete(fence)


async def test_read_only_replica_is_unavailable(tmp_path: Path) -> None:
    options = ["--replicaof", "127.0.0.1", str(free_port())]
    with running_server("valkey", tmp_path, *options) as server:
        async with open_store(server.url) as store:
            with pytest.raises(Unavailable, match="primary"):
                await create(store)


# Redis goes away, replies get lost


async def test_killed_server_is_unavailable_and_a_new_one_is_used(server: Server) -> None:
    async with open_store(server.url, command_timeout_s=1) as store:
        fence = await create(store)
        server.stop()
        started = time.monotonic()
        with pytest.raises(Unavailable, match="start Redis or correct the Redis URL"):
            await begin(store, fence, [1])
        assert time.monotonic() - started < 1.2
        server.restart()
        with pytest.raises(NotFound):  # it persists nothing
            await begin(store, fence, [1])
        await begin(store, await create(store), [1])


@pytest.mark.parametrize("hang", [False, True], ids=["closed", "silent"])
async def test_lost_replies_are_repeated_without_doubling(link: Link, hang: bool) -> None:
    async with open_store(link.url, command_timeout_s=0.3) as store:
        async with queue_of(store) as (fence, queue):
            link.hang = hang
            link.lose_replies = 3
            queue.append([2, 3])
            await queue.wait_durable(3)
            queue.append([4])
            await queue.drain()
            assert link.lose_replies == 0
            assert await log_of(store, fence) == [1, 2, 3, 4]


@pytest.mark.parametrize("operation", ["create", "take", "begin", "finish", "delete"])
async def test_every_operation_survives_a_lost_reply(link: Link, operation: str) -> None:
    """A closed connection is tried once more inside the store: the script must allow it."""
    async with open_store(link.url) as store:
        await create(store)  # the server knows the script from here on
        if operation == "create":
            link.lose_replies = 1
        fence = await create(store)
        if operation == "take":
            link.lose_replies = 1
            before = fence.epoch
            fence = (await store.take(fence.session_id, tenant="alice", owner="o")).fence
            assert fence.epoch == before + 1  # not 2
        if operation == "begin":
            link.lose_replies = 1
        assert await begin(store, fence, [1]) == 1
        if operation == "finish":
            link.lose_replies = 1
        await store.finish(fence, finish_reason=None, keep=True)
        if operation == "delete":
            link.lose_replies = 1
        await store.delete(fence)
        assert link.lose_replies == 0


async def test_cancelled_command_does_not_mix_up_replies(link: Link) -> None:
    async with open_store(link.url) as store:
        fence = await create(store)
        await begin(store, fence, [1])
        link.hold.clear()
        pending = [asyncio.create_task(commit(store, fence, [1], [2])) for _ in range(3)]
        await asyncio.sleep(0.05)
        for task in pending:
            task.cancel()
        link.hold.set()
        await asyncio.wait(pending)
        session = await store.get(fence.session_id, tenant="alice")
        assert session.durable_len in (1, 2)
        assert await commit(store, fence, [1], [2]) == 2


# The commit queue


async def test_a_cancelled_command_ends_its_task_whenever_that_comes(server: Server) -> None:
    """Nothing on the way to the server forgets that its task was cancelled: whoever waits for the
    task to end would wait for ever."""
    async with open_store(server.url) as store:
        fence = await create(store)
        for turns in range(60):
            others = [asyncio.create_task(store.renew(fence)) for _ in range(3)]
            cancelled = asyncio.create_task(store.renew(fence))
            for _ in range(turns % 20):
                await asyncio.sleep(0)
            if cancelled.cancel():
                await asyncio.wait([cancelled])
                assert cancelled.cancelled(), f"it went on after {turns % 20} turns"
            await asyncio.gather(*others)


async def test_appends_coalesce_while_a_commit_is_in_flight(link: Link) -> None:
    async with open_store(link.url) as store, queue_of(store) as (fence, queue):
        link.hold.clear()
        queue.append([100])
        await asyncio.sleep(0.05)
        for token in range(101, 200):
            queue.append([token])
            await asyncio.sleep(0)
        assert queue.durable_len == 1 and queue.verified_len == 101
        link.hold.set()
        await queue.wait_durable(101)
        assert queue.commits <= 3
        assert await log_of(store, fence) == [1, *range(100, 200)]


async def test_one_commit_at_a_time_and_in_order(link: Link) -> None:
    async with open_store(link.url) as store, queue_of(store) as (fence, queue):
        for token in range(200):
            length = queue.append([token, token])
            if token % 7 == 0:
                await queue.wait_durable(length - 1)
                assert queue.durable_len >= length - 1
        await queue.drain()
        assert queue.durable_len == queue.verified_len == 401
        assert await log_of(store, fence) == [1, *(t for i in range(200) for t in (i, i))]


async def test_server_away_ends_the_queue_at_its_deadline(server: Server) -> None:
    async with open_store(server.url, command_timeout_s=0.5) as store:
        async with queue_of(store, retry_for_s=0.4) as (_, queue):
            server.stop()
            queue.append([2])
            started = time.monotonic()
            with pytest.raises(Unavailable, match="start Redis"):
                await queue.wait_durable(2)
            assert 0.1 < time.monotonic() - started < 1.5
            assert queue.commits > 1 and isinstance(queue.error, Unavailable)
            for failing in (queue.drain(), queue.wait_durable(2)):
                with pytest.raises(Unavailable):
                    await failing
            with pytest.raises(Unavailable):
                queue.append([3])
            await queue.wait_durable(1)  # what was durable stays so


async def test_outage_shorter_than_the_deadline_is_survived(server: Server, link: Link) -> None:
    async with (
        open_store(link.url, command_timeout_s=0.2) as store,
        queue_of(store) as (fence, queue),
    ):
        link.hold.clear()
        queue.append([2])
        await asyncio.sleep(0.5)
        queue.append([3])
        link.hold.set()
        await queue.drain()
        assert queue.commits >= 2
        assert await log_of(store, fence) == [1, 2, 3]


@pytest.mark.parametrize("end", ["fenced", "gone"])
async def test_fenced_or_gone_ends_the_queue_at_once(server: Server, end: str) -> None:
    error: type[OutriderError] = Fenced if end == "fenced" else NotFound
    async with open_store(server.url, lease_s=0.02) as store, queue_of(store) as (fence, queue):
        if end == "fenced":
            await asyncio.sleep(0.05)
            await store.take(fence.session_id, tenant="alice", owner="o2")
        else:
            await store.delete(fence)
        queue.append([2])
        started = time.monotonic()
        with pytest.raises(error):
            await queue.drain()
        assert time.monotonic() - started < 1 and queue.commits == 1
        assert isinstance(queue.error, error)


async def test_commit_that_arrives_after_a_takeover_is_fenced(server: Server, link: Link) -> None:
    async with (
        open_store(link.url, lease_s=0.02) as old_store,
        open_store(server.url) as new_store,
        queue_of(old_store) as (fence, queue),
    ):
        link.hold.clear()
        queue.append([2])
        await asyncio.sleep(0.05)
        taken = await new_store.take(fence.session_id, tenant="alice", owner="o2")
        assert taken.token_ids == (1,)
        await commit(new_store, taken.fence, [1], [5])
        link.hold.set()
        with pytest.raises(Fenced):
            await queue.drain()
        assert await log_of(new_store, fence) == [1, 5]


async def test_cancelled_waiter_leaves_the_commit_alone(link: Link) -> None:
    async with open_store(link.url) as store, queue_of(store) as (_, queue):
        link.hold.clear()
        queue.append([2])
        waiters = [asyncio.create_task(wait) for wait in (queue.wait_durable(2), queue.drain())]
        await asyncio.sleep(0.02)
        waiters[0].cancel()
        link.hold.set()
        await asyncio.wait(waiters)
        assert waiters[0].cancelled() and waiters[1].exception() is None
        assert queue.durable_len == 2


@pytest.mark.parametrize("started", [False, True])
async def test_close_wakes_the_waiters(link: Link, started: bool) -> None:
    async with open_store(link.url) as store, queue_of(store) as (_, queue):
        link.hold.clear()
        queue.append([2])
        waiter = asyncio.create_task(queue.drain())
        if started:
            await asyncio.sleep(0.02)
        await queue.close()
        with pytest.raises(Cancelled):
            await waiter
        with pytest.raises(Cancelled):
            queue.append([3])


async def test_bad_tokens_and_bad_lengths_are_said(server: Server) -> None:
    async with open_store(server.url) as store, queue_of(store) as (_, queue):
        with pytest.raises(InternalError, match="up to 5"):
            await queue.wait_durable(5)
        queue.append([-1])
        with pytest.raises(OutriderError):
            await queue.drain()


async def test_queue_of_an_unknown_session_does_not_retry(server: Server) -> None:
    async with open_store(server.url) as store:
        queue = CommitQueue(store, Fence(new_session_id(), 1, 1), durable_len=0, prefix_hash=0)
        queue.append([1])
        with pytest.raises(NotFound):
            await queue.drain()
