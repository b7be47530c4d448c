"""Certificates for tests: authorities, and what they certify."""

import datetime
import ipaddress

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

Issued = tuple[x509.Certificate, ec.EllipticCurvePrivateKey]
HOUR_S = 3600.0


def certificate(
    name: str,
    *,
    issuer: Issued | None = None,
    ca: bool = False,
    valid_s: float = HOUR_S,
    names: tuple[str, ...] = (),
) -> Issued:
    """A certificate of `localhost` and `names`, with its key; self-signed without an issuer.

    Valid for `valid_s` from now on; below 0 it has expired.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    loopback = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    addresses = [*(x509.DNSName(n) for n in (*names, "localhost")), loopback]
    built = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer[0].subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=2))
        .not_valid_after(now + datetime.timedelta(seconds=valid_s))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(addresses), critical=False)
        .sign(issuer[1] if issuer else key, hashes.SHA256())
    )
    return built, key


def pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def cert_pem(issued: Issued) -> bytes:
    return issued[0].public_bytes(serialization.Encoding.PEM)
