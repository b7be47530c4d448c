"""Commands of many sessions on their way to Redis together.

Rounds of many sessions end in one pass of their target, so their commits are due at the same
moment. What is asked for in one turn of the event loop goes out in one write over one connection,
and each command has its own reply. Nothing waits for another batch.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import redis.exceptions as redis_errors
from redis.asyncio import ConnectionPool
from redis.asyncio.connection import AbstractConnection

Command = Sequence[str | bytes | int]

_AGAIN_S = 0.01
_MAX_BATCH = 512


class Batches:
    """`execute` each command; `close` in the end. Every command may be repeated."""

    def __init__(self, pool: ConnectionPool, timeout_s: float) -> None:
        self._pool = pool
        self._timeout_s = timeout_s
        self._due: list[_Asked] = []
        self._under_way: set[asyncio.Task[None]] = set()

    async def execute(self, command: Command) -> Any:
        """The reply. Raises RedisError, and TimeoutError when all of it, connecting included, has
        taken `timeout_s`."""
        loop = asyncio.get_running_loop()
        if not self._due:
            loop.call_soon(self._send)
        asked = _Asked(packed(command), loop.create_future())
        self._due.append(asked)
        return await asked.reply

    async def close(self) -> None:
        for task in self._under_way:
            task.cancel()
        if self._under_way:
            await asyncio.wait(self._under_way)

    def _send(self) -> None:
        due, self._due = self._due, []
        for start in range(0, len(due), _MAX_BATCH):
            batch = due[start : start + _MAX_BATCH]
            task = asyncio.create_task(self._carry_out(batch), name="store-batch")
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    async def _carry_out(self, batch: "list[_Asked]") -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                try:
                    await self._exchange(batch)
                except redis_errors.ConnectionError:
                    # A pooled connection may have died unnoticed.
                    await asyncio.sleep(_AGAIN_S)
                    await self._exchange(batch)
        except BaseException as error:
            for asked in batch:
                asked.fail(error)
            if not isinstance(error, Exception):
                raise

    async def _exchange(self, batch: "list[_Asked]") -> None:
        """Write what has no reply yet, and read the replies."""
        batch = [asked for asked in batch if not asked.reply.done()]
        connection: AbstractConnection
        connection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
        try:
            await connection.send_packed_command(b"".join([asked.command for asked in batch]))
            for asked in batch:
                try:
                    asked.succeed(await connection.read_response())
                except redis_errors.ResponseError as error:
                    asked.fail(error)
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        finally:
            await self._pool.release(connection)


class _Asked:
    """A command and what becomes of it; whoever asked may have given up."""

    __slots__ = ("command", "reply")

    def __init__(self, command: bytes, reply: "asyncio.Future[Any]") -> None:
        self.command = command
        self.reply = reply

    def succeed(self, reply: Any) -> None:
        if not self.reply.done():
            self.reply.set_result(reply)

    def fail(self, error: BaseException) -> None:
        if self.reply.done():
            return
        if isinstance(error, asyncio.CancelledError):
            self.reply.cancel()
        else:
            self.reply.set_exception(error)


def packed(command: Command) -> bytes:
    """A command as Redis reads it (RESP)."""
    parts = [b"*%d\r\n" % len(command)]
    for part in command:
        data = part if isinstance(part, bytes) else str(part).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)
