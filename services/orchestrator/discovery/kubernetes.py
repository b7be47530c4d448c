"""Endpoints from Kubernetes: a list of the service's EndpointSlices, then a watch of their changes.

A thread talks to the API server, so that nothing here ever holds up a round, and a call that hangs
not the process's end. It hands over the newest endpoints only: whoever looks seldom misses what lay
in between, and nothing piles up.
"""

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable

from services.orchestrator.discovery.endpoints import Endpoints
from services.orchestrator.discovery.kube_api import (
    Disconnected,
    Event,
    Gone,
    KubeAccess,
    KubeError,
    SliceApi,
)
from services.orchestrator.discovery.slices import Malformed, Slice, endpoints_of, name_of, parse

logger = logging.getLogger(__name__)

_BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
_STEADY_S = 5.0
"""Whoever has listened for so long starts over with short waits."""


class KubernetesSource:
    """The endpoints of a headless service; the last known ones hold while the API server is away.

    `port` is the number or the name of a port, "" for the only one.
    """

    is_static = False

    def __init__(self, access: KubeAccess, service: str, namespace: str, port: str) -> None:
        self._access = access
        self._service = service
        self._namespace = namespace or access.namespace
        self._port = port
        self.name = f"kubernetes:///{service}.{self._namespace}" + (f":{port}" if port else "")
        self.counters: Counter[str] = Counter()
        """Lists, watches, events, failures, and how often a version was gone."""

    async def watch(self) -> AsyncGenerator[Endpoints, None]:
        loop = asyncio.get_running_loop()
        news = asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # The loop is closed.
                loop.call_soon_threadsafe(news.set)

        api = SliceApi(self._access, self._namespace, self._service)
        follower = _Follower(api, self._port, self.name, self.counters, wake)
        threading.Thread(target=follower.run, name="outrider-kubernetes", daemon=True).start()
        told: Endpoints | None = None
        try:
            while True:
                await news.wait()
                news.clear()
                newest = follower.take()
                if newest is not None and newest != told:
                    told = newest
                    yield newest
        finally:
            follower.stop()


class _Follower:
    """Lists and watches, on the thread that calls `run`, until `stop`."""

    def __init__(
        self,
        api: SliceApi,
        port: str,
        name: str,
        counters: "Counter[str]",
        wake: Callable[[], None],
    ) -> None:
        self._api = api
        self._port = port
        self._name = name
        self._counters = counters
        self._wake = wake
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._newest: Endpoints | None = None
        """Not taken yet."""
        self._known: dict[str, Slice] = {}
        self._version = ""
        """What `_known` is true for; "": a list is needed."""
        self._attempt = 0
        self._is_failing = False

    def take(self) -> Endpoints | None:
        """The newest endpoints, once; from any thread."""
        with self._lock:
            newest, self._newest = self._newest, None
        return newest

    def stop(self) -> None:
        """From any thread; does not wait."""
        self._stop.set()
        self._api.hang_up()

    def run(self) -> None:
        while not self._stop.is_set():
            started = time.monotonic()
            try:
                if not self._version:
                    self._list()
                self._follow()
                if time.monotonic() - started > _STEADY_S:
                    self._attempt = 0
                    continue  # The server has ended the watch, as it was asked to.
            except Gone:
                self._counters["gone"] += 1
                self._version = ""
            except Disconnected as error:
                self._failed(error)  # What is known stands, and the watch goes on from there.
            except (KubeError, Malformed) as error:
                self._failed(error)
                self._version = ""
            except Exception:
                if not self._stop.is_set():  # Else it comes of hanging up.
                    logger.exception("watching endpoints failed", extra={"source": self._name})
                self._version = ""
            self._wait()

    def _list(self) -> None:
        items, version = self._api.list()
        self._known = {name_of(item): parse(item) for item in items}
        self._version = version
        self._counters["lists"] += 1
        self._succeeded()
        self._publish()

    def _follow(self) -> None:
        """Watch until the server ends it."""
        self._counters["watches"] += 1
        for event in self._api.watch(self._version):
            self._counters["events"] += 1  # First: who is told of it may look at once.
            self._apply(event)
            self._attempt = 0
            self._succeeded()

    def _apply(self, event: Event) -> None:
        if event.item is not None:
            name = name_of(event.item)
            if event.kind in ("ADDED", "MODIFIED"):
                self._known[name] = parse(event.item)
            elif event.kind == "DELETED":
                self._known.pop(name, None)
            else:
                raise Malformed(f"an event of the kind {event.kind!r}")
            self._publish()
        self._version = event.version

    def _publish(self) -> None:
        endpoints = endpoints_of(self._known.values(), self._port)
        if not endpoints and any(known.places for known in self._known.values()):
            logger.warning("no endpoint has such a port", extra={"source": self._name})
        with self._lock:
            self._newest = endpoints
        self._wake()

    def _succeeded(self) -> None:
        if self._is_failing:
            logger.info("the API server answers again", extra={"source": self._name})
        self._is_failing = False

    def _failed(self, error: Exception) -> None:
        if self._stop.is_set():
            return
        self._counters["failures"] += 1
        if not self._is_failing:
            logger.warning(
                "no word from the API server; going on with what is known",
                extra={"source": self._name, "why": str(error)},
            )
        self._is_failing = True

    def _wait(self) -> None:
        """Longer each time, and not as long as others."""
        seconds = _BACKOFF_S[min(self._attempt, len(_BACKOFF_S) - 1)]
        self._attempt += 1
        self._stop.wait(seconds * random.uniform(0.5, 1.0))
