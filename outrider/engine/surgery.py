"""Generic surgery on a loaded model: fewer, faster linears with the same values.

Linears that read the same input (q/k/v, gate/up) become one, and on a CPU in bf16 their weights
are laid out once as oneDNN wants them. Both keep the modules' names, so the model's own code
goes on calling `q_proj`, `k_proj`, `v_proj` in that order and notices nothing.
"""

import torch
from torch import Tensor, nn

_FUSED_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class PackedLinear(nn.Module):
    """A linear whose bf16 weight lies in oneDNN's own layout; CPU only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        # The layout is tuned for a row count but serves any; rounds carry few rows.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, 4)
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, rows: Tensor) -> Tensor:  # [..., in] -> [..., out]
        result: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self.packed, self.bias, "none", [], ""
        )
        return result


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


def optimise(model: nn.Module) -> None:
    """Fuse and pack the linears of `model` in place."""
    pack = _can_pack(model)
    for module in list(model.modules()):
        for names in _FUSED_GROUPS:
            _fuse_group(module, names)
    if pack:
        for module in list(model.modules()):
            for name, child in module.named_children():
                if type(child) is nn.Linear:
                    setattr(module, name, PackedLinear(child))


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
