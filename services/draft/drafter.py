"""The draft's tier: k guesses, one forward pass each, for all sessions of the batch at once."""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.engine.scheduler import Work
from outrider.engine.sequence import Sequence
from outrider.sampling import (
    RowParams,
    SparseRows,
    coupled_picks,
    greedy_picks,
    mask_tokens,
    processed_log_probs,
    sample_sparse_rows,
    truncate_rows,
)
from outrider.types import (
    MAX_SPECULATIVE_TOKENS,
    GenerationSpec,
    Proposal,
    SparseDistribution,
    VerificationMode,
)
from outrider.v1 import worker_pb2
from outrider.wire import proposal_to_proto, require, timing_to_proto
from outrider.worker.sessions import Refusal
from outrider.worker.worker import deadline_of, timing_of

PROPOSER_NAME = "draft"


@dataclass(slots=True)
class _Drafting:
    """A proposal in the making, on a base of `base_len` tokens."""

    spec: GenerationSpec
    base_len: int
    wanted: int
    guesses: list[int] = field(default_factory=list)
    distributions: list[SparseDistribution] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Where in the log the next guess stands."""
        return self.base_len + len(self.guesses)


class Drafter:
    """A `Tier` (outrider.worker.worker) that makes proposals with a draft model.

    Guesses are drawn as the verification mode wants them: the argmax at temperature 0, the
    noisy argmax that the target will take (`coupled`), or a sample of the truncated distribution
    that travels with the guess (`rejection`).
    """

    def __init__(self, *, context_length: int) -> None:
        self._context_length = context_length

    def begin(self, entry: worker_pb2.Entry, sequence: Sequence, spec: GenerationSpec) -> Work:
        if not entry.HasField("propose"):
            raise Refusal(
                worker_pb2.REFUSAL_REASON_UNSUPPORTED, "a draft only proposes", field="op"
            )
        wanted = entry.propose.num_speculative_tokens
        require(
            1 <= wanted <= MAX_SPECULATIVE_TOKENS,
            f"{wanted} is not in [1, {MAX_SPECULATIVE_TOKENS}]",
            "num_speculative_tokens",
        )
        require(len(sequence.log) > 0, "a base needs at least one token", "base_len")
        base_len = len(sequence.log)
        # Guess i is drawn from the row at position base_len - 1 + i, which must exist.
        wanted = min(wanted, self._context_length - base_len + 1)
        return Work(
            sequence=sequence,
            tokens=list(sequence.log.tokens),
            num_logits=1,
            reserve=base_len + wanted - 1,
            deadline=deadline_of(entry.header),
            context=_Drafting(spec, base_len, wanted),
        )

    @torch.inference_mode()
    def advance(self, ready: Tokens[tuple[Work, Tensor]]) -> list[worker_pb2.Reply | None]:
        draftings: list[_Drafting] = [work.context for work, _ in ready]
        logits = ready[0][1] if len(ready) == 1 else torch.cat([rows for _, rows in ready])
        self._draw(logits, draftings)
        replies: list[worker_pb2.Reply | None] = []
        for (work, _), drafting in zip(ready, draftings, strict=True):
            if len(drafting.guesses) < drafting.wanted:
                work.extend(drafting.guesses[-1])
                replies.append(None)
            else:
                replies.append(_proposed(work, drafting))
        return replies

    def _draw(self, logits: Tensor, draftings: list[_Drafting]) -> None:
        """Append one guess to each drafting; logits [draftings, vocab]."""
        logits = _masked(logits, draftings)
        if all(d.spec.sampling.greedy for d in draftings):
            _append(draftings, greedy_picks(logits))
            return
        log_probs = processed_log_probs(
            logits, RowParams.build([(d.spec.sampling, 1) for d in draftings], logits.device)
        )
        coupled = [i for i, d in enumerate(draftings) if not _sends_distribution(d.spec)]
        sampled = [i for i, d in enumerate(draftings) if _sends_distribution(d.spec)]
        if coupled:
            _draw_coupled(log_probs[coupled], [draftings[i] for i in coupled])
        if sampled:
            _draw_sampled(log_probs[sampled], [draftings[i] for i in sampled])


def _draw_coupled(log_probs: Tensor, draftings: list[_Drafting]) -> None:
    """Greedy rows are point masses here, so noise changes nothing about them."""
    seeds = [d.spec.sampling.seed for d in draftings]
    _append(draftings, coupled_picks(log_probs, seeds, [d.position for d in draftings]))


def _draw_sampled(log_probs: Tensor, draftings: list[_Drafting]) -> None:
    rows: SparseRows = truncate_rows(log_probs.exp())
    picks = sample_sparse_rows(
        rows,
        [d.spec.sampling.seed for d in draftings],
        [d.base_len for d in draftings],
        [d.position for d in draftings],
    )
    for drafting, distribution in zip(draftings, rows.unpack(), strict=True):
        drafting.distributions.append(distribution)
    _append(draftings, picks)


def _append(draftings: list[_Drafting], picks: Tensor) -> None:
    for drafting, pick in zip(draftings, picks.tolist(), strict=True):
        drafting.guesses.append(pick)


def _sends_distribution(spec: GenerationSpec) -> bool:
    return spec.mode is VerificationMode.REJECTION and not spec.sampling.greedy


def _masked(logits: Tensor, draftings: list[_Drafting]) -> Tensor:
    rows: list[int] = []
    banned: list[int] = []
    for row, drafting in enumerate(draftings):
        spec = drafting.spec
        if drafting.position < spec.prompt_len + spec.min_tokens:
            rows += [row] * len(spec.stop_ids)
            banned += spec.stop_ids
    return mask_tokens(logits, rows, banned)


def _proposed(work: Work, drafting: _Drafting) -> worker_pb2.Reply:
    proposal = Proposal(
        token_ids=tuple(drafting.guesses),
        distributions=tuple(drafting.distributions),
        proposer=PROPOSER_NAME,
    )
    return worker_pb2.Reply(
        proposed=worker_pb2.Proposed(
            proposal=proposal_to_proto(proposal), timing=timing_to_proto(timing_of(work))
        )
    )
