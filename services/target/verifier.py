"""The target's tier: one pass over a proposal, then the decision."""

import functools
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.engine.deciding import Decider, EagerDecider, Verified
from outrider.engine.drawing import must_go_on
from outrider.engine.rows import Draw
from outrider.engine.scheduler import Work
from outrider.engine.sequence import Sequence
from outrider.errors import InvalidArgument, Unsupported
from outrider.remote.outcomes import BufferUse, Chosen, Speculation, proposal_for
from outrider.sampling import (
    BlockOutcome,
    Chain,
    position_logprobs,
    verify_tokens,
    verify_tree,
)
from outrider.speculation.forecast import Forecast
from outrider.types import (
    MAX_ALTERNATIVES,
    DraftReport,
    GenerationSpec,
    Proposal,
    Verdict,
    WorkTiming,
)
from outrider.v1 import worker_pb2
from outrider.wire import (
    check_lengths,
    plan_from_proto,
    require,
    verified_to_proto,
)
from outrider.worker.sessions import Key, Refusal
from outrider.worker.worker import Host, Made, Next, deadline_of, timing_of
from services.target.drafts import DraftPool

MAX_MORE_ROUNDS = 1024


@dataclass(slots=True)
class _Verification:
    """A proposal on its base. Row 0 of its logits decides about position base_len, row i + 1 about
    the one after guess i."""

    spec: GenerationSpec
    base_len: int
    proposal: Proposal
    more_rounds: int = 0
    verdict: Verdict | None = None
    accepted: Tokens[int] = ()
    """The guesses of the proposal that were, by index."""
    speculation: Speculation | None = None
    report: DraftReport | None = None
    run_ahead: Proposal | None = None
    """The guess behind the proposal that is verified with it, if one is; None: not decided yet."""

    @property
    def positions(self) -> range:
        """Of each row of a chain."""
        return range(self.base_len, self.base_len + len(self.proposal) + 1)

    @property
    def rows(self) -> list[int]:
        """The rows that the emitted tokens come from."""
        return [0, *[guess + 1 for guess in self.accepted]]

    @property
    def num_computed(self) -> int:
        """Tokens of the log after the verdict whose KV is there: the base and the accepted guesses
        of the spine. The KV of side nodes lies at places that are not their positions."""
        if not self.proposal.parents:
            return self.base_len + len(self.accepted)
        return self.base_len + sum(guess == i for i, guess in enumerate(self.accepted))


class Verifier:
    """A `Tier` (outrider.worker.worker) that verifies proposals."""

    def __init__(
        self,
        *,
        vocab_size: int,
        context_length: int,
        drafts: DraftPool | None = None,
        plain_by_plan: bool = True,
        tree_rows: int = 0,
        decider: Decider | None = None,
    ) -> None:
        """`drafts` are those that it may ask by itself; without `plain_by_plan` it leaves plain
        rounds in between to the orchestrator. Alternatives are asked for while all who are under
        way need no more rows of a pass than `tree_rows`; 0: always. `decider` verifies by
        distributions."""
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._drafts = drafts
        self._plain_by_plan = plain_by_plan
        self._tree_rows = tree_rows
        self._decider = decider or EagerDecider()
        self._host: Host | None = None
        self.buffer_use = BufferUse()

    def attach(self, host: Host) -> None:
        self._host = host
        if self._drafts is not None:
            self._drafts.attach(host)

    def begin(self, entry: worker_pb2.Entry, sequence: Sequence, spec: GenerationSpec) -> Work:
        if not entry.HasField("verify"):
            raise Refusal(
                worker_pb2.REFUSAL_REASON_UNSUPPORTED, "a target only verifies", field="op"
            )
        require(len(sequence.log) > 0, "a base needs at least one token", "base_len")
        proposal = proposal_for(spec, entry.verify.proposal, vocab_size=self._vocab_size)
        base_len = len(sequence.log)
        more_rounds = entry.verify.more_rounds
        require(
            more_rounds <= MAX_MORE_ROUNDS,
            f"{more_rounds} is not in [0, {MAX_MORE_ROUNDS}]",
            "more_rounds",
        )
        proposal = self._fitting(proposal, base_len)
        work = Work(
            sequence=sequence,
            tokens=sequence.line(proposal.token_ids),
            num_logits=len(proposal) + 1,
            reserve=base_len + len(proposal),
            deadline=deadline_of(entry.header),
            draw=_draw_of(spec, base_len),
            parents=proposal.parents,
            ahead=_ahead(spec, more_rounds),
            context=_Verification(spec, base_len, proposal, more_rounds),
        )
        if entry.verify.HasField("draft"):
            self._speculate(work, entry)
        return work

    def _speculate(self, work: Work, entry: worker_pb2.Entry) -> None:
        """Let the work go on with proposals of a draft."""
        if self._drafts is None:
            raise Unsupported("this target asks no drafts", field="draft")
        plan = plan_from_proto(entry.verify.draft)
        plan = replace(plan, end_len=min(plan.end_len, self._context_length))
        round_: _Verification = work.context
        session = self._drafts.session(entry.header, round_.spec, plan.address)
        speculation = Speculation(
            plan,
            round_.spec,
            session,
            self._vocab_size,
            Forecast(self._drafts.seen(plan.address)),
            lambda chosen: self._resume(work, speculation, chosen),
            self._room_for_alternatives,
            self.buffer_use,
        )
        round_.speculation = speculation
        work.ahead = 0 if speculation.speculates else work.ahead
        speculation.starts(work.sequence.log, round_.proposal)

    def _room_for_alternatives(self, length: int) -> int:
        """Of each of `length` guesses, so that all who are under way fit into a pass that costs
        little more than one of a single row."""
        if not self._tree_rows or self._host is None:
            return MAX_ALTERNATIVES
        rows = self._tree_rows // max(self._host.under_way, 1)
        return max(rows - 1 - length, 0) // length

    def advance(self, ready: Tokens[tuple[Work, Tensor]]) -> list[Made]:
        sampled = [(work, logits) for work, logits in ready if work.drawn is None]
        if sampled:
            self._decider.read(
                [Verified(logits, w.context.spec, w.context.positions) for w, logits in sampled]
            )
        for work, _ in ready:
            _decide_run_ahead(work.context)
        verdicts = {id(work): _by_draw(work) for work, _ in ready if work.drawn is not None}
        if sampled:
            chains = [_chain(work.context) for work, _ in sampled]
            outcomes = self._decider.decide(chains)
            for (work, _), chain, outcome in zip(sampled, chains, outcomes, strict=True):
                verdicts[id(work)] = _by_outcome(work.context, chain, outcome)
        made: list[Made] = []
        for work, logits in ready:
            round_: _Verification = work.context
            verdict = round_.verdict = _with_logprobs(verdicts[id(work)], round_, logits)
            made.append(functools.partial(_verified, verdict, timing_of(work), round_.report))
        return made

    def go_on(self, work: Work) -> Next:
        """The next round stands on the tokens of this one's verdict."""
        done: _Verification = work.context
        if not done.more_rounds or done.verdict is None:
            return Next.NONE
        tokens, log = done.verdict.token_ids, work.sequence.log
        log.append(tokens)
        if _holds_stop(done, tokens) or len(log) >= self._context_length:
            return Next.NONE
        speculation = done.speculation
        if speculation is None:
            self._next_round(work, Proposal(), None)
            return Next.NOW
        ends = len(log) >= speculation.plan.end_len
        if ends or not (speculation.speculates or self._plain_by_plan):
            return Next.NONE
        chosen = speculation.choose(log, done.verdict)
        if chosen is None:
            return Next.LATER_BESIDE if self._is_beside(speculation) else Next.LATER
        self._next_round(work, chosen.proposal, chosen.report)
        return Next.NOW

    def _is_beside(self, speculation: Speculation) -> bool:
        return self._drafts is not None and self._drafts.is_beside(speculation.plan.address)

    def end(self, work: Work) -> None:
        if work.context.speculation is not None:
            work.context.speculation.end()

    def tune(self, work: Work, entry: worker_pb2.TuneEntry) -> None:
        check_lengths(entry)
        if work.context.speculation is None:
            raise InvalidArgument("the work has no plan to be tuned", field="op")
        work.context.speculation.tune(entry.num_speculative_tokens, entry.fan_out)

    def extend(self, work: Work, entry: worker_pb2.ExtendEntry) -> None:
        round_: _Verification = work.context
        # The round that is under way is not one of them.
        more_rounds = min(entry.until_len - round_.base_len - 1, MAX_MORE_ROUNDS)
        if more_rounds > round_.more_rounds:
            round_.more_rounds = more_rounds
            work.ahead = _ahead(round_.spec, more_rounds) if work.ahead else 0

    def forget(self, key: Key) -> None:
        if self._drafts is not None:
            self._drafts.forget(key)

    def _resume(self, work: Work, speculation: Speculation, chosen: Chosen) -> None:
        if self._host is not None:
            self._next_round(work, chosen.proposal, chosen.report)
            # The draft is what the session waits for, so its next question comes first.
            self._host.resume(work, asked=speculation.asks)

    def _next_round(self, work: Work, proposal: Proposal, report: DraftReport | None) -> None:
        """Make a work whose verdict is in its log verify a proposal after it."""
        done: _Verification = work.context
        sequence = work.sequence
        base_len = len(sequence.log)
        proposal = self._fitting(proposal, base_len)
        count = len(proposal)
        work.tokens = sequence.line(proposal.token_ids)
        work.computed = done.num_computed
        sequence.forget(work.computed)  # KV of rejected guesses.
        work.num_logits, work.reserve = count + 1, base_len + count
        work.parents, work.prompt_rows = proposal.parents, 0
        work.draw, work.drawn = _draw_of(done.spec, base_len), None
        speculation, more_rounds = done.speculation, done.more_rounds - 1
        plain = speculation is None or not speculation.speculates
        work.ahead = _ahead(done.spec, more_rounds) if plain else 0
        work.context = _Verification(
            done.spec, base_len, proposal, more_rounds, speculation=speculation, report=report
        )

    def _fitting(self, proposal: Proposal, base_len: int) -> Proposal:
        """What of a proposal the context has room for, each guess and the token after it; of a tree
        that is too large the spine, because each of its nodes has a place of its own."""
        room = self._context_length - base_len - 1
        return proposal if len(proposal) <= room else proposal.spine.cut(room)


def _holds_stop(done: _Verification, tokens: Tokens[int]) -> bool:
    """Whether the generation may end at one of the tokens; an accepted guess can be such a one."""
    spec = done.spec
    for position, token in enumerate(tokens, done.base_len):
        if token in spec.stop_ids and not must_go_on(spec, position):
            return True
    return False


def _draw_of(spec: GenerationSpec, base_len: int) -> Draw | None:
    """None in rejection sampling, which decides by distributions."""
    return None if spec.uses_distributions else Draw(spec, base_len)


def _ahead(spec: GenerationSpec, more_rounds: int) -> int:
    """Rounds that nobody has to look at the logits of."""
    return 0 if spec.uses_distributions or spec.logprobs is not None else more_rounds


def _verified(verdict: Verdict, timing: WorkTiming, report: DraftReport | None) -> worker_pb2.Reply:
    return worker_pb2.Reply(verified=verified_to_proto(verdict, timing, report))


def _by_draw(work: Work) -> Verdict:
    """The target's own draw at every row is what is emitted; guesses that equal it are accepted."""
    own = work.drawn.token_ids if work.drawn else []
    round_: _Verification = work.context
    guesses, parents = round_.proposal.token_ids, round_.proposal.parents
    round_.accepted = (
        verify_tree(own, guesses, parents) if parents else range(verify_tokens(own, guesses))
    )
    num_proposed = round_.proposal.length
    return Verdict(
        tuple([own[row] for row in round_.rows]),
        num_accepted=len(round_.accepted),
        num_proposed=num_proposed,
        num_beside=len(guesses) - num_proposed,
    )


def _decide_run_ahead(round_: _Verification) -> None:
    """Before anything of the verdict is known, and once."""
    if round_.run_ahead is None:
        speculation = round_.speculation
        round_.run_ahead = speculation.passed(round_.proposal) if speculation else Proposal()


def _chain(round_: _Verification) -> Chain:
    """The proposal, and the run-ahead guess in the bonus's place: the target's row is the same."""
    proposal, ahead = round_.proposal, round_.run_ahead or Proposal()
    sampled_from = proposal.distributions or (None,) * len(proposal)
    return Chain(
        token_ids=(*proposal.token_ids, *ahead.token_ids),
        seed=round_.spec.sampling.seed,
        base_len=round_.base_len,
        distributions=(*sampled_from, *ahead.distributions),
        bonus=not ahead,
    )


def _by_outcome(round_: _Verification, chain: Chain, outcome: BlockOutcome) -> Verdict:
    num_accepted = min(outcome.num_accepted, len(round_.proposal))
    round_.accepted = range(num_accepted)
    accepted = chain.token_ids[: outcome.num_accepted]
    return Verdict(
        accepted if outcome.final is None else (*accepted, outcome.final),
        num_accepted,
        num_proposed=len(round_.proposal),
        run_ahead=outcome.final is None if round_.run_ahead else None,
    )


def _with_logprobs(verdict: Verdict, verification: _Verification, logits: Tensor) -> Verdict:
    top = verification.spec.logprobs
    if top is None:
        return verdict
    with torch.inference_mode():
        rows = logits[verification.rows]  # [tokens, vocab]
        found = position_logprobs(rows, verdict.token_ids, top)
    return replace(verdict, logprobs=tuple(found))
