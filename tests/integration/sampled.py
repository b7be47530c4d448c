"""Tokens that were sampled, against the model's own probabilities."""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from scipy.stats import chisquare

from outrider.client import Completion

Reference = Callable[[Sequence[int]], torch.Tensor]
"""Log probabilities [tokens, vocab] of the model."""


def check_three_tokens(
    runs: Sequence[Completion], reference: Reference, prompt_ids: Sequence[int], *, top_k: int
) -> None:
    """The first three tokens of runs with other seeds are distributed as the model has it."""
    expected = {(): float(len(runs))}
    for _ in range(3):
        expected = {
            (*tokens, token): count * p
            for tokens, count in expected.items()
            for token, p in likeliest(reference([*prompt_ids, *tokens])[-1], top_k)
        }
    seen = Counter(one.token_ids[:3] for one in runs)
    assert set(seen) <= set(expected)
    often = [tokens for tokens, count in expected.items() if count >= 5]
    observed, wanted = [seen[t] for t in often], [expected[t] for t in often]
    assert len(often) >= 6
    observed.append(len(runs) - sum(observed))
    wanted.append(len(runs) - sum(wanted))
    assert chisquare(observed, wanted).pvalue > 1e-4, (seen, expected)


def likeliest(log_probs: torch.Tensor, k: int) -> list[tuple[int, float]]:
    """Tokens with their probabilities, nothing else being possible; log_probs [vocab]."""
    values, token_ids = log_probs.topk(k)
    return list(zip(token_ids.tolist(), values.double().softmax(0).tolist(), strict=True))
