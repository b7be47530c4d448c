"""The write-behind queue by itself: it is bounded, and nobody waits for it."""

import threading
import time
from collections import Counter, defaultdict

import numpy as np
import pytest
from redis.exceptions import ConnectionError as StoreGone
from test_kv_values import CODEC, TOKENS, blocks

from outrider.kv_store import writer as writer_module
from outrider.kv_store.connection import StoreAddress
from outrider.kv_store.health import Counts, Health
from outrider.kv_store.writer import BlockWriter, Offer, Source
from outrider.token_log import TokenLog


class FakeRedis:
    """Keys and values; `gate` holds up whoever sets one, `broken` breaks the connection."""

    def __init__(self):
        self.values = {}
        self.gate = threading.Event()
        self.gate.set()
        self.broken = False

    def set(self, key, value, px):
        assert self.gate.wait(10)
        if self.broken:
            raise StoreGone("gone")
        self.values[key] = bytes(value)

    def pipeline(self, transaction):
        return FakePipeline(self.values)

    def close(self):
        pass


class FakePipeline:
    def __init__(self, values):
        self._values, self._keys = values, []

    def pexpire(self, key, px):
        self._keys.append(key)

    def execute(self):
        return [key in self._values for key in self._keys]


class Index:
    def __init__(self):
        self.hashes = []

    def add(self, tenant, hashes):
        self.hashes += hashes


class Rig:
    def __init__(self):
        self.redis, self.index, self.counter = FakeRedis(), Index(), Counter()
        counts = Counts(self.counter)
        self.health = Health(StoreAddress("redis://localhost"), counts)
        self.health.up = True
        self.sources = defaultdict(Source)
        self.reads, self.held = [], lambda place: True
        self.writer = BlockWriter(
            self.redis,
            CODEC,
            self.index,
            read=self._read,
            health=self.health,
            counts=counts,
            ttl_s=60.0,
            bytes_per_s=1e12,
        )

    def _read(self, place, into):
        self.reads.append(place)
        into[:] = place[0]
        return self.held(place)

    def offer(self, name="s", tokens=TOKENS, *, write=True, first=None):
        source = self.sources[name]
        if first is None:
            first = self.writer.first_wanted(source, write=write)
        count = len(tokens) // 8
        places = [(index, 0) for index in range(first, count)]
        hashes = TokenLog(tokens).block_hashes(8)
        self.writer.offer(source, Offer("a", tokens, hashes, first, places, write))

    def settle(self):
        deadline = time.monotonic() + 5
        while not self.writer.idle:
            assert time.monotonic() < deadline
            time.sleep(0.001)


@pytest.fixture
def rig():
    made = Rig()
    made.writer.start()
    yield made
    made.redis.gate.set()
    made.writer.close(1.0)


def test_blocks_are_written_once_and_in_order(rig):
    rig.offer(tokens=TOKENS[:16])
    rig.settle()
    rig.offer()
    rig.settle()
    rig.offer("another")
    rig.settle()
    assert [place[0] for place in rig.reads] == [0, 1, 2]
    assert list(rig.redis.values) == [CODEC.key("a", block) for block in blocks()]
    for index, (block, value) in enumerate(zip(blocks(), rig.redis.values.values(), strict=True)):
        assert np.all(CODEC.decode(block, value) == index)
    assert rig.index.hashes == [b.hash for b in blocks()] + [b.hash for b in blocks()]


def test_a_source_that_turns_back_begins_again(rig):
    rig.offer()
    rig.settle()
    other = [*TOKENS[:8], *range(16)]
    rig.offer(tokens=other)  # It thinks that all three are there.
    rig.settle()
    assert rig.counter["kv_blocks_written"] == 3
    rig.offer(tokens=other)
    rig.settle()
    assert rig.counter["kv_blocks_written"] == 5


def test_the_queue_is_bounded_and_offering_never_waits(rig, monkeypatch):
    monkeypatch.setattr(writer_module, "_MAX_OFFERS", 10)
    rig.redis.gate.clear()
    rig.offer("stuck")
    started = time.monotonic()
    for number in range(50):
        rig.offer(number)
        rig.offer(number)  # Takes the place of the one before.
    assert time.monotonic() - started < 1
    assert rig.counter["kv_offers_dropped"] >= 2 * 39
    assert len(rig.writer._offers) <= 10
    rig.redis.gate.set()
    rig.settle()
    assert rig.counter["kv_blocks_written"] == 3


def test_a_block_whose_place_was_given_away_is_not_written_nor_what_is_behind_it(rig):
    rig.held = lambda place: place[0] != 1
    rig.offer()
    rig.settle()
    assert list(rig.redis.values) == [CODEC.key("a", blocks()[0])]
    assert rig.counter["kv_blocks_gone"] == 1
    rig.held = lambda place: True  # It has been computed again.
    rig.offer()
    rig.settle()
    assert rig.counter["kv_blocks_written"] == 3


def test_after_a_failure_everything_is_looked_for_again(rig):
    rig.offer(tokens=TOKENS[:16])
    rig.settle()
    rig.redis.broken = True
    rig.offer()
    rig.settle()
    assert not rig.health.up and rig.counter["kv_store_errors"] == 1
    rig.offer()
    rig.settle()
    assert rig.counter["kv_offers_dropped"] == 1
    rig.redis.broken = False
    rig.redis.values.clear()
    rig.health.answered()
    rig.offer()
    rig.settle()
    assert len(rig.redis.values) == 3


def test_without_writing_only_the_index_hears_of_it_until_writing_pays(rig):
    rig.offer(write=False)
    rig.settle()
    assert not rig.redis.values and len(rig.index.hashes) == 3
    rig.offer(write=True)
    rig.settle()
    assert len(rig.redis.values) == 3


def test_what_is_queued_is_written_before_the_end():
    rig = Rig()
    for number in range(5):
        rig.offer(number, tokens=[number, *TOKENS])
    rig.writer.start()
    rig.writer.close(5.0)
    assert rig.counter["kv_blocks_written"] == 15


def test_the_end_does_not_wait_longer_than_it_was_told():
    rig = Rig()
    rig.writer._bytes_per_s = 100.0  # 20 s a block.
    rig.offer()
    rig.writer.start()
    started = time.monotonic()
    rig.writer.close(0.2)
    assert time.monotonic() - started < 2
    assert rig.counter["kv_blocks_written"] <= 2
