"""The public keys of an issuer of JWTs: a JSON Web Key Set (RFC 7517), from a file or over HTTPS.

Only signing keys of asymmetric algorithms are taken, each for the algorithms that it is fit for, so
that no key is ever used in another way than its issuer meant (RFC 8725 §3.1).
"""

import asyncio
import json
import logging
import ssl
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from outrider.errors import InvalidArgument, Unavailable
from outrider.rpc.files import Renewed

logger = logging.getLogger(__name__)

ALGORITHMS: Mapping[str, tuple[str, str]] = {
    **{f"{family}{bits}": ("RSA", "") for family in ("RS", "PS") for bits in (256, 384, 512)},
    "ES256": ("EC", "P-256"),
    "ES384": ("EC", "P-384"),
    "ES512": ("EC", "P-521"),
    "EdDSA": ("OKP", "Ed25519"),
}
"""Algorithms that may be allowed, with the type and the curve of their keys."""

MAX_SET_BYTES = 256 * 1024
MAX_KEYS = 64
MIN_RSA_BITS = 2048
FETCH_S = 5.0
"""Seconds that fetching a set may take."""
REFETCH_S = 10.0
"""Seconds between two attempts to fetch, whoever asks and however often."""
MAX_AGE_S = 86_400.0
"""Seconds after which keys that cannot be fetched anew are not believed any more."""


class KeySet:
    """Keys of an issuer by id and algorithm."""

    def __init__(self, keys: Mapping[tuple[str, str], Any]) -> None:
        self._keys = keys
        ids = {kid for kid, _ in keys}
        self._only = ids.pop() if len(ids) == 1 else None

    def find(self, kid: str | None, algorithm: str) -> Any | None:
        """The key that a token names; a token that names none means the only one."""
        kid = self._only if kid is None else kid
        return None if kid is None else self._keys.get((kid, algorithm))


class Keys(Protocol):
    """Where an issuer's keys come from."""

    async def find(self, kid: str | None, algorithm: str) -> Any | None:
        """The key, None where the issuer has no such key. Raises Unavailable."""


def parse_key_set(data: bytes, algorithms: Sequence[str], *, field: str) -> KeySet:
    """The usable keys of a set for these algorithms. Raises InvalidArgument where none is."""
    if len(data) > MAX_SET_BYTES:
        raise InvalidArgument(f"a key set has at most {MAX_SET_BYTES} bytes", field=field)
    try:
        document = json.loads(data)
        entries = document["keys"]
        if not isinstance(entries, list) or len(entries) > MAX_KEYS:
            raise InvalidArgument(f"a key set lists at most {MAX_KEYS} keys", field=field)
    except (ValueError, TypeError, KeyError, RecursionError):
        raise InvalidArgument("is no JSON Web Key Set", field=field) from None
    keys: dict[tuple[str, str], Any] = {}
    for entry in entries:
        if isinstance(entry, dict):
            keys |= _usable(entry, algorithms)
    if not keys:
        raise InvalidArgument(
            f"the key set has no public key for {', '.join(algorithms)}", field=field
        )
    return KeySet(keys)


def _usable(entry: dict[str, Any], algorithms: Sequence[str]) -> dict[tuple[str, str], Any]:
    import jwt

    kid, meant_for = entry.get("kid", ""), entry.get("alg")
    # A set with a private key in it is a mishap; nothing is to depend on it.
    if not isinstance(kid, str) or entry.get("use", "sig") != "sig" or "d" in entry:
        return {}
    found = {}
    for algorithm in algorithms:
        kind, curve = ALGORITHMS[algorithm]
        if entry.get("kty") != kind or (curve and entry.get("crv") != curve):
            continue
        if meant_for not in (None, algorithm):
            continue
        try:
            key = jwt.PyJWK(entry, algorithm)
        except (jwt.PyJWTError, ValueError, TypeError):
            logger.warning("a key of the key set cannot be read", extra={"kid": kid})
            continue
        if kind == "RSA" and key.key.key_size < MIN_RSA_BITS:
            logger.warning("a key of the key set is too short", extra={"kid": kid})
            continue
        found[kid, algorithm] = key
    return found


class FileKeys:
    """Keys in a file, as it is now."""

    def __init__(self, path: str, algorithms: Sequence[str], *, field: str) -> None:
        self._keys = Renewed(
            {field: path},
            lambda contents: parse_key_set(contents[field], algorithms, field=field),
        )

    async def find(self, kid: str | None, algorithm: str) -> Any | None:
        return self._keys.get().find(kid, algorithm)


class FetchedKeys:
    """Keys at a URL: fetched when first needed, again every `refresh_s` while they are in use, and
    when a token names a key that is not among them. Attempts keep REFETCH_S apart."""

    def __init__(
        self,
        fetch: Callable[[], bytes],
        algorithms: Sequence[str],
        *,
        field: str,
        refresh_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`fetch` is called on a thread."""
        self._fetch = fetch
        self._algorithms = algorithms
        self._field = field
        self._refresh_s = refresh_s
        self._clock = clock
        self._keys: KeySet | None = None
        self._fetched_at = self._tried_at = float("-inf")
        self._task: asyncio.Task[None] | None = None

    async def find(self, kid: str | None, algorithm: str) -> Any | None:
        age_s = self._clock() - self._fetched_at
        if self._keys is None or age_s > MAX_AGE_S:
            await self._refetched()
        elif age_s > self._refresh_s:
            self._start()  # Meanwhile the old ones do.
        found = self._known().find(kid, algorithm)
        if found is None and await self._refetched():
            found = self._known().find(kid, algorithm)
        return found

    def _known(self) -> KeySet:
        if self._keys is None or self._clock() - self._fetched_at > MAX_AGE_S:
            raise Unavailable("the keys of the tokens' issuer cannot be fetched; retry later")
        return self._keys

    async def _refetched(self) -> bool:
        """Wait for an attempt, if one is due or under way."""
        task = self._start()
        if task is None:
            return False
        await asyncio.shield(task)
        return True

    def _start(self) -> "asyncio.Task[None] | None":
        if self._task is not None and not self._task.done():
            return self._task
        if self._clock() - self._tried_at < REFETCH_S:
            return None
        self._tried_at = self._clock()
        self._task = asyncio.create_task(self._try(), name="fetch-key-set")
        return self._task

    async def _try(self) -> None:
        try:
            data = await asyncio.to_thread(self._fetch)
            self._keys = parse_key_set(data, self._algorithms, field=self._field)
        except (OSError, ValueError, InvalidArgument) as error:  # OSError: URLError, timeouts
            logger.error(
                "the key set cannot be fetched; keys known before stay in force",
                extra={"why": str(error)},
            )
            return
        self._fetched_at = self._clock()


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """The keys come from where the setting says, or not at all."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def fetch_https(url: str, ca_file: str = "") -> bytes:
    """What is at a URL, of at most MAX_SET_BYTES and within FETCH_S, or somewhat more where the
    other side sends byte after byte. Raises OSError, ValueError."""
    context = ssl.create_default_context(cafile=ca_file or None)
    opener = urllib.request.build_opener(
        urllib.request.HTTPSHandler(context=context), _NoRedirects()
    )
    request = urllib.request.Request(url, headers={"Accept": "application/json"})
    deadline = time.monotonic() + FETCH_S
    data = b""
    with opener.open(request, timeout=FETCH_S) as response:
        while part := response.read1(1 << 16):
            data += part
            if len(data) > MAX_SET_BYTES:
                raise ValueError(f"more than {MAX_SET_BYTES} bytes")
            if time.monotonic() > deadline:
                raise TimeoutError(f"not there within {FETCH_S:g} s")
    return data
