"""A Redis Cluster: each command goes to the node that has its key's slot.

A client of our own, because each command here is one script on keys of one slot, which may be
repeated: what is left is a map of slots that follows the cluster, within one deadline.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import redis.exceptions as redis_errors
from redis.asyncio import Redis
from redis.crc import key_slot

Address = tuple[str, int]

_MOST_HOPS = 64
_HOPS_AT_ONCE = 4
_PAUSE_S = 0.02
_MAX_PAUSE_S = 0.25
_MOST_LEFT = 16
"""Nodes that are no more, to which connections are kept: they may come back."""


class Cluster:
    """`hosts` are some of its nodes; `connect` makes a client of one. Whoever calls sets the
    deadline; `timeout_s` is the longest that it will be."""

    def __init__(
        self, hosts: Sequence[Address], connect: Callable[[str, int], Redis], *, timeout_s: float
    ) -> None:
        self._hosts = tuple(hosts)
        self._connect = connect
        self._timeout_s = timeout_s
        self._patience_s = timeout_s / 4
        self._clients: dict[Address, Redis] = {}
        self._slots: dict[int, Address] = {}
        self._stale = True
        self._learning = asyncio.Lock()

    async def execute(self, key: str, *command: str | bytes | int) -> Any:
        slot = key_slot(key.encode())
        asking: Address | None = None
        lost: Address | None = None
        for hop in range(_MOST_HOPS):
            if hop >= _HOPS_AT_ONCE:
                await asyncio.sleep(_pause_s(hop - _HOPS_AT_ONCE))
            at = asking or await self._node_of(slot)
            try:
                return await self._send(at, command, asking=asking is not None)
            except redis_errors.AskError as moved:  # MovedError is one of them
                there = (moved.host or at[0], int(moved.port))
                asking = None if isinstance(moved, redis_errors.MovedError) else there
                if asking is None:
                    self._slots[slot] = there
                    self._stale |= hop > 0  # One slot may have moved alone.
            except (redis_errors.TryAgainError, redis_errors.ClusterDownError) as wait:
                # Keys under way from one node to another, or a primary that is being replaced.
                self._stale |= isinstance(wait, redis_errors.ClusterDownError)
                asking = None
                await asyncio.sleep(_pause_s(hop))
            except redis_errors.ConnectionError:
                self._stale, asking = True, None
                if at == lost:
                    raise
                lost = at  # Another one may have its slots by now.
            except redis_errors.ResponseError:
                raise
            except BaseException:  # A cancelled command too has waited for its deadline in vain.
                self._stale = True
                raise
        raise redis_errors.TryAgainError(f"TRYAGAIN slot {slot} is under way for too long")

    async def execute_together(self, key: str, *command: str | bytes | int) -> Any:
        """By itself: where a slot is may change from command to command."""
        async with asyncio.timeout(self._timeout_s):
            return await self.execute(key, *command)

    async def client_of(self, key: str) -> Redis:
        """Of the node that has the key's slot, as far as is known."""
        return self._client(await self._node_of(key_slot(key.encode())))

    async def ping(self) -> None:
        """Whether some node knows the cluster."""
        self._stale = True
        await self._learn()

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()

    async def _node_of(self, slot: int) -> Address:
        if self._stale or slot not in self._slots:
            await self._learn()
        if slot not in self._slots:
            raise redis_errors.ClusterDownError(f"CLUSTERDOWN no node has slot {slot}")
        return self._slots[slot]

    async def _send(self, at: Address, command: Sequence[Any], *, asking: bool) -> Any:
        client = self._client(at)
        if not asking:
            return await client.execute_command(*command)  # type: ignore[no-untyped-call]
        # One connection: ASKING is for what follows it there.
        pipeline: Any = client.pipeline(transaction=False)
        pipeline.execute_command("ASKING").execute_command(*command)
        refused, reply = await pipeline.execute(raise_on_error=False)
        for answer in (refused, reply):
            if isinstance(answer, Exception):
                raise answer
        return reply

    async def _learn(self) -> None:
        """Who has which slots: of the first node that knows, those in use first."""
        async with self._learning:
            if not self._stale and self._slots:
                return  # Another command has asked meanwhile.
            known = list(dict.fromkeys(self._slots.values()))
            random.shuffle(known)
            why: Exception = redis_errors.ConnectionError("no node of the cluster answers")
            for at in dict.fromkeys((*known, *self._hosts)):
                try:
                    async with asyncio.timeout(self._patience_s):
                        reply = await self._client(at).execute_command(  # type: ignore[no-untyped-call]
                            "CLUSTER", "SLOTS"
                        )
                    slots = _slots_of(reply, at[0])
                except redis_errors.ClusterDownError as down:
                    why = down
                except (redis_errors.RedisError, OSError) as error:
                    why = error
                else:
                    self._slots, self._stale = slots, False
                    await self._forget(set(slots.values()) | set(self._hosts))
                    return
            raise why

    def _client(self, at: Address) -> Redis:
        client = self._clients.get(at)
        if client is None:
            client = self._clients[at] = self._connect(*at)
        return client

    async def _forget(self, kept: set[Address]) -> None:
        """Hang up on nodes that have left long ago: names and addresses change for ever."""
        for at in [at for at in self._clients if at not in kept][:-_MOST_LEFT]:
            await self._clients.pop(at).aclose()


def _pause_s(attempt: int) -> float:
    return min(_PAUSE_S * 2.0**attempt, _MAX_PAUSE_S) * random.uniform(0.5, 1.0)


def _slots_of(reply: Any, asked_host: str) -> dict[int, Address]:
    """The primary of each slot. A node that has no name for itself is the one that was asked."""
    slots: dict[int, Address] = {}
    for first, last, primary, *_ in reply:
        host = (primary[0] or b"").decode()
        if host == "?":
            continue
        at = (host or asked_host, int(primary[1]))
        slots |= dict.fromkeys(range(int(first), int(last) + 1), at)
    return slots
