"""Which part of a model each rank of a group holds (tensor parallel; Shoeybi et al. 2019,
"Megatron-LM").

Attention is split by heads and MLPs by intermediate features, so that what goes into `o_proj` and
`down_proj` is spread over the ranks and what comes out of them is a sum over the ranks. The output
head is split by vocabulary. Which linears are which the tensor-parallel plan of `transformers`
says; a model whose plan asks for more is refused. Embeddings and norms are on every rank: a lookup
then needs no further all-reduce, and a tied head is a view of them.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from outrider.engine.group import Group, Seat, summed
from outrider.errors import InvalidArgument, Unsupported

_COLUMNS, _ROWS = "colwise", "rowwise"
_ON_EVERY_RANK = ("replicated", "embedding", "vocab")
"""How the names of styles begin for modules that stay whole here."""


@dataclass(frozen=True, slots=True)
class Part:
    """Of a full parameter the places `start` to `start + size` of dimension `dim`."""

    dim: int
    start: int
    size: int

    def of(self, full: Tensor) -> Tensor:
        """A view."""
        return full.narrow(self.dim, self.start, self.size)

    @property
    def index(self) -> tuple[slice, ...]:
        """The same, for what is indexed like a tensor."""
        return (*[slice(None)] * self.dim, slice(self.start, self.start + self.size))


def check_sizes(config: Any, ranks: int) -> None:
    """Refuse a number of ranks that heads, features or vocabulary cannot be split over evenly."""
    heads = config.num_attention_heads
    sizes = {
        "attention heads": heads,
        "key-value heads": getattr(config, "num_key_value_heads", None) or heads,
        "intermediate features": getattr(config, "intermediate_size", None),
        "tokens of vocabulary": config.vocab_size,
    }
    known = {name: size for name, size in sizes.items() if size}
    common = math.gcd(*known.values())
    if common % ranks:
        allowed = [size for size in range(1, common + 1) if common % size == 0]
        told = ", ".join(f"{size} {name}" for name, size in known.items())
        raise InvalidArgument(
            f"{told} cannot be split evenly over {ranks} ranks; allowed: "
            f"{', '.join(map(str, allowed))}",
            field="tensor_parallel",
        )


def shard(model: Any, seat: Seat) -> dict[str, Part]:
    """Make the split linears of a model on the meta device as small as their part for this rank.

    Returns the part of each parameter that is not whole, by name. The names stay as they are. A
    row-parallel linear's bias is whole and rank 0's alone: it must be added once. Raises
    Unsupported for architectures without a plan of columns and rows.
    """
    parts: dict[str, Part] = {}
    for name, linear, style in _planned(model):
        if style == _COLUMNS:
            parts |= _split(name, linear, 0, seat)
        else:
            parts |= _split(name, linear, 1, seat)
            if seat.rank > 0:
                linear.register_parameter("bias", None)
    parts |= _split(head_name(model), model.get_output_embeddings(), 0, seat)
    return parts


def head_name(model: Any) -> str:
    """The name of the output head."""
    head = model.get_output_embeddings()
    return next(str(name) for name, module in model.named_modules() if module is head)


def connect(model: Any, group: Group) -> None:
    """Let the row-parallel linears add up what the ranks have; once their weights are loaded."""
    for name, linear, style in list(_planned(model)):
        if style == _ROWS:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, ReducedLinear(linear, group))


class ReducedLinear(nn.Module):
    """A linear whose input features are spread over the ranks: its output is their sum."""

    def __init__(self, inner: nn.Linear, group: Group) -> None:
        super().__init__()
        self.inner: nn.Module = inner
        self.group = group
        # Numbers, because a compiled layer looks at nothing else.
        self._key, self._one_shot_bytes = group.key, group.one_shot_bytes

    def forward(self, rows: Tensor) -> Tensor:  # [..., features of this rank] -> [..., out]
        return summed(self.inner(rows), self._key, self._one_shot_bytes)


def _planned(model: Any) -> Iterator[tuple[str, nn.Linear, str]]:
    """Name, module and style of each linear that is split, the head excepted."""
    plan: dict[str, str] = getattr(model.config, "base_model_tp_plan", None) or {}
    styles = {
        pattern: style for pattern, style in plan.items() if not style.startswith(_ON_EVERY_RANK)
    }
    unknown = sorted(set(styles.values()) - {_COLUMNS, _ROWS})
    if unknown or not styles:
        why = f"asks for {', '.join(unknown)}" if unknown else "does not exist"
        raise Unsupported(
            f"{model.config.model_type} models cannot be split: their tensor-parallel plan in "
            f"transformers {why}; {_COLUMNS} and {_ROWS} are supported",
            field="tensor_parallel",
        )
    prefix = f"{model.base_model_prefix}."
    for pattern, style in styles.items():
        matcher = re.compile(re.escape(prefix + pattern).replace(r"\*", r"\d+"))
        for name, module in model.named_modules():
            if matcher.fullmatch(name):
                yield name, cast(nn.Linear, module), style


def _split(name: str, linear: nn.Linear, dim: int, seat: Seat) -> dict[str, Part]:
    full = linear.weight.shape[dim]
    if full % seat.size:
        raise InvalidArgument(
            f"{name} has {full} features, which cannot be split evenly over {seat.size} ranks",
            field="tensor_parallel",
        )
    size = full // seat.size
    part = Part(dim, seat.rank * size, size)
    parts = {f"{name}.weight": part}
    linear.weight = nn.Parameter(part.of(linear.weight).contiguous(), requires_grad=False)
    if dim == 1:
        linear.in_features = size
        return parts
    linear.out_features = size
    if linear.bias is not None:
        linear.bias = nn.Parameter(part.of(linear.bias).contiguous(), requires_grad=False)
        parts[f"{name}.bias"] = part
    return parts
