"""Where the session store is, and how commands get there: one server, the primary that sentinels
know, or a cluster. Errors are Redis's own.
"""

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import redis.exceptions as redis_errors
from redis.asyncio import BlockingConnectionPool, Connection, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff

from outrider.errors import InvalidArgument
from outrider.redis_url import (
    SENTINEL,
    RedisServers,
    is_tls,
    parse_store_url,
    password_in,
    url_error,
)
from services.orchestrator.store_batches import Batches
from services.orchestrator.store_cluster import Cluster
from services.orchestrator.store_sentinel import PrimaryFinder, connection_to_primary
from services.orchestrator.store_tls import RenewedSslConnection

MAX_CONNECTIONS = 64
"""To each server."""

Command = str | bytes | int


class Servers(Protocol):
    """Where commands go."""

    async def execute(self, key: str, *command: Command) -> Any:
        """Run a command on the server that has `key`; what it touches lies in that key's slot.
        Every command may be repeated."""

    async def execute_together(self, key: str, *command: Command) -> Any:
        """The same, in one write with what others ask of the server in this turn of the event loop,
        if it can be, and within the deadline."""

    async def client_of(self, key: str) -> Redis:
        """Of the server that has `key` now, for who looks at it; it may be asked repeatedly."""

    async def ping(self) -> None:
        """Raises where nobody answers."""

    async def close(self) -> None: ...


@dataclass(frozen=True)
class Access:
    """How a connection is made, to whatever server."""

    timeout_s: float
    tls: Mapping[str, str]
    """Paths by the client's names for them."""
    connection_class: type[Connection] | None = None
    username: str = ""
    password: str = field(default="", repr=False)
    database: int = 0
    read_timeout_s: float | None = None

    @property
    def options(self) -> dict[str, Any]:
        return {
            "protocol": 2,
            "max_connections": MAX_CONNECTIONS,
            "timeout": self.timeout_s,
            # Who waits has a deadline over all of an operation; one for each read costs time.
            "socket_timeout": self.read_timeout_s,
            "socket_connect_timeout": self.timeout_s,
            # A pooled connection may have died unnoticed. Every operation can be repeated.
            "retry": Retry(ConstantBackoff(0.01), 1, (redis_errors.ConnectionError,)),
            **({"password": self.password} if self.password else {}),
            **self.tls,
        }

    def client(self, host: str, port: int) -> Redis:
        """It connects when it is first used."""
        place: dict[str, Any] = {"host": host, "port": port, "db": self.database}
        if self.username:
            place["username"] = self.username
        kind = self.connection_class or Connection
        return Redis.from_pool(
            BlockingConnectionPool(connection_class=kind, **place, **self.options)
        )


class OneServer:
    """One server. The primary of sentinels moves: a loss, or a refusal to write, drops what idle
    connections there are, and the next ones go to where it is then. So they do where a name stands
    for another server now."""

    def __init__(
        self, client: Redis, timeout_s: float, finder: PrimaryFinder | None = None
    ) -> None:
        self._client = client
        self._batches = Batches(client.connection_pool, timeout_s)
        self._finder = finder

    async def execute(self, key: str, *command: Command) -> Any:
        return await self._minding(self._client.execute_command(*command))  # type: ignore[no-untyped-call]

    async def execute_together(self, key: str, *command: Command) -> Any:
        return await self._minding(self._batches.execute(command))

    async def _minding(self, work: Awaitable[Any]) -> Any:
        try:
            return await work
        except redis_errors.ReadOnlyError:
            await self._reconnect()
            raise
        except BaseException as error:
            if self._finder is not None and not isinstance(error, redis_errors.ResponseError):
                await self._reconnect()
            raise

    async def client_of(self, key: str) -> Redis:
        return self._client

    async def ping(self) -> None:
        await self.execute("", "PING")

    async def close(self) -> None:
        await self._batches.close()
        await self._client.aclose()
        if self._finder is not None:
            await self._finder.close()

    async def _reconnect(self) -> None:
        await self._client.connection_pool.disconnect(inuse_connections=False)


class Opened(NamedTuple):
    """The servers of a URL, which is `address` without its credentials, `secrets`."""

    servers: Servers
    address: str
    secrets: tuple[str, ...]


def open_servers(
    url: str,
    *,
    timeout_s: float,
    password_file: str | None,
    sentinel_password_file: str | None = None,
    tls: Mapping[str, str | None],
) -> Opened:
    """Connects when it is first used. Raises InvalidArgument."""
    address, secrets, several = parse_store_url(url, field="redis_url")
    held = bool(several.password if several else secrets)
    password = password_in(password_file, held=held, field="store_password_file")
    files = {name: path for name, path in tls.items() if path}
    if files and not is_tls(url):
        raise InvalidArgument("TLS files need a rediss:// URL", field="redis_url")
    for path in files.values():
        if not Path(path).is_file():
            raise InvalidArgument(f"{path} is not a file", field="redis_tls")
    of_sentinels = _password_of_sentinels(sentinel_password_file, several)
    access = Access(timeout_s, files, password=password)
    if several is None:
        servers = _one_server(url, access)
    else:
        servers = _several(several, access, of_sentinels or several.sentinel_password)
    return Opened(servers, address, (*secrets, *filter(None, (password, of_sentinels))))


def _password_of_sentinels(path: str | None, several: RedisServers | None) -> str:
    """That a file holds; "" where none is named."""
    name = "store_sentinel_password_file"
    if path and (several is None or several.kind != SENTINEL):
        raise InvalidArgument("needs a redis+sentinel:// URL", field=name)
    held = several is not None and bool(several.sentinel_password)
    return password_in(path, held=held, field=name)


def _one_server(url: str, access: Access) -> Servers:
    try:
        pool = BlockingConnectionPool.from_url(url, **access.options)
    except (ValueError, TypeError):
        # Their text may quote the URL.
        raise url_error("cannot be read", field="redis_url", several=True) from None
    if is_tls(url):
        pool.connection_class = RenewedSslConnection
    return OneServer(Redis.from_pool(pool), access.timeout_s)


def _several(servers: RedisServers, access: Access, sentinel_password: str) -> Servers:
    plain = RenewedSslConnection if servers.tls else Connection
    if servers.kind == SENTINEL:
        # One that hangs must leave time for the others.
        patience_s = access.timeout_s / (len(servers.hosts) + 1)
        sentinels = Access(
            patience_s,
            access.tls,
            plain,
            servers.sentinel_username,
            sentinel_password,
            read_timeout_s=patience_s,
        )
        finder = PrimaryFinder(servers.service, [sentinels.client(*at) for at in servers.hosts])
        plain = connection_to_primary(finder, plain)
    own = Access(
        access.timeout_s,
        access.tls,
        plain,
        servers.username,
        access.password or servers.password,
        servers.database,
    )
    if servers.kind == SENTINEL:
        return OneServer(own.client("", 0), access.timeout_s, finder)
    return Cluster(servers.hosts, own.client, timeout_s=access.timeout_s)
