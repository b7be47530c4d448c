"""Sampling parameters against a slow reference that is written another way."""

import math

import numpy as np
import pytest
import torch

from outrider.sampling import RowParams, mask_tokens, position_logprobs, processed_log_probs
from outrider.types import SamplingParams


def reference(logits, params):
    """One token at a time, float64, sets instead of tensors."""
    logits = np.asarray(logits, dtype=np.float64)
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if params.temperature == 0:
        return {order[0]: 1.0}
    weights = np.exp((logits - logits.max()) / params.temperature)
    kept = order[: params.top_k] if params.top_k else order
    total = sum(weights[kept])
    if params.top_p < 1:
        nucleus, mass = [], 0.0
        for token in kept:
            nucleus.append(token)
            mass += weights[token] / total
            if mass >= params.top_p:
                break
        kept = nucleus
    total = sum(weights[kept])
    highest = max(weights[kept]) / total
    kept = [token for token in kept if weights[token] / total >= params.min_p * highest]
    total = sum(weights[kept])
    return {token: weights[token] / total for token in kept}


def check(row, expected):
    probs = row.double().exp()
    assert set(torch.nonzero(probs)[:, 0].tolist()) == {t for t, p in expected.items() if p > 0}
    for token, prob in expected.items():
        assert probs[token].item() == pytest.approx(prob, rel=2e-5, abs=1e-12)
    assert probs.sum().item() == pytest.approx(1, abs=1e-5)


COMBINATIONS = [
    SamplingParams(),
    SamplingParams(1.0),
    SamplingParams(0.7),
    SamplingParams(0.01),
    SamplingParams(1e-30),
    SamplingParams(10.0),
    SamplingParams(1.0, top_k=1),
    SamplingParams(1.0, top_k=7),
    SamplingParams(0.8, top_k=300),
    SamplingParams(1.0, top_k=10**6),
    SamplingParams(1.0, top_p=0.95),
    SamplingParams(1.0, top_p=1e-6),
    SamplingParams(2.5, top_p=0.97),
    SamplingParams(1.0, min_p=0.05),
    SamplingParams(1.0, min_p=1.0),
    SamplingParams(1.3, top_k=40, top_p=0.9),
    SamplingParams(2.0, top_k=200, top_p=0.9),
    SamplingParams(1.3, top_p=0.9, min_p=0.1),
    SamplingParams(1.3, top_k=50, min_p=0.1),
    SamplingParams(1.3, top_k=50, top_p=0.8, min_p=0.1),
]


@pytest.mark.parametrize("vocab", [16, 700, 6000])
@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_matches_reference_in_one_mixed_batch(vocab, spread):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(len(COMBINATIONS), vocab, generator=generator) * spread
    params = RowParams.build([(c, 1) for c in COMBINATIONS])
    for row, logit, c in zip(
        processed_log_probs(logits, params), logits, COMBINATIONS, strict=True
    ):
        check(row, reference(logit, c))


def test_matches_reference_with_many_ties():
    """Coarse logits: every border falls into a class of equal tokens."""
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(len(COMBINATIONS), 1500, generator=generator) * 2).round()
    params = RowParams.build([(c, 1) for c in COMBINATIONS])
    for row, logit, c in zip(
        processed_log_probs(logits, params), logits, COMBINATIONS, strict=True
    ):
        check(row, reference(logit, c))


def test_nucleus_wider_than_every_window_falls_back_to_a_whole_sort():
    flat = torch.linspace(0, 0.5, 6000)[None]
    params = SamplingParams(1.0, top_p=0.95)
    row = processed_log_probs(flat, RowParams.build([(params, 1)]))[0]
    assert int((row > -math.inf).sum()) > 4096
    check(row, reference(flat[0], params))


def test_border_ties_keep_the_lowest_ids():
    logits = torch.zeros(1, 2000)
    for params, kept in [
        (SamplingParams(1.0, top_k=5), 5),
        (SamplingParams(1.0, top_p=0.50025), 1001),
        (SamplingParams(1.0, top_p=1e-9), 1),
    ]:
        row = processed_log_probs(logits, RowParams.build([(params, 1)]))[0]
        assert torch.nonzero(row > -math.inf)[:, 0].tolist() == list(range(kept))


def test_banned_tokens_stay_banned_and_narrow_rows_work():
    logits = torch.full((2, 900), -math.inf)
    logits[:, [3, 500]] = torch.tensor([1.0, 2.0])
    params = SamplingParams(1.0, top_k=50, top_p=0.9)
    for row in processed_log_probs(logits, RowParams.build([(params, 2)])):
        check(row, reference([*logits[0].tolist()], params))


def test_row_is_bit_equal_alone_and_beside_others():
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(len(COMBINATIONS), 5000, generator=generator) * 2
    logits = logits.bfloat16()
    together = processed_log_probs(logits, RowParams.build([(c, 1) for c in COMBINATIONS]))
    for row, c in enumerate(COMBINATIONS):
        alone = processed_log_probs(logits[row : row + 1], RowParams.build([(c, 1)]))
        assert torch.equal(alone[0], together[row])


def test_input_is_not_changed():
    logits = torch.randn(len(COMBINATIONS), 200)
    before = logits.clone()
    processed_log_probs(logits, RowParams.build([(c, 1) for c in COMBINATIONS]))
    mask_tokens(logits, [0], [3])
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "changed",
    [
        SamplingParams(0.5, 20, 0.8, 0.05),
        SamplingParams(1.0, 0, 0.8, 0.05),
        SamplingParams(1.0, 20, 1.0, 0.05),
        SamplingParams(1.0, 20, 0.8, 0.0),
        SamplingParams(0.0, 20, 0.8, 0.05),
    ],
)
def test_each_parameter_changes_the_result(changed):
    # Few likely tokens, then a long tail, so that every cut bites.
    logits = torch.cat([torch.linspace(3, 0, 30), torch.linspace(0, -2, 1000)])[None]
    full = SamplingParams(1.0, 20, 0.8, 0.05)
    loose = SamplingParams(1.0, 20, 0.99, 0.3)
    if changed.min_p == 0.0:  # min_p must bite behind the nucleus to be seen.
        full, changed = loose, SamplingParams(1.0, 20, 0.99, 0.0)
    results = [processed_log_probs(logits, RowParams.build([(p, 1)])) for p in (full, changed)]
    assert not torch.equal(*results)


def test_rows_of_a_sequence_share_its_parameters():
    logits = torch.randn(1, 50).repeat(5, 1)
    first, second = SamplingParams(1.0, top_k=3), SamplingParams(1.0, top_k=9)
    out = processed_log_probs(logits, RowParams.build([(first, 2), (second, 3)]))
    assert (out > -math.inf).sum(-1).tolist() == [3, 3, 9, 9, 9]


def test_masked_tokens_cannot_come_at_their_rows_only():
    masked = mask_tokens(torch.zeros(3, 8), [0, 0, 2], [1, 2, 7])
    assert torch.nonzero(masked == -math.inf).tolist() == [[0, 1], [0, 2], [2, 7]]
    row = processed_log_probs(masked, RowParams.build([(SamplingParams(1.0), 3)]))[0]
    check(row, {token: 1 / 6 for token in range(8) if token not in (1, 2)})


def test_logprobs_are_of_the_raw_logits_with_ties_by_id():
    logits = torch.zeros(2, 700)
    logits[0, 600] = 5.0
    logits[1, 5:] = -1.0
    found = position_logprobs(logits, [600, 9], top=3)
    expected = logits.double().log_softmax(-1)
    assert found[0].logprob == pytest.approx(expected[0, 600].item(), abs=1e-6)
    assert found[1].logprob == pytest.approx(expected[1, 9].item(), abs=1e-6)
    assert [token for token, _ in found[0].top] == [600, 0, 1]
    assert [token for token, _ in found[1].top] == [0, 1, 2]
    assert position_logprobs(logits, [1, 2], top=0)[1].top == ()
