"""Two GPUs against one, and what a group captures against passes that the host steers."""

import random

import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("needs two CUDA devices", allow_module_level=True)

from group_harness import group_of_two
from outrider.engine import drawing
from outrider.engine.cuda_runner import CudaRunner
from outrider.engine.loading import load_model
from outrider.engine.rows import Branch, Draw, Rows
from outrider.engine.steps import Kind
from outrider.engine.surgery import optimise
from outrider.types import GenerationSpec, SamplingParams

MODEL = "synthetic:tiny,eps=0.5"
VOCABULARY = 512
BLOCKS_EACH = 8
SEQUENCES = 16
SCRATCH = 256
CONTEXT = 256


@pytest.fixture(scope="module", params=["auto", "nccl"])
def pair(request):
    with group_of_two(
        MODEL,
        device="cuda",
        dtype="bfloat16",
        kv_memory="16MiB",
        max_rows=64,
        context_length=CONTEXT,
        group_sums=request.param,
        group_start_s=300.0,
        group_timeout_s=20.0,
    ) as made:
        yield made


@pytest.fixture(scope="module")
def alone():
    loaded = load_model(MODEL, tier="target", dtype="bfloat16", device="cuda:0")
    optimise(loaded.model)
    runner = CudaRunner(
        loaded, num_blocks=BLOCKS_EACH * SEQUENCES + SCRATCH, max_rows=64, max_context=CONTEXT
    )
    runner.warm_up()
    return runner


def blocks(index):
    return list(range(index * BLOCKS_EACH, (index + 1) * BLOCKS_EACH))


def sampling(r, *, cuts):
    return SamplingParams(
        temperature=r.choice([0.0, 0.7, 1.0, 1.5]),
        top_p=r.choice([1.0, 0.9]) if cuts else 1.0,
        top_k=r.choice([0, 20]) if cuts else 0,
        seed=r.getrandbits(64),
    )


def draws(r, *, cuts, kind):
    """Rows of some sequences from their start on, each with a draw of this kind."""
    batch = []
    for index in r.sample(range(SEQUENCES), r.randint(1, 6)):
        count = r.randint(1, 6)
        tokens = [r.randrange(VOCABULARY) for _ in range(count)]
        spec = GenerationSpec(sampling(r, cuts=cuts))
        draw, logits, scratch = Draw(spec, 1), count, ()
        if kind == "loop":
            draw = Draw(spec, count, r.randint(2, 6), alternatives=2 * cuts)
            logits = 1
        elif kind == "branches":
            draw = Draw(spec, 1, 2, tuple(Branch(i, 1) for i in range(count)))
            first = BLOCKS_EACH * SEQUENCES + 12 * index
            scratch = range(first, first + draw.scratch_blocks(32))
        batch.append(Rows(tokens, 0, blocks(index), logits, draw, scratch))
    return batch


def tokens_of(drawn):
    return [t for d in drawn for part in (d, *d.branches) for t in part.token_ids]


@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize("kind", ["verify", "loop"])
def test_captured_draws_are_those_of_passes_that_the_host_steers(pair, kind, cuts):
    """Up to near-ties: parts of a vocabulary need no normalisation, the whole has one."""
    r = random.Random(7)
    pair.told.clear()
    same = total = 0
    for _ in range(60):
        batch = draws(r, cuts=cuts, kind=kind)
        fast = tokens_of(pair.runner.run(batch).drawn)
        slow = tokens_of(drawing.run(batch, pair.runner).drawn)
        same += sum(a == b for a, b in zip(fast, slow, strict=True))
        total += len(fast)
    assert pair.told[Kind.RUN] == 60 and pair.told[Kind.FORWARD] >= 60
    assert total > 300 and total - same <= total // 200


def test_branches_start_from_the_candidates_of_all_ranks(pair):
    r = random.Random(8)
    for _ in range(30):
        batch = draws(r, cuts=False, kind="branches")
        found = pair.runner.run(batch).drawn
        assert [len(d.branches) for d in found] == [len(rows.draw.branches) for rows in batch]
        assert all(len(branch.token_ids) == 3 for d in found for branch in d.branches)


def test_logits_are_those_of_one_gpu_up_to_rounding(pair, alone):
    r = random.Random(9)
    for size in (1, 3, 17, 64):
        tokens = [r.randrange(VOCABULARY) for _ in range(size)]
        rows = [Rows(tokens, 0, blocks(0), size)]
        found, expected = pair.runner.forward(rows), alone.forward(rows)
        assert found.shape == expected.shape == (size, VOCABULARY)
        assert (found - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_streams_are_the_passes_one_by_one_and_nearly_those_of_one_gpu(pair, alone, temperature):
    """And may be stopped in between: what comes next finds all ranks in step."""
    steps = 20
    batch = []
    for index in range(4):
        spec = GenerationSpec(SamplingParams(temperature=temperature, seed=index))
        batch.append(Rows([index, 5, 9], 0, blocks(index), 1, Draw(spec, 3, steps)))
    streamed = list(pair.runner.stream(batch, lambda: False))
    looped = [d.token_ids for d in pair.runner.run(batch).drawn]
    assert len(streamed) == steps
    assert [list(column) for column in zip(*streamed, strict=True)] == looped
    other = [d.token_ids for d in alone.run(batch).drawn]
    assert sum(a == b for a, b in zip(looped, other, strict=True)) >= 2
    asked = []
    halted = list(pair.runner.stream(batch, lambda: bool(asked.append(None)) or len(asked) > 3))
    assert halted == streamed[: len(halted)] and 3 <= len(halted) < steps
    assert [d.token_ids for d in pair.runner.run(batch).drawn] == looped
