"""Endpoints from DNS: all addresses of a name, a headless service say, looked up ever anew."""

import asyncio
import contextlib
import logging
import random
import socket
import threading
from collections.abc import AsyncGenerator, Callable

from services.orchestrator.discovery.endpoints import Endpoint, Endpoints

logger = logging.getLogger(__name__)

DEFAULT_REFRESH_S = 5.0
_ANSWER_S = 10.0
"""A resolver that takes longer is asked again."""

Resolver = Callable[[str], list[str]]
"""The IP addresses of a name, on a thread. Raises OSError (socket.gaierror)."""


def resolve(name: str) -> list[str]:
    """By the system's resolver: A and AAAA records, hosts file included."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class DnsSource:
    """All A and AAAA records of `host`; the last known ones hold while there is no answer.

    A name without any record is a failure too: that is also what a resolver says when it has lost
    the cluster. Workers that are gone are noticed by their links.
    """

    is_static = False

    def __init__(
        self,
        host: str,
        port: int,
        *,
        refresh_s: float = DEFAULT_REFRESH_S,
        resolver: Resolver = resolve,
    ) -> None:
        self.name = f"dns:///{host}:{port}"
        self._host = host
        self._port = port
        self._refresh_s = refresh_s
        self._resolver = resolver
        self._asking: asyncio.Future[list[str]] | None = None

    async def watch(self) -> AsyncGenerator[Endpoints, None]:
        known: Endpoints | None = None
        failing = False
        while True:
            try:
                found = await self._ask()
            except (OSError, UnicodeError) as error:
                if not failing:
                    logger.warning(
                        "no answer from DNS; going on with what is known",
                        extra={"source": self.name, "why": str(error)},
                    )
                failing = True
            else:
                failing = False
                if found != known:
                    known = found
                    yield found
            # Orchestrators that started together do not ask together for ever.
            await asyncio.sleep(self._refresh_s * random.uniform(0.8, 1.2))

    async def _ask(self) -> Endpoints:
        """Raises OSError, TimeoutError included."""
        if self._asking is None:
            self._asking = self._start()
        # An answer that is late is the answer to the next question.
        done, _ = await asyncio.wait([self._asking], timeout=_ANSWER_S)
        if not done:
            raise TimeoutError(f"the resolver takes longer than {_ANSWER_S:g} s")
        asked, self._asking = self._asking, None
        addresses = sorted(set(asked.result()))
        if not addresses:
            raise OSError(f"{self._host} has no address")
        return tuple(Endpoint(join(address, self._port)) for address in addresses)

    def _start(self) -> "asyncio.Future[list[str]]":
        """Ask on a thread of its own: one that hangs holds up nobody, the process's end neither."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[str]] = loop.create_future()

        def settle(found: list[str] | Exception) -> None:
            if answer.done():
                return
            if isinstance(found, Exception):
                answer.set_exception(found)
                answer.exception()  # Nobody may be there any more to look at it.
            else:
                answer.set_result(found)

        def run() -> None:
            found: list[str] | Exception
            try:
                found = self._resolver(self._host)
            except Exception as error:
                found = error
            with contextlib.suppress(RuntimeError):  # The loop is closed.
                loop.call_soon_threadsafe(settle, found)

        threading.Thread(target=run, name="outrider-dns", daemon=True).start()
        return answer


def join(ip: str, port: int) -> str:
    """An address as gRPC takes it."""
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
