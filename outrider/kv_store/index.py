"""Which workers hold a prefix: `outrider:kv:index:{salt}:{hash}`, sorted sets of incarnations.

Each worker adds itself under the hash of every full block that it has, with the time as score, and
keeps the `MAX_HOLDERS` latest; the key expires. A hint for placement, no more: workers lose KV
without saying so, and come back as another incarnation.
"""

import asyncio
import hashlib
import time
from collections.abc import Sequence

from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from outrider.kv_store.connection import STORE_ERRORS, StoreAddress

MAX_HOLDERS = 8
MAX_HASHES = 4096
"""Blocks of a prompt that are looked at; what is beyond is as good as unknown."""
_PROBES = 16


def index_salt(model_fingerprint: str, adapter: str, tenant: str) -> str:
    """Keeps those apart who share no KV."""
    parts = "\0".join((model_fingerprint, adapter, tenant)).encode()
    return hashlib.blake2b(parts, digest_size=8).hexdigest()


def index_key(salt: str, prefix_hash: int) -> str:
    return f"outrider:kv:index:{salt}:{prefix_hash:016x}"


class IndexWriter:
    """Tells that a worker holds blocks. Raises what the client raises."""

    def __init__(
        self, client: Redis, incarnation: int, *, model_fingerprint: str, adapter: str, ttl_s: float
    ) -> None:
        self._client = client
        self._incarnation = str(incarnation)
        self._model = (model_fingerprint, adapter)
        self._ttl_ms = round(ttl_s * 1000)

    def add(self, tenant: str, hashes: Sequence[int]) -> None:
        salt = index_salt(*self._model, tenant)
        pipeline = self._client.pipeline(transaction=False)
        for prefix_hash in hashes:
            key = index_key(salt, prefix_hash)
            pipeline.zadd(key, {self._incarnation: time.time()})
            pipeline.zremrangebyrank(key, 0, -MAX_HOLDERS - 1)
            pipeline.pexpire(key, self._ttl_ms)
        pipeline.execute()


class IndexReader:
    """Asks who holds a prefix; made by `connect`, ended by `close`.

    `ttl_s` is that of the writers: what is older counts as lost. An answer that takes longer than
    `timeout_s`, or does not come at all, is that nobody is known to.
    """

    def __init__(self, client: AsyncRedis, *, ttl_s: float, timeout_s: float = 0.05) -> None:
        self._client = client
        self._ttl_s = ttl_s
        self._timeout_s = timeout_s
        self.failures = 0

    @classmethod
    def connect(
        cls, address: StoreAddress, *, ttl_s: float, timeout_s: float = 0.05
    ) -> "IndexReader":
        """Connects when it is first asked. Raises InvalidArgument."""
        return cls(address.connect_async(), ttl_s=ttl_s, timeout_s=timeout_s)

    async def close(self) -> None:
        await self._client.aclose()

    async def holders(self, salt: str, hashes: Sequence[int]) -> dict[int, int]:
        """For each incarnation that is known to hold any, how many blocks of a prompt it holds.

        `hashes` are the chained hashes at the ends of the prompt's full blocks. A worker that holds
        a block holds all before it, so a few places are asked for first, then those between the
        last one that somebody holds and the next: two trips whatever the length.
        """
        hashes = hashes[:MAX_HASHES]
        try:
            async with asyncio.timeout(self._timeout_s):
                step = -(-len(hashes) // _PROBES) or 1
                coarse = range(len(hashes), 0, -step)
                found = await self._ask(salt, hashes, coarse)
                deepest = max(found.values(), default=0)
                between = range(deepest + 1, min(deepest + step, len(hashes)))
                return found | await self._ask(salt, hashes, between)
        except STORE_ERRORS:
            self.failures += 1
            return {}

    async def _ask(self, salt: str, hashes: Sequence[int], depths: range) -> dict[int, int]:
        """Depths are numbers of blocks."""
        if not depths:
            return {}
        ordered = sorted(depths)
        pipeline = self._client.pipeline(transaction=False)
        oldest = time.time() - self._ttl_s
        for depth in ordered:
            pipeline.zrangebyscore(index_key(salt, hashes[depth - 1]), oldest, "+inf")
        found: dict[int, int] = {}
        for depth, members in zip(ordered, await pipeline.execute(), strict=True):
            found |= {int(member): depth for member in members}
        return found
