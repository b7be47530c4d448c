"""Certificates on both sides of a connection, checked before use and renewed while running."""

import ssl
from dataclasses import dataclass

import grpc

from outrider.errors import InvalidArgument
from outrider.rpc.files import Contents, Renewed


@dataclass(frozen=True, slots=True)
class ServerTls:
    """PEM files of a server: its certificate chain and key, and the CA of its clients, if they need
    a certificate (mTLS)."""

    cert_file: str
    key_file: str
    client_ca_file: str = ""

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials that follow the files: gRPC asks at each handshake, on a thread of its own.
        Connections that stand keep standing.

        Raises InvalidArgument where a file is missing or unfit.
        """
        files = Renewed(
            {
                "tls_cert": self.cert_file,
                "tls_key": self.key_file,
                "tls_client_ca": self.client_ca_file,
            },
            self._configuration,
        )
        first = in_use = files.get()

        def changed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal in_use
            if (latest := files.get()) is in_use:
                return None
            in_use = latest
            return latest

        return grpc.dynamic_ssl_server_credentials(
            first,
            changed,  # type: ignore[arg-type]  # None is allowed: no change.
            require_client_authentication=bool(self.client_ca_file),
        )

    def _configuration(self, contents: Contents) -> grpc.ServerCertificateConfiguration:
        check_pair(self.cert_file, self.key_file, ("tls_cert", "tls_key"))
        client_ca = contents.get("tls_client_ca")
        if client_ca is not None:
            check_ca(client_ca, self.client_ca_file, "tls_client_ca")
        return grpc.ssl_server_certificate_configuration(
            [(contents["tls_key"], contents["tls_cert"])], root_certificates=client_ca
        )


@dataclass(frozen=True, slots=True)
class ClientTls:
    """PEM files of a client: the CA of the servers, and its own certificate and key, if any."""

    ca_file: str
    cert_file: str = ""
    key_file: str = ""

    def credentials(self) -> Renewed[grpc.ChannelCredentials]:
        """Credentials of the files as they are now; other ones once the files have changed.

        Raises InvalidArgument where a file is missing or unfit.
        """
        paths = {"ca_file": self.ca_file, "cert_file": self.cert_file, "key_file": self.key_file}
        return Renewed(paths, self._credentials)

    def _credentials(self, contents: Contents) -> grpc.ChannelCredentials:
        check_ca(contents["ca_file"], self.ca_file, "ca_file")
        if self.cert_file:
            check_pair(self.cert_file, self.key_file, ("cert_file", "key_file"))
        return grpc.ssl_channel_credentials(
            root_certificates=contents["ca_file"],
            private_key=contents.get("key_file"),
            certificate_chain=contents.get("cert_file"),
        )


def check_pair(cert_file: str, key_file: str, fields: tuple[str, str]) -> None:
    """Refuse what gRPC would fail on only when a client comes: no PEM, a key of another
    certificate, a key with a passphrase."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password OpenSSL would ask for one at the terminal.
        context.load_cert_chain(cert_file, key_file, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        raise InvalidArgument(
            f"{cert_file} and {key_file} are no certificate chain and its key in PEM, without a "
            f"passphrase: {_reason(error)}",
            field=fields[0],
        ) from None
    except OSError as error:
        raise InvalidArgument(f"cannot be read: {error.strerror}", field=fields[1]) from None


def check_ca(pem: bytes, path: str, field: str) -> None:
    """Refuse a bundle without a certificate in it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=pem.decode("ascii", "replace"))
    except (ssl.SSLError, ValueError) as error:
        raise InvalidArgument(
            f"{path} holds no CA certificate in PEM: {_reason(error)}", field=field
        ) from None


def _reason(error: Exception) -> str:
    """OpenSSL's word for it, which quotes nothing of the file."""
    return getattr(error, "reason", None) or type(error).__name__
