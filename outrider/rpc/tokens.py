"""Static bearer tokens: a file with a line `tenant:token` for each.

A tenant may have several, so that a new one can be handed out before the old one goes; a token
alone is of the tenant "default". Blank lines and lines that start with # are skipped.
"""

import hashlib
import secrets
from collections.abc import Mapping

from outrider.errors import InvalidArgument
from outrider.rpc.files import Contents, Renewed

DEFAULT_TENANT = "default"
MAX_TENANT_BYTES = 128
_FIELD = "auth_token_file"


class StaticTokens:
    """The tenants of a token file, as it is now."""

    def __init__(self, path: str) -> None:
        """Raises InvalidArgument where the file cannot be read or used."""
        self._path = path
        # Tokens are looked up by a digest that nobody else can compute, so neither how long that
        # takes nor what is in memory tells anything of them.
        self._key = secrets.token_bytes(32)
        self._tenants = Renewed({_FIELD: path}, self._parse)

    def tenant_of(self, token: str) -> str | None:
        """Whose token it is; None where it is nobody's."""
        return self._tenants.get().get(self._digest(token))

    def _parse(self, contents: Contents) -> Mapping[bytes, str]:
        try:
            lines = contents[_FIELD].decode().splitlines()
        except UnicodeDecodeError:
            raise InvalidArgument(f"{self._path} is not UTF-8", field=_FIELD) from None
        tenants: dict[bytes, str] = {}
        for number, line in enumerate(map(str.strip, lines), start=1):
            if not line or line.startswith("#"):
                continue
            tenant, _, token = (part.strip() for part in line.rpartition(":"))
            tenant, digest = tenant or DEFAULT_TENANT, self._digest(token)
            if not token:
                fault = "has no token"
            elif not is_tenant(tenant):
                fault = f"names no tenant of 1 to {MAX_TENANT_BYTES} printable bytes"
            elif tenants.setdefault(digest, tenant) != tenant:
                fault = "has the token of another tenant"
            else:
                continue
            raise InvalidArgument(f"line {number} of {self._path} {fault}", field=_FIELD)
        if not tenants:
            raise InvalidArgument(f"{self._path} holds no token", field=_FIELD)
        return tenants

    def _digest(self, token: str) -> bytes:
        return hashlib.blake2b(token.encode("utf-8", "replace"), key=self._key).digest()


def is_tenant(name: str) -> bool:
    """Whether a name may stand in logs, entries and keys of caches."""
    return name.isprintable() and 1 <= len(name.encode("utf-8", "replace")) <= MAX_TENANT_BYTES
