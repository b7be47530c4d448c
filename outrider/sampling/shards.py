"""Picks of rows whose vocabulary is spread over the ranks of a group.

Each rank finds the best of its own tokens, with the same noise that one rank would use: noise is a
function of the global token id. What travels is a candidate a row: the highest logit of the rank,
the candidate's score and its id. The score is relative to that highest logit, so that a low
temperature costs no precision, and needs no sum over the vocabulary: a constant of the row changes
no race. `cuda_shards.py` says the same in kernels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.sampling.verify import coupled_scores
from outrider.types import SamplingParams

CANDIDATE = 3
"""float64 numbers of a candidate: the rank's highest logit, score, global token id."""


def shard_candidates(
    logits: Tensor,  # [rows, vocabulary of this rank]
    rows: Sequence[tuple[SamplingParams, int]],  # and the position that each decides about
    first: int,
) -> Tensor:  # [rows, CANDIDATE] float64
    """The best of this rank's tokens at each row; column 0 is global token id `first`.

    Nothing may be cut off (top_k, top_p, min_p): what is cut depends on all tokens.
    """
    logits = logits.float()
    ids = logits.argmax(-1)  # The lowest id among equals.
    # A rank of nothing but -inf has no peak to subtract.
    tops = logits.gather(-1, ids[:, None])[:, 0].clamp_(min=torch.finfo(torch.float32).min)
    scores = torch.zeros_like(tops)
    drawing = [index for index, (sampling, _) in enumerate(rows) if not sampling.greedy]
    if drawing:
        chosen = [rows[index] for index in drawing]
        gaps = (logits[drawing] - tops[drawing, None]) / _temperatures(chosen)[:, None]
        raced = coupled_scores(gaps, [s.seed for s, _ in chosen], [p for _, p in chosen], first)
        ids[drawing] = raced.argmax(-1)
        scores[drawing] = raced.gather(-1, ids[drawing, None])[:, 0]
    return torch.stack((tops.double(), scores.double(), (ids + first).double()), -1)


def join_candidates(
    candidates: Tensor,  # [ranks, rows, CANDIDATE] float64, ranks in the order of the vocabulary
    rows: Sequence[tuple[SamplingParams, int]],
) -> Tensor:  # [rows] int64
    """The pick of each row: the best candidate, of the lowest id among equals."""
    tops, scores, ids = candidates.unbind(-1)
    gaps = (tops - tops.amax(0)) / _temperatures(rows).double()
    best = (gaps + scores).argmax(0)  # The first among equals, whose ids are lower.
    return ids.gather(0, best[None])[0].long()


def _temperatures(rows: Sequence[tuple[SamplingParams, int]]) -> Tensor:  # [rows] float32
    tiny = torch.finfo(torch.float32).tiny
    return torch.tensor([1.0 if s.greedy else max(s.temperature, tiny) for s, _ in rows])
