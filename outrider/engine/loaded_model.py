"""A model in memory, and what others need to know of it."""

import dataclasses
import json
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What an orchestrator needs of a tokenizer, and the fingerprint that a pair must share."""

    tokenizer_json: str
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    fingerprint: str

    def to_json(self) -> bytes:
        """The object that TargetService.GetTokenizer sends."""
        return json.dumps(
            {
                "tokenizer": json.loads(self.tokenizer_json),
                "chat_template": self.chat_template,
                "bos_token": self.bos_token,
                "eos_token": self.eos_token,
            }
        ).encode()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model of `transformers`, ready for the engine."""

    name: str
    folder: Path
    model: nn.Module
    config: Any
    tokenizer: TokenizerFiles
    fingerprint: str
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    context_length: int
    dtype: torch.dtype
    device: torch.device
    quantised: str = ""
    """The scheme that its weights are in, where that is another than `dtype`."""
    ranks: int = 1
    """Ranks that it is split over; `model` is the part of one of them."""
    beside: tuple[torch.device, ...] = ()
    """Devices of the other ranks on this host."""

    @property
    def dtype_name(self) -> str:
        """Of its arithmetic and, after a +, of its weights where they are quantised."""
        name = str(self.dtype).removeprefix("torch.")
        return f"{name}+{self.quantised}" if self.quantised else name

    @property
    def device_id(self) -> str:
        """Names the device among all machines: a GPU by its own id, CPUs by their host's name."""
        return _id_of(self.device)

    @property
    def other_device_ids(self) -> tuple[str, ...]:
        """Those of the other ranks' devices on this host, where they are others."""
        return tuple({_id_of(device) for device in self.beside} - {self.device_id})

    def named(self, name: str) -> "LoadedModel":
        """The same model under another name."""
        return dataclasses.replace(self, name=name)


def _id_of(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda-{torch.cuda.get_device_properties(device).uuid}"
    return f"{device.type}-{socket.gethostname()}"
