"""Synthetic models: a draft and a target of real shapes that agree as much as asked.

They cost what real models of their shape cost and say nothing worth reading: they measure speed.
The draft's next token depends on its last one alone (its `o_proj` and `down_proj` are zero). The
target is the draft written twice side by side, its other weights random, and what its layers add
scaled by `eps`: the smaller, the more the two agree.

References: `synthetic:70b`, `synthetic:8b,eps=0.01` and `synthetic:1b`, the shapes of
Llama-3.1-70B, Llama-3.1-8B and Llama-3.2-1B (untied); `synthetic:small` and `synthetic:small-draft`
for measurements on a CPU, whose passes differ by a factor of eight; `synthetic:tiny` and
`synthetic:tiny-draft` for tests. A rank of a group gets its part of the same weights.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outrider.engine import attention, sharding
from outrider.engine.group import Group
from outrider.engine.loaded_model import LoadedModel, TokenizerFiles
from outrider.errors import InvalidArgument

PREFIX = "synthetic:"
_CONTEXT = 8192


@dataclass(frozen=True, slots=True)
class Shape:
    """What decides the cost of a Llama-like model. `copies`: how often the draft is in it."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    copies: int


SHAPES = {
    "70b": Shape(8192, 28672, 80, 64, 8, 128, 128_256, 4),
    "8b": Shape(4096, 14336, 32, 32, 8, 128, 128_256, 2),
    "1b": Shape(2048, 8192, 16, 32, 8, 64, 128_256, 1),
    "small": Shape(512, 1536, 6, 8, 4, 64, 4096, 2),
    "small-draft": Shape(256, 512, 1, 4, 2, 64, 4096, 1),
    "tiny": Shape(128, 256, 2, 4, 2, 32, 512, 2),
    "tiny-draft": Shape(64, 128, 2, 4, 2, 16, 512, 1),
}


def load_synthetic(
    reference: str, *, dtype: torch.dtype, device: torch.device, group: Group | None = None
) -> LoadedModel:
    """Make the model that a `synthetic:` reference names; equal references give equal models
    on one kind of device. Raises InvalidArgument."""
    name, eps = parse(reference)
    shape = SHAPES[name]
    config = _config(shape)
    attention.register()
    config._attn_implementation = attention.IMPLEMENTATION
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        model: nn.Module = LlamaForCausalLM(config)
    model.to(dtype)
    full = {name: weight.shape for name, weight in model.named_parameters()}
    parts: dict[str, sharding.Part] = {}
    if group is not None:
        sharding.check_sizes(config, group.seat.size)
        parts = sharding.shard(model, group.seat)
    model.to_empty(device=device)
    model.requires_grad_(False)
    model.eval()
    _fill(model, shape, eps, full, parts)
    if group is not None:
        sharding.connect(model, group)
    return LoadedModel(
        name=f"synthetic-{name}",
        folder=Path(),
        model=model,
        config=config,
        tokenizer=_tokenizer(shape.vocab),
        fingerprint=hashlib.sha256(reference.encode()).hexdigest(),
        eos_token_ids=(),
        vocab_size=shape.vocab,
        context_length=_CONTEXT,
        dtype=dtype,
        device=device,
        ranks=group.seat.size if group else 1,
    )


def parse(reference: str) -> tuple[str, float]:
    """Shape name and eps of `synthetic:NAME[,eps=X]`."""
    name, _, option = reference.removeprefix(PREFIX).partition(",")
    if name not in SHAPES:
        raise InvalidArgument(f"{name!r} is not one of {', '.join(SHAPES)}", field="model")
    key, _, value = option.partition("=")
    try:
        eps = float(value) if option else 0.01
    except ValueError:
        eps = -1.0
    if (option and key != "eps") or not 0 <= eps <= 1:
        raise InvalidArgument(f"{option!r} is not eps=X with X in [0, 1]", field="model")
    return name, eps


def _config(shape: Shape) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        max_position_embeddings=_CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def _fill(
    model: nn.Module,
    shape: Shape,
    eps: float,
    full: dict[str, torch.Size],
    parts: dict[str, sharding.Part],
) -> None:
    """Make the weights. Random ones are made in their full shapes, so that parts are of those."""
    device = next(model.parameters()).device
    width = shape.hidden // shape.copies
    shared = torch.Generator(device=device).manual_seed(1)
    own = torch.Generator(device=device).manual_seed(2)
    embeddings = torch.empty(shape.vocab, width, device=device).normal_(generator=shared)
    head = torch.empty(shape.vocab, width, device=device).normal_(0, 0.12, generator=shared)
    adds = eps if shape.copies > 1 else 0.0
    for name, weight in model.named_parameters():
        if "embed_tokens" in name:
            weight.copy_(embeddings.repeat(1, shape.copies))
        elif "lm_head" in name:
            rows = parts[name].of(head) if name in parts else head
            weight.copy_(rows.repeat(1, shape.copies) / shape.copies)
        elif weight.ndim == 1:
            weight.fill_(1.0)
        elif name in parts:
            whole = torch.empty(full[name], dtype=weight.dtype, device=device)
            weight.copy_(parts[name].of(whole.normal_(0, 0.02, generator=own)))
        else:
            weight.normal_(0, 0.02, generator=own)
        if "o_proj" in name or "down_proj" in name:
            weight.mul_(adds)
    _reset_rotary(model)


def _reset_rotary(model: Any) -> None:
    """Buffers that are computed, not loaded, and so were lost with the meta device."""
    rotary = model.model.rotary_emb
    fresh = type(rotary)(model.config).to(rotary.inv_freq.device)
    rotary.inv_freq = fresh.inv_freq
    rotary.original_inv_freq = fresh.inv_freq.clone()


def _tokenizer(vocab: int) -> TokenizerFiles:
    """One word a token, `t0 t1 …`: enough to send and to show token ids."""
    words = {f"t{index}": index for index in range(vocab)}
    document: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "t0"},
    }
    text = json.dumps(document)
    fingerprint = hashlib.sha256(text.encode()).hexdigest()
    return TokenizerFiles(text, None, None, None, fingerprint)
