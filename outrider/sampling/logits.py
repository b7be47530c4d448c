"""From raw logits to the log-probabilities that tokens are drawn from.

The order is min_tokens mask, temperature, top_k, top_p, min_p; each acts on the renormalised
result of the one before. Every row has its own parameters, nothing is computed that no row asks
for, and a row's bits do not depend on its neighbours: only operations that work row by row are
used, and which path a row takes depends on its own parameters and logits alone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.sampling.ranking import ranked, window_widths
from outrider.types import SamplingParams

_TINY = torch.finfo(torch.float32).tiny


class _Cuts(NamedTuple):
    """The cutting parameters of some rows."""

    top_k: Tensor  # [rows] int64, 0 keeps all
    top_p: Tensor  # [rows] float64
    log_min_p: Tensor  # [rows] float32, -inf keeps all

    def rows(self, index: Tensor) -> "_Cuts":  # index: [some] int64
        return _Cuts(*(tensor[index] for tensor in self))


@dataclass(frozen=True, slots=True)
class RowParams:
    """Sampling parameters per row, and which rows need which step (None: no row does)."""

    temperature: Tensor  # [rows] float32, 1 where greedy
    cuts: _Cuts  # [rows]
    any_temperature: bool
    greedy_rows: Tensor | None  # [some] int64: temperature 0
    ranked_rows: Tensor | None  # [some] int64: top_k or top_p, with or without min_p
    min_p_rows: Tensor | None  # [some] int64: min_p alone

    @classmethod
    def build(
        cls, specs: Sequence[tuple[SamplingParams, int]], device: torch.device | str = "cpu"
    ) -> "RowParams":
        """Repeat each sequence's parameters over its number of rows, in order."""
        rows = [params for params, count in specs for _ in range(count)]

        def tensor(value: Callable[[SamplingParams], float], dtype: torch.dtype) -> Tensor:
            return torch.tensor([value(row) for row in rows], dtype=dtype, device=device)

        def where(test: Callable[[SamplingParams], bool]) -> Tensor | None:
            index = [number for number, row in enumerate(rows) if test(row)]
            return torch.tensor(index, dtype=torch.int64, device=device) if index else None

        cuts = _Cuts(
            tensor(lambda row: row.top_k, torch.int64),
            tensor(lambda row: row.top_p, torch.float64),
            tensor(lambda row: math.log(row.min_p) if row.min_p else -math.inf, torch.float32),
        )
        return cls(
            # A temperature below the smallest normal float would be flushed to 0.
            tensor(lambda row: 1.0 if row.greedy else max(row.temperature, _TINY), torch.float32),
            cuts,
            any_temperature=any(row.temperature not in (0.0, 1.0) for row in rows),
            greedy_rows=where(lambda row: row.greedy),
            ranked_rows=where(lambda row: not row.greedy and _is_ranked(row)),
            min_p_rows=where(lambda row: not (row.greedy or _is_ranked(row)) and row.min_p > 0),
        )


def mask_tokens(
    logits: Tensor,  # [rows, vocab]
    row_ids: Sequence[int],
    token_ids: Sequence[int],
) -> Tensor:
    """A copy of the logits in which token_ids[i] cannot come at row row_ids[i] (min_tokens)."""
    if not row_ids:
        return logits
    at = (
        torch.tensor(row_ids, dtype=torch.int64, device=logits.device),
        torch.tensor(token_ids, dtype=torch.int64, device=logits.device),
    )
    return logits.index_put(at, torch.tensor(-math.inf, dtype=logits.dtype, device=logits.device))


def processed_log_probs(
    logits: Tensor,  # [rows, vocab], any float type
    params: RowParams,
) -> Tensor:
    """Normalised log-probabilities, fp32 [rows, vocab], -inf where cut.

    A row with temperature 0 becomes a point mass on its argmax (lowest id among equals). Rows
    with top_k or top_p cost one host sync (how wide a window they need).
    """
    logits = logits.float()
    if params.any_temperature:
        # The highest logit is taken off first: it stays 0 however small the temperature.
        logits = (logits - logits.amax(-1, keepdim=True)) / params.temperature[:, None]
    log_probs = logits.log_softmax(-1)
    if (rows := params.ranked_rows) is not None:
        log_probs[rows] = _cut_ranked(log_probs[rows], params.cuts.rows(rows))
    if (rows := params.min_p_rows) is not None:
        log_probs[rows] = _cut_min_p(log_probs[rows], params.cuts.log_min_p[rows])
    if (rows := params.greedy_rows) is not None:
        picks = logits[rows].argmax(-1)
        log_probs[rows] = -math.inf
        log_probs[rows, picks] = 0.0
    return log_probs


def _is_ranked(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0


def _cut_min_p(
    log_probs: Tensor,  # [rows, vocab]
    log_min_p: Tensor,  # [rows]
) -> Tensor:
    """min_p is relative to the highest probability, so it needs no order and no sum."""
    floor = log_probs.amax(-1, keepdim=True) + log_min_p[:, None]
    return log_probs.masked_fill(log_probs < floor, -math.inf).log_softmax(-1)


def _cut_ranked(
    log_probs: Tensor,  # [rows, vocab]
    cuts: _Cuts,  # [rows]
) -> Tensor:
    """top_k, top_p and min_p by rank, in the narrowest window that shows the exact result."""
    out = torch.full_like(log_probs, -math.inf)
    pending = torch.arange(len(log_probs), device=log_probs.device)
    for width in window_widths(log_probs.shape[-1]):
        values, ids = ranked(log_probs[pending], width)
        kept, settled = _keep(values, cuts.rows(pending), log_probs.shape[-1])
        normalised = values.masked_fill(~kept, -math.inf).log_softmax(-1)
        # Rows that are not settled are written too, and written again by a wider window.
        out[pending] = torch.full_like(out[pending], -math.inf).scatter(-1, ids, normalised)
        pending = pending[~settled]  # Host sync: how many rows need a wider window.
        if not len(pending):
            break
    return out


def _keep(
    values: Tensor,  # [rows, width] log-probabilities by rank
    cuts: _Cuts,  # [rows]
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """Which ranks are kept (bool [rows, width]); whether the window proves it (bool [rows])."""
    width = values.shape[-1]
    top_p = cuts.top_p[:, None]
    top_k = torch.where(cuts.top_k > 0, cuts.top_k, vocab_size).clamp(max=vocab_size)[:, None]
    probs = values.double().exp()
    reached = probs.cumsum(-1)
    before = torch.nn.functional.pad(reached[:, :-1], (1, 0))
    # What the top_k sum up to is what top_p counts in; without top_k the row is normalised.
    mass = torch.where(top_k < vocab_size, reached.gather(-1, top_k.clamp(max=width) - 1), 1.0)
    kept = torch.arange(width, device=values.device) < top_k
    kept &= (before < top_p * mass) | (top_p >= 1.0)
    kept[:, 0] = True
    kept &= values >= values[:, :1] + cuts.log_min_p[:, None]
    last = values.gather(-1, kept.sum(-1, keepdim=True) - 1)
    border = values[:, -1:]
    settled = (last > border) & ((top_p >= 1.0) | (top_k <= width) | (top_k == vocab_size))
    settled |= border == -math.inf  # Every token that can come at all is in the window.
    return kept, settled[:, 0] | (width == vocab_size)
