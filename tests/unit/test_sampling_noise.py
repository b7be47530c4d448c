"""Noise is a function: known words, the same by every implementation, independent by key."""

import itertools

import numpy as np
import pytest
import torch

from outrider.sampling import (
    NoiseKeys,
    Stream,
    coupled_picks,
    exponentials,
    noise_bits,
    noise_bits_torch,
    philox_torch,
    uniforms,
    uniforms_at,
)
from outrider.sampling.noise import MAX_UNIFORM, _uniforms_numpy, _uniforms_torch

ALL_ONES = 2**64 - 1
PI = (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89)
PI_KEY = (0x452821E638D01377, 0xBE5466CF34E90C6C)
# Random123's known answers for philox4x64-10: counter, key, result.
KNOWN = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B),
    ),
    (
        (ALL_ONES,) * 4,
        (ALL_ONES,) * 2,
        (0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0),
    ),
    (
        PI,
        PI_KEY,
        (0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6),
    ),
]

GOLDEN = [
    2458362625,
    2481065605,
    3682498485,
    2328782621,
    3685923419,
    2280873639,
    2537993741,
    3237941975,
]


def _word(value: int) -> torch.Tensor:
    return torch.from_numpy(np.array([value], dtype=np.uint64).view(np.int64))


def _unsigned(word: torch.Tensor) -> int:
    return int(word) % 2**64


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_known_answers(counter, key, expected):
    words = philox_torch(tuple(map(_word, key)), tuple(map(_word, counter)))
    assert tuple(map(_unsigned, words)) == expected


def test_golden_words_of_the_contract():
    """Block 0 has the counter (1, position, round start, 0): what a kernel must make too."""
    assert noise_bits(7, Stream.DRAFT, 11, 9, 8).tolist() == GOLDEN
    counter = tuple(map(_word, (1, 11, 9, 0)))
    words = philox_torch((_word(7), _word(1)), counter)
    halves = [half for w in map(_unsigned, words) for half in (w % 2**32, w >> 32)]
    assert halves == GOLDEN


def test_torch_bits_equal_numpy_for_random_keys():
    rng = np.random.default_rng(0)
    seeds, positions, starts = rng.integers(0, ALL_ONES, (3, 20), dtype=np.uint64, endpoint=True)
    keys = NoiseKeys.per_round(seeds, positions, starts)
    for stream in Stream:
        bits = noise_bits_torch(stream, keys, 133)
        for row in range(20):
            key = (int(seeds[row]), stream, int(positions[row]), int(starts[row]))
            assert bits[row].tolist() == noise_bits(*key, 133).tolist()


def test_uniforms_and_exponentials_equal_bit_for_bit_by_both_ways():
    keys = NoiseKeys.per_round([1, 2, ALL_ONES], [3, 4, 5], [0, 2, 4])
    by_numpy = uniforms(Stream.ACCEPT, keys, 5000)
    by_torch = _uniforms_torch(noise_bits_torch(Stream.ACCEPT, keys, 5000))
    assert torch.equal(by_numpy, by_torch)
    assert by_numpy.dtype == torch.float32
    expected = (noise_bits(2, Stream.ACCEPT, 4, 2, 5000).astype(np.float64) + 0.5) / 2**32
    assert by_numpy[1].tolist() == expected.astype(np.float32).tolist()
    assert torch.equal(exponentials(Stream.ACCEPT, keys, 5000), -torch.log1p(-by_numpy))


def test_extreme_words_stay_inside_the_open_interval():
    words = np.array([0, 1, 2**31, 2**32 - 129, 2**32 - 1], dtype=np.uint32)
    values = _uniforms_numpy([words], 1, 5)[0]
    assert values[0] == 2.0**-33
    assert values[-1] == MAX_UNIFORM < 1
    assert torch.isfinite(torch.log(-torch.log1p(-values))).all()


def test_noise_differs_by_seed_stream_position_and_round():
    base = dict(seed=5, stream=Stream.DRAFT, position=9, round_start=8)
    variants = [{}, {"seed": 6}, {"stream": Stream.ACCEPT}, {"position": 10}, {"round_start": 9}]
    variants += [{"stream": Stream.RESIDUAL}, {"seed": 5 + 2**63}, {"position": 9 + 2**32}]
    rows = [noise_bits(**{**base, **variant}, count=4096) for variant in variants]
    values = [row.astype(np.float64) / 2**32 for row in rows]
    for a, b in itertools.combinations(values, 2):
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(4096)
        assert not np.isin(a, b).sum() > 2
    for value in values:
        assert abs(value.mean() - 0.5) < 5 * np.sqrt(1 / 12 / 4096)


def test_coupled_noise_knows_no_round():
    assert NoiseKeys.coupled([1], [2]).round_starts.tolist() == [0]


@pytest.mark.parametrize("first", [0, 1, 7, 8, 9, 1000])
@pytest.mark.parametrize("rows", [1, 100])
def test_shard_computes_its_own_part(first, rows):
    keys = NoiseKeys.coupled(range(rows), range(50, 50 + rows))
    whole = exponentials(Stream.COUPLED, keys, 1700)
    assert torch.equal(
        exponentials(Stream.COUPLED, keys, 700, first), whole[:, first : first + 700]
    )
    assert torch.equal(exponentials(Stream.COUPLED, keys, 3, first), whole[:, first : first + 3])


@pytest.mark.parametrize("rows", [2, 100])
def test_uniforms_of_some_ids_are_those_of_the_whole_row(rows):
    keys = NoiseKeys.per_round(range(rows), range(rows), range(rows))
    ids = torch.tensor([[5, 0, 1234, 77, 5]]).repeat(rows, 1)
    whole = uniforms(Stream.DRAFT, keys, 1300)
    assert torch.equal(uniforms_at(Stream.DRAFT, keys, ids), whole.gather(1, ids))


@pytest.mark.parametrize("vocab", [300, 3000])
def test_same_seed_alone_and_beside_8_neighbours(vocab):
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.randn(9, vocab, generator=generator).log_softmax(-1)
    seeds, positions = [17, *range(8)], [4, *range(8)]
    together = coupled_picks(log_probs, seeds, positions)
    for row in range(9):
        alone = coupled_picks(log_probs[row : row + 1], [seeds[row]], [positions[row]])
        assert alone.tolist() == together[row : row + 1].tolist()
    assert len(set(together.tolist())) > 3


def test_huge_batch_takes_the_other_way_and_gives_the_same():
    log_probs = torch.randn(200, 100, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    together = coupled_picks(log_probs, range(200), range(200))
    alone = [coupled_picks(log_probs[r : r + 1], [r], [r]).item() for r in range(200)]
    assert together.tolist() == alone
