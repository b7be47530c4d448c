"""A draft asked by the orchestrator: between two verifications, or while one runs. What was asked
for a base that the log has left is never taken."""

import asyncio
import time

import pytest

from outrider.errors import Unavailable
from outrider.remote.asking import Answer
from outrider.remote.outcomes import BufferUse
from outrider.speculation.forecast import Forecast, Shared
from outrider.token_log import TokenLog
from outrider.types import GenerationSpec, Proposal, SamplingParams, Verdict, VerificationMode
from outrider.v1 import worker_pb2
from outrider.wire import proposal_to_proto
from services.orchestrator.proposers import DraftModel, Wanted

PROMPT = (1, 2, 3)
END = 100
pytestmark = pytest.mark.timeout(20)
GREEDY = GenerationSpec(SamplingParams())


class Draft:
    """Notes what it is asked; a test answers."""

    def __init__(self):
        self.asked = []
        self.bases = []
        self.timeouts = []
        self.cancelled = 0
        self.usable = True

    def ask(self, log, asked, timeout_s, on_answer):
        self.bases.append(tuple(log.tokens))
        self.asked.append((asked, on_answer))
        self.timeouts.append(timeout_s)

    def cancel(self):
        self.cancelled += 1

    @property
    def last(self):
        return self.asked[-1][0].ask

    def answer(self, *outcomes, proposal=(), error=None, number=-1):
        """With (accepted, token, guesses) for each outcome."""
        asked, on_answer = self.asked[number]
        found = worker_pb2.Proposed(proposal=proposal_to_proto(Proposal(tuple(proposal))))
        for accepted, token_id, guesses in outcomes:
            chain = proposal_to_proto(Proposal(tuple(guesses)))
            found.outcomes.add(num_accepted=accepted, token_id=token_id, proposal=chain)
        asked.answer = Answer(error=error) if error else Answer(found, trip_us=7000)
        on_answer()


class Rig:
    def __init__(self, spec=GREEDY, *, fan_out=4, alternatives=0):
        self.draft, self.log, self.fan_out = Draft(), TokenLog(PROMPT), fan_out
        self.use = BufferUse()
        self.model = DraftModel(
            self.log,
            self.draft,
            spec,
            Forecast(Shared()),
            vocab_size=300,
            timeout_s=2.0,
            num_alternatives=alternatives,
            use=self.use,
        )
        self.last = None

    def verdict(self, *token_ids, accepted=0, proposed=0):
        self.last = Verdict(token_ids, accepted, proposed)
        self.log.append(token_ids)

    async def propose(self, num_tokens=2, *, left_s=9.0):
        wanted = Wanted(num_tokens, self.fan_out, END, self.last)
        return await self.model.propose(wanted, time.monotonic() + left_s)


async def begun(**kind):
    """A rig with its first verdict, prepared for."""
    rig = Rig(**kind)
    assert (await rig.propose()).proposal == Proposal()
    rig.draft.answer((0, 7, (8, 9)), (0, 5, (6,)))
    rig.verdict(7)
    return rig


async def test_the_verdict_selects_what_was_prepared_and_the_next_round_is_prepared_for():
    rig = await begun()
    proposed = await rig.propose()
    assert proposed.proposal.token_ids == (8, 9)
    assert (proposed.report.hit, proposed.report.prepared, proposed.report.rank) == (True, 4, 0)
    assert proposed.report.took_us == 7000, "hidden as it was"
    assert rig.draft.bases == [PROMPT, (*PROMPT, 7)]
    assert rig.draft.last.pending == (8, 9) and sum(rig.draft.last.fan_out) == 4
    assert (rig.use.outcomes_used, rig.use.outcomes_unused) == (1, 1)


async def test_a_miss_is_a_plain_round_that_is_prepared_for():
    rig = await begun()
    rig.log.cut(len(PROMPT))
    rig.verdict(4)
    proposed = await rig.propose()
    assert proposed.proposal == Proposal() and proposed.report.hit is False
    assert rig.draft.bases[-1] == (*PROMPT, 4) and rig.draft.last.pending == ()


async def test_a_late_answer_is_waited_for():
    rig = Rig()
    await rig.propose()
    rig.verdict(7)
    waiting = asyncio.ensure_future(rig.propose())
    await asyncio.sleep(0)
    assert not waiting.done()
    rig.draft.answer((0, 7, (8,)))
    assert (await waiting).proposal.token_ids == (8,)


async def test_without_fan_out_it_is_asked_after_the_verdict():
    rig = Rig(fan_out=0, alternatives=1)
    await rig.propose()
    assert not rig.draft.asked
    rig.verdict(7)
    waiting = asyncio.ensure_future(rig.propose())
    await asyncio.sleep(0)
    assert rig.draft.last.num_alternatives == 1 and not rig.draft.last.fan_out
    rig.draft.answer(proposal=(8, 9, 10))
    assert (await waiting).proposal.token_ids == (8, 9)


@pytest.mark.parametrize("fan_out", [0, 4])
async def test_a_failure_costs_a_plain_round_and_is_told(fan_out):
    rig = Rig(fan_out=fan_out)
    await rig.propose()
    rig.verdict(7)
    waiting = asyncio.ensure_future(rig.propose())
    await asyncio.sleep(0)
    rig.draft.answer(error=Unavailable("away"))
    proposed = await waiting
    assert proposed.proposal == Proposal() and proposed.report.failed
    rig.draft.usable = False
    rig.verdict(8)
    assert (await rig.propose()).report.failed and len(rig.draft.asked) == 1


async def test_what_was_asked_before_rounds_of_others_is_dropped():
    """A proposer in between, or a target that went on by itself."""
    rig = await begun()
    rig.verdict(50)
    proposed = await rig.propose()
    assert proposed.proposal == Proposal() and proposed.report.hit is None
    assert rig.draft.cancelled == 0 and rig.draft.bases[-1] == (*PROMPT, 7, 50)


async def test_an_unanswered_question_of_before_is_cancelled():
    rig = Rig()
    await rig.propose()
    rig.verdict(7)
    rig.verdict(50)
    assert (await rig.propose()).proposal == Proposal()
    assert rig.draft.cancelled == 1
    rig.draft.answer((0, 50, (1,)), number=0)
    assert len(rig.draft.asked) == 2


@pytest.mark.parametrize("how", ["no guesses wanted", "closed"])
async def test_nothing_stays_asked_in_the_end(how):
    rig = Rig()
    await rig.propose()
    if how == "closed":
        rig.model.close()
    else:
        rig.verdict(7)
        assert (await rig.propose(0)).proposal == Proposal()
    assert rig.draft.cancelled == 1


async def test_it_does_not_wait_beyond_the_requests_deadline():
    rig = Rig()
    await rig.propose(left_s=0.5)
    assert 0.3 < rig.draft.timeouts[0] <= 0.5


async def test_no_draft_runs_ahead_of_a_verdict_that_is_elsewhere():
    spec = GenerationSpec(SamplingParams(temperature=1.0), VerificationMode.REJECTION)
    rig = Rig(spec)
    await rig.propose()
    assert rig.draft.last.fan_out and not rig.draft.last.run_ahead
