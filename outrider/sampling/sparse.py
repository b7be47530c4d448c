"""Draft distributions over few tokens, as tensors.

A draft cuts its distribution to the likeliest tokens and rounds it to integer weights *before* it
samples: probability of a token = its weight / sum of weights, exactly, for the draft that samples
and for the target that verifies (docs/design.md §3).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.types import MAX_SPARSE_ENTRIES, SparseDistribution

MAX_WEIGHT = 65535


@dataclass(frozen=True, slots=True)
class SparseRows:
    """Sparse distributions; entries that are padding have weight 0 and id 0, and come last."""

    ids: Tensor  # [..., entries] int64
    weights: Tensor  # [..., entries] int64

    @property
    def probs(self) -> Tensor:
        """float64 [..., entries]; exact integers divided once. All 0 where all is padding."""
        return self.weights.double() / self.weights.sum(-1, keepdim=True).clamp(min=1)

    def __getitem__(self, index: Tensor | tuple[Tensor, ...]) -> "SparseRows":
        return SparseRows(self.ids[index], self.weights[index])

    @classmethod
    def pack(
        cls, distributions: Sequence[SparseDistribution], device: torch.device | str = "cpu"
    ) -> "SparseRows":
        """[rows, MAX_SPARSE_ENTRIES], whatever the neighbours' lengths, so that sums agree."""

        def padded(rows: list[tuple[int, ...]]) -> Tensor:
            full = [row + (0,) * (MAX_SPARSE_ENTRIES - len(row)) for row in rows]
            tensor = torch.tensor(full, dtype=torch.int64, device=device)
            return tensor.reshape(len(rows), MAX_SPARSE_ENTRIES)

        return cls(
            padded([d.ids for d in distributions]), padded([d.weights for d in distributions])
        )

    def unpack(self) -> list[SparseDistribution]:
        """Values for the wire, from [rows, entries]; host sync."""
        counts = (self.weights > 0).sum(-1).tolist()  # Padding comes last.
        rows = zip(self.ids.tolist(), self.weights.tolist(), counts, strict=True)
        return [
            SparseDistribution(tuple(ids[:count]), tuple(weights[:count]))
            for ids, weights, count in rows
        ]


def point_mass(token_id: int) -> SparseDistribution:
    """The distribution of a guess that was not sampled (n-gram lookup)."""
    return SparseDistribution((token_id,), (1,))


def truncate_rows(
    probs: Tensor,  # [rows, vocab]
    entries: int = MAX_SPARSE_ENTRIES,
) -> SparseRows:
    """The likeliest `entries` tokens of each row, weight = round(prob / highest * 65535), min. 1.

    Tokens of probability 0 are left out. Ids increase; padding comes last.
    """
    top = probs.topk(min(entries, probs.shape[-1]), dim=-1, sorted=False)
    highest = top.values.amax(-1, keepdim=True)
    weights = (top.values / highest * MAX_WEIGHT).round().long().clamp(1, MAX_WEIGHT)
    weights = weights.masked_fill(top.values <= 0, 0)
    order = top.indices.masked_fill(weights == 0, probs.shape[-1]).sort(dim=-1)
    weights = weights.gather(-1, order.indices)
    return SparseRows(order.values.masked_fill(weights == 0, 0), weights)


def is_well_formed(distribution: SparseDistribution, vocab_size: int) -> bool:
    """Whether it obeys the wire contract and stays inside the vocabulary."""
    ids, weights = distribution.ids, distribution.weights
    return (
        0 < len(ids) == len(weights) <= MAX_SPARSE_ENTRIES
        and 0 <= ids[0]
        and all(a < b for a, b in itertools.pairwise(ids))
        and ids[-1] < vocab_size
        and all(0 < weight <= MAX_WEIGHT for weight in weights)
    )
