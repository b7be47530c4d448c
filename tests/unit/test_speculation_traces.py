"""Recorded rounds: the file, what is estimated from it, and `outrider simulate`."""

import json
import random
from pathlib import Path

import pytest

from outrider.cli.__main__ import main
from outrider.errors import InvalidArgument
from outrider.speculation import traces
from outrider.speculation.costs import Line
from outrider.speculation.evaluation import halves
from outrider.speculation.examples import demo_trace
from outrider.speculation.length import Mode
from outrider.speculation.processes import (
    AcceptanceProcess,
    constant,
    estimate,
    mixture,
    spliced,
)
from outrider.speculation.replay import OURS, PLAIN, Scenario, compare, world_of
from outrider.speculation.traces import Trace, TracedRound, TracedSession

VERIFY, DRAFT, TRIP_S = Line(0.015, 0.0008), Line(0.0004, 0.0018), 0.002


def record(
    parts: list[tuple[float, int]], *, category: str = "chat", seed: int = 0, k: int = 5
) -> TracedSession:
    """A session with `parts` of (acceptance, tokens), rounds of k guesses or none."""
    process, rng = mixture(parts), random.Random(seed)
    rounds, emitted = [], 0
    while emitted < process.num_tokens:
        proposed = rng.choice([0, k - 3, k])
        accepted = process.draw(emitted, proposed, rng)
        rows = proposed + 1 + rng.choice([0, 3])
        verify_s = (VERIFY.predict(rows) + TRIP_S * (proposed > 0)) * rng.gauss(1, 0.02)
        draft_s = DRAFT.predict(proposed) * rng.gauss(1, 0.02) if proposed else 0.0
        micros = [int(seconds * 1e6) for seconds in (draft_s, verify_s, draft_s + verify_s)]
        rounds.append(TracedRound(proposed, accepted, *micros, batch_rows=rows))
        emitted += accepted + 1
    return TracedSession(f"{category}-{seed}", category, tuple(rounds))


def test_a_trace_is_read_as_it_was_written(tmp_path: Path):
    sessions = [record([(0.6, 50)], seed=seed) for seed in range(3)]
    sessions.append(TracedSession("x", "y", (TracedRound(2, 1, 3, 4, 5, 6, 7, hit=False),)))
    header = {"cost_lines": {"draft": {"base": 0.1, "slope": 0.2}}, "mode": "pipelined", "note": 1}
    traces.write(tmp_path / "t.jsonl", header, sessions)
    found = traces.read(tmp_path / "t.jsonl")
    assert found == Trace("pipelined", header["cost_lines"], tuple(sessions))
    lines = (tmp_path / "t.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["note"] == 1
    assert json.loads(lines[1])["rounds"][0].keys() == {
        "proposed", "accepted", "draft_us", "verify_us", "round_us", "batch_rows", "context_len",
        "hit", "proposal_us",
    }  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not json\n",
        "{}\n",
        '{"cost_lines": {}}\n',
        '{"cost_lines": {}}\n{"session": "a", "category": "c", "rounds": []}\n',
        '{"cost_lines": {}}\n{"session": "a", "rounds": [{"proposed": 1, "accepted": 2}]}\n',
        '{"cost_lines": {}}\n{"session": "a", "rounds": [{"accepted": 2}]}\n',
        '{"cost_lines": {"verify": 3}}\n{"session": "a", "rounds": []}\n',
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidArgument):
        traces.read(path)
    with pytest.raises(InvalidArgument):
        traces.read(tmp_path / "none.jsonl")


def test_keys_of_later_versions_are_ignored(tmp_path: Path):
    path = tmp_path / "t.jsonl"
    rounds = '[{"proposed": 1, "accepted": 1, "of_tomorrow": 5}]'
    path.write_text('{"cost_lines": {}}\n{"session": "a", "rounds": ' + rounds + "}\n")
    assert traces.read(path).sessions[0].rounds == (TracedRound(1, 1),)


def test_acceptance_is_estimated_by_category():
    sessions = [record([(0.8, 600)], category="easy", seed=seed) for seed in range(4)]
    sessions += [record([(0.3, 600)], category="hard", seed=seed) for seed in range(4)]
    for process in estimate(Trace("sequential", {}, tuple(sessions)), k_max=8):
        means = [sum(r[i] for r in process.rates) / len(process.rates) for i in range(8)]
        rate = 0.8 if process.category == "easy" else 0.3
        assert means[:2] == pytest.approx([rate] * 2, abs=0.08)
        # Positions 5 to 8 were never tried: they go on as the last known one.
        assert means[5:] == pytest.approx([means[4]] * 3, abs=0.1)


def test_acceptance_that_changes_in_mid_stream_is_found_where_it_changes():
    session = record([(0.9, 400), (0.2, 400)])
    (process,) = estimate(Trace("sequential", {}, (session,)), k_max=4)
    early = [process.rates_at(token)[0] for token in range(50, 350)]
    late = [process.rates_at(token)[0] for token in range(450, 750)]
    assert sum(early) / 300 == pytest.approx(0.9, abs=0.1)
    assert sum(late) / 300 == pytest.approx(0.2, abs=0.1)
    assert abs(process.num_tokens - 800) < 6


def test_costs_are_fitted_where_the_header_lacks_them():
    trace = Trace("sequential", {}, tuple(record([(0.6, 800)], seed=seed) for seed in range(3)))
    world = world_of(trace, Mode.SEQUENTIAL)
    assert world.verify.slope == pytest.approx(VERIFY.slope, rel=0.25)
    assert world.verify.base == pytest.approx(VERIFY.base, rel=0.1)
    assert world.guess_trip_s == pytest.approx(TRIP_S, rel=0.35)
    assert world.draft.slope == pytest.approx(DRAFT.slope, rel=0.1)
    given = Trace("sequential", {"draft": {"base": 0.5, "slope": 0.25}}, trace.sessions)
    assert world_of(given, Mode.SEQUENTIAL).draft == Line(0.5, 0.25)
    wrong = Trace("sequential", {"draft": {"basis": 0.5}}, trace.sessions)
    with pytest.raises(InvalidArgument, match="draft"):
        world_of(wrong, Mode.SEQUENTIAL)


def test_a_replay_makes_the_tokens_per_second_that_were_recorded():
    """The same policy on what was estimated: as fast as the rounds of the trace were."""
    sessions = []
    for seed in range(6):
        process, rng, rounds, emitted = mixture([(0.7, 300)]), random.Random(seed), [], 0
        while emitted < 300:
            accepted = process.draw(emitted, 4, rng)
            micros = int(DRAFT.predict(4) * 1e6), int(VERIFY.predict(5) * 1e6)
            rounds.append(TracedRound(4, accepted, *micros, sum(micros), 5))
            emitted += accepted + 1
        sessions.append(TracedSession(str(seed), "chat", tuple(rounds)))
    recorded = sum(r.accepted + 1 for s in sessions for r in s.rounds)
    recorded /= sum(r.round_us for s in sessions for r in s.rounds) / 1e6
    trace = Trace("sequential", {}, tuple(sessions))
    world = world_of(trace, Mode.SEQUENTIAL)
    rows = compare(trace, world, Scenario(), k_max=4, seed=1)
    found = {row["policy"]: row for row in rows}
    assert found["k=4"]["tokens_per_s"] == pytest.approx(recorded, rel=0.05)
    assert set(found) == {"plain", "k=1", "k=2", "k=3", "k=4", "ours", "oracle"}


def test_ours_is_near_the_oracle_on_the_demo_trace():
    trace = demo_trace(sessions_per_category=2)
    for scenario in (Scenario(), Scenario(delay_s=0.01), Scenario(draft_factor=4.0)):
        world = world_of(trace, Mode.SEQUENTIAL)
        found = {row["policy"]: row for row in compare(trace, world, scenario, k_max=6, seed=0)}
        assert found[OURS]["of_oracle"] > 0.9
        assert found[OURS]["tokens_per_s"] > 0.97 * found[PLAIN]["tokens_per_s"]


def test_simulate_prints_writes_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, out, plot = (tmp_path / name for name in ("t.jsonl", "out.json", "out.png"))
    names = ["chat", "code", "chat"]
    sessions = [record([(0.7, 100)], category=name, seed=i) for i, name in enumerate(names)]
    traces.write(path, {"mode": "pipelined"}, sessions)
    flags = ["--k-max", "3", "--delay-ms", "0,4", "--slow-draft", "1.5", "--sessions", "2"]
    flags += ["--load", "6", "--load-swing-s", "1", "--json", str(out), "--plot", str(plot)]
    assert main(["simulate", str(path), *flags]) == 0
    printed = capsys.readouterr().out
    for word in ("plain", "k=3", "ours", "oracle", "4 ms", "chat", "code", "best fixed"):
        assert word in printed
    report = json.loads(out.read_text())
    assert report["settings"]["mode"] == "pipelined"
    assert [scenario["delay_ms"] for scenario in report["scenarios"]] == [0, 4]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_stretches_of_processes_follow_each_other_behind_the_first_prompt():
    easy = AcceptanceProcess("easy", (0, 10, 20), ((0.9,), (0.8,), (0.7,)), 30, prompt_len=50)
    hard = AcceptanceProcess("hard", (0, 5), ((0.2,), (0.1,)), 15, prompt_len=9)
    mixed = spliced([(easy, 12, 22), (hard, 0, 15), (easy, 0, 3)], category="mixed")
    assert (mixed.num_tokens, mixed.prompt_len, mixed.category) == (28, 50, "mixed")
    rates = [mixed.rates_at(token)[0] for token in (0, 7, 8, 9, 10, 14, 15, 24, 25, 27)]
    assert rates == [0.8, 0.8, 0.7, 0.7, 0.2, 0.2, 0.1, 0.1, 0.9, 0.9]


def test_rounds_that_waited_for_a_prompt_are_no_part_of_a_fit():
    rounds = [TracedRound(0, 0, 0, 900_000, 900_000, 1), TracedRound(2, 1, 400_000, 20_000, 0, 3)]
    rounds += [TracedRound(2, 1, 4000, 21_000, 25_000, 3)] * 40
    world = world_of(
        Trace("sequential", {}, (TracedSession("a", "c", tuple(rounds)),)), Mode.SEQUENTIAL
    )
    assert world.draft.predict(2) == pytest.approx(0.004, rel=0.01)
    assert world.verify.predict(3) + world.guess_trip_s == pytest.approx(0.021, rel=0.01)


def test_the_draft_of_a_pipelined_trace_is_fitted_to_what_it_took_and_not_to_what_was_waited_for():
    rounds = [
        TracedRound(k, 1, 100, 21_000, 25_000, k + 1, hit=True, proposal_us=1000 + 2000 * k)
        for k in (2, 3, 4)
    ]
    session = TracedSession("a", "c", (TracedRound(0, 0, verify_us=20_000), *rounds * 20))
    world = world_of(Trace("pipelined", {}, (session,)), Mode.PIPELINED)
    assert world.draft.predict(2) == pytest.approx(0.005, rel=0.05)
    assert world.draft.predict(4) == pytest.approx(0.009, rel=0.05)


def test_by_category_ours_stands_beside_the_best_fixed_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path, out = tmp_path / "t.jsonl", tmp_path / "out.json"
    sessions = [
        record([(rate, 150)], category=name, seed=seed)
        for name, rate in (("chat", 0.8), ("poems", 0.3))
        for seed in range(4)
    ]
    traces.write(path, {}, sessions)
    flags = ["--by-category", "--half", "second", "--each", "3", "--tokens", "60-90"]
    assert main(["simulate", str(path), *flags, "--k-max", "4", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    rows = {row["category"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == ["chat", "poems", "changing", "back and forth"]
    assert all(name in printed for name in rows)
    for row in rows.values():
        rates = row["tokens_per_s"]
        assert row["best_fixed"] == max(("plain", "k=1", "k=2", "k=3", "k=4"), key=rates.get)
        assert row["warm_of_best"] == pytest.approx(rates["warm"] / rates[row["best_fixed"]])
    assert rows["chat"]["tokens_per_s"]["k=4"] > rows["poems"]["tokens_per_s"]["k=4"]
    with pytest.raises(SystemExit):
        main(["simulate", "--by-category", "--tokens", "90-60"])


def test_halves_share_no_session():
    processes = [constant(0.5, 10 + i, category=name) for i, name in enumerate("aabab")]
    first, second = halves(processes)
    assert [p.num_tokens for p in first] == [10, 12, 13]
    assert [p.num_tokens for p in second] == [11, 14]


def test_simulate_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["simulate", str(tmp_path / "none.jsonl")]) == 1
    assert "cannot read" in capsys.readouterr().err
    assert main(["simulate", "--k-max", "17"]) == 1
    traces.write(tmp_path / "t.jsonl", {"mode": "backwards"}, [record([(0.5, 20)])])
    assert main(["simulate", str(tmp_path / "t.jsonl")]) == 1
    assert "backwards" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["simulate", "--delay-ms=-1"])
