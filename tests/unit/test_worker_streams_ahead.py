"""A device that goes through plain rounds one ahead of the host: what CUDA does, here by hand.

The runner computes a pass before it is asked for, as a device that runs ahead would, so that its
KV holds rows that no one has accounted for yet.
"""

import dataclasses
import queue

import pytest
import worker_harness
from worker_harness import (
    GREEDY,
    Owner,
    coupled,
    plain_greedy,
    random_tokens,
    refusal,
    serving,
    verdict_of,
)

from outrider.engine import drawing
from outrider.engine.model_runner import ModelRunner
from outrider.engine.rows import Rows

PROMPT = random_tokens(21, seed=31)


class AheadRunner(ModelRunner):
    """Streams like `CudaRunner.stream`; breaks in pass `breaks_at`."""

    max_stream = 8

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.streamed = 0
        self.stopped = 0
        self.breaks_at = None

    def can_stream(self, draw):
        return not draw.spec.stop_ids or draw.spec.min_tokens == 0

    def stream(self, batch, stop):
        steps = min(rows.draw.steps for rows in batch)
        rows = [
            # A device has its own copy of the block tables.
            dataclasses.replace(r, blocks=list(r.blocks), draw=dataclasses.replace(r.draw, steps=1))
            for r in batch
        ]
        picks = self.one_pass(rows)
        for step in range(steps):
            ahead = None
            if step + 1 < steps and not stop():
                rows = [after(r, pick) for r, pick in zip(rows, picks, strict=True)]
                ahead = self.one_pass(rows)
            self.streamed += 1
            yield picks
            if ahead is None:
                self.stopped += step + 1 < steps
                return
            picks = ahead

    def one_pass(self, rows):
        if self.streamed == self.breaks_at:
            self.breaks_at = None
            raise RuntimeError("the device broke")
        return [drawn.token_ids[0] for drawn in drawing.run(rows, self).drawn]


def after(rows, pick):
    position = rows.start + len(rows.token_ids)
    draw = dataclasses.replace(rows.draw, base_len=position + 1)
    return Rows([pick], position, rows.blocks, 1, draw)


@pytest.fixture
def bench(tiny_models, monkeypatch):
    def make(loaded, num_blocks, block_tokens=8):
        return AheadRunner(loaded, num_blocks=num_blocks, block_tokens=block_tokens)

    monkeypatch.setattr(worker_harness, "make_runner", make)
    with serving(tiny_models["target"], threaded=False, num_blocks=48) as made:
        yield made


def start(bench, more, spec=GREEDY, tokens=PROMPT):
    """A session that runs ahead for `more` rounds, and where its replies come in."""
    owner = Owner(bench, list(tokens), spec=spec)
    bench.post(owner.open_entry())
    entry = owner.verify_entry()
    entry.verify.more_rounds = more
    replies = queue.SimpleQueue()
    bench.worker.submit([entry], replies.put)
    return owner, replies


def pump_out(bench, *queues):
    """Turn until the work is done; the replies in each queue."""
    for _ in range(400):
        bench.worker._read_inbox(0.0)
        if not bench.worker._engine.scheduler.works:
            break
        bench.worker._step()
    got = []
    for replies in queues:
        got.append([])
        while not replies.empty():
            got[-1].append(replies.get())
    return got


def tokens_of(replies):
    return [token for reply in replies for token in verdict_of(reply).token_ids]


@pytest.mark.parametrize("spec", [GREEDY, coupled(5, top_p=0.9)], ids=["greedy", "coupled"])
def test_tokens_are_those_of_rounds_one_by_one(bench, spec):
    _, replies = start(bench, 29, spec)
    (told,) = pump_out(bench, replies)
    reference = Owner(bench, list(PROMPT), spec=spec)
    bench.post(reference.open_entry())
    expected = []
    for _ in range(30):
        reply = bench.post(reference.verify_entry())
        pump_out(bench)
        expected += verdict_of(reply.get()).token_ids
        reference.tokens = [*PROMPT, *expected]
    assert tokens_of(told) == expected
    assert [reply.header.more for reply in told] == [True] * 29 + [False]
    assert bench.runner.streamed >= 24 and bench.runner.stopped == 0


def test_several_run_together_and_end_at_their_own_time(bench, tiny_models):
    folder = tiny_models["target"]
    texts = [random_tokens(9 + i, seed=i) for i in range(4)]
    started = [start(bench, more, tokens=t) for t, more in zip(texts, (3, 11, 20, 20), strict=True)]
    told = pump_out(bench, *(replies for _, replies in started))
    for text, replies, count in zip(texts, told, (4, 12, 21, 21), strict=True):
        assert tokens_of(replies) == plain_greedy(folder, text, count)
    assert bench.runner.streamed > 15
    for owner, _ in started:
        bench.post(owner.entry())  # Nothing to do: refused, and harmless.
        entry = owner.entry()
        entry.close.SetInParent()
        bench.post(entry)
    assert bench.blocks_used == 0


def test_a_newcomer_stops_the_stream_and_joins(bench, tiny_models):
    folder = tiny_models["target"]
    _, first = start(bench, 40)
    other = random_tokens(13, seed=77)
    owner = Owner(bench, list(other))
    second = queue.SimpleQueue()
    turns = 0
    for result in bench_steps(bench):
        bench.worker._handle_result(result)
        turns += 1
        if turns == 3:
            bench.worker.submit([owner.open_entry()], lambda reply: None)
            entry = owner.verify_entry()
            entry.verify.more_rounds = 10
            bench.worker.submit([entry], second.put)
    assert turns < 8 and bench.runner.stopped == 1
    told = pump_out(bench, first, second)
    assert tokens_of(told[0]) == plain_greedy(folder, PROMPT, 41)
    assert tokens_of(told[1]) == plain_greedy(folder, other, 11)


def extend(owner, until_len):
    """The work under way goes on until its log has this length; nobody answers."""
    entry = owner.entry()
    entry.extend.until_len = until_len
    owner.bench.worker.submit([entry], lambda reply: pytest.fail("extend has no reply"))


@pytest.mark.parametrize("spec", [GREEDY, coupled(5, top_p=0.9)], ids=["greedy", "coupled"])
@pytest.mark.parametrize("before", [0, 9])
def test_one_that_is_extended_goes_on_and_the_stream_does_not_stop(bench, spec, before):
    owner, replies = start(bench, 40, spec)
    (expected,) = pump_out(bench, replies)
    owner, replies = start(bench, before, spec)
    bench.worker._read_inbox(0.0)
    streamed = bench.runner.streamed
    extend(owner, len(PROMPT) + 31)
    (told,) = pump_out(bench, replies)
    assert tokens_of(told) == tokens_of(expected)[:31]
    assert [reply.header.more for reply in told] == [True] * 30 + [False]
    assert bench.runner.stopped == 0 and bench.runner.streamed > streamed + 20
    assert bench.worker.num_unread == 0


def test_what_extends_nothing_changes_nothing(bench):
    owner, replies = start(bench, 12)
    bench.worker._read_inbox(0.0)
    extend(owner, len(PROMPT) + 5)  # Fewer than are left.
    (told,) = pump_out(bench, replies)
    assert len(told) == 13
    extend(owner, len(PROMPT) + 99)  # All is over.
    stranger = Owner(bench, list(PROMPT))
    extend(stranger, len(PROMPT) + 99)
    assert bench.worker.num_unread == 2
    bench.worker._extend()
    assert bench.worker.num_unread == 0 and pump_out(bench, replies) == [[]]
    assert bench.worker.counters["refused_unknown_session"] == 1
    assert bench.worker.load.queued == 0


def test_one_that_was_overtaken_extends_nothing_and_takes_no_ones_place(bench):
    owner, replies = start(bench, 12)
    bench.worker._read_inbox(0.0)
    late, early = owner.entry(), owner.entry()
    late.extend.until_len = early.extend.until_len = len(PROMPT) + 40
    bench.worker.submit([early], None)
    bench.worker._extend()
    cancel = late  # Its number is below what was looked at, and it is carried out all the same.
    cancel.cancel.through_number = 0
    bench.worker.submit([cancel], None)
    (told,) = pump_out(bench, replies)
    assert len(told) == 40 and bench.worker.counters["cancelled"] == 1
    # One about the work before that comes when the next is under way.
    owner.tokens.extend(tokens_of(told))
    late = owner.entry()
    late.extend.until_len = len(owner.tokens) + 20
    bench.worker.submit([owner.verify_entry()], replies.put)
    bench.worker._read_inbox(0.0)
    bench.worker.submit([late], None)
    (told,) = pump_out(bench, replies)
    assert len(told) == 1


def bench_steps(bench):
    bench.worker._read_inbox(0.0)
    return bench.worker._engine.steps(stop=lambda: not bench.worker._inbox.empty())


def test_a_stop_id_ends_one_and_the_others_go_on(bench, tiny_models):
    folder = tiny_models["target"]
    expected = plain_greedy(folder, PROMPT, 20)
    stop_id = expected[9]
    ends = expected.index(stop_id) + 1
    spec = dataclasses.replace(GREEDY, stop_ids=(stop_id,), prompt_len=len(PROMPT))
    other = random_tokens(10, seed=4)
    _, stopped = start(bench, 19, spec)
    _, going = start(bench, 19, tokens=other)
    told = pump_out(bench, stopped, going)
    assert tokens_of(told[0]) == expected[:ends] and not told[0][-1].header.more
    assert tokens_of(told[1]) == plain_greedy(folder, other, 20)


def test_cancelling_ends_it_and_the_session_goes_on_where_it_stood(bench, tiny_models):
    owner, replies = start(bench, 40)
    for turn, result in enumerate(bench_steps(bench)):
        bench.worker._handle_result(result)
        if turn == 2:
            cancel = owner.entry()
            cancel.cancel.through_number = cancel.header.number - 1
            bench.worker.submit([cancel], lambda reply: None)
    (told,) = pump_out(bench, replies)
    assert refusal(told[-1])[0] == "cancelled"
    so_far = tokens_of(told[:-1])
    assert 3 <= len(so_far) < 8
    owner.tokens = [*PROMPT, *so_far[:2]]  # The owner believes less than was computed.
    reply = bench.post(owner.verify_entry())
    pump_out(bench)
    assert list(verdict_of(reply.get()).token_ids) == [so_far[2]]


def test_a_device_that_breaks_fails_the_sessions_and_serves_on(bench, tiny_models):
    bench.runner.breaks_at = 3
    owner, replies = start(bench, 20)
    (told,) = pump_out(bench, replies)
    assert refusal(told[-1])[0] == "internal"
    so_far = tokens_of(told[:-1])
    owner.tokens = [*PROMPT, *so_far]
    reply = bench.post(owner.verify_entry(start=0))
    pump_out(bench)
    expected = plain_greedy(tiny_models["target"], PROMPT, len(so_far) + 1)
    assert [*so_far, *verdict_of(reply.get()).token_ids] == expected


def test_a_verification_comes_first_by_itself(bench, tiny_models):
    """Its guesses take several rows; what follows is run ahead."""
    expected = plain_greedy(tiny_models["target"], PROMPT, 20)
    owner = Owner(bench, list(PROMPT))
    bench.post(owner.open_entry())
    entry = owner.verify_entry([*expected[:2], expected[2] + 1])
    entry.verify.more_rounds = 17
    replies = queue.SimpleQueue()
    bench.worker.submit([entry], replies.put)
    (told,) = pump_out(bench, replies)
    assert tokens_of(told) == expected
    assert len(told) == 18 and bench.runner.streamed == 16  # Two streams of 8; one is left over.


def test_one_that_wants_logprobs_is_not_run_ahead(bench):
    spec = dataclasses.replace(GREEDY, logprobs=2)
    _, replies = start(bench, 9, spec)
    (told,) = pump_out(bench, replies)
    assert len(told) == 10 and bench.runner.streamed == 0
    assert all(verdict_of(reply).logprobs for reply in told)
