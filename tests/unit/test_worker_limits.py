"""Deadlines, cancellation, memory and sessions: everything ends, and what it held comes back."""

import threading
import time

import pytest
from worker_harness import (
    Owner,
    plain_greedy,
    random_tokens,
    refusal,
    serving,
    verdict_of,
)


@pytest.fixture(scope="module")
def folder(tiny_models):
    return tiny_models["target"]


@pytest.fixture
def bench(folder):
    with serving(folder) as bench:
        yield bench


class Gate:
    """Holds up every pass of a worker until `open`; `reached` says that one stands there."""

    def __init__(self, bench):
        self.reached, self._open = threading.Event(), threading.Event()
        self.passes = 0
        forward = bench.runner.forward

        def gated(batch):
            self.passes += 1
            self.reached.set()
            assert self._open.wait(20)
            return forward(batch)

        bench.runner.forward = gated

    def open(self):
        self._open.set()


def reply_of(replies):
    return replies.get(timeout=20)


def wait_until(condition):
    stop = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < stop
        time.sleep(0.002)


def test_an_entry_that_expires_in_the_queue_is_refused_and_computes_nothing(bench):
    first, late = (Owner(bench, random_tokens(9, seed=n)).opened() for n in range(2))
    gate = Gate(bench)
    running = bench.post(first.verify_entry())
    assert gate.reached.wait(10)
    # It lies in the inbox while the pass runs: that time is its own as well.
    expired = bench.post(late.verify_entry(timeout_ms=20))
    time.sleep(0.04)
    gate.open()
    verdict_of(reply_of(running))
    assert refusal(reply_of(expired)) == ("deadline_exceeded", "")
    assert gate.passes == 1 and late.cached == []
    verdict_of(late.verify(start=0))


def test_an_entry_that_expires_while_it_waits_for_memory_is_refused(folder):
    with serving(folder, num_blocks=8, max_rows=4) as bench:
        first, late = Owner(bench, random_tokens(60)).opened(), Owner(bench, [1] * 30).opened()
        forward = bench.runner.forward
        bench.runner.forward = lambda batch: (time.sleep(0.01), forward(batch))[1]
        running = bench.post(first.verify_entry())
        expired = bench.post(late.verify_entry(timeout_ms=30))
        assert refusal(reply_of(expired)) == ("deadline_exceeded", "")
        assert running.empty()
        verdict_of(reply_of(running))


def test_a_deadline_that_passes_between_chunks_stops_the_work(folder):
    with serving(folder, max_rows=4) as bench:
        owner = Owner(bench, random_tokens(200)).opened()
        forward = bench.runner.forward
        bench.runner.forward = lambda batch: (time.sleep(0.02), forward(batch))[1]
        reply = owner.verify(timeout_ms=200)
        assert refusal(reply) == ("deadline_exceeded", "")
        assert 0 < len(owner.cached) < 200
        bench.runner.forward = forward
        # What was computed is kept, and right.
        verdict = verdict_of(owner.verify(delta=()))
        assert list(verdict.token_ids) == plain_greedy(folder, owner.tokens, 1)


def test_cancel_drops_what_it_names_and_answers_nothing_else(folder):
    with serving(folder, max_rows=4) as bench:
        owner, other = (Owner(bench, random_tokens(100, seed=n)).opened() for n in range(2))
        forward = bench.runner.forward
        bench.runner.forward = lambda batch: (time.sleep(0.005), forward(batch))[1]
        dropped, kept = bench.post(owner.verify_entry()), bench.post(other.verify_entry())
        wait_until(lambda: len(owner.cached) or len(other.cached))
        entry = owner.entry()
        entry.cancel.through_number = owner.number - 2
        nothing = bench.post(entry)
        bench.settle()
        assert dropped.empty()
        entry = owner.entry()
        entry.cancel.through_number = owner.number - 1
        nothing = bench.post(entry)
        assert refusal(reply_of(dropped)) == ("cancelled", "")
        assert list(verdict_of(reply_of(kept)).token_ids) == plain_greedy(folder, other.tokens, 1)
        assert nothing.empty() and bench.worker.load.queued == 0
        verdict = verdict_of(owner.verify(delta=()))
        assert list(verdict.token_ids) == plain_greedy(folder, owner.tokens, 1)


def test_a_cancel_that_is_refused_has_no_reply_either(bench):
    entry = Owner(bench, [1]).entry()
    entry.cancel.through_number = 5
    replies = bench.post(entry)
    bench.settle()
    assert replies.empty()
    assert bench.worker.counters["refused_unknown_session"] == 1


def test_a_second_entry_of_a_session_under_way_is_refused(bench, folder):
    owner = Owner(bench, random_tokens(9)).opened()
    gate = Gate(bench)
    first = bench.post(owner.verify_entry([1, 2]))
    gate.reached.wait(10)
    second = bench.post(owner.verify_entry([3]))
    third = bench.post(owner.verify_entry(tokens=[5, 6]))
    gate.open()
    verdict_of(reply_of(first))
    # Handled after the pass that was running: the session is idle again by then, or it is not.
    results = [reply_of(second), reply_of(third)]
    assert results[0].HasField("verified")
    assert refusal(results[1]) == ("invalid_argument", "")
    assert owner.bench.session(owner).sequence.log.tokens == owner.tokens
    assert list(verdict_of(owner.verify()).token_ids) == plain_greedy(folder, owner.tokens, 1)


def test_closing_frees_kv_at_once_and_drops_work(bench):
    before = bench.blocks_used
    owner = Owner(bench, random_tokens(50)).opened()
    verdict_of(owner.verify())
    assert bench.blocks_used > before
    gate = Gate(bench)
    running = bench.post(owner.verify_entry())
    gate.reached.wait(10)
    entry = owner.entry()
    entry.close.SetInParent()
    closed = bench.post(entry)
    gate.open()
    # The pass that runs ends first, so that nothing is written into KV that is someone else's.
    verdict_of(reply_of(running))
    assert reply_of(closed).HasField("closed")
    assert bench.blocks_used == before and bench.worker.load.sessions == 0


def test_closing_between_chunks_frees_kv_of_running_work(folder):
    with serving(folder, max_rows=4) as bench:
        owner = Owner(bench, random_tokens(200)).opened()
        forward = bench.runner.forward
        bench.runner.forward = lambda batch: (time.sleep(0.005), forward(batch))[1]
        running = bench.post(owner.verify_entry())
        wait_until(lambda: len(owner.cached) > 4)
        assert owner.close().HasField("closed")
        assert refusal(reply_of(running)) == ("cancelled", "")
        assert bench.blocks_used == 0 and bench.worker.load.queued == 0


def test_work_whose_stream_ended_is_dropped(folder):
    with serving(folder, max_rows=4) as bench:
        owner, other = (Owner(bench, random_tokens(150, seed=n)).opened() for n in range(2))
        forward = bench.runner.forward
        bench.runner.forward = lambda batch: (time.sleep(0.003), forward(batch))[1]
        lost = []
        bench.worker.submit([owner.verify_entry()], lost.append)
        kept = bench.post(other.verify_entry())
        wait_until(lambda: owner.cached or other.cached)
        bench.worker.abandon(lost.append)
        verdict_of(reply_of(kept))
        assert [refusal(reply)[0] for reply in lost] == ["cancelled"]
        assert len(owner.cached) < 150


def test_idle_sessions_are_closed_after_a_while(folder, monkeypatch):
    monkeypatch.setattr("outrider.worker.worker._IDLE_CHECK_S", 0.02)
    with serving(folder, session_idle_s=0.3) as bench:
        old, young = (Owner(bench, random_tokens(20, seed=n)).opened() for n in range(2))
        verdict_of(old.verify())
        verdict_of(young.verify())
        stop = time.monotonic() + 0.7
        while time.monotonic() < stop:
            verdict_of(young.verify(delta=()))
            time.sleep(0.01)
        assert bench.session(old) is None and bench.session(young) is not None
        assert bench.worker.counters["sessions_expired"] == 1
        assert refusal(old.verify()) == ("unknown_session", "")
        wait_until(lambda: bench.worker.load.sessions == 0)
        assert bench.blocks_used == 0


def test_the_session_missed_least_makes_room_for_a_new_one(folder):
    with serving(folder, max_sessions=3) as bench:
        owners = [Owner(bench, random_tokens(9, seed=n)).opened() for n in range(3)]
        for owner in (owners[1], owners[0], owners[2]):
            verdict_of(owner.verify())
        newest = Owner(bench, random_tokens(9)).opened()
        assert [bench.session(owner) is None for owner in owners] == [False, True, False]
        assert bench.worker.counters["sessions_evicted"] == 1
        assert bench.worker.load.sessions == 3
        verdict_of(newest.verify())


def test_opening_a_known_session_again_evicts_nobody(folder):
    """Least of all itself: it would lose its KV between two generations."""
    with serving(folder, max_sessions=2) as bench:
        first, second = (Owner(bench, random_tokens(9, seed=n)).opened() for n in range(2))
        verdict_of(first.verify())
        verdict_of(second.verify())
        assert first.open().opened.have_len == 9
        assert bench.session(second) is not None
        assert bench.worker.counters["sessions_evicted"] == 0


def test_busy_sessions_are_not_evicted(folder):
    with serving(folder, max_sessions=1) as bench:
        owner, late = Owner(bench, random_tokens(9)).opened(), Owner(bench, random_tokens(9))
        original = bench.worker._tier.begin
        replies = []

        def begin(*args):
            work = original(*args)
            bench.worker.submit([late.open_entry()], replies.append)
            return work

        bench.worker._tier.begin = begin
        verdict_of(owner.verify())
        assert [refusal(reply)[0] for reply in replies] == ["resource_exhausted"]


def test_a_draining_worker_takes_no_new_session_and_serves_the_others(bench):
    owner = Owner(bench, random_tokens(9)).opened()
    bench.worker.draining = True
    assert refusal(Owner(bench, [1]).open())[0] == "draining"
    verdict_of(owner.verify())
    assert owner.open().opened.have_len == 9


def test_a_base_that_fills_the_context_is_refused(folder):
    with serving(folder, context_length=32) as bench:
        owner = Owner(bench, random_tokens(31)).opened()
        verdict = verdict_of(owner.verify([5, 6, 7]))
        assert (verdict.num_proposed, len(verdict.token_ids)) == (0, 1)
        owner.tokens.append(verdict.token_ids[0])
        assert refusal(owner.verify()) == ("context_exceeded", "base_len")
        assert owner.bench.session(owner).sequence.log.tokens == owner.tokens[:31]


def test_work_that_can_never_fit_into_the_pool_is_refused(folder):
    with serving(folder, num_blocks=4) as bench:
        owner = Owner(bench, random_tokens(30)).opened()
        assert refusal(owner.verify([1, 2, 3])) == ("resource_exhausted", "")
        verdict = verdict_of(owner.verify([1, 2]))
        assert verdict.num_proposed == 2
        other = Owner(bench, random_tokens(33)).opened()
        assert refusal(other.verify()) == ("resource_exhausted", "")


def test_a_full_queue_refuses_more(folder):
    with serving(folder, max_queued=2) as bench:
        owners = [Owner(bench, random_tokens(5, seed=n)).opened() for n in range(4)]
        gate = Gate(bench)
        blocker = bench.post(owners[0].verify_entry())
        gate.reached.wait(10)
        replies = [bench.post(owner.verify_entry()) for owner in owners[1:]]
        gate.open()
        verdict_of(reply_of(blocker))
        assert [reply_of(r).HasField("verified") for r in replies[:2]] == [True, True]
        assert refusal(reply_of(replies[2])) == ("resource_exhausted", "")


def test_sessions_beyond_the_pool_take_turns_and_get_right_results(folder):
    """KV of the idle ones goes; it comes back from the tokens."""
    with serving(folder, num_blocks=8) as bench:
        owners = [Owner(bench, random_tokens(25, seed=n)).opened() for n in range(4)]
        for _ in range(3):
            posted = [(owner, bench.post(owner.verify_entry([1, 2]))) for owner in owners]
            for owner, replies in posted:
                verdict = verdict_of(reply_of(replies))
                assert verdict.token_ids[0] == plain_greedy(folder, owner.tokens, 1)[0]
                owner.tokens.extend(verdict.token_ids)
        assert bench.worker.counters["kv_evicted"] > 0
        for owner in owners:
            owner.close()
        assert bench.blocks_used == 0


def failing(bench, marked):
    """The next passes that carry rows of `marked`'s prompt break."""
    forward = bench.runner.forward

    def broken(batch):
        if any(list(rows.token_ids[:3]) == marked.tokens[:3] for rows in batch):
            raise RuntimeError("the device is on fire")
        return forward(batch)

    bench.runner.forward = broken
    return forward


def test_one_sessions_failing_pass_stays_in_that_session(bench, folder):
    owners = [Owner(bench, random_tokens(10 + n, seed=n)).opened() for n in range(4)]
    forward = bench.runner.forward
    gate = Gate(bench)
    blocker = Owner(bench, [1, 2]).opened()
    first = bench.post(blocker.verify_entry())
    gate.reached.wait(10)
    bench.runner.forward = forward
    failing(bench, owners[2])
    replies = [bench.post(owner.verify_entry([1])) for owner in owners]
    gate.open()
    verdict_of(reply_of(first))
    for owner, queue in zip(owners, replies, strict=True):
        reply = reply_of(queue)
        if owner is owners[2]:
            assert refusal(reply) == ("internal", "") and "fire" in reply.refused.message
        else:
            assert verdict_of(reply).token_ids[0] == plain_greedy(folder, owner.tokens, 1)[0]
    bench.runner.forward = forward
    verdict = verdict_of(owners[2].verify(delta=()))
    assert list(verdict.token_ids) == plain_greedy(folder, owners[2].tokens, 1)


def test_one_sessions_failing_decision_stays_in_that_session(bench, folder):
    """The same for what comes after the pass."""
    owners = [Owner(bench, random_tokens(10 + n, seed=n)).opened() for n in range(3)]
    advance = bench.worker._tier.advance
    sizes = []

    def broken(ready):
        sizes.append(len(ready))
        if any(work.sequence.log.tokens == owners[1].tokens for work, _ in ready):
            raise RuntimeError("no decision")
        return advance(ready)

    bench.worker._tier.advance = broken
    held = threading.Event()
    bench.worker.post(lambda: held.wait(10))
    replies = [bench.post(owner.verify_entry()) for owner in owners]
    held.set()
    results = [reply_of(queue) for queue in replies]
    assert refusal(results[1]) == ("internal", "")
    for owner, reply in ((owners[0], results[0]), (owners[2], results[2])):
        assert list(verdict_of(reply).token_ids) == plain_greedy(folder, owner.tokens, 1)
    assert max(sizes) == 3
    assert bench.worker.load.queued == 0


def test_the_worker_outlives_entries_that_break_it(bench, folder):
    owner = Owner(bench, random_tokens(9)).opened()
    bench.worker._tier.begin, original = None, bench.worker._tier.begin
    assert refusal(owner.verify()) == ("internal", "")
    bench.worker._tier.begin = original
    assert list(verdict_of(owner.verify()).token_ids) == plain_greedy(folder, owner.tokens, 1)
    assert bench.worker.load.queued == 0
