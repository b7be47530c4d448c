"""A target that goes on with proposals of a draft by itself: sequentially, and from a buffer of
outcomes prepared ahead. Both workers are real, only the wire between them is not."""

import contextlib
import threading
import time
import weakref

import pytest
from worker_harness import (
    TIMEOUT_S,
    Bench,
    Owner,
    coupled,
    load,
    make_runner,
    plain_greedy,
    proposal_of,
    random_tokens,
    refusal,
    rejection,
    serving,
    verdict_of,
)

from outrider.errors import DeadlineExceeded
from outrider.remote.asking import Answer
from outrider.rpc.channel import ChannelSecurity
from outrider.speculation.forecast import Shared
from outrider.types import DraftPlan, GenerationSpec, Proposal, SamplingParams
from outrider.v1 import worker_pb2
from outrider.wire import plan_to_proto, report_from_proto
from outrider.worker.gathering import ReturnWindow
from outrider.worker.sessions import key_of
from outrider.worker.worker import Worker, WorkerLimits
from services.target.drafts import DraftPool
from services.target.verifier import Verifier

GREEDY = GenerationSpec(SamplingParams())
SPECS = {"greedy": GREEDY, "coupled": coupled(3), "rejection": rejection(3)}
PROMPT = random_tokens(21)


class Drafts:
    """Stands in for a DraftPool: one session, on a draft worker of the same process.

    Its answers come when they are ready, or `early`: before the pass that they were asked during,
    or `late`: when the verdict of that pass is there.
    """

    def __init__(self, draft):
        self.owner = Owner(draft)
        self.asks = []
        self.cancelled = 0
        self.forgotten = []
        self.usable = True
        self.beside = False
        self.hold = None
        self.shared = Shared()
        self.spoil = None
        self.damage = None
        self.proposals = {}
        self.answers = {}
        self.arrival = None
        self.trip_s = 1000.0
        """What an answer says that it took: so long that no round is worth waiting for it."""
        self.verdicts = 0
        self.verdict_came = threading.Condition()

    def attach(self, host):
        self.host = host

    def session(self, header, spec, address):
        if not self.owner.tokens:
            self.owner.spec = spec
            self.owner.opened()
        return self

    def seen(self, address):
        return self.shared

    def is_beside(self, address):
        return self.beside

    def forget(self, key):
        self.forgotten.append(key)

    def cancel(self):
        self.cancelled += 1

    def see_verdicts(self, verifier):
        """Count its verdicts."""
        advance = verifier.advance

        def counting(ready):
            replies = advance(ready)
            with self.verdict_came:
                self.verdicts += 1
                self.verdict_came.notify_all()
            return replies

        verifier.advance = counting

    def _wait_for_verdict(self, before):
        with self.verdict_came:
            assert self.verdict_came.wait_for(lambda: self.verdicts > before, TIMEOUT_S)

    def ask(self, log, asked, timeout_s, on_answer):
        ask = asked.ask
        self.asks.append((list(log.tokens), ask))
        self.owner.tokens = list(log.tokens)
        entry = self.owner.propose_entry(ask.num_tokens)
        entry.propose.alternatives = ask.num_alternatives
        base_len = len(log)
        if ask.fan_out:
            entry.propose.ahead.pending.token_ids.extend(ask.pending)
            entry.propose.ahead.fan_out.extend(ask.fan_out)
            entry.propose.ahead.run_ahead = ask.run_ahead
        spoilt = self.spoil(len(self.asks)) if self.spoil else None
        number, verdicts, answered = len(self.asks), self.verdicts, threading.Event()

        def answer(reply):
            if spoilt is not None:
                found = Answer(error=spoilt)
            else:
                assert reply.HasField("proposed"), reply
                found = Answer(reply.proposed, trip_us=int(self.trip_s * 1e6))
                self.proposals[base_len] = proposal_of(reply)
                self.answers[base_len] = found.proposed
                if self.damage:
                    self.damage(number, found.proposed)
            if self.hold:
                self.hold.wait(TIMEOUT_S)
            if self.arrival == "late":
                self._wait_for_verdict(verdicts)
            asked.answer = found
            self.host.post(on_answer)
            answered.set()

        self.owner.bench.worker.submit([entry], answer)
        if self.arrival == "early":
            assert answered.wait(TIMEOUT_S)


class Rig:
    """A target, its owner and its draft."""

    def __init__(self, target, drafts, spec):
        self.drafts = drafts
        self.owner = Owner(target, list(PROMPT), spec)
        self.owner.opened()
        self.verdicts, self.reports, self.rows = [], [], []

    def entry(self, *, k=3, fan_out=0, alternatives=0, rounds=64, end_len=None):
        entry = self.owner.verify_entry()
        end_len = end_len or len(PROMPT) + 40
        plan = DraftPlan("draft", k, fan_out, 2.0, end_len, alternatives)
        entry.verify.draft.CopyFrom(plan_to_proto(plan))
        entry.verify.more_rounds = rounds
        return entry

    def read(self, replies):
        """Follow an entry to its last reply."""
        more = True
        while more:
            reply = replies.get(timeout=TIMEOUT_S)
            more = reply.header.more
            if reply.HasField("refused"):
                return reply
            self.verdicts.append(verdict_of(reply))
            self.reports.append(report_from_proto(reply.verified.draft))
            self.rows.append(reply.verified.timing.batch_rows)
            self.owner.tokens.extend(self.verdicts[-1].token_ids)
        return reply

    def run(self, **plan):
        reply = self.read(self.owner.bench.post(self.entry(**plan)))
        return self.owner.tokens[len(PROMPT) :], reply

    @property
    def hits(self):
        return [report.hit for report in self.reports]


@contextlib.contextmanager
def rigs(tiny_models):
    """A function that makes a rig."""
    with contextlib.ExitStack() as stack:

        def make(spec=GREEDY, draft="draft", tree_rows=0, **limits):
            loaded = load(tiny_models["target"])
            drafts = Drafts(stack.enter_context(serving(tiny_models[draft], "draft")))
            limits = {"num_blocks": 256, "context_length": 512} | limits
            runner = make_runner(loaded, limits["num_blocks"])
            verifier = Verifier(
                vocab_size=loaded.vocab_size,
                context_length=limits["context_length"],
                drafts=drafts,
                tree_rows=tree_rows,
            )
            worker = Worker(runner, verifier, WorkerLimits(**limits), vocab_size=loaded.vocab_size)
            worker.start()
            stack.callback(worker.stop)
            rig = Rig(Bench(worker, runner), drafts, spec)
            rig.verifier = verifier
            drafts.see_verdicts(verifier)
            return rig

        yield make


@pytest.fixture
def make_rig(tiny_models):
    with rigs(tiny_models) as make:
        yield make


def plain(make_rig, spec, count):
    """The same generation without guesses."""
    rig = make_rig(spec)
    tokens, _ = rig.run(k=0, rounds=count, end_len=len(PROMPT) + count)
    assert all(verdict.num_proposed == 0 for verdict in rig.verdicts)
    return tokens


@pytest.mark.parametrize("fan_out", [0, 1, 8, 64])
@pytest.mark.parametrize("mode", ["greedy", "coupled"])
def test_output_is_that_of_plain_decoding(make_rig, mode, fan_out):
    rig = make_rig(SPECS[mode])
    tokens, reply = rig.run(fan_out=fan_out)
    assert tokens == plain(make_rig, SPECS[mode], 40) and len(tokens) == 40
    assert not reply.header.more
    accepted = sum(verdict.num_accepted for verdict in rig.verdicts)
    assert accepted > 10 and len(rig.verdicts) < 30
    assert any(0 < v.num_accepted < v.num_proposed for v in rig.verdicts)
    if fan_out:
        assert rig.hits.count(True) > 3
        assert fan_out > 8 or rig.hits.count(False) > 0
    else:
        assert rig.hits.count(None) == len(rig.hits)


@pytest.mark.parametrize("mode", ["greedy", "coupled", "rejection"])
def test_a_miss_asks_again_where_the_draft_is_quick(make_rig, mode):
    """Then no round is a plain one, but the first and those before the pace is known."""
    waiting, hasty = make_rig(SPECS[mode]), make_rig(SPECS[mode])
    waiting.drafts.trip_s = 0.0
    options = {"fan_out": 2, "rounds": 200, "end_len": len(PROMPT) + 150}
    tokens, _ = waiting.run(**options)
    assert len(tokens) == 150
    if mode != "rejection":
        assert tokens == plain(make_rig, SPECS[mode], 150)
    hasty.run(**options)
    for rig in (waiting, hasty):
        assert rig.hits.count(False) > 5 and rig.hits.count(True) > 3
    missed = [
        (verdict.num_proposed > 0, report.wait_us > 0)
        for verdict, report in zip(waiting.verdicts, waiting.reports, strict=True)
        if report.hit is False
    ]
    assert missed.count((True, True)) >= len(missed) - 3
    plain_rounds = [v for v, r in zip(hasty.verdicts, hasty.reports, strict=True) if r.hit is False]
    assert all(verdict.num_proposed == 0 for verdict in plain_rounds)
    assert len(waiting.verdicts) < len(hasty.verdicts)
    asks = [ask for _, ask in waiting.drafts.asks if not ask.fan_out]
    assert len(asks) == missed.count((True, True))


def test_a_draft_that_fails_after_a_miss_leaves_a_plain_round(make_rig):
    rig = make_rig()
    rig.drafts.trip_s = 0.0
    answered_after_a_miss = []

    def spoil(number):
        if rig.drafts.asks[-1][1].fan_out:
            return None
        answered_after_a_miss.append(number)
        return DeadlineExceeded("too late")

    rig.drafts.spoil = spoil
    tokens, _ = rig.run(fan_out=2)
    assert tokens == plain(make_rig, GREEDY, 40) and answered_after_a_miss
    assert [r.failed for r in rig.reports].count(True) == len(answered_after_a_miss)


def with_proposals(rig):
    """Each round's verdict, and what the draft proposed for its base."""
    base = len(PROMPT)
    for verdict in rig.verdicts:
        yield verdict, rig.drafts.proposals.get(base, Proposal())
        base += len(verdict.token_ids)


def leaf_flags(rig):
    """Of each round whether a guess beside the chain was accepted."""
    return [
        verdict.token_ids[: verdict.num_accepted] != tree.token_ids[: verdict.num_accepted]
        for verdict, tree in with_proposals(rig)
    ]


def accepted_leaves(rig):
    return sum(leaf_flags(rig))


def mean_acceptance_length(rig):
    return sum(len(v.token_ids) for v in rig.verdicts) / len(rig.verdicts)


@pytest.mark.parametrize("alternatives", [1, 3])
@pytest.mark.parametrize("mode", ["greedy", "coupled"])
def test_alternatives_change_no_token_and_make_rounds_longer(make_rig, mode, alternatives):
    options = {"rounds": 200, "end_len": len(PROMPT) + 160}
    chains, trees = make_rig(SPECS[mode]), make_rig(SPECS[mode])
    chains.run(**options)
    tokens, reply = trees.run(alternatives=alternatives, **options)
    assert tokens == plain(make_rig, SPECS[mode], 160) and len(tokens) == 160
    assert not reply.header.more
    assert {ask.num_alternatives for _, ask in trees.drafts.asks} == {alternatives}
    assert accepted_leaves(trees) >= 10 and accepted_leaves(chains) == 0
    beside = [
        (verdict.num_beside, len(tree) - tree.length) for verdict, tree in with_proposals(trees)
    ]
    assert all(own == of_tree for own, of_tree in beside) and len({own for own, _ in beside}) > 1
    assert {verdict.num_beside for verdict in chains.verdicts} == {0}
    assert mean_acceptance_length(trees) > mean_acceptance_length(chains) + 0.1
    assert all(v.num_accepted <= v.num_proposed <= 3 for v in trees.verdicts)


@pytest.mark.parametrize(("tree_rows", "expected"), [(6, {0}), (7, {1}), (10, {2}), (40, {2})])
def test_alternatives_give_way_where_rows_would_cost(make_rig, tree_rows, expected):
    """Three guesses, and a row of its own for the token before them."""
    rig = make_rig(tree_rows=tree_rows)
    tokens, _ = rig.run(alternatives=2, end_len=len(PROMPT) + 60)
    full = {ask.num_alternatives for _, ask in rig.drafts.asks if ask.num_tokens == 3}
    assert full == expected
    assert tokens[:40] == plain(make_rig, GREEDY, 40)


def test_an_accepted_leaf_is_computed_again(make_rig):
    """The place that its token has in the log holds the KV of the chain's wrong guess."""
    rig = make_rig()
    rig.run(alternatives=3, rounds=200, end_len=len(PROMPT) + 160)
    leaves = leaf_flags(rig)
    trees = [tree for _, tree in with_proposals(rig)]
    rounds = list(zip(leaves, trees[1:], rig.rows[1:], strict=False))
    assert len(rounds) > 40 and sum(leaves) > 10
    for leaf_before, tree, rows in rounds:
        assert rows == 1 + leaf_before + len(tree)


def test_a_plain_round_after_a_tree_computes_what_was_accepted_beside_its_spine(make_rig):
    """It follows at once, without a look at what KV there is."""
    own = plain(make_rig, GREEDY, 40)
    for on_spine in range(3):
        rig = make_rig()
        spine = [*own[:on_spine], own[on_spine] ^ 1]
        beside = own[on_spine:3]
        entry = rig.entry(k=0)
        entry.verify.proposal.token_ids.extend([*spine, *beside])
        entry.verify.proposal.parents.extend(range(-1, on_spine))
        entry.verify.proposal.parents.append(on_spine - 1)
        entry.verify.proposal.parents.extend(range(on_spine + 1, on_spine + len(beside)))
        rig.read(rig.owner.bench.post(entry))
        assert rig.owner.tokens[len(PROMPT) :] == own
        assert rig.verdicts[0].num_accepted == 3
        assert rig.rows[1:4] == [1 + len(beside), 1, 1]


def test_alternatives_are_not_asked_for_ahead(make_rig):
    rig = make_rig()
    tokens, _ = rig.run(fan_out=8, alternatives=2)
    assert tokens == plain(make_rig, GREEDY, 40) and rig.hits.count(True) > 3
    assert {ask.num_alternatives for _, ask in rig.drafts.asks} == {0}


def test_alternatives_are_not_asked_for_where_distributions_decide(make_rig):
    rig = make_rig(SPECS["rejection"])
    rig.run(alternatives=2)
    assert {ask.num_alternatives for _, ask in rig.drafts.asks} == {0}
    assert sum(v.num_accepted for v in rig.verdicts) > 5


def test_trees_are_dropped_where_distributions_decide(make_rig):
    def damage(number, proposed):
        if number % 2:
            proposed.proposal.parents.extend([-1] * len(proposed.proposal.token_ids))

    rig = make_rig(SPECS["rejection"])
    rig.drafts.damage = damage
    tokens, _ = rig.run()
    assert len(tokens) >= 40 and sum(report.dropped for report in rig.reports) > 2
    assert sum(v.num_accepted for v in rig.verdicts) > 3


def test_a_tree_near_the_contexts_end_is_cut_to_its_spine(make_rig):
    """Every place of a tree must be in the context, and not its longest path alone."""
    rig = make_rig(context_length=len(PROMPT) + 24)
    tokens, _ = rig.run(alternatives=3, end_len=len(PROMPT) + 60)
    assert len(tokens) == 24 and tokens == plain(make_rig, GREEDY, 24)
    assert sum(v.num_accepted for v in rig.verdicts) > 5


def test_a_verified_tree_is_not_prepared_for(make_rig):
    """An orchestrator may send one together with a plan: the first round after it is plain."""
    rig = make_rig()
    own = plain(make_rig, GREEDY, 40)
    entry = rig.entry(fan_out=8)
    entry.verify.proposal.token_ids.extend([own[0] ^ 1, own[0], own[1]])
    entry.verify.proposal.parents.extend([-1, -1, 1])
    rig.read(rig.owner.bench.post(entry))
    assert rig.owner.tokens[len(PROMPT) :] == own
    assert rig.verdicts[0].num_accepted == 2 and rig.verdicts[1].num_proposed == 0
    assert len(rig.drafts.asks[0][0]) == len(PROMPT) + 3
    assert rig.hits.count(True) > 3


def test_greedy_output_is_the_models_own(make_rig, tiny_models):
    tokens, _ = make_rig().run(fan_out=8)
    assert tokens == plain_greedy(tiny_models["target"], PROMPT, 40)


def test_a_hit_is_verified_without_waiting(make_rig):
    """With a draft that equals its target every outcome but the last token's is foreseen."""
    rig = make_rig(draft="target")
    rig.run(fan_out=4)
    assert rig.hits[0] is None and set(rig.hits[1:]) == {True}
    assert all(v.num_accepted == v.num_proposed for v in rig.verdicts)


def test_wider_buffers_hit_more_often(make_rig):
    def hit_rate(fan_out):
        rig = make_rig(coupled(5), draft="bad-draft")
        rig.run(fan_out=fan_out, rounds=200, end_len=len(PROMPT) + 120)
        hits = [hit for hit in rig.hits if hit is not None]
        return sum(hits) / len(hits)

    assert hit_rate(1) < hit_rate(32)


def test_rejection_goes_on_with_distributions(make_rig):
    """Same proposals, same tokens: a buffer's proposal is what the draft would have proposed."""
    rig = make_rig(SPECS["rejection"])
    tokens, _ = rig.run(fan_out=16)
    assert len(tokens) >= 40 and rig.hits.count(True) > 3
    assert sum(v.num_accepted for v in rig.verdicts) > 5


@pytest.mark.parametrize("fan_out", [0, 8])
def test_no_guess_reaches_past_the_end(make_rig, fan_out):
    for length in range(1, 9):
        rig = make_rig(draft="target")
        tokens, _ = rig.run(k=4, fan_out=fan_out, end_len=len(PROMPT) + length)
        assert len(tokens) == length


def test_stop_ids_end_the_rounds(make_rig, tiny_models):
    expected = plain_greedy(tiny_models["target"], PROMPT, 40)
    stop = expected[12]
    spec = GenerationSpec(SamplingParams(), prompt_len=len(PROMPT), stop_ids=(stop,))
    rig = make_rig(spec)
    tokens, reply = rig.run(fan_out=8)
    end = expected.index(stop) + 1
    assert tokens[:end] == expected[:end] and len(tokens) < end + 4
    assert not reply.header.more


@pytest.mark.parametrize("fan_out", [0, 8])
def test_a_failing_draft_costs_speed_only(make_rig, fan_out):
    rig = make_rig()
    rig.drafts.spoil = lambda number: DeadlineExceeded("late") if number % 3 == 0 else None
    tokens, _ = rig.run(fan_out=fan_out)
    assert tokens == plain(make_rig, GREEDY, 40)
    failed = [report for report in rig.reports if report.failed]
    assert len(failed) > 2 and all(report.dropped == 1 for report in failed)
    assert sum(v.num_accepted for v in rig.verdicts) > 5


@pytest.mark.parametrize("fan_out", [0, 8])
@pytest.mark.parametrize("kind", ["vocabulary", "length", "tree"])
def test_malformed_proposals_are_dropped(make_rig, kind, fan_out):
    def damage(number, proposed):
        proposals = [proposed.proposal, *(outcome.proposal for outcome in proposed.outcomes)]
        for proposal in proposals if number % 2 else ():
            if kind == "vocabulary":
                proposal.token_ids.append(1 << 19)
            elif kind == "length":
                proposal.token_ids.extend([1] * 70)
            else:
                proposal.parents.extend([0] * len(proposal.token_ids))  # Its own parent.

    rig = make_rig()
    rig.drafts.damage = damage
    tokens, _ = rig.run(fan_out=fan_out)
    assert tokens == plain(make_rig, GREEDY, 40)
    dropped = sum(report.dropped for report in rig.reports)
    assert dropped > 2 and dropped == sum(report.failed for report in rig.reports)
    assert sum(v.num_accepted for v in rig.verdicts) > 5


def test_more_guesses_than_asked_for_are_cut(make_rig):
    def damage(number, proposed):
        proposed.proposal.token_ids.extend([1] * 9)

    rig = make_rig(draft="target")
    rig.drafts.damage = damage
    rig.run(k=3)
    assert max(verdict.num_proposed for verdict in rig.verdicts) == 3


def test_a_tree_wider_than_asked_for_is_cut_to_its_spine(make_rig):
    def damage(number, proposed):
        count = len(proposed.proposal.token_ids)
        proposed.proposal.token_ids.extend([1] * 20)
        proposed.proposal.parents.extend([*range(-1, count - 1), *([-1] * 20)])

    rig = make_rig(draft="target")
    rig.drafts.damage = damage
    tokens, _ = rig.run(k=3)
    assert tokens == plain(make_rig, GREEDY, 40)
    assert max(rig.rows[1:]) == 4 and sum(v.num_accepted for v in rig.verdicts) >= 28


def test_an_unusable_draft_is_not_asked(make_rig):
    rig = make_rig()
    rig.drafts.usable = False
    tokens, _ = rig.run(fan_out=8)
    assert not rig.drafts.asks and tokens == plain(make_rig, GREEDY, 40)
    assert all(report.failed for report in rig.reports[1:-1])


def test_waiting_for_a_draft_can_be_cancelled(make_rig):
    """A round that waits is dropped at once, and what was asked is cancelled."""
    rig = make_rig()
    rig.drafts.hold = threading.Event()
    replies = rig.owner.bench.post(rig.entry())
    assert replies.get(timeout=TIMEOUT_S).header.more
    rig.owner.cancel(rig.owner.number)
    reply = replies.get(timeout=TIMEOUT_S)
    assert refusal(reply) == ("cancelled", "") and not reply.header.more
    assert rig.drafts.cancelled == 1
    rig.drafts.hold.set()
    rig.owner.bench.settle()
    assert replies.empty() and rig.owner.bench.worker.load.queued == 0


def test_a_waiting_round_ends_at_its_deadline(make_rig):
    rig = make_rig()
    rig.drafts.hold = threading.Event()
    rig.owner.timeout_ms = 300
    replies = rig.owner.bench.post(rig.entry())
    replies.get(timeout=TIMEOUT_S)
    assert refusal(replies.get(timeout=TIMEOUT_S)) == ("deadline_exceeded", "")
    rig.drafts.hold.set()


def test_one_waiting_session_does_not_stop_another(make_rig):
    rig = make_rig()
    rig.drafts.hold = threading.Event()
    waiting = rig.owner.bench.post(rig.entry())
    waiting.get(timeout=TIMEOUT_S)
    other = Owner(rig.owner.bench, list(PROMPT)).opened()
    assert verdict_of(other.verify()).token_ids
    rig.drafts.hold.set()
    assert waiting.get(timeout=TIMEOUT_S).HasField("verified")


def tune(rig, length):
    """The length of the plan under way becomes another one."""
    entry = rig.owner.entry()
    entry.tune.num_speculative_tokens = length
    rig.owner.bench.worker.submit([entry], lambda reply: pytest.fail("tune has no reply"))


def test_a_plan_is_tuned_under_way(make_rig):
    rig = make_rig(draft="target")
    replies = rig.owner.bench.post(rig.entry(k=2, end_len=len(PROMPT) + 200))
    replies.get(timeout=TIMEOUT_S)
    tune(rig, 6)
    deadline = time.monotonic() + TIMEOUT_S
    lengths = set()
    while 6 not in lengths and time.monotonic() < deadline:
        lengths.add(verdict_of(replies.get(timeout=TIMEOUT_S)).num_proposed)
    assert lengths == {2, 6}


def waits_for_draft(rig, k):
    """Ask for rounds of k guesses; the second one waits until `hold` is set. Replies from there."""
    rig.drafts.hold = threading.Event()
    replies = rig.owner.bench.post(rig.entry(k=k, end_len=len(PROMPT) + 40))
    assert replies.get(timeout=TIMEOUT_S).header.more
    rig.owner.bench.settle()
    assert len(rig.drafts.asks) == 1
    return replies


def test_a_round_that_waits_for_guesses_goes_on_when_none_are_wanted(make_rig):
    rig = make_rig(draft="target")
    replies = waits_for_draft(rig, k=4)
    tune(rig, 0)
    reply = replies.get(timeout=TIMEOUT_S)  # The draft has not answered yet.
    assert reply.verified.num_proposed == 0 and rig.drafts.cancelled == 1
    report = report_from_proto(reply.verified.draft)
    assert report.wait_us > 0 and not report.asked
    rig.drafts.hold.set()
    rig.read(replies)


def test_guesses_that_are_there_are_verified_though_fewer_are_wanted_since(make_rig):
    rig = make_rig(draft="target")
    replies = waits_for_draft(rig, k=4)
    tune(rig, 1)
    rig.owner.bench.settle()
    rig.drafts.hold.set()
    assert replies.get(timeout=TIMEOUT_S).verified.num_proposed == 4
    assert replies.get(timeout=TIMEOUT_S).verified.num_proposed == 1
    rig.read(replies)


@pytest.mark.parametrize("beside", [True, False])
def test_who_drafts_on_the_same_device_is_waited_for_longer(make_rig, monkeypatch, beside):
    ways = []
    answered = ReturnWindow.answered

    def note(window, key, now, *, beside=False):
        ways.append(beside)
        answered(window, key, now, beside=beside)

    monkeypatch.setattr(ReturnWindow, "answered", note)
    rig = make_rig(draft="target")
    rig.drafts.beside = beside
    rig.run(fan_out=0, rounds=3)
    assert ways.count(True) == (3 if beside else 0)


def test_a_target_may_leave_plain_rounds_to_others(make_rig):
    """Tuned to no guesses it answers once more, and that is all."""
    rig = make_rig(draft="target")
    rig.verifier._plain_by_plan = False
    replies = rig.owner.bench.post(rig.entry(k=2, end_len=len(PROMPT) + 200))
    replies.get(timeout=TIMEOUT_S)
    tune(rig, 0)
    reply = rig.read(replies)
    assert not reply.header.more and len(rig.verdicts) < 60
    assert rig.verdicts[-1].num_proposed in (0, 2)


def test_an_entry_that_was_ended_leaves_no_ask(make_rig):
    """More rounds are over: what was asked ahead is not wanted."""
    rig = make_rig()
    _, reply = rig.run(fan_out=8, rounds=3)
    assert len(rig.verdicts) == 4 and not reply.header.more
    rig.owner.bench.settle()
    asked = len(rig.drafts.asks)
    assert asked == 4 and rig.drafts.cancelled <= 1


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"address": ""}, "draft.address"),
        ({"num_speculative_tokens": 17}, "num_speculative_tokens"),
        ({"fan_out": 65}, "fan_out"),
        ({"timeout_ms": 0}, "draft.timeout_ms"),
        ({"end_len": 0}, "draft.end_len"),
        ({"alternatives": 4}, "draft.alternatives"),
    ],
)
def test_plans_are_checked(make_rig, change, field):
    rig = make_rig()
    entry = rig.entry()
    for name, value in change.items():
        setattr(entry.verify.draft, name, value)
    assert refusal(rig.owner.bench.ask(entry)) == ("invalid_argument", field)


def test_a_target_without_drafts_refuses_a_plan(tiny_models):
    with serving(tiny_models["target"]) as bench:
        owner = Owner(bench, list(PROMPT)).opened()
        entry = owner.verify_entry()
        entry.verify.draft.CopyFrom(plan_to_proto(DraftPlan("draft", 3, 0, 1.0, 100)))
        assert refusal(bench.ask(entry)) == ("unsupported", "draft")


@pytest.mark.parametrize(
    ("pending", "fan_out", "field"),
    [
        ([1, 2], [1, 1], "ahead.fan_out"),
        ([1], [0, 0], "ahead.fan_out"),
        ([1], [64, 1], "ahead.fan_out"),
        ([1 << 19], [1, 1], "proposal.token_ids"),
    ],
)
def test_what_is_asked_ahead_is_checked(tiny_models, pending, fan_out, field):
    with serving(tiny_models["draft"], "draft") as bench:
        owner = Owner(bench, list(PROMPT)).opened()
        entry = owner.propose_entry(2)
        entry.propose.ahead.pending.token_ids.extend(pending)
        entry.propose.ahead.fan_out.extend(fan_out)
        assert refusal(bench.ask(entry)) == ("invalid_argument", field)


def test_branches_free_their_blocks_with_the_next_question(tiny_models):
    with serving(tiny_models["draft"], "draft") as bench:
        owner = Owner(bench, list(PROMPT)).opened()
        entry = owner.propose_entry(4)
        entry.propose.ahead.pending.token_ids.extend([1, 2, 3])
        entry.propose.ahead.fan_out.extend([3, 2, 1, 2])
        reply = bench.ask(entry)
        assert len(reply.proposed.outcomes) == 8
        assert {len(o.proposal.token_ids) for o in reply.proposed.outcomes} == {4}
        assert bench.blocks_used > -(-(len(PROMPT) + 3) // 8)
        assert bench.ask(owner.propose_entry(1)).HasField("proposed")
        assert bench.blocks_used == -(-len(PROMPT) // 8)


def test_a_context_that_is_full_is_not_prepared_for(tiny_models):
    with serving(tiny_models["draft"], "draft", context_length=24) as bench:
        owner = Owner(bench, list(PROMPT)).opened()
        for pending, left in (([1], 2), ([1, 2], 1)):
            entry = owner.propose_entry(4)
            entry.propose.ahead.pending.token_ids.extend(pending)
            entry.propose.ahead.fan_out.extend([1] * (len(pending) + 1))
            outcomes = bench.ask(entry).proposed.outcomes
            assert {len(o.proposal.token_ids) for o in outcomes} == {left}
        entry = owner.propose_entry(4)
        entry.propose.ahead.pending.token_ids.extend([1, 2, 3])
        entry.propose.ahead.fan_out.extend([1] * 4)
        assert refusal(bench.ask(entry))[0] == "context_exceeded"


def test_a_session_that_is_closed_is_forgotten_with_what_drafts_were_asked_for_it(make_rig):
    rig = make_rig(GREEDY)
    rig.run()
    assert rig.drafts.asks and not rig.drafts.forgotten
    rig.owner.close()
    assert rig.drafts.forgotten == [(rig.owner.session_id, 0)]


async def test_a_pool_keeps_no_session_that_was_forgotten():
    pool = DraftPool(ChannelSecurity())
    header = worker_pb2.EntryHeader(session_id="a" * 22, epoch=1, owner_nonce=7, number=3)
    session = pool.session(header, GREEDY, "127.0.0.1:1")
    assert pool.session(header, GREEDY, "127.0.0.1:1") is session
    gone = weakref.ref(session)
    del session
    pool.forget(key_of(header))
    pool.forget(key_of(header))
    assert gone() is None
    await pool.close()


def test_all_questions_of_a_pass_leave_before_its_first_reply(make_rig):
    rig = make_rig()
    seen = []
    both = threading.Event()
    rig.drafts.ask = lambda *_: seen.append("question")

    def sink(reply):
        assert reply.header.more
        seen.append("reply")
        if seen.count("reply") == 2:
            both.set()

    other = Rig(rig.owner.bench, rig.drafts, GREEDY)
    worker = rig.owner.bench.worker
    worker.submit([rig.entry(), other.entry()], sink)
    assert both.wait(TIMEOUT_S)
    assert seen == ["question", "question", "reply", "reply"]
