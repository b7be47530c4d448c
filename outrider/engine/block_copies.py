"""Whole KV blocks in and out of a pool as raw bytes: first the keys of all layers, then the values.

`read` may run beside passes, on any thread. It does not know whether the block's place is given to
somebody else meanwhile: ask `BlockManager.holds` afterwards.
"""

import contextlib
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]


class BlockCopies(Protocol):
    """Copies of one pool's blocks."""

    arrangement: str
    """Names the order of numbers in a block."""
    block_bytes: int

    def read(self, block: int, into: Bytes) -> None:
        """Copy a block out, into [block_bytes]; by one thread at a time."""

    def stage(self, data: Bytes) -> Any:
        """Bring a block's bytes to where `write` is quick; on any thread."""

    def write(self, block: int, staged: Any) -> None:
        """Copy a staged block in, on the engine's thread: passes after that see it."""


class HostCopies:
    """Of a pool in this process's memory. Nothing here is torch's: a thread that runs torch's
    operations has a pool of threads of its own, which takes the cores from the passes."""

    def __init__(self, keys: Tensor, values: Tensor, arrangement: str) -> None:
        """Both [layers, blocks, …], contiguous."""
        self.arrangement = arrangement
        self._parts = [_as_bytes(part).numpy() for part in (keys, values)]
        self.block_bytes = sum(part[:, 0].size for part in self._parts)

    def read(self, block: int, into: Bytes) -> None:
        for part, own in zip(self._parts, np.split(into, 2), strict=True):
            np.copyto(own.reshape(len(part), -1), part[:, block])

    def stage(self, data: Bytes) -> Bytes:
        return data

    def write(self, block: int, staged: Bytes) -> None:
        for part, own in zip(self._parts, np.split(staged, 2), strict=True):
            part[:, block] = own.reshape(len(part), -1)


class DeviceCopies:
    """Of a pool on a device, by way of pinned memory. `read` has a stream of its own, beside the
    passes; `write` is in order with them."""

    def __init__(self, keys: Tensor, values: Tensor, arrangement: str) -> None:
        """Both [layers, blocks, …], contiguous."""
        self.arrangement = arrangement
        self._parts = [_as_bytes(part) for part in (keys, values)]
        layers, _, size = self._parts[0].shape
        self.block_bytes = 2 * layers * size
        self._pinned = keys.is_cuda
        self._shape = (2, layers, size)
        self._stream = torch.cuda.Stream(keys.device) if keys.is_cuda else None  # type: ignore[no-untyped-call]
        self._written: torch.cuda.Event | None = None
        self._gathered = torch.empty(self._shape, dtype=torch.uint8, device=keys.device)
        self._out = torch.empty(self._shape, dtype=torch.uint8, pin_memory=self._pinned)

    def read(self, block: int, into: Bytes) -> None:
        with torch.cuda.stream(self._stream):
            if self._stream is not None and self._written is not None:
                self._stream.wait_event(self._written)
            for part, gathered in zip(self._parts, self._gathered, strict=True):
                gathered.copy_(part[:, block])
            self._out.copy_(self._gathered, non_blocking=True)
            if self._stream is not None:
                self._stream.synchronize()
        np.copyto(into, self._out.numpy().reshape(-1))

    def stage(self, data: Bytes) -> Tensor:
        device = self._gathered.device
        with torch.cuda.device(device) if self._pinned else contextlib.nullcontext():
            staged = torch.empty(self._shape, dtype=torch.uint8, pin_memory=self._pinned)
        np.copyto(staged.numpy().reshape(-1), data)
        return staged

    def write(self, block: int, staged: Tensor) -> None:
        arrived = staged.to(self._gathered.device, non_blocking=True)
        for part, own in zip(self._parts, arrived, strict=True):
            part[:, block].copy_(own)
        if self._pinned:
            written = torch.cuda.Event()  # type: ignore[no-untyped-call]
            written.record()
            self._written = written  # Only now: `read` may ask for it.


def _as_bytes(part: Tensor) -> Tensor:
    """[layers, blocks, …] -> [layers, blocks, bytes of a block] uint8, the same memory."""
    return part.flatten(2).view(torch.uint8)
