"""The chart's defaults and security values as they are rendered, run: mTLS on every arrow, tokens
and JWTs, quotas, the audit log, stores with users of their own, traces, KV blocks in Redis.
"""

import asyncio
import contextlib
import json
import sys
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
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, NoPermissionError

from certificates import cert_pem, certificate
from charts import Case
from otlp_receiver import Receiver
from outrider.client import GenerationOptions, OutriderClient
from outrider.errors import PermissionDenied, ResourceExhausted
from outrider.rpc.channel import ChannelSecurity, open_channel
from outrider.rpc.files import LOOK_EVERY_S
from outrider.v1 import worker_pb2
from rendered_stack import NAMES, Pods, identity
from scripted_workers import Parts, until
from test_stack_security import methods_of, reaches

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(180),
    pytest.mark.slow,
]

CA, STRANGERS_CA = certificate("ca", ca=True), certificate("stranger", ca=True)
ISSUER_KEY = ec.generate_private_key(ec.SECP256R1())
ISSUER = "https://issuer.test"
SERVICES = ("orchestrator", "draft", "target")
RENEWED_S = LOOK_EVERY_S + 0.5
WORKERS_TOKEN = "a-token-that-workers-ask-for"


def values(endpoint: str) -> dict[str, Any]:
    return {
        "tls": {"mode": "secrets", "secrets": {tier: f"{tier.lower()}-tls" for tier in NAMES}},
        "auth": {
            "callers": {"existingSecret": "callers"},
            "adminCallers": ["acme", "ops"],
            "workers": {"existingSecret": "workers", "acceptedKey": "tokens"},
            "jwt": {
                "issuer": ISSUER,
                "audience": "outrider",
                "keysSecret": "issuer",
                "tenantClaim": "org",
            },
        },
        "quotas": {
            "callsPerSecond": 20,
            "callsBurst": 40,
            "callers": {"acme": {"running": 4, "weight": 2}, "*": {"running": 2}},
        },
        "audit": {"level": "all"},
        "telemetry": {"otlp": {"endpoint": endpoint}},
        "redis": {
            "existingSecret": "store",
            "users": [{"name": "looker", "secret": "looker", "rights": ["~*", "+ping", "+scan"]}],
        },
        "kvStore": {"enabled": True, "existingSecret": "kv", "restore": "always"},
    }


def key_set() -> bytes:
    key = ECAlgorithm.to_jwk(ISSUER_KEY.public_key(), as_dict=True) | {"kid": "1"}
    return json.dumps({"keys": [key]}).encode()


def token_of(tenant: str, *, audience: str = "outrider") -> str:
    claims = {"iss": ISSUER, "aud": audience, "sub": "x", "org": tenant}
    claims |= {"exp": int(time.time() + 300)}
    return jwt.encode(claims, ISSUER_KEY, "ES256", headers={"kid": "1"})


@dataclass
class Installed:
    """The release, and who may call it."""

    pods: Pods
    receiver: Receiver

    def security(self, token: str = "", *, as_tier: str = "") -> ChannelSecurity:
        """Of a caller, or of one who has a tier's certificate."""
        folder = self.pods.folder / "callers"
        folder.mkdir(exist_ok=True)
        (folder / "ca").write_bytes(cert_pem(CA))
        path = folder / f"token-{abs(hash(token))}"
        path.write_text(token)
        files = {"ca_file": str(folder / "ca"), "token_file": str(path) if token else ""}
        if as_tier:
            tls = self.pods.root(as_tier) / "etc/outrider/tls"
            files |= {"cert_file": str(tls / "tls.crt"), "key_file": str(tls / "tls.key")}
        return ChannelSecurity(**files)

    @contextlib.asynccontextmanager
    async def client(self, token: str) -> AsyncIterator[OutriderClient]:
        async with await OutriderClient.connect(
            address=self.pods.addresses["orchestrator"],
            security=self.security(token),
            timeout_s=30,
        ) as client:
            yield client

    async def info(self, tier: str) -> worker_pb2.InfoResponse:
        own = self.security(WORKERS_TOKEN, as_tier="orchestrator")
        async with open_channel(self.pods.addresses[tier], own) as channel:
            call = channel.unary_unary(f"/outrider.v1.{tier.capitalize()}Service/Info")
            return worker_pb2.InfoResponse.FromString(await call(b"", timeout=10))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def installed(
    parts: Parts, tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Installed]:
    secrets = {f"{tier.lower()}-tls": identity(tier, CA) for tier in NAMES} | {
        "callers": {"tokens": b"acme:acme-token\nbob:bob-token\n", "token": b"acme-token"},
        "workers": {"token": WORKERS_TOKEN.encode(), "tokens": WORKERS_TOKEN.encode()},
        "issuer": {"jwks.json": key_set()},
        "store": {"password": b"of-the-store"},
        "kv": {"password": b"of-the-blocks", "orchestratorPassword": b"of-the-index"},
        "looker": {"password": b"of-the-looker"},
    }
    # The cache of compiled kernels is this machine's.
    model = {"dtype": "float32", "threads": 1, "kv_memory": "8MiB", "cache_dir": ""}
    async with contextlib.AsyncExitStack() as running:
        receiver = await running.enter_async_context(Receiver())
        case = Case("stack", values(receiver.endpoint), "demo")
        pods = Pods(tmp_path_factory.mktemp("pods"), case, secrets)
        for tier in ("redis", "kvstore"):
            await running.enter_async_context(pods.store(tier))
        for tier in ("draft", "target"):
            settings = model | {"model": tiny_models[tier], "drain_s": 1}
            await running.enter_async_context(pods.service(parts, tier, **settings))
        await running.enter_async_context(pods.service(parts, "orchestrator", drain_s=1))
        yield Installed(pods, receiver)


async def test_a_caller_gets_text_and_every_part_does_its_own(installed: Installed) -> None:
    options = GenerationOptions(
        max_tokens=80, ignore_eos=True, num_speculative_tokens=3, temperature=0.0
    )
    async with installed.client("acme-token") as client:
        done = await client.complete("all that is rendered works together " * 3, options)
    assert len(done.token_ids) == 80 and done.stats.accepted > 5

    async def written() -> bool:
        return (await installed.info("target")).kv_store.blocks_written > 2

    await until(written, "the target writes KV blocks behind")
    info = await installed.info("target")
    assert info.kv_store.up and not info.kv_store.errors
    assert not (await installed.info("draft")).HasField("kv_store")

    async def traced() -> bool:
        return {span.service for span in installed.receiver.spans} >= {
            f"outrider-{tier}" for tier in SERVICES
        }

    await until(traced, "all tiers tell the collector of the request", 15)


async def test_orchestrators_ask_the_index_and_remove_blocks_as_a_user_of_their_own(
    installed: Installed,
) -> None:
    orchestrator = installed.pods.children["orchestrator"]
    async with installed.client(token_of("leaver")) as client:
        before = (await installed.info("target")).kv_store.blocks_written
        await client.complete("what a caller leaves behind " * 4, GenerationOptions(max_tokens=40))

        async def written() -> bool:
            return (await installed.info("target")).kv_store.blocks_written > before + 1

        await until(written, "the caller has blocks in the store", 30)
        assert (await client.purge_sessions()).kv_blocks > 1
        # Nothing that it may not do was asked of the index, or of the blocks.
        assert "denies" not in orchestrator.log.read_text()


async def test_the_callers_that_values_name_may_look_inside(
    installed: Installed, tmp_path: Path
) -> None:
    async def looked(token: str) -> list[dict[str, str]]:
        (tmp_path / "token").write_text(token)
        ca = str(installed.security().ca_file)
        doctor = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "outrider.cli", "doctor", "--json", "--samples", "3"),
            *("--ca-file", ca, "--token-file", str(tmp_path / "token")),
            installed.pods.addresses["orchestrator"],
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await asyncio.wait_for(doctor.communicate(), 120)
        return list(json.loads(output)["checks"])

    stores = [check for check in await looked("acme-token") if check["area"] == "store"]
    assert {check["subject"].split(" of ")[0] for check in stores} == {"session store", "KV store"}
    assert not [check for check in stores if check["status"] in ("fail", "unknown")], stores
    [hidden] = [check for check in await looked("bob-token") if check["area"] == "store"]
    assert hidden["status"] == "unknown"


async def test_plaintext_and_other_cas_are_refused_everywhere(
    installed: Installed, tmp_path: Path
) -> None:
    (tmp_path / "ca").write_bytes(cert_pem(STRANGERS_CA))
    for tier in SERVICES:
        address = installed.pods.addresses[tier]
        assert await reaches(address, installed.security(as_tier="orchestrator")), tier
        assert not await reaches(address, None), tier
        assert not await reaches(address, ChannelSecurity(ca_file=str(tmp_path / "ca"))), tier
    for tier in ("draft", "target"):  # They want a certificate, and one of their CA.
        address = installed.pods.addresses[tier]
        assert not await reaches(address, installed.security(WORKERS_TOKEN)), tier
        stranger = identity("orchestrator", STRANGERS_CA)
        for name, content in stranger.items():
            (tmp_path / name).write_bytes(content)
        security = ChannelSecurity(
            ca_file=installed.security().ca_file,
            cert_file=str(tmp_path / "tls.crt"),
            key_file=str(tmp_path / "tls.key"),
            token_file=installed.security(WORKERS_TOKEN).token_file,
        )
        assert not await reaches(address, security), tier


@pytest.mark.parametrize(
    ("tier", "by", "allowed"),
    [
        ("target", "orchestrator", True),
        ("target", "draft", False),
        ("target", "redis", False),
        ("draft", "orchestrator", True),
        ("draft", "target", True),
        ("draft", "redis", False),
    ],
)
async def test_workers_are_called_by_those_that_the_design_names(
    installed: Installed, tier: str, by: str, allowed: bool
) -> None:
    security = installed.security(WORKERS_TOKEN, as_tier=by)
    async with open_channel(installed.pods.addresses[tier], security) as channel:
        call = channel.unary_unary(f"/outrider.v1.{tier.capitalize()}Service/Info")(b"", timeout=10)
        code = grpc.StatusCode.OK if allowed else grpc.StatusCode.PERMISSION_DENIED
        assert await call.code() is code


async def test_no_method_but_health_is_served_without_a_token(installed: Installed) -> None:
    for tier, token in (
        ("orchestrator", "bob-token"),
        ("draft", WORKERS_TOKEN),
        ("target", WORKERS_TOKEN),
    ):
        address = installed.pods.addresses[tier]
        own = installed.security(as_tier="orchestrator")
        assert own.cert_file and own.key_file
        chain, key = Path(own.cert_file).read_bytes(), Path(own.key_file).read_bytes()
        methods = await asyncio.to_thread(
            methods_of, address, cert_pem(CA), token, certificate_chain=chain, private_key=key
        )
        assert len(methods) > 4
        async with open_channel(address, own) as channel:
            for path, requests, responses in methods:
                kind = f"{'stream' if requests else 'unary'}_{'stream' if responses else 'unary'}"
                for given in (None, "Bearer wrong", f"Bearer {token_of('bob', audience='y')}"):
                    metadata = (("authorization", given),) if given else None
                    call = getattr(channel, kind)(path)(
                        iter(()) if requests else b"", metadata=metadata, timeout=10
                    )
                    if "/grpc.health.v1.Health/" in path:
                        call.cancel()
                        continue
                    assert await call.code() is grpc.StatusCode.UNAUTHENTICATED, (path, given)
        assert await reaches(address, own)


async def test_callers_by_token_and_by_jwt_see_their_own_sessions(installed: Installed) -> None:
    options = GenerationOptions(max_tokens=4, keep_session=True)
    async with installed.client(token_of("acme")) as acme, installed.client("bob-token") as bob:
        done = await acme.complete("a secret prompt", options)
        with pytest.raises(PermissionDenied, match="another caller"):
            await bob.get_session(done.session_id)
        with pytest.raises(PermissionDenied, match="another caller"):
            await bob.complete("x", GenerationOptions(session_id=done.session_id))
    # A tenant is one, however it proves itself.
    async with installed.client("acme-token") as acme:
        assert (await acme.get_session(done.session_id)).length > 4
    log = installed.pods.children["orchestrator"].log

    async def told() -> bool:
        lines = [json.loads(line) for line in log.read_text().splitlines() if line[:1] == "{"]
        audits = [line for line in lines if line.get("outcome") == "PERMISSION_DENIED"]
        return {line["tenant"] for line in audits} == {"bob"} and len(audits) >= 2

    await until(told, "the audit log in the pod's own log tells who tried")
    assert "a secret prompt" not in log.read_text() and "acme-token" not in log.read_text()


async def test_the_workers_token_changes_without_an_interruption(installed: Installed) -> None:
    pods, new = installed.pods, "another-token-for-workers"
    both = f"{WORKERS_TOKEN}\n{new}"
    for tokens, sent in ((both, WORKERS_TOKEN), (both, new), (new, new)):
        pods.secrets["workers"] = {"token": sent.encode(), "tokens": tokens.encode()}
        for tier in SERVICES:
            pods.project(tier)
        await asyncio.sleep(RENEWED_S)
        async with installed.client("bob-token") as client:
            done = await client.complete("tokens change", GenerationOptions(max_tokens=8))
        assert done.token_ids
    for token, code in (
        (WORKERS_TOKEN, grpc.StatusCode.UNAUTHENTICATED),
        (new, grpc.StatusCode.OK),
    ):
        security = installed.security(token, as_tier="orchestrator")
        async with open_channel(pods.addresses["target"], security) as channel:
            call = channel.unary_unary("/outrider.v1.TargetService/Info")(b"", timeout=10)
            assert await call.code() is code


async def test_who_calls_too_often_is_held_back_and_nobody_else(installed: Installed) -> None:
    async with installed.client(token_of("many")) as many, installed.client("bob-token") as bob:
        with pytest.raises(ResourceExhausted):
            for _ in range(80):
                await many.list_models()
        await bob.list_models()


async def test_stores_know_their_users_alone(installed: Installed) -> None:
    def store(tier: str, **who: Any) -> Redis:
        host, port = installed.pods.addresses[f"{tier} in plain"].split(":")
        return Redis(host=host, port=int(port), protocol=2, **who)

    async with store("redis") as nobody:
        with pytest.raises(AuthenticationError, match="required"):
            await nobody.ping()
    async with store("redis", username="outrider", password="of-the-store") as own:
        await own.ping()
        for command in (("KEYS", "*"), ("FLUSHALL",), ("CONFIG", "GET", "*"), ("GET", "x")):
            with pytest.raises(NoPermissionError):
                await own.execute_command(*command)
    async with store("redis", username="looker", password="of-the-looker") as looker:
        assert (await looker.scan())[1]
        with pytest.raises(NoPermissionError):
            await looker.set("x", "y")
    async with store("kvstore", username="orchestrator", password="of-the-index") as index:
        assert any(b":kv:block:" in key for key in (await index.scan())[1])
        for command in (("SET", "outrider:kv:x", "y"), ("MGET", "outrider:kv:x"), ("FLUSHALL",)):
            with pytest.raises(NoPermissionError):
                await index.execute_command(*command)
    async with store("kvstore", username="outrider", password="of-the-blocks") as blocks:
        for command in (("MGET", "outrider:session:x"), ("SCAN", "0"), ("GET", "outrider:kv:x")):
            with pytest.raises(NoPermissionError):
                await blocks.execute_command(*command)


async def test_expired_certificates_are_replaced_without_a_restart(installed: Installed) -> None:
    pods = installed.pods
    pids = {tier: pods.children[tier].pid for tier in SERVICES}
    security = installed.security(as_tier="redis")  # Some certificate that stays.

    async def renew(valid_s: float) -> None:
        for tier in SERVICES:
            pods.secrets[f"{tier}-tls"] = identity(tier, CA, valid_s=valid_s)
            pods.project(tier)
        await asyncio.sleep(RENEWED_S)

    await renew(-1)
    for tier in SERVICES:
        assert not await reaches(pods.addresses[tier], security), tier
    await renew(3600)
    for tier in SERVICES:
        assert await reaches(pods.addresses[tier], security), tier
        assert (pods.children[tier].pid, pods.children[tier].returncode) == (pids[tier], None)
    async with installed.client("bob-token") as client:
        assert (await client.complete("again", GenerationOptions(max_tokens=4))).token_ids
