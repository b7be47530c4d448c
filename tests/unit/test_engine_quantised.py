"""Models with int8 weights against the same models in full precision."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from test_engine_forward import FAMILIES, family, loaded
from torch import nn
from transformers import AutoModelForCausalLM
from worker_harness import load, make_runner, plain_logits, random_tokens

from outrider.config import load_config
from outrider.engine import attention, cpu_kernels, quantised
from outrider.engine.cpu_pass import _Forward
from outrider.engine.loading import load_model
from outrider.engine.quantised import OnednnLinear, PlainInt8Linear, quantise, weight_bytes
from outrider.engine.rows import Rows
from outrider.engine.surgery import optimise
from outrider.errors import FailedPrecondition, InvalidArgument, Unsupported
from outrider.worker.service import WorkerConfig

torch.set_num_threads(1)

WIDTH, OUT = 192, 320
LINEARS = [OnednnLinear, PlainInt8Linear]


@pytest.fixture(autouse=True)
def kernels():
    cpu_kernels.load()
    with torch.inference_mode():
        yield


def int8(model):
    optimise(model.model, pack=False)
    return quantise(model, "int8")


def fresh(folder, dtype="float32"):
    return load_model(str(folder), tier="target", dtype=dtype, device="cpu")


def error(found, expected):
    return float((found - expected).norm() / expected.norm())


def random_linear(kind, dtype=torch.float32, bias=True):
    """A quantised linear, and the linear with rounded weights that it stands for, in float64."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(OUT, WIDTH, generator=generator) * torch.rand(OUT, 1, generator=generator)
    added = torch.randn(OUT, generator=generator).to(dtype) if bias else None
    rounded, scales = quantised._to_int8(weight.to(dtype))
    exact = nn.Linear(WIDTH, OUT, bias=bias, dtype=torch.float64)
    exact.weight.data = rounded.double() * scales.double()[:, None]
    if bias:
        exact.bias.data = added.double()
    return kind(rounded, scales, added), exact.requires_grad_(False)


def random_rows(count, dtype=torch.float32):
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(count, WIDTH, generator=generator)
    rows[:, 7] *= 50  # One of the outliers that activations have: 8 bits would lose the others.
    return rows.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", LINEARS)
def test_only_weights_are_rounded(kind, bias, dtype):
    linear, exact = random_linear(kind, dtype, bias)
    rows = random_rows(9, dtype)
    allowed = 1e-3 if dtype is torch.float32 else 4e-3
    assert error(linear(rows).double(), exact(rows.double())) < allowed


def test_activations_in_8_bits_would_be_seen():
    """The control of the test above."""
    _, exact = random_linear(OnednnLinear)
    rows = random_rows(9)
    step = rows.abs().amax(1, keepdim=True) / 127
    assert error(exact(((rows / step).round() * step).double()), exact(rows.double())) > 1e-2


@pytest.mark.parametrize("kind", LINEARS)
def test_a_row_has_the_same_bits_among_any_others(kind):
    linear, _ = random_linear(kind, torch.bfloat16)
    rows = random_rows(70, torch.bfloat16)
    together = linear(rows)
    for count in (1, 2, 3, 5, 16, 33):
        parts = [linear(rows[i : i + count]) for i in range(0, len(rows), count)]
        assert torch.equal(torch.cat(parts), together)
    others = torch.randn_like(rows) * 100
    others[11] = rows[11]
    assert torch.equal(linear(others)[11], together[11])


@pytest.mark.parametrize("kind", LINEARS)
def test_zero_rows_no_rows_and_more_dimensions(kind):
    linear, _ = random_linear(kind, bias=False)
    assert not linear(torch.zeros(2, WIDTH)).any()
    assert linear(torch.empty(0, WIDTH)).shape == (0, OUT)
    assert linear(torch.zeros(1, 3, WIDTH)).shape == (1, 3, OUT)


def test_scales_are_of_each_output_and_zero_weights_stay_zero():
    weight = torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0], [1e-3, 0.0, 1e-3]])
    rounded, scales = quantised._to_int8(weight)
    assert rounded.tolist() == [[64, -127, 32], [0, 0, 0], [127, 0, 127]]
    assert torch.allclose(rounded * scales[:, None], weight, atol=2 / 127)


def test_logits_are_those_of_rounded_weights_and_close_to_full_precision(tiny_models):
    tokens = random_tokens(40)
    runner = make_runner(int8(fresh(tiny_models["target"])), 64)
    logits = runner.forward([Rows(tokens, 0, list(range(8)), 40)])
    rounded = AutoModelForCausalLM.from_pretrained(tiny_models["target"], dtype=torch.float32)
    for linear in [m for m in rounded.modules() if type(m) is nn.Linear]:
        weight, scales = quantised._to_int8(linear.weight.detach())
        linear.weight = nn.Parameter(weight * scales[:, None])
    expected = rounded(input_ids=torch.tensor([tokens])).logits[0].detach()
    assert error(logits, expected) < 2e-3
    assert 1e-2 < error(logits, plain_logits(tiny_models["target"], tokens)) < 0.1


@pytest.mark.parametrize("name", ["Qwen2", "Phi3", "GPTNeoX"])
def test_biased_and_already_fused_families(name):
    tokens = random_tokens(20)
    reference = family(name)(input_ids=torch.tensor([tokens])).logits[0]
    family.cache_clear()
    model = loaded(family(name, implementation=attention.IMPLEMENTATION))
    logits = make_runner(int8(model), 64).forward([Rows(tokens, 0, list(range(8)), 20)])
    family.cache_clear()
    assert name in FAMILIES
    assert error(logits, reference) < 0.1


def test_every_linear_takes_a_byte_a_weight(tiny_models):
    model = fresh(tiny_models["target"], "bfloat16")
    linears = [m for m in model.model.modules() if type(m) is nn.Linear]
    inside, outputs = sum(m.weight.numel() for m in linears), sum(m.out_features for m in linears)
    kept = {id(m.weight) for m in model.model.modules() if isinstance(m, nn.Embedding)}
    shared = sum(2 * m.weight.numel() for m in linears if id(m.weight) in kept)
    before = weight_bytes(model.model)
    after = weight_bytes(int8(model).model)
    assert not [m for m in model.model.modules() if type(m) is nn.Linear]
    assert before - after == inside - 4 * outputs - shared


def test_the_pass_is_still_traced(tiny_models):
    runner = make_runner(int8(fresh(tiny_models["target"], "bfloat16")), 64)
    assert not isinstance(runner._pass, _Forward)


def test_weights_that_nobody_uses_are_let_go(tiny_models):
    linear, _ = random_linear(OnednnLinear)
    handle = linear.handle
    del linear
    with pytest.raises(RuntimeError, match="no int8 weight"):
        torch.ops.outrider_cpu.int8_linear(torch.zeros(1, WIDTH), handle, None)


def test_none_changes_nothing(tiny_models):
    model = load(tiny_models["target"])
    assert quantise(model, "none") is model


def test_another_fingerprint_so_that_targets_are_not_mixed(tiny_models):
    model = fresh(tiny_models["target"])
    assert int8(model).fingerprint != model.fingerprint


def test_unknown_schemes_are_refused(tiny_models):
    with pytest.raises(InvalidArgument, match=r"int4.*none, int8"):
        quantise(load(tiny_models["target"]), "int4")
    with pytest.raises(InvalidArgument, match=r"quantize.*int4"):
        load_config(WorkerConfig, ["--quantize", "int4"], {}, prog="t", env_prefix="T_")


def test_each_tier_is_told_for_itself():
    assert load_config(WorkerConfig, [], {}, prog="t", env_prefix="T_").quantize == "none"
    asked = load_config(WorkerConfig, [], {"T_QUANTIZE": "int8"}, prog="t", env_prefix="T_")
    assert asked.quantize == "int8"


def test_a_gpu_without_the_library_says_what_to_install(tiny_models, monkeypatch):
    monkeypatch.setitem(sys.modules, "humming", None)
    model = replace(fresh(tiny_models["target"], "bfloat16"), device=torch.device("cuda:0"))
    with pytest.raises(FailedPrecondition, match="extra `quantised`"):
        quantise(model, "int8")


def test_a_gpu_needs_16_bit_arithmetic(tiny_models):
    model = replace(fresh(tiny_models["target"]), device=torch.device("cuda:0"))
    with pytest.raises(Unsupported, match=r"quantize: .*bfloat16 or float16"):
        quantise(model, "int8")


def test_a_model_without_linears_is_refused(tiny_models):
    model = replace(fresh(tiny_models["target"]), model=nn.Sequential(nn.Embedding(4, 4)))
    with pytest.raises(Unsupported, match="no linears"):
        quantise(model, "int8")


@pytest.mark.parametrize("out_features", [64, 192, 4096, 28672, 16448, 128256])
@pytest.mark.parametrize("in_features", [128, 384, 4096])
def test_a_gpu_has_a_kernel_for_any_rows_that_keeps_sums_in_one_block(in_features, out_features):
    cases = json.loads(quantised._tunings(in_features, out_features))
    assert [low for low, _, _ in cases] == [0, *(high for _, high, _ in cases[:-1])]
    assert cases[-1][1] >= 1 << 20
    for _, _, kernel in cases:
        _, columns, depth = kernel["block_shape"]
        assert not kernel["use_stream_k"]
        assert out_features % columns == in_features % depth == 0
        assert columns >= 64  # Narrower ones compile and give NaN.


def test_the_library_is_not_imported_unless_needed():
    assert "humming" not in sys.modules
