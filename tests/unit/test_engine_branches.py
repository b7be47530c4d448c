"""Branches: what goes on from each likely outcome equals what going on from it alone gives."""

from dataclasses import replace

import pytest
import torch
from worker_harness import load, make_runner, plain_logits, random_tokens

from outrider.engine.engine import Engine
from outrider.engine.rows import Branch, Draw, Rows, branch_places
from outrider.engine.scheduler import Work
from outrider.engine.sequence import Sequence
from outrider.sampling import coupled_scores, processed_log_probs
from outrider.sampling.logits import RowParams
from outrider.token_log import TokenLog
from outrider.types import GenerationSpec, SamplingParams, VerificationMode

torch.set_num_threads(1)

BLOCK = 8  # make_runner's.
SPECS = {
    "greedy": GenerationSpec(SamplingParams()),
    "coupled": GenerationSpec(SamplingParams(temperature=1.0, top_p=0.95, seed=7)),
    "rejection": GenerationSpec(
        SamplingParams(temperature=1.0, seed=7), VerificationMode.REJECTION
    ),
}
BRANCHES = (Branch(0, 0), Branch(0, 2), Branch(1, 0), Branch(3, 0), Branch(3, 1))


def rows_with_branches(spec, tokens, pending, *, steps=3, branches=BRANCHES, first_block=0):
    draw = Draw(spec, len(tokens), steps, branches)
    needed = -(-(len(tokens) + len(pending)) // BLOCK)
    blocks = list(range(first_block, first_block + needed))
    count = draw.scratch_blocks(BLOCK)
    scratch = list(range(first_block + needed, first_block + needed + count))
    return Rows([*tokens, *pending], 0, blocks, len(pending) + 1, draw, scratch)


def ranked(model, spec, prefix, without):
    """All tokens that may follow a prefix, likeliest first."""
    logits = plain_logits(model, prefix)[-1:]
    scores = logits.clone()
    if not spec.sampling.greedy:
        scores = processed_log_probs(logits, RowParams.build([(spec.sampling, 1)], logits.device))
    if spec.mode is VerificationMode.COUPLED and not spec.sampling.greedy:
        scores = coupled_scores(scores, [spec.sampling.seed], [len(prefix)])
    if without is not None:
        scores[0, without] = -torch.inf
    return scores[0].argsort(descending=True).tolist()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("length", [5, 7, 8, 13])
def test_each_branch_goes_on_as_if_alone(tiny_models, spec, length):
    model = tiny_models["target"]
    tokens, pending = random_tokens(length), random_tokens(3, seed=5)
    runner = make_runner(load(model), 64)
    (drawn,) = runner.run([rows_with_branches(spec, tokens, pending)]).drawn
    assert not drawn.token_ids
    for branch, result in zip(BRANCHES, drawn.branches, strict=True):
        prefix = [*tokens, *pending[: branch.num_accepted]]
        standing = pending[branch.num_accepted] if branch.num_accepted < 3 else None
        first, *guesses = result.token_ids
        assert first == ranked(model, spec, prefix, standing)[branch.rank]
        prefix = [*prefix, first]
        alone = make_runner(load(model), 64)
        rows = Rows(prefix, 0, list(range(16)), 1, Draw(spec, len(prefix), steps=3))
        (expected,) = alone.run([rows]).drawn
        assert guesses == expected.token_ids
        # Weights are rounded, and the last bit of a logit depends on the shape of its pass.
        assert [d.ids for d in result.distributions] == [d.ids for d in expected.distributions]


def test_a_branch_starts_with_the_kv_of_what_it_stands_on(tiny_models, monkeypatch):
    """Without the copy of the block that a branch begins in, its guesses are others."""
    runner = make_runner(load(tiny_models["target"]), 64)
    rows = rows_with_branches(SPECS["greedy"], random_tokens(13), random_tokens(3, seed=5))
    (right,) = runner.run([rows]).drawn
    runner = make_runner(load(tiny_models["target"]), 64)
    monkeypatch.setattr(runner, "copy_blocks", lambda pairs: None)  # Others will use it again.
    (wrong,) = runner.run([rows]).drawn
    assert [b.token_ids for b in right.branches] != [b.token_ids for b in wrong.branches]


def test_branches_beside_chains_and_prefill(tiny_models):
    """Entries of one batch do not disturb each other, whatever they draw."""
    model, spec = tiny_models["target"], SPECS["coupled"]
    branching = rows_with_branches(spec, random_tokens(9), random_tokens(3, seed=5))
    chain_tokens = random_tokens(6, seed=9)
    chain = Rows(chain_tokens, 0, [60], 1, Draw(spec, 6, steps=2))
    prefill = Rows(random_tokens(7, seed=3), 0, [61], 0)
    together = make_runner(load(model), 64).run([chain, prefill, branching]).drawn
    (alone,) = make_runner(load(model), 64).run([branching]).drawn
    (chain_alone,) = make_runner(load(model), 64).run([chain]).drawn
    assert together == [chain_alone, None, alone]


@pytest.mark.parametrize("length", [5, 7, 8, 13])
@pytest.mark.parametrize("num_pending", [0, 1, 3])
def test_a_branch_that_runs_ahead_is_the_next_guess_of_the_chain(tiny_models, length, num_pending):
    """Its token and its distribution are those of a chain that is longer by one; behind it starts
    another round."""
    model, spec = tiny_models["target"], SPECS["rejection"]
    tokens = random_tokens(length)

    def chain(prefix, steps):
        rows = Rows(prefix, 0, list(range(16)), 1, Draw(spec, len(prefix), steps))
        (drawn,) = make_runner(load(model), 64).run([rows]).drawn
        return drawn

    longer = chain(tokens, num_pending + 1)
    *pending, expected = longer.token_ids
    ahead = Branch(num_pending, run_ahead=True)
    others = tuple(Branch(num_pending, rank) for rank in range(3))
    # Behind a pass over other entries, so that its rows are not the first ones.
    before = Rows(random_tokens(4, seed=9), 0, [60], 1, Draw(spec, 4, 1))
    rows = rows_with_branches(spec, tokens, pending, branches=(*others, ahead))
    first = rows_with_branches(spec, tokens[1:], pending, branches=(ahead,), first_block=40)
    _, other, drawn = make_runner(load(model), 64).run([before, first, rows]).drawn
    found = drawn.branches[3]
    assert found.token_ids[0] == expected and len(found.distributions) == 4
    assert found.distributions[0].ids == longer.distributions[-1].ids
    following = chain([*tokens, *pending, expected], 3)
    assert found.token_ids[1:] == following.token_ids
    assert [d.ids for d in found.distributions[1:]] == [d.ids for d in following.distributions]
    likeliest = ranked(model, spec, [*tokens, *pending], expected)[:3]
    assert [branch.token_ids[0] for branch in drawn.branches[:3]] == likeliest
    assert [len(branch.distributions) for branch in drawn.branches[:3]] == [3] * 3
    assert other.branches[0].token_ids != found.token_ids


def test_places_of_branches():
    draw = Draw(SPECS["greedy"], 7, 10, (Branch(0, 0), Branch(1, 0)))
    assert draw.scratch_blocks(8) == 5
    rows = Rows([1] * 8, 0, [40, 41], 2, draw, [50, 51, 52, 53, 54])
    inside, at_border = branch_places(rows, 8)
    assert (inside.start, list(inside.blocks), inside.copied) == (7, [50, 51, 52], (40, 50))
    assert (at_border.start, list(at_border.blocks), at_border.copied) == (8, [40, 53, 54], None)


def ahead(sequence, pending, branches, *, spec=SPECS["greedy"]):
    draw = Draw(spec, len(sequence.log), 3, branches, alternatives=7)
    tokens = [*sequence.log.tokens, *pending]
    return Work(sequence, tokens, len(pending) + 1, len(tokens), deadline=1e9, draw=draw)


def carry_out(engine, work):
    """The branches that a work draws, and how many rows were computed before them."""
    passes = []
    forward = engine.runner.forward
    engine.runner.forward = lambda batch: passes.append(batch) or forward(batch)
    engine.scheduler.submit(work)
    (result,) = engine.steps(stop=lambda: False)
    engine.scheduler.finish(work)
    del engine.runner.forward
    assert not result.failed
    return [branch.token_ids for branch in work.drawn.branches], len(passes)


@pytest.fixture
def engine(tiny_models):
    return Engine(
        make_runner(load(tiny_models["target"]), 64), num_blocks=64, max_rows=64, find_idle=list
    )


UNCUT = GenerationSpec(SamplingParams(temperature=1.0, seed=7))
"""Every token has a chance, so every rank is somebody's."""


@pytest.mark.parametrize("spec", [SPECS["greedy"], UNCUT], ids=["greedy", "coupled"])
@pytest.mark.parametrize("chosen", range(len(BRANCHES)))
@pytest.mark.parametrize("length", [5, 7, 8, 12])
def test_a_question_about_a_kept_branch_needs_no_pass_to_begin_with(
    engine, tiny_models, spec, chosen, length
):
    sequence = Sequence(log=TokenLog(random_tokens(length)))
    pending = random_tokens(3, seed=5)
    branches, passes = carry_out(engine, ahead(sequence, pending, BRANCHES, spec=spec))
    assert passes == 4
    assert engine.can_prepare
    engine.prepare()
    sequence.log.append([*pending[: BRANCHES[chosen].num_accepted], branches[chosen][0]])
    guesses = branches[chosen][1:]
    found, passes = carry_out(engine, ahead(sequence, guesses, BRANCHES, spec=spec))
    assert passes == 3
    fresh = Engine(
        make_runner(load(tiny_models["target"]), 64), num_blocks=64, max_rows=64, find_idle=list
    )
    alone = Sequence(log=TokenLog(sequence.log.tokens))
    expected, passes = carry_out(fresh, ahead(alone, guesses, BRANCHES, spec=spec))
    assert passes == 4
    assert found == expected
    assert sequence.cached == [*sequence.log.tokens, *guesses]
    # And on from the branches of a kept branch.
    engine.prepare()
    sequence.log.append([*guesses, found[3][0]])
    _, passes = carry_out(engine, ahead(sequence, found[3][1:], BRANCHES, spec=spec))
    assert passes == 3
    engine.scheduler.release(sequence)
    assert engine.blocks.num_free == engine.blocks.num_blocks


def test_a_kept_branch_is_of_no_use_to_one_that_runs_ahead(engine):
    """It knows what may follow, and not how likely all of that is."""
    sequence = Sequence(log=TokenLog(random_tokens(9)))
    pending = random_tokens(3, seed=5)
    branches, _ = carry_out(engine, ahead(sequence, pending, BRANCHES, spec=UNCUT))
    engine.prepare()
    sequence.log.append([branches[0][0]])
    spec = SPECS["rejection"]
    work = ahead(sequence, branches[0][1:], (Branch(3, run_ahead=True), *BRANCHES), spec=spec)
    work.draw = replace(work.draw, alternatives=0)
    _, passes = carry_out(engine, work)
    assert passes == 4 and len(work.drawn.branches[0].distributions) == 4
    engine.scheduler.release(sequence)


@pytest.mark.parametrize("change", ["token", "guess", "never prepared", "released", "rank"])
def test_another_question_is_worked_out_from_the_start(engine, tiny_models, change):
    sequence = Sequence(log=TokenLog(random_tokens(9)))
    pending = random_tokens(3, seed=5)
    branches, _ = carry_out(engine, ahead(sequence, pending, BRANCHES))
    if change != "never prepared":
        engine.prepare()
    if change == "released":
        engine.scheduler.release(sequence)
    first, *guesses = branches[0]
    sequence.log.append([first ^ (change == "token")])
    guesses[1] ^= change == "guess"
    asked = (*BRANCHES, Branch(1, 7)) if change == "rank" else BRANCHES
    found, passes = carry_out(engine, ahead(sequence, guesses, asked))
    assert passes == 4
    fresh = Engine(
        make_runner(load(tiny_models["target"]), 64), num_blocks=64, max_rows=64, find_idle=list
    )
    alone = Sequence(log=TokenLog(sequence.log.tokens))
    assert found == carry_out(fresh, ahead(alone, guesses, asked))[0]
    engine.scheduler.release(sequence)
    assert engine.blocks.num_free == engine.blocks.num_blocks
