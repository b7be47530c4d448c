"""What is emitted after a verification by distributions: from logits and chains to outcomes.

In two steps, since what is verified may be completed while the pass runs: a run-ahead guess counts
if it is there by the time the pass is over.
"""

from collections.abc import Sequence as Tokens
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from outrider.engine.drawing import log_probs_of, masked
from outrider.sampling import BlockOutcome, Chain, verify_blocks
from outrider.types import GenerationSpec


class Verified(NamedTuple):
    """Rows of logits that belong to one chain, and the position that each decides about."""

    logits: Tensor  # [rows, vocab]
    spec: GenerationSpec
    positions: range


class Decider(Protocol):
    """Decides about the chains of one pass."""

    def read(self, rows: Tokens[Verified]) -> None:
        """Take in what a pass has computed; back when it is over."""

    def decide(self, chains: Tokens[Chain]) -> list[BlockOutcome]:
        """The outcome of each chain, which are of the rows read last, in their order.

        Raises InvalidArgument for a proposal that no honest draft can send.
        """


class EagerDecider:
    """A `Decider` by tensor operations, on any device."""

    def __init__(self) -> None:
        self._log_probs = torch.empty(0)

    @torch.inference_mode()
    def read(self, rows: Tokens[Verified]) -> None:
        logits = torch.cat([each.logits for each in rows]) if len(rows) > 1 else rows[0].logits
        logits = masked(logits, [(each.spec, place) for each in rows for place in each.positions])
        specs = [(each.spec.sampling, len(each.positions)) for each in rows]
        self._log_probs = log_probs_of(logits, specs)
        if logits.is_cuda:
            torch.cuda.current_stream(logits.device).synchronize()

    @torch.inference_mode()
    def decide(self, chains: Tokens[Chain]) -> list[BlockOutcome]:
        return verify_blocks(self._log_probs, chains)
