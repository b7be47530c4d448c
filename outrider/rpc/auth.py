"""Who is calling: bearer tokens on the server's side.

The token file holds a line for each caller, `tenant:token`, or a token alone for the tenant
"default"; blank lines and lines that start with # are skipped.
"""

import hmac
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from outrider.errors import InvalidArgument, Unauthenticated

DEFAULT_TENANT = "default"
_OPEN_PREFIX = "/grpc.health.v1.Health/"

Metadata = Iterable[tuple[str, str | bytes]]


class Authenticator:
    """Knows the callers' tokens; without any, everyone is the default tenant."""

    def __init__(self, tenants_by_token: dict[str, str]) -> None:
        self._tenants_by_token = tenants_by_token

    @classmethod
    def from_file(cls, path: str) -> "Authenticator":
        """Read the token file; an empty path switches authentication off."""
        if not path:
            return cls({})
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise InvalidArgument(
                f"cannot read {path}: {error.strerror}", field="auth_token_file"
            ) from error
        tokens = {}
        for line in (line.strip() for line in lines):
            if line and not line.startswith("#"):
                tenant, _, token = line.rpartition(":")
                tokens[token] = tenant or DEFAULT_TENANT
        if not tokens or "" in tokens:
            raise InvalidArgument(f"{path} holds no token or an empty one", field="auth_token_file")
        return cls(tokens)

    def tenant_of(self, metadata: Metadata) -> str:
        """The caller's tenant; raises Unauthenticated."""
        if not self._tenants_by_token:
            return DEFAULT_TENANT
        given = next((value for key, value in metadata if key == "authorization"), "")
        text = given.decode("latin-1") if isinstance(given, bytes) else given
        found = ""
        for token, tenant in self._tenants_by_token.items():
            # Every token is compared, in constant time, so that timing tells nothing.
            if hmac.compare_digest(f"Bearer {token}".encode(), text.encode()):
                found = tenant
        if not found:
            raise Unauthenticated("a valid bearer token is needed in `authorization`")
        return found


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Refuses every call without a valid token, health checks excepted."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator

    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[Any]],
        handler_call_details: Any,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_OPEN_PREFIX):
            return handler
        try:
            self._authenticator.tenant_of(handler_call_details.invocation_metadata)
        except Unauthenticated as error:
            return _refusing(handler, error.message)
        return handler


def _refusing(handler: Any, message: str) -> Any:
    async def refuse(_: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, message)

    async def refuse_stream(_: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, message)
        yield

    kinds = {
        (False, False): (grpc.unary_unary_rpc_method_handler, refuse),
        (False, True): (grpc.unary_stream_rpc_method_handler, refuse_stream),
        (True, False): (grpc.stream_unary_rpc_method_handler, refuse),
        (True, True): (grpc.stream_stream_rpc_method_handler, refuse_stream),
    }
    make, behaviour = kinds[handler.request_streaming, handler.response_streaming]
    return make(
        behaviour,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
