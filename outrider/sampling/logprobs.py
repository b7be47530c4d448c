"""Log-probabilities to report: the target's own, before any sampling parameter."""

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.sampling.ranking import ranked, window_widths
from outrider.types import PositionLogprobs


def position_logprobs(
    logits: Tensor,  # [rows, vocab], unprocessed
    token_ids: Sequence[int],
    top: int,
) -> list[PositionLogprobs]:
    """The chosen token and the `top` likeliest (equal ones by id) of each row; host sync.

    log_softmax of the unprocessed logits at temperature 1, natural logarithm.
    """
    log_probs = logits.float().log_softmax(-1)
    chosen = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
    own = log_probs.gather(-1, chosen[:, None])[:, 0].tolist()
    tops = _top(log_probs, top) if top else [()] * len(token_ids)
    return [
        PositionLogprobs(token_id, logprob, likeliest)
        for token_id, logprob, likeliest in zip(token_ids, own, tops, strict=True)
    ]


def _top(
    log_probs: Tensor,  # [rows, vocab]
    top: int,
) -> list[tuple[tuple[int, float], ...]]:
    for width in window_widths(log_probs.shape[-1], smallest=top):
        values, ids = ranked(log_probs, width)
        count = min(top, width)
        if width == log_probs.shape[-1] or bool((values[:, count - 1] > values[:, -1]).all()):
            break
    pairs = zip(ids[:, :count].tolist(), values[:, :count].tolist(), strict=True)
    return [tuple(zip(row_ids, row_values, strict=True)) for row_ids, row_values in pairs]
