"""Block verification of proposals given one by one: packing, checks, results.

`block.py` holds the maths on a padded batch; here a ragged list of `Chain` values goes in and one
`BlockOutcome` each comes out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.errors import InvalidArgument
from outrider.sampling.block import ChainBatch, accept_chains, draw_finals
from outrider.sampling.noise import Words
from outrider.sampling.sparse import SparseRows, is_well_formed, point_mass
from outrider.types import SparseDistribution

_PADDING = point_mass(0)


@dataclass(frozen=True, slots=True)
class Chain:
    """A proposal to verify, with the keys of its noise.

    distributions: one per guess, None for a guess that was not sampled; empty when none was.
    base_len: length of the log before the first guess. round_start: length at which the round
    began, the same unless set. Without `bonus` the target has no row after the last guess: no token
    is drawn where all are accepted.
    """

    token_ids: tuple[int, ...]
    seed: int
    base_len: int
    distributions: tuple[SparseDistribution | None, ...] = ()
    round_start: int | None = None
    bonus: bool = True

    @property
    def num_rows(self) -> int:
        """Rows of the target that it needs."""
        return len(self.token_ids) + self.bonus

    def draft(self) -> list[SparseDistribution]:
        given = self.distributions or (None,) * len(self.token_ids)
        return [d or point_mass(t) for d, t in zip(given, self.token_ids, strict=True)]


class BlockOutcome(NamedTuple):
    """Pieces of a Verdict: token_ids[:num_accepted] and then `final` are emitted. It is None where
    all was accepted and there is no bonus."""

    num_accepted: int
    final: int | None


def verify_block(
    target_log_probs: Tensor,  # [k + 1, vocab] processed
    token_ids: Sequence[int],
    seed: int,
    base_len: int,
    distributions: Sequence[SparseDistribution | None] = (),
    round_start: int | None = None,
) -> BlockOutcome:
    """Verify one chain; k = 0 draws one token from the target. Errors as `verify_blocks`."""
    chain = Chain(tuple(token_ids), seed, base_len, tuple(distributions), round_start)
    return verify_blocks(target_log_probs, [chain])[0]


def verify_blocks(
    target_log_probs: Tensor,  # [sum of num_rows, vocab] processed, sequence after sequence
    chains: Sequence[Chain],
) -> list[BlockOutcome]:
    """Verify a ragged batch of chains; host sync.

    Raises InvalidArgument for a proposal that no honest draft can send: use `usable_guesses`
    first to drop and count it.
    """
    rows, vocab_size = target_log_probs.shape
    for chain in chains:
        _check(chain, vocab_size)
    if sum(chain.num_rows for chain in chains) != rows:
        raise InvalidArgument(f"the chains do not need {rows} rows of the target")
    batch = pack_chains(chains, target_log_probs.device)
    acceptance = accept_chains(target_log_probs, batch)
    finals = draw_finals(target_log_probs, batch, acceptance)
    found = zip(chains, acceptance.num_accepted.tolist(), finals.tolist(), strict=True)
    return [
        BlockOutcome(accepted, final if chain.bonus or accepted < len(chain.token_ids) else None)
        for chain, accepted, final in found
    ]


def pack_chains(chains: Sequence[Chain], device: torch.device | str = "cpu") -> ChainBatch:
    """Pad to the longest chain; target rows lie sequence after sequence."""
    lengths = [len(chain.token_ids) for chain in chains]
    width = max(lengths, default=0)

    def words(values: list[int]) -> Words:
        return np.array(values, dtype=np.uint64)

    guesses = [chain.token_ids + (0,) * (width - len(chain.token_ids)) for chain in chains]
    drafts = [chain.draft() + [_PADDING] * (width - len(chain.token_ids)) for chain in chains]
    flat = SparseRows.pack([d for row in drafts for d in row], device)
    shape = (len(chains), width, flat.ids.shape[-1])
    first_rows = np.cumsum([0] + [chain.num_rows for chain in chains[:-1]])[: len(chains)]
    return ChainBatch(
        guess_ids=torch.tensor(guesses, dtype=torch.int64, device=device).reshape(shape[:2]),
        draft=SparseRows(flat.ids.reshape(shape), flat.weights.reshape(shape)),
        num_guesses=torch.tensor(lengths, dtype=torch.int64, device=device),
        first_row=torch.from_numpy(first_rows).to(device),
        seeds=words([chain.seed for chain in chains]),
        round_starts=words(
            [c.base_len if c.round_start is None else c.round_start for c in chains]
        ),
        base_lens=words([chain.base_len for chain in chains]),
        has_bonus=torch.tensor([chain.bonus for chain in chains], device=device),
    )


def usable_guesses(
    token_ids: Sequence[int],
    distributions: Sequence[SparseDistribution | None],
    vocab_size: int,
) -> int:
    """How many leading guesses are well formed: ids inside the vocabulary, valid distributions,
    each guess inside its own. An honest draft never sends others, so cutting there costs it
    nothing and does not make existence depend on value (docs/design.md, invariant 5).
    """
    if distributions and len(distributions) != len(token_ids):
        return 0
    given = distributions or (None,) * len(token_ids)
    for index, (token_id, distribution) in enumerate(zip(token_ids, given, strict=True)):
        if not 0 <= token_id < vocab_size:
            return index
        if distribution is None:
            continue
        if not is_well_formed(distribution, vocab_size) or token_id not in distribution.ids:
            return index
    return len(token_ids)


def _check(chain: Chain, vocab_size: int) -> None:
    if not chain.num_rows:
        raise InvalidArgument("a chain without guesses needs its bonus")
    usable = usable_guesses(chain.token_ids, chain.distributions, vocab_size)
    if usable < len(chain.token_ids):
        raise InvalidArgument(f"guess {usable + 1} or its draft distribution is malformed")
