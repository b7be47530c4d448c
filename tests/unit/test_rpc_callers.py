"""Who may call: tokens, the guard before every method, quotas, the audit log, limits of calls."""

import asyncio
import contextlib
import importlib
import json
import logging
import pkgutil

import grpc
import grpc.aio
import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

import outrider.v1
from outrider.errors import (
    InternalError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
)
from outrider.rpc import audit as audit_module
from outrider.rpc import quota as quota_module
from outrider.rpc import server as server_module
from outrider.rpc.audit import AuditLog, CallRecord, configure_audit
from outrider.rpc.auth import Authenticator, Caller, current_caller
from outrider.rpc.channel import MAX_METADATA_BYTES, open_channel
from outrider.rpc.quota import CallQuota
from outrider.rpc.security import SecuritySettings
from outrider.rpc.server import Server, ServerConfig
from outrider.rpc.status import abort_with
from outrider.rpc.tokens import DEFAULT_TENANT, StaticTokens
from outrider.v1 import (
    diagnosis_pb2,
    diagnosis_pb2_grpc,
    draft_pb2,
    draft_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    target_pb2,
    target_pb2_grpc,
)

TIMEOUT_S = 10.0
GENERATION = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]
SERVICES = (
    (GENERATION, generation_pb2_grpc.add_GenerationServiceServicer_to_server),
    (draft_pb2.DESCRIPTOR.services_by_name["DraftService"],
     draft_pb2_grpc.add_DraftServiceServicer_to_server),
    (target_pb2.DESCRIPTOR.services_by_name["TargetService"],
     target_pb2_grpc.add_TargetServiceServicer_to_server),
    (diagnosis_pb2.DESCRIPTOR.services_by_name["DiagnosisService"],
     diagnosis_pb2_grpc.add_DiagnosisServiceServicer_to_server),
)  # fmt: skip


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / "tokens"
    path.write_text("# callers\n\nacme: s3cret\nacme:s3cret\nacme:later\nbob:builder\nplain\n")
    return str(path)


def bearer(token):
    return (("authorization", f"Bearer {token}"),)


# --- static tokens ----------------------------------------------------------------------------


def test_tokens_map_to_tenants_several_to_one(tokens):
    known = StaticTokens(tokens)
    for token, tenant in (
        ("s3cret", "acme"),
        ("later", "acme"),
        ("builder", "bob"),
        ("plain", DEFAULT_TENANT),
    ):
        assert known.tenant_of(token) == tenant
    for wrong in ("", "s3cre", "s3cret ", "acme:s3cret", "ünï", "\ud800"):
        assert known.tenant_of(wrong) is None


def test_tokens_are_not_kept_in_memory(tokens):
    known = StaticTokens(tokens)
    seen = str(vars(known)) + str(vars(known._tenants))
    assert "acme" in seen and "s3cret" not in seen and "builder" not in seen


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "no token"),
        ("# nothing\n", "no token"),
        ("acme:\n", "line 1"),
        ("good\nacme:\n", "line 2"),
        ("acme:same\nbob:same\n", "line 2 .* another tenant"),
        ("x" * 129 + ":token\n", "128 printable"),
        ("a\tb:token\n", "128 printable"),
    ],
)
def test_token_files_that_cannot_be_meant_are_refused_without_quoting(tmp_path, text, fault):
    """An empty file must not switch authentication off."""
    path = tmp_path / "tokens"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=fault) as refused:
        StaticTokens(str(path))
    assert refused.value.field == "auth_token_file" and "same" not in str(refused.value)


async def test_one_bearer_token_names_the_caller(tokens):
    known = Authenticator(StaticTokens(tokens))
    assert await known.caller(bearer("s3cret")) == Caller("acme")
    assert await known.caller([("authorization", b"bearer plain")]) == Caller(DEFAULT_TENANT)
    for metadata in (
        (),
        bearer("wrong"),
        bearer(""),
        bearer("s3cret "),
        bearer("s3cret") + bearer("builder"),  # whose call would it be?
        (("authorization", "s3cret"),),
        (("authorization", "Basic s3cret"),),
        (("x-authorization", "Bearer s3cret"),),
    ):
        with pytest.raises(Unauthenticated):
            await known.caller(metadata)


async def test_without_tokens_everyone_is_the_default_tenant():
    assert await Authenticator().caller(()) == Caller(DEFAULT_TENANT)
    assert await Authenticator().caller(bearer("x")) == Caller(DEFAULT_TENANT)


# --- every method of every service ------------------------------------------------------------


class Anything:
    """A servicer whose methods all answer at once, and tell whose call they served."""

    def __init__(self, service):
        self.served = []
        for method in service.methods:
            setattr(self, method.name, self._behaviour(method))

    def _behaviour(self, method):
        def served():
            self.served.append((method.name, current_caller()))
            return method.output_type._concrete_class()

        async def single(request, context):
            return served()

        async def stream(request, context):
            yield served()

        return stream if method.server_streaming else single


@contextlib.asynccontextmanager
async def everything(service, add, **settings):
    server = Server(ServerConfig(**settings), [service.full_name])
    servicer = Anything(service)
    add(servicer, server.grpc)
    await server.start()
    try:
        async with open_channel(server.address) as channel:
            yield server, servicer, channel
    finally:
        await server.grpc.stop(None)


def methods_told_by(address, metadata):
    """(path, method descriptor) of all that a server says that it offers, by reflection."""
    credentials = grpc.metadata_call_credentials(lambda context, callback: callback(metadata, None))
    channel_credentials = grpc.composite_channel_credentials(
        grpc.local_channel_credentials(), credentials
    )
    with grpc.secure_channel(address, channel_credentials) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        from google.protobuf.descriptor_pool import DescriptorPool

        pool = DescriptorPool(database)
        return [
            (f"/{name}/{method.name}", method)
            for name in database.get_services()
            for method in pool.FindServiceByName(name).methods
        ]


async def status_of(channel, path, method, metadata=None):
    kinds = ["stream" if s else "unary" for s in (method.client_streaming, method.server_streaming)]
    start = getattr(channel, "_".join(kinds))(path)
    request = iter(()) if method.client_streaming else b""
    call = start(request, metadata=metadata, timeout=TIMEOUT_S)
    try:
        if method.server_streaming:
            async for _ in call:
                break
            else:
                return await call.code()
            return grpc.StatusCode.OK
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_every_service_of_the_protos_is_one_of_those_that_are_tried():
    modules = (
        importlib.import_module(f"outrider.v1.{module.name}")
        for module in pkgutil.iter_modules(outrider.v1.__path__)
        if module.name.endswith("_pb2")
    )
    found = {name for m in modules for name in m.DESCRIPTOR.services_by_name}
    assert found == {service.name for service, _ in SERVICES}


@pytest.mark.parametrize(("service", "add"), SERVICES, ids=lambda value: getattr(value, "name", ""))
async def test_no_method_but_health_is_served_without_a_token(service, add, tokens):
    """Methods are those that the running server tells of, so that none can be forgotten."""
    async with everything(service, add, auth_token_file=tokens) as (server, servicer, channel):
        methods = await asyncio.to_thread(methods_told_by, server.address, bearer("plain"))
        open_ones = {path for path, _ in methods if path.startswith("/grpc.health.v1.Health/")}
        assert {f"/{service.full_name}/{m.name}" for m in service.methods} < {p for p, _ in methods}
        assert len(open_ones) >= 2 and any("ServerReflection" in path for path, _ in methods)
        for path, method in methods:
            for metadata in (None, bearer("wrong"), bearer("builder ")):
                status = await status_of(channel, path, method, metadata)
                refused = status is grpc.StatusCode.UNAUTHENTICATED
                assert refused == (path not in open_ones), (path, status)
        assert servicer.served == []
        for path, method in methods:
            if service.full_name in path:
                assert await status_of(channel, path, method, bearer("builder")) is (
                    grpc.StatusCode.OK
                )
        assert servicer.served == [(m.name, Caller("bob")) for m in service.methods]


# --- quotas -----------------------------------------------------------------------------------


class Clock:
    def __init__(self):
        self.now = 50.0

    def __call__(self):
        return self.now


def taken(quota, tenant):
    try:
        quota.take(tenant)
    except ResourceExhausted:
        return False
    return True


def test_a_caller_has_its_calls_a_second_and_others_theirs():
    clock = Clock()
    quota = CallQuota(2.0, 5, clock)
    assert [taken(quota, "acme") for _ in range(7)] == [True] * 5 + [False] * 2
    assert taken(quota, "bob")
    clock.now += 0.5
    assert [taken(quota, "acme") for _ in range(2)] == [True, False]
    clock.now += 100
    assert [taken(quota, "acme") for _ in range(6)] == [True] * 5 + [False]
    with pytest.raises(ResourceExhausted, match=r"2 calls a second; retry in 0\.50 s"):
        quota.take("acme")


def test_quotas_have_defaults_and_ranges():
    assert all(taken(CallQuota(0.0), "acme") for _ in range(100))
    clock = Clock()
    quota = CallQuota(0.3, clock=clock)
    assert [taken(quota, "acme") for _ in range(2)] == [True, False]
    quota = CallQuota(10, clock=clock)
    assert sum(taken(quota, "acme") for _ in range(50)) == 20
    for values, field in (((-1.0,), "calls_per_s"), ((float("nan"),), "calls_per_s"),
                          ((1.0, -1), "calls_burst")):  # fmt: skip
        with pytest.raises(InvalidArgument) as refused:
            CallQuota(*values)
        assert refused.value.field == field


def test_quotas_remember_so_many_callers_at_most(monkeypatch):
    monkeypatch.setattr(quota_module, "MAX_CALLERS", 3)
    quota = CallQuota(1.0, 1, Clock())
    assert all(taken(quota, tenant) for tenant in "abcd")
    assert len(quota._buckets) == 3
    assert not taken(quota, "d") and not taken(quota, "b")
    assert taken(quota, "a")  # forgotten


async def test_calls_over_the_quota_are_refused_by_caller(tokens):
    service, add = SERVICES[0]
    settings = {"auth_token_file": tokens, "calls_per_s": 0.001, "calls_burst": 2}
    async with everything(service, add, **settings) as (_, servicer, channel):
        method = service.methods_by_name["ListModels"]
        path = f"/{service.full_name}/ListModels"

        async def call(token):
            return (await status_of(channel, path, method, bearer(token))).name

        # Whose token is wrong uses up nobody's calls.
        assert [await call("wrong") for _ in range(3)] == ["UNAUTHENTICATED"] * 3
        acme = [await call(token) for token in ("s3cret", "later", "s3cret")]
        assert acme == ["OK", "OK", "RESOURCE_EXHAUSTED"]
        assert await call("builder") == "OK" and len(servicer.served) == 3


# --- the audit log ----------------------------------------------------------------------------


class Talker(generation_pb2_grpc.GenerationServiceServicer):
    """Does what a request's id says."""

    async def Generate(self, request, context):
        if request.request_id == "denied":
            await abort_with(context, PermissionDenied("another caller's"))
        if request.request_id == "broken":
            raise RuntimeError("a fault of ours")
        request.request_id = request.request_id or "drawn"
        yield generation_pb2.GenerateResponse(session_id="S" * 22, text="the answer")
        if request.request_id == "slow":
            await asyncio.sleep(60)
        yield generation_pb2.GenerateResponse(session_id="S" * 22, text="goes on")

    async def GetSession(self, request, context):
        await abort_with(context, NotFound("gone"))


@contextlib.asynccontextmanager
async def talking(**settings):
    server = Server(ServerConfig(**settings), [GENERATION.full_name])
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(Talker(), server.grpc)
    await server.start()
    try:
        async with open_channel(server.address) as channel:
            yield generation_pb2_grpc.GenerationServiceStub(channel)
    finally:
        await server.grpc.stop(None)


def request(**fields):
    message = generation_pb2.GenerateRequest(**fields)
    message.prompt.add(text="a secret prompt")
    return message


async def generate(stub, token, **fields):
    call = stub.Generate(request(**fields), metadata=bearer(token), timeout=TIMEOUT_S)
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for _ in call:
            if fields.get("request_id") == "slow":
                break
    call.cancel()


@pytest.fixture
def audited(tmp_path):
    """Reads what is in the audit log, once so many lines are there."""
    path = tmp_path / "audit.log"
    configure_audit(str(path))

    async def lines(count):
        async with asyncio.timeout(TIMEOUT_S):
            while len(path.read_text().splitlines()) < count:
                await asyncio.sleep(0.01)
        return [json.loads(line) for line in path.read_text().splitlines()]

    yield path, lines
    for handler in audit_module.audit_logger.handlers[:]:
        audit_module.audit_logger.removeHandler(handler)
        handler.close()
    audit_module.audit_logger.propagate = True


async def test_the_audit_log_tells_who_called_what_and_how_it_ended(tokens, audited):
    path, lines = audited
    async with talking(auth_token_file=tokens, audit="all") as stub:
        await generate(stub, "s3cret")
        await generate(stub, "wrong", request_id="r" * 500)
        await generate(stub, "builder", request_id="denied", session_id="B" * 22)
        await generate(stub, "builder", request_id="broken")
        await generate(stub, "builder", request_id="slow")
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.GetSession(
                generation_pb2.GetSessionRequest(session_id="C" * 22), metadata=bearer("plain")
            )
        told = await lines(6)
    by_outcome = {line["outcome"]: line for line in told}
    assert set(by_outcome) == {
        "OK", "UNAUTHENTICATED", "PERMISSION_DENIED", "UNKNOWN", "CANCELLED", "NOT_FOUND"
    }  # fmt: skip
    good = by_outcome["OK"]
    assert good["logger"] == "outrider.audit" and good["peer"].startswith("ipv4:127.0.0.1:")
    assert good["method"] == "/outrider.v1.GenerationService/Generate"
    assert (good["tenant"], good["session_id"], good["request_id"]) == ("acme", "S" * 22, "drawn")
    assert 0 <= good["duration_ms"] < 10_000
    refused = by_outcome["UNAUTHENTICATED"]
    assert (refused["tenant"], refused["request_id"]) == ("", "r" * 128)
    denied = by_outcome["PERMISSION_DENIED"]
    assert (denied["tenant"], denied["session_id"]) == ("bob", "B" * 22)
    assert by_outcome["NOT_FOUND"]["session_id"] == "C" * 22
    for secret in ("s3cret", "builder", "wrong", "prompt", "the answer", "goes on"):
        assert secret not in path.read_text()


async def test_by_default_refused_calls_are_told_alone(tokens, audited):
    assert SecuritySettings().audit == "refused"
    path, lines = audited
    async with talking(auth_token_file=tokens) as stub:
        await generate(stub, "s3cret")
        await generate(stub, "wrong")
        await generate(stub, "builder", request_id="denied")
        await generate(stub, "builder", request_id="broken")
        assert {line["outcome"] for line in await lines(2)} == {
            "UNAUTHENTICATED", "PERMISSION_DENIED"
        }  # fmt: skip
    async with talking(auth_token_file=tokens, audit="off") as stub:
        await generate(stub, "wrong")
        await generate(stub, "s3cret")
    assert len(path.read_text().splitlines()) == 2


def test_a_flood_of_refused_calls_does_not_fill_the_disk(audited):
    path, _ = audited
    clock = Clock()
    log = AuditLog("refused", clock)
    for _ in range(1000):
        log.write(CallRecord("/a/B"), "UNAUTHENTICATED", 0.0)
    assert len(path.read_text().splitlines()) == 50
    clock.now += 1
    log.write(CallRecord("/a/B"), "UNAUTHENTICATED", 0.0)
    last = json.loads(path.read_text().splitlines()[-1])
    assert last["suppressed"] == 950


def test_the_audit_log_survives_rotation_and_bad_paths(audited, tmp_path):
    path, _ = audited
    log = AuditLog("all")
    log.write(CallRecord("/a/B"), "OK", 0.0)
    path.rename(tmp_path / "audit.log.1")
    log.write(CallRecord("/a/B\n"), "OK", 0.0)
    assert len(path.read_text().splitlines()) == 1
    with pytest.raises(InvalidArgument) as refused:
        configure_audit("/nowhere/audit.log")
    assert refused.value.field == "audit_file"
    with pytest.raises(InvalidArgument):
        AuditLog("some")


def test_without_a_file_the_audit_log_goes_to_stderr(audited, capsys, caplog):
    configure_audit("")
    caplog.set_level(logging.ERROR)
    AuditLog("all").write(CallRecord("/a/B", tenant="acme"), "OK", 0.001)
    line = json.loads(capsys.readouterr().err)
    assert (line["tenant"], line["duration_ms"]) == ("acme", 1.0)


# --- limits of calls --------------------------------------------------------------------------


async def test_metadata_has_a_limit():
    async with talking() as stub:
        for size, good in ((MAX_METADATA_BYTES - 2000, True), (MAX_METADATA_BYTES + 100, False)):
            call = stub.Generate(request(), metadata=(("x-filler", "x" * size),), timeout=TIMEOUT_S)
            if good:
                assert (await call.read()).text == "the answer"
            else:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call.read()
                assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_messages_of_errors_have_a_limit_so_that_they_arrive():
    class Echo(generation_pb2_grpc.GenerationServiceServicer):
        async def GetSession(self, request, context):
            await abort_with(context, InternalError(request.session_id, field="model"))

    server = Server(ServerConfig(), [GENERATION.full_name])
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(Echo(), server.grpc)
    await server.start()
    async with open_channel(server.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetSession(generation_pb2.GetSessionRequest(session_id="é" * 1_000_000))
    await server.grpc.stop(None)
    assert refused.value.code() is grpc.StatusCode.INTERNAL
    assert refused.value.details() == "é" * 512


async def test_who_connects_and_says_nothing_is_hung_up_on(monkeypatch):
    monkeypatch.setattr(server_module, "HANDSHAKE_S", 0.3)
    async with talking():
        pass
    server = Server(ServerConfig(), [])
    await server.start()
    host, _, port = server.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    async with asyncio.timeout(TIMEOUT_S):
        while await reader.read(1 << 16):
            pass
    writer.close()
    await server.grpc.stop(None)
