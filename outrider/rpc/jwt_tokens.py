"""Callers by JSON Web Tokens (RFC 7519, 8725), as an OpenID Connect issuer hands them out."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from outrider.errors import InvalidArgument, Unauthenticated
from outrider.rpc.key_sets import ALGORITHMS, FetchedKeys, FileKeys, Keys, fetch_https
from outrider.rpc.tokens import MAX_TENANT_BYTES, is_tenant

MAX_TOKEN_CHARS = 8192
MAX_LEEWAY_S = 300.0


@dataclass(frozen=True, slots=True)
class JwtSettings:
    """Who issues tokens, for whom, and how they are checked; as in SecuritySettings."""

    keys: str
    issuer: str
    audience: str
    keys_ca: str = ""
    algorithms: tuple[str, ...] = ("RS256", "ES256")
    tenant_claim: str = "sub"
    leeway_s: float = 30.0
    refresh_s: float = 300.0

    def check(self) -> None:
        """Raises InvalidArgument with the setting's name."""
        for name, value in (
            ("jwt_issuer", self.issuer),
            ("jwt_audience", self.audience),
            ("jwt_tenant_claim", self.tenant_claim),
            ("jwt_algorithms", self.algorithms),
        ):
            if not value:
                raise InvalidArgument("is needed where jwt_keys is given", field=name)
        unknown = set(self.algorithms) - set(ALGORITHMS)
        if unknown:
            raise InvalidArgument(
                f"{', '.join(sorted(unknown))}: allowed are {', '.join(ALGORITHMS)}",
                field="jwt_algorithms",
            )
        if not 0 <= self.leeway_s <= MAX_LEEWAY_S:
            raise InvalidArgument(
                f"{self.leeway_s} is not in [0, {MAX_LEEWAY_S:g}]", field="jwt_leeway_s"
            )
        if not 1 <= self.refresh_s <= 86_400:
            raise InvalidArgument(f"{self.refresh_s} is not in [1, 86400]", field="jwt_refresh_s")
        if self.keys.startswith("http://"):
            raise InvalidArgument("keys over plain HTTP could be anyone's", field="jwt_keys")


class JwtVerifier:
    """Tells tenant and subject of a token, or why it is refused. Tokens expire for new calls: a
    stream that runs is not cut off."""

    def __init__(self, settings: JwtSettings, fetch: Callable[[], bytes] | None = None) -> None:
        """`fetch` stands in for fetching `settings.keys` over HTTPS. Raises InvalidArgument."""
        settings.check()
        try:
            import jwt
        except ImportError:
            raise InvalidArgument(
                "JSON Web Tokens need the extra `jwt`: pip install 'outrider[jwt]'",
                field="jwt_keys",
            ) from None
        self._jwt = jwt
        self._settings = settings
        self._keys = _keys_of(settings, fetch)

    async def claims(self, token: str) -> tuple[str, str]:
        """Tenant and subject. Raises Unauthenticated, Unavailable (no keys can be had)."""
        if len(token) > MAX_TOKEN_CHARS:
            raise Unauthenticated(f"the token is longer than {MAX_TOKEN_CHARS} characters")
        header = self._guarded(self._jwt.get_unverified_header, token)
        algorithm, kid = header.get("alg"), header.get("kid")
        if algorithm not in self._settings.algorithms:
            raise Unauthenticated("the token is signed by an algorithm that is not allowed")
        key = await self._keys.find(kid, algorithm)
        if key is None:
            raise Unauthenticated("the token is signed with a key that its issuer does not have")
        claims = self._guarded(self._decode, token, key)
        tenant = claims.get(self._settings.tenant_claim)
        if not isinstance(tenant, str) or not is_tenant(tenant):
            raise Unauthenticated(
                f"the token's claim {self._settings.tenant_claim!r} is no name of 1 to "
                f"{MAX_TENANT_BYTES} printable bytes"
            )
        return tenant, str(claims.get("sub", ""))

    def _decode(self, token: str, key: Any) -> dict[str, Any]:
        settings = self._settings
        return self._jwt.decode(
            token,
            key,
            algorithms=list(settings.algorithms),
            audience=settings.audience,
            issuer=settings.issuer,
            leeway=settings.leeway_s,
            options={"require": ["exp", "iss", "aud"]},
        )

    def _guarded(self, work: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
        """What a token makes the library raise is the token's fault; nothing of it is quoted."""
        try:
            return work(*args)
        except self._jwt.ExpiredSignatureError:
            reason = "has expired"
        except (self._jwt.ImmatureSignatureError, self._jwt.InvalidIssuedAtError):
            reason = "is not valid yet"
        except self._jwt.InvalidAudienceError:
            reason = "is for another audience"
        except self._jwt.InvalidIssuerError:
            reason = "has another issuer"
        except self._jwt.MissingRequiredClaimError as error:
            reason = f"lacks the claim {error.claim}"
        except self._jwt.InvalidSignatureError:
            reason = "has a wrong signature"
        except (self._jwt.PyJWTError, ValueError, TypeError, ArithmeticError, RecursionError):
            reason = "is neither a known token nor a valid JSON Web Token"
        raise Unauthenticated(f"the bearer token {reason}") from None


def _keys_of(settings: JwtSettings, fetch: Callable[[], bytes] | None) -> Keys:
    field = "jwt_keys"
    if not settings.keys.startswith("https://"):
        return FileKeys(settings.keys, settings.algorithms, field=field)
    fetch = fetch or partial(fetch_https, settings.keys, settings.keys_ca)
    return FetchedKeys(fetch, settings.algorithms, field=field, refresh_s=settings.refresh_s)
