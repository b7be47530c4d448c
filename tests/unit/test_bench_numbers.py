"""From files and scripted clocks to the numbers of a report."""

import json

import pytest

from outrider.bench.prompts import BenchPrompt, default_prompts, read_prompts, select_evenly
from outrider.bench.report import build_report
from outrider.bench.runner import SystemRun, run_interleaved
from outrider.bench.summary import of_best_fixed, ratios, summarise
from outrider.bench.systems import RequestResult
from outrider.client import Completion, GenerationChunk, Usage, collect
from outrider.client_values import TimeStats
from outrider.errors import InvalidArgument
from outrider.types import FinishReason, SpeculationStats, TokenSource


def result(ids=(1, 2, 3), *, category="qa", ttft=0.1, last=0.3, total=0.35, usage=None):
    return RequestResult("p", category, tuple(ids), ttft, last, total, usage)


def usage(rounds=2, proposed=4, accepted=2, **time):
    stats = SpeculationStats(
        rounds=rounds,
        proposed=proposed,
        accepted=accepted,
        recovered=rounds,
        proposed_by_position=(2, 2),
        accepted_by_position=(2, 0),
    )
    return Usage(speculation=stats, time=TimeStats(**time))


def test_spec_bench_is_read_as_it_is_and_every_category_is_chosen():
    prompts = read_prompts(default_prompts())
    assert len(prompts) == 240
    assert all(prompt.chat for prompt in prompts)
    categories = {prompt.category for prompt in prompts}
    assert len(categories) == 13
    chosen = select_evenly(prompts, 20)
    assert len({prompt.id for prompt in chosen}) == 20
    assert {prompt.category for prompt in chosen} == categories
    counts = [sum(p.category == c for p in chosen) for c in categories]
    assert max(counts) - min(counts) <= 1
    assert chosen == select_evenly(prompts, 20)
    assert set(chosen[:13]) == set(select_evenly(prompts, 13))


def test_humaneval_is_read_as_raw_text():
    path = default_prompts().with_name("humaneval_a.jsonl")
    prompts = read_prompts(path)
    assert len(prompts) == 82
    assert prompts[0].id == "HumanEval/0" and not prompts[0].chat
    assert prompts[0].text.startswith("from typing import List")


def test_selection_copes_with_uneven_groups_and_any_limit():
    prompts = [BenchPrompt(f"a{i}", "a", "x", True) for i in range(5)]
    prompts += [BenchPrompt("b0", "b", "x", True)]
    ids = [p.id for p in select_evenly(prompts, None)]
    assert ids == ["a0", "b0", "a1", "a2", "a3", "a4"]
    assert len(select_evenly(prompts, 100)) == 6
    many = [BenchPrompt(str(i), str(i), "x", True) for i in range(12)]
    assert [p.id for p in select_evenly(many, 4)] == ["0", "3", "6", "9"]


@pytest.mark.parametrize(
    "line", ["{", "{}", '{"turns": []}', '{"task_id": 1, "prompt": ""}', '"text"', "[1]"]
)
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "p.jsonl"
    path.write_text('{"task_id": "a", "prompt": "b"}\n\n' + line + "\n")
    with pytest.raises(InvalidArgument, match=r"p\.jsonl:3"):
        read_prompts(path)


def test_missing_and_empty_files_are_named(tmp_path):
    with pytest.raises(InvalidArgument, match="cannot read"):
        read_prompts(tmp_path / "none")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(InvalidArgument, match="no prompts"):
        read_prompts(tmp_path / "empty")


def chunk(offset, count, at, final=False):
    done = {"finish_reason": FinishReason.EOS, "usage": Usage(completion_tokens=offset + count)}
    return GenerationChunk(
        offset=offset,
        token_ids=(5,) * count,
        sources=(TokenSource.ACCEPTED,) * count,
        elapsed_s=at,
        **(done if final else {}),
    )


def test_time_per_token_counts_tokens_not_chunks():
    done: Completion = collect([chunk(0, 1, 0.5), chunk(1, 4, 0.7), chunk(5, 4, 0.9, final=True)])
    assert (done.ttft_s, done.last_token_s, done.total_s) == (0.5, 0.9, 0.9)
    request = result(done.token_ids, ttft=done.ttft_s, last=done.last_token_s)
    assert request.tpot_s == pytest.approx(0.4 / 8)  # per chunk it would be 0.2
    assert result((1,), last=0.1).tpot_s is None
    assert result((), ttft=None, last=None).tpot_s is None


def test_a_summary_adds_up():
    told = usage(
        verify_us=9000,
        verify_compute_us=6000,
        draft_worker_us=2500,
        verify_worker_us=6500,
        rounds_us=13_000,
    )
    run = SystemRun(
        "speculative",
        (result(usage=told), result((4, 5), category="math", ttft=0.2, last=0.4, usage=told)),
        wall_s=2.0,
    )
    plain = SystemRun("plain", (result(), result((4, 6), category="math")), wall_s=4.0)
    summary = summarise(run, plain)
    assert (summary["prompts"], summary["tokens"], summary["tok_s"]) == (2, 5, 2.5)
    assert summary["ttft_ms"]["p50"] == pytest.approx(150)
    assert summary["ttft_ms"]["p99"] == pytest.approx(199)
    assert summary["tpot_ms"]["mean"] == pytest.approx(150)  # 100 and 200
    assert summary["acceptance_rate"] == 0.5
    assert summary["mean_acceptance_length"] == 2.0
    assert summary["speculation"]["accepted_by_position"] == [4, 0]
    assert summary["identical_to_plain"] == {"equal": 1, "of": 2}
    assert summary["per_category"]["math"]["tok_s"] == pytest.approx(2 / 0.35)
    assert summary["time"]["overhead_ms_per_round"] == pytest.approx(2.0)  # 4000 us of 2 rounds
    assert summary["time"]["verify_compute_us_per_round"] == 3000
    found = ratios([summary, summarise(plain, plain)])
    assert found["vs_plain"] == {"speculative": 2.0}
    assert found["paired_median_vs_plain"]["speculative"] == 1.0
    assert "vs_transformers" not in found


def test_the_controller_is_told_beside_the_best_fixed_length_of_each_category():
    def run(system: str, **seconds: float) -> dict:
        results = [result(category=name, total=total) for name, total in seconds.items()]
        return summarise(SystemRun(system, tuple(results), 1.0), None)

    plain, ours = run("plain", qa=1.0, rag=1.0), run("speculative", qa=0.8, rag=1.25)
    found = of_best_fixed([plain, ours, run("k=1", qa=0.9, rag=1.5), run("k=3", qa=0.6, rag=2.0)])
    assert found["qa"] == {"ratio": pytest.approx(0.75), "best": "k=3"}
    assert found["rag"] == {"ratio": pytest.approx(0.8), "best": "plain"}
    assert of_best_fixed([plain, ours]) == {} == of_best_fixed([plain, run("k=3", qa=1.0)])


def test_a_system_that_tells_nothing_has_no_acceptance():
    summary = summarise(SystemRun("transformers", (result(),), 1.0), None)
    assert summary["acceptance_rate"] is None and summary["mean_acceptance_length"] is None
    assert summary["identical_to_plain"] is None and summary["time"] is None
    assert summary["speculation"] is None


def test_a_report_has_its_schema_and_is_json():
    runs = [SystemRun(n, (result(usage=usage()),), 1.0) for n in ("plain", "speculative")]
    report = json.loads(json.dumps(build_report(runs, models={}, settings={}, command="c")))
    assert set(report) == {
        "runs", "ratios", "of_best_fixed", "models", "settings", "machine", "command", "git"
    }  # fmt: skip
    expected = {"system", "prompts", "tokens", "tok_s", "ttft_ms", "tpot_ms", "acceptance_rate"}
    expected |= {"mean_acceptance_length", "speculation", "identical_to_plain", "per_category"}
    for run in report["runs"]:
        assert expected | {"time", "wall_s", "requests"} == set(run)
        assert set(run["ttft_ms"]) == {"p50", "p99", "mean"}
        assert run["identical_to_plain"] == {"equal": 1, "of": 1}
    assert {"processor", "cores", "python", "packages"} <= set(report["machine"])


class Scripted:
    """A system that takes `cost` seconds of a fake clock."""

    def __init__(self, name, cost, now, log):
        self.name, self._cost, self._now, self._log = name, cost, now, log

    async def run(self, prompt, seed):
        self._log.append((self.name, prompt.id, seed))
        self._now[0] += self._cost
        return result((seed,), category=prompt.category)


async def test_systems_take_turns_in_alternating_order_on_one_clock():
    now, log = [0.0], []
    systems = [Scripted("plain", 2.0, now, log), Scripted("speculative", 1.0, now, log)]
    prompts = [BenchPrompt(str(i), "c", "x", True) for i in range(3)]
    runs = await run_interleaved(systems, prompts, seed=10, clock=lambda: now[0])
    warm, rest = log[:2], log[2:]
    assert [name for name, _, _ in warm] == ["plain", "speculative"]
    names = ["plain", "speculative", "speculative", "plain", "plain", "speculative"]
    assert [name for name, _, _ in rest] == names
    assert [(i, s) for _, i, s in rest] == [(str(i // 2), 10 + i // 2) for i in range(6)]
    assert [(run.system, run.wall_s) for run in runs] == [("plain", 6.0), ("speculative", 3.0)]
    assert [r.token_ids for r in runs[0].results] == [(10,), (11,), (12,)]
