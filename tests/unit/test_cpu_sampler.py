"""The fused CPU sampler against `processed_log_probs` and `coupled_picks`, row by row."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from outrider.engine import cpu_kernels
from outrider.engine.drawing import log_probs_of, picks_of
from outrider.engine.model_files import default_cache_dir
from outrider.sampling import (
    NoiseKeys,
    RowParams,
    Stream,
    coupled_picks,
    coupled_scores,
    cpu_sampler,
    exponentials,
    noise_bits,
    processed_log_probs,
)
from outrider.sampling.cpu_sampler import pack_rows, processed_rows, sample_rows
from outrider.types import SamplingParams

BORDER = 1e-6
"""How near to a border a sum (or log prob) must be for a token to come out differently."""
CLEAR_GAP = 1e-4
"""A lead in the race that rounding cannot turn round."""

VOCABS = (1, 2, 63, 64, 65, 1000, 32001)
KINDS = ("flat", "peaked", "plateaus", "equal", "bfloat16", "banned", "extreme", "shifted")
MIXES = [
    SamplingParams(*mix)
    for mix in itertools.product(
        (0.3, 1.0, 2.0), (0, 1, 5, 50, "vocab"), (1.0, 0.95, 0.5, 0.01), (0.0, 0.05, 1.0)
    )
] + [
    SamplingParams(0.0),
    SamplingParams(0.0, 5, 0.5, 0.1),
    SamplingParams(1e-30),
    SamplingParams(1e-30, 3, 0.9),
    SamplingParams(0.01, 0, 0.9),
    SamplingParams(50.0, 0, 0.9),
    SamplingParams(50.0, 700, 0.999),
    SamplingParams(1.0, 999),
    SamplingParams(1.0, 2000, 0.9),
    SamplingParams(1.0, 0, 1e-9),
    SamplingParams(1.0, 0, 0.9999),
    SamplingParams(1.0, 0, 1.0, 1e-6),
]


@pytest.fixture(autouse=True)
def kernels():
    cpu_kernels.load(default_cache_dir())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def every_mix(vocab, seed=0):
    """All mixes, each with a seed and a position of its own."""
    words = np.random.default_rng(seed).integers(0, 2**64, (len(MIXES), 2), dtype=np.uint64)
    rows = []
    for mix, (noise_seed, position) in zip(MIXES, words.tolist(), strict=True):
        top_k = vocab if mix.top_k == "vocab" else mix.top_k
        sampling = SamplingParams(mix.temperature, top_k, mix.top_p, mix.min_p, noise_seed)
        rows.append((sampling, position))
    return rows


def make_logits(kind, rows, vocab):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(rows, vocab, generator=generator)
    if kind == "peaked":
        logits *= 3
    elif kind == "plateaus":
        logits = (logits * 2).round()
    elif kind == "equal":
        logits *= 0
    elif kind == "bfloat16":
        logits = (logits * 3 + 20).bfloat16()
    elif kind == "banned":
        banned = torch.rand(rows, vocab, generator=generator) < 0.9
        banned[:, vocab // 2] = False
        logits = (logits * 2).masked_fill(banned, -math.inf)
    elif kind == "extreme":
        logits[:, ::7] *= 1e4
        logits[:, vocab // 3] = -3e38
        logits[::2, vocab // 4] = 2e38
    elif kind == "shifted":
        logits = logits * 2 + 3e4
    return logits


def plain(rows):
    return RowParams.build([(sampling, 1) for sampling, _ in rows])


def noise_keys(rows):
    return [sampling.seed for sampling, _ in rows], [position for _, position in rows]


def scaled(logits, sampling):
    return (logits.float() - logits.float().max()) / sampling.temperature


def near_a_border(logits, sampling, tokens, kept):
    """Whether each of these tokens is within BORDER of being decided the other way.

    By the reference's sums or by exact ones, or what was `kept` is what exact sums say: the
    reference's probabilities can miss a sum of 1 by more than BORDER.
    """
    temperature = SamplingParams(sampling.temperature)
    values = processed_log_probs(logits[None], RowParams.build([(temperature, 1)]))[0]
    order = torch.sort(values, descending=True, stable=True)
    rank = torch.empty_like(order.indices)
    rank[order.indices] = torch.arange(len(values))
    near = values[tokens] < -(2.0**15)
    exact = scaled(logits, sampling).double().log_softmax(-1)[order.indices]
    cuts_by_count = 0 < sampling.top_k < len(values)
    for ordered in (order.values.double(), exact):
        reached = ordered.exp().cumsum(0)
        before = torch.nn.functional.pad(reached[:-1], (1, 0))[rank[tokens]]
        mass = reached[sampling.top_k - 1] if cuts_by_count else 1.0
        if sampling.top_p < 1:
            near |= (before - sampling.top_p * mass).abs() <= BORDER
            near |= (ordered is exact) & ((before < sampling.top_p * mass) == kept[tokens])
    if cuts_by_count:
        near |= (values[tokens] - order.values[sampling.top_k - 1]).abs() <= BORDER
    if sampling.min_p:
        near |= (values[tokens] - values.max() - math.log(sampling.min_p)).abs() <= BORDER
    return bool(near.all())


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("kind", KINDS)
def test_kept_tokens_log_probs_and_picks_are_those_of_the_reference(kind, vocab):
    rows = every_mix(vocab)
    logits = make_logits(kind, len(rows), vocab)
    params = pack_rows(rows)
    expected = processed_log_probs(logits, plain(rows))
    got, picks = processed_rows(logits, params), sample_rows(logits, params)
    scores = coupled_scores(expected, *noise_keys(rows))
    wanted = scores.argmax(-1)
    different = close = 0
    for row, (sampling, _) in enumerate(rows):
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
        best = scores[row].topk(min(2, vocab)).values
        if best[0] - best[-1] > CLEAR_GAP or vocab == 1:
            assert picks[row] == wanted[row], sampling
        else:
            close += 1
    # Of equal tokens some number may sum up to exactly top_p: borders by design.
    assert different <= len(rows) // 10 or kind == "equal"
    assert close <= len(rows) // 20


@pytest.mark.parametrize("kind", KINDS)
def test_picks_are_the_whole_race_over_the_processed_rows(kind):
    """What the race leaves out could not have won."""
    rows = every_mix(5000, seed=1)
    close = 0
    for turn in range(4):
        rows = [(sampling, (position + turn) % 2**64) for sampling, position in rows]
        logits = make_logits(kind, len(rows), 5000 + turn)
        params = pack_rows(rows)
        scores = coupled_scores(processed_rows(logits, params), *noise_keys(rows))
        best = scores.max(-1).values
        picks = sample_rows(logits, params)
        reached = scores.gather(1, picks[:, None])[:, 0]
        # By other versions of log and log1p.
        assert ((best - reached) <= 4e-6).all()
        close += int((picks != scores.argmax(-1)).sum())
    assert close <= 3


def test_every_top_k_and_many_top_p_keep_what_exact_sums_say():
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(130, generator=generator) * 8).round() / 4  # Many ties.
    order = torch.sort(logits, descending=True, stable=True).indices
    for top_k in range(1, 131):
        row = processed_rows(logits[None], pack_rows([(SamplingParams(1.0, top_k), 0)]))[0]
        assert set(torch.nonzero(row > -math.inf)[:, 0].tolist()) == set(order[:top_k].tolist())
    before = torch.nn.functional.pad(logits.double().softmax(-1)[order].cumsum(0)[:-1], (1, 0))
    for top_p in np.linspace(0.01, 0.999, 150):
        assert ((before - top_p).abs() > BORDER).all()
        sampling = SamplingParams(1.0, top_p=float(top_p))
        row = processed_rows(logits[None], pack_rows([(sampling, 0)]))[0]
        kept = order[before < top_p]
        assert set(torch.nonzero(row > -math.inf)[:, 0].tolist()) == set(kept.tolist())


def test_border_ties_keep_the_lowest_ids():
    logits = torch.zeros(1, 2000)
    for sampling, kept in [
        (SamplingParams(1.0, top_k=5), 5),
        (SamplingParams(1.0, top_p=0.50025), 1001),
        (SamplingParams(1.0, top_p=1e-9), 1),
        (SamplingParams(1.0, top_k=100, top_p=0.501), 51),
    ]:
        row = processed_rows(logits, pack_rows([(sampling, 0)]))[0]
        assert torch.nonzero(row > -math.inf)[:, 0].tolist() == list(range(kept))


@pytest.mark.parametrize("kind", ["peaked", "bfloat16", "banned"])
@pytest.mark.parametrize("vocab", [1000, 32001])
def test_row_is_bit_equal_alone_and_beside_others_on_1_and_2_threads(kind, vocab):
    generator = np.random.default_rng(2)
    rows = every_mix(vocab)
    rows = [rows[i] for i in generator.choice(len(rows), 40, replace=False)]
    logits = make_logits(kind, 40, vocab)
    params = pack_rows(rows)
    together, picks = processed_rows(logits, params), sample_rows(logits, params)
    torch.set_num_threads(2)
    assert torch.equal(processed_rows(logits, params), together)
    assert torch.equal(sample_rows(logits, params), picks)
    torch.set_num_threads(1)
    for row in range(40):
        # A copy lies at another address than the row in its batch.
        alone, its_params = logits[row : row + 1].clone(), params[row : row + 1]
        assert torch.equal(processed_rows(alone, its_params)[0], together[row])
        assert torch.equal(sample_rows(alone, its_params), picks[row : row + 1])


def test_bfloat16_and_rows_of_a_wider_tensor_give_the_bits_of_a_float32_copy():
    rows = every_mix(1000)
    wide = make_logits("bfloat16", len(rows), 1100)
    params = pack_rows(rows)
    copy = wide[:, :1000].float().contiguous()
    assert torch.equal(processed_rows(wide[:, :1000], params), processed_rows(copy, params))
    assert torch.equal(sample_rows(wide.float()[:, :1000], params), sample_rows(copy, params))


def test_noise_words_are_those_of_noise_bits():
    words = np.random.default_rng(3).integers(0, 2**64, (20, 2), dtype=np.uint64).tolist()
    words += [(0, 0), (2**64 - 1, 2**64 - 1), (5, 2**32)]
    rows = [(SamplingParams(1.0, seed=seed), position) for seed, position in words]
    found = torch.ops.outrider_cpu.noise_words(pack_rows(rows), 1000)
    for row, (seed, position) in zip(found, words, strict=True):
        assert row.tolist() == noise_bits(seed, Stream.COUPLED, position, 0, 1000).tolist()


def two_tokens(vocab, first, second, lead):
    """Logits of a row where no other token can come, and the first leads by so much."""
    logits = torch.full((1, vocab), -math.inf)
    logits[0, first], logits[0, second] = lead, 0.0
    return logits


@pytest.mark.parametrize("extreme", [np.argmin, np.argmax])
def test_scores_are_exact_for_extreme_words(extreme):
    """Half a unit more or less in a word near 0, or 1 instead of the largest uniform, shows."""
    for position in range(200_000):
        words = noise_bits(9, Stream.COUPLED, position, 0, 4096)
        rare = int(extreme(words))
        if min(int(words[rare]), 2**32 - int(words[rare])) < 64:
            break
    noise = exponentials(Stream.COUPLED, NoiseKeys.coupled([9], [position]), 4096)[0].double()
    other = int(np.abs(words.astype(np.int64) - 2**31).argmin())
    lead = float(torch.log(noise[rare]) - torch.log(noise[other]))
    params = pack_rows([(SamplingParams(1.0, seed=9), position)])
    for margin, winner in ((0.002, rare), (-0.002, other)):
        logits = two_tokens(4096, rare, other, lead + margin)
        assert sample_rows(logits, params).tolist() == [winner]


def test_lowest_id_wins_among_equal_scores_wherever_the_likeliest_token_stands():
    vocab = 20_000
    noise = exponentials(Stream.COUPLED, NoiseKeys.coupled([1], [1]), vocab)[0]
    ids_of = {}
    for token, value in enumerate(noise.tolist()):
        ids_of.setdefault(value, []).append(token)
    params = pack_rows([(SamplingParams(1.0, seed=1), 1)])
    pairs = [ids for ids in ids_of.values() if len(ids) == 2 and ids[0] // 64 != ids[1] // 64]
    assert pairs
    for first, second in pairs:
        # Likelier, but last in the race.
        span = slice(second // 64 * 64, second // 64 * 64 + 64)
        likeliest = span.start + int(noise[span].argmax())
        if noise[likeliest] < 1.1 * noise[second]:
            continue
        logits = two_tokens(vocab, first, second, 0.0)
        logits[0, likeliest] = 0.01
        assert sample_rows(logits, params).tolist() == [first]


def test_rows_of_zeros_are_greedy():
    logits = make_logits("plateaus", 3, 1000)
    params = torch.zeros_like(pack_rows([(SamplingParams(), 0)] * 3))
    assert sample_rows(logits, params).tolist() == logits.numpy().argmax(-1).tolist()


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_logits_that_are_not_numbers_give_some_token_id(value):
    rows = every_mix(130)
    for logits in (torch.full((len(rows), 130), value), make_logits("peaked", len(rows), 130)):
        logits[:, 3::7] = value
        picks = sample_rows(logits, pack_rows(rows))
        processed_rows(logits, pack_rows(rows))
        assert ((picks >= 0) & (picks < 130)).all()


def test_input_of_another_shape_is_refused():
    params = pack_rows([(SamplingParams(), 0)])
    for logits, packed in [
        (torch.zeros(2, 8), params),
        (torch.zeros(1, 8).double(), params),
        (torch.zeros(8, 1).T[:, ::2], params),
        (torch.zeros(1, 8), params[:, :8]),
        (torch.zeros(1, 8), params.long()),
    ]:
        with pytest.raises(RuntimeError):
            sample_rows(logits, packed)


def test_drawing_takes_the_kernels_for_picks_and_distributions():
    rows = every_mix(1000)
    logits = make_logits("peaked", len(rows), 1000)
    assert cpu_sampler.takes(logits)
    assert torch.equal(picks_of(logits, rows), sample_rows(logits, pack_rows(rows)))
    specs = [(sampling, 1) for sampling, _ in rows]
    assert torch.equal(log_probs_of(logits, specs), processed_rows(logits, pack_rows(rows)))


def test_drawing_without_the_kernels_gives_the_reference(monkeypatch):
    rows = every_mix(1000)
    logits = make_logits("peaked", len(rows), 1000)
    monkeypatch.setattr(cpu_sampler, "takes", lambda logits: False)
    expected = processed_log_probs(logits, plain(rows))
    assert torch.equal(log_probs_of(logits, [(sampling, 1) for sampling, _ in rows]), expected)
    assert torch.equal(picks_of(logits, rows), coupled_picks(expected, *noise_keys(rows)))


SAMPLES = 4000


def p_value(positions):
    """Of a chi-square test that picks at these positions follow the processed distribution."""
    logits = torch.cat([torch.linspace(2, -1, 40), torch.full((300,), -4.0)]).roll(100)
    sampling = SamplingParams(0.8, top_p=0.97, seed=7)
    params = pack_rows([(sampling, position) for position in positions])
    picks = sample_rows(logits.expand(len(positions), -1), params)
    probs = processed_rows(logits[None], params[:1])[0].double().exp()
    counts = torch.bincount(picks, minlength=len(probs))
    assert (counts[probs == 0] == 0).all()
    likely = probs * len(positions) >= 5
    observed = [*counts[likely].tolist(), counts[~likely].sum().item()]
    expected = [*probs[likely].tolist(), probs[~likely].sum().item()]
    cells = [(o, e * len(positions)) for o, e in zip(observed, expected, strict=True) if e > 0]
    total = sum(e for _, e in cells)
    return stats.chisquare([o for o, _ in cells], [e * len(positions) / total for _, e in cells])[1]


def test_picks_follow_the_distribution():
    assert p_value(range(SAMPLES)) > 1e-4


def test_control_reused_positions_do_not_follow_the_distribution():
    assert p_value([position // 8 for position in range(SAMPLES)]) < 1e-9


def test_control_other_seeds_positions_and_parameters_give_other_results():
    logits = make_logits("flat", 40, 32001)

    def picks(first=0, **changed):
        sampling = SamplingParams(**{"temperature": 1.0, "top_p": 0.95, "seed": 5} | changed)
        return sample_rows(logits, pack_rows([(sampling, first + i) for i in range(40)]))

    for changed in ({"seed": 6}, {"seed": 5 + 2**32}, {"first": 2**32}, {"first": 1}):
        assert int((picks(**changed) == picks()).sum()) < 5
    narrow, wide = (
        int((processed_rows(logits[:1], pack_rows([(s, 0)])) > -math.inf).sum())
        for s in (SamplingParams(1.0, top_p=0.95), SamplingParams(1.0, top_p=0.9501))
    )
    assert narrow < wide
