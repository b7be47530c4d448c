"""What a draft does with its probabilities: pick with the target's noise, or sample and say how.

In `coupled` mode the draft makes the same race as the target will, with its own log-probabilities.
In `rejection` mode it samples from a truncated distribution that travels with the guess.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.sampling.block import race
from outrider.sampling.noise import Ints, NoiseKeys, Stream, to_exponentials, uniforms_at
from outrider.sampling.sparse import SparseRows, truncate_rows
from outrider.sampling.verify import coupled_picks
from outrider.types import MAX_SPARSE_ENTRIES, SparseDistribution


def pick_coupled(
    log_probs: Tensor,  # [vocab] processed log-probabilities of the draft
    seed: int,
    position: int,
) -> int:
    """The draft's pick for one position; host sync. `coupled_picks` is its batch version."""
    return int(coupled_picks(log_probs[None], [seed], [position]))


def truncate(
    probs: Tensor,  # [vocab] processed probabilities of the draft
    entries: int = MAX_SPARSE_ENTRIES,
) -> SparseDistribution:
    """The value to sample from and to send; host sync. `truncate_rows` is its batch version."""
    return truncate_rows(probs[None], entries).unpack()[0]


def sample_sparse(
    distribution: SparseDistribution, seed: int, round_start: int, position: int
) -> int:
    """A guess drawn with probability weight / sum of weights exactly."""
    return sample_sparse_many([distribution], [seed], [round_start], [position])[0]


def sample_sparse_many(
    distributions: Sequence[SparseDistribution],
    seeds: Ints,
    round_starts: Ints,
    positions: Ints,
) -> list[int]:
    """`sample_sparse` of several rows; host sync."""
    rows = SparseRows.pack(distributions)
    picks: list[int] = sample_sparse_rows(rows, seeds, round_starts, positions).tolist()
    return picks


def sample_sparse_rows(
    rows: SparseRows,  # [rows, entries]
    seeds: Ints,  # [rows]
    round_starts: Ints,  # [rows]
    positions: Ints,  # [rows]
) -> Tensor:
    """Guesses by an exponential race, keyed by token id: int64 [rows].

    Ids increase, so the first of equal arrivals has the lowest id; padding never arrives.
    """
    keys = NoiseKeys.per_round(seeds, positions, round_starts)
    noise = to_exponentials(uniforms_at(Stream.DRAFT, keys, rows.ids))
    winners = race(rows.weights, noise)
    return torch.gather(rows.ids, -1, winners[:, None])[:, 0]
