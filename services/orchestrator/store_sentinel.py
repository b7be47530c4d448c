"""The primary of a replicated store, as its sentinels know it."""

from collections.abc import Sequence
from typing import cast

import redis.exceptions as redis_errors
from redis.asyncio import Connection, Redis


class PrimaryFinder:
    """Asks sentinels, the one that knew it last first, which server is the primary of a service."""

    def __init__(self, service: str, sentinels: Sequence[Redis]) -> None:
        self._service = service
        self._sentinels = list(sentinels)

    async def find(self) -> tuple[str, int]:
        """Host and port. Raises ConnectionError where no sentinel knows."""
        why = "it is not known to them"
        for sentinel in tuple(self._sentinels):
            try:
                reply = await self._ask(sentinel)
            except (redis_errors.RedisError, OSError) as error:
                why = str(error) or type(error).__name__
                continue
            if reply is not None:
                self._sentinels.remove(sentinel)
                self._sentinels.insert(0, sentinel)
                return reply
        raise redis_errors.ConnectionError(
            f"no sentinel tells where the primary of {self._service} is: {why}"
        )

    async def close(self) -> None:
        for sentinel in self._sentinels:
            await sentinel.aclose()

    async def _ask(self, sentinel: Redis) -> tuple[str, int] | None:
        reply: list[bytes] | None = await sentinel.execute_command(  # type: ignore[no-untyped-call]
            "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service
        )
        return (reply[0].decode(), int(reply[1])) if reply else None


def connection_to_primary(finder: PrimaryFinder, base: type[Connection]) -> type[Connection]:
    """A class of connections, each of which goes to where the primary is when it is made."""

    class PrimaryConnection(base):  # type: ignore[misc, valid-type]
        host: str
        port: int

        async def connect(self) -> None:
            if not self.is_connected:
                self.host, self.port = await finder.find()
            await super().connect()

    return cast(type[Connection], PrimaryConnection)
