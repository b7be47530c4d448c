"""One Lua script in Redis: deadlines, and errors that say what to do.

Whatever goes wrong below becomes one of `outrider.errors`: Unavailable (away, slow, loading,
read-only: retry), ResourceExhausted (out of memory), FailedPrecondition (credentials, rights,
cluster: retrying does not help). Credentials of the URL appear in no message and no repr.
"""

import asyncio
import hashlib
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import redis.exceptions as redis_errors

from outrider.errors import (
    FailedPrecondition,
    InternalError,
    OutriderError,
    ResourceExhausted,
    Unavailable,
)
from outrider.store_probe import SESSION_RIGHTS, probe_key, probe_store
from outrider.v1 import facts_pb2
from services.orchestrator.store_servers import Command, Servers, open_servers

KEY_PREFIX = "outrider:"
RIGHTS = SESSION_RIGHTS
"""All that an ACL user needs, on keys ~outrider:* (and +select for a database other than 0)."""

CLUSTER_RIGHTS = "+cluster|slots +asking"
"""And in a Redis Cluster, on each node."""

_DENIED_IN_SCRIPT = ("ACL failure in script", "The user executing the script")
_NOT_NOW = ("MISCONF", "NOREPLICAS", "BUSY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "UNKILLABLE")


class _OnKey(NamedTuple):
    """A command, and the key whose server it is for."""

    key: str
    command: tuple[Command, ...]


class ScriptClient:
    """Runs one script; made by `connect`, ended by `close`. A `sibling` runs another one over the
    same connections, until its origin is closed."""

    def __init__(
        self,
        servers: Servers,
        script: str,
        *,
        address: str,
        secrets: tuple[str, ...],
        timeout_s: float,
    ) -> None:
        self.address = address
        self._servers = servers
        self._script = script
        self._sha = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
        self._secrets = secrets
        self._timeout_s = timeout_s

    @classmethod
    async def connect(
        cls,
        url: str,
        script: str,
        *,
        timeout_s: float,
        password_file: str | None = None,
        sentinel_password_file: str | None = None,
        ca_file: str | None = None,
        cert_file: str | None = None,
        key_file: str | None = None,
    ) -> "ScriptClient":
        opened = open_servers(
            url,
            timeout_s=timeout_s,
            password_file=password_file,
            sentinel_password_file=sentinel_password_file,
            tls={"ssl_ca_certs": ca_file, "ssl_certfile": cert_file, "ssl_keyfile": key_file},
        )
        client = cls(
            opened.servers,
            script,
            address=opened.address,
            secrets=opened.secrets,
            timeout_s=timeout_s,
        )
        try:
            await client.ping()
        except BaseException:
            await client.close()
            raise
        return client

    def sibling(self, script: str) -> "ScriptClient":
        """The same connections for another script; whoever made this one closes them."""
        return ScriptClient(
            self._servers,
            script,
            address=self.address,
            secrets=self._secrets,
            timeout_s=self._timeout_s,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.address})"

    async def close(self) -> None:
        await self._servers.close()

    async def ping(self) -> None:
        await self._within_deadline(self._servers.ping())

    async def look(self, samples: int, timeout_s: float) -> facts_pb2.StoreFacts:
        """What the store is, and what its user may do there."""
        try:
            client = await asyncio.wait_for(
                self._servers.client_of(probe_key(KEY_PREFIX)), timeout_s
            )
        except (redis_errors.RedisError, OSError) as error:  # OSError: TimeoutError too
            return facts_pb2.StoreFacts(address=self.address, error=str(self._translate(error)))
        return await probe_store(
            client,
            address=self.address,
            rights=RIGHTS,
            prefix=KEY_PREFIX,
            samples=samples,
            timeout_s=timeout_s,
            explain=lambda error: str(self._translate(error)),
        )

    async def call(self, keys: Sequence[str], args: Sequence[str | bytes | int]) -> list[Any]:
        """Run the script, together with what others ask for at the moment. The reply's first item
        is its status."""
        started = time.monotonic()
        try:
            what = self._by_sha(keys, args)
            reply: list[Any] = await self._servers.execute_together(what.key, *what.command)
        except redis_errors.NoScriptError:  # first use, restart, failover or SCRIPT FLUSH
            left_s = self._timeout_s - (time.monotonic() - started)
            reply = await self._within_deadline(self._execute(self._by_text(keys, args)), left_s)
        except (redis_errors.RedisError, OSError) as error:
            raise self._translate(error) from None
        return reply

    async def call_alone(self, keys: Sequence[str], args: Sequence[str | bytes | int]) -> list[Any]:
        """The same over a connection of its own: for large replies, which nobody should wait for
        but who asked."""
        reply: list[Any] = await self._within_deadline(self._alone(keys, args))
        return reply

    async def _alone(self, keys: Sequence[str], args: Sequence[str | bytes | int]) -> Any:
        try:
            return await self._execute(self._by_sha(keys, args))
        except redis_errors.NoScriptError:
            return await self._execute(self._by_text(keys, args))

    def _by_sha(self, keys: Sequence[str], args: Sequence[str | bytes | int]) -> "_OnKey":
        return _OnKey(keys[0], ("EVALSHA", self._sha, len(keys), *keys, *args))

    def _by_text(self, keys: Sequence[str], args: Sequence[str | bytes | int]) -> "_OnKey":
        return _OnKey(keys[0], ("EVAL", self._script, len(keys), *keys, *args))

    async def _execute(self, what: "_OnKey") -> Any:
        return await self._servers.execute(what.key, *what.command)

    async def _within_deadline(self, work: Any, timeout_s: float | None = None) -> Any:
        # One deadline over waiting for a connection, connecting, and all round trips.
        task = asyncio.current_task()
        cancelled = task.cancelling() if task else 0
        try:
            async with asyncio.timeout(self._timeout_s if timeout_s is None else timeout_s):
                return await work
        except (redis_errors.RedisError, OSError) as error:  # OSError: TimeoutError too
            raise self._translate(error) from None
        finally:
            # The client sends within `asyncio.wait_for`, which before Python 3.12 forgets a
            # cancellation that comes in the same turn as its end: a task would go on for ever.
            if task and task.cancelling() > cancelled:
                raise asyncio.CancelledError

    def _translate(self, error: Exception) -> OutriderError:
        detail = str(error) or type(error).__name__
        for secret in self._secrets:
            detail = detail.replace(secret, "***")
        store = f"session store {self.address}"
        match error:
            case redis_errors.OutOfMemoryError():
                return ResourceExhausted(
                    f"{store} is out of memory; raise its maxmemory or shorten session_ttl_s"
                )
            case redis_errors.AuthenticationError() | redis_errors.AuthorizationError():
                return FailedPrecondition(
                    f"{store} refuses the credentials; check user and password of the Redis URL"
                )
            case redis_errors.NoPermissionError():
                return self._denied(detail)
            case redis_errors.ResponseError() if detail.startswith(_DENIED_IN_SCRIPT):
                return self._denied(detail)
            case redis_errors.BusyLoadingError():
                return Unavailable(f"{store} is loading its data; retry in a moment")
            case redis_errors.ReadOnlyError():
                return Unavailable(
                    f"{store} is a read-only replica; point the Redis URL at the primary, or at "
                    "its sentinels"
                )
            case redis_errors.MovedError() | redis_errors.ClusterCrossSlotError():
                return FailedPrecondition(
                    f"{store} is one node of a Redis Cluster; name some of its nodes as "
                    "redis+cluster://node:6379,node:6379"
                )
            case redis_errors.TimeoutError() | TimeoutError():
                return Unavailable(
                    f"{store} did not answer within {self._timeout_s:g} s; check that it runs and "
                    "is not overloaded, then retry"
                )
            case redis_errors.ConnectionError() | OSError():
                return Unavailable(
                    f"{store} cannot be reached ({detail}); start Redis or correct the Redis URL"
                )
        if isinstance(error, redis_errors.ResponseError) and (
            detail.startswith(_NOT_NOW)
            or isinstance(error, redis_errors.ClusterDownError | redis_errors.TryAgainError)
        ):
            return Unavailable(f"{store} refuses writes for now ({detail}); check it, then retry")
        return InternalError(f"{store} answered with an error: {detail}")

    def _denied(self, detail: str) -> FailedPrecondition:
        return FailedPrecondition(
            f"session store {self.address} denies its user something ({detail}); grant {RIGHTS} "
            f"on ~outrider:*, in a cluster {CLUSTER_RIGHTS} too"
        )
