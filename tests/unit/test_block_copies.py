"""Whole KV blocks as bytes: what goes out comes in again, and touches nothing else."""

import numpy as np
import pytest
import torch

from outrider.engine.block_copies import DeviceCopies
from outrider.engine.kv_pool import CpuPool, KvShape


def host(dtype):
    shape = KvShape(layers=3, kv_heads=2, head_dim=16, dtype=dtype)
    pool = CpuPool(shape, 6, 8)
    return pool.keys, pool.values, pool.copies


def device(dtype):
    """As on a GPU, but for the GPU."""
    keys, values = (torch.zeros(3, 6, 8, 2, 16, dtype=dtype) for _ in range(2))
    return keys, values, DeviceCopies(keys, values, "by token")


@pytest.fixture(params=[host, device])
def pool(request):
    keys, values, copies = request.param(torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    for part in (keys, values):
        part.copy_(torch.randn(part.shape, generator=generator))
    return keys, values, copies


def read(copies, block):
    data = np.zeros(copies.block_bytes, np.uint8)
    copies.read(block, data)
    return data


def test_a_block_is_as_large_as_its_numbers(pool):
    _, _, copies = pool
    assert copies.block_bytes == 2 * 3 * 2 * 16 * 8 * 2


def test_a_block_arrives_bit_by_bit_and_alone(pool):
    keys, values, copies = pool
    before = keys.clone(), values.clone()
    copies.write(4, copies.stage(read(copies, 1)))
    for now, then in ((keys, before[0]), (values, before[1])):
        assert torch.equal(now[:, 4], then[:, 1])
        others = [0, 1, 2, 3, 5]
        assert torch.equal(now[:, others], then[:, others])
        assert not torch.equal(now[:, 4], then[:, 4])


def test_keys_are_the_first_half_layer_by_layer(pool):
    keys, values, copies = pool
    halves = np.split(read(copies, 2), 2)
    for half, part in zip(halves, (keys, values), strict=True):
        expected = part[:, 2].contiguous().view(torch.uint8).numpy().reshape(-1)
        assert np.array_equal(half, expected)


@pytest.mark.parametrize("make", [host, device])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_nan_and_all_other_bits_survive(make, dtype):
    keys, _, copies = make(dtype)
    bits = np.random.default_rng(2).integers(0, 256, copies.block_bytes, dtype=np.uint8)
    copies.write(3, copies.stage(bits))
    assert np.array_equal(read(copies, 3), bits)
    assert keys[:, 3].isnan().any()
