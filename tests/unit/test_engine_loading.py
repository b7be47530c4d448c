"""What is loaded, what is refused at load, and surgery that changes nothing but speed."""

import copy
import functools
import json

import pytest
import torch
import transformers
from test_engine_forward import FAMILIES, SMALL, family
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from worker_harness import load, make_runner, plain_logits, random_tokens

from outrider.engine.loading import check_supported, load_model, read_tokenizer
from outrider.engine.model_runner import Rows
from outrider.engine.surgery import optimise
from outrider.errors import InvalidArgument, Unsupported

torch.set_num_threads(1)


def config_of(name, **values):
    return getattr(transformers, f"{name}Config")(**SMALL | {"num_key_value_heads": 2} | values)


@pytest.mark.parametrize(
    "config",
    [
        config_of("Mistral", sliding_window=32),
        config_of("Starcoder2", sliding_window=32),
        config_of("Qwen2", use_sliding_window=True, sliding_window=32, max_window_layers=1),
        config_of("Qwen3", layer_types=["full_attention", "sliding_attention"]),
        config_of("Gemma2", head_dim=16),
        transformers.Gemma3TextConfig(),
        transformers.GptOssConfig(),
        transformers.Qwen3NextConfig(),
        transformers.JambaConfig(),
        transformers.BambaConfig(),
        transformers.RecurrentGemmaConfig(),
        transformers.MambaConfig(),
        transformers.Mamba2Config(),
        transformers.FalconH1Config(),
        transformers.T5Config(),
        transformers.BartConfig(),
    ],
    ids=lambda config: config.model_type,
)
def test_models_that_cannot_be_rolled_back_are_refused(config):
    with pytest.raises(Unsupported) as refused:
        check_supported(config)
    assert refused.value.field == "model"


@pytest.mark.parametrize(
    "config",
    [
        config_of("Llama"),
        config_of("Mistral", sliding_window=None),
        config_of("Qwen2", use_sliding_window=False, sliding_window=32),
        config_of("Qwen3"),
        config_of("Phi3"),
        config_of("Gemma"),
    ],
    ids=lambda config: config.model_type,
)
def test_models_with_full_attention_are_taken(config):
    check_supported(config)


def save(model, folder, tokenizer_folder):
    """A model folder with the tiny tokenizer."""
    model.save_pretrained(folder)
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def test_a_refused_model_is_refused_by_load_too(tmp_path, tiny_models):
    config = config_of("Mistral", sliding_window=32)
    folder = save(AutoModelForCausalLM.from_config(config), tmp_path / "m", tiny_models["target"])
    with pytest.raises(Unsupported, match="sliding"):
        load_model(str(folder), tier="target")


def test_models_that_go_round_the_attention_interface_are_refused(tmp_path, tiny_models):
    """Bloom takes any `attn_implementation` and ignores it, so that old KV would be ignored."""
    config = transformers.BloomConfig(vocab_size=300, hidden_size=64, n_layer=2, n_head=4)
    folder = save(AutoModelForCausalLM.from_config(config), tmp_path / "m", tiny_models["target"])
    with pytest.raises(Unsupported, match="attention interface"):
        load_model(str(folder), tier="target", dtype="float32")


def test_context_ends_where_neighbours_would_change_the_positions(tmp_path, tiny_models):
    """ "longrope" has other frequencies for the whole pass once one row is past the original."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    config = config_of(
        "Phi3",
        rope_parameters=rope | {"rope_theta": 1e4, "factor": 4.0},
        original_max_position_embeddings=64,
    )
    folder = save(AutoModelForCausalLM.from_config(config), tmp_path / "m", tiny_models["target"])
    model = load_model(str(folder), tier="target", dtype="float32")
    assert config.max_position_embeddings == 256 and model.context_length == 64
    tokens = random_tokens(20, seed=1)

    def logits(neighbour):
        runner = make_runner(model, 8, 32)
        batch = [Rows(tokens, 0, [0], 20), Rows([1], neighbour, [2, 3, 4, 5], 0)]
        return runner.forward(batch)

    assert torch.equal(logits(10), logits(63))
    assert not torch.allclose(logits(10), logits(100), atol=1e-3)


@pytest.mark.parametrize(
    ("reference", "message"),
    [("/nowhere/at/all", "no such folder"), ("/nowhere/m.gguf", "no such file")],
)
def test_references_that_name_nothing_are_refused(reference, message):
    with pytest.raises(InvalidArgument, match=message) as refused:
        load_model(reference, tier="target")
    assert refused.value.field == "model"


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(InvalidArgument, match=r"config\.json"):
        load_model(str(tmp_path), tier="target")


def test_facts_of_a_loaded_model(tiny_models):
    model = load(tiny_models["target"])
    assert (model.name, model.vocab_size, model.context_length) == ("target", 258, 512)
    assert model.dtype == torch.float32 and model.eos_token_ids == (257,)
    assert load(tiny_models["padded-target"]).vocab_size == 320
    assert not any(parameter.requires_grad for parameter in model.model.parameters())
    assert not model.model.training


def test_fingerprints_tell_models_and_tokenizers_apart(tiny_models):
    target, draft, other = (load(tiny_models[n]) for n in ("target", "draft", "other-tokenizer"))
    assert target.tokenizer.fingerprint == draft.tokenizer.fingerprint
    assert target.tokenizer.fingerprint != other.tokenizer.fingerprint
    assert target.fingerprint != draft.fingerprint


def test_tokenizer_fingerprint_sees_ids_and_not_layout(tmp_path, tiny_models):
    source = tiny_models["target"] / "tokenizer.json"
    content = json.loads(source.read_text())
    original = read_tokenizer(tiny_models["target"]).fingerprint

    def fingerprint():
        (tmp_path / "tokenizer.json").write_text(json.dumps(content, indent=3))
        return read_tokenizer(tmp_path).fingerprint

    assert fingerprint() == original
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    assert fingerprint() != original
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    content["added_tokens"][0]["content"] = "<|other|>"
    assert fingerprint() != original


# --- surgery --------------------------------------------------------------------------------


def tokens_300():
    return torch.tensor([[token % 300 for token in random_tokens(40, seed=4)]])


@functools.cache
def logits_of(name, dtype, optimised):
    model = copy.deepcopy(family(name)).to(dtype)
    if optimised:
        optimise(model)
    with torch.inference_mode():
        return model(input_ids=tokens_300()).logits[0].float()


@pytest.mark.parametrize("name", FAMILIES)
def test_surgery_changes_no_fp32_logit_beyond_rounding(name):
    difference = logits_of(name, torch.float32, True) - logits_of(name, torch.float32, False)
    assert difference.abs().max() < 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_surgery_is_as_near_to_fp32_in_bf16_as_the_model_itself(name):
    exact = logits_of(name, torch.float32, False)
    spread = exact.std()
    error, own_error = (
        (logits_of(name, torch.bfloat16, optimised) - exact).square().mean().sqrt()
        for optimised in (True, False)
    )
    assert 0 < own_error < 0.2 * spread
    assert error < 1.3 * own_error


def test_surgery_fuses_and_keeps_the_names(tiny_models):
    model = copy.deepcopy(load(tiny_models["target"]).model)
    before = dict(model.named_modules())
    optimise(model)
    after = dict(model.named_modules())
    assert set(before) <= set(after)
    fused = [m for name, m in after.items() if name.endswith(".fused")]
    assert len(fused) == 2 * 2
    # q, k and v of GQA, then gate and up, of both layers.
    assert [m.out_features for m in fused] == [64 + 32 + 32, 256] * 2
    assert not any(isinstance(after[name], nn.Linear) for name in after if "up_proj" in name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_biases_land_on_their_own_outputs(dtype):
    model = copy.deepcopy(family("Qwen2")).to(dtype)
    attention = model.model.layers[0].self_attn
    assert all(getattr(attention, f"{n}_proj").bias.abs().min() > 0 for n in "qkv")
    rows = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    names = ("q_proj", "k_proj", "v_proj")
    with torch.inference_mode():
        expected = [getattr(attention, name)(rows) for name in names]
        optimise(model)
        got = [getattr(attention, name)(rows) for name in names]
    assert [part.shape for part in got] == [part.shape for part in expected]
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    for part, wanted in zip(got, expected, strict=True):
        assert torch.allclose(part, wanted, atol=tolerance, rtol=tolerance)


def test_linears_of_which_some_have_biases_are_left_alone():
    model = copy.deepcopy(family("Llama"))
    attention = model.model.layers[0].self_attn
    attention.q_proj.bias = nn.Parameter(torch.randn(64))
    with torch.inference_mode():
        expected = model(input_ids=tokens_300()).logits
        optimise(model)
        got = model(input_ids=tokens_300()).logits
    assert isinstance(attention.q_proj, nn.Linear)
    assert torch.allclose(got, expected, atol=1e-4)


def test_optimised_model_serves_like_the_plain_one(tiny_models):
    model = load_model(str(tiny_models["target"]), tier="target", dtype="float32", device="cpu")
    optimise(model.model)
    runner = make_runner(model, 16)
    tokens = random_tokens(40, seed=6)
    blocks = [3, 9, 1, 10, 11]
    first = runner.forward([Rows(tokens[:25], 0, blocks, 25)])
    rest = runner.forward([Rows(tokens[25:], 25, blocks, 15)])
    expected = plain_logits(tiny_models["target"], tokens)
    assert torch.allclose(torch.cat([first, rest]), expected, atol=1e-4)
