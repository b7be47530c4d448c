"""What goes to a CUDA device before a captured graph is replayed."""

import numpy as np
import torch


class Inputs:
    """Named int32 arrays on host and device, sent in one copy."""

    def __init__(self, sizes: dict[str, int], device: torch.device) -> None:
        total = sum(sizes.values())
        self._staging = torch.zeros(total, dtype=torch.int32).pin_memory()
        self._device = torch.zeros(total, dtype=torch.int32, device=device)
        ends = np.cumsum(list(sizes.values()))
        places = {
            name: slice(int(end) - size, int(end))
            for (name, size), end in zip(sizes.items(), ends, strict=True)
        }
        self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.host = {name: self._staging.numpy()[place] for name, place in places.items()}
        self.device = {name: self._device[place] for name, place in places.items()}

    def wait(self) -> None:
        """Before `host` is written: until the last copy has read it."""
        self._sent.synchronize()

    def send(self) -> None:
        """Copy, in the order of the stream."""
        self._device.copy_(self._staging, non_blocking=True)
        self._sent.record()
