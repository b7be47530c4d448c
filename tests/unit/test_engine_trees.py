"""Trees of guesses: every node gets what its own path alone would give; and runners-up of picks."""

import random
from types import SimpleNamespace

import pytest
import torch
from test_engine_branches import ranked, rows_with_branches
from worker_harness import coupled, load, make_runner, plain_logits, random_tokens

from outrider import trees
from outrider.engine.engine import Engine
from outrider.engine.kv_pool import CpuPool, KvShape
from outrider.engine.rows import Draw, Rows
from outrider.engine.scheduler import Work
from outrider.engine.sequence import Sequence
from outrider.types import GenerationSpec, SamplingParams

torch.set_num_threads(1)
TOLERANCE = 1e-4
BLOCK = 8  # make_runner's.
GREEDY = GenerationSpec(SamplingParams())
SHAPES = {
    "two leaves": (-1, -1),
    "spine and leaves": (-1, 0, 1, 2, -1, 0, 1, 2, 2, 3),
    "no spine": (-1, -1, 1, 0, 2, 2, 3),
    "all the bits of a mask": (-1, *[-1] * 31, *range(1, 33)),
    "a deep side": (-1, -1, *range(1, 30)),
}


def random_parents(rng, most=20):
    """A spine, and then any nodes."""
    count = rng.randrange(1, most + 1)
    spine = rng.randrange(count + 1)
    return tuple(node - 1 if node < spine else rng.randrange(-1, node) for node in range(count))


def path_of(parents, node):
    """The nodes on the way from the base to a node, itself included; -1 is the base."""
    return [*path_of(parents, parents[node]), node] if node >= 0 else []


def prefixes(tokens, nodes, parents):
    """The text that ends at the base, and at each node."""
    return [
        [*tokens, *(nodes[step] for step in path_of(parents, node))]
        for node in range(-1, len(nodes))
    ]


def expected_logits(folder, tokens, nodes, parents):
    texts = prefixes(tokens, nodes, parents)
    return torch.stack([plain_logits(folder, text)[-1] for text in texts])


def tree_rows(tokens, nodes, parents, blocks, *, start=0, draw=None):
    return Rows([*tokens[start:], *nodes], start, blocks, len(nodes) + 1, draw, parents=parents)


def close(logits, expected):
    return torch.allclose(logits, expected, atol=TOLERANCE, rtol=TOLERANCE)


def scattered(count, seed=0):
    return random.Random(seed).sample(range(64), count)


@pytest.mark.parametrize("parents", SHAPES.values(), ids=SHAPES)
def test_each_node_sees_its_own_path_alone(tiny_models, parents):
    tokens, nodes = random_tokens(21), random_tokens(len(parents), seed=1)
    runner = make_runner(load(tiny_models["target"]), 64)
    logits = runner.forward([tree_rows(tokens, nodes, parents, scattered(12))])
    assert close(logits, expected_logits(tiny_models["target"], tokens, nodes, parents))
    as_chain = runner.forward([tree_rows(tokens, nodes, (), scattered(12))])
    assert not close(as_chain, logits)


def test_random_trees_in_random_batches(tiny_models):
    """Beside each other and beside chains and prefills, on KV that is there and on none."""
    folder, rng = tiny_models["target"], random.Random(3)
    runner = make_runner(load(folder), 64)
    for _ in range(12):
        batch, expected = [], []
        for blocks in (scattered(64)[i : i + 8] for i in (0, 8, 16)):
            tokens = random_tokens(rng.randrange(1, 40), seed=rng.random())
            nodes, parents = [], ()
            if rng.random() < 0.8:
                parents = random_parents(rng)
                nodes = random_tokens(len(parents), seed=rng.random())
            start = rng.randrange(len(tokens))
            if start:
                runner.forward([Rows(tokens[:start], 0, blocks, 0)])
            batch.append(tree_rows(tokens, nodes, parents, blocks, start=start))
            expected.append(expected_logits(folder, tokens, nodes, parents))
        batch.insert(1, Rows(random_tokens(11), 0, scattered(64)[24:26], 0))
        assert close(runner.forward(batch), torch.cat(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_tokens", [8, 32])
def test_attention_of_a_node_has_the_bits_of_its_path(dtype, block_tokens):
    """A tree in the pass changes no bit of a chain either."""
    pool = CpuPool(KvShape(1, 2, 16, dtype), 64, block_tokens)
    generator, rng = torch.Generator().manual_seed(0), random.Random(5)
    layer = SimpleNamespace(layer_idx=0)

    def attend(batch, index):
        chosen = (tensor[torch.tensor(index)] for tensor in qkv)
        return pool.layout(batch).attend(layer, *chosen, 0.25)

    for _ in range(20):
        base, parents = rng.randrange(1, 30), random_parents(rng, most=30)
        count = base + len(parents)
        qkv = [torch.randn(count, heads, 16, generator=generator).to(dtype) for heads in (6, 2, 2)]
        tokens = [0] * count
        tree = Rows(tokens, 0, scattered(8), 0, parents=parents)
        chain = Rows(tokens[:base], 0, scattered(16)[8:], 0)
        together = attend([chain, tree], [*range(base), *range(count)])
        assert torch.equal(together[:base], attend([chain], range(base)))
        for node in range(len(parents)):
            index = [*range(base), *(base + step for step in path_of(parents, node))]
            alone = attend([Rows([0] * len(index), 0, chain.blocks, 0)], index)
            assert torch.equal(together[base + base + node], alone[-1])


SPECS = {
    "greedy": GREEDY,
    "coupled": coupled(7),
    # Half of the vocabulary may not come before the third token.
    "min_tokens": GenerationSpec(
        SamplingParams(), prompt_len=13, min_tokens=2, stop_ids=tuple(range(128))
    ),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_picks_are_those_of_decoding_each_path(tiny_models, spec):
    tokens, parents = random_tokens(13), (-1, 0, 1, 2, -1, 0, 1, 2, 4)
    nodes = random_tokens(len(parents), seed=1)
    runner = make_runner(load(tiny_models["target"]), 64)
    draw = Draw(spec, len(tokens))
    (drawn,) = runner.run([tree_rows(tokens, nodes, parents, scattered(4), draw=draw)]).drawn
    expected = []
    for text in prefixes(tokens, nodes, parents):
        (alone,) = runner.run([Rows(text, 0, list(range(8)), 1, Draw(spec, len(text)))]).drawn
        expected += alone.token_ids
    assert drawn.token_ids == expected
    # Places would give other picks: there is something to get wrong.
    draw = Draw(spec, len(tokens))
    (chain,) = runner.run([tree_rows(tokens, nodes, (), scattered(4), draw=draw)]).drawn
    assert chain.token_ids[5:] != expected[5:]


def test_trees_beside_branches_and_loops(tiny_models):
    model = load(tiny_models["target"])
    tokens, parents = random_tokens(9), (-1, 0, -1, 0)
    tree = tree_rows(tokens, random_tokens(4, seed=1), parents, [50, 51], draw=Draw(coupled(3), 9))
    branching = rows_with_branches(coupled(7), random_tokens(9), random_tokens(3, seed=5))
    chain = Rows(random_tokens(6, seed=9), 0, [60], 1, Draw(coupled(5), 6, steps=2))
    batch = [chain, tree, branching]
    together = make_runner(model, 64).run(batch).drawn
    assert together == [make_runner(model, 64).run([rows]).drawn[0] for rows in batch]


class Trees:
    """An engine, and works that verify trees after a text."""

    def __init__(self, folder, *, num_blocks=64, max_rows=512):
        self.folder = folder
        self.idle = []
        runner = make_runner(load(folder), num_blocks)
        self.engine = Engine(
            runner, num_blocks=num_blocks, max_rows=max_rows, find_idle=lambda: self.idle
        )

    def submit(self, sequence, text, parents, seed=0):
        nodes = random_tokens(len(parents), seed=seed)
        reserve = len(text) + len(nodes)
        work = Work(
            sequence, [*text, *nodes], len(nodes) + 1, reserve, float("inf"), parents=parents
        )
        self.engine.scheduler.submit(work)
        return work

    def step(self):
        """One pass; what it completed is right, and finished."""
        found = []
        for result in self.engine.steps(stop=lambda: True):
            assert not result.failed
            for work, logits in result.ready:
                self.check(work, logits)
                self.engine.scheduler.finish(work)
                found.append(work)
        return found

    def check(self, work, logits):
        base = len(work.tokens) - len(work.parents)
        text, nodes = work.tokens[:base], work.tokens[base:]
        assert close(logits, expected_logits(self.folder, text, nodes, work.parents))
        assert work.sequence.cached == work.tokens[: base + trees.spine_length(work.parents)]


def test_kv_of_the_spine_is_kept_and_no_other(tiny_models):
    driver, sequence, seen = Trees(tiny_models["target"]), Sequence(), []
    run = driver.engine.runner.run

    def counted(batch):
        seen.append([len(rows.token_ids) for rows in batch])
        return run(batch)

    driver.engine.runner.run = counted
    text = random_tokens(10)
    first = driver.submit(sequence, text, (-1, 0, 1, -1, 0, 1))
    driver.step()
    # Two nodes of the spine are accepted, and a token of the target's own.
    text = [*first.tokens[:12], 7]
    assert sequence.usable_kv(text, 1) == 12
    second = driver.submit(sequence, text, (-1, 0, -1, -1), seed=1)
    driver.step()
    # A leaf is accepted: it is computed again. The third time it is a chain that goes on.
    text = [*text, second.tokens[-1], 9]
    driver.submit(sequence, text, ())
    driver.step()
    driver.submit(sequence, [*text, 5], (-1, -1, 1), seed=2)
    driver.step()
    assert seen == [[16], [1 + 4], [2], [1 + 3]]
    assert driver.engine.blocks.blocks_for(len(sequence.cached)) == len(sequence.blocks)
    driver.engine.scheduler.release(sequence)
    assert driver.engine.blocks.num_free == 64


@pytest.mark.parametrize("max_rows", [512, 9])
def test_random_works_with_trees_end_right_and_return_every_block(tiny_models, max_rows):
    """Texts grow along accepted paths, in a pool that is too small; some works are dropped."""
    driver = Trees(tiny_models["target"], num_blocks=14, max_rows=max_rows)
    scheduler, rng = driver.engine.scheduler, random.Random(max_rows)
    texts = {Sequence(): random_tokens(rng.randrange(1, 30), seed=n) for n in range(5)}
    done = dropped = 0
    for turn in range(120):
        busy = {work.sequence for work in scheduler.works}
        driver.idle = idle = [sequence for sequence in texts if sequence not in busy]
        if idle:
            sequence = rng.choice(idle)
            parents = random_parents(rng, most=12) if rng.random() < 0.8 else ()
            driver.submit(sequence, texts[sequence], parents, seed=turn)
            driver.idle.remove(sequence)
        if scheduler.works and rng.random() < 0.1:
            dead = rng.choice(scheduler.works)
            dropped += len(scheduler.drop(lambda work, dead=dead: work is dead))
        for work in driver.step():
            done += 1
            base = len(work.tokens) - len(work.parents)
            path = path_of(work.parents, rng.randrange(-1, len(work.parents)))
            accepted = [work.tokens[base + node] for node in path]
            texts[work.sequence] = [*work.tokens[:base], *accepted, rng.randrange(256)]
            if len(texts[work.sequence]) > 60:
                texts[work.sequence] = texts[work.sequence][:20]
    assert done > 30 and dropped > 3 and scheduler.preemptions > 10
    scheduler.drop(lambda work: True)
    for sequence in texts:
        scheduler.release(sequence)
    assert driver.engine.blocks.num_free == 14


@pytest.mark.parametrize("spec", [GREEDY, coupled(7), coupled(7, top_k=2)], ids=str)
def test_alternatives_are_the_best_but_the_pick(tiny_models, spec):
    """Beside draws that ask for fewer or none, of which nothing changes."""
    folder, length = tiny_models["target"], 12
    tokens = random_tokens(length)

    def rows(block, alternatives):
        draw = Draw(spec, length, steps=4, alternatives=alternatives)
        return Rows(tokens, 0, list(range(block, block + 4)), 1, draw)

    wide, none, one = make_runner(load(folder), 64).run([rows(0, 3), rows(4, 0), rows(8, 1)]).drawn
    assert wide.token_ids == none.token_ids == one.token_ids
    assert none.alternatives == []
    assert one.alternatives == [best[:1] for best in wide.alternatives]
    kept = spec.sampling.top_k - 1 if spec.sampling.top_k else 3
    for step, others in enumerate(wide.alternatives):
        best = ranked(folder, spec, [*tokens, *wide.token_ids[:step]], without=None)
        assert wide.token_ids[step] == best[0]
        assert others[:kept] == best[1 : 1 + kept]
        assert len({wide.token_ids[step], *others}) == 4
