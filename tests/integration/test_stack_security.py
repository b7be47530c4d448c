"""Target and orchestrator as the chart runs them: mTLS between them, TLS and JWTs for callers."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import jwt
import pytest
import pytest_asyncio
from cryptography.hazmat.primitives.asymmetric import rsa
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from jwt.algorithms import RSAAlgorithm

from certificates import HOUR_S, Issued, cert_pem, certificate, pem
from outrider.client import GenerationOptions, OutriderClient
from outrider.errors import PermissionDenied, Unauthenticated
from outrider.rpc.channel import ChannelSecurity, open_channel
from outrider.rpc.files import LOOK_EVERY_S
from scripted_workers import Parts, Rig, until

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(120),
    pytest.mark.slow,
]

ISSUER, AUDIENCE = "https://issuer.test", "outrider"
KEYS = [rsa.generate_private_key(65537, 2048) for _ in range(2)]
CA, STRANGERS_CA = certificate("ca", ca=True), certificate("stranger", ca=True)
RENEWED_S = LOOK_EVERY_S + 0.5
"""Seconds after which a process has looked at its files again."""


def write_identity(folder: Path, *, issuer: Issued = CA, valid_s: float = HOUR_S) -> Path:
    folder.mkdir(exist_ok=True)
    issued = certificate(folder.name, issuer=issuer, valid_s=valid_s, names=(folder.name,))
    (folder / "crt").write_bytes(cert_pem(issued))
    (folder / "key").write_bytes(pem(issued[1]))
    (folder / "ca").write_bytes(cert_pem(CA))
    return folder


def key_set(*numbers: int) -> bytes:
    keys = [
        RSAAlgorithm.to_jwk(KEYS[n].public_key(), as_dict=True) | {"kid": str(n)} for n in numbers
    ]
    return json.dumps({"keys": keys}).encode()


def token(tenant: str, *, key: int = 0, seconds: float = 300) -> str:
    claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": f"{tenant}@test", "org": tenant}
    claims |= {"exp": int(time.time() + seconds)}
    return jwt.encode(claims, KEYS[key], "RS256", headers={"kid": str(key)})


@dataclass
class Secured:
    """Both processes, and the files that they follow."""

    folder: Path
    address: str
    target: str
    orchestrator: Any

    def security(self, tenant: str = "", **options: Any) -> ChannelSecurity:
        """Of a caller who has a token of this tenant, if of any."""
        path = self.folder / f"token-{tenant}"
        if tenant:
            path.write_text(token(tenant, **options))
        ca = str(self.folder / "orchestrator" / "ca")
        return ChannelSecurity(ca_file=ca, token_file=str(path) if tenant else "")

    @contextlib.asynccontextmanager
    async def client(self, tenant: str, **options: Any) -> AsyncIterator[OutriderClient]:
        security = self.security(tenant, **options)
        async with await OutriderClient.connect(
            address=self.address, security=security, timeout_s=30
        ) as client:
            yield client


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def secured(
    stack: Rig, parts: Parts, tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    target_files = write_identity(folder / "target")
    files = write_identity(folder / "orchestrator")
    (folder / "keys.json").write_bytes(key_set(0))
    tls = {"tls_cert": target_files / "crt", "tls_key": target_files / "key"}
    async with parts.worker(
        "target",
        tiny_models["target"],
        **tls,
        tls_client_ca=target_files / "ca",
        tls_client_names="orchestrator",
    ) as (_, target):
        async with parts.process(
            "orchestrator",
            "--targets",
            target,
            store_url=stack.store_url,
            worker_ca=files / "ca",
            worker_cert=files / "crt",
            worker_key=files / "key",
            tls_cert=files / "crt",
            tls_key=files / "key",
            jwt_keys=folder / "keys.json",
            jwt_issuer=ISSUER,
            jwt_audience=AUDIENCE,
            jwt_tenant_claim="org",
            audit="all",
            audit_file=folder / "audit.log",
        ) as (child, address):
            yield Secured(folder, address, target, child)


async def reaches(address: str, security: ChannelSecurity | None) -> bool:
    """Whether a new connection gets as far as the server's own answer, be it a refusal."""
    async with open_channel(address, security) as channel:
        call = channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=10)
        code = await call.code()
        assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE)
        return code is grpc.StatusCode.OK


async def test_plaintext_and_wrong_certificates_are_refused_by_both_tiers(
    secured: Secured, tmp_path: Path
) -> None:
    stranger = write_identity(tmp_path / "orchestrator", issuer=STRANGERS_CA)
    draft = write_identity(tmp_path / "draft")
    ca = str(secured.folder / "target" / "ca")
    (tmp_path / "other-ca").write_bytes(cert_pem(STRANGERS_CA))
    assert await reaches(secured.address, secured.security())
    for security in (None, ChannelSecurity(ca_file=str(tmp_path / "other-ca"))):
        assert not await reaches(secured.address, security)
        assert not await reaches(secured.target, security)
    # The target wants a certificate of its CA, with the name of an orchestrator.
    assert not await reaches(secured.target, ChannelSecurity(ca_file=ca))
    for folder, code in ((stranger, "UNAVAILABLE"), (draft, "PERMISSION_DENIED")):
        own = {"cert_file": str(folder / "crt"), "key_file": str(folder / "key")}
        async with open_channel(secured.target, ChannelSecurity(ca_file=ca, **own)) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary("/outrider.v1.TargetService/Info")(b"", timeout=10)
        assert refused.value.code().name == code


def methods_of(address: str, ca: bytes, bearer: str, **own: bytes) -> list[tuple[str, bool, bool]]:
    """Path, streaming of requests and of responses, of all that the server tells of; `own` is the
    caller's certificate and key, where it has one."""
    credentials = grpc.composite_channel_credentials(
        grpc.ssl_channel_credentials(ca, **own), grpc.access_token_call_credentials(bearer)
    )
    with grpc.secure_channel(address, credentials) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = DescriptorPool(database)
        return [
            (f"/{name}/{method.name}", method.client_streaming, method.server_streaming)
            for name in database.get_services()
            for method in pool.FindServiceByName(name).methods
        ]


async def test_no_method_but_health_is_served_without_a_good_token(secured: Secured) -> None:
    ca = cert_pem(CA)
    methods = await asyncio.to_thread(methods_of, secured.address, ca, token("acme"))
    assert "/outrider.v1.GenerationService/Generate" in {path for path, *_ in methods}
    bad = (None, "Bearer wrong", f"Bearer {token('acme', seconds=-60)}",
           f"Bearer {token('acme', key=1)}")  # fmt: skip
    async with open_channel(secured.address, secured.security()) as channel:
        for path, requests, responses in methods:
            kind = f"{'stream' if requests else 'unary'}_{'stream' if responses else 'unary'}"
            for given in bad:
                metadata = (("authorization", given),) if given else None
                start = getattr(channel, kind)(path)
                call = start(iter(()) if requests else b"", metadata=metadata, timeout=10)
                if "/grpc.health.v1.Health/" in path:
                    call.cancel()
                    continue
                assert await call.code() is grpc.StatusCode.UNAUTHENTICATED, (path, given)
    assert await reaches(secured.address, secured.security())


async def test_callers_see_their_own_sessions_and_the_audit_log_who_tried(
    secured: Secured,
) -> None:
    async with secured.client("acme") as acme, secured.client("bob") as bob:
        options = GenerationOptions(max_tokens=4, keep_session=True)
        done = await acme.complete("a secret prompt", options)
        assert (await acme.get_session(done.session_id)).length > 4
        with pytest.raises(PermissionDenied, match="another caller"):
            await bob.get_session(done.session_id)
        with pytest.raises(PermissionDenied, match="another caller"):
            await bob.complete("x", GenerationOptions(session_id=done.session_id))
    text, lines, denied = "", list[dict[str, Any]](), list[dict[str, Any]]()

    async def both_are_told() -> bool:  # A moment after the caller was.
        nonlocal text, lines, denied
        text = (secured.folder / "audit.log").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        denied = [line for line in lines if line["outcome"] == "PERMISSION_DENIED"]
        return len(denied) >= 2

    await until(both_are_told, "the audit log tells of both")
    assert [line["method"].rpartition("/")[2] for line in denied] == ["GetSession", "Generate"]
    assert {(line["tenant"], line["subject"], line["session_id"]) for line in denied} == {
        ("bob", "bob@test", done.session_id)
    }
    assert any(
        (line["outcome"], line["tenant"], line["session_id"]) == ("OK", "acme", done.session_id)
        for line in lines
    )
    log = secured.orchestrator.log.read_text()
    for secret in ("a secret prompt", token("acme").split(".")[1][:40], done.text):
        assert secret not in text and secret not in log


async def test_expired_certificates_are_replaced_under_running_streams(secured: Secured) -> None:
    options = GenerationOptions(max_tokens=300, ignore_eos=True, num_speculative_tokens=0)
    async with secured.client("acme") as client:
        done: list[tuple[int, ...]] = []
        enough = asyncio.Event()

        async def generate() -> None:
            while not enough.is_set():
                done.append((await client.complete("renewal", options)).token_ids)

        streams = [asyncio.create_task(generate()) for _ in range(2)]
        for name in ("target", "orchestrator"):
            write_identity(secured.folder / name, valid_s=-1)
        await asyncio.sleep(RENEWED_S)
        assert not await reaches(secured.address, secured.security())
        for name in ("target", "orchestrator"):
            write_identity(secured.folder / name)
        await asyncio.sleep(RENEWED_S)
        assert await reaches(secured.address, secured.security())
        enough.set()
        await asyncio.gather(*streams)
    assert len(done) >= 2 and len(set(done)) == 1 and len(done[0]) == 300
    assert "Traceback" not in secured.orchestrator.log.read_text()


async def test_an_issuer_and_a_caller_change_keys_without_a_restart(secured: Secured) -> None:
    async with secured.client("acme") as client:
        await client.list_models()
        (secured.folder / "keys.json").write_bytes(key_set(1))
        await asyncio.sleep(RENEWED_S)
        with pytest.raises(Unauthenticated, match="does not have"):
            await client.list_models()
        secured.security("acme", key=1)
        await asyncio.sleep(RENEWED_S)
        await client.list_models()
