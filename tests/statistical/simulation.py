"""A tiny world to test distributions in: two contextual models and a loop of rounds.

Models are tables over a vocabulary of 16: the next token depends on the two tokens before it, so
the joint distribution of the first tokens can be enumerated exactly. The loop drives the
functions that the services use, many sessions at once; the seed of a session is its number.
"""

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from outrider.sampling import (
    ChainBatch,
    SparseRows,
    accept_chains,
    coupled_picks,
    draw_finals,
    sample_sparse_rows,
    truncate_rows,
    verify_tokens_batch,
)

VOCAB = 16
EMITTED = 4
MAX_K = 8
TRUNCATION = 4


@dataclass(frozen=True)
class Models:
    """Log-probabilities by context: float32 [256, 16] each."""

    target: Tensor
    draft: Tensor

    @property
    def sparse(self) -> SparseRows:
        return truncate_rows(self.draft.exp(), TRUNCATION)

    @classmethod
    def build(cls, kind: str) -> "Models":
        generator = torch.Generator().manual_seed(7)
        logits = torch.randn(VOCAB**2, VOCAB, generator=generator) * 1.5
        other = torch.randn(VOCAB**2, VOCAB, generator=generator) * 1.5
        draft = {
            "near": logits + 0.5 * other,
            "far": other,
            # Sure of one token: the other three of its four have draft << target.
            "sure": 12.0 * (logits + 0.5 * other),
            # The target's favourites, all alike: the residual lies inside the draft's support too.
            "flat": 0.1 * logits,
            # Likes what the target does not.
            "opposite": -logits,
        }[kind]
        if kind == "flat":
            logits = 2.0 * logits
        return cls(logits.log_softmax(-1), draft.log_softmax(-1))


@dataclass(frozen=True)
class Faults:
    """What a negative control puts in."""

    wrong_report: bool = False
    position_alone: bool = False
    drop_by_value: bool = False


@dataclass
class Run:
    """Emitted tokens [samples, EMITTED], and what happened."""

    tokens: Tensor
    counts: Counter[str] = field(default_factory=Counter)
    expected_accepted: float = 0.0
    first_accepted: Tensor = field(default_factory=lambda: torch.zeros(0))
    first_round: tuple[Tensor, ChainBatch] | None = None


def context(log: Tensor, lengths: Tensor) -> Tensor:
    """Table row of the last two tokens of each log."""
    rows = torch.arange(len(log))
    return log[rows, lengths - 2] * VOCAB + log[rows, lengths - 1]


def guesses_per_round(sessions: Tensor, round_number: int, ks: tuple[int, ...]) -> Tensor:
    """k changes between rounds and sessions."""
    return torch.tensor(ks)[(sessions + round_number) % len(ks)]


def simulate(
    models: Models,
    mode: str,
    samples: int,
    ks: tuple[int, ...],
    faults: Faults = Faults(),
) -> Run:
    """Rounds of propose, verify, commit until each session has EMITTED tokens."""
    prompt_len = 2
    log = torch.zeros(samples, prompt_len + EMITTED + MAX_K + 1, dtype=torch.int64)
    lengths = torch.full((samples,), prompt_len)
    run = Run(log[:, prompt_len : prompt_len + EMITTED])
    for round_number in range(EMITTED):
        active = torch.nonzero(lengths < prompt_len + EMITTED)[:, 0]
        if not len(active):
            break
        k = guesses_per_round(active, round_number, ks)
        logs, base = log[active], lengths[active]
        propose(models, mode, logs, base, active, k, faults)
        chains = chains_of(models, mode, logs, base, active, k, faults)
        accepted, finals, bound = verify(models, mode, logs, base, chains)
        if round_number == 0:
            run.first_accepted, run.first_round = accepted, (logs.clone(), chains)
        rows = torch.arange(len(active))
        logs[rows, base + accepted] = finals
        log[active] = logs
        lengths[active] = base + accepted + 1
        count(run, accepted, chains.num_guesses, bound)
    return run


def count(run: Run, accepted: Tensor, k: Tensor, bound: Tensor) -> None:
    run.counts["rounds"] += len(k)
    run.counts["proposed"] += int(k.sum())
    run.counts["accepted"] += int(accepted.sum())
    run.counts["bonus"] += int((accepted == k).sum())
    run.counts["recovered"] += int((accepted < k).sum())
    run.counts["inside"] += int(((accepted < k) & (accepted > 0)).sum())
    run.expected_accepted += float(bound.sum())


def words(values: Tensor) -> np.ndarray:
    return values.numpy().astype(np.uint64)


def propose(
    models: Models,
    mode: str,
    logs: Tensor,
    base: Tensor,
    sessions: Tensor,
    k: Tensor,
    faults: Faults,
) -> None:
    """Write the guesses behind the logs."""
    starts = words(torch.zeros_like(base) if faults.position_alone else base)
    for step in range(int(k.max())):
        row = context(logs, base + step)
        if mode == "coupled":
            guess = coupled_picks(models.draft[row], words(sessions), words(base + step))
        elif mode == "point_mass":
            guess = (row * 7 + 3) % VOCAB if step % 3 == 2 else models.draft[row].argmax(-1)
        else:
            guess = sample_sparse_rows(
                models.sparse[row], words(sessions), starts, words(base + step)
            )
        logs[torch.arange(len(logs)), base + step] = guess


def chains_of(
    models: Models,
    mode: str,
    logs: Tensor,
    base: Tensor,
    sessions: Tensor,
    k: Tensor,
    faults: Faults,
) -> ChainBatch:
    """What travels to the target."""
    width = int(k.max())
    steps = torch.arange(width)
    guesses = logs.gather(1, base[:, None] + steps)
    if mode == "rejection":
        contexts = torch.stack([context(logs, base + step) for step in range(width)], dim=1)
        draft = models.sparse
        if faults.wrong_report:  # The right tokens, as of another temperature.
            draft = replace(draft, weights=(draft.weights.double().sqrt() * 256).long().clamp(1))
        draft = draft[contexts]
    else:
        draft = SparseRows(guesses[..., None], torch.ones_like(guesses)[..., None])
    if faults.drop_by_value:
        odd = (guesses % 2 == 1) & (steps < k[:, None])
        k = torch.where(odd.any(1), odd.long().argmax(1), k)
    starts = torch.zeros_like(base) if faults.position_alone else base
    first_row = torch.arange(len(base)) * (width + 1)
    return ChainBatch(guesses, draft, k, first_row, words(sessions), words(starts), words(base))


def target_rows(models: Models, logs: Tensor, base: Tensor, width: int) -> Tensor:
    """The target's log-probabilities after each guess, [batch * (width + 1), 16]."""
    contexts = torch.stack([context(logs, base + step) for step in range(width + 1)], dim=1)
    return models.target[contexts.reshape(-1)]


def verify(
    models: Models, mode: str, logs: Tensor, base: Tensor, chains: ChainBatch
) -> tuple[Tensor, Tensor, Tensor]:
    """Number accepted, the target's own token, and the number that theory expects."""
    width = chains.guess_ids.shape[1]
    rows = target_rows(models, logs, base, width)
    if mode == "coupled":
        positions = (base[:, None] + torch.arange(width + 1)).reshape(-1)
        picks = coupled_picks(rows, np.repeat(chains.seeds, width + 1), words(positions))
        picks = picks.reshape(-1, width + 1)
        accepted = verify_tokens_batch(picks, chains.guess_ids, chains.num_guesses)
        return accepted, picks.gather(1, accepted[:, None])[:, 0], torch.zeros(1)
    acceptance = accept_chains(rows, chains)
    finals = draw_finals(rows, chains, acceptance)
    return acceptance.num_accepted, finals, block_bound(rows, chains)


def ratios(rows: Tensor, chains: ChainBatch) -> Tensor:
    """target / draft at each guess, float64 [batch, width]; 0 beyond the last guess."""
    width = chains.guess_ids.shape[1]
    target = rows.reshape(-1, width + 1, VOCAB)[:, :width].double().exp()
    dense = torch.zeros_like(target).scatter_add(2, chains.draft.ids, chains.draft.probs)
    at = chains.guess_ids[..., None]
    ratio = (target.gather(2, at) / dense.gather(2, at))[..., 0]
    return torch.where(torch.arange(width) < chains.num_guesses[:, None], ratio, 0.0)


def block_bound(rows: Tensor, chains: ChainBatch) -> Tensor:
    """Sum over i of p_i: the paper's P(accepted >= i | guesses), so the expected number."""
    reached, total = torch.ones(len(chains.guess_ids), dtype=torch.float64), 0.0
    for ratio in ratios(rows, chains).unbind(1):
        reached = (reached * ratio).clamp(max=1)
        total = total + reached
    return total


def joint_probabilities(target: Tensor) -> np.ndarray:
    """Exact probability of each sequence of EMITTED tokens after the prompt (0, 0)."""
    table = target.double().exp().reshape(VOCAB, VOCAB, VOCAB)
    joint = table[0, 0]
    joint = joint[:, None] * table[0]
    for _ in range(EMITTED - 2):
        joint = joint[..., None] * table
    return joint.reshape(-1).numpy()


def joint_p_value(run: Run, target: Tensor) -> float:
    """Chi-square of the joint histogram; cells that expect fewer than 5 are merged."""
    powers = VOCAB ** torch.arange(EMITTED - 1, -1, -1)
    observed = np.bincount((run.tokens * powers).sum(1).numpy(), minlength=VOCAB**EMITTED)
    expected = joint_probabilities(target) * len(run.tokens)
    order = np.argsort(-expected, kind="stable")
    expected, observed = expected[order], observed[order]
    single = int((expected >= 5).sum())
    # Rare cells are merged in order of expectation into groups of about 5.
    groups = np.floor(np.cumsum(expected[single:]) / 5.000001).astype(int)
    groups = np.minimum(groups, max(groups[-1] - 1, 0))
    rare = [np.bincount(groups, weights=values[single:]) for values in (observed, expected)]
    cells = [
        np.concatenate([v[:single], r]) for v, r in zip((observed, expected), rare, strict=True)
    ]
    cells[1] *= cells[0].sum() / cells[1].sum()
    return float(stats.chisquare(*cells).pvalue)
