"""Kubernetes' API as far as discovery needs it: EndpointSlices of a service, listed and watched.

Blocking, for a thread of its own. Python's own HTTP client does it: no client package that does
what is needed here fits into the image (docs/design.md §4 has the figures).
"""

import contextlib
import http.client
import json
import socket
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from outrider.errors import InvalidArgument

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_CONNECT_S = 10.0
_WATCH_S = 60
"""A watch is asked to end after so long, and goes on from there: a connection that has died without
a word is noticed then."""
_GRACE_S = 15.0
_PAGE = 500
_MAX_PAGE_BYTES = 64 << 20
_MAX_EVENT_BYTES = 4 << 20


class KubeError(Exception):
    """The API server is away, refuses, or says what makes no sense."""


class Gone(KubeError):
    """What was asked for is too old: list anew."""


class Disconnected(KubeError):
    """The API server cannot be reached, or the connection broke."""


@dataclass(frozen=True, slots=True)
class KubeAccess:
    """Where the API server is and who asks. Files are read each time: tokens are renewed."""

    url: str
    token_file: str = ""
    ca_file: str = ""
    namespace: str = "default"

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidArgument(
                f"{self.url!r} is not http://HOST:PORT or https://HOST:PORT", field="kubernetes_api"
            )
        if self.token_file and parts.scheme != "https":
            raise InvalidArgument("a token goes over https only", field="kubernetes_token_file")

    @classmethod
    def in_cluster(cls, env: Mapping[str, str], account: Path = _ACCOUNT) -> "KubeAccess":
        """As a pod has it. Raises InvalidArgument where this is none."""
        host, port = env.get("KUBERNETES_SERVICE_HOST"), env.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise InvalidArgument(
                "this is no pod of a cluster; say where the API server is", field="kubernetes_api"
            )
        try:
            namespace = (account / "namespace").read_text().strip()
        except OSError as error:
            raise InvalidArgument(
                f"the pod has no service account: {error}", field="kubernetes_api"
            ) from None
        host = f"[{host}]" if ":" in host else host
        files = str(account / "token"), str(account / "ca.crt")
        return cls(f"https://{host}:{port}", *files, namespace)


class SliceApi:
    """The EndpointSlices of one service. One call at a time; `hang_up` ends it from any thread."""

    def __init__(self, access: KubeAccess, namespace: str, service: str) -> None:
        self._access = access
        self._path = (
            f"{urlsplit(access.url).path.rstrip('/')}/apis/discovery.k8s.io/v1/namespaces/"
            f"{quote(namespace, safe='')}/endpointslices"
        )
        self._selector = f"kubernetes.io/service-name={service}"
        self._socket: socket.socket | None = None
        self._hung_up = False

    def list(self) -> tuple[list[Any], str]:
        """All slices, and the version of the list. Raises KubeError and its children."""
        items: list[Any] = []
        more = ""
        while True:
            query = {"limit": _PAGE} | ({"continue": more} if more else {})
            with self._get(query, _CONNECT_S + _GRACE_S) as response:
                page = _decode(_read(response))
            try:
                items += page["items"] or []
                version, more = (
                    page["metadata"]["resourceVersion"],
                    page["metadata"].get("continue"),
                )
            except (KeyError, TypeError, AttributeError):
                raise KubeError("a list without items or version") from None
            if not more:
                return items, str(version)

    def watch(self, version: str) -> Iterator[tuple[str, Any]]:
        """Kinds of events and their objects since a version, until the server has had enough.

        Raises KubeError and its children.
        """
        query = {
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": _WATCH_S,
        }
        with self._get(query, _WATCH_S + _GRACE_S) as response:
            while line := _read_line(response):
                event = _decode(line)
                try:
                    kind, item = event["type"], event["object"]
                except (KeyError, TypeError):
                    raise KubeError("an event without type or object") from None
                if kind == "ERROR":
                    raise _error(item.get("code") if isinstance(item, dict) else None, str(item))
                yield kind, item

    def hang_up(self) -> None:
        """End the call that is running, and refuse others."""
        self._hung_up = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def _get(
        self, query: Mapping[str, Any], timeout_s: float
    ) -> Iterator[http.client.HTTPResponse]:
        try:
            connection = self._connect()
            try:
                self._socket = connection.sock
                if self._hung_up:
                    raise Disconnected("hung up")
                connection.sock.settimeout(timeout_s)
                path = f"{self._path}?{urlencode({'labelSelector': self._selector, **query})}"
                connection.request("GET", path, headers=self._headers())
                response = connection.getresponse()
                if response.status != 200:
                    raise _error(response.status, _reason(response))
                yield response
            finally:
                self._socket = None
                connection.close()
        except (OSError, http.client.HTTPException) as error:
            why = str(error) or type(error).__name__
            raise Disconnected(f"{self._access.url}: {why}") from None

    def _connect(self) -> http.client.HTTPConnection:
        parts = urlsplit(self._access.url)
        host, port = str(parts.hostname), parts.port
        connection: http.client.HTTPConnection
        if parts.scheme == "https":
            context = ssl.create_default_context(cafile=self._access.ca_file or None)
            connection = http.client.HTTPSConnection(
                host, port or 443, timeout=_CONNECT_S, context=context
            )
        else:
            connection = http.client.HTTPConnection(host, port or 80, timeout=_CONNECT_S)
        connection.connect()
        return connection

    def _headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json", "User-Agent": "outrider", "Connection": "close"}
        if self._access.token_file:
            token = Path(self._access.token_file).read_text().strip()
            headers["Authorization"] = f"Bearer {token}"
        return headers


def _read(response: http.client.HTTPResponse) -> bytes:
    data = response.read(_MAX_PAGE_BYTES + 1)
    if len(data) > _MAX_PAGE_BYTES:
        raise KubeError(f"a page of more than {_MAX_PAGE_BYTES} bytes")
    return data


def _read_line(response: http.client.HTTPResponse) -> bytes:
    """The next event, b"" at the end."""
    line = response.readline(_MAX_EVENT_BYTES + 1)
    if len(line) > _MAX_EVENT_BYTES:
        raise KubeError(f"an event of more than {_MAX_EVENT_BYTES} bytes")
    return line


def _decode(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise KubeError(f"an answer that is no JSON: {data[:80]!r}") from None


def _reason(response: http.client.HTTPResponse) -> str:
    """What the server says of a refusal, cut short."""
    data = response.read(4096)
    try:
        return str(json.loads(data)["message"])[:300]
    except (ValueError, KeyError, TypeError):
        return data[:300].decode("utf-8", "replace")


def _error(code: object, reason: str) -> KubeError:
    if code == http.client.GONE:
        return Gone(f"410 {reason}")
    hint = ""
    if code == http.client.FORBIDDEN:
        hint = "; its service account needs get, list and watch of endpointslices"
    return KubeError(f"{code} {reason[:300]}{hint}")
