"""The target's tier: one pass over a proposal, then the decision."""

import itertools
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.engine.scheduler import Work
from outrider.engine.sequence import Sequence
from outrider.errors import Unsupported
from outrider.sampling import (
    Chain,
    RowParams,
    coupled_picks,
    greedy_picks,
    mask_tokens,
    position_logprobs,
    processed_log_probs,
    verify_blocks,
    verify_tokens,
)
from outrider.types import GenerationSpec, Proposal, Verdict, VerificationMode
from outrider.v1 import worker_pb2
from outrider.wire import proposal_from_proto, require, verified_to_proto
from outrider.worker.sessions import Refusal
from outrider.worker.worker import deadline_of, timing_of


@dataclass(frozen=True, slots=True)
class _Verification:
    """A proposal on its base; row i of its logits decides about position base_len + i."""

    spec: GenerationSpec
    base_len: int
    proposal: Proposal

    @property
    def positions(self) -> range:
        return range(self.base_len, self.base_len + len(self.proposal) + 1)


class Verifier:
    """A `Tier` (outrider.worker.worker) that verifies proposals."""

    def __init__(self, *, vocab_size: int, context_length: int) -> None:
        self._vocab_size = vocab_size
        self._context_length = context_length

    def begin(self, entry: worker_pb2.Entry, sequence: Sequence, spec: GenerationSpec) -> Work:
        if not entry.HasField("verify"):
            raise Refusal(
                worker_pb2.REFUSAL_REASON_UNSUPPORTED, "a target only verifies", field="op"
            )
        require(len(sequence.log) > 0, "a base needs at least one token", "base_len")
        proposal = proposal_from_proto(entry.verify.proposal, vocab_size=self._vocab_size)
        if proposal.parents:
            raise Unsupported("this target verifies chains only", field="proposal.parents")
        base_len = len(sequence.log)
        proposal = proposal.cut(self._context_length - base_len - 1)
        return Work(
            sequence=sequence,
            tokens=[*sequence.log.tokens, *proposal.token_ids],
            num_logits=len(proposal) + 1,
            reserve=base_len + len(proposal),
            deadline=deadline_of(entry.header),
            context=_Verification(spec, base_len, proposal),
        )

    @torch.inference_mode()
    def advance(self, ready: Tokens[tuple[Work, Tensor]]) -> list[worker_pb2.Reply | None]:
        verifications: list[_Verification] = [work.context for work, _ in ready]
        verdicts: list[Verdict | None] = [None] * len(ready)
        for rule in (_verify_greedy, _verify_coupled, _verify_rejection):
            own = [i for i, v in enumerate(verifications) if _rule_of(v.spec) is rule]
            if own:
                chosen = [verifications[i] for i in own]
                raw = _concatenate([ready[i][1] for i in own])
                for i, verdict in zip(own, rule(_masked(raw, chosen), chosen), strict=True):
                    verdicts[i] = verdict
        return [
            worker_pb2.Reply(
                verified=verified_to_proto(
                    _with_logprobs(verdict, verification, logits), timing_of(work)
                )
            )
            for verdict, verification, (work, logits) in zip(
                verdicts, verifications, ready, strict=True
            )
            if verdict is not None
        ]


def _rule_of(spec: GenerationSpec):  # type: ignore[no-untyped-def]
    if spec.sampling.greedy:
        return _verify_greedy
    return _verify_rejection if spec.mode is VerificationMode.REJECTION else _verify_coupled


def _verify_greedy(logits: Tensor, verifications: list[_Verification]) -> list[Verdict]:
    return _by_picks(greedy_picks(logits).tolist(), verifications)


def _verify_coupled(logits: Tensor, verifications: list[_Verification]) -> list[Verdict]:
    picks = coupled_picks(
        _log_probs(logits, verifications),
        [v.spec.sampling.seed for v in verifications for _ in v.positions],
        [position for v in verifications for position in v.positions],
    )
    return _by_picks(picks.tolist(), verifications)


def _by_picks(picks: list[int], verifications: list[_Verification]) -> list[Verdict]:
    verdicts = []
    for verification, own in zip(verifications, _split(picks, verifications), strict=True):
        guesses = verification.proposal.token_ids
        accepted = verify_tokens(own, guesses)
        verdicts.append(
            Verdict((*guesses[:accepted], own[accepted]), accepted, num_proposed=len(guesses))
        )
    return verdicts


def _verify_rejection(logits: Tensor, verifications: list[_Verification]) -> list[Verdict]:
    chains = [
        Chain(
            token_ids=v.proposal.token_ids,
            seed=v.spec.sampling.seed,
            base_len=v.base_len,
            distributions=v.proposal.distributions,
        )
        for v in verifications
    ]
    outcomes = verify_blocks(_log_probs(logits, verifications), chains)
    return [
        Verdict(
            (*chain.token_ids[: outcome.num_accepted], outcome.final),
            outcome.num_accepted,
            num_proposed=len(chain.token_ids),
        )
        for chain, outcome in zip(chains, outcomes, strict=True)
    ]


def _log_probs(logits: Tensor, verifications: list[_Verification]) -> Tensor:
    specs = [(v.spec.sampling, len(v.positions)) for v in verifications]
    return processed_log_probs(logits, RowParams.build(specs, logits.device))


def _masked(logits: Tensor, verifications: list[_Verification]) -> Tensor:
    """Ban stop ids at positions where min_tokens is not reached, as decoding one by one would."""
    rows: list[int] = []
    banned: list[int] = []
    row = 0
    for verification in verifications:
        spec = verification.spec
        for position in verification.positions:
            if position < spec.prompt_len + spec.min_tokens:
                rows += [row] * len(spec.stop_ids)
                banned += spec.stop_ids
            row += 1
    return mask_tokens(logits, rows, banned)


def _split(picks: list[int], verifications: list[_Verification]) -> list[list[int]]:
    iterator = iter(picks)
    return [list(itertools.islice(iterator, len(v.positions))) for v in verifications]


def _with_logprobs(verdict: Verdict, verification: _Verification, logits: Tensor) -> Verdict:
    top = verification.spec.logprobs
    if top is None:
        return verdict
    rows = logits[: len(verdict.token_ids)]
    return Verdict(
        verdict.token_ids,
        verdict.num_accepted,
        verdict.num_proposed,
        logprobs=tuple(position_logprobs(rows, verdict.token_ids, top)),
    )


def _concatenate(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
