"""Loading a model: weights, tokenizer and the fingerprints that tell pairs apart."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outrider.engine import attention, model_files, sharding, synthetic
from outrider.engine.group import Group
from outrider.engine.loaded_model import LoadedModel, TokenizerFiles
from outrider.engine.shard_loading import load_part
from outrider.engine.weights import weights_digest
from outrider.errors import FailedPrecondition, InvalidArgument, Unsupported

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    reference: str,
    *,
    tier: str,
    dtype: str = "auto",
    device: str = "auto",
    cache_dir: Path | None = None,
    group: Group | None = None,
) -> LoadedModel:
    """Load `reference` (see model_files) for `tier` ("draft" or "target").

    `dtype` auto is bfloat16 where the processor computes in it, else float32; `device` auto is
    the first CUDA device where there is one. As a rank of a `group` only the rank's part is loaded.
    Raises InvalidArgument for an unknown reference or a number of ranks that does not divide the
    model, and Unsupported for a model whose cache cannot be rolled back or that cannot be split.
    """
    torch_device = _device(device)
    torch_dtype = _dtype(dtype, torch_device)
    if reference.startswith(synthetic.PREFIX):
        return synthetic.load_synthetic(
            reference, dtype=torch_dtype, device=torch_device, group=group
        )
    files = model_files.resolve(
        reference, tier=tier, cache_dir=cache_dir or model_files.default_cache_dir()
    )
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    config = AutoConfig.from_pretrained(files.folder, trust_remote_code=False)
    check_supported(config)
    _check_attention(config)
    attention.register()
    model: nn.Module
    if group is not None:
        sharding.check_sizes(config, group.seat.size)
        model = load_part(
            files.folder,
            config,
            dtype=torch_dtype,
            device=torch_device,
            attention=attention.IMPLEMENTATION,
            seat=group.seat,
        )
        sharding.connect(model, group)
    else:
        model = AutoModelForCausalLM.from_pretrained(
            files.folder,
            config=config,
            dtype=torch_dtype,
            attn_implementation=attention.IMPLEMENTATION,
            trust_remote_code=False,
            use_safetensors=True,
        )
    model.requires_grad_(False)
    model.eval()
    model.to(torch_device)
    return LoadedModel(
        name=files.name,
        folder=files.folder,
        model=model,
        config=config,
        tokenizer=read_tokenizer(files.folder),
        fingerprint=weights_digest(files.folder),
        eos_token_ids=_eos_token_ids(model),
        vocab_size=int(config.vocab_size),
        context_length=_context_length(config),
        dtype=torch_dtype,
        device=torch_device,
        ranks=group.seat.size if group else 1,
    )


def check_supported(config: Any) -> None:
    """Refuse models whose KV is not plain full attention: they could not be rolled back right."""
    kinds = set(getattr(config, "layer_types", None) or ("full_attention",))
    if kinds - {"full_attention"}:
        raise Unsupported(
            f"layers of type {', '.join(sorted(kinds - {'full_attention'}))} are not supported; "
            "only full attention is",
            field="model",
        )
    windowed = getattr(config, "sliding_window", None) and getattr(
        config, "use_sliding_window", True
    )
    if windowed and not getattr(config, "layer_types", None):
        raise Unsupported("sliding-window attention is not supported", field="model")
    if not getattr(config, "num_attention_heads", None) or config.is_encoder_decoder:
        raise Unsupported(f"{config.model_type} is not a decoder with attention", field="model")


def _check_attention(config: Any) -> None:
    """Refuse architectures that go round the attention interface: paged KV would be ignored."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    architecture = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if not getattr(architecture, "_supports_attention_backend", False):
        raise Unsupported(
            f"{config.model_type} models do not use the attention interface of transformers",
            field="model",
        )


def _context_length(config: Any) -> int:
    """Positions that the model can tell apart whatever else is in the batch.

    The frequencies of "longrope" change for a whole pass once one row stands beyond the original
    length: a row's logits would then depend on its neighbours.
    """
    length = int(config.max_position_embeddings)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        original = rope.get("original_max_position_embeddings")
        length = min(length, int(original or config.original_max_position_embeddings))
    return length


def read_tokenizer(folder: Path) -> TokenizerFiles:
    """The tokenizer in a model folder; FailedPrecondition where there is none."""
    path = folder / "tokenizer.json"
    if path.is_file():
        text = path.read_text(encoding="utf-8")
    else:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        if not tokenizer.is_fast:
            raise FailedPrecondition(f"{folder} has no tokenizer.json and none can be made")
        text = tokenizer.backend_tokenizer.to_str()
    settings = model_files.read_json(folder / "tokenizer_config.json")
    template_path = folder / "chat_template.jinja"
    template = (
        template_path.read_text(encoding="utf-8")
        if template_path.is_file()
        else settings.get("chat_template")
    )
    return TokenizerFiles(
        tokenizer_json=text,
        chat_template=template if isinstance(template, str) else None,
        bos_token=_token_text(settings.get("bos_token")),
        eos_token=_token_text(settings.get("eos_token")),
        fingerprint=_tokenizer_fingerprint(json.loads(text)),
    )


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _tokenizer_fingerprint(tokenizer: dict[str, Any]) -> str:
    """SHA-256 over what decides which ids mean what: vocabulary, merges and added tokens."""
    model = tokenizer["model"]
    identity = {
        "type": model.get("type"),
        "vocab": model.get("vocab"),
        "merges": model.get("merges"),
        "added": [(token["id"], token["content"]) for token in tokenizer.get("added_tokens", [])],
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _eos_token_ids(model: Any) -> tuple[int, ...]:
    for config in (getattr(model, "generation_config", None), model.config):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            return tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)
    return ()


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidArgument("CUDA was asked for, but there is no CUDA device", field="device")
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "float16" and device.type == "cpu":
        raise Unsupported("float16 needs a CUDA device; take bfloat16 or float32", field="dtype")
    if name != "auto":
        return _DTYPES[name]
    fast_bf16 = (
        torch.cuda.is_bf16_supported()
        if device.type == "cuda"
        else torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    return torch.bfloat16 if fast_bf16 else torch.float32
