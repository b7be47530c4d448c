"""Int8 weights: a decoding pass costs what reading its weights costs, and these are half as many
bytes as bf16.

A weight is rounded to 8 bits with a scale for each output channel; activations are not (on a CPU
they have 16 bits), norms and embeddings stay as they are. The head is rounded too: it is a tenth of
a small draft's time. The products are humming's kernels on CUDA (the extra `quantised`), oneDNN's
on a CPU (cpu_int8.cpp). A row's bits do not depend on what the other rows of its pass are; on a CPU
not on how many there are either.
"""

import dataclasses
import functools
import json
import logging
import os
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.engine import cpu_kernels
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.sharding import ReducedLinear
from outrider.errors import FailedPrecondition, InvalidArgument, Unsupported

logger = logging.getLogger(__name__)

SCHEMES = ("none", "int8")

_LARGEST = 127
_ANY = 1 << 30
_WIDE = 16384
"""Outputs from which on there are tiles for every multiprocessor twice over."""


def quantise(loaded: LoadedModel, scheme: str) -> LoadedModel:
    """Put the linears of `loaded.model` into `scheme`, in place; a model with its own fingerprint.

    Call it after `surgery.optimise(model, pack=False)` and before anything traces or captures.
    Raises InvalidArgument for an unknown scheme, Unsupported where there are no kernels for the
    model's type or none of its weights fits them, and FailedPrecondition without the library.
    """
    if scheme not in SCHEMES:
        raise InvalidArgument(f"{scheme!r} is not one of {', '.join(SCHEMES)}", field="quantize")
    if scheme == "none":
        return loaded
    on_cuda = loaded.device.type == "cuda"
    if on_cuda:
        _check_cuda(loaded.dtype)
    else:
        cpu_kernels.load()
    make = HummingLinear if on_cuda else _cpu_linear_type()
    before, done, left = weight_bytes(loaded.model), 0, []
    for name, module in list(loaded.model.named_modules()):
        for child_name, child in module.named_children():
            if type(child) is not nn.Linear:
                continue
            if on_cuda and not _fits(child):
                left.append(f"{name}.{child_name}")
                continue
            largest = child.weight.abs().amax(1)
            if isinstance(module, ReducedLinear):  # The scales are those of all ranks' features.
                largest = module.group.largest(largest)
            setattr(module, child_name, make(*_to_int8(child.weight, largest), child.bias))
            done += 1
    if not done:
        raise Unsupported(f"{loaded.name} has no linears that int8 kernels take", field="quantize")
    after = weight_bytes(loaded.model)
    logger.info(
        "rounded weights to int8",
        extra={"linears": done, "mib": after >> 20, "mib_before": before >> 20, "left": left},
    )
    fingerprint = f"{loaded.fingerprint}+{scheme}"
    return dataclasses.replace(loaded, fingerprint=fingerprint, quantised=scheme)


def weight_bytes(model: nn.Module) -> int:
    """What the weights of `model` take, those that the CPU kernels hold included."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    held = sum(m.held_bytes for m in model.modules() if isinstance(m, OnednnLinear))
    return held + sum(t.numel() * t.element_size() for t in tensors.values())


def _to_int8(weight: Tensor, largest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """[out, in] -> [out, in] int8, and scales [out] of the weight's type; `largest` [out] is the
    largest size of a weight of each output, where other ranks have weights of it too."""
    largest = weight.abs().amax(1) if largest is None else largest
    scales = (largest.float() / _LARGEST).to(weight.dtype)
    scales = torch.where(scales > 0, scales, 1)
    # In pieces: a float32 copy of a head is 2 GB.
    rounded = torch.empty_like(weight, dtype=torch.int8)
    for first in range(0, len(weight), 8192):
        piece = slice(first, first + 8192)
        steps = weight[piece].float() / scales[piece].float()[:, None]
        rounded[piece] = steps.round().clamp(-_LARGEST, _LARGEST).to(torch.int8)
    return rounded, scales


class OnednnLinear(nn.Module):
    """An int8 linear on a CPU: oneDNN's exact product of integers, activations in 16 bits."""

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.bias = None if bias is None else bias.float()
        self.held_bytes = weight.numel() + 4 * scales.numel()
        packed = torch.ops.onednn.qlinear_prepack(weight, None)
        self.handle: int = torch.ops.outrider_cpu.keep_int8(packed, scales.float())
        weakref.finalize(self, torch.ops.outrider_cpu.drop_int8, self.handle)

    def forward(self, rows: Tensor) -> Tensor:  # [..., in] -> [..., out]
        result: Tensor = torch.ops.outrider_cpu.int8_linear(rows, self.handle, self.bias)
        return result


class PlainInt8Linear(nn.Module):
    """An int8 linear on any CPU, with torch's own kernel: right, and slow for more than a row."""

    weight: Tensor
    scales: Tensor

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.bias = bias
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    def forward(self, rows: Tensor) -> Tensor:  # [..., in] -> [..., out]
        flat = rows.reshape(-1, rows.shape[-1])
        product = torch._weight_int8pack_mm(flat, self.weight, self.scales)
        product = product.view(*rows.shape[:-1], product.shape[-1])
        return product if self.bias is None else product + self.bias


def _cpu_linear_type() -> type[OnednnLinear] | type[PlainInt8Linear]:
    return OnednnLinear if _onednn_is_exact() else PlainInt8Linear


@functools.cache
def _onednn_is_exact() -> bool:
    """Processors without VNNI add products of bytes in 16 bits, which saturate."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-127, 128, (64, 256), generator=generator, dtype=torch.int8)
    weight[:32] = weight[:32].sign() * 127
    rows = torch.randint(0, 256, (16, 256), generator=generator, dtype=torch.uint8)
    rows[:8] = (rows[:8] > 127) * 255
    exact = (rows.to(torch.int64) - 128) @ weight.to(torch.int64).t()
    try:
        packed = torch.ops.onednn.qlinear_prepack(weight, None)
        ones, zeros = torch.ones(64), torch.zeros(64, dtype=torch.int64)
        found = torch.ops.onednn.qlinear_pointwise(
            rows, 1.0, 128, packed, ones, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
    except (RuntimeError, NotImplementedError):
        return False
    return torch.equal(found, exact.float())


class HummingLinear(nn.Module):
    """An int8 linear on CUDA, with humming's kernels."""

    weight: Tensor  # In the library's layout.
    scales: Tensor

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        from humming.layer import HummingLayer

        out_features, in_features = weight.shape
        with torch.cuda.device(weight.device), weight.device:
            layer = HummingLayer(
                shape_n=out_features,
                shape_k=in_features,
                weight_config={"dtype": "uint8"},
                torch_dtype=scales.dtype,
            )
        unsigned = (weight.to(torch.int16) + 128).to(torch.uint8)
        layer.load_from_tensors(
            {"weight": unsigned.view(torch.int32), "weight_scale": scales[:, None]}
        )
        layer.transform()
        self.bias = bias
        self.register_buffer("weight", layer.weight.detach(), persistent=False)
        self.register_buffer("scales", layer.weight_scale.detach(), persistent=False)
        self.out_features = out_features
        self.config: str = layer.humming_config.to_str()
        hopper = torch.cuda.get_device_capability(weight.device) == (9, 0)
        self.tunings = _tunings(in_features, out_features) if hopper else ""

    def forward(self, rows: Tensor) -> Tensor:  # [..., in] -> [..., out]
        flat = rows.reshape(-1, rows.shape[-1])
        product: Tensor = humming_linear(
            flat, self.weight, self.scales, self.out_features, self.config, self.tunings
        )
        product = product.view(*rows.shape[:-1], self.out_features)
        return product if self.bias is None else product + self.bias


@torch.library.custom_op("outrider_int8::humming_linear", mutates_args=())
def humming_linear(
    rows: Tensor,  # [rows, in]
    weight: Tensor,
    scales: Tensor,
    out_features: int,
    config: str,
    tunings: str,
) -> Tensor:  # [rows, out]
    """One operator, so that a compiled layer has nothing of the library to look into.

    Without `tunings` the library chooses, among kernels that keep a row's bits.
    """
    from humming import ops

    product: Tensor = ops.humming_gemm(
        layer_config=config,
        inputs=rows.contiguous(),
        weight=weight,
        weight_scale=scales,
        compute_config=None if tunings else '{"use_batch_invariant": true}',
        tuning_config=tunings or None,
    )
    return product


@humming_linear.register_fake
def _(rows: Tensor, weight: Tensor, scales: Tensor, out_features: int, *_: object) -> Tensor:
    return rows.new_empty(rows.shape[0], out_features)


def _tunings(in_features: int, out_features: int) -> str:
    """For more rows than the first number and at most the second, a kernel (JSON), chosen on an
    H100 (benchmarks/gpu_int8.py shows what they take).

    Each tile of the product is one block's alone. The library's own choice shares the sum of a tile
    among blocks ("stream-K"), which add to it in the order in which they finish, in 16 bits.
    """
    wide = out_features >= _WIDE and out_features % 128 == 0
    depth = 256 if in_features % 256 == 0 else 128
    prefill = _wgmma_kernel(128, resident=1)
    kernels = {
        8: _mma_kernel(8, 64, depth, stages=5),
        16: _mma_kernel(16, 64, depth, stages=5),
        128: _mma_kernel(32, 64, depth, stages=4),
        _ANY: prefill if out_features % 128 == 0 else _mma_kernel(32, 64, depth, stages=4),
    }
    if wide:
        kernels = {
            8: _mma_kernel(8, 128, 128, stages=4, outputs=out_features),
            16: _mma_kernel(16, 128, 128, stages=4, outputs=out_features),
            32: _mma_kernel(32, 64, 128, stages=6, outputs=out_features),
            64: _wgmma_kernel(64, resident=2),
            _ANY: prefill,
        }
    bounds = (0, *kernels)
    return json.dumps([[low, *case] for low, case in zip(bounds, kernels.items(), strict=False)])


def _mma_kernel(
    rows: int, columns: int, depth: int, *, stages: int, outputs: int = 0
) -> dict[str, Any]:
    """Tiles of `rows` x `columns`. With `outputs`, two blocks on a multiprocessor, and one for each
    tile of up to `rows` rows, so that the hardware hands them out as it gets free."""
    kernel: dict[str, Any] = {
        "mma_type": "mma",
        "block_shape": [rows, columns, depth],
        "warp_shape": [rows, 64, 32],
        "num_stages": stages,
        "num_ctas_per_sm": 2 if outputs else 1,
        "use_stream_k": False,
        "use_tma": False,
        "use_warp_spec": False,
    }
    if outputs:
        kernel["num_sms"] = -(-outputs // (2 * columns))
    return kernel


def _wgmma_kernel(rows: int, *, resident: int) -> dict[str, Any]:
    return {
        "mma_type": "wgmma",
        "block_shape": [rows, 128, 64],
        "warp_shape": [rows, 32, 64],
        "num_stages": 4,
        "num_ctas_per_sm": resident,
        "use_stream_k": False,
        "use_tma": True,
        "use_warp_spec": True,
    }


def _fits(linear: nn.Linear) -> bool:
    return linear.in_features % 128 == 0 and linear.out_features % 64 == 0


def _check_cuda(dtype: torch.dtype) -> None:
    if dtype not in (torch.bfloat16, torch.float16):
        raise Unsupported(
            "int8 weights on a GPU need bfloat16 or float16 arithmetic", field="quantize"
        )
    try:
        from humming.utils.nvrtc import get_nvrtc_library_path

        compiler = Path(get_nvrtc_library_path())
    except (ImportError, RuntimeError) as error:
        raise FailedPrecondition(
            f"int8 weights on a GPU need the extra `quantised` (humming-kernels): {error}"
        ) from error
    # The library compiles in processes of its own, where NVRTC looks for its other half here.
    paths = [str(compiler.parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(paths)
