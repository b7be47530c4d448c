"""Who is calling: static tokens and JSON Web Tokens in `authorization: Bearer …`."""

from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass

from outrider.errors import Unauthenticated
from outrider.rpc.jwt_tokens import JwtVerifier
from outrider.rpc.tokens import DEFAULT_TENANT, StaticTokens

Metadata = Iterable[tuple[str, str | bytes]]


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose sessions a call may see, and who it is more exactly, if that is known."""

    tenant: str = DEFAULT_TENANT
    subject: str = ""


_caller: ContextVar[Caller] = ContextVar("outrider_caller")


def current_caller() -> Caller:
    """Whose call is being served; only in a handler of a `Server`, and in tasks that it starts."""
    return _caller.get()


def set_caller(caller: Caller) -> None:
    """Whose call this task serves from here on."""
    _caller.set(caller)


class Authenticator:
    """Knows callers by their tokens; without any way to, everyone is the default tenant."""

    def __init__(
        self, tokens: StaticTokens | None = None, verifier: JwtVerifier | None = None
    ) -> None:
        self._tokens = tokens
        self._verifier = verifier

    async def caller(self, metadata: Metadata) -> Caller:
        """Raises Unauthenticated; Unavailable where an issuer's keys cannot be had."""
        if self._tokens is None and self._verifier is None:
            return Caller()
        token = _bearer_token(metadata)
        tenant = self._tokens.tenant_of(token) if self._tokens else None
        if tenant is not None:
            return Caller(tenant)
        if self._verifier is None:
            raise Unauthenticated("the bearer token is not known")
        return Caller(*await self._verifier.claims(token))


def _bearer_token(metadata: Metadata) -> str:
    given = [value for key, value in metadata if key == "authorization"]
    if len(given) != 1:
        raise Unauthenticated("one bearer token is needed in `authorization`")
    text = given[0].decode("latin-1") if isinstance(given[0], bytes) else given[0]
    scheme, _, token = text.partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise Unauthenticated("a bearer token is needed in `authorization`")
    return token
