"""Generic surgery on a loaded model: fewer, faster modules with the same values.

Linears that read the same input (q/k/v, gate/up) become one. On a CPU, norms get a kernel of their
own, and bf16 weights are laid out once as oneDNN wants them. Modules keep their names, so the
model's own code goes on calling `q_proj`, `k_proj`, `v_proj` in that order and notices nothing.
"""

import functools
import weakref

import torch
from torch import Tensor, nn

from outrider.engine import cpu_kernels

_PACKED_FOR_ROWS = 4
"""The layout is tuned for a row count but serves any; rounds carry few rows."""

_FUSED_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class PackedLinear(nn.Module):
    """A linear whose bf16 weight lies in oneDNN's own layout; CPU only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _PACKED_FOR_ROWS)
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        least_rows = _least_rows(self.in_features, self.out_features)
        self.handle: int = torch.ops.outrider_cpu.keep_packed(packed, self.out_features, least_rows)
        weakref.finalize(self, torch.ops.outrider_cpu.drop_packed, self.handle)

    def forward(self, rows: Tensor) -> Tensor:  # [..., rows, in] -> [..., rows, out]
        result: Tensor = torch.ops.outrider_cpu.packed_linear(rows, self.handle, self.bias)
        return result


@functools.cache
def _least_rows(in_features: int, out_features: int) -> int:
    """Rows from which on a row's bits do not depend on how many rows there are, measured.

    oneDNN sums in another order for one row of some widths. Rows must not depend on their
    neighbours (docs/design.md, deterministic mode), so such shapes are padded.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out_features, in_features, generator=generator).to(torch.bfloat16)
    rows = torch.randn(128, in_features, generator=generator).to(torch.bfloat16)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)

    def multiply(some: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(some, packed, None, "none", [], "")
        return result

    together = multiply(rows)
    for count in (1, 2, 4, 8):
        parts = [multiply(rows[i : i + count]) for i in range(0, len(rows), count)]
        if torch.equal(torch.cat(parts), together):
            return count
    return 1


class _FusedFirst(nn.Module):
    """Stands for the first linear of a group: computes all of them, keeps the others' results."""

    def __init__(self, fused: nn.Module, sizes: list[int]) -> None:
        super().__init__()
        self.fused = fused
        self.sizes = sizes
        self.parts: tuple[Tensor, ...] = ()

    def forward(self, rows: Tensor) -> Tensor:
        self.parts = self.fused(rows).split(self.sizes, dim=-1)
        return self.parts[0]


class _FusedOther(nn.Module):
    """Stands for a later linear of a group: hands out what the first one computed."""

    def __init__(self, first: _FusedFirst, index: int) -> None:
        super().__init__()
        self._first = (first,)  # In a tuple, so that it is not registered as a submodule again.
        self._index = index

    def forward(self, rows: Tensor) -> Tensor:
        return self._first[0].parts[self._index]


class FusedNorm(nn.Module):
    """An RMS norm in one kernel; CPU only."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.epsilon = epsilon

    def forward(self, rows: Tensor) -> Tensor:  # [..., width] -> [..., width]
        result: Tensor = torch.ops.outrider_cpu.rms_norm(rows, self.weight, self.epsilon)
        return result


def optimise(model: nn.Module, *, pack: bool = True) -> None:
    """Fuse the modules of `model` in place, and pack them unless something else is done to them."""
    pack = pack and _can_pack(model)
    if next(model.parameters()).device.type == "cpu":
        cpu_kernels.load()
        _replace_norms(model)
    for module in list(model.modules()):
        for names in _FUSED_GROUPS:
            _fuse_group(module, names)
    if pack:
        for module in list(model.modules()):
            for name, child in module.named_children():
                if type(child) is nn.Linear:
                    setattr(module, name, PackedLinear(child))


def _replace_norms(model: nn.Module) -> None:
    """Put `FusedNorm` where a norm computes the same; some scale by 1 + weight, say, and stay."""
    for module in list(model.modules()):
        for name, norm in module.named_children():
            epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
            weight = getattr(norm, "weight", None)
            if not type(norm).__name__.endswith("RMSNorm") or epsilon is None or weight is None:
                continue
            fused = FusedNorm(weight.detach(), float(epsilon))
            generator = torch.Generator().manual_seed(0)
            rows = torch.randn(4, weight.numel(), generator=generator).to(weight.dtype)
            with torch.inference_mode():
                if torch.allclose(fused(rows), norm(rows), rtol=1e-2, atol=1e-5):
                    setattr(module, name, fused)


def _can_pack(model: nn.Module) -> bool:
    weight = next(model.parameters())
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _fuse_group(module: nn.Module, names: tuple[str, ...]) -> None:
    found = [getattr(module, name, None) for name in names]
    linears = [linear for linear in found if isinstance(linear, nn.Linear)]
    if len(linears) != len(names):
        return
    biased = [linear.bias is not None for linear in linears]
    if any(biased) and not all(biased):
        return
    fused = nn.Linear(1, 1, bias=False, device="meta")
    fused.weight = nn.Parameter(torch.cat([lin.weight for lin in linears]), requires_grad=False)
    if all(biased):
        fused.bias = nn.Parameter(torch.cat([lin.bias for lin in linears]), requires_grad=False)
    fused.in_features = linears[0].in_features
    fused.out_features = sum(linear.out_features for linear in linears)
    first = _FusedFirst(fused, [linear.out_features for linear in linears])
    setattr(module, names[0], first)
    for index, name in enumerate(names[1:], start=1):
        setattr(module, name, _FusedOther(first, index))
