"""Certificates, CAs and tokens that are renewed while connections stand and streams run."""

import asyncio
import contextlib
import itertools
import logging
import os
from pathlib import Path

import grpc
import grpc.aio
import psutil
import pytest
from cryptography.hazmat.primitives import serialization

from certificates import cert_pem, certificate, pem
from outrider.errors import InvalidArgument
from outrider.rpc import files as files_module
from outrider.rpc.channel import ChannelSecurity, open_channel
from outrider.rpc.files import Renewed
from outrider.rpc.server import Server, ServerConfig

TIMEOUT_S = 10.0
LOOK_S = 0.02
CA, OTHER_CA = certificate("ca", ca=True), certificate("other", ca=True)


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch):
    monkeypatch.setattr(files_module, "LOOK_EVERY_S", LOOK_S)


class Mount:
    """A secret as Kubernetes mounts it: all files change at once, with one symbolic link."""

    def __init__(self, folder, **contents):
        self.folder = folder
        self._numbers = itertools.count()
        folder.mkdir()
        self.swap(**contents)

    def swap(self, **contents):
        """Other contents of the files; those that are not named go."""
        version = self.folder / f"..{next(self._numbers)}"
        version.mkdir()
        for name, content in contents.items():
            (version / name).write_bytes(content)
            if not (link := self.folder / name).is_symlink():
                link.symlink_to(Path("..data") / name)
        scratch = self.folder / "..data_tmp"
        scratch.symlink_to(version.name)
        scratch.rename(self.folder / "..data")

    def __getattr__(self, name):
        return str(self.folder / name)


def identity(issuer=CA, ca=CA, **options):
    """Contents of a mount: certificate, key, and the CA of the other side."""
    issued = certificate("localhost", issuer=issuer, **options)
    return {"crt": cert_pem(issued), "key": pem(issued[1]), "ca": cert_pem(ca)}


async def looked_at():
    """Time for changed files to be looked at."""
    await asyncio.sleep(3 * LOOK_S)


class Peers(grpc.GenericRpcHandler):
    """Answers each request with the address that it came from."""

    def service(self, details):
        async def answer(requests, context):
            async for _ in requests:
                yield context.peer().encode()

        return grpc.stream_stream_rpc_method_handler(answer)


@contextlib.asynccontextmanager
async def running(**settings):
    server = Server(ServerConfig(**settings), ["test.Peers"])
    server.grpc.add_generic_rpc_handlers((Peers(),))
    await server.start()
    try:
        yield server
    finally:
        await server.grpc.stop(None)


def tls_server(mount, *, mtls=False):
    settings = {"tls_cert": mount.crt, "tls_key": mount.key}
    return running(**settings, **({"tls_client_ca": mount.ca} if mtls else {}))


def security(mount, *, mtls=False):
    own = {"cert_file": mount.crt, "key_file": mount.key} if mtls else {}
    return ChannelSecurity(ca_file=mount.ca, **own)


class Talk:
    """A stream that can be asked again and again who the server thinks it is."""

    def __init__(self, channel):
        self.call = channel.stream_stream("/test.Peers/Ask")()

    async def peer(self):
        async with asyncio.timeout(TIMEOUT_S):
            await self.call.write(b"?")
            return await self.call.read()

    async def end(self):
        await self.call.done_writing()
        assert await self.call.read() is grpc.aio.EOF


async def reach(channel):
    """The peer that a fresh call has."""
    talk = Talk(channel)
    peer = await talk.peer()
    await talk.end()
    return peer


async def served(server, mount, **options):
    """Whether a new connection is."""
    async with open_channel(server.address, security(mount, **options)) as channel:
        try:
            await reach(channel)
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            return False
    return True


@pytest.fixture
def server_files(tmp_path):
    return Mount(tmp_path / "server", **identity())


@pytest.fixture
def client_files(tmp_path):
    return Mount(tmp_path / "client", **identity())


# --- the server's side ------------------------------------------------------------------------


async def test_an_expired_server_certificate_is_replaced_without_a_restart(
    server_files, client_files
):
    async with (
        tls_server(server_files) as server,
        open_channel(server.address, security(client_files)) as channel,
    ):
        talk = Talk(channel)
        first = await talk.peer()
        server_files.swap(**identity(valid_s=-60))
        await looked_at()
        assert not await served(server, client_files)
        server_files.swap(**identity())
        await looked_at()
        assert await served(server, client_files)
        # The stream that ran all the while is on its first connection still.
        assert await talk.peer() == first


async def test_a_server_follows_the_ca_of_its_clients(server_files, tmp_path):
    old = Mount(tmp_path / "old", **identity(CA))
    new = Mount(tmp_path / "new", **identity(OTHER_CA))
    async with tls_server(server_files, mtls=True) as server:
        assert await served(server, old, mtls=True)
        assert not await served(server, new, mtls=True)
        server_files.swap(**identity(ca=OTHER_CA))
        await looked_at()
        assert not await served(server, old, mtls=True)
        assert await served(server, new, mtls=True)
        both = identity() | {"ca": cert_pem(CA) + cert_pem(OTHER_CA)}
        server_files.swap(**both)
        await looked_at()
        assert await served(server, old, mtls=True) and await served(server, new, mtls=True)


def passphrase_key():
    issued = certificate("localhost", issuer=CA)
    key = issued[1].private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"sesame"),
    )
    return {"crt": cert_pem(issued), "key": key, "ca": cert_pem(CA)}


BAD = {
    "another key": lambda: identity() | {"key": identity()["key"]},
    "no certificate": lambda: identity() | {"crt": b"-----BEGIN CERTIFICATE-----\nzzz\n"},
    "an empty key": lambda: identity() | {"key": b""},
    "an empty CA": lambda: identity() | {"ca": b""},
    "a key with a passphrase": passphrase_key,
    "no files": dict,
}


@pytest.mark.parametrize("what", BAD)
async def test_bad_new_files_leave_the_old_ones_in_force(server_files, client_files, caplog, what):
    async with tls_server(server_files, mtls=True) as server:
        bad = BAD[what]()
        server_files.swap(**bad)
        client_files_before = identity()
        for _ in range(3):
            await looked_at()
            assert await served(server, client_files, mtls=True)
        errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert len(errors) == 1 and server_files.crt in str(errors[0].files)
        told = "".join(str(vars(record)) for record in caplog.records)
        for line in bad.get("key", b"").decode().splitlines()[1:-1]:
            assert line not in told
        # Good ones are taken again afterwards.
        server_files.swap(**identity(OTHER_CA))
        await looked_at()
        assert not await served(server, client_files, mtls=True)
        client_files.swap(**client_files_before | {"ca": cert_pem(OTHER_CA)})
        assert await served(server, client_files, mtls=True)


async def test_a_server_does_not_start_with_bad_files(tmp_path):
    for what, field in (
        ("another key", "tls_cert"),
        ("an empty CA", "tls_client_ca"),
        ("a key with a passphrase", "tls_cert"),
    ):
        mount = Mount(tmp_path / what, **BAD[what]())
        with pytest.raises(InvalidArgument) as refused:
            async with tls_server(mount, mtls=True):
                pass
        assert refused.value.field == field


async def test_a_server_may_ask_for_names_of_its_clients(server_files, tmp_path):
    settings = {
        "tls_cert": server_files.crt,
        "tls_key": server_files.key,
        "tls_client_ca": server_files.ca,
    }
    draft = Mount(tmp_path / "draft", **identity(names=("draft.svc",)))
    owner = Mount(tmp_path / "owner", **identity(names=("orchestrator.svc",)))
    async with running(**settings, tls_client_names=("orchestrator.svc",)) as server:
        assert await served(server, owner, mtls=True)
        async with open_channel(server.address, security(draft, mtls=True)) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await reach(channel)
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    with pytest.raises(InvalidArgument) as half:
        async with running(tls_cert=server_files.crt, tls_key=server_files.key,
                           tls_client_names=("x",)):  # fmt: skip
            pass
    assert half.value.field == "tls_client_ca"


# --- the client's side ------------------------------------------------------------------------


def connections_to(server):
    port = int(server.address.rpartition(":")[2])
    return [
        found
        for found in psutil.Process().net_connections("tcp")
        if found.status == psutil.CONN_ESTABLISHED and found.raddr and found.raddr.port == port
    ]


async def test_a_channel_whose_certificate_expired_comes_back_with_the_renewed_one(
    server_files, tmp_path
):
    own = Mount(tmp_path / "own", **identity(valid_s=-60))
    async with (
        tls_server(server_files, mtls=True) as server,
        open_channel(server.address, security(own, mtls=True)) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await reach(channel)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        own.swap(**identity())
        await looked_at()
        await reach(channel)


async def test_streams_outlive_the_renewal_and_new_calls_use_the_new_files(
    server_files, client_files
):
    async with (
        tls_server(server_files, mtls=True) as server,
        open_channel(server.address, security(client_files, mtls=True)) as channel,
    ):
        talk = Talk(channel)
        first = await talk.peer()
        assert await reach(channel) == first
        for _ in range(2):
            client_files.swap(**identity())
            await looked_at()
            later = await reach(channel)
            # A connection of its own, for the certificate of its own.
            assert later != first and await talk.peer() == first
        assert len(connections_to(server)) == 2
        await talk.end()
        del talk  # gRPC keeps a connection for as long as there is an object of its call.
        async with asyncio.timeout(TIMEOUT_S):
            while len(connections_to(server)) != 1:
                await asyncio.sleep(0.01)
        assert await reach(channel) == later


async def test_a_client_follows_the_ca_of_its_servers(server_files, client_files):
    async with (
        tls_server(server_files) as server,
        open_channel(server.address, security(client_files)) as channel,
    ):
        talk = Talk(channel)
        await talk.peer()
        server_files.swap(**identity(OTHER_CA))
        client_files.swap(**identity(ca=OTHER_CA))
        await looked_at()
        await reach(channel)
        await talk.peer()
        assert channel.get_state() is not grpc.ChannelConnectivity.TRANSIENT_FAILURE


async def test_a_client_keeps_what_it_has_when_new_files_are_bad(
    server_files, client_files, caplog
):
    async with (
        tls_server(server_files, mtls=True) as server,
        open_channel(server.address, security(client_files, mtls=True)) as channel,
    ):
        first = await reach(channel)
        for content in (BAD["another key"](), BAD["an empty CA"](), {}):
            client_files.swap(**content)
            await looked_at()
            assert await reach(channel) == first
        assert sum(record.levelno >= logging.ERROR for record in caplog.records) == 3


async def test_closing_a_channel_ends_what_it_has_open(server_files, client_files):
    async with tls_server(server_files) as server:
        async with open_channel(server.address, security(client_files)) as channel:
            talk = Talk(channel)
            await talk.peer()
            client_files.swap(**identity())
            await looked_at()
            await reach(channel)
        with pytest.raises(
            (grpc.aio.AioRpcError, asyncio.CancelledError, asyncio.InvalidStateError)
        ):
            await talk.peer()


# --- tokens -----------------------------------------------------------------------------------


async def test_tokens_rotate_on_both_sides_without_a_restart(tmp_path, caplog):
    accepted, own = tmp_path / "accepted", tmp_path / "own"
    accepted.write_text("acme:old\n")
    own.write_text("old")
    async with running(auth_token_file=str(accepted)) as server:
        async with open_channel(server.address, ChannelSecurity(token_file=str(own))) as channel:
            talk = Talk(channel)
            await talk.peer()
            accepted.write_text("acme:old\nacme:new\n")  # both, while the new one is handed out
            await looked_at()
            await reach(channel)
            own.write_text("new")
            await looked_at()
            accepted.write_text("acme:new\n")
            await reach(channel)
            own.write_text("old")
            await looked_at()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await reach(channel)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            await talk.peer()  # It was let in when its token was good.
            own.write_text("new")
            for text in ("", "acme:\n", "acme:new\nother:new\n"):
                accepted.write_text(text)  # An emptied file must not let anyone in.
                await looked_at()
                await reach(channel)
            os.unlink(accepted)
            await looked_at()
            await reach(channel)
    assert "acme:new" not in caplog.text and "'new'" not in caplog.text
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 4


# --- files ------------------------------------------------------------------------------------


def test_files_that_change_while_they_are_read_are_read_again(tmp_path, monkeypatch):
    """So that a certificate never meets the key of another one."""
    paths = {name: str(tmp_path / name) for name in ("crt", "key")}

    def write(version):
        for path in paths.values():
            Path(path).write_text(version)

    write("1")
    value = Renewed(paths, lambda contents: contents["crt"] + contents["key"])
    read, left = files_module.read_file, ["2", "3"]

    def changing(path, field):
        content = read(path, field)
        if left and field == "crt":  # between certificate and key
            write(left.pop(0))
        return content

    monkeypatch.setattr(files_module, "read_file", changing)
    monkeypatch.setattr(value, "_next_look", 0.0)
    assert value.get() == b"33"


def test_contents_are_compared_not_times(tmp_path):
    path = tmp_path / "file"
    path.write_text("same")
    made = []
    value = Renewed({"file": str(path)}, lambda contents: made.append(1) or len(made))
    status = path.stat()
    for text, expected in (("same", 1), ("diff", 2), ("same", 3)):
        path.write_text(text)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        value._next_look = 0.0
        assert value.get() == expected


def test_what_a_pipe_held_is_there_for_all_who_ask(tmp_path):
    reading, writing = os.pipe()
    os.write(writing, b"a-token\n")
    os.close(writing)
    try:
        path = {"token": f"/dev/fd/{reading}"}
        for _ in range(2):
            renewed = Renewed(path, lambda contents: contents["token"])
            renewed._next_look = 0.0
            assert renewed.get() == b"a-token\n"
    finally:
        os.close(reading)


def test_a_huge_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files_module, "MAX_FILE_BYTES", 10)
    (tmp_path / "file").write_bytes(b"x" * 11)
    with pytest.raises(InvalidArgument, match="more than 10 bytes"):
        Renewed({"file": str(tmp_path / "file")}, dict)
