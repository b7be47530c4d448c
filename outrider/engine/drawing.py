"""Tokens drawn from logits, and the loop that feeds each drawn token to the next pass.

Both tiers draw: the target its own token at every row of a verification, the draft its guesses.
"""

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.engine.rows import Draw, Drawn, Output, Rows
from outrider.sampling import (
    RowParams,
    SparseRows,
    coupled_picks,
    cpu_sampler,
    greedy_picks,
    mask_tokens,
    processed_log_probs,
    sample_sparse_rows,
    truncate_rows,
)
from outrider.types import GenerationSpec, SamplingParams


def run(batch: Tokens[Rows], forward: Callable[[Tokens[Rows]], Tensor]) -> Output:
    """One pass over the batch, and the further ones that its draws ask for."""
    logits = forward(batch)
    drawn = [Drawn() if rows.draw else None for rows in batch]
    if not any(rows.draw for rows in batch):
        return Output(logits, drawn)
    going = [
        (rows, rows.draw, result)
        for rows, result in zip(batch, drawn, strict=True)
        if rows.draw is not None and result is not None
    ]
    _draw(_drawing_rows(batch, logits), [(d, r, rows.num_logits) for rows, d, r in going])
    step = 1
    while going := [item for item in going if item[1].steps > step]:
        next_batch = [
            Rows(result.token_ids[-1:], draw.base_len + step - 1, rows.blocks, 1)
            for rows, draw, result in going
        ]
        _draw(forward(next_batch), [(draw, result, 1) for _, draw, result in going])
        step += 1
    return Output(logits, drawn)


def _drawing_rows(batch: Tokens[Rows], logits: Tensor) -> Tensor:
    """The logits of the entries that draw."""
    if all(rows.draw for rows in batch if rows.num_logits):
        return logits
    parts = torch.split(logits, [rows.num_logits for rows in batch])
    return torch.cat([part for part, rows in zip(parts, batch, strict=True) if rows.draw])


@dataclass(frozen=True, slots=True)
class _Row:
    """One row of logits: whose it is, and which position of the log it decides about."""

    draw: Draw
    drawn: Drawn
    position: int


@torch.inference_mode()
def _draw(logits: Tensor, entries: Tokens[tuple[Draw, Drawn, int]]) -> None:
    """Draw at `count` rows of each entry; logits [rows of all, vocab]."""
    rows = [
        _Row(draw, drawn, draw.base_len + len(drawn.token_ids) + i)
        for draw, drawn, count in entries
        for i in range(count)
    ]
    logits = masked(logits, [(row.draw.spec, row.position) for row in rows])
    coupled = [i for i, row in enumerate(rows) if not row.draw.spec.uses_distributions]
    sampled = [i for i, row in enumerate(rows) if row.draw.spec.uses_distributions]
    if coupled:
        chosen = [rows[i] for i in coupled]
        params = [(row.draw.spec.sampling, row.position) for row in chosen]
        _append(chosen, picks_of(logits[coupled] if sampled else logits, params))
    if sampled:
        _sample(logits[sampled] if coupled else logits, [rows[i] for i in sampled])


def picks_of(
    logits: Tensor,  # [rows, vocab]
    rows: Tokens[tuple[SamplingParams, int]],  # and the position that each decides about
) -> Tensor:  # [rows] int64
    """The coupled pick of each row, which for a greedy row is its argmax."""
    if cpu_sampler.takes(logits):
        return cpu_sampler.sample_rows(logits, cpu_sampler.pack_rows(rows))
    if all(sampling.greedy for sampling, _ in rows):
        return greedy_picks(logits)
    # Greedy rows are point masses here, so noise changes nothing about them.
    log_probs = log_probs_of(logits, [(sampling, 1) for sampling, _ in rows])
    return coupled_picks(log_probs, [s.seed for s, _ in rows], [position for _, position in rows])


def log_probs_of(
    logits: Tensor,  # [rows, vocab]
    specs: Tokens[tuple[SamplingParams, int]],  # and the number of rows of each, in order
) -> Tensor:  # [rows, vocab] float32
    """`processed_log_probs`, by the same kernels as the picks where there are kernels."""
    rows = [(sampling, 0) for sampling, count in specs for _ in range(count)]
    if logits.is_cuda:
        from outrider.sampling import cuda_sampler  # Needs Triton, which a CPU build lacks.

        params = cpu_sampler.pack_rows(rows).to(logits.device)
        return cuda_sampler.processed_rows(logits, params)
    if cpu_sampler.takes(logits):
        return cpu_sampler.processed_rows(logits, cpu_sampler.pack_rows(rows))
    return processed_log_probs(logits, RowParams.build(specs, logits.device))


def _sample(logits: Tensor, rows: Tokens[_Row]) -> None:
    log_probs = log_probs_of(logits, [(row.draw.spec.sampling, 1) for row in rows])
    truncated: SparseRows = truncate_rows(log_probs.exp())
    picks = sample_sparse_rows(
        truncated,
        [row.draw.spec.sampling.seed for row in rows],
        [row.draw.base_len for row in rows],
        [row.position for row in rows],
    )
    for row, distribution in zip(rows, truncated.unpack(), strict=True):
        row.drawn.distributions.append(distribution)
    _append(rows, picks)


def _append(rows: Tokens[_Row], picks: Tensor) -> None:
    for row, pick in zip(rows, picks.tolist(), strict=True):
        row.drawn.token_ids.append(pick)


def masked(
    logits: Tensor,  # [rows, vocab]
    rows: Tokens[tuple[GenerationSpec, int]],  # and the position that each decides about
) -> Tensor:
    """Ban stop ids at positions where min_tokens is not reached, as decoding one by one would."""
    indices: list[int] = []
    banned: list[int] = []
    for index, (spec, position) in enumerate(rows):
        if must_go_on(spec, position):
            indices += [index] * len(spec.stop_ids)
            banned += spec.stop_ids
    return mask_tokens(logits, indices, banned)


def must_go_on(spec: GenerationSpec, position: int) -> bool:
    """Whether a token at this position of the log may not end the generation (min_tokens)."""
    return position < spec.prompt_len + spec.min_tokens
