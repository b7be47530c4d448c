"""What a prefill is measured to cost, on a runner whose passes take a known time."""

import time

import pytest
import torch

from outrider.engine import prefill_cost
from outrider.engine.prefill_cost import measure_prefill
from outrider.engine.rows import Output


class Runner:
    """A pass takes a base, and so much for each row and each place that it sees."""

    block_tokens = 32

    def __init__(self, row_s, sight_s=0.0):
        self.row_s, self.sight_s = row_s, sight_s
        self.passes = []

    def run(self, batch):
        [rows] = batch
        assert len(rows.blocks) * 32 >= rows.stop and rows.num_logits == 1
        count = len(rows.token_ids)
        self.passes.append((rows.start, count))
        time.sleep(count * (self.row_s + self.sight_s * rows.start))
        return Output(torch.zeros(1, 4), [None])


def test_passes_get_longer_until_one_tells_something():
    runner = Runner(0.0005)
    token_s, _ = measure_prefill(runner, num_blocks=512, max_rows=512, context_length=8192)
    assert token_s == pytest.approx(0.0005, rel=0.2)
    assert max(count for _, count in runner.passes) == 512


def test_a_slow_machine_is_not_kept_waiting(monkeypatch):
    monkeypatch.setattr(prefill_cost, "_LONG_S", 0.1)
    runner = Runner(0.008)
    token_s, _ = measure_prefill(runner, num_blocks=64, max_rows=512, context_length=64)
    assert token_s == pytest.approx(0.008, rel=0.2)
    assert runner.passes == [(0, 32)]


def test_the_context_counts_where_it_does():
    runner = Runner(0.001, 1e-6)
    token_s, context_s = measure_prefill(runner, num_blocks=512, max_rows=256, context_length=8192)
    assert token_s == pytest.approx(0.001, rel=0.2)
    assert context_s == pytest.approx(1e-6, rel=0.3)


def test_it_stays_within_a_small_pool():
    token_s, context_s = measure_prefill(
        Runner(0.0001), num_blocks=2, max_rows=512, context_length=8192
    )
    assert token_s > 0 and context_s == 0.0
