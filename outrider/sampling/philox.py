"""Philox4x64-10 in plain integer tensor operations: the same bits on every device.

Source: Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3", §3.3. numpy's C code
makes the same words faster on a CPU (`noise.py` uses it there); this is the reference for other
devices and for kernels. A 64-bit word is held as the int64 of the same bit pattern, and the high
half of a product is put together from 32-bit pieces, as no device multiplies 64x64 to 128 bits.
"""

import torch
from torch import Tensor

ROUNDS = 10
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_LOW = 0xFFFFFFFF

Counter = tuple[Tensor, Tensor, Tensor, Tensor]


def philox_torch(key: tuple[Tensor, Tensor], counter: Counter) -> Counter:
    """Four 64-bit words for each element of the counter (all int64, broadcastable shapes)."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for index in range(ROUNDS):
        if index:
            k0 = k0 + _signed(_KEY_STEPS[0])
            k1 = k1 + _signed(_KEY_STEPS[1])
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return c0, c1, c2, c3


def words_of_blocks(key: tuple[Tensor, Tensor], counter: Counter) -> Tensor:
    """All 8 words of 32 bits of each block, low half first: int64 [..., 8] in [0, 2^32)."""
    longs = torch.stack(philox_torch(key, counter), dim=-1)
    return torch.stack((longs & _LOW, _high(longs)), dim=-1).flatten(-2)


def _signed(word: int) -> int:
    """The int64 with the bit pattern of an unsigned 64-bit word."""
    return word - (1 << 64) if word >> 63 else word


def _high(product: Tensor) -> Tensor:
    """The upper 32 bits, shifted in without sign."""
    return (product >> 32) & _LOW


def _multiply(a: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low 64 bits of the 128-bit product; int64 arithmetic wraps, as it must."""
    m_low, m_high = multiplier & _LOW, multiplier >> 32
    a_low, a_high = a & _LOW, _high(a)
    cross0, cross1 = a_low * m_high, a_high * m_low
    carry = _high(a_low * m_low) + (cross0 & _LOW) + (cross1 & _LOW)
    high = a_high * m_high + _high(cross0) + _high(cross1) + (carry >> 32)
    return high, a * _signed(multiplier)
