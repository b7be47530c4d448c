"""Connections to the store: deadlines, and errors that tell no secrets.

Redis errors are left as they are (`STORE_ERRORS`); `explain` makes of one what may be logged.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis.exceptions as redis_errors
from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from outrider.errors import InvalidArgument
from outrider.redis_url import parse_redis_url, url_error

RIGHTS = "+ping +mget +set +pexpire +unlink +zadd +zremrangebyrank"
"""All that a worker's ACL user needs, on keys ~outrider:kv:* (and +select for a database other than
0)."""

READER_RIGHTS = "+zrangebyscore +scan +unlink"
"""Likewise an orchestrator's, which asks the index, and removes what is a caller's."""

STORE_ERRORS = (redis_errors.RedisError, OSError)


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Where the store is, and how to get in. `password` is what the URL does not hold; `timeout_s`
    bounds each step of an operation."""

    url: str
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    timeout_s: float = 2.0
    password: str = ""

    def __post_init__(self) -> None:
        parse_redis_url(self.url, field="kv_store_url")
        for name, path in self._files.items():
            if not self.url.startswith("rediss://"):
                raise InvalidArgument("needs a rediss:// URL", field=name)
            if not Path(path).is_file():
                raise InvalidArgument(f"{path} is not a file", field=name)
        if not 0.01 <= self.timeout_s <= 60:
            raise InvalidArgument(
                f"is {self.timeout_s} s; allowed are 0.01 to 60", field="kv_store_timeout_s"
            )

    def __repr__(self) -> str:
        return f"StoreAddress({self.name})"

    @property
    def name(self) -> str:
        """The URL without credentials."""
        return parse_redis_url(self.url, field="kv_store_url")[0]

    @property
    def _files(self) -> dict[str, str]:
        files = {
            "kv_store_ca": self.ca_file,
            "kv_store_cert": self.cert_file,
            "kv_store_key": self.key_file,
        }
        return {name: path for name, path in files.items() if path}

    def connect(self) -> Redis:
        """A client for one thread; it connects when it is first used, and again after a loss."""
        with _readable_url():
            return Redis.from_url(self.url, retry=Retry(NoBackoff(), 0), **self._options)

    def connect_async(self) -> AsyncRedis:
        """A client for an event loop."""
        with _readable_url():
            retry = AsyncRetry(NoBackoff(), 0)
            client: AsyncRedis = AsyncRedis.from_url(self.url, retry=retry, **self._options)
            return client

    @property
    def _options(self) -> dict[str, Any]:
        names = {
            "kv_store_ca": "ssl_ca_certs",
            "kv_store_cert": "ssl_certfile",
            "kv_store_key": "ssl_keyfile",
        }
        return {
            "protocol": 2,
            "socket_timeout": self.timeout_s,
            "socket_connect_timeout": self.timeout_s,
            **({"password": self.password} if self.password else {}),
            **{names[name]: path for name, path in self._files.items()},
        }

    def explain(self, error: Exception) -> str:
        """What went wrong, for people, without credentials."""
        detail = str(error) or type(error).__name__
        _, secrets = parse_redis_url(self.url, field="kv_store_url")
        for secret in (*secrets, *filter(None, [self.password])):
            detail = detail.replace(secret, "***")
        if isinstance(error, redis_errors.NoPermissionError):
            return (
                f"{self.name} denies its user something ({detail}); grant a worker {RIGHTS}, "
                f"an orchestrator {READER_RIGHTS} on ~outrider:kv:*"
            )
        if is_refusal(error):
            return f"{self.name} refuses the credentials; check user and password"
        if isinstance(error, redis_errors.MovedError | redis_errors.ClusterCrossSlotError):
            return f"{self.name} is a node of a Redis Cluster, which KV blocks do not support"
        return f"{self.name}: {detail}"


@contextlib.contextmanager
def _readable_url() -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError):  # Their text may quote the URL.
        raise url_error("cannot be read", field="kv_store_url") from None


def is_refusal(error: Exception) -> bool:
    """Whether the store does not want this user: that will not pass by itself."""
    return isinstance(
        error,
        redis_errors.AuthenticationError
        | redis_errors.AuthorizationError
        | redis_errors.NoPermissionError,
    )


def is_full(error: Exception) -> bool:
    """Whether the store takes nothing more for now, and may well be read."""
    return isinstance(error, redis_errors.OutOfMemoryError)
