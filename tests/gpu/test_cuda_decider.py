"""Verification by distributions from captured graphs against that by tensor operations."""

import random

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from outrider.engine import cuda_decider
from outrider.engine.cuda_decider import MAX_DECIDED_ROWS, CapturedDecider
from outrider.engine.deciding import EagerDecider, Verified
from outrider.sampling import Chain, point_mass, truncate_rows
from outrider.types import GenerationSpec, SamplingParams, VerificationMode

VOCABULARY = 3001
"""No multiple of any block's size."""


@pytest.fixture(scope="module")
def decider():
    return CapturedDecider(VOCABULARY, torch.device("cuda"))


class Chooser:
    """Random passes: logits, and chains whose draft is the target's own guess, blurred."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator("cuda").manual_seed(seed)

    def spec(self, **options) -> GenerationSpec:
        choose = self.random.choice
        sampling = SamplingParams(
            temperature=choose([0.5, 1.0, 1.5]),
            top_k=choose([0, 0, 5, 200]),
            top_p=choose([1.0, 1.0, 0.9]),
            seed=self.random.getrandbits(64),
        )
        return GenerationSpec(sampling, mode=VerificationMode.REJECTION, **options)

    def one(self, most: int = 8, **options) -> tuple[Verified, Chain]:
        spec, length = self.spec(**options), self.random.randint(0, most)
        run_ahead = length > 0 and self.random.random() < 0.3
        base_len = self.random.randint(1, 100_000)
        spread = self.random.choice([0.3, 2.0, 5.0])
        rows = length + (not run_ahead)
        logits = spread * torch.randn(rows, VOCABULARY, generator=self.generator, device="cuda")
        blur = self.random.choice([0.0, 0.2, 1.0, 5.0])
        blurred = logits + blur * torch.randn(logits.shape, generator=self.generator, device="cuda")
        entries = self.random.choice([1, 4, 64])
        drafts = truncate_rows(blurred.softmax(-1), entries).unpack()[:length]
        guesses = [self.random.choices(d.ids, d.weights)[0] for d in drafts]
        given = [
            None if self.random.random() < 0.1 else draft for draft in drafts
        ]  # None: a guess that was not sampled.
        chain = Chain(
            tuple(guesses), spec.sampling.seed, base_len, tuple(given), bonus=not run_ahead
        )
        return Verified(logits, spec, range(base_len, base_len + rows)), chain


@pytest.mark.parametrize("count", [1, 3, 8, 14])
def test_outcomes_equal_those_of_tensor_operations(decider, count, monkeypatch):
    chooser, eager = Chooser(seed=count), EagerDecider()
    found = []
    for _ in range(150):
        rows, chains = zip(*(chooser.one() for _ in range(count)), strict=True)
        eager.read(rows)
        expected = eager.decide(chains)
        with monkeypatch.context() as patched:
            patched.delattr(cuda_decider.EagerDecider, "read")  # Who falls back on it fails.
            decider.read(rows)
            outcomes = decider.decide(chains)
        assert outcomes == expected
        found += zip(chains, outcomes, strict=True)
    # All that can happen has happened.
    assert any(outcome.final is None for _, outcome in found)
    shares = [
        outcome.num_accepted / len(chain.token_ids) for chain, outcome in found if chain.draft()
    ]
    assert min(shares) == 0 and max(shares) == 1
    assert sum(0 < share < 1 for share in shares) > 10 * count


def test_other_seeds_other_outcomes(decider):
    """Which the comparison above would notice."""
    chooser = Chooser(seed=5)
    differing = 0
    for _ in range(50):
        rows, chain = chooser.one()
        other = Chain(
            chain.token_ids, chain.seed ^ 1, chain.base_len, chain.distributions, bonus=chain.bonus
        )
        decider.read([rows])
        differing += decider.decide([chain]) != decider.decide([other])
    assert differing > 10


def test_a_row_does_not_depend_on_others(decider):
    chooser = Chooser(seed=6)
    rows, chains = zip(*(chooser.one() for _ in range(9)), strict=True)
    decider.read(rows)
    together = decider.decide(chains)
    alone = []
    for each, chain in zip(rows, chains, strict=True):
        decider.read([each])
        alone += decider.decide([chain])
    assert alone == together


def test_guesses_that_the_target_makes_itself_stand(decider):
    """Draft and target alike: all is accepted, and no residual is empty."""
    spec = GenerationSpec(SamplingParams(temperature=1.0, seed=3), mode=VerificationMode.REJECTION)
    logits = torch.full((9, VOCABULARY), -torch.inf, device="cuda")
    logits[:, :2] = 0.0
    draft = truncate_rows(logits[:1].softmax(-1)).unpack()[0]
    guesses = tuple(random.Random(1).choices([0, 1], k=8))
    decider.read([Verified(logits, spec, range(10, 19))])
    (outcome,) = decider.decide([Chain(guesses, 3, 10, (draft,) * 8)])
    assert outcome.num_accepted == 8 and outcome.final in (0, 1)


def test_masked_and_long_batches_go_the_other_way(decider):
    chooser, eager = Chooser(seed=7), EagerDecider()
    masked = chooser.one(stop_ids=(4,), prompt_len=1_000_000, min_tokens=1)
    many = [chooser.one() for _ in range(MAX_DECIDED_ROWS)]
    for items in ([masked], many):
        rows, chains = zip(*items, strict=True)
        eager.read(rows)
        decider.read(rows)
        assert decider.decide(chains) == eager.decide(chains)


def test_a_point_mass_is_accepted_as_often_as_it_is_likely(decider):
    """Statistics, without the other way to compare with; a wrong share must be noticed."""
    logits = torch.full((2, VOCABULARY), -torch.inf, device="cuda")
    logits[:, 7] = torch.log(torch.tensor(0.3))
    logits[:, 9] = torch.log(torch.tensor(0.7))
    accepted = 0
    for seed in range(2000):
        sampling = SamplingParams(temperature=1.0, seed=seed)
        spec = GenerationSpec(sampling, mode=VerificationMode.REJECTION)
        decider.read([Verified(logits, spec, range(5, 7))])
        (outcome,) = decider.decide([Chain((7,), seed, 5, (point_mass(7),))])
        accepted += outcome.num_accepted
        assert outcome.num_accepted or outcome.final == 9
    assert abs(accepted / 2000 - 0.3) < 0.05
