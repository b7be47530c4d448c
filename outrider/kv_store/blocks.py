"""What a block is called in the store, and what its value holds.

A value is one byte string: a head (format, layout, place, digest of the prefix, token ids), the
raw keys and values, and a SHA-256 of all before it. The head follows from what the reader expects,
so it is compared and never parsed: nothing in the store is trusted to describe itself.
"""

import hashlib
import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.kv_store.names import caller_digest

Bytes = NDArray[np.uint8]
"""Raw bytes, one dimension."""

FORMAT = 1
_MAGIC = b"outrider-kv\0"
_CHECKSUM_BYTES = 32


@dataclass(frozen=True, slots=True)
class KvLayout:
    """All that two workers must share for one's bytes to be what the other would compute.

    `arrangement` is the order of numbers within a block, `arithmetic` what decides their bits
    (device, kernels, versions). `rank` of `size` holds its own part of the heads.
    """

    model: str
    """Digest of its weights."""
    adapter: str
    quantised: str
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    block_bytes: int
    arrangement: str
    arithmetic: str
    rank: int = 0
    size: int = 1

    def to_bytes(self) -> bytes:
        """The same for equal layouts, and for no others."""
        return json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True).encode()

    @property
    def namespace(self) -> str:
        """Tells layouts apart in keys."""
        return _digest(self.to_bytes(), 8).hex()


@dataclass(frozen=True, slots=True)
class Block:
    """A full block of a prefix. `digest` identifies all tokens up to its end, and whose they are;
    `hash` is the chained 64-bit hash of the same tokens (outrider.types.chain_hash)."""

    index: int
    hash: int
    digest: bytes
    token_ids: bytes  # 4 bytes each, little-endian


def blocks_of(
    tenant: str,
    token_ids: Sequence[int],
    hashes: Sequence[int],
    block_tokens: int,
    *,
    after: Block | None = None,
) -> list[Block]:
    """The full blocks that `token_ids` start with, those behind `after` where it is known.

    `hashes[i]` is the chained hash of the first (i + 1) * block_tokens of them.
    """
    first = 0 if after is None else after.index + 1
    digest = _digest(b"tenant\0" + tenant.encode(), 32) if after is None else after.digest
    packed = np.array(token_ids[first * block_tokens :], dtype="<u4").tobytes()
    size = 4 * block_tokens
    blocks = []
    for index in range(first, first + len(packed) // size):
        own = packed[(index - first) * size : (index - first + 1) * size]
        digest = _digest(digest + own, 32)
        blocks.append(Block(index, hashes[index], digest, own))
    return blocks


class Refused(Exception):
    """A value is not the block it should be. `reason` is one of REASONS."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


DAMAGED, FOREIGN, OTHER_TOKENS = "damaged", "foreign", "other_tokens"
REASONS = (DAMAGED, FOREIGN, OTHER_TOKENS)
"""Truncated or altered; of another format, model or layout; of another prefix or caller."""


class BlockCodec:
    """Values of blocks of one layout."""

    def __init__(self, layout: KvLayout) -> None:
        self.layout = layout
        self._namespace = layout.namespace
        described = layout.to_bytes()
        self._head = _MAGIC + struct.pack("<I", len(described)) + described

    def key(self, tenant: str, block: Block) -> str:
        return f"outrider:kv:block:{self._namespace}:{caller_digest(tenant)}:{block.hash:016x}"

    @property
    def value_bytes(self) -> int:
        """Length of a value."""
        identity = 4 + 32 + 4 * self.layout.block_tokens
        return len(self._head) + identity + self.layout.block_bytes + _CHECKSUM_BYTES

    def encode(self, block: Block, read: Callable[[Bytes], None]) -> memoryview:
        """The value of a block; `read` fills in its raw keys and values."""
        value = bytearray(self.value_bytes)
        head = self._head + _identity(block)
        value[: len(head)] = head
        end = len(value) - _CHECKSUM_BYTES
        read(np.frombuffer(value, np.uint8)[len(head) : end])
        value[end:] = hashlib.sha256(memoryview(value)[:end]).digest()
        return memoryview(value)

    def decode(self, block: Block, value: bytes) -> Bytes:
        """The raw keys and values in `value`, if it is that block. Raises Refused."""
        view = memoryview(value)
        end = len(value) - _CHECKSUM_BYTES
        if end < len(_MAGIC) or hashlib.sha256(view[:end]).digest() != view[end:]:
            raise Refused(DAMAGED)
        head, identity = len(self._head), _identity(block)
        if len(value) != self.value_bytes or view[:head] != self._head:
            raise Refused(FOREIGN)
        if view[head : head + len(identity)] != identity:
            raise Refused(OTHER_TOKENS)
        return np.frombuffer(value, np.uint8)[head + len(identity) : end]


def _identity(block: Block) -> bytes:
    return struct.pack("<I", block.index) + block.digest + block.token_ids


def _digest(data: bytes, size: int) -> bytes:
    return hashlib.blake2b(data, digest_size=size).digest()
