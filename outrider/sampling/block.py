"""Verification of `rejection` mode: block verification of a chain of guesses.

Source: Sun, Mendlovic, Leviathan, Aharoni, Ro, Beirami, Suresh 2024, "Block Verification
Accelerates Speculative Decoding", Algorithm 2. With guesses x_1..x_k and p_0 = 1:

    p_i = min(p_{i-1} target(x_i | x_<i) / draft(x_i | x_<i), 1)
    S_i = sum_x max(p_i target(x | x_<=i) - draft(x | x_<=i), 0)
    h_k = p_k,  h_i = S_i / (S_i + 1 - p_i)
    accepted = the largest i with uniform_i <= h_i, or 0: there is no early break

A bonus token is drawn from the target when all is accepted; else a recovered token in proportion
to max(p_i target - draft, 0) at i = accepted, over the whole vocabulary. A chain may do without the
row of a bonus, by ending with a run-ahead guess that is verified where the bonus would be drawn.

0/0. S_i + 1 - p_i = 0 means p_i = 1 and S_i = 0, so that target and draft are the same
distribution after x_i. h_i is then 1, which keeps the induction "h_i = 1 wherever p_i = 1 and the
rest agrees": the next ratio is 1, p_{i+1} = 1 and x_{i+1} is accepted too, so nothing is ever drawn
from the empty residual of i. S_i = 0 with p_i < 1 gives h_i = 0, and uniforms are above 0, so there
too the empty residual is never drawn from. Rounding can leave a residual of 0 where the exact one
is of the order 1e-16; the draw then falls back to the target, which is right to that order.

The draft is sparse, so S_i needs the target only at the draft's support: outside it max(..) is
p_i target. A guess without a distribution is a point mass. Noise is keyed by round start and
position (docs/design.md, invariant 4): uniform_i and guess i by the position of x_i, the drawn
token by its own.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.sampling.noise import NoiseKeys, Stream, Words, exponentials, uniforms
from outrider.sampling.sparse import SparseRows

_EMPTY = 1e-30
"""A residual whose largest entry is below this is rounding: see 0/0 above."""


@dataclass(frozen=True, slots=True)
class ChainBatch:
    """Chains of several sequences, padded to the longest; padding may hold anything valid.

    Rows of the target's log-probabilities are ragged: those of sequence b are
    first_row[b] .. first_row[b] + num_guesses[b], row i being target(. | x_<=i). Where not
    has_bonus[b] the last one is missing.
    """

    guess_ids: Tensor  # [batch, width] int64
    draft: SparseRows  # [batch, width, entries]
    num_guesses: Tensor  # [batch] int64
    first_row: Tensor  # [batch] int64
    seeds: Words  # [batch]
    round_starts: Words  # [batch]
    base_lens: Words  # [batch] log length before guess 1
    has_bonus: Tensor | None = None  # [batch] bool; None: all have


class Acceptance(NamedTuple):
    """How many guesses were accepted, and p at that place (what the residual needs)."""

    num_accepted: Tensor  # [batch] int64
    scale: Tensor  # [batch] float64


def accept_chains(
    target_log_probs: Tensor,  # [rows, vocab] processed
    chains: ChainBatch,
) -> Acceptance:
    """The accepted lengths; on the device, no host sync. Needs no row beyond the last guess."""
    batch, width = chains.guess_ids.shape
    device = target_log_probs.device
    if width == 0:
        return Acceptance(
            torch.zeros(batch, dtype=torch.int64, device=device),
            torch.ones(batch, dtype=torch.float64, device=device),
        )
    index = torch.arange(width, device=device)
    is_guess = index < chains.num_guesses[:, None]
    rows = chains.first_row[:, None] + torch.where(is_guess, index, 0)
    target_at_guess = target_log_probs[rows, chains.guess_ids].double().exp()
    at_guess = chains.draft.ids == chains.guess_ids[..., None]
    draft_at_guess = (chains.draft.probs * at_guess).sum(-1)
    scales = _scales(target_at_guess / draft_at_guess)
    limits = _limits(target_log_probs, chains, rows, scales)
    passed = is_guess & (_accept_uniforms(chains, device).double() <= limits)
    num_accepted = torch.where(passed, index + 1, 0).amax(-1)
    return Acceptance(num_accepted, scales.gather(-1, num_accepted[:, None])[:, 0])


def draw_finals(
    target_log_probs: Tensor,  # [rows, vocab] processed
    chains: ChainBatch,
    acceptance: Acceptance,
) -> Tensor:
    """The recovered or bonus token of each sequence, int64 [batch]; one host sync.

    An exponential race over the residual (or the target), keyed by token id. Of a chain that was
    accepted as a whole and has no bonus the entry means nothing.
    """
    rows = acceptance.num_accepted
    if chains.has_bonus is not None:
        missing = ~chains.has_bonus & (rows == chains.num_guesses)
        rows = rows - missing.long()
    target = target_log_probs[chains.first_row + rows].exp()
    weights = _residual(target, chains, acceptance) if chains.guess_ids.shape[1] else target
    accepted: Words = acceptance.num_accepted.cpu().numpy().astype(np.uint64)  # Host sync.
    positions: Words = chains.base_lens + accepted
    keys = NoiseKeys.per_round(chains.seeds, positions, chains.round_starts)
    noise = exponentials(Stream.RESIDUAL, keys, target.shape[-1], device=target.device)
    return race(weights, noise)


def race(
    weights: Tensor,  # [rows, entries] >= 0, not all 0
    noise: Tensor,  # [rows, entries] exponentials
) -> Tensor:
    """Index drawn in proportion to the weights: the first to arrive at exponential / weight."""
    return (noise / weights).argmin(-1)


def _scales(
    ratios: Tensor,  # [batch, width] target / draft at each guess
) -> Tensor:
    """p_0 .. p_width: float64 [batch, width + 1]."""
    scales = [torch.ones_like(ratios[:, 0])]
    for ratio in ratios.unbind(-1):
        scales.append((scales[-1] * ratio).clamp(max=1.0))
    return torch.stack(scales, dim=-1)


def _limits(
    target_log_probs: Tensor,  # [rows, vocab]
    chains: ChainBatch,
    rows: Tensor,  # [batch, width] row before each guess
    scales: Tensor,  # [batch, width + 1]
) -> Tensor:
    """h_1 .. h_width, float64 [batch, width]; column j is h_{j+1}."""
    support = chains.draft.weights > 0
    target = target_log_probs[rows[..., None], chains.draft.ids].double().exp() * support
    outside = (1.0 - target.sum(-1)).clamp(min=0.0)
    inside = (scales[:, :-1, None] * target - chains.draft.probs).clamp(min=0.0).sum(-1)
    # Column i is S_i, for i from 0: the residual mass that guess i + 1 is verified against.
    residual = scales[:, :-1] * outside + inside
    reached, mass = scales[:, 1:-1], residual[:, 1:]
    whole = mass + 1.0 - reached
    inner = torch.where(whole > 0, mass / whole, 1.0)
    last = torch.arange(1, rows.shape[-1] + 1, device=rows.device) == chains.num_guesses[:, None]
    return torch.where(last, scales[:, 1:], torch.nn.functional.pad(inner, (0, 1)))


def _accept_uniforms(chains: ChainBatch, device: torch.device) -> Tensor:
    """uniform_1 .. uniform_width: fp32 [batch, width]."""
    batch, width = chains.guess_ids.shape
    positions = np.add.outer(chains.base_lens, np.arange(width, dtype=np.uint64))
    keys = NoiseKeys.per_round(
        np.repeat(chains.seeds, width), positions.reshape(-1), np.repeat(chains.round_starts, width)
    )
    return uniforms(Stream.ACCEPT, keys, 1, device=device).reshape(batch, width)


def _residual(
    target: Tensor,  # [batch, vocab] fp32 probabilities after the accepted guesses
    chains: ChainBatch,
    acceptance: Acceptance,
) -> Tensor:
    """max(p target - draft, 0), or the target itself where all was accepted: fp32 [batch, vocab].

    It differs from p target at the draft's support only: that is what is subtracted there.
    """
    num_accepted, scale = acceptance
    rejected = num_accepted < chains.num_guesses
    at = num_accepted.clamp(max=chains.guess_ids.shape[1] - 1)
    draft = chains.draft[torch.arange(len(at), device=at.device), at]
    scaled = target * scale.float()[:, None]
    # A token that the draft overrates loses all of it, to exactly 0; padding has probability 0.
    covered = torch.minimum(draft.probs, scaled.gather(-1, draft.ids).double())
    residual = scaled.scatter_add(-1, draft.ids, -covered.float())
    usable = rejected & (residual.amax(-1) > _EMPTY)
    return torch.where(usable[:, None], residual, target)
