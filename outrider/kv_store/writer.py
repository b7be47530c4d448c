"""Blocks written behind: a thread of its own, a bounded queue, and nobody who waits for it.

What is offered names blocks of the pool; a block is read when its turn comes, and only then. If
the pool has given its place to something else meanwhile, it is dropped. How far a source has got is
remembered, and forgotten whenever something may have been lost: its next offer then begins at the
first block again, and fills the holes.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from redis import Redis

from outrider.kv_store.blocks import Block, BlockCodec, Bytes, blocks_of
from outrider.kv_store.connection import STORE_ERRORS, is_full
from outrider.kv_store.health import Counts, Health
from outrider.kv_store.index import IndexWriter

logger = logging.getLogger(__name__)

_MAX_OFFERS = 256
_AT_ONCE = 64
_FULL_PAUSE_S = 1.0
_REFRESH = 0.25
"""Of its life, after which a block's life is renewed."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The full blocks of a prefix. `places[i]` is where block `first` + i lies in the pool and what
    makes sure that it still does (`BlockManager.holds`). Without `write` only the index hears of
    them."""

    tenant: str
    token_ids: Sequence[int]
    hashes: Sequence[int]
    first: int
    places: Sequence[tuple[int, int]]
    write: bool = True


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a source has got: the store has all up to block `last` of these tokens."""

    token_ids: Sequence[int]
    last: Block
    losses: int
    began: float
    write: bool


@dataclass(slots=True, eq=False)
class Source:
    """Where offers come from, one after the other: a sequence. The writer's own."""

    progress: Progress | None = None


class BlockWriter:
    """Takes offers from any thread, started by `start`, ended by `close`.

    `read(place, into)` copies a block out of the pool and says whether it was what it should be.
    """

    def __init__(
        self,
        client: Redis,
        codec: BlockCodec,
        index: IndexWriter,
        *,
        read: Callable[[tuple[int, int], Bytes], bool],
        health: Health,
        counts: Counts,
        ttl_s: float,
        bytes_per_s: float,
    ) -> None:
        self._client = client
        self._codec = codec
        self._index = index
        self._read = read
        self._health = health
        self._counts = counts
        self._ttl_s = ttl_s
        self._bytes_per_s = bytes_per_s
        self._next_at = 0.0
        self._offers: OrderedDict[Source, Offer] = OrderedDict()
        self._changed = threading.Condition()
        self._busy = False
        self._closing = threading.Event()
        self._until = float("inf")
        self._thread = threading.Thread(target=self._run, name="outrider-kv-writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def first_wanted(self, source: Source, *, write: bool) -> int:
        """The first block that the next offer of a source should have a place for."""
        progress = source.progress
        return progress.last.index + 1 if progress and self._holds(progress, write) else 0

    def offer(self, source: Source, offer: Offer) -> None:
        """Never waits. A later offer of the same source takes the place of the one before."""
        with self._changed:
            if source not in self._offers and len(self._offers) >= _MAX_OFFERS:
                self._counts.add("kv_offers_dropped")
                return
            self._offers[source] = offer
            self._changed.notify()

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or being written."""
        with self._changed:
            return not self._offers and not self._busy

    def close(self, timeout_s: float) -> None:
        """Write what is queued, within `timeout_s`, and end. Waits for that and, where the store
        hangs, for its timeout."""
        with self._changed:
            self._until = time.monotonic() + timeout_s
            self._closing.set()
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()
        self._client.close()

    # --- the writer's thread ------------------------------------------------------------------

    def _run(self) -> None:
        while (item := self._next()) is not None:
            try:
                self._store(*item)
            except STORE_ERRORS as error:
                self._failed(error)
            except Exception:
                logger.exception("blocks were not written")

    def _next(self) -> tuple[Source, Offer] | None:
        """Wait for an offer; None at the end."""
        with self._changed:
            self._busy = False
            while not self._offers:
                if self._closing.is_set():
                    return None
                self._changed.wait()
            if self._is_over:
                return None
            self._busy = True
            return self._offers.popitem(last=False)

    @property
    def _is_over(self) -> bool:
        return time.monotonic() >= self._until

    def _failed(self, error: Exception) -> None:
        if is_full(error):
            self._counts.add("kv_store_full")
            self._closing.wait(_FULL_PAUSE_S)
        else:
            self._health.failed(error)

    def _store(self, source: Source, offer: Offer) -> None:
        if not self._health.up:
            self._counts.add("kv_offers_dropped")
            return
        progress = source.progress
        if progress is None or not self._is_before(progress, offer):
            progress = source.progress = None
            if offer.first:
                return  # What was lost meanwhile has no place in this offer.
        for further in self._advance(offer, progress):
            source.progress = further

    def _advance(self, offer: Offer, progress: Progress | None) -> Iterator[Progress]:
        """Write an offer, few blocks at a time, because the interpreter is the passes' too."""
        size = self._codec.layout.block_tokens
        losses, began = self._health.losses, progress.began if progress else time.monotonic()
        after = progress.last if progress else None
        while True:
            stop = ((after.index + 1 if after else 0) + _AT_ONCE) * size
            blocks = blocks_of(
                offer.tenant, offer.token_ids[:stop], offer.hashes, size, after=after
            )
            done = self._write_missing(offer, blocks) if offer.write else len(blocks)
            if done:
                self._index.add(offer.tenant, [block.hash for block in blocks[:done]])
                after = blocks[done - 1]
                token_ids = offer.token_ids[: (after.index + 1) * size]
                yield Progress(token_ids, after, losses, began, offer.write)
            if done < _AT_ONCE:
                return

    def _holds(self, progress: Progress, write: bool) -> bool:
        """Whether what was done can still be counted on, and the blocks' lives are long enough."""
        fresh = time.monotonic() - progress.began < self._ttl_s * _REFRESH
        return fresh and progress.losses == self._health.losses and progress.write >= write

    def _is_before(self, progress: Progress, offer: Offer) -> bool:
        known = progress.token_ids
        return self._holds(progress, offer.write) and offer.token_ids[: len(known)] == known

    def _write_missing(self, offer: Offer, blocks: Sequence[Block]) -> int:
        """Write those that the store lacks, in order; how many of them it has then, from the
        first on."""
        keys = [self._codec.key(offer.tenant, block) for block in blocks]
        there = self._renew(keys) if keys else set()
        for done, (block, key) in enumerate(zip(blocks, keys, strict=True)):
            if key in there:
                continue
            if not self._may_write(self._codec.value_bytes):
                return done
            value = self._value_of(block, offer.places[block.index - offer.first])
            if value is None:
                self._counts.add("kv_blocks_gone")
                return done  # Without it, those behind it are no use.
            self._client.set(key, value, px=round(self._ttl_s * 1000))
            self._counts.add("kv_blocks_written")
            self._counts.add("kv_bytes_written", len(value))
        return len(blocks)

    def _renew(self, keys: Sequence[str]) -> set[str]:
        """Those of the keys that are there; their lives begin anew."""
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.pexpire(key, round(self._ttl_s * 1000))
        return {key for key, there in zip(keys, pipeline.execute(), strict=True) if there}

    def _value_of(self, block: Block, place: tuple[int, int]) -> memoryview | None:
        held = True

        def read(into: Bytes) -> None:
            nonlocal held
            held = self._read(place, into)

        value = self._codec.encode(block, read)
        return value if held else None

    def _may_write(self, num_bytes: int) -> bool:
        """Wait until so much may be written; False where the end comes before that."""
        while (left_s := self._next_at - time.monotonic()) > 0 and not self._is_over:
            left_s = min(left_s, self._until - time.monotonic())
            if not self._closing.is_set():
                self._closing.wait(left_s)
            elif left_s > 0:
                time.sleep(left_s)
        self._next_at = max(time.monotonic(), self._next_at) + num_bytes / self._bytes_per_s
        return not self._is_over
