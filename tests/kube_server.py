"""An API server of Kubernetes that knows EndpointSlices only: lists in pages, watches, faults.

Real HTTP over real sockets. What it holds is changed by the test; watchers are told.
"""

import json
import queue
import socket
import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

PATH = "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices"
SERVICE_LABEL = "kubernetes.io/service-name"


def endpoint(
    ip: str,
    *,
    pod: str = "",
    zone: str | None = None,
    ready: bool | None = True,
    **conditions: bool,
) -> dict[str, Any]:
    made: dict[str, Any] = {"addresses": [ip], "conditions": {"ready": ready, **conditions}}
    if pod:
        made["targetRef"] = {"kind": "Pod", "uid": pod}
    if zone:
        made["zone"] = zone
    return made


def endpoint_slice(
    name: str,
    *endpoints: dict[str, Any],
    service: str = "targets",
    family: str = "IPv4",
    ports: Any = ({"name": "grpc", "port": 50051, "protocol": "TCP"},),
) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {SERVICE_LABEL: service}},
        "addressType": family,
        "endpoints": list(endpoints),
        "ports": list(ports),
    }


class KubeServer:
    """`put` and `remove` slices; what goes wrong is switched on by the attributes."""

    def __init__(
        self, *, namespace: str = "default", token: str = "", tls: ssl.SSLContext | None = None
    ) -> None:
        self.requests: list[tuple[str, dict[str, str]]] = []
        """"list" or "watch", and the query."""
        self.refuse = 0
        """The status that every request gets."""
        self.silent = False
        """Take connections and say nothing."""
        self.page = 500
        self.watch_s = 60.0
        """Watches end after so long, whatever their clients ask for."""
        self.token = token
        self._path = PATH.format(namespace)
        self._tls = tls
        self._port = 0
        self._lock = threading.RLock()
        self._slices: dict[str, dict[str, Any]] = {}
        self._version = 10
        self._oldest = 0
        self._events: list[tuple[int, dict[str, Any]]] = []
        self._watchers: dict[queue.SimpleQueue[Any], tuple[socket.socket, str]] = {}
        """With the service that each asked for."""
        self._http: ThreadingHTTPServer

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self._port}"

    @property
    def num_watchers(self) -> int:
        return len(self._watchers)

    def __enter__(self) -> "KubeServer":
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self) -> None:
        """Serve, at the port of the last time if there was one."""
        handler = type("Handler", (_Handler,), {"kube": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", self._port), handler)
        self._http.daemon_threads = True
        self._port = self._http.server_port
        if self._tls:
            self._http.socket = self._tls.wrap_socket(self._http.socket, server_side=True)
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Be gone, and keep what is known."""
        self.disconnect()
        self._http.shutdown()
        self._http.server_close()

    def put(self, item: dict[str, Any]) -> None:
        name = item["metadata"]["name"]
        self._change("MODIFIED" if name in self._slices else "ADDED", name, item)

    def remove(self, name: str) -> None:
        self._change("DELETED", name, self._slices[name])

    def bookmark(self) -> None:
        with self._lock:
            self._version += 1
            item = {"metadata": {"resourceVersion": str(self._version)}}
            self._tell({"type": "BOOKMARK", "object": item})

    def forget_history(self) -> None:
        """Versions before now are gone (410)."""
        with self._lock:
            self._version += 1
            self._oldest = self._version
            self._events.clear()

    def say(self, raw: bytes) -> None:
        """Send every watcher something as it is."""
        with self._lock:
            for watcher in self._watchers:
                watcher.put(raw)

    def disconnect(self) -> None:
        """Cut all watches off."""
        with self._lock:
            for watcher, (connection, _) in list(self._watchers.items()):
                watcher.put(None)
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    def _change(self, kind: str, name: str, item: dict[str, Any]) -> None:
        with self._lock:
            self._version += 1
            item = json.loads(json.dumps(item))
            item["metadata"]["resourceVersion"] = str(self._version)
            if kind == "DELETED":
                self._slices.pop(name)
            else:
                self._slices[name] = item
            event = {"type": kind, "object": item}
            self._events.append((self._version, event))
            self._tell(event)

    def _tell(self, event: dict[str, Any]) -> None:
        for watcher, (_, label) in self._watchers.items():
            if _is_of(event, label):
                watcher.put(event)

    # --- called by handlers -------------------------------------------------------------------

    def list(self, query: dict[str, str]) -> dict[str, Any]:
        start = int(query.get("continue") or 0)
        with self._lock:
            label = _label(query)
            found = [
                item
                for item in self._slices.values()
                if item["metadata"]["labels"][SERVICE_LABEL] == label
            ]
            size = min(int(query["limit"]), self.page)
            more = str(start + size) if start + size < len(found) else ""
            meta = {"resourceVersion": str(self._version), "continue": more}
            return {"kind": "EndpointSliceList", "metadata": meta, "items": found[start:][:size]}

    def watch(
        self, version: int, label: str, connection: socket.socket
    ) -> "queue.SimpleQueue[Any] | None":
        """What to send; None: the version is gone."""
        with self._lock:
            if version < self._oldest:
                return None
            news: queue.SimpleQueue[Any] = queue.SimpleQueue()
            for number, event in self._events:
                if number > version and _is_of(event, label):
                    news.put(event)
            self._watchers[news] = connection, label
            return news

    def unwatch(self, news: "queue.SimpleQueue[Any]") -> None:
        with self._lock:
            self._watchers.pop(news, None)


class _Handler(BaseHTTPRequestHandler):
    kube: KubeServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        kube = self.kube
        kube.requests.append(("watch" if query.get("watch") else "list", query))
        while kube.silent:
            time.sleep(0.01)
        if kube.token and self.headers.get("Authorization") != f"Bearer {kube.token}":
            return self._status(401, "Unauthorized")
        if kube.refuse:
            return self._status(kube.refuse, "as told")
        if parts.path != kube._path:
            return self._status(404, "not found")
        if not query.get("watch"):
            return self._json(200, kube.list(query))
        self._watch(int(query["resourceVersion"]), _label(query))

    def _watch(self, version: int, label: str) -> None:
        news = self.kube.watch(version, label, self.connection)
        if news is None:
            status = {
                "kind": "Status",
                "code": 410,
                "reason": "Expired",
                "message": "too old resource version",
            }
            self._start_chunks()
            return self._chunk(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
        ends = time.monotonic() + self.kube.watch_s
        try:
            self._start_chunks()
            while (left := ends - time.monotonic()) > 0:
                try:
                    event = news.get(timeout=left)
                except queue.Empty:
                    break
                if event is None:
                    return
                raw = event if isinstance(event, bytes) else json.dumps(event).encode() + b"\n"
                self._chunk(raw)
            self._chunk(b"")
        except OSError:
            pass
        finally:
            self.kube.unwatch(news)

    def _start_chunks(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _status(self, code: int, message: str) -> None:
        self._json(code, {"kind": "Status", "code": code, "message": message})

    def _json(self, code: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(code)
        if code in (429, 503):
            self.send_header("Retry-After", "3600")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        pass


def _label(query: dict[str, str]) -> str:
    """The service that a request is about."""
    return query["labelSelector"].partition("=")[2]


def _is_of(event: dict[str, Any], label: str) -> bool:
    """Whether an event is for those who asked for this service; bookmarks are for all."""
    labels = event["object"]["metadata"].get("labels")
    return labels is None or labels[SERVICE_LABEL] == label
