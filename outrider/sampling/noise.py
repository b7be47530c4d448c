"""Randomness as a function: noise(seed, stream, position, round start, token id).

There is no generator state to move between workers (docs/design.md, invariant 4). The words are
those of Philox4x64-10: key = (seed, stream); block number b of a row has the counter
(b + 1, position, round_start, 0), because numpy's generator, which makes them on a CPU, counts up
before its first block. A block is 8 words of 32 bits, the low half of a 64-bit word first, and
word number = global token id, so that a vocabulary shard computes its own part.

uniform v = (word + 1/2) / 2^32, rounded once to fp32 and kept below 1 (the largest words would
round to 1, whose exponential is infinite: even a certain token would lose its race then);
exponential = -log1p(-v) in fp32.
"""

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.sampling.philox import words_of_blocks

Words = NDArray[np.uint64]
Ints = Sequence[int] | Words

WORDS_PER_BLOCK = 8
MAX_UNIFORM = 1.0 - 2.0**-24

# One numpy generator costs about 8 us: worth it for long rows, or for few of them.
_LONG_ROW = 512
_FEW_ROWS = 64


class Stream(enum.IntEnum):
    """Independent streams of one seed; the numbers are part of the wire contract."""

    COUPLED = 0
    """Shared by draft and target; keyed by position in the log and token id alone."""
    DRAFT = 1
    """What a draft samples its guesses with (rejection)."""
    ACCEPT = 2
    """The uniforms that guesses are accepted by (rejection)."""
    RESIDUAL = 3
    """What recovered and bonus tokens are drawn with (rejection)."""


@dataclass(frozen=True, slots=True)
class NoiseKeys:
    """What the noise of each row depends on, besides the stream; each uint64 [rows]."""

    seeds: Words
    positions: Words
    round_starts: Words

    @classmethod
    def coupled(cls, seeds: Ints, positions: Ints) -> "NoiseKeys":
        """Keys that know nothing of rounds: the coupled stream's."""
        return cls.per_round(seeds, positions, np.zeros(len(positions), dtype=np.uint64))

    @classmethod
    def per_round(cls, seeds: Ints, positions: Ints, round_starts: Ints) -> "NoiseKeys":
        """Keys of the other streams: noise that a round has looked at is its alone."""
        return cls(*(np.asarray(a, dtype=np.uint64) for a in (seeds, positions, round_starts)))

    def __len__(self) -> int:
        return len(self.seeds)


def noise_bits(
    seed: int, stream: Stream, position: int, round_start: int, count: int, first: int = 0
) -> NDArray[np.uint32]:
    """Words `first` to `first + count` (token ids) of one row: uint32 [count]."""
    block, skipped = divmod(first, WORDS_PER_BLOCK)
    key = np.array([seed, stream], dtype=np.uint64)
    counter = np.array([block, position, round_start, 0], dtype=np.uint64)
    longs = np.random.Philox(key=key, counter=counter).random_raw((skipped + count + 1) // 2)
    return longs.astype("<u8", copy=False).view("<u4")[skipped : skipped + count]


def uniforms(
    stream: Stream,
    keys: NoiseKeys,
    count: int,
    first: int = 0,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Uniforms of the token ids from `first` on, fp32 [rows, count]; the same on each device."""
    device = torch.device(device)
    if device.type == "cpu" and (count >= _LONG_ROW or len(keys) <= _FEW_ROWS):
        rows = (noise_bits(*key, count, first) for key in _row_keys(stream, keys))
        return _uniforms_numpy(rows, len(keys), count)
    return _uniforms_torch(noise_bits_torch(stream, keys, count, first, device))


def uniforms_at(
    stream: Stream,
    keys: NoiseKeys,
    token_ids: Tensor,  # [rows, entries] int64
) -> Tensor:
    """Uniforms of some token ids of each row, fp32 [rows, entries]."""
    if token_ids.device.type == "cpu" and len(keys) <= _FEW_ROWS and token_ids.numel():
        ids = token_ids.numpy()
        # A C generator makes the whole span faster than numpy's steps make the few words in it.
        count = int(ids.max()) + 1
        rows = (
            noise_bits(*key, count)[row_ids]
            for key, row_ids in zip(_row_keys(stream, keys), ids, strict=True)
        )
        return _uniforms_numpy(rows, *ids.shape)
    blocks = _blocks_torch(stream, keys, token_ids // WORDS_PER_BLOCK)
    words = (token_ids % WORDS_PER_BLOCK)[..., None]
    return _uniforms_torch(blocks.gather(-1, words)[..., 0])


def exponentials(
    stream: Stream,
    keys: NoiseKeys,
    count: int,
    first: int = 0,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Exponentials of the token ids from `first` on, fp32 [rows, count]."""
    device = torch.device(device)
    if device.type == "cuda":
        from outrider.sampling import cuda_noise  # Needs Triton, which a CPU build lacks.

        words = np.stack((keys.seeds, keys.positions, keys.round_starts))
        return cuda_noise.exponentials(words, int(stream), count, first, device)
    return to_exponentials(uniforms(stream, keys, count, first, device))


def to_exponentials(uniform: Tensor) -> Tensor:
    """-log1p(-v): small values, which win races, keep their full relative precision."""
    return -torch.log1p(-uniform)


def _row_keys(stream: Stream, keys: NoiseKeys) -> Iterator[tuple[int, Stream, int, int]]:
    """Arguments of `noise_bits` for each row."""
    rows = zip(
        keys.seeds.tolist(), keys.positions.tolist(), keys.round_starts.tolist(), strict=True
    )
    return ((seed, stream, position, round_start) for seed, position, round_start in rows)


def _uniforms_numpy(bits: Iterable[NDArray[np.uint32]], rows: int, count: int) -> Tensor:
    out = np.empty((rows, count), dtype=np.float32)
    for row, row_bits in enumerate(bits):
        # float64 holds word + 1/2 exactly, so that the only rounding is the last one.
        out[row] = (row_bits.astype(np.float64) + 0.5) * 2.0**-32
    return torch.from_numpy(out).clamp_(max=MAX_UNIFORM)


def _uniforms_torch(bits: Tensor) -> Tensor:
    """From words as int64: 2 word + 1 is exact; its conversion to fp32 is the only rounding."""
    return ((2 * bits + 1).to(torch.float32) * 2.0**-33).clamp_(max=MAX_UNIFORM)


def noise_bits_torch(
    stream: Stream,
    keys: NoiseKeys,
    count: int,
    first: int = 0,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The words of `noise_bits` for all rows at once on any device: int64 [rows, count]."""
    block, skipped = divmod(first, WORDS_PER_BLOCK)
    last = (first + count - 1) // WORDS_PER_BLOCK
    blocks = _blocks_torch(stream, keys, torch.arange(block, last + 1, device=device)[None])
    return blocks.flatten(1)[:, skipped : skipped + count]


def _blocks_torch(
    stream: Stream,
    keys: NoiseKeys,
    blocks: Tensor,  # [rows or 1, blocks] int64
) -> Tensor:
    """int64 [rows, blocks, 8]."""

    def column(words: Words) -> Tensor:
        return torch.from_numpy(words.view(np.int64)).to(blocks.device)[:, None]

    seeds = column(keys.seeds)
    positions, starts = column(keys.positions), column(keys.round_starts)
    counter = (blocks + 1, positions, starts, torch.zeros_like(blocks))
    return words_of_blocks((seeds, torch.full_like(seeds, int(stream))), counter)
