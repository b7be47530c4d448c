"""Opening the block store that a worker is told of: settings, layout, and what was measured."""

import platform
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

import outrider
from outrider.config import setting
from outrider.engine import cpu_kernels
from outrider.engine.block_copies import BlockCopies
from outrider.engine.kv_pool import KvShape
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.prefill_cost import measure_prefill
from outrider.errors import InvalidArgument, Unsupported
from outrider.kv_store.access import KvStoreAccess
from outrider.kv_store.blocks import KvLayout
from outrider.kv_store.connection import StoreAddress
from outrider.kv_store.estimate import PrefillCost
from outrider.worker.kv_blocks import KvBlocks
from outrider.worker.worker import Worker

AUTO, ALWAYS = "auto", "always"


@dataclass(frozen=True)
class KvStoreConfig(KvStoreAccess):
    """What a worker can be told about the block store."""

    kv_store_timeout_s: float = setting(2.0, help="seconds that one step with it may take")
    kv_store_ttl_s: float = setting(3600.0, help="seconds that a block lives after its last use")
    kv_store_write_mib_s: float = setting(64.0, help="MiB of blocks written a second, at most")
    kv_restore: str = setting(
        AUTO,
        help="bring KV back where that was measured to beat computing it, and write it only then; "
        "or always",
        choices=(AUTO, ALWAYS),
    )

    @property
    def kv_store(self) -> StoreAddress | None:
        """Raises InvalidArgument."""
        if not self.kv_store_url:
            return None
        for name, value, least, most in (
            ("kv_store_ttl_s", self.kv_store_ttl_s, 1.0, 1e8),
            ("kv_store_write_mib_s", self.kv_store_write_mib_s, 0.001, 1e6),
        ):
            if not least <= value <= most:
                raise InvalidArgument(f"{value} is not in [{least:g}, {most:g}]", field=name)
        return self.kv_store_at(self.kv_store_timeout_s)


@runtime_checkable
class CopyingRunner(Protocol):
    """A runner whose blocks can be copied in and out."""

    block_copies: BlockCopies


def open_store(
    config: KvStoreConfig, worker: Worker, loaded: LoadedModel, incarnation: int
) -> KvBlocks | None:
    """The store that a worker is told of, measured and started; None where it is told of none.

    On the engine's thread, before the worker runs. Raises InvalidArgument, Unsupported (the
    runner's blocks cannot be copied, as in a group) and FailedPrecondition.
    """
    address = config.kv_store
    if address is None:
        return None
    runner, limits = worker.engine.runner, worker.limits
    if not isinstance(runner, CopyingRunner):
        raise Unsupported("KV of a group of ranks cannot be kept in a store", field="kv_store_url")
    token_s, context_s = measure_prefill(
        runner,
        num_blocks=limits.num_blocks,
        max_rows=limits.max_rows,
        context_length=limits.context_length,
    )
    store = KvBlocks(
        worker,
        runner.block_copies,
        layout_of(loaded, runner.block_copies, worker.block_tokens),
        address,
        PrefillCost(token_s, context_s),
        incarnation=incarnation,
        fingerprint=loaded.fingerprint,
        ttl_s=config.kv_store_ttl_s,
        bytes_per_s=config.kv_store_write_mib_s * (1 << 20),
        always=config.kv_restore == ALWAYS,
    )
    store.start()
    return store


def layout_of(
    loaded: LoadedModel, copies: BlockCopies, block_tokens: int, *, rank: int = 0, size: int = 1
) -> KvLayout:
    """What KV of a model is here, on rank `rank` of `size`."""
    shape = KvShape.of(loaded.config, loaded.dtype)
    return KvLayout(
        model=loaded.fingerprint,
        adapter="",
        quantised=loaded.quantised,
        dtype=str(loaded.dtype).removeprefix("torch."),
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        block_tokens=block_tokens,
        block_bytes=copies.block_bytes,
        arrangement=copies.arrangement,
        arithmetic=_arithmetic(loaded.device),
        rank=rank,
        size=size,
    )


def _arithmetic(device: torch.device) -> str:
    """What the bits of a result depend on, beside the model."""
    if device.type == "cuda":
        name, kernels = torch.cuda.get_device_name(device), str(torch.__version__)
    else:
        name, kernels = platform.machine(), cpu_kernels.identity()
    return f"outrider {outrider.__version__}, {device.type} {name}, {kernels}"
