"""Client channels: TLS, bearer tokens, keepalive and message limits in one place."""

from dataclasses import dataclass

import grpc
import grpc.aio

from outrider.errors import InvalidArgument
from outrider.rpc.files import Contents, Renewed
from outrider.rpc.renewing import RenewingChannel
from outrider.rpc.tls import ClientTls

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""Largest message that a channel or a server takes unless its config says otherwise."""

MAX_METADATA_BYTES = 16 * 1024
"""Most metadata of a call, a bearer token included."""

KEEPALIVE_S = 20.0
MIN_KEEPALIVE_S = 1.0
"""Servers take pings that come more often for an attack."""

_RESOLVERS = ("dns:", "ipv4:", "ipv6:")

_OPTIONS = (
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.bdp_probe", 0),
    # Also the time that one attempt to connect may take, so not too short for TLS on a busy host.
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
)


@dataclass(frozen=True, slots=True)
class ChannelSecurity:
    """How a client proves the server's identity and its own.

    `ca_file` switches TLS on; `cert_file` and `key_file` add a client certificate (mTLS);
    `token_file` holds a bearer token that goes with every call. Files are PEM or text, and may be
    renewed: what is in them then holds for new calls.
    `server_name` is the name that servers' certificates must have where it is not that of the
    address: of servers that are found by their IP addresses, say.
    """

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    token_file: str = ""
    server_name: str = ""

    @property
    def tls(self) -> bool:
        return bool(self.ca_file)


def open_channel(
    address: str,
    security: ChannelSecurity | None = None,
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    keepalive_s: float = KEEPALIVE_S,
) -> grpc.aio.Channel:
    """A channel to `address`; it connects when first used.

    "host:port" or "unix:/path" is one server, a resolver's address ("dns:///name:port",
    "ipv4:1.2.3.4:1,5.6.7.8:1") several, which take turns.

    A connection that has been silent for `keepalive_s` is asked for a sign of life, and given up
    after half of that. Each call makes a connection of its own, so that closing one channel leaves
    others alone.
    """
    if not MIN_KEEPALIVE_S <= keepalive_s <= 3600:
        raise InvalidArgument(f"{keepalive_s} is not in [1, 3600]", field="keepalive_s")
    security = security or ChannelSecurity()
    options: list[tuple[str, str | int]] = [
        *_OPTIONS,
        *keepalive_options(keepalive_s),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if address.startswith(_RESOLVERS):
        options.append(("grpc.lb_policy_name", "round_robin"))
    interceptors = _bearer_interceptors(security)
    _check_files(security)
    if not security.tls:
        return grpc.aio.insecure_channel(address, options, interceptors=interceptors)
    if security.server_name:
        options.append(("grpc.ssl_target_name_override", security.server_name))
    tls = ClientTls(security.ca_file, security.cert_file, security.key_file)
    return RenewingChannel(
        tls.credentials(),
        lambda credentials: grpc.aio.secure_channel(
            address, credentials, options, interceptors=interceptors
        ),
    )


def keepalive_options(keepalive_s: float) -> list[tuple[str, int]]:
    """For both ends of a connection: after so much silence the other one has half as long to give a
    sign of life. The second limit alone would leave it a minute (the third one's default)."""
    return [
        ("grpc.keepalive_time_ms", int(keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(keepalive_s * 500)),
        ("grpc.http2.ping_timeout_ms", int(keepalive_s * 500)),
    ]


def _check_files(security: ChannelSecurity) -> None:
    """Refuse half of what TLS needs: the channel would be weaker than it looks."""
    if (security.cert_file or security.key_file) and not security.ca_file:
        raise InvalidArgument("a client certificate needs the server's CA too", field="ca_file")
    if security.server_name and not security.ca_file:
        raise InvalidArgument("a name to expect needs the server's CA too", field="ca_file")
    if bool(security.cert_file) != bool(security.key_file):
        missing = "key_file" if security.cert_file else "cert_file"
        raise InvalidArgument("a certificate and its key go together", field=missing)


def _bearer_interceptors(security: ChannelSecurity) -> list[grpc.aio.ClientInterceptor]:
    if not security.token_file:
        return []
    token = Renewed({"token_file": security.token_file}, _token)
    return [
        _UnaryUnaryToken(token),
        _UnaryStreamToken(token),
        _StreamUnaryToken(token),
        _StreamStreamToken(token),
    ]


def _token(contents: Contents) -> str:
    try:
        token = contents["token_file"].decode("ascii").strip()
    except UnicodeDecodeError:
        raise InvalidArgument("a token is ASCII text", field="token_file") from None
    if not token:
        raise InvalidArgument("the file with the token is empty", field="token_file")
    return token


class _Token:
    def __init__(self, token: Renewed[str]) -> None:
        self._token = token

    def _with_token(self, details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
        metadata = grpc.aio.Metadata(*(details.metadata or ()))
        metadata.add("authorization", f"Bearer {self._token.get()}")
        return details._replace(metadata=metadata)  # type: ignore[attr-defined,no-any-return]


# mypy: disable-error-code="override, no-untyped-def, type-arg, misc"
class _UnaryUnaryToken(_Token, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation, client_call_details, request):
        return await continuation(self._with_token(client_call_details), request)


class _UnaryStreamToken(_Token, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(self, continuation, client_call_details, request):
        return await continuation(self._with_token(client_call_details), request)


class _StreamUnaryToken(_Token, grpc.aio.StreamUnaryClientInterceptor):
    async def intercept_stream_unary(self, continuation, client_call_details, request_iterator):
        return await continuation(self._with_token(client_call_details), request_iterator)


class _StreamStreamToken(_Token, grpc.aio.StreamStreamClientInterceptor):
    async def intercept_stream_stream(self, continuation, client_call_details, request_iterator):
        return await continuation(self._with_token(client_call_details), request_iterator)
