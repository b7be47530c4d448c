"""Loading the part of a model that one rank holds.

The model is made without weights, its linears are cut to size, and each parameter is read for
itself: of a safetensors file only the slice that the rank needs, straight from the mapped file to
the device. A folder whose tensors are not named like the model's parameters (older names, another
layout) is read by `transformers` as a whole into CPU memory, and the parts are taken from there.
"""

import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.engine.group import Seat
from outrider.engine.sharding import Part, head_name, shard

logger = logging.getLogger(__name__)

Read = Callable[[str, Part | None], Tensor]
"""Of the parameter of this name the part, or all of it."""


@torch.no_grad()
def load_part(
    folder: Path,
    config: Any,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention: str,
    seat: Seat,
) -> nn.Module:
    """The model in `folder` as far as this rank holds it. Raises what `sharding.shard` raises."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM, GenerationConfig

    # Buffers are made and not loaded, so they are made for real.
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
        )
    full = {name: parameter.shape for name, parameter in model.named_parameters()}
    parts = shard(model, seat)
    tied = f"{head_name(model)}.weight" if config.tie_word_embeddings else ""
    wanted = [name for name, _ in model.named_parameters() if name != tied]
    with _reader(folder, config, full, wanted, dtype) as read:
        for name in wanted:
            # What is read may be a view, of the mapped file or of all columns.
            value = read(name, parts.get(name)).to(
                device, dtype, copy=True, memory_format=torch.contiguous_format
            )
            _set(model, name, value)
    if tied:  # A view: the table of embeddings is whole on every rank.
        _set(model, tied, parts[tied].of(model.get_input_embeddings().weight))
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    model.requires_grad_(False)
    model.eval()
    loaded: nn.Module = model
    return loaded


@contextlib.contextmanager
def _reader(
    folder: Path, config: Any, full: dict[str, torch.Size], wanted: list[str], dtype: torch.dtype
) -> Iterator[Read]:
    """How to read what is wanted of the parameters of these full shapes."""
    from safetensors import safe_open

    with contextlib.ExitStack() as stack:
        files = [
            stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))
            for path in _weight_files(folder)
        ]
        where = {name: file for file in files for name in file.keys()}
        known = {
            name: where[name].get_slice(name)
            for name in wanted
            if name in where and where[name].get_slice(name).get_shape() == [*full[name]]
        }
        if len(known) == len(wanted):
            yield lambda name, part: known[name][part.index if part else slice(None)]
            return
    logger.info("the weights are named otherwise than the model's parameters; reading all of them")
    yield _read_whole(folder, config, dtype)


def _read_whole(folder: Path, config: Any, dtype: torch.dtype) -> Read:
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=dtype, trust_remote_code=False, use_safetensors=True
    )

    def read(name: str, part: Part | None) -> Tensor:
        full: Tensor = whole.get_parameter(name)
        return part.of(full) if part else full

    return read


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
        return [folder / name for name in sorted(names)]
    return sorted(folder.glob("*.safetensors"))


def _set(model: nn.Module, name: str, value: Tensor) -> None:
    parent, _, own = name.rpartition(".")
    parameter = nn.Parameter(value.detach(), requires_grad=False)
    setattr(model.get_submodule(parent), own, parameter)
