"""A target's and a draft's logits over the same tokens: how near they are, who would guess what."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.engine.drawing import log_probs_of, picks_of
from outrider.planner.values import NEVER, Closeness, Track
from outrider.sampling import coupled_scores, truncate_rows
from outrider.types import SamplingParams

_LOWEST = -100.0
"""Log-probability that stands for what a draft cannot say at all: divergences stay finite."""


class LogitsRows(NamedTuple):
    """Rows of both models; row i decides about positions[i] of the log."""

    target: Tensor  # [rows, vocab] float32
    draft: Tensor  # [rows, vocab] float32
    positions: Sequence[int]
    sampling: SamplingParams

    @classmethod
    def of(
        cls, target: Tensor, draft: Tensor, positions: Sequence[int], sampling: SamplingParams
    ) -> "LogitsRows":
        """With one vocabulary: a head may be padded further than the other's."""
        width = max(target.shape[-1], draft.shape[-1])
        return cls(_widened(target, width), _widened(draft, width), positions, sampling)

    def keys(self) -> list[tuple[SamplingParams, int]]:
        return [(self.sampling, position) for position in self.positions]

    def log_probs(self, logits: Tensor, sampling: SamplingParams) -> Tensor:  # [rows, vocab]
        return log_probs_of(logits, [(sampling, len(self.positions))])

    def uncut(self) -> SamplingParams:
        """The temperature alone; 1 where it is 0."""
        return SamplingParams(temperature=self.sampling.temperature or 1.0)


def own_picks(rows: LogitsRows) -> list[int]:
    """The target's token at each row."""
    picks: list[int] = picks_of(rows.target, rows.keys()).tolist()
    return picks


def closeness(rows: LogitsRows) -> Closeness:
    """Means over the rows."""
    uncut, sampling = rows.uncut(), rows.sampling
    target, draft = rows.log_probs(rows.target, uncut), rows.log_probs(rows.draft, uncut)
    probs, ratio = target.exp(), target - draft.clamp(min=_LOWEST)
    divergence = torch.where(probs > 0, probs * ratio, 0.0).sum(-1)
    served = sampling if not sampling.greedy else uncut
    overlap = torch.minimum(
        rows.log_probs(rows.target, served).exp(), rows.log_probs(rows.draft, served).exp()
    ).sum(-1)
    greedy = rows.target.argmax(-1) == rows.draft.argmax(-1)
    coupled = None
    if not sampling.greedy:
        same = picks_of(rows.target, rows.keys()) == picks_of(rows.draft, rows.keys())
        coupled = _mean(same)
    return Closeness(
        len(rows.positions),
        overlap=min(_mean(overlap), 1.0),
        target_entropy=_mean(torch.special.entr(probs).sum(-1)),
        draft_entropy=_mean(torch.special.entr(draft.exp()).sum(-1)),
        divergence=max(_mean(divergence), 0.0),
        greedy_agreement=_mean(greedy),
        coupled_agreement=coupled,
    )


def equality_track(rows: LogitsRows, own: Sequence[int]) -> Track:
    """Guesses are the draft's picks, with the target's noise at temperatures above 0; its further
    candidates come in the order of the same race."""
    picks = picks_of(rows.draft, rows.keys())
    if rows.sampling.greedy:
        scores = rows.draft
    else:
        seeds = [rows.sampling.seed] * len(rows.positions)
        log_probs = rows.log_probs(rows.draft, rows.sampling)
        scores = coupled_scores(log_probs, seeds, list(rows.positions))
    agrees = picks == torch.tensor(own, device=picks.device)
    # The race and the kernel of the pick may see a tie differently: the pick is what is guessed.
    ranks = torch.where(agrees, 0, _ranks(scores, own).clamp(min=1))
    return Track(
        torch.where(agrees, 0.0, NEVER).tolist(), ranks.tolist(), (ranks - 1).clamp(min=0).tolist()
    )


def rejection_track(rows: LogitsRows, own: Sequence[int], seed: int) -> Track:
    """Guesses are drawn from the draft's truncated distribution, as it travels."""
    target = rows.log_probs(rows.target, rows.sampling)
    draft = rows.log_probs(rows.draft, rows.sampling)
    truncated = truncate_rows(draft.exp())
    at = torch.tensor(own, device=draft.device)[:, None]
    sent = (truncated.probs * (truncated.ids == at)).sum(-1)
    ratios = (sent.log() - target.gather(-1, at)[:, 0].double()).clamp(min=NEVER)
    ranks = _ranks(draft, own)
    # Which guess was rejected where the own token is a recovered one: in proportion to what the
    # draft has too much of.
    excess = truncated.probs - target.gather(-1, truncated.ids).double().exp()
    excess = torch.where(truncated.weights > 0, excess.clamp(min=1e-12), 0.0)
    excess *= truncated.ids != at
    excess[:, 0] += (excess.sum(-1) == 0).double()
    generator = torch.Generator(device=draft.device).manual_seed(seed)
    drawn = torch.multinomial(excess, 1, generator=generator)
    guesses: list[int] = truncated.ids.gather(-1, drawn)[:, 0].tolist()
    left_out = ranks - (_ranks(draft, guesses) < ranks).long()
    return Track(ratios.tolist(), ranks.tolist(), left_out.tolist())


def joined(tracks: Sequence[Track]) -> Track:
    """One track of pieces that follow each other."""
    return Track(
        [value for track in tracks for value in track.log_ratios],
        [rank for track in tracks for rank in track.ranks],
        [rank for track in tracks for rank in track.other_ranks],
    )


def _ranks(scores: Tensor, tokens: Sequence[int]) -> Tensor:  # [rows, vocab] -> [rows]
    """The place of a token of each row: higher scores first, then lower ids."""
    at = torch.tensor(tokens, device=scores.device)[:, None]
    own = scores.gather(-1, at)
    before = torch.arange(scores.shape[-1], device=scores.device) < at
    return ((scores > own) | ((scores == own) & before)).sum(-1)


def _widened(logits: Tensor, width: int) -> Tensor:
    missing = width - logits.shape[-1]
    return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits


def _mean(values: Tensor) -> float:  # [rows]
    return float(values.double().mean())
