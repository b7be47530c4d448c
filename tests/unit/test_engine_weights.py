"""Which models count as the same: where sessions move, and where KV is shared."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.engine.loading import load_model
from outrider.engine.weights import weights_digest


@pytest.fixture
def folder(tiny_models, tmp_path):
    return shutil.copytree(tiny_models["target"], tmp_path / "model")


def test_a_copy_is_the_same_model(folder, tiny_models):
    assert weights_digest(folder) == weights_digest(tiny_models["target"])


def test_one_that_was_trained_on_is_another_even_where_its_head_stays(folder, tiny_models):
    """As with adapters merged into a few tensors: embeddings and sizes are the same."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    generator = torch.Generator().manual_seed(1)
    for name in weights:
        if "layers.1.self_attn.q_proj" in name:
            weights[name] += 1e-3 * torch.randn(weights[name].shape, generator=generator)
    save_file(weights, path, metadata={"format": "pt"})
    assert weights_digest(folder) != weights_digest(tiny_models["target"])


def test_workers_of_a_model_that_was_trained_on_tell_another_fingerprint(folder, tiny_models):
    """Though the file begins with the same 64 KiB: its head stayed as it was."""
    path = folder / "model.safetensors"
    original, weights = path.read_bytes(), load_file(path)
    weights["model.layers.1.mlp.up_proj.weight"] *= 1.01
    save_file(weights, path, metadata={"format": "pt"})
    changed = path.read_bytes()
    assert len(changed) == len(original) and changed[: 1 << 16] == original[: 1 << 16]
    one, other = (load_model(str(f), tier="target") for f in (tiny_models["target"], folder))
    assert one.fingerprint != other.fingerprint


def test_another_configuration_is_another_model(folder, tiny_models):
    config = folder / "config.json"
    config.write_text(config.read_text().replace("10000.0", "20000.0"))
    assert config.read_text() != (tiny_models["target"] / "config.json").read_text()
    assert weights_digest(folder) != weights_digest(tiny_models["target"])
