"""What can be found out about a deployment from where the command runs. No judgement here."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from outrider import __version__
from outrider.errors import InvalidArgument
from outrider.kv_store.connection import RIGHTS as KV_RIGHTS
from outrider.redis_url import parse_redis_url, url_error
from outrider.rpc.channel import ChannelSecurity, open_channel
from outrider.rpc.files import read_file
from outrider.rpc.status import error_from_rpc
from outrider.rpc.tls_probe import answers, look_at_certificate, look_at_store_certificate
from outrider.store_probe import SESSION_RIGHTS, probe_store
from outrider.trips import Reading, clock_of, measure, unix_us
from outrider.v1 import diagnosis_pb2, diagnosis_pb2_grpc, facts_pb2

_DOOR_S = 3.0
_TRIPS_S = 10.0
_DIAGNOSE_S = 60.0
_STORE_S = 10.0
_HEALTH = "/grpc.health.v1.Health/Check"
_MODELS = "/outrider.v1.GenerationService/ListModels"


@dataclass(frozen=True, slots=True)
class Front:
    """An orchestrator, as it looks from here."""

    address: str
    tls: bool
    """The command was told to speak TLS to it."""
    error: str = ""
    """Why it does not answer at all."""
    serving: bool = False
    round_trips: facts_pb2.RoundTrips = field(default_factory=facts_pb2.RoundTrips)
    clock: facts_pb2.Clock | None = None
    certificate: facts_pb2.CertificateFacts | None = None
    takes_plaintext: bool | None = None
    takes_anyone: bool | None = None
    found: diagnosis_pb2.DiagnoseResponse | None = None
    why_not: str = ""
    """Why it did not tell what it found."""


@dataclass(frozen=True, slots=True)
class Report:
    """All that was found."""

    fronts: Sequence[Front]
    session_store: facts_pb2.StoreFacts | None = None
    """As seen from here."""
    kv_store: facts_pb2.StoreFacts | None = None
    version: str = __version__


@dataclass(frozen=True, slots=True)
class StoreTls:
    """PEM files for a store's rediss:// URL."""

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""


async def look_at_front(address: str, security: ChannelSecurity, *, samples: int) -> Front:
    """One orchestrator. Raises InvalidArgument for unfit files."""
    certificate = await look_at_certificate(address, security, timeout_s=_DOOR_S)
    async with open_channel(address, security) as channel:
        try:
            serving, trips = await _ask_health(channel, samples)
        except grpc.aio.AioRpcError as error:
            return Front(
                address,
                security.tls,
                error=str(error_from_rpc(error)),
                certificate=certificate,
            )
        found, clock, why_not = await _diagnose(channel, samples)
    bare = ChannelSecurity(ca_file=security.ca_file, server_name=security.server_name)
    return Front(
        address,
        security.tls,
        serving=serving,
        round_trips=trips,
        clock=clock,
        certificate=certificate,
        takes_plaintext=(
            await answers(address, ChannelSecurity(), _HEALTH, timeout_s=_DOOR_S)
            if security.tls
            else None
        ),
        takes_anyone=await answers(address, bare, _MODELS, timeout_s=_DOOR_S),
        found=found,
        why_not=why_not,
    )


async def _ask_health(channel: grpc.aio.Channel, samples: int) -> tuple[bool, facts_pb2.RoundTrips]:
    """Trips are those of health: it is open to all, and no quota counts it."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest()
    answer = await stub.Check(request, timeout=_DOOR_S, wait_for_ready=True)
    trips = await measure(lambda: stub.Check(request, timeout=_DOOR_S), samples, within_s=_TRIPS_S)
    return answer.status == health_pb2.HealthCheckResponse.SERVING, trips


async def _diagnose(
    channel: grpc.aio.Channel, samples: int
) -> tuple[diagnosis_pb2.DiagnoseResponse | None, facts_pb2.Clock | None, str]:
    stub: Any = diagnosis_pb2_grpc.DiagnosisServiceStub(channel)  # type: ignore[no-untyped-call]
    sent = unix_us()
    try:
        found: diagnosis_pb2.DiagnoseResponse = await stub.Diagnose(
            diagnosis_pb2.DiagnoseRequest(samples=samples), timeout=_DIAGNOSE_S
        )
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return None, None, "it is of a release that cannot"
        return None, None, str(error_from_rpc(error))
    reading = Reading(sent, found.received_unix_us, found.sent_unix_us, unix_us())
    return found, clock_of([reading]), ""


async def look_at_session_store(
    url: str, tls: StoreTls, password_file: str, *, samples: int
) -> facts_pb2.StoreFacts:
    """A session store, with the user of the URL. Raises InvalidArgument."""
    password = ""
    if password_file:
        password = read_file(password_file, "redis_password_file").decode().strip()
    return await _look_at_store(url, tls, password, SESSION_RIGHTS, "outrider:", samples)


async def look_at_kv_store(url: str, tls: StoreTls, *, samples: int) -> facts_pb2.StoreFacts:
    """A KV store, likewise."""
    return await _look_at_store(url, tls, "", KV_RIGHTS, "outrider:kv:", samples)


async def _look_at_store(
    url: str, tls: StoreTls, password: str, rights: str, prefix: str, samples: int
) -> facts_pb2.StoreFacts:
    address, secrets = parse_redis_url(url, field="redis_url")
    hidden = (*secrets, password) if password else secrets
    redis = _connect(url, tls, password)

    def explain(error: Exception) -> str:
        text = str(error) or type(error).__name__
        for secret in hidden:
            text = text.replace(secret, "***")
        return text

    try:
        facts = await probe_store(
            redis,
            address=address,
            rights=rights,
            prefix=prefix,
            samples=samples,
            timeout_s=_STORE_S,
            explain=explain,
        )
    finally:
        await redis.aclose()
    security = ChannelSecurity(tls.ca_file, tls.cert_file, tls.key_file)
    await look_at_store_certificate(facts, security, timeout_s=_DOOR_S)
    return facts


def _connect(url: str, tls: StoreTls, password: str) -> Redis:
    given = {
        "ssl_ca_certs": tls.ca_file,
        "ssl_certfile": tls.cert_file,
        "ssl_keyfile": tls.key_file,
    }
    files: dict[str, Any] = {name: path for name, path in given.items() if path}
    if files and not url.startswith("rediss://"):
        raise InvalidArgument("TLS files need a rediss:// URL", field="redis_url")
    for path in files.values():
        if not Path(path).is_file():
            raise InvalidArgument(f"{path} is not a file", field="redis_ca_file")
    try:
        redis: Redis = Redis.from_url(
            url,
            protocol=2,
            socket_timeout=_DOOR_S,
            socket_connect_timeout=_DOOR_S,
            retry=Retry(NoBackoff(), 0),
            **(files | {"password": password} if password else files),
        )
    except (ValueError, TypeError):  # Their text may quote the URL.
        raise url_error("cannot be read", field="redis_url") from None
    return redis


async def look(
    addresses: Sequence[str],
    security: ChannelSecurity,
    *,
    samples: int,
    redis_url: str = "",
    redis_password_file: str = "",
    kv_store_url: str = "",
    store_tls: StoreTls = StoreTls(),
) -> Report:
    """Everything. Raises InvalidArgument for unfit files and URLs."""
    session = kv = None
    if redis_url:
        session = await look_at_session_store(
            redis_url, store_tls, redis_password_file, samples=samples
        )
    if kv_store_url:
        kv = await look_at_kv_store(kv_store_url, store_tls, samples=samples)
    fronts = await asyncio.gather(
        *(look_at_front(address, security, samples=samples) for address in addresses)
    )
    return Report(fronts, session_store=session, kv_store=kv)
