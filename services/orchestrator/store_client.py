"""One Lua script on one Redis: connection, deadlines, and errors that say what to do.

Whatever goes wrong below becomes one of `outrider.errors`: Unavailable (away, slow, loading,
read-only: retry), ResourceExhausted (out of memory), FailedPrecondition (credentials, rights,
cluster: retrying does not help). Credentials of the URL appear in no message and no repr.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import redis.exceptions as redis_errors
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff

from outrider.errors import (
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    OutriderError,
    ResourceExhausted,
    Unavailable,
)
from outrider.redis_url import parse_redis_url, url_error
from services.orchestrator.store_tls import RenewedSslConnection

MAX_CONNECTIONS = 64
RIGHTS = (
    "+ping +eval +evalsha +time +exists +pexpireat +pttl +unlink "
    "+hget +hmget +hgetall +hexists +hset +hdel +hincrby +strlen +getrange +append "
    "+zadd +zrem +zcard +zscore +zrange +zrevrange +zremrangebyscore"
)
"""All that an ACL user needs, on keys ~outrider:* (and +select for a database other than 0)."""

_NOT_NOW = ("MISCONF", "NOREPLICAS", "BUSY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "UNKILLABLE")


class ScriptClient:
    """Runs one script; made by `connect`, ended by `close`. A `sibling` runs another one over the
    same connections, until its origin is closed."""

    def __init__(
        self,
        redis: "Redis",
        script: str,
        *,
        address: str,
        secrets: tuple[str, ...],
        timeout_s: float,
    ) -> None:
        self.address = address
        self._redis = redis
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
        ca_file: str | None = None,
        cert_file: str | None = None,
        key_file: str | None = None,
    ) -> "ScriptClient":
        address, secrets = parse_redis_url(url, field="redis_url")
        password = _password_from(password_file, secrets)
        tls = {"ssl_ca_certs": ca_file, "ssl_certfile": cert_file, "ssl_keyfile": key_file}
        tls = {name: path for name, path in tls.items() if path}
        if tls and not url.startswith("rediss://"):
            raise InvalidArgument("TLS files need a rediss:// URL", field="redis_url")
        for path in tls.values():
            if path and not Path(path).is_file():
                raise InvalidArgument(f"{path} is not a file", field="redis_tls")
        try:
            pool = BlockingConnectionPool.from_url(
                url,
                protocol=2,
                max_connections=MAX_CONNECTIONS,
                timeout=timeout_s,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                # A pooled connection may have died unnoticed. Every operation can be repeated.
                retry=Retry(ConstantBackoff(0.01), 1, (redis_errors.ConnectionError,)),
                **({"password": password} if password else {}),
                **tls,
            )
        except (ValueError, TypeError):
            # Their text may quote the URL.
            raise url_error("cannot be read", field="redis_url") from None
        if url.startswith("rediss://"):
            pool.connection_class = RenewedSslConnection
        client = cls(
            Redis.from_pool(pool),
            script,
            address=address,
            secrets=(*secrets, password) if password else secrets,
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
            self._redis,
            script,
            address=self.address,
            secrets=self._secrets,
            timeout_s=self._timeout_s,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.address})"

    async def close(self) -> None:
        await self._redis.aclose()

    async def ping(self) -> None:
        await self._within_deadline(self._execute("PING"))

    async def call(self, keys: Sequence[str], args: Sequence[str | bytes | int]) -> list[Any]:
        """Run the script. The reply's first item is its status."""
        reply: list[Any] = await self._within_deadline(self._call(keys, args))
        return reply

    async def _call(self, keys: Sequence[str], args: Sequence[str | bytes | int]) -> Any:
        try:
            return await self._execute("EVALSHA", self._sha, len(keys), *keys, *args)
        except redis_errors.NoScriptError:  # first use, restart, failover or SCRIPT FLUSH
            return await self._execute("EVAL", self._script, len(keys), *keys, *args)

    async def _execute(self, *command: str | bytes | int) -> Any:
        return await self._redis.execute_command(*command)  # type: ignore[no-untyped-call]

    async def _within_deadline(self, work: Any) -> Any:
        # One deadline over waiting for a connection, connecting, and all round trips.
        task = asyncio.current_task()
        cancelled = task.cancelling() if task else 0
        try:
            async with asyncio.timeout(self._timeout_s):
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
                return FailedPrecondition(
                    f"{store} denies its user something ({detail}); grant {RIGHTS} on ~outrider:*"
                )
            case redis_errors.BusyLoadingError():
                return Unavailable(f"{store} is loading its data; retry in a moment")
            case redis_errors.ReadOnlyError():
                return Unavailable(
                    f"{store} is a read-only replica; point the Redis URL at the primary"
                )
            case redis_errors.MovedError() | redis_errors.ClusterCrossSlotError():
                return FailedPrecondition(
                    f"{store} is one node of a Redis Cluster, which is not supported yet; use a "
                    "single Redis or a proxy before the cluster"
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


def _password_from(path: str | None, in_url: tuple[str, ...]) -> str:
    if not path:
        return ""
    field = "store_password_file"
    if in_url:
        raise InvalidArgument("the Redis URL holds a password already", field=field)
    try:
        password = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise InvalidArgument(f"cannot read {path}: {reason}", field=field) from None
    if not password:
        raise InvalidArgument(f"{path} is empty", field=field)
    return password
