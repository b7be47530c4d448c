"""Blocks brought back: a thread of its own that fetches, checks and hands them over in pieces.

A fetch ends at its deadline, at the first block that is not there or not what it should be, and
where nobody wants it any more; what it has handed over by then is good.
"""

import hashlib
import logging
import os
import queue
import secrets
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from redis import Redis

from outrider.kv_store.blocks import Block, BlockCodec, Bytes, Refused, blocks_of
from outrider.kv_store.connection import STORE_ERRORS, is_full
from outrider.kv_store.estimate import Estimate, FetchCost
from outrider.kv_store.health import Counts, Health

logger = logging.getLogger(__name__)

MAX_FETCHES = 256
_PIECE_BYTES = 4 << 20
_MAX_STAGED = 4
"""Pieces that are handed over and not taken yet, of all fetches together."""
_PROBE_BYTES = 1 << 20
_PROBES = 5
_STALE_S = 60.0
"""Age of a measurement that is renewed where it speaks against the store."""


@dataclass(slots=True, eq=False)
class Fetch:
    """Blocks first … of a prefix that somebody lacks, wanted until `until` (monotonic).

    On the reader's thread: `take(index, blocks)` gets the raw blocks from `index` on, in order, and
    must have `Reader.taken` called for it once; `done()` comes last, whatever happened.
    """

    tenant: str
    token_ids: Sequence[int]
    hashes: Sequence[int]
    first: int
    until: float
    take: Callable[[int, list[Bytes]], None]
    done: Callable[[], None]
    cancelled: bool = False
    began: float = 0.0
    """When its turn came."""

    @property
    def num_blocks(self) -> int:
        return len(self.hashes) - self.first


class BlockReader:
    """Takes fetches from any thread; `start` measures the store and starts, `close` ends."""

    def __init__(
        self,
        client: Redis,
        codec: BlockCodec,
        *,
        estimate: Estimate,
        health: Health,
        counts: Counts,
    ) -> None:
        self._client = client
        self._codec = codec
        self._estimate = estimate
        self._health = health
        self._counts = counts
        self._queue: queue.SimpleQueue[Fetch | None] = queue.SimpleQueue()
        self._staged = threading.Semaphore(_MAX_STAGED)
        self._backlog_lock = threading.Lock()
        self._backlog = 0
        self._fetches = 0
        self._measured_at = 0.0
        self._closing = threading.Event()
        self.declined = False
        """Somebody would have fetched, had the measurement spoken for it."""
        self._thread = threading.Thread(target=self._run, name="outrider-kv-reader", daemon=True)

    @property
    def backlog_bytes(self) -> int:
        """What the fetches that wait, or are under way, have left at most."""
        return self._backlog * self._codec.value_bytes

    def start(self) -> None:
        """Raises what the client raises where the store is away; it has started all the same."""
        try:
            self.probe()
        finally:
            self._thread.start()

    def submit(self, fetch: Fetch) -> bool:
        """Never waits; False where there are too many already."""
        with self._backlog_lock:
            if self._fetches >= MAX_FETCHES:
                return False
            self._fetches += 1
            self._backlog += fetch.num_blocks
        self._queue.put(fetch)
        return True

    def taken(self) -> None:
        """A piece has been taken over, or thrown away."""
        self._staged.release()

    def close(self) -> None:
        """End after the step that is under way."""
        self._closing.set()
        self._staged.release(_MAX_STAGED)
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join()
        self._client.close()

    def probe(self) -> None:
        """Measure the store by a value of its own. Raises what the client raises."""
        key = f"outrider:kv:block:probe:{secrets.token_hex(8)}"
        self._client.ping()
        trip_s = statistics.median(_seconds(self._client.ping) for _ in range(_PROBES))
        try:
            self._client.set(key, os.urandom(_PROBE_BYTES), px=10_000)
            fetch_s = statistics.median(
                _seconds(lambda: self._fetch_probe(key)) for _ in range(_PROBES)
            )
            self._client.unlink(key)
        except STORE_ERRORS as error:
            if not is_full(error):
                raise  # A full one can be read all the same; it is as it was measured before.
        else:
            byte_s = max(fetch_s - trip_s, 1e-6) / _PROBE_BYTES
            self._estimate.measured(FetchCost(trip_s, byte_s))
        self._measured_at = time.monotonic()
        self._health.answered()

    def _fetch_probe(self, key: str) -> None:
        [value] = self._get([key])
        hashlib.sha256(value or b"").digest()

    # --- the reader's thread ------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                fetch = self._queue.get(timeout=self._patience_s())
            except queue.Empty:
                self._probe_again()
                continue
            if fetch is None:
                return
            left = fetch.num_blocks
            try:
                for handed_over in self._carry_out(fetch):
                    self._done_with(handed_over)
                    left -= handed_over
            except STORE_ERRORS as error:
                self._health.failed(error)
            except Exception:
                logger.exception("blocks were not brought back")
            finally:
                self._done_with(left, fetches=1)
                fetch.done()

    def _patience_s(self) -> float:
        return _STALE_S if self._health.up else max(self._health.probe_in_s, 0.01)

    def _probe_again(self) -> None:
        stale = self.declined and time.monotonic() - self._measured_at >= _STALE_S
        if self._health.up and not stale:
            return
        self.declined = False
        try:
            self.probe()
        except STORE_ERRORS as error:
            self._health.failed(error)

    def _get(self, keys: Sequence[str]) -> list[bytes | None]:
        return cast(list[bytes | None], self._client.mget(keys))

    def _done_with(self, blocks: int, *, fetches: int = 0) -> None:
        with self._backlog_lock:
            self._backlog -= blocks
            self._fetches -= fetches

    def _carry_out(self, fetch: Fetch) -> Iterator[int]:
        """Hand over piece by piece; the number of blocks of each."""
        fetch.began = time.monotonic()
        if not self._wanted(fetch):
            return
        size = self._codec.layout.block_tokens
        blocks = blocks_of(fetch.tenant, fetch.token_ids, fetch.hashes, size)[fetch.first :]
        for piece in self._pieces(blocks):
            if not self._wanted(fetch):
                return
            good = self._fetch(fetch.tenant, piece)
            if piece[0].index == fetch.first:
                self._estimate.looked_up(bool(good))
            left_s = fetch.until - time.monotonic()
            if not good or not self._staged.acquire(timeout=max(left_s, 0.0)):
                return
            fetch.take(piece[0].index, good)
            yield len(good)
            if len(good) < len(piece):
                return

    def _wanted(self, fetch: Fetch) -> bool:
        going = self._health.up and not self._closing.is_set()
        return going and not fetch.cancelled and time.monotonic() < fetch.until

    def _pieces(self, blocks: list[Block]) -> Iterator[list[Block]]:
        """One block alone first: where it is missing, that is known after a trip."""
        most = max(_PIECE_BYTES // self._codec.value_bytes, 1)
        if blocks:
            yield blocks[:1]
        for start in range(1, len(blocks), most):
            yield blocks[start : start + most]

    def _fetch(self, tenant: str, piece: Sequence[Block]) -> list[Bytes]:
        """The blocks of a piece up to the first that is not there or not right."""
        keys = [self._codec.key(tenant, block) for block in piece]
        good: list[Bytes] = []
        for block, key, value in zip(piece, keys, self._get(keys), strict=True):
            if value is None:
                self._counts.add("kv_blocks_missed")
                break
            try:
                good.append(self._codec.decode(block, value))
            except Refused as refused:
                self._counts.add(f"kv_blocks_{refused.reason}")
                logger.warning("a KV block was refused: %s", refused.reason)
                self._health.lost()
                self._client.unlink(key)  # Whoever computes it now may write it.
                break
        return good


def _seconds(operation: Callable[[], object]) -> float:
    started = time.monotonic()
    operation()
    return time.monotonic() - started
