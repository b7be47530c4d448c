"""Rounds in which a run-ahead guess may be there before the verdict: `simulation` with one more
guess behind the proposal, verified at the row that the bonus would be drawn from.
"""

from dataclasses import dataclass, replace

import torch
from simulation import (
    EMITTED,
    MAX_K,
    VOCAB,
    Faults,
    Models,
    Run,
    chains_of,
    context,
    guesses_per_round,
    propose,
    target_rows,
    verify,
    words,
)
from torch import Tensor

from outrider.sampling import sample_sparse_rows
from outrider.sampling.block import Acceptance, ChainBatch, draw_finals

ARRIVALS = 0.7


@dataclass(frozen=True)
class Wrong:
    """What a negative control puts in."""

    likely_alone: bool = False
    """The guess is verified only if the target finds it likely."""
    equal_alone: bool = False
    """It is verified only if it is the bonus that would have been drawn."""
    noise_of_its_own_round: bool = False
    """It is sampled as the first guess of a round that starts there; after a token recovered just
    before it, such a round comes."""
    bonus_for_recovered: bool = False
    """Where it is rejected a bonus is drawn, as if it had not been there."""
    bonus_besides: bool = False
    """Where it is accepted the bonus comes all the same, behind it."""


def simulate_ahead(
    models: Models,
    samples: int,
    ks: tuple[int, ...],
    wrong: Wrong = Wrong(),
    arrivals: float = ARRIVALS,
) -> Run:
    """As `simulate` in `rejection` mode; a round has its run-ahead guess in time or not, whatever
    the guess is. A token that is a multiple of 5 is a miss: what follows it was not prepared."""
    clock = torch.Generator().manual_seed(11)
    prompt_len = 2
    log = torch.zeros(samples, prompt_len + EMITTED + MAX_K + 1, dtype=torch.int64)
    lengths = torch.full((samples,), prompt_len)
    run = Run(log[:, prompt_len : prompt_len + EMITTED])
    for round_number in range(EMITTED):
        active = torch.nonzero(lengths < prompt_len + EMITTED)[:, 0]
        if not len(active):
            break
        logs, base = log[active], lengths[active]
        rows = torch.arange(len(active))
        missed = (logs[rows, base - 1] % 5 == 0) & (base > prompt_len)
        k = torch.where(missed, 0, guesses_per_round(active, round_number, ks))
        ahead = torch.rand(len(active), generator=clock) < arrivals
        guess(models, logs, base, active, k, wrong)
        ahead &= chosen_by_value(models, logs, base, active, k, wrong)
        chains = chains_of(models, "rejection", logs, base, active, k + ahead.long(), Faults())
        chains = replace(chains, has_bonus=~ahead)
        accepted, finals, _ = verify(models, "rejection", logs, base, chains)
        caught = ahead & (accepted > k)
        failed = ahead & (accepted == k)
        if wrong.bonus_for_recovered:
            finals = torch.where(failed, bonuses(models, logs, base, chains, k), finals)
        if wrong.bonus_besides:
            finals = torch.where(caught, bonuses(models, logs, base, chains, k), finals)
        own = rows if wrong.bonus_besides else rows[~caught]
        logs[own, (base + accepted)[own]] = finals[own]
        log[active] = logs
        lengths[active] = base + accepted + (1 if wrong.bonus_besides else ~caught)
        run.counts["rounds"] += len(k)
        run.counts["plain"] += int(((k == 0) & ahead).sum())
        run.counts["caught"] += int(caught.sum())
        run.counts["failed"] += int(failed.sum())
        run.counts["bonus"] += int((~ahead & (accepted == k)).sum())
        run.counts["before"] += int((ahead & (accepted == k - 1)).sum())
        run.counts["inside"] += int((accepted < k).sum())
    return run


def guess(
    models: Models, logs: Tensor, base: Tensor, sessions: Tensor, k: Tensor, wrong: Wrong
) -> None:
    """Write k guesses behind the logs, and the run-ahead guess."""
    propose(models, "rejection", logs, base, sessions, k + 1, Faults())
    if wrong.noise_of_its_own_round:
        place = base + k
        sparse = models.sparse[context(logs, place)]
        logs[torch.arange(len(logs)), place] = sample_sparse_rows(
            sparse, words(sessions), words(place), words(place)
        )


def chosen_by_value(
    models: Models, logs: Tensor, base: Tensor, sessions: Tensor, k: Tensor, wrong: Wrong
) -> Tensor:
    """Which run-ahead guesses a fault lets pass."""
    rows = torch.arange(len(logs))
    guesses = logs[rows, base + k]
    passes = torch.ones(len(logs), dtype=torch.bool)
    if wrong.likely_alone:
        passes &= models.target[context(logs, base + k), guesses].exp() > 0.1
    if wrong.equal_alone:
        chains = chains_of(models, "rejection", logs, base, sessions, k, Faults())
        passes &= guesses == bonuses(models, logs, base, chains, k)
    return passes


def bonuses(models: Models, logs: Tensor, base: Tensor, chains: ChainBatch, k: Tensor) -> Tensor:
    """What is drawn after k accepted guesses where nothing runs ahead."""
    target = target_rows(models, logs, base, chains.guess_ids.shape[1])
    chains = replace(chains, num_guesses=k, has_bonus=None)
    return draw_finals(target, chains, Acceptance(k, torch.ones(len(k), dtype=torch.float64)))


def build_blind() -> Models:
    """A draft that looks at no context: it overrates one token everywhere and underrates another,
    so what its noise makes of one place is what it makes of every other."""
    generator = torch.Generator().manual_seed(7)
    draft = torch.full((VOCAB,), 0.001)
    draft[:4] = torch.tensor([0.88, 0.1, 0.01, 0.01])
    target = torch.full((VOCAB,), 0.025)
    target[:2] = torch.tensor([0.25, 0.4])
    logits = target.log() + 0.3 * torch.randn(VOCAB**2, VOCAB, generator=generator)
    return Models(logits.log_softmax(-1), draft.log().expand(VOCAB**2, -1).log_softmax(-1))
