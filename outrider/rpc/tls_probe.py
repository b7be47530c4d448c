"""A server's certificate, as a handshake with it shows, and whom it lets in without one."""

import asyncio
import socket
import ssl
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from outrider.rpc.channel import ChannelSecurity, open_channel
from outrider.v1 import facts_pb2

_RESOLVERS = ("dns:///", "dns:", "ipv4:", "ipv6:")


def host_and_port(address: str) -> tuple[str, int] | None:
    """Of the first server that an address of gRPC names; None of a Unix socket."""
    for scheme in _RESOLVERS:
        address = address.removeprefix(scheme)
    host, _, port = address.split(",")[0].rpartition(":")
    if address.startswith("unix:") or not host or not port.isdigit():
        return None
    return host.strip("[]"), int(port)


async def look_at_certificate(
    address: str, security: ChannelSecurity, *, timeout_s: float, http2: bool = True
) -> facts_pb2.CertificateFacts | None:
    """The certificate of the server at an address, checked as a channel would. None without TLS.
    Raises nothing that the server or the files may cause."""
    place = host_and_port(address)
    if not security.tls or place is None:
        return None
    return await asyncio.to_thread(_look, place, security, timeout_s, http2)


async def look_at_store_certificate(
    facts: facts_pb2.StoreFacts, security: ChannelSecurity, *, timeout_s: float
) -> None:
    """Note the certificate of the store that the facts are about, if it is one server with TLS."""
    scheme, _, rest = facts.address.partition("://")
    if scheme != "rediss":
        return
    place = rest.partition("/")[0]
    certificate = await look_at_certificate(place, security, timeout_s=timeout_s, http2=False)
    if certificate is not None:
        facts.certificate.CopyFrom(certificate)


def _look(
    place: tuple[str, int], security: ChannelSecurity, timeout_s: float, http2: bool
) -> facts_pb2.CertificateFacts:
    facts = facts_pb2.CertificateFacts(client_expires_unix_s=_end_of(security.cert_file))
    try:
        context = ssl.create_default_context(cafile=security.ca_file)
        if security.cert_file:
            context.load_cert_chain(security.cert_file, security.key_file, password=lambda: "")
        if http2:
            context.set_alpn_protocols(["h2"])
        name = security.server_name or place[0]
        with (
            socket.create_connection(place, timeout=timeout_s) as plain,
            context.wrap_socket(plain, server_hostname=name) as wrapped,
        ):
            _note(wrapped.getpeercert() or {}, facts)
    except ssl.SSLCertVerificationError as error:
        facts.error = error.verify_message
    except ssl.SSLError as error:
        facts.error = error.reason or "the handshake failed"
    except (OSError, ValueError) as error:
        facts.error = getattr(error, "strerror", None) or str(error)
    return facts


def _note(certificate: "dict[str, Any]", facts: facts_pb2.CertificateFacts) -> None:
    facts.begins_unix_s = int(ssl.cert_time_to_seconds(certificate["notBefore"]))
    facts.expires_unix_s = int(ssl.cert_time_to_seconds(certificate["notAfter"]))
    issuer = {key: value for part in certificate.get("issuer", ()) for key, value in part}
    facts.issuer = issuer.get("commonName") or issuer.get("organizationName", "")
    facts.names.extend(value for _, value in certificate.get("subjectAltName", ()))


def _end_of(cert_file: str) -> int:
    """When a certificate in a file ends; 0 where that cannot be told."""
    if not cert_file:
        return 0
    try:
        from cryptography import x509
    except ImportError:
        return 0
    try:
        certificate = x509.load_pem_x509_certificate(Path(cert_file).read_bytes())
    except (OSError, ValueError):
        return 0
    return int(certificate.not_valid_after_utc.timestamp())


async def answers(
    address: str, security: ChannelSecurity, method: str, *, timeout_s: float
) -> bool:
    """Whether an empty request to a unary method gets an answer other than that the caller may
    not, with these credentials."""
    async with open_channel(address, security) as channel:
        ask: Any = channel.unary_unary(method)
        call = ask(b"", timeout=timeout_s)
        code = await call.code()
    return code not in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
    )
