"""Kubernetes' API as far as discovery needs it: EndpointSlices of a service, listed and watched.

By the official client, blocking, for a thread of its own. The client takes half a second to import:
that happens on the thread too, and only where there is something to discover. The orchestrator's
image has what `load_client` loads of it, and no more (docker/cut_kubernetes.py).
"""

import contextlib
import functools
import http
import importlib.util
import json
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from outrider.errors import InvalidArgument

if TYPE_CHECKING:
    from kubernetes.client import Configuration, DiscoveryV1Api, V1EndpointSlice
    from urllib3 import BaseHTTPResponse, HTTPConnectionPool

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_CONNECT_S = 10.0
_WATCH_S = 60
"""A watch is asked to end after so long, and goes on from there: a connection that has died without
a word is noticed then."""
_GRACE_S = 15.0
_PAGE = 500
_MAX_PAGE_BYTES = 64 << 20
_MAX_EVENT_BYTES = 4 << 20
_READ_BYTES = 1 << 16


class KubeError(Exception):
    """The API server is away, refuses, or says what makes no sense."""


class Gone(KubeError):
    """What was asked for is too old: list anew."""


class Disconnected(KubeError):
    """The API server cannot be reached, or the connection broke."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a watch has told."""

    kind: str
    """ADDED, MODIFIED, DELETED or BOOKMARK."""
    version: str
    item: "V1EndpointSlice | None"
    """None with a bookmark, which tells a version only."""


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


def check_client(*, field: str) -> None:
    """Raises InvalidArgument where the client's package is missing; does not import it."""
    if importlib.util.find_spec("kubernetes") is None:
        raise InvalidArgument(
            "Kubernetes' API needs the extra `kubernetes`: pip install 'outrider[kubernetes]'",
            field=field,
        )


def load_client() -> Any:
    """The client's package, with every module of it that is used here."""
    import kubernetes.client
    import kubernetes.watch

    # These are imported when they are first looked at.
    _ = kubernetes.client.DiscoveryV1Api, kubernetes.client.V1EndpointSliceList
    return kubernetes


class SliceApi:
    """The EndpointSlices of one service. One call at a time; `hang_up` ends it from any thread."""

    def __init__(self, access: KubeAccess, namespace: str, service: str) -> None:
        self._access = access
        self._what = {
            "namespace": namespace,
            "label_selector": f"kubernetes.io/service-name={service}",
        }
        self._socket: socket.socket | None = None
        """The newest, open or not."""
        self._hung_up = False

    def list(self) -> "tuple[list[V1EndpointSlice], str]":
        """All slices, and the version of the list. Raises KubeError and its children."""
        items: list[V1EndpointSlice] = []
        more: str | None = None
        with self._errors():
            while True:
                response = self._slices.list_namespaced_endpoint_slice(
                    **self._what,
                    limit=_PAGE,
                    _continue=more,
                    _preload_content=False,
                    _request_timeout=(_CONNECT_S, _CONNECT_S + _GRACE_S),
                )
                page = self._slices.api_client.deserialize(
                    _read(response), "V1EndpointSliceList", "application/json"
                )
                items += page.items
                more = page.metadata.var_continue
                if not more:
                    return items, _version(page.metadata.resource_version)

    def watch(self, version: str) -> Iterator[Event]:
        """What has happened since a version, until the server has had enough.

        Raises KubeError and its children.
        """
        with self._errors():
            watch = load_client().watch.Watch()
            events = watch.stream(
                _bounded(self._slices.list_namespaced_endpoint_slice),
                **self._what,
                resource_version=version,
                allow_watch_bookmarks=True,
                timeout_seconds=_WATCH_S,
                _request_timeout=(_CONNECT_S, _WATCH_S + _GRACE_S),
            )
            for event in events:
                if event is None:
                    raise KubeError("an event that is no JSON")
                newer = _version(event["raw_object"]["metadata"]["resourceVersion"])
                is_bookmark = event["type"] == "BOOKMARK"
                yield Event(event["type"], newer, None if is_bookmark else event["object"])

    def hang_up(self) -> None:
        """End the call that is running, and refuse others."""
        self._hung_up = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    @functools.cached_property
    def _slices(self) -> "DiscoveryV1Api":
        kubernetes = load_client()
        client = kubernetes.client.ApiClient(_configuration(self._access))
        client.user_agent = "outrider"
        pool = client.rest_client.pool_manager.connection_from_url(client.configuration.host)
        _notice_sockets(pool, self._opened)
        return kubernetes.client.DiscoveryV1Api(client)

    def _opened(self, connection: socket.socket) -> None:
        self._socket = connection
        if self._hung_up:
            raise ConnectionAbortedError("hung up")

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """What the client raises, as ours."""
        load_client()
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        try:
            yield
        except ApiException as error:
            raise self._refusal(error.status, _reason(error.body) or str(error.reason)) from None
        except (OSError, HTTPError) as error:
            why = str(error) or type(error).__name__
            raise Disconnected(f"{self._access.url}: {why}") from None
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            why = f"{type(error).__name__}: {error}"
            raise KubeError(f"an answer that makes no sense: {why[:300]}") from None

    def _refusal(self, code: object, reason: str) -> KubeError:
        if code == 0:  # The client's word for a certificate that does not fit.
            return Disconnected(f"{self._access.url}: {reason[:300]}")
        if code == http.HTTPStatus.GONE:
            return Gone(f"410 {reason[:300]}")
        hint = ""
        if code == http.HTTPStatus.FORBIDDEN:
            hint = "; its service account needs list and watch of endpointslices"
        return KubeError(f"{code} {reason[:300]}{hint}")


def _configuration(access: KubeAccess) -> "Configuration":
    configuration = load_client().client.Configuration(
        host=access.url.rstrip("/"),
        ssl_ca_cert=access.ca_file or None,  # Read with each connection.
        retries=False,  # Whoever calls waits before the next attempt.
    )
    if access.token_file:

        def read_token(configuration: "Configuration") -> None:
            token = Path(access.token_file).read_text().strip()
            configuration.api_key["BearerToken"] = f"Bearer {token}"

        configuration.api_key["BearerToken"] = ""  # There will be one.
        configuration.refresh_api_key_hook = read_token  # Called before each request.
    return configuration


def _notice_sockets(pool: "HTTPConnectionPool", opened: Callable[[socket.socket], None]) -> None:
    """Tell of each connection that a pool makes. The client can stop a watch only once that has
    begun, and no list."""
    base: Any = pool.ConnectionCls

    class Noticed(base):  # type: ignore[misc]
        def connect(self) -> None:
            super().connect()
            opened(self.sock)

    pool.ConnectionCls = Noticed


def _bounded(call: Callable[..., "BaseHTTPResponse"]) -> Callable[..., "_Lines"]:
    """The same call, for a watch, that bounds what comes."""

    @functools.wraps(call)  # The watch looks at its signature.
    def bounded(*args: Any, **kwargs: Any) -> _Lines:
        return _Lines(call(*args, **kwargs))

    return bounded


class _Lines:
    """A response as a watch reads it, which collects whatever comes until a line ends."""

    def __init__(self, response: "BaseHTTPResponse") -> None:
        self._response = response
        self.status = response.status
        self.close = response.close
        self.release_conn = response.release_conn

    def stream(self, **options: Any) -> Iterator[bytes]:
        """Raises KubeError when a line gets too long."""
        length = 0
        for data in self._response.stream(**options | {"amt": _READ_BYTES}):
            end = data.rfind(b"\n")
            length = length + len(data) if end < 0 else len(data) - end - 1
            if length > _MAX_EVENT_BYTES:
                raise KubeError(f"an event of more than {_MAX_EVENT_BYTES} bytes")
            yield data


def _read(response: "BaseHTTPResponse") -> str:
    """Raises KubeError."""
    try:
        data = response.read(_MAX_PAGE_BYTES + 1)
    finally:
        response.close()  # Where all was read its connection is kept.
    if len(data) > _MAX_PAGE_BYTES:
        raise KubeError(f"a page of more than {_MAX_PAGE_BYTES} bytes")
    return data.decode()


def _version(value: object) -> str:
    """Raises KubeError."""
    if not isinstance(value, str) or not value:
        raise KubeError(f"{value!r} is no version")
    return value


def _reason(body: str | None) -> str:
    """What the server says of a refusal."""
    try:
        return str(json.loads(body or "")["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return body or ""
