"""The server of every service, over real connections: TLS, tokens, health, limits, errors."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import grpc.aio
import pytest
from cryptography.hazmat.primitives import serialization
from google.rpc import status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from certificates import certificate, pem
from outrider import errors
from outrider.errors import InvalidArgument, Unavailable
from outrider.rpc.channel import ChannelSecurity, open_channel
from outrider.rpc.server import Server, ServerConfig, run_service
from outrider.rpc.status import abort_with, error_from_rpc, status_code

SERVICE = "outrider.v1.TargetService"
ECHO = "test.Echo"
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
TIMEOUT_S = 10.0


# --- an echo of every kind of method ----------------------------------------------------------


class Echo:
    def __init__(self, error=None):
        self.error = error

    async def _check(self, context):
        if self.error:
            await abort_with(context, self.error)

    async def unary_unary(self, request, context):
        await self._check(context)
        return request

    async def unary_stream(self, request, context):
        await self._check(context)
        yield request

    async def stream_unary(self, requests, context):
        await self._check(context)
        return b"".join([request async for request in requests])

    async def stream_stream(self, requests, context):
        await self._check(context)
        async for request in requests:
            yield request

    def handler(self):
        make = {kind: getattr(grpc, f"{kind}_rpc_method_handler") for kind in KINDS}
        methods = {kind: make[kind](getattr(self, kind)) for kind in KINDS}
        return grpc.method_handlers_generic_handler(ECHO, methods)


async def call(channel, kind="unary_unary", payload=b"hello", metadata=None):
    """The answer; without a payload, a stream of requests has none.

    A client that still writes when its call has been refused may see INTERNAL instead.
    """
    method = getattr(channel, kind)(f"/{ECHO}/{kind}")
    requests = iter([payload] if payload else []) if kind.startswith("stream") else payload or b""
    answer = method(requests, timeout=TIMEOUT_S, metadata=metadata)
    if kind.endswith("stream"):
        return b"".join([part async for part in answer])
    return await answer


async def code_of(awaitable):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    return caught.value.code()


@contextlib.asynccontextmanager
async def running(echo=None, **settings):
    server = Server(ServerConfig(**settings), [SERVICE])
    server.grpc.add_generic_rpc_handlers(((echo or Echo()).handler(),))
    await server.start()
    try:
        yield server
    finally:
        await server.grpc.stop(None)


# --- TLS ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    """Paths of PEM files: two CAs, and a certificate of each for a server and a client."""
    folder = tmp_path_factory.mktemp("tls")
    paths = {}

    def write(name, content):
        paths[name] = str(folder / name)
        Path(paths[name]).write_bytes(content)

    for which in ("ca", "other"):
        authority = certificate(which, ca=True)
        write(which, authority[0].public_bytes(serialization.Encoding.PEM))
        for role in ("server", "client"):
            cert, key = certificate(f"{which}-{role}", issuer=authority)
            write(f"{which}-{role}", cert.public_bytes(serialization.Encoding.PEM))
            write(f"{which}-{role}-key", pem(key))
    return paths


def server_tls(tls, **extra):
    return {"tls_cert": tls["ca-server"], "tls_key": tls["ca-server-key"]} | extra


async def reach(server, security=None):
    async with open_channel(server.address, security) as channel:
        return await call(channel)


async def test_tls_serves_whoever_trusts_its_ca(tls):
    async with running(**server_tls(tls)) as server:
        assert await reach(server, ChannelSecurity(ca_file=tls["ca"])) == b"hello"


async def test_plaintext_and_wrong_ca_do_not_reach_a_tls_server(tls):
    async with running(**server_tls(tls)) as server:
        for security in (None, ChannelSecurity(ca_file=tls["other"])):
            assert await code_of(reach(server, security)) == grpc.StatusCode.UNAVAILABLE


async def test_tls_does_not_reach_a_plaintext_server(tls):
    async with running() as server:
        security = ChannelSecurity(ca_file=tls["ca"])
        assert await code_of(reach(server, security)) == grpc.StatusCode.UNAVAILABLE
        assert await reach(server) == b"hello"


def client_tls(tls, which):
    return ChannelSecurity(
        ca_file=tls["ca"], cert_file=tls[f"{which}-client"], key_file=tls[f"{which}-client-key"]
    )


async def test_mtls_serves_clients_with_a_certificate_of_its_ca_alone(tls):
    async with running(**server_tls(tls, tls_client_ca=tls["ca"])) as server:
        assert await reach(server, client_tls(tls, "ca")) == b"hello"
        for security in (None, ChannelSecurity(ca_file=tls["ca"]), client_tls(tls, "other")):
            assert await code_of(reach(server, security)) == grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("field", ["tls_cert", "tls_key", "tls_client_ca"])
async def test_missing_tls_files_are_refused_by_name(tls, field):
    settings = server_tls(tls, tls_client_ca=tls["ca"]) | {field: "/nowhere.pem"}
    with pytest.raises(InvalidArgument) as refused:
        async with running(**settings):
            pass
    assert refused.value.field == field


@pytest.mark.parametrize("half", ["tls_key", "tls_client_ca"])
async def test_tls_by_halves_is_refused_rather_than_served_in_plaintext(tls, half):
    with pytest.raises(InvalidArgument) as refused:
        async with running(**{half: tls["ca"]}):
            pass
    assert refused.value.field == "tls_cert"


async def test_a_server_that_is_found_by_its_address_must_have_the_name_that_is_expected(tls):
    async with running(**server_tls(tls)) as server:
        for name, is_right in (("localhost", True), ("elsewhere", False), ("", True)):
            security = ChannelSecurity(ca_file=tls["ca"], server_name=name)
            async with open_channel(server.address, security) as channel:
                if is_right:
                    assert await call(channel) == b"hello"
                else:
                    assert await code_of(call(channel)) == grpc.StatusCode.UNAVAILABLE
    with pytest.raises(InvalidArgument) as refused:
        open_channel("127.0.0.1:1", ChannelSecurity(server_name="localhost"))
    assert refused.value.field == "ca_file"


@pytest.mark.parametrize(
    ("names", "field"),
    [
        (("cert_file", "key_file"), "ca_file"),
        (("key_file",), "ca_file"),
        (("ca_file", "cert_file"), "key_file"),
        (("ca_file", "key_file"), "cert_file"),
    ],
)
async def test_a_channel_with_half_of_tls_is_refused_rather_than_weaker(tls, names, field):
    paths = {
        "ca_file": tls["ca"],
        "cert_file": tls["ca-client"],
        "key_file": tls["ca-client-key"],
    }
    with pytest.raises(InvalidArgument) as refused:
        open_channel("127.0.0.1:1", ChannelSecurity(**{name: paths[name] for name in names}))
    assert refused.value.field == field


@pytest.mark.parametrize("field", ["ca_file", "cert_file", "key_file", "token_file"])
async def test_missing_client_files_are_refused_by_name(tls, field):
    paths = {
        "ca_file": tls["ca"],
        "cert_file": tls["ca-client"],
        "key_file": tls["ca-client-key"],
    } | {field: "/nowhere"}
    with pytest.raises(InvalidArgument) as refused:
        open_channel("127.0.0.1:1", ChannelSecurity(**paths))
    assert refused.value.field == field


# --- bearer tokens ----------------------------------------------------------------------------


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / "tokens"
    path.write_text("# callers\n\nacme: s3cret\nacme:s3cret\nplain\n", encoding="utf-8")
    return str(path)


def bearer(token):
    return (("authorization", f"Bearer {token}"),)


WRONG = [
    None,
    bearer("wrong"),
    bearer(""),
    bearer("s3cret "),
    (("authorization", "s3cret"),),
    (("authorization", "Basic s3cret"),),
    (("x-authorization", "Bearer s3cret"),),
    bearer("acme:s3cret"),
]


@pytest.mark.parametrize("kind", KINDS)
async def test_calls_without_a_valid_token_are_refused_whatever_their_kind(tokens, kind):
    async with running(auth_token_file=tokens) as server, open_channel(server.address) as channel:
        for metadata in WRONG:
            code = await code_of(call(channel, kind, None, metadata))
            assert code == grpc.StatusCode.UNAUTHENTICATED
        assert await call(channel, kind, metadata=bearer("s3cret")) == b"hello"
        assert await call(channel, kind, metadata=bearer("plain")) == b"hello"


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream", "stream_stream"])
async def test_a_channel_sends_its_token_with_every_call(tokens, tmp_path, kind):
    own = tmp_path / "own"
    async with running(auth_token_file=tokens) as server:
        for token, expected in (("s3cret\n", True), ("wrong", False)):
            own.write_text(token)
            security = ChannelSecurity(token_file=str(own))
            async with open_channel(server.address, security) as channel:
                if expected:
                    metadata = (("x-trace", "1"),)
                    assert await call(channel, kind, metadata=metadata) == b"hello"
                    assert await call(channel, kind) == b"hello"
                else:
                    code = await code_of(call(channel, kind, None))
                    assert code == grpc.StatusCode.UNAUTHENTICATED


async def test_an_empty_token_file_of_a_client_is_refused(tmp_path):
    (tmp_path / "own").write_text("\n")
    with pytest.raises(InvalidArgument, match="empty"):
        open_channel("127.0.0.1:1", ChannelSecurity(token_file=str(tmp_path / "own")))


async def test_health_needs_no_token_and_reflection_does_unless_it_is_open(tokens):
    async with running(auth_token_file=tokens) as server, open_channel(server.address) as channel:
        assert await health(channel) == "NOT_SERVING"
        assert await code_of(reflected(channel)) == grpc.StatusCode.UNAUTHENTICATED
    async with (
        running(auth_token_file=tokens, reflection_open=True) as server,
        open_channel(server.address) as channel,
    ):
        assert SERVICE in await reflected(channel)
        assert await code_of(call(channel)) == grpc.StatusCode.UNAUTHENTICATED


# --- health, reflection, draining -----------------------------------------------------------------


async def health(channel, name=""):
    request = health_pb2.HealthCheckRequest(service=name)
    stub = health_pb2_grpc.HealthStub(channel)
    status = (await stub.Check(request, timeout=TIMEOUT_S)).status
    return health_pb2.HealthCheckResponse.ServingStatus.Name(status)


async def reflected(channel):
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    async for reply in stub.ServerReflectionInfo(iter([request]), timeout=TIMEOUT_S):
        return {service.name for service in reply.list_services_response.service}


async def test_health_tells_of_each_service_before_while_and_after_serving():
    async with running() as server, open_channel(server.address) as channel:
        for name in ("", SERVICE):
            assert await health(channel, name) == "NOT_SERVING"
        code = await code_of(health(channel, "outrider.v1.Nothing"))
        assert code == grpc.StatusCode.NOT_FOUND
        await server.serving({})
        for name in ("", SERVICE):
            assert await health(channel, name) == "SERVING"
        draining, finish = asyncio.Event(), asyncio.Event()

        async def drain():
            draining.set()
            await finish.wait()

        stopping = asyncio.create_task(server.until_stopped(drain))
        server.request_stop()
        await asyncio.wait_for(draining.wait(), TIMEOUT_S)
        for name in ("", SERVICE):
            assert await health(channel, name) == "NOT_SERVING"
        # Calls are served until the drain is over.
        assert await call(channel) == b"hello"
        finish.set()
        await asyncio.wait_for(stopping, TIMEOUT_S)
        assert await code_of(call(channel)) == grpc.StatusCode.UNAVAILABLE


async def test_running_calls_end_within_the_drain_time():
    started = asyncio.Event()

    class Slow(Echo):
        async def unary_unary(self, request, context):
            started.set()
            await asyncio.sleep(0.2 if request == b"short" else 60)
            return request

    async with running(Slow(), drain_s=0.6) as server, open_channel(server.address) as channel:
        calls = [asyncio.create_task(call(channel, payload=p)) for p in (b"short", b"long")]
        await started.wait()

        async def drain():
            pass

        server.request_stop()
        loop = asyncio.get_running_loop()
        before = loop.time()
        await asyncio.wait_for(server.until_stopped(drain), TIMEOUT_S)
        assert 0.4 < loop.time() - before < 5
        assert await calls[0] == b"short"
        with pytest.raises(grpc.aio.AioRpcError):
            await calls[1]


async def test_a_server_that_hangs_up_takes_no_new_calls_and_finishes_the_running_ones():
    started, finish, drained = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Slow(Echo):
        async def unary_unary(self, request, context):
            started.set()
            await finish.wait()
            return request

    async with running(Slow(), drain_s=20) as server, open_channel(server.address) as channel:
        under_way = asyncio.create_task(call(channel))
        await started.wait()
        stopping = asyncio.create_task(server.until_stopped(drained.wait, hang_up=True))
        server.request_stop()
        # On the connection of the running call, and on a new one.
        async with open_channel(server.address) as other:
            await until_refused(channel)
            assert await code_of(call(other, "unary_stream")) == grpc.StatusCode.UNAVAILABLE
        assert not under_way.done() and not stopping.done()
        finish.set()
        assert await under_way == b"hello"
        drained.set()
        await asyncio.wait_for(stopping, TIMEOUT_S)


async def until_refused(channel):
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            try:
                await asyncio.wait_for(call(channel, "unary_stream"), 2)
            except TimeoutError:
                continue  # It arrived in the very moment, and ends with the server.
            except grpc.aio.AioRpcError as error:
                # CANCELLED: it had arrived when the server hung up.
                assert error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
                return


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def test_the_health_port_tells_of_health_without_tls_and_of_nothing_else(tls):
    port = free_port()
    settings = server_tls(tls, tls_client_ca=tls["ca"], health_port=port)
    async with running(**settings) as server, open_channel(f"127.0.0.1:{port}") as channel:
        assert await health(channel) == "NOT_SERVING"
        await server.serving({})
        assert await health(channel) == await health(channel, SERVICE) == "SERVING"
        for refused in (call(channel), reflected(channel)):
            assert await code_of(refused) == grpc.StatusCode.UNIMPLEMENTED
        drained = asyncio.Event()
        stopping = asyncio.create_task(server.until_stopped(drained.wait, hang_up=True))
        server.request_stop()
        while await health(channel) != "NOT_SERVING":
            await asyncio.sleep(0.01)
        drained.set()
        await asyncio.wait_for(stopping, TIMEOUT_S)
        assert await code_of(health(channel)) == grpc.StatusCode.UNAVAILABLE


async def test_a_health_port_in_use_is_refused_by_name():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(Unavailable) as refused:
            async with running(health_port=taken.getsockname()[1]):
                pass
    assert refused.value.field == "health_port"


async def test_reflection_lists_the_services():
    async with running() as server, open_channel(server.address) as channel:
        names = await reflected(channel)
    assert {SERVICE, "grpc.health.v1.Health"} <= names


# --- limits, ports, the ready file --------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_oversized_messages_are_refused_and_others_go_on(kind):
    async with (
        running(max_message_bytes=1000) as server,
        open_channel(server.address) as channel,
    ):
        assert len(await call(channel, kind, b"x" * 900)) == 900
        code = await code_of(call(channel, kind, b"x" * 1100))
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await call(channel) == b"hello"


async def test_a_channel_has_the_limit_that_it_is_given():
    async with running() as server:
        async with open_channel(server.address, max_message_bytes=500) as channel:
            assert len(await call(channel, payload=b"x" * 400)) == 400
            code = await code_of(call(channel, payload=b"x" * 600))
            assert code == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_stream_that_is_silent_for_long_is_not_hung_up_on_for_its_pings():
    """A client asks a silent connection for a sign of life, four times here."""

    class Silent(Echo):
        async def unary_stream(self, request, context):
            await asyncio.sleep(5.5)
            yield request

    async with (
        running(Silent()) as server,
        open_channel(server.address, keepalive_s=1) as channel,
    ):
        assert await call(channel, "unary_stream") == b"hello"


async def test_calls_beyond_the_limit_are_refused():
    hold, both = asyncio.Event(), asyncio.Barrier(3)

    class Held(Echo):
        async def unary_unary(self, request, context):
            await both.wait()
            await hold.wait()
            return request

    async with (
        running(Held(), max_concurrent_calls=2) as server,
        open_channel(server.address) as channel,
    ):
        calls = [asyncio.create_task(call(channel)) for _ in range(2)]
        await asyncio.wait_for(both.wait(), TIMEOUT_S)
        assert await code_of(call(channel)) == grpc.StatusCode.RESOURCE_EXHAUSTED
        hold.set()
        assert await asyncio.gather(*calls) == [b"hello"] * 2


async def test_a_port_in_use_is_refused_and_says_which():
    async with running() as server:
        port = int(server.address.rpartition(":")[2])
        with pytest.raises(Unavailable, match=str(port)) as refused:
            async with running(port=port):
                pass
    assert refused.value.field == "port"


async def test_the_ready_file_appears_whole_and_only_once_serving(tmp_path, monkeypatch):
    path = tmp_path / "ready.json"
    seen = []
    rename = Path.rename

    def watched(self, target):
        # All of it is on disk under another name before its own name exists.
        seen.append((path.exists(), json.loads(self.read_text())))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", watched)
    async with running(ready_file=str(path)) as server:
        assert not path.exists()
        await server.serving({"model": "tiny"})
        content = json.loads(path.read_text())
        assert content == {
            "address": server.address, "pid": os.getpid(), "info": {"model": "tiny"}
        }  # fmt: skip
        assert seen == [(False, content)]
    assert [entry.name for entry in tmp_path.iterdir()] == ["ready.json"]


# --- errors over the wire -----------------------------------------------------------------------

ERRORS = [
    cls
    for cls in vars(errors).values()
    if isinstance(cls, type)
    and issubclass(cls, errors.OutriderError)
    and cls is not errors.OutriderError
]


def test_every_error_has_a_status_of_its_own():
    codes = {status_code(cls("x")) for cls in ERRORS}
    assert len(codes) == len(ERRORS) == 14
    assert status_code(errors.AlreadyRunning("x")) is grpc.StatusCode.ALREADY_EXISTS
    assert status_code(errors.Fenced("x")) is grpc.StatusCode.ABORTED


@pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.__name__)
async def test_errors_arrive_with_type_message_and_field(cls):
    echo = Echo()
    async with running(echo) as server, open_channel(server.address) as channel:
        for field in ("top_p", ""):
            echo.error = cls("it was ünlikely", field=field)
            for kind in KINDS:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(channel, kind, None)
                error = error_from_rpc(caught.value)
                assert type(error) is cls
                assert (error.message, error.field) == ("it was ünlikely", field)


async def test_when_to_retry_travels_as_clients_of_any_language_expect_it():
    echo = Echo(errors.ResourceExhausted("full", field="priority", retry_after_s=1.25))
    async with running(echo) as server, open_channel(server.address) as channel:
        for kind in KINDS:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(channel, kind, None)
            error = error_from_rpc(caught.value)
            assert (error.message, error.field, error.retry_after_s) == ("full", "priority", 1.25)
        trailers = dict(caught.value.trailing_metadata())
        assert trailers["grpc-retry-pushback-ms"] == "1250"
        status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
        assert (status.code, status.message) == (8, "full")
        [detail] = status.details
        assert detail.type_url == "type.googleapis.com/google.rpc.RetryInfo"
        echo.error = errors.ResourceExhausted("full")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel)
        assert error_from_rpc(caught.value).retry_after_s is None
        assert "grpc-status-details-bin" not in dict(caught.value.trailing_metadata())


@pytest.mark.parametrize("details", [b"", b"\xff\xff", b"\x1a\x02\x0a\x00"])
async def test_details_that_cannot_be_read_are_left_out(details):
    class Odd(Echo):
        async def unary_unary(self, request, context):
            trailers = (("grpc-status-details-bin", details),)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", trailers)

    async with running(Odd()) as server, open_channel(server.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel)
    error = error_from_rpc(caught.value)
    assert (error.message, error.retry_after_s) == ("full", None)


async def test_statuses_of_the_channel_itself_become_errors_too():
    async with open_channel("127.0.0.1:1") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel)
    assert isinstance(error_from_rpc(caught.value), Unavailable)

    class Broken(Echo):
        async def unary_unary(self, request, context):
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, "")

    async with running(Broken()) as server, open_channel(server.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel)
    error = error_from_rpc(caught.value)
    assert isinstance(error, errors.InternalError) and error.message == "OUT_OF_RANGE"


# --- the main of a service -----------------------------------------------------------------------


def ended(monkeypatch, argv, serve):
    monkeypatch.setattr(sys, "argv", ["demo", *argv])
    monkeypatch.setattr("outrider.rpc.server.configure_logging", lambda *args, **kwargs: None)
    with pytest.raises(SystemExit) as ended:
        run_service(ServerConfig, serve, name="demo")
    return ended.value.code


async def _refuse(config):
    raise InvalidArgument("no such model", field="model")


def test_an_error_that_the_user_can_mend_ends_the_service_with_one_line(monkeypatch):
    assert ended(monkeypatch, [], _refuse) == "error: model: no such model"
    code = ended(monkeypatch, ["--port", "many"], _refuse)
    assert code == "error: port: 'many' is not a valid int"
    monkeypatch.setenv("OUTRIDER_DEMO_PROT", "1")
    assert ended(monkeypatch, [], _refuse).startswith("error: OUTRIDER_DEMO_PROT: unknown setting")


SCRIPT = """
from outrider.rpc.server import Server, ServerConfig, run_service
async def serve(config):
    server = Server(config, ["outrider.v1.DraftService"])
    await server.start()
    await server.serving({})
    async def drain(): pass
    await server.until_stopped(drain)
run_service(ServerConfig, serve, name="demo")
"""


def service_process(*argv, script=SCRIPT, under=()):
    return subprocess.Popen(
        [*under, sys.executable, "-c", script, *argv],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def test_a_bad_setting_prints_one_line_and_no_traceback():
    process = service_process("--drain-s", "soon")
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (1, "")
    assert err.splitlines() == ["error: drain_s: 'soon' is not a valid float"]


def test_sigterm_drains_and_ends_a_service_cleanly(tmp_path):
    ready = tmp_path / "ready"
    process = service_process("--ready-file", str(ready))
    try:
        for line in process.stderr:
            if json.loads(line)["message"] == "serving":
                break
        assert json.loads(ready.read_text())["pid"] == process.pid
        process.terminate()
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert [json.loads(line)["message"] for line in err.splitlines()] == ["draining", "stopped"]


LOADING = """
import sys, time
from outrider.rpc.server import ServerConfig, run_service
async def serve(config):
    print("loading", flush=True)
    time.sleep(60)
run_service(ServerConfig, serve, name="demo")
"""
NEW_PIDS = ("unshare", "--pid", "--fork", "--kill-child")


def can_unshare():
    return shutil.which("unshare") and not subprocess.run([*NEW_PIDS, "true"]).returncode


@pytest.mark.skipif(not can_unshare(), reason="only root can make process 1 of a namespace")
def test_sigterm_ends_process_1_while_it_loads():
    """To process 1 of a container the kernel delivers no signal that has no handler."""
    process = service_process(script=LOADING, under=NEW_PIDS)
    try:
        assert process.stdout.readline() == "loading\n"
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGTERM)
        process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + signal.SIGTERM
