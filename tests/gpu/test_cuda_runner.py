"""The CUDA runner's captured draws and loops against passes that the host steers one by one."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import triton

from outrider.engine import cuda_runner, drawing
from outrider.engine.cuda_drawing import can_draw
from outrider.engine.cuda_runner import CudaRunner
from outrider.engine.kept import Kept
from outrider.engine.loading import load_model
from outrider.engine.rows import Branch, Draw, Rows
from outrider.engine.surgery import optimise
from outrider.types import GenerationSpec, SamplingParams, VerificationMode

VOCABULARY = 512
BLOCKS_EACH = 8
SEQUENCES = 40
SCRATCH = 512
"""Blocks behind those of the sequences, for branches."""


@pytest.fixture(scope="module")
def runner():
    loaded = load_model("synthetic:tiny,eps=0.5", tier="draft", dtype="bfloat16", device="cuda")
    optimise(loaded.model)
    made = CudaRunner(
        loaded, num_blocks=BLOCKS_EACH * SEQUENCES + SCRATCH, max_rows=256, max_context=256
    )
    made.warm_up()
    return made


class Chooser:
    """Random batches; a sequence's tokens so far are its cached ones."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lengths = [0] * SEQUENCES

    def blocks(self, index: int) -> list[int]:
        return list(range(index * BLOCKS_EACH, (index + 1) * BLOCKS_EACH))

    def sampling(self) -> SamplingParams:
        choose = self.random.choice
        return SamplingParams(
            temperature=choose([0.0, 0.7, 1.0, 1.5]),
            top_k=choose([0, 0, 5, 50]),
            top_p=choose([1.0, 0.95, 0.5]),
            min_p=choose([0.0, 0.0, 0.05]),
            seed=self.random.getrandbits(64),
        )

    def spec(self) -> GenerationSpec:
        masked = self.random.random() < 0.1
        return GenerationSpec(
            self.sampling(),
            mode=self.random.choice([VerificationMode.COUPLED] * 5 + [VerificationMode.REJECTION]),
            prompt_len=1,
            min_tokens=200 if masked else 0,
            stop_ids=(3, 4) if masked else (),
        )

    def rows(self, index: int, *, max_steps: int) -> Rows:
        start = self.lengths[index]
        count = self.random.choice([1, 1, 2, 5, 9, 17])
        logits = self.random.choice([1, 1, min(count, 5), 0] if max_steps == 1 else [1, 1, 0])
        draw = None
        if logits and self.random.random() < 0.9:
            first = start + count - logits + 1
            draw = Draw(self.spec(), first, self.random.randint(1, max_steps) if logits == 1 else 1)
        tokens = [self.random.randrange(VOCABULARY) for _ in range(count)]
        return Rows(tokens, start, self.blocks(index), logits, draw)

    def batch(self, *, size: int, max_steps: int) -> list[Rows]:
        chosen = self.random.sample(range(SEQUENCES), size)
        batch = []
        for index in chosen:
            if self.lengths[index] + 40 > BLOCKS_EACH * 32:
                self.lengths[index] = 0
            rows = self.rows(index, max_steps=max_steps)
            batch.append(rows)
            self.lengths[index] += len(rows.token_ids)
        while sum(len(rows.token_ids) for rows in batch) > 256:
            batch.pop()
        return batch


@pytest.mark.parametrize("max_steps", [1, 8])
def test_captured_draws_equal_those_of_passes_one_by_one(runner, max_steps):
    chooser = Chooser(seed=max_steps)
    steps = 0
    for _ in range(150):
        batch = chooser.batch(size=chooser.random.randint(1, 20), max_steps=max_steps)
        fast = runner.run(batch)
        if max_steps == 1:
            logits = fast.logits.clone()
        slow = drawing.run(batch, runner)
        assert fast.drawn == slow.drawn
        if max_steps == 1:
            assert torch.equal(logits, slow.logits)
        steps += sum(len(drawn.token_ids) for drawn in fast.drawn if drawn)
    assert steps > 1000


def test_blocks_that_go_by_the_host_are_the_same_blocks(runner):
    """Read beside the passes' stream, written in order with it."""
    copies = runner.block_copies
    tokens = [i % VOCABULARY for i in range(96)]
    first, second = list(range(4)), list(range(8, 12))
    runner.forward([Rows(tokens, 0, first, 1)])
    torch.cuda.synchronize()
    for source, target in zip(first[:3], second[:3], strict=True):
        data, again = (np.zeros(copies.block_bytes, np.uint8) for _ in range(2))
        copies.read(source, data)
        copies.write(target, copies.stage(data))
        copies.read(target, again)  # Without waiting for anything.
        assert data.any() and np.array_equal(data, again)
    expected = runner.forward([Rows([5], 96, first, 1)]).clone()
    assert torch.equal(runner.forward([Rows([5], 96, second, 1)]), expected)


def test_another_seed_draws_other_tokens(runner):
    def draw(seed):
        spec = GenerationSpec(SamplingParams(temperature=1.5, seed=seed))
        rows = Rows([1, 2, 3], 0, list(range(BLOCKS_EACH)), 1, Draw(spec, 3, steps=8))
        return runner.run([rows]).drawn[0].token_ids

    assert draw(1) == draw(1) != draw(2)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 31, 32, 40])
def test_every_number_of_sequences_and_every_k(runner, size):
    """k = 0 to 8: verifications of k + 1 rows, and loops of k steps."""
    chooser = Chooser(seed=size)
    for k in range(9):
        verify, draft = [], []
        for index in range(size):
            spec = GenerationSpec(chooser.sampling())
            tokens = [chooser.random.randrange(VOCABULARY) for _ in range(k + 1)]
            if size * (k + 1) <= 256:
                verify.append(Rows(tokens, 0, chooser.blocks(index), k + 1, Draw(spec, 1)))
            draw = Draw(spec, 2, steps=max(k, 1))
            draft.append(Rows(tokens[:1] * 2, 0, chooser.blocks(index), 1, draw))
        for batch in (verify, draft):
            if batch:
                assert runner.run(batch).drawn == drawing.run(batch, runner).drawn


def branching(chooser: Chooser, runner: CudaRunner, size: int) -> list[Rows]:
    """Sequences that branch off their own guesses, some chains, and a prefill.

    The guesses are drawn one by one in passes of one shape, so that each is the very first token
    of its row's race also in the pass that branches.
    """
    batch = [branching_rows(chooser, index) for index in range(size)]
    batch.insert(1, Rows([1, 2, 3], 0, chooser.blocks(size), 0))
    for step in range(3):
        guessed = runner.run([undrawn(rows) for rows in batch]).drawn
        for rows, drawn in zip(batch, guessed, strict=True):
            pending = rows.num_logits - 1
            if drawn and step < pending:
                rows.token_ids[step - pending] = drawn.token_ids[step]
    free = BLOCKS_EACH * SEQUENCES
    for index, rows in enumerate(batch):
        count = rows.draw.scratch_blocks(runner.block_tokens) if rows.draw else 0
        batch[index] = replace(rows, scratch=range(free, free + count))
        free += count
    return batch


def branching_rows(chooser: Chooser, index: int) -> Rows:
    """One of a few tokens before or behind the border of a block."""
    choose = chooser.random.choice
    spec = GenerationSpec(replace(chooser.sampling(), top_k=choose([0, 50])))
    text = [chooser.random.randrange(VOCABULARY) for _ in range(choose([1, 5, 28, 29, 30, 31, 32]))]
    pending = [0] * choose([0, 1, 3])
    branches = tuple(
        Branch(num_accepted, rank)
        for num_accepted in range(len(pending) + 1)
        for rank in range(choose([0, 1, 3, 7]))
    )
    pending = pending if branches else []
    draw = Draw(spec, len(text), choose([1, 3, 6]), branches)
    return Rows([*text, *pending], 0, chooser.blocks(index), len(pending) + 1, draw)


def undrawn(rows: Rows) -> Rows:
    """The same pass, with what it draws at its rows alone."""
    draw = replace(rows.draw, steps=1, branches=()) if rows.draw else None
    return replace(rows, draw=draw)


def spoil(runner: CudaRunner) -> None:
    """Fill the blocks of branches with what no row may read."""
    for pool in runner._pools:
        pool[:, BLOCKS_EACH * SEQUENCES :] = 1e4


def drawn_by_kernels(runner, batch, monkeypatch):
    """What a batch draws; whoever falls back on the generic way fails."""
    with monkeypatch.context() as patched:
        patched.delattr(cuda_runner, "drawing")
        spoil(runner)
        fast = runner.run(batch).drawn
    spoil(runner)
    return fast


@pytest.fixture
def lowest_first(monkeypatch):
    """`topk`, which branches are ranked by, with the lowest id first among equals."""
    any_first = torch.Tensor.topk

    def topk(tensor, count, **options):
        if not options.get("sorted", True):  # What a distribution is cut to.
            return any_first(tensor, count, **options)
        found = torch.sort(tensor, descending=True, stable=True)
        return type(found)((found.values[:, :count], found.indices[:, :count]))

    monkeypatch.setattr(torch.Tensor, "topk", topk)


@pytest.mark.parametrize("size", [1, 2, 6])
def test_captured_branches_equal_those_of_passes_one_by_one(
    runner, size, lowest_first, monkeypatch
):
    chooser = Chooser(seed=2000 + size)
    tokens = 0
    for _ in range(40):
        batch = branching(chooser, runner, size)
        fast = drawn_by_kernels(runner, batch, monkeypatch)
        assert fast == drawing.run(batch, runner).drawn
        branches = [branch for drawn in fast if drawn for branch in drawn.branches]
        tokens += sum(len(branch.token_ids) for branch in branches)
    assert tokens > 200 * size


def leaving_distributions(chooser: Chooser, size: int) -> list[Rows]:
    """Sequences in `rejection` mode: chains, and branches of which some run ahead."""
    batch, free = [], BLOCKS_EACH * SEQUENCES
    for index in range(size):
        rows = branching_rows(chooser, index)
        sampling = replace(rows.draw.spec.sampling, temperature=chooser.random.choice([0.7, 1.0]))
        spec = GenerationSpec(sampling, mode=VerificationMode.REJECTION)
        last = rows.num_logits - 1
        tokens = [*rows.token_ids[: len(rows.token_ids) - last]]
        tokens += [chooser.random.randrange(VOCABULARY) for _ in range(last)]
        branches = rows.draw.branches
        if branches and chooser.random.random() < 0.5:
            branches = (Branch(last, run_ahead=True), *branches)
        draw = replace(rows.draw, spec=spec, branches=branches)
        count = draw.scratch_blocks(32)
        scratch = range(free, free + count)
        batch.append(replace(rows, token_ids=tokens, draw=draw, scratch=scratch))
        free += count
    return batch


@pytest.mark.parametrize("size", [1, 2, 4])
def test_captured_draws_from_distributions_equal_those_of_passes_one_by_one(
    runner, size, lowest_first, monkeypatch
):
    chooser = Chooser(seed=3000 + size)
    tokens = ran_ahead = 0
    for _ in range(40):
        batch = leaving_distributions(chooser, size)
        if not runner._takes(batch):
            continue
        spoil(runner)
        with monkeypatch.context() as patched:
            patched.delattr(drawing, "run")  # Whoever falls back on the generic way fails.
            fast = runner.run(batch).drawn
        spoil(runner)
        slow = drawing.run(batch, runner).drawn
        assert fast == slow
        chains = [each for drawn in fast for each in (drawn.branches or [drawn])]
        tokens += sum(len(chain.distributions) for chain in chains)
        ran_ahead += sum(len(chain.distributions) == len(chain.token_ids) for chain in chains)
    assert tokens > 100 + 50 * size and ran_ahead > 3


def test_other_keys_draw_other_guesses_from_distributions(runner):
    def draw(seed, base_len=3):
        sampling = SamplingParams(temperature=1.5, seed=seed)
        spec = GenerationSpec(sampling, mode=VerificationMode.REJECTION)
        rows = Rows([1, 2, 3], 0, list(range(BLOCKS_EACH)), 1, Draw(spec, base_len, steps=8))
        return runner.run([rows]).drawn[0].token_ids

    assert draw(1) == draw(1) != draw(2)


def test_more_branches_than_rows_of_a_pass(runner, lowest_first):
    """Passes are cut in two, each of the shape that half of the sequences alone have."""
    draw = Draw(GenerationSpec(SamplingParams()), 7, 2, tuple(Branch(0, i) for i in range(7)))
    batch = []
    for index in range(SEQUENCES):
        first = BLOCKS_EACH * SEQUENCES + 7 * index
        blocks = [BLOCKS_EACH * index]
        batch.append(Rows([index] * 7, 0, blocks, 1, draw, range(first, first + 7)))
    half = SEQUENCES // 2
    apart = runner.run(batch[:half]).drawn + runner.run(batch[half:]).drawn
    assert runner.run(batch).drawn == apart


def test_ranks_beyond_the_candidates_are_not_for_the_kernels():
    spec = GenerationSpec(SamplingParams())
    assert can_draw(Draw(spec, 5, 2, (Branch(0, 6),)))
    assert not can_draw(Draw(spec, 5, 2, (Branch(0, 7),)))


def test_nothing_is_allocated_or_compiled_after_warm_up(runner, monkeypatch):
    chooser = Chooser(seed=99)
    batches = [branching(chooser, runner, size) for size in (1, 2, 6, 1, 2, 6)]
    for index in range(200):
        batch = chooser.batch(size=chooser.random.randint(1, 8), max_steps=1 + 5 * (index % 2))
        if any(rows.draw for rows in batch) and runner._takes(batch):
            batches.append(batch)
    batches += [[tree_rows(chooser, 0)] for _ in range(10)]
    batches += [with_alternatives(chooser, drafting(chooser, size, 5)) for size in (1, 3, 8)]
    batches += [with_alternatives(chooser, branching(chooser, runner, 2))]
    assert len(batches) > 30
    for batch in batches[:3]:
        runner.run(batch)
    kernels = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **made: kernels.append(made["repr"])
    )
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for batch in batches[3:]:
        runner.run(batch)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled
    assert not kernels


def tree_rows(chooser: Chooser, index: int) -> Rows:
    """A text of some length, often about the border of a piece of attention, and nodes after it."""
    choose = chooser.random.choice
    length = choose([1, 5, 31, 32, 33, 200])
    count = choose([1, 2, 5, 12])
    spine = chooser.random.randrange(count + 1)
    parents = [n - 1 if n < spine else chooser.random.randrange(-1, n) for n in range(count)]
    tokens = [chooser.random.randrange(VOCABULARY) for _ in range(length + count)]
    draw = Draw(GenerationSpec(chooser.sampling()), length)
    return Rows(tokens, 0, chooser.blocks(index), count + 1, draw, parents=parents)


def path_of(rows: Rows, node: int) -> Rows:
    """The tokens up to a node alone."""
    length, nodes = len(rows.token_ids) - len(rows.parents), []
    while node >= 0:
        nodes.insert(0, rows.token_ids[length + node])
        node = rows.parents[node]
    text = [*rows.token_ids[:length], *nodes]
    return replace(rows, token_ids=text, num_logits=1, parents=(), draw=None)


def test_each_node_sees_its_own_path_alone(runner):
    """Last bits depend on the shape of a pass; what a wrong mask does is far more."""
    chooser = Chooser(seed=4000)
    errors, wrong = [], []
    for index in range(20):
        rows = tree_rows(chooser, index)
        logits = runner.forward([rows]).clone()
        as_chain = runner.forward([replace(rows, parents=())]).clone()
        for node in range(-1, len(rows.parents)):
            alone = runner.forward([path_of(rows, node)])[0]
            errors.append((logits[node + 1] - alone).abs().max().item())
            wrong.append((as_chain[node + 1] - alone).abs().max().item())
    assert max(errors) < max(wrong) / 10


def test_picks_at_nodes_equal_those_of_passes_one_by_one(runner):
    """Beside chains and a prefill; the text is computed before, but for its last token."""
    chooser = Chooser(seed=4001)
    for _ in range(40):
        batch = [tree_rows(chooser, index) for index in range(chooser.random.randint(1, 6))]
        for index, rows in enumerate(batch):
            start = len(rows.token_ids) - rows.num_logits
            runner.forward([Rows(rows.token_ids[: start or 1], 0, rows.blocks, 0)])
            batch[index] = replace(rows, token_ids=rows.token_ids[start:], start=start)
        chain = Draw(GenerationSpec(chooser.sampling()), 2)
        batch.insert(1, Rows([1, 2, 3], 0, chooser.blocks(30), 0))
        batch.insert(0, Rows([1, 2, 3], 0, chooser.blocks(31), 2, chain))
        fast, slow = runner.run(batch), drawing.run(batch, runner)
        assert fast.drawn == slow.drawn
        assert [len(d.token_ids) for d in fast.drawn if d] == [
            r.num_logits for r in batch if r.draw
        ]


def with_alternatives(chooser: Chooser, batch: list[Rows]) -> list[Rows]:
    """The same, but most draws that can be asked for alternatives are."""
    asked = []
    for rows in batch:
        draw = rows.draw
        if draw and not draw.branches:
            draw = replace(draw, alternatives=chooser.random.choice([0, 1, 3, 3]))
        asked.append(replace(rows, draw=draw))
    return asked


def drafting(chooser: Chooser, size: int, max_steps: int, *, first: int = 0) -> list[Rows]:
    """Sequences from number `first` on that draw some tokens each."""
    batch = []
    for index in range(first, first + size):
        tokens = [chooser.random.randrange(VOCABULARY) for _ in range(4)]
        draw = Draw(GenerationSpec(chooser.sampling()), 4, chooser.random.randint(1, max_steps))
        batch.append(Rows(tokens, 0, chooser.blocks(index), 1, draw))
    return batch


@pytest.mark.parametrize("make", ["one step", "loops", "branches"])
def test_captured_alternatives_equal_those_of_passes_one_by_one(
    runner, make, lowest_first, monkeypatch
):
    chooser = Chooser(seed=len(make))
    found = 0
    for _ in range(40):
        size = chooser.random.randint(1, 6)
        if make == "branches":
            batch = branching(chooser, runner, size) + drafting(chooser, 2, 6, first=20)
        else:
            batch = drafting(chooser, size, max_steps=1 if make == "one step" else 6)
        batch = with_alternatives(chooser, batch)
        fast = drawn_by_kernels(runner, batch, monkeypatch)
        assert fast == drawing.run(batch, runner).drawn
        plain = [
            replace(r, draw=replace(r.draw, alternatives=0) if r.draw else None) for r in batch
        ]
        for drawn, alone in zip(fast, runner.run(plain).drawn, strict=True):
            assert drawn is alone is None or drawn.token_ids == alone.token_ids
            found += len(drawn.alternatives) if drawn else 0
    assert found > 20


@pytest.mark.parametrize("size", [1, 3, 8, 20])
def test_a_stream_draws_what_passes_one_by_one_draw(runner, size):
    chooser = Chooser(seed=1000 + size)
    specs = [GenerationSpec(chooser.sampling()) for _ in range(size)]
    texts = [[chooser.random.randrange(VOCABULARY) for _ in range(9)] for _ in range(size)]
    steps = 12

    def rows(index, tokens, start, count):
        draw = Draw(specs[index], start + len(tokens), count)
        return Rows(tokens, start, chooser.blocks(index), 1, draw)

    batch = [rows(i, text, 0, steps) for i, text in enumerate(texts)]
    streamed = list(runner.stream(batch, lambda: False))
    expected = []
    batch = [rows(i, text, 0, 1) for i, text in enumerate(texts)]
    for step in range(steps):
        picks = [drawn.token_ids[0] for drawn in drawing.run(batch, runner).drawn]
        expected.append(picks)
        batch = [rows(i, [pick], 9 + step, 1) for i, pick in enumerate(picks)]
    assert streamed == expected
    stopped = iter([False, False, True])
    batch = [rows(i, text, 0, steps) for i, text in enumerate(texts)]
    assert list(runner.stream(batch, lambda: next(stopped))) == expected[:3]


def kept(chooser: Chooser, rows: Rows, first: int) -> Rows:
    """The same draw, with alternatives for its branches, which begin in blocks from `first` on with
    tokens that are known: there is no row to compute, or, for some, all of them are."""
    if not (rows.draw and rows.draw.branches):
        return rows
    draw = replace(rows.draw, alternatives=7)
    scratch = range(first, first + draw.scratch_blocks(CudaRunner.block_tokens))
    if chooser.random.random() < 0.3:
        return replace(rows, draw=draw, scratch=scratch)
    known = [[chooser.random.randrange(VOCABULARY) for _ in range(8)]] * rows.num_logits
    return Rows([], rows.stop, rows.blocks, 0, draw, scratch, known=known)


@pytest.mark.parametrize("size", [1, 2, 6])
def test_branches_that_begin_with_known_tokens_equal_those_of_passes_one_by_one(
    runner, size, lowest_first, monkeypatch
):
    chooser = Chooser(seed=5000 + size)
    others = without_rows = 0
    for _ in range(20):
        batch = branching(chooser, runner, size)
        runner.run(batch)
        free = BLOCKS_EACH * SEQUENCES
        for index, rows in enumerate(batch):
            batch[index] = kept(chooser, rows, free)
            free += len(batch[index].scratch)
        fast = drawn_by_kernels(runner, batch, monkeypatch)
        assert fast == drawing.run(batch, runner).drawn
        without_rows += sum(bool(rows.known) for rows in batch)
        for drawn in filter(None, fast):
            others += sum(len(branch.alternatives) for branch in drawn.branches)
    assert others > 20
    assert without_rows > 5


def test_what_follows_branches_is_what_a_pass_over_their_last_tokens_gives(runner, monkeypatch):
    """Their KV too: all that is drawn after them depends on it."""
    chooser = Chooser(seed=6000)
    for _ in range(20):
        rows = branching(chooser, runner, 1)[0]
        if not rows.draw.branches:
            continue
        draw = replace(rows.draw, alternatives=7)
        count = draw.scratch_blocks(runner.block_tokens)
        free = BLOCKS_EACH * SEQUENCES
        rows = replace(rows, draw=draw, scratch=range(free, free + count))
        output = runner.run([rows])
        kept = Kept.of(draw, output.drawn[0], rows.scratch, runner.block_tokens)
        last = list(kept.last_rows(rows.blocks, runner.block_tokens))
        found = output.after_branches()
        assert found == runner.run(last).drawn
        assert [len(drawn.alternatives[0]) for drawn in found] == [7] * len(draw.branches)
