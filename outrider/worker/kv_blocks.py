"""A worker's side of the block store: what it writes behind, and when it brings KV back."""

import contextlib
import logging
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from outrider.engine.block_copies import BlockCopies
from outrider.engine.scheduler import Work
from outrider.errors import FailedPrecondition
from outrider.kv_store.blocks import REASONS, BlockCodec, Bytes, KvLayout
from outrider.kv_store.connection import STORE_ERRORS, StoreAddress, is_refusal
from outrider.kv_store.estimate import Estimate, PrefillCost
from outrider.kv_store.health import Counts, Health
from outrider.kv_store.index import IndexWriter
from outrider.kv_store.reader import BlockReader, Fetch
from outrider.kv_store.writer import BlockWriter, Offer, Source
from outrider.v1 import worker_pb2
from outrider.worker.worker import Worker

logger = logging.getLogger(__name__)

_LEAST_BLOCKS = 2
_LEAST_PREFILL = 128
"""Tokens of a prefill from which on its time says something."""
_SHORTEST_S = 0.05
_LONGEST_S = 10.0
"""A restore may take as long as computing would, but no less and no more than these."""
_FLUSH_S = 2.0


class KvBlocks:
    """A `PrefixStore` (outrider.engine.scheduler) on Redis. `start` it before the worker runs,
    `close` it after that has ended."""

    def __init__(
        self,
        worker: Worker,
        copies: BlockCopies,
        layout: KvLayout,
        address: StoreAddress,
        prefill: PrefillCost,
        *,
        incarnation: int,
        fingerprint: str,
        ttl_s: float,
        bytes_per_s: float,
        always: bool,
    ) -> None:
        """`fingerprint` is the model's as Info has it, `bytes_per_s` what may be written; with
        `always` KV is brought back whatever was measured."""
        self._post = worker.post
        self._scheduler = worker.engine.scheduler
        self._blocks = worker.engine.blocks
        self._copies = copies
        self._address = address
        self._always = always
        self._fetches: dict[Work, Fetch] = {}
        self.counts = Counts(worker.counters)
        self.estimate = Estimate(prefill, layout.block_bytes, layout.block_tokens)
        self.health = Health(address, self.counts)
        codec, client = BlockCodec(layout), address.connect()
        self.writer = BlockWriter(
            client,
            codec,
            IndexWriter(
                client,
                incarnation,
                model_fingerprint=fingerprint,
                adapter=layout.adapter,
                ttl_s=ttl_s,
            ),
            read=self._read,
            health=self.health,
            counts=self.counts,
            ttl_s=ttl_s,
            bytes_per_s=bytes_per_s,
        )
        self.reader = BlockReader(
            address.connect(),
            codec,
            estimate=self.estimate,
            health=self.health,
            counts=self.counts,
        )

    @property
    def address(self) -> StoreAddress:
        """Where the store is."""
        return self._address

    def start(self) -> None:
        """Measure the store, and begin. A store that is away is taken up when it is there; one
        that refuses the worker raises FailedPrecondition."""
        self.writer.start()
        try:
            self.reader.start()
        except STORE_ERRORS as error:
            if is_refusal(error):
                self.close()
                raise FailedPrecondition(self._address.explain(error)) from None
            logger.warning("the KV store is not there: %s", self._address.explain(error))
            self.health.failed(error)
        else:
            self._tell_costs()
        self._scheduler.store = self

    def close(self) -> None:
        """Write what is queued, within two seconds, and end."""
        self.writer.close(_FLUSH_S)
        self.reader.close()

    def info(self) -> worker_pb2.KvStoreInfo:
        """What became of blocks so far."""
        counts = self.counts
        return worker_pb2.KvStoreInfo(
            up=self.health.up,
            blocks_written=counts["kv_blocks_written"],
            bytes_written=counts["kv_bytes_written"],
            blocks_restored=counts["kv_blocks_restored"],
            bytes_restored=counts["kv_bytes_restored"],
            tokens_restored=counts["kv_tokens_restored"],
            blocks_refused=sum(counts[f"kv_blocks_{reason}"] for reason in REASONS),
            errors=counts["kv_store_errors"],
        )

    # --- the worker's thread ------------------------------------------------------------------

    def begin(self, work: Work) -> float | None:
        with _harmless("looked for"):
            return self._begin(work)
        return None

    def offer(self, work: Work, num_blocks: int) -> None:
        with _harmless("offered"):
            self._note_prefill(work)
            self._offer(work, num_blocks)

    def _begin(self, work: Work) -> float | None:
        size = self._blocks.block_tokens
        first = work.computed // size
        last = min(len(work.tokens) - work.num_logits, len(work.sequence.log)) // size
        until = None
        if last - first >= _LEAST_BLOCKS and not work.known:
            until = self._until(work.computed, last * size)
        if until is not None and self._fetch(work, first, last, until):
            return until
        if work.pending >= _LEAST_PREFILL:
            work.lacked = range(work.computed, len(work.tokens))
        return None

    def _offer(self, work: Work, num_blocks: int) -> None:
        if not self.health.up:
            self.counts.add("kv_offers_dropped")
            return
        sequence, size = work.sequence, self._blocks.block_tokens
        write = self._always or self.estimate.gain_s(0, num_blocks * size) > 0
        source = sequence.in_store = sequence.in_store or Source()
        first = self.writer.first_wanted(source, write=write)
        places = self._blocks.places(
            sequence.salt, sequence.log, sequence.blocks, first, num_blocks
        )
        stop = first + len(places)
        offer = Offer(
            tenant=sequence.salt,
            token_ids=sequence.log.tokens[: stop * size],
            hashes=sequence.log.block_hashes(size)[:stop],
            first=first,
            places=places,
            write=write,
        )
        self.writer.offer(source, offer)

    def _until(self, start: int, stop: int) -> float | None:
        """Until when these tokens may be brought back; None: computing them is better."""
        if not self.health.up:
            return None
        longest = _LONGEST_S
        if not self._always:
            if not self.estimate.pays(start, stop, backlog_bytes=self.reader.backlog_bytes):
                self.counts.add("kv_restores_declined")
                self.reader.declined = True
                return None
            longest = min(self.estimate.recompute_s(start, stop), _LONGEST_S)
        return time.monotonic() + max(longest, _SHORTEST_S)

    def _fetch(self, work: Work, first: int, last: int, until: float) -> bool:
        size = self._blocks.block_tokens
        fetch = Fetch(
            tenant=work.sequence.salt,
            token_ids=work.tokens[: last * size],
            hashes=work.sequence.log.block_hashes(size)[:last],
            first=first,
            until=until,
            take=lambda index, blocks: self._take(work, fetch, index, blocks),
            done=lambda: self._post(partial(self._ended, work, fetch)),
        )
        if not self.reader.submit(fetch):
            return False
        self._fetches[work] = fetch
        return True

    def _arrived(self, work: Work, fetch: Fetch, index: int, staged: list[Any]) -> None:
        self.reader.taken()
        with _harmless("put into its place"):
            self._put(work, fetch, index, staged)

    def _put(self, work: Work, fetch: Fetch, index: int, staged: list[Any]) -> None:
        size = self._blocks.block_tokens
        waits = self._waits(work, fetch) and index == work.computed // size
        if not waits:
            fetch.cancelled = True  # The work was dropped or late, or a piece before is missing.
            return
        for place, block in enumerate(staged, index):
            self._copies.write(work.sequence.blocks[place], block)
        before = work.computed
        self._scheduler.restored(work, (index + len(staged)) * size)
        self.counts.add("kv_blocks_restored", len(staged))
        self.counts.add("kv_bytes_restored", len(staged) * self._copies.block_bytes)
        self.counts.add("kv_tokens_restored", work.computed - before)

    def _waits(self, work: Work, fetch: Fetch) -> bool:
        return work in self._scheduler.restoring and self._fetches.get(work) is fetch

    def _ended(self, work: Work, fetch: Fetch) -> None:
        in_time = self._waits(work, fetch)
        if self._fetches.get(work) is fetch:
            del self._fetches[work]
        if in_time:
            self._scheduler.end_restore(work)
        with _harmless("accounted for"):
            self._account(work, fetch, in_time)

    def _account(self, work: Work, fetch: Fetch, in_time: bool) -> None:
        """A fetch has ended, in time for its work or not."""
        blocks = work.computed // self._blocks.block_tokens - fetch.first
        seconds = time.monotonic() - fetch.began
        if in_time and blocks > 0:
            self.estimate.restored(seconds, blocks * self._copies.block_bytes)
            self.counts.add("kv_restores_done")
            tokens = blocks * self._blocks.block_tokens
            logger.info("restored KV", extra={"tokens": tokens, "ms": round(seconds * 1e3, 1)})
        elif time.monotonic() >= fetch.until:
            self.estimate.late(seconds, fetch.num_blocks * self._copies.block_bytes)
            self.counts.add("kv_restores_late")

    def _note_prefill(self, work: Work) -> None:
        """A work that lacked much has its first results."""
        lacked, work.lacked = work.lacked, None
        if lacked is not None and work.started is not None:
            seconds = time.monotonic() - work.started
            self.estimate.recomputed(seconds, lacked.start, lacked.stop)

    def _tell_costs(self) -> None:
        fetch = self.estimate.fetch
        if fetch is not None:
            logger.info(
                "measured the KV store",
                extra={
                    "store": self._address.name,
                    "mib_per_s": round(1 / fetch.byte_s / (1 << 20)),
                    "trip_ms": round(fetch.latency_s * 1e3, 2),
                    "restore_1024_s": round(self.estimate.restore_s(0, 1024), 3),
                    "recompute_1024_s": round(self.estimate.recompute_s(0, 1024), 3),
                },
            )

    # --- other threads ------------------------------------------------------------------------

    def _take(self, work: Work, fetch: Fetch, index: int, blocks: list[Bytes]) -> None:
        staged = [self._copies.stage(block) for block in blocks]
        self._post(partial(self._arrived, work, fetch, index, staged))

    def _read(self, place: tuple[int, int], into: Bytes) -> bool:
        self._copies.read(place[0], into)
        return self._blocks.holds(*place)


@contextlib.contextmanager
def _harmless(what: str) -> Iterator[None]:
    """A cache that breaks must not take the worker with it."""
    try:
        yield
    except Exception:
        logger.exception("KV could not be %s", what)
