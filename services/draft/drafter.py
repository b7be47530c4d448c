"""The draft's tier: k guesses, one forward pass each, for all sessions of the batch at once."""

from collections.abc import Sequence as Tokens

from torch import Tensor

from outrider.engine.rows import Draw
from outrider.engine.scheduler import Work
from outrider.engine.sequence import Sequence
from outrider.types import MAX_SPECULATIVE_TOKENS, GenerationSpec, Proposal
from outrider.v1 import worker_pb2
from outrider.wire import proposal_to_proto, require, timing_to_proto
from outrider.worker.sessions import Refusal
from outrider.worker.worker import deadline_of, timing_of

PROPOSER_NAME = "draft"


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
            draw=Draw(spec, base_len, steps=wanted),
        )

    def advance(self, ready: Tokens[tuple[Work, Tensor]]) -> list[worker_pb2.Reply]:
        return [_proposed(work) for work, _ in ready]

    def go_on(self, work: Work) -> bool:
        return False


def _proposed(work: Work) -> worker_pb2.Reply:
    if work.drawn is None:
        raise RuntimeError("the engine drew nothing")
    proposal = Proposal(
        token_ids=tuple(work.drawn.token_ids),
        distributions=tuple(work.drawn.distributions),
        proposer=PROPOSER_NAME,
    )
    return worker_pb2.Reply(
        proposed=worker_pb2.Proposed(
            proposal=proposal_to_proto(proposal), timing=timing_to_proto(timing_of(work))
        )
    )
