"""Rank 0 leads, the others follow: what each is told, streams that end early, ranks that break."""

import dataclasses
import socket
import threading

import pytest
import torch
from worker_harness import GREEDY, Owner, coupled, load, make_runner, random_tokens, serving

from outrider.engine.engine import Engine
from outrider.engine.group import Group as GroupOfRanks
from outrider.engine.group import Seat
from outrider.engine.group_runner import Leader, StreamingLeader, follow, lead
from outrider.engine.rows import Branch, Draw, Drawn, Output, Rows
from outrider.engine.scheduler import Work
from outrider.engine.sequence import Sequence
from outrider.engine.steps import Listener, Teller
from outrider.engine.watch import Watch
from outrider.errors import FailedPrecondition, Unavailable

VOCAB = 32
DRAW = Draw(GREEDY, 4)
BATCH = [Rows([1, 2, 3], 1, [0, 1], 1, DRAW)]


class FakeShard:
    """Notes what it is asked for; token n of a stream is n."""

    block_tokens = 8
    breaks = None

    def __init__(self):
        self.calls = []

    def takes(self, batch):
        return all(rows.draw is not None and not rows.draw.branches for rows in batch)

    def run(self, batch):
        self._note("run", batch)
        return Output(torch.empty(0), [Drawn([7]) for _ in batch])

    def forward(self, batch):
        self._note("forward", batch)
        rows = sum(r.num_logits for r in batch)
        return torch.arange(rows * VOCAB, dtype=torch.float32).view(rows, VOCAB)

    def copy_blocks(self, pairs):
        self._note("copy", tuple(pairs))

    def close(self):
        self._note("close", None)

    def _note(self, what, of):
        if self.breaks == what:
            raise RuntimeError("the device broke")
        self.calls.append((what, plain(of) if isinstance(of, list) else of))


class FakeStream(FakeShard):
    max_stream = 16

    def can_stream(self, draw):
        return True

    def stream(self, batch, stop):
        self._note("stream", batch)
        steps = batch[0].draw.steps
        for step in range(steps):
            last = step + 1 == steps or stop()
            if not last:
                self._note("pass", step + 1)
            yield [step] * len(batch)
            if last:
                return


def plain(batch):
    """Rows as values, whatever their lists are."""
    return [
        (list(r.token_ids), r.start, list(r.blocks), r.num_logits, list(r.parents)) for r in batch
    ]


class Group:
    """Rank 0 and rank 1, which follows on a thread."""

    def __init__(self, make=FakeShard):
        self.ends = socket.socketpair()
        self.shards = make(), make()
        self.watch = Watch({}, timeout_s=1, on_loss=lambda reason: None)
        self.leader = lead(self.shards[0], Teller(self.ends[:1]), self.watch)
        self.error = None
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _follow(self):
        try:
            follow(self.shards[1], Listener(self.ends[1]))
        except Exception as error:
            self.error = error

    def close(self):
        self.leader.end()
        self.ends[0].close()
        self._thread.join(5)
        self.ends[1].close()


@pytest.fixture
def groups():
    made = []

    def make(kind=FakeShard):
        made.append(Group(kind))
        return made[-1]

    yield make
    for group in made:
        group.close()


def test_every_rank_is_asked_for_the_same_in_the_same_order(groups):
    group = groups()
    assert type(group.leader) is Leader
    assert group.leader.run(BATCH).drawn == [Drawn([7])]
    prefill = [Rows([5, 6], 0, [2], 0)]
    assert group.leader.run(prefill).drawn == [None]
    branches = (Branch(0, 0), Branch(1, 1))
    draw = Draw(coupled(3), 4, 2, branches)
    branching = [Rows([1, 2], 3, [0, 1], 2, draw, scratch=[4, 5])]
    assert len(group.leader.run(branching).drawn[0].branches) == 2
    group.leader.end()
    group._thread.join(5)
    assert group.error is None
    assert group.shards[0].calls == group.shards[1].calls
    kinds = [what for what, _ in group.shards[0].calls]
    assert kinds == ["run", "forward", "forward", "copy", "forward", "forward", "close"]


@pytest.mark.parametrize("stopped_after", [None, 0, 3])
def test_a_stream_has_as_many_passes_on_every_rank(groups, stopped_after):
    group = groups(FakeStream)
    assert type(group.leader) is StreamingLeader
    batch = [dataclasses.replace(BATCH[0], draw=dataclasses.replace(DRAW, steps=6))]
    asked = []

    def stop():
        asked.append(None)
        return stopped_after is not None and len(asked) > stopped_after

    passes = 6 if stopped_after is None else stopped_after + 1
    assert list(group.leader.stream(batch, stop)) == [[n] for n in range(passes)]
    group.leader.run(BATCH)
    group.leader.end()
    group._thread.join(5)
    assert group.error is None
    assert group.shards[0].calls == group.shards[1].calls
    assert sum(what == "pass" for what, _ in group.shards[1].calls) == passes - 1


def test_a_stream_that_rank_0_gives_up_ends_on_every_rank(groups):
    """The consumer of its results broke, say."""
    group = groups(FakeStream)
    batch = [dataclasses.replace(BATCH[0], draw=dataclasses.replace(DRAW, steps=6))]
    picks = group.leader.stream(batch, lambda: False)
    assert [next(picks), next(picks)] == [[0], [1]]
    picks.close()
    group.leader.run(BATCH)
    group.leader.end()
    group._thread.join(5)
    assert group.error is None
    assert group.shards[0].calls == group.shards[1].calls
    assert [what for what, _ in group.shards[1].calls][-2:] == ["run", "close"]


def test_after_a_failure_nothing_is_run_any_more(groups):
    group = groups()
    group.leader.run(BATCH)
    group.shards[0].breaks = "forward"
    group.watch.verdict = lambda wait_s: ""
    with pytest.raises(Unavailable, match="a pass of the group failed: the device broke"):
        group.leader.forward(BATCH)
    group.shards[0].breaks = None
    for again in (group.leader.forward, group.leader.run):
        with pytest.raises(Unavailable, match="the device broke"):
            again(BATCH)
    assert [what for what, _ in group.shards[0].calls] == ["run"]


def test_the_cause_is_the_watchs_where_it_knows_one(groups):
    group = groups()
    group.shards[0].breaks = "run"
    group.watch.verdict = lambda wait_s: "rank 1 is gone: it was killed by SIGKILL"
    with pytest.raises(Unavailable, match=r"^rank 1 is gone: it was killed by SIGKILL$"):
        group.leader.run(BATCH)


def test_a_rank_that_breaks_says_so_by_its_error(groups):
    group = groups()
    group.shards[1].breaks = "run"
    group.leader.run(BATCH)
    group._thread.join(5)
    assert "the device broke" in str(group.error)


class Breaking:
    """A runner that works `passes` times."""

    def __init__(self, runner, passes):
        self.block_tokens = runner.block_tokens
        self._runner = runner
        self.left = passes
        self.asked = 0

    def run(self, batch):
        self.asked += 1
        if not self.left:
            raise Unavailable("rank 1 is gone")
        self.left -= 1
        return self._runner.run(batch)


def test_an_engine_whose_runner_is_gone_ends_with_it(tiny_models):
    """No work is failed, nothing is tried one by one."""

    runner = Breaking(make_runner(load(tiny_models["target"]), 64), 0)
    engine = Engine(runner, num_blocks=64, max_rows=64, find_idle=tuple)
    for seed in range(2):
        tokens = random_tokens(9, seed=seed)
        engine.scheduler.submit(Work(Sequence(), tokens, 1, 9, float("inf")))
    with pytest.raises(Unavailable, match="rank 1 is gone"):
        next(engine.steps(stop=lambda: True))
    assert len(engine.scheduler.running) == 2 and runner.asked == 1


def test_a_worker_whose_runner_is_gone_answers_nobody_and_ends(tiny_models):
    """Its sessions are not told that they failed: they go on elsewhere."""
    with serving(tiny_models["target"], threaded=False) as bench:
        owners = [Owner(bench, random_tokens(9, seed=seed)).opened() for seed in range(2)]
        bench.worker._engine.runner = Breaking(bench.runner, 1)
        first = [bench.worker.submit([o.verify_entry()], lambda r: None) for o in owners]
        assert first == [None, None]
        bench.pump()
        replies = []
        for owner in owners:
            owner.tokens = random_tokens(12, seed=9)
            bench.worker.submit([owner.verify_entry()], replies.append)
        with pytest.raises(Unavailable, match="rank 1 is gone"):
            bench.worker.run()
        assert replies == []


def test_ranks_that_are_set_up_differently_are_told_apart(monkeypatch):
    def gather(everyone, own):
        everyone[0].copy_(own)
        everyone[1].copy_(own + torch.tensor([0, 24]))

    monkeypatch.setattr(torch.distributed, "all_gather", gather)
    group = GroupOfRanks(Seat(1, 2), torch.device("cpu"))
    with pytest.raises(FailedPrecondition, match="max_rows is 512 at rank 0 and 536 at rank 1"):
        group.agree({"context_length": 4096, "max_rows": 512})
