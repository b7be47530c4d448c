"""Two ranks give the tokens of one, in fp32: every mode, every length, whatever shares a pass."""

import random
from dataclasses import replace

import pytest
import torch
from worker_harness import (
    GREEDY,
    Bench,
    Owner,
    Tally,
    by_draft,
    coupled,
    generate,
    load,
    make_runner,
    random_tokens,
    rejection,
    serving,
    verdict_of,
)

from group_harness import group_of_two
from outrider.engine.rows import Branch, Draw, Rows
from outrider.engine.steps import Kind
from outrider.types import GenerationSpec, SamplingParams
from outrider.worker.worker import Worker
from services.draft.drafter import Drafter
from services.target.verifier import Verifier

pytestmark = pytest.mark.slow

torch.set_num_threads(1)
PROMPT = random_tokens(23, seed=5)
BLOCK = 32
MODES = {
    "greedy": GREEDY,
    "coupled": coupled(11, top_p=1.0),
    "coupled, top-p": coupled(12),
    "rejection": rejection(13),
}


@pytest.fixture(scope="module")
def pair(tiny_models):
    with group_of_two(tiny_models["target"]) as made:
        yield made


@pytest.fixture
def together(pair):
    """A target whose passes two ranks run."""
    loaded = pair.loaded
    tier = Verifier(vocab_size=loaded.vocab_size, context_length=loaded.context_length)
    worker = Worker(pair.runner, tier, pair.limits, vocab_size=loaded.vocab_size)
    worker.start()
    yield Bench(worker, pair.runner)
    worker.stop()


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_and_length_gives_the_tokens_of_one_rank(tiny_models, pair, together, mode):
    spec = MODES[mode]
    tallies = Tally(), Tally()
    pair.told.clear()
    with serving(tiny_models["target"]) as alone, serving(tiny_models["draft"], "draft") as draft:
        for k in range(9):
            found = []
            for bench, tally in zip((alone, together), tallies, strict=True):
                owner = Owner(bench, list(PROMPT), spec=spec).opened()
                guessing = Owner(draft, list(PROMPT), spec=spec).opened()
                found.append(generate(owner, 24, k, by_draft(guessing), tally))
                owner.close()
            assert found[0] == found[1]
    assert tallies[0] == tallies[1]
    seen = tallies[0]
    assert min(seen.accepted, seen.recovered_inside + seen.recovered_first, seen.bonus) > 5
    # Ids alone travel where that is enough, logits where all tokens have to be looked at.
    if mode in ("greedy", "coupled"):
        assert pair.told[Kind.RUN] > 50 and not pair.told[Kind.FORWARD]
    else:
        assert pair.told[Kind.FORWARD] > 50 and not pair.told[Kind.RUN]


def test_log_probabilities_and_masks_are_those_of_one_rank(tiny_models, together):
    spec = replace(coupled(3, top_p=1.0), logprobs=3, min_tokens=20, stop_ids=(65, 66, 257))
    with serving(tiny_models["target"]) as alone:
        replies = []
        for bench in (alone, together):
            owner = Owner(bench, list(PROMPT), spec=spec).opened()
            replies.append([])
            for _ in range(12):
                replies[-1].append(verdict_of(owner.verify()))
                owner.tokens.extend(replies[-1][-1].token_ids)
    for one, two in zip(*replies, strict=True):
        assert one.token_ids == two.token_ids
        (ours,), (theirs,) = one.logprobs, two.logprobs
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


def test_a_draft_of_two_ranks_proposes_what_one_does(tiny_models, pair):
    """Guesses with their distributions, alternatives, and outcomes prepared ahead."""
    loaded = pair.loaded
    drafter = Drafter(vocab_size=loaded.vocab_size, context_length=loaded.context_length)
    worker = Worker(pair.runner, drafter, pair.limits, vocab_size=loaded.vocab_size)
    worker.start()
    pair.told.clear()
    with serving(tiny_models["target"], "draft", block_tokens=BLOCK) as alone:
        for spec in MODES.values():
            asked = [
                Owner(bench, list(PROMPT), spec=spec).opened()
                for bench in (alone, Bench(worker, pair.runner))
            ]
            for round_ in range(3):
                replies = []
                for owner in asked:
                    owner.tokens += random_tokens(2, seed=round_)
                    entry = owner.propose_entry(5)
                    if round_ == 1 and not spec.uses_distributions:
                        entry.propose.alternatives = 2
                    if round_ == 2:
                        entry.propose.ahead.pending.token_ids.extend([7, 8])
                        entry.propose.ahead.fan_out.extend([2, 1, 2])
                    replies.append(owner.bench.ask(entry).proposed)
                assert same_proposals(*replies)
                assert replies[0].proposal.token_ids or len(replies[0].outcomes) == 5
    worker.stop()
    assert min(pair.told[Kind.RUN], pair.told[Kind.FORWARD], pair.told[Kind.COPY]) > 0


def same_proposals(one, other):
    """Weights are probabilities in 16 bits: rounding may change the last of them."""
    weights = []
    for proposed in (one, other):
        proposed.ClearField("timing")
        proposals = [proposed.proposal, *(outcome.proposal for outcome in proposed.outcomes)]
        distributions = [d for proposal in proposals for d in proposal.distributions]
        weights.append([weight for d in distributions for weight in d.weights])
        for distribution in distributions:
            distribution.ClearField("weights")
    assert all(abs(a - b) <= 1 for a, b in zip(*weights, strict=True))
    return one == other


class Chooser:
    """Random passes over some sequences: chunks, decodes, verifications, trees, drafts."""

    def __init__(self, seed, vocab):
        self.random = random.Random(seed)
        self.vocab = vocab
        self.lengths = [0] * 8

    def spec(self):
        choose = self.random.choice
        sampling = SamplingParams(
            temperature=choose([0.0, 0.0, 0.6, 1.0, 1.4]),
            top_k=choose([0, 0, 0, 0, 20]),
            top_p=choose([1.0, 1.0, 1.0, 0.9]),
            seed=self.random.getrandbits(64),
        )
        return GenerationSpec(sampling)

    def rows(self, number):
        start = self.lengths[number]
        if start > 200:
            start = 0
        blocks = range(number * 8, number * 8 + 8)
        kind = self.random.choice(["chunk", "decode", "verify", "tree", "draft", "branch"])
        count = self.random.choice([1, 7, 30]) if kind == "chunk" else self.random.randint(1, 9)
        tokens = [self.random.randrange(self.vocab) for _ in range(count)]
        self.lengths[number] = start + count
        if kind == "chunk":
            return Rows(tokens, start, blocks, 0)
        draw, logits, parents = Draw(self.spec(), start + 1), count, ()
        if kind == "decode":
            draw, logits = replace(draw, base_len=start + count), 1
        elif kind == "tree":
            parents = [self.random.randrange(-1, node) for node in range(count - 1)]
        elif kind == "draft":
            draw = replace(
                draw,
                base_len=start + count,
                steps=self.random.randint(2, 6),
                alternatives=self.random.choice([0, 0, 2]),
            )
            logits = 1
        scratch = ()
        if kind == "branch":
            branches = tuple(Branch(i, rank) for i in range(count) for rank in range(2))
            draw = replace(draw, branches=branches, steps=2)
            first = 64 + number * 36
            scratch = range(first, first + draw.scratch_blocks(BLOCK))
        return Rows(tokens, start, blocks, logits, draw, scratch, parents)

    def batch(self):
        size = self.random.randint(1, 4)
        return [self.rows(number) for number in self.random.sample(range(len(self.lengths)), size)]


def test_random_passes_draw_the_tokens_of_one_rank(tiny_models, pair):
    loaded = load(tiny_models["target"])
    alone = make_runner(loaded, pair.limits.num_blocks, BLOCK)
    chooser = Chooser(4, loaded.vocab_size)
    pair.told.clear()
    for _ in range(120):
        batch = chooser.batch()
        assert pair.runner.run(batch).drawn == alone.run(batch).drawn
    assert min(pair.told[Kind.RUN], pair.told[Kind.FORWARD], pair.told[Kind.COPY]) > 15
