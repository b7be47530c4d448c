"""The CUDA sampler against the CPU reference, row by row: what is kept, log probs and picks."""

import itertools
import math

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from outrider.sampling import RowParams, coupled_picks, coupled_scores, processed_log_probs
from outrider.sampling.cuda_sampler import (
    CANDIDATES,
    SamplerInputs,
    processed_rows,
    sample_candidates,
    sample_rows,
)
from outrider.types import SamplingParams

BORDER = 1e-6
"""How near to a border a sum (or log prob) must be for a token to come out differently."""
CLEAR_GAP = 1e-4
"""A lead in the race that rounding cannot turn round."""

VOCABS = (1000, 32001, 49152, 128256)
TEMPERATURES = (0.3, 1.0, 2.0)
MIXES = [
    (temperature, top_k, top_p, min_p)
    for temperature, top_k, top_p, min_p in itertools.product(
        TEMPERATURES, (0, 1, 5, 50, "vocab"), (1.0, 0.95, 0.5, 0.01), (0.0, 0.05, 0.5)
    )
]


def every_mix(vocab, generator):
    """180 mixes and a few greedy rows, each with a seed and a position of its own."""
    mixes = [(0.0, 0, 1.0, 0.0), *MIXES, (0.0, 5, 0.5, 0.1)]
    words = generator.integers(0, 2**64, size=(len(mixes), 2), dtype=np.uint64).tolist()
    return [
        (SamplingParams(t, vocab if k == "vocab" else k, p, m, seed), [position])
        for (t, k, p, m), (seed, position) in zip(mixes, words, strict=True)
    ]


def make_logits(kind, rows, vocab):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(rows, vocab, generator=generator)
    if kind == "flat":
        return logits
    if kind == "peaked":
        return logits * 3
    if kind == "plateaus":
        return (logits * 2).round()
    if kind == "equal":
        return logits * 0
    if kind == "bfloat16":
        return (logits * 3 + 20).bfloat16()
    if kind == "banned":
        return (logits * 2).masked_fill(
            torch.rand(rows, vocab, generator=generator) < 0.9, -math.inf
        )
    assert kind == "extreme"
    logits[:, ::7] *= 1e4
    logits[:, 3] = -3e38
    logits[::2, 11] = 2e38
    return logits


def inputs_of(specs):
    inputs = SamplerInputs(sum(len(positions) for _, positions in specs))
    inputs.fill(specs)
    return inputs.params


def seeds_and_positions(specs):
    return [s.seed for s, p in specs for _ in p], [x for _, p in specs for x in p]


def scaled(logits, params):
    return (logits.float() - logits.float().max()) / params.temperature


def near_a_border(logits, params, tokens, kept):
    """Whether each of these tokens is within BORDER of being decided the other way.

    By the CPU's sums or by exact ones, or what the device `kept` is what exact sums say: the CPU
    adds probabilities up in fp32, and can miss a sum of 1 by more than BORDER.
    """
    plain = SamplingParams(params.temperature)
    values = processed_log_probs(logits[None], RowParams.build([(plain, 1)]))[0]
    order = torch.sort(values, descending=True, stable=True)
    rank = torch.empty_like(order.indices)
    rank[order.indices] = torch.arange(len(values))
    near = values[tokens] < -(2.0**15)
    exact = scaled(logits, params).double().log_softmax(-1)[order.indices]
    for ordered in (order.values.double(), exact):
        reached = ordered.exp().cumsum(0)
        before = torch.nn.functional.pad(reached[:-1], (1, 0))[rank[tokens]]
        mass = reached[params.top_k - 1] if 0 < params.top_k < len(values) else 1.0
        if params.top_p < 1:
            near |= (before - params.top_p * mass).abs() <= BORDER
            near |= (ordered is exact) & ((before < params.top_p * mass) == kept[tokens])
    if 0 < params.top_k < len(values):
        near |= (values[tokens] - order.values[params.top_k - 1]).abs() <= BORDER
    if params.min_p:
        near |= (values[tokens] - values.max() - math.log(params.min_p)).abs() <= BORDER
    return bool(near.all())


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize(
    "kind", ["flat", "peaked", "plateaus", "equal", "bfloat16", "banned", "extreme"]
)
def test_kept_tokens_log_probs_and_picks_are_those_of_the_cpu(kind, vocab):
    specs = every_mix(vocab, np.random.default_rng(vocab))
    logits = make_logits(kind, len(specs), vocab)
    params = inputs_of(specs)
    expected = processed_log_probs(logits, RowParams.build([(s, 1) for s, _ in specs]))
    on_device = logits.cuda()
    got = processed_rows(on_device, params).cpu()
    picks = sample_rows(on_device, params).cpu()
    scores = coupled_scores(expected, *seeds_and_positions(specs))
    wanted = scores.argmax(-1)
    lead = scores.topk(2).values
    different = close = 0
    for row, (sampling, _) in enumerate(specs):
        if sampling.greedy:
            assert picks[row] == int(logits[row].float().numpy().argmax())
            assert torch.equal(got[row], expected[row])
            continue
        kept, ours = expected[row] > -math.inf, got[row] > -math.inf
        changed = torch.nonzero(kept != ours)[:, 0]
        if len(changed):
            different += 1
            assert near_a_border(logits[row].float(), sampling, changed, ours), sampling
            continue
        exact = scaled(logits[row], sampling)[kept].double().log_softmax(-1).float()
        torch.testing.assert_close(got[row][kept], exact, rtol=2e-6, atol=4e-6)
        torch.testing.assert_close(got[row][kept], expected[row][kept], rtol=2e-5, atol=4e-5)
        assert got[row].double().exp().sum().item() == pytest.approx(1, abs=2e-5)
        if lead[row, 0] - lead[row, 1] > CLEAR_GAP:
            assert picks[row] == wanted[row], sampling
        else:
            close += 1
    print(f"\n{kind} {vocab}: {len(specs)} rows, {different} differ at a border, {close} close")
    assert different <= len(specs) // 10
    assert close <= len(specs) // 20


@pytest.mark.parametrize("kind", ["flat", "peaked", "bfloat16", "banned"])
def test_picks_are_the_eager_race_over_the_processed_rows_to_the_bit(kind):
    specs = every_mix(128256, np.random.default_rng(1))
    logits = make_logits(kind, len(specs), 128256).cuda()
    params = inputs_of(specs)
    log_probs = processed_rows(logits, params)
    assert torch.equal(
        sample_rows(logits, params), coupled_picks(log_probs, *seeds_and_positions(specs))
    )


@pytest.mark.parametrize("vocab", [1000, 128256])
@pytest.mark.parametrize("kind", ["flat", "peaked", "plateaus", "equal", "bfloat16", "banned"])
def test_candidates_are_the_first_of_the_eager_race_to_the_bit(kind, vocab):
    specs = every_mix(vocab, np.random.default_rng(5))
    logits = make_logits(kind, len(specs), vocab).cuda()
    params = inputs_of(specs)
    scores = coupled_scores(processed_rows(logits, params), *seeds_and_positions(specs))
    greedy = [row for row, (sampling, _) in enumerate(specs) if sampling.greedy]
    scores[greedy] = logits[greedy].float()
    expected = torch.sort(scores, descending=True, stable=True).indices[:, :CANDIDATES]
    candidates = sample_candidates(logits, params)
    assert torch.equal(candidates, expected)
    assert torch.equal(candidates[:, 0], sample_rows(logits, params))


def test_candidates_of_negative_logits_and_zeros_of_either_sign():
    logits = -torch.arange(1.0, 2001.0)[None]
    logits[0, [1500, 20, 700]] = torch.tensor([0.0, -0.0, 0.0])
    candidates = sample_candidates(logits.cuda(), inputs_of([(SamplingParams(), [0])]), cuts=False)
    assert candidates.tolist() == [[20, 700, 1500, 0, 1, 2, 3, 4]]


def test_row_is_bit_equal_alone_and_beside_others():
    generator = np.random.default_rng(2)
    specs = every_mix(128256, generator)
    specs = [specs[i] for i in generator.choice(len(specs), 40, replace=False)]
    logits = make_logits("peaked", 40, 128256).cuda()
    params = inputs_of(specs)
    together, picks = processed_rows(logits, params), sample_rows(logits, params)
    for row in range(40):
        alone = slice(row, row + 1)
        assert torch.equal(processed_rows(logits[alone], params[alone])[0], together[row])
        assert torch.equal(sample_rows(logits[alone], params[alone]), picks[alone])


def test_many_runs_give_the_same_bits():
    specs = every_mix(49152, np.random.default_rng(3))
    logits = make_logits("plateaus", len(specs), 49152).cuda()
    params = inputs_of(specs)
    first, picks = processed_rows(logits, params), sample_rows(logits, params)
    for _ in range(30):
        assert torch.equal(processed_rows(logits, params), first)
        assert torch.equal(sample_rows(logits, params), picks)
        assert torch.equal(sample_candidates(logits, params)[:, 0], picks)


def test_graph_replays_with_new_parameters_and_logits():
    vocab, rows = 32001, 40
    specs = every_mix(vocab, np.random.default_rng(4))
    inputs = SamplerInputs(rows)
    logits = torch.zeros(rows, vocab, device="cuda")
    inputs.fill(specs[:rows])
    processed_rows(logits, inputs.params), sample_rows(logits, inputs.params)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        log_probs = processed_rows(logits, inputs.params)
        picks = sample_rows(logits, inputs.params)
    for turn, kind in enumerate(["flat", "peaked", "plateaus", "banned"]):
        chosen = specs[turn * rows : (turn + 1) * rows]
        inputs.fill(chosen)
        logits.copy_(make_logits(kind, rows, vocab))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(log_probs, processed_rows(logits.clone(), inputs_of(chosen)))
        assert torch.equal(picks, sample_rows(logits.clone(), inputs_of(chosen)))


def test_launches_for_cuts_can_be_left_out_where_no_row_cuts():
    specs = [(SamplingParams(t, seed=9), range(10)) for t in (0.0, 0.3, 1.0, 2.0)]
    logits = make_logits("peaked", 40, 49152).cuda()
    params = inputs_of(specs)
    assert torch.equal(sample_rows(logits, params, cuts=False), sample_rows(logits, params))
    assert torch.equal(processed_rows(logits, params, cuts=False), processed_rows(logits, params))


def test_padding_rows_of_zeros_are_greedy():
    logits = make_logits("plateaus", 3, 1000)
    params = torch.zeros(3, inputs_of([(SamplingParams(), [0])]).shape[1], dtype=torch.int32)
    assert sample_rows(logits.cuda(), params.cuda()).tolist() == logits.numpy().argmax(-1).tolist()


def test_rows_of_a_wider_tensor_are_read_in_place():
    wide = make_logits("peaked", 8, 1100).cuda()
    specs = [(SamplingParams(1.0, top_p=0.9, seed=1), range(8))]
    params = inputs_of(specs)
    narrow = wide[:, :1000]
    assert torch.equal(processed_rows(narrow, params), processed_rows(narrow.contiguous(), params))


def test_border_ties_keep_the_lowest_ids():
    logits = torch.zeros(1, 2000, device="cuda")
    for sampling, kept in [
        (SamplingParams(1.0, top_k=5), 5),
        (SamplingParams(1.0, top_p=0.50025), 1001),
        (SamplingParams(1.0, top_p=1e-9), 1),
    ]:
        row = processed_rows(logits, inputs_of([(sampling, [0])]))[0]
        assert torch.nonzero(row > -math.inf)[:, 0].tolist() == list(range(kept))


def test_control_other_seeds_positions_and_parameters_give_other_results():
    logits = make_logits("flat", 40, 128256).cuda()

    def picks(**changed):
        first = changed.pop("first", 0)
        sampling = SamplingParams(**{"temperature": 1.0, "top_p": 0.95, "seed": 5} | changed)
        return sample_rows(logits, inputs_of([(sampling, range(first, first + 40))]))

    for changed in ({"seed": 6}, {"seed": 5 + 2**32}, {"first": 2**32}, {"first": 1}):
        assert int((picks(**changed) == picks()).sum()) < 5
    kept = [
        int((processed_rows(logits, inputs_of([(s, range(40))])) > -math.inf).sum())
        for s in (SamplingParams(1.0, top_p=0.95), SamplingParams(1.0, top_p=0.9501))
    ]
    assert kept[0] < kept[1]
