"""The target's tier: one pass over a proposal, then the decision."""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.engine.drawing import log_probs_of, masked, must_go_on
from outrider.engine.rows import Draw
from outrider.engine.scheduler import Work
from outrider.engine.sequence import Sequence
from outrider.errors import Unsupported
from outrider.sampling import (
    Chain,
    position_logprobs,
    verify_blocks,
    verify_tokens,
)
from outrider.types import GenerationSpec, Proposal, Verdict
from outrider.v1 import worker_pb2
from outrider.wire import proposal_from_proto, require, verified_to_proto
from outrider.worker.sessions import Refusal
from outrider.worker.worker import deadline_of, timing_of

MAX_MORE_ROUNDS = 1024


@dataclass(slots=True)
class _Verification:
    """A proposal on its base; row i of its logits decides about position base_len + i."""

    spec: GenerationSpec
    base_len: int
    proposal: Proposal
    more_rounds: int = 0
    verdict: Verdict | None = None

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
        more_rounds = entry.verify.more_rounds
        require(
            more_rounds <= MAX_MORE_ROUNDS,
            f"{more_rounds} is not in [0, {MAX_MORE_ROUNDS}]",
            "more_rounds",
        )
        proposal = proposal.cut(self._context_length - base_len - 1)
        return Work(
            sequence=sequence,
            tokens=[*sequence.log.tokens, *proposal.token_ids],
            num_logits=len(proposal) + 1,
            reserve=base_len + len(proposal),
            deadline=deadline_of(entry.header),
            draw=_draw_of(spec, base_len),
            ahead=_ahead(spec, more_rounds),
            context=_Verification(spec, base_len, proposal, more_rounds),
        )

    @torch.inference_mode()
    def advance(self, ready: Tokens[tuple[Work, Tensor]]) -> list[worker_pb2.Reply]:
        verdicts = {id(work): _by_draw(work) for work, _ in ready if work.drawn is not None}
        sampled = [(work, logits) for work, logits in ready if work.drawn is None]
        if sampled:
            verifications = [work.context for work, _ in sampled]
            raw = _concatenate([logits for _, logits in sampled])
            found = _verify_rejection(raw, verifications)
            verdicts |= {id(work): v for (work, _), v in zip(sampled, found, strict=True)}
        for work, logits in ready:
            work.context.verdict = _with_logprobs(verdicts[id(work)], work.context, logits)
        return [
            worker_pb2.Reply(verified=verified_to_proto(work.context.verdict, timing_of(work)))
            for work, _ in ready
        ]

    def go_on(self, work: Work) -> bool:
        """The next plain round stands on the tokens of this one's verdict."""
        done: _Verification = work.context
        if not done.more_rounds or done.verdict is None:
            return False
        tokens, log = done.verdict.token_ids, work.sequence.log
        log.append(tokens)
        base_len = len(log)
        if _holds_stop(done, tokens) or base_len >= self._context_length:
            return False
        work.tokens[done.base_len :] = tokens
        work.computed = base_len - 1
        del work.sequence.cached[work.computed :]  # KV of rejected guesses.
        work.num_logits, work.reserve = 1, base_len
        work.draw, work.drawn = _draw_of(done.spec, base_len), None
        work.ahead = _ahead(done.spec, done.more_rounds - 1)
        work.context = _Verification(done.spec, base_len, Proposal(), done.more_rounds - 1)
        return True


def _holds_stop(done: _Verification, tokens: Tokens[int]) -> bool:
    """Whether the generation may end at one of the tokens; an accepted guess can be such a one."""
    return any(
        token in done.spec.stop_ids and not must_go_on(done.spec, position)
        for position, token in enumerate(tokens, done.base_len)
    )


def _draw_of(spec: GenerationSpec, base_len: int) -> Draw | None:
    """None in rejection sampling, which decides by distributions."""
    return None if spec.uses_distributions else Draw(spec, base_len)


def _ahead(spec: GenerationSpec, more_rounds: int) -> int:
    """Rounds that nobody has to look at the logits of."""
    return 0 if spec.uses_distributions or spec.logprobs is not None else more_rounds


def _by_draw(work: Work) -> Verdict:
    """The target's own draw at every row is what is emitted; guesses that equal it are accepted."""
    own = work.drawn.token_ids if work.drawn else []
    guesses = work.context.proposal.token_ids
    accepted = verify_tokens(own, guesses)
    return Verdict((*guesses[:accepted], own[accepted]), accepted, num_proposed=len(guesses))


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
    logits = masked(logits, [(v.spec, position) for v in verifications for position in v.positions])
    specs = [(v.spec.sampling, len(v.positions)) for v in verifications]
    outcomes = verify_blocks(log_probs_of(logits, specs), chains)
    return [
        Verdict(
            (*chain.token_ids[: outcome.num_accepted], outcome.final),
            outcome.num_accepted,
            num_proposed=len(chain.token_ids),
        )
        for chain, outcome in zip(chains, outcomes, strict=True)
    ]


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
