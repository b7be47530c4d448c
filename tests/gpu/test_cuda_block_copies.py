"""KV blocks in and out of a pool on a device: bit by bit, beside passes, and in order with them."""

import threading

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from outrider.engine.block_copies import DeviceCopies
from outrider.engine.cuda_runner import CudaRunner
from outrider.engine.loading import load_model
from outrider.engine.rows import Rows
from outrider.engine.surgery import optimise

LAYERS, BLOCKS, BLOCK_TOKENS, HEADS, WIDTH = 4, 64, 32, 8, 128


def make(dtype=torch.bfloat16, blocks=BLOCKS):
    shape = (LAYERS, blocks, BLOCK_TOKENS, HEADS, WIDTH)
    keys, values = (torch.randn(shape, device="cuda").to(dtype) for _ in range(2))
    return keys, values, DeviceCopies(keys, values, "by token")


def read(copies, block):
    data = np.zeros(copies.block_bytes, np.uint8)
    copies.read(block, data)
    return data


def bits(part, block):
    return part[:, block].contiguous().view(torch.uint8).cpu().numpy().reshape(-1)


@pytest.fixture
def busy():
    """Keeps the default stream busy for about a hundred milliseconds: what does not wait for it is
    seen."""
    big = torch.randn(4096, 4096, device="cuda")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    big @ big
    end.record()
    torch.cuda.synchronize()
    repeats = max(int(100 / max(start.elapsed_time(end), 0.01)), 1)

    def keep() -> None:
        for _ in range(min(repeats, 2000)):
            big @ big

    return keep


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_block_arrives_bit_by_bit_and_alone(dtype):
    keys, values, copies = make(dtype)
    assert copies.block_bytes == keys[:, 0].numel() * keys.element_size() * 2
    before = keys.clone(), values.clone()
    copies.write(4, copies.stage(read(copies, 1)))
    torch.cuda.synchronize()
    others = [block for block in range(BLOCKS) if block != 4]
    for now, then in zip((keys, values), before, strict=True):
        assert torch.equal(now[:, 4], then[:, 1])
        assert torch.equal(now[:, others], then[:, others])


def test_keys_are_the_first_half_layer_by_layer():
    keys, values, copies = make()
    first, second = np.split(read(copies, 2), 2)
    assert np.array_equal(first, bits(keys, 2)) and np.array_equal(second, bits(values, 2))


def test_nan_and_all_other_bits_survive():
    keys, _, copies = make()
    data = np.random.default_rng(2).integers(0, 256, copies.block_bytes, dtype=np.uint8)
    copies.write(3, copies.stage(data))
    assert np.array_equal(read(copies, 3), data)
    assert keys[:, 3].isnan().any()


def test_staged_memory_is_pinned():
    _, _, copies = make()
    assert copies.stage(np.zeros(copies.block_bytes, np.uint8)).is_pinned()


def test_a_read_waits_for_the_write_before_it_and_not_for_passes(busy):
    _, _, copies = make()
    data = np.random.default_rng(3).integers(0, 256, copies.block_bytes, dtype=np.uint8)
    staged = copies.stage(data)
    busy()
    copies.write(5, staged)  # Behind what runs; it has not happened yet.
    assert np.array_equal(read(copies, 5), data)
    torch.cuda.synchronize()
    busy()
    read(copies, 6)
    assert not torch.cuda.current_stream().query(), "the read has waited for the passes"
    torch.cuda.synchronize()


def test_a_write_returns_at_once_and_later_passes_see_it(busy):
    keys, _, copies = make()
    data = np.random.default_rng(4).integers(0, 256, copies.block_bytes, dtype=np.uint8)
    staged = copies.stage(data)
    busy()
    copies.write(7, staged)
    seen = keys[:, 7].clone()  # As a pass that was asked for after it.
    assert not torch.cuda.current_stream().query(), "the write has waited for the passes"
    del staged  # Its memory must not be used again before it has arrived.
    for _ in range(8):
        copies.stage(np.zeros(copies.block_bytes, np.uint8))
    torch.cuda.synchronize()
    half = seen.contiguous().view(torch.uint8).cpu().numpy().reshape(-1)
    assert np.array_equal(half, np.split(data, 2)[0])


def test_reads_beside_writes_never_give_a_mixture():
    """One thread writes whole blocks of one byte, another reads: as writer and engine do."""
    _, _, copies = make()
    copies.write(1, copies.stage(np.full(copies.block_bytes, 0, np.uint8)))
    stop = threading.Event()
    faults: list[str] = []

    def reads() -> None:
        while not stop.is_set():
            for block in (8, 9):
                if len(np.unique(read(copies, block))) != 1:
                    faults.append(f"block {block} is a mixture")

    for block in (8, 9):
        copies.write(block, copies.stage(np.full(copies.block_bytes, block, np.uint8)))
    torch.cuda.synchronize()
    thread = threading.Thread(target=reads)
    thread.start()
    try:
        for n in range(300):
            # Others are written all the time; those that are read stay as they are.
            copies.write(10 + n % 20, copies.stage(np.full(copies.block_bytes, n % 251, np.uint8)))
    finally:
        stop.set()
        thread.join(30)
    assert not thread.is_alive() and not faults
    torch.cuda.synchronize()
    for n in range(280, 300):
        assert set(read(copies, 10 + n % 20)) == {n % 251}


def new_runner() -> CudaRunner:
    """With a model of its own: a model knows one pool."""
    loaded = load_model("synthetic:tiny,eps=0.5", tier="draft", dtype="bfloat16", device="cuda")
    optimise(loaded.model)
    runner = CudaRunner(loaded, num_blocks=16, max_rows=256, max_context=256)
    runner.warm_up()
    return runner


def test_kv_of_a_prompt_goes_to_another_pool_and_the_next_token_is_the_same():
    """What a worker does that brings KV back: the passes after it cannot tell."""
    first, second = new_runner(), new_runner()
    size = 32
    tokens = [3 + 7 * n % 500 for n in range(4 * size)]
    first.run([Rows(tokens, 0, [1, 2, 3, 4, 5], 0)])
    for here, there in ((1, 9), (2, 7), (3, 8), (4, 6)):
        data = np.zeros(first.block_copies.block_bytes, np.uint8)
        first.block_copies.read(here, data)
        second.block_copies.write(there, second.block_copies.stage(data))
    logits = [
        runner.run([Rows([5], len(tokens), blocks, 1)]).logits.clone()
        for runner, blocks in ((first, [1, 2, 3, 4, 5]), (second, [9, 7, 8, 6, 10]))
    ]
    assert torch.equal(*logits)
    # Not in another order: what is seen lies at its position whatever the block.
    wrong = second.run([Rows([5], len(tokens), [11, 12, 13, 14, 10], 1)]).logits
    assert not torch.equal(logits[0], wrong)
