"""`outrider plan` around its measuring process: files, errors, tables, words."""

import json
import random
import sys
from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from outrider.cli import plan
from outrider.cli.__main__ import build_parser, main
from outrider.errors import InvalidArgument
from outrider.planner.report import Question, build_report
from outrider.planner.values import (
    COUPLED,
    GREEDY,
    NEVER,
    REJECTION,
    Closeness,
    Measurement,
    PairCosts,
    Sample,
    Track,
)
from outrider.speculation.costs import Line

COSTS = PairCosts(Line(0.020, 0.0005), Line(0.0002, 0.002, 0.0001), 0.001, 0.002, 0.001)
PROMPT = {"question_id": 7, "category": "writing", "turns": ["Say something", "Again"]}


def sample_of(category: str, temperature: float, rate: float) -> Sample:
    chance = random.Random(f"{category} {temperature}")
    agrees = [chance.random() < rate for _ in range(400)]
    ranks = [0 if same else 1 + int(chance.expovariate(0.5)) for same in agrees]
    track = Track(
        [0.0 if same else NEVER for same in agrees], ranks, [max(r - 1, 0) for r in ranks]
    )
    near = Closeness(400, rate, 1.5, 2.0, 0.7, rate, rate if temperature else None)
    drawn = Track([min(chance.gauss(-0.1, 0.4), 0.0) for _ in agrees], ranks, track.other_ranks)
    tracks = {COUPLED: track, REJECTION: drawn} if temperature else {GREEDY: track}
    return Sample(category, category, temperature, 120, near, tracks)


def measurement(**change: Any) -> Measurement:
    found = Measurement(
        samples=[
            sample_of(category, temperature, rate)
            for temperature in (0.0, 1.0)
            for category, rate in (("code", 0.8), ("writing", 0.5))
        ],
        costs=COSTS,
        own_text=True,
        device="CPU",
        dtype="bfloat16",
        names={"target": "big", "draft": "small"},
        fits={"verify": 0.05, "draft": 0.02},
    )
    return replace(found, **change)


def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *lines: dict[str, Any]) -> Path:
    """A measuring process that says these lines; the file holds what it was asked."""
    asked, script = tmp_path / "asked.json", tmp_path / "measure.py"
    script.write_text(
        f"import sys\nopen({str(asked)!r}, 'w').write(sys.stdin.read())\n"
        f"print({chr(10).join(map(json.dumps, lines))!r})\nsys.exit('it broke down')\n"
    )
    monkeypatch.setattr(plan, "_COMMAND", (sys.executable, str(script)))
    return asked


def arguments(*flags: str) -> Namespace:
    return build_parser().parse_args(["plan", *flags])


def test_it_prints_tables_and_advice_and_writes_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    asked = stand_in(monkeypatch, tmp_path, {"progress": "x"}, {"result": asdict(measurement())})
    text, out, drawn = tmp_path / "p.jsonl", tmp_path / "out.json", tmp_path / "out.png"
    text.write_text(json.dumps(PROMPT) + "\n")
    flags = ("--text", str(text), "--json", str(out), "--plot", str(drawn), "--top-p", "0.9")
    assert main(["plan", *flags]) == 0
    request = json.loads(asked.read_text())
    assert request["prompts"] == [
        {"id": "7", "category": "writing", "text": "Say something", "chat": True}
    ]
    assert request["given"] == "" and request["with_costs"] is True
    assert request["sampling"]["top_p"] == pytest.approx(0.9)
    shown = capsys.readouterr().out
    for part in ("temperature 0", "coupled", "rejection", "writing", "k = ", "times plain"):
        assert part in shown
    report = json.loads(out.read_text())
    best = report["modes"][COUPLED]["best_k"]["sequential"]
    assert f"{COUPLED}, k = {best}, sequential" in report["words"][1] or REJECTION in shown
    assert (
        report["categories"][GREEDY]["code"]["best_k"]["sequential"]
        > (report["categories"][GREEDY]["writing"]["best_k"]["sequential"])
    )
    assert drawn.read_bytes().startswith(b"\x89PNG")
    # The report's costs can be given to the next run.
    assert main(["plan", *flags[:2], "--costs", str(out)]) == 0
    assert json.loads(asked.read_text())["with_costs"] is False


def test_a_plain_text_is_given_and_said_to_tell_less(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = {"result": asdict(measurement(own_text=False, skipped=["9"]))}
    asked = stand_in(monkeypatch, tmp_path, result)
    text = tmp_path / "story.txt"
    text.write_text("Once upon a time")
    assert main(["plan", "--text", str(text)]) == 0
    request = json.loads(asked.read_text())
    assert request["prompts"] == [] and request["given"] == "Once upon a time"
    shown = capsys.readouterr().out
    assert "a weaker estimate" in shown and "do not fit the context: 9" in shown


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", '{"question_id": 1}', "text: .*p.jsonl:1 is neither"),
        ("p.jsonl", "", "text: .* holds no prompts"),
        ("p.txt", "  \n", "text: .* holds no text"),
        ("p.txt", None, "text: cannot read"),
    ],
)
def test_bad_texts_are_named(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(InvalidArgument, match=message):
        plan.request(arguments("--text", str(path)))


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["--temperature", "11"], "temperature"),
        (["--top-p", "0"], "top_p"),
        (["--min-p", "2"], "min_p"),
        (["--top-k", str(1 << 40)], "sampling"),
        (["--k-max", "17"], "k_max"),
        (["--json", "/nowhere/out.json"], "json"),
    ],
)
async def test_bad_flags_are_named(flags: list[str], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await plan.run(arguments(*flags))
    assert caught.value.field == field


def test_errors_of_the_measuring_process_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = {"kind": "FailedPrecondition", "message": "another tokenizer", "field": "draft"}
    stand_in(monkeypatch, tmp_path, {"error": error})
    assert main(["plan"]) == 1
    assert "error: draft: another tokenizer" in capsys.readouterr().err
    stand_in(monkeypatch, tmp_path, {"progress": "loading"})
    assert main(["plan"]) == 1
    assert "it broke down" in " ".join(capsys.readouterr().err.split())


def words_of(found: Measurement, question: Question, costs: PairCosts = COSTS) -> list[str]:
    return list(build_report(found, costs, question, {"shared": question.shared})["words"])


def test_pipelining_is_advised_where_the_draft_has_a_device() -> None:
    shared = words_of(measurement(), Question(1, 6, shared=True))
    own = words_of(measurement(), Question(1, 6, shared=False))
    assert all("sequential" in line and "With a device for the draft" in line for line in shared)
    assert all("pipelined" in line and "needs 1 draft worker" in line for line in own)
    fast = replace(COSTS, draft=Line(0.0001, 0.0003, 0.00001))
    assert "one can serve" in words_of(measurement(), Question(1, 6, shared=False), fast)[0]
    wide = replace(COSTS, verify=Line(0.02, 0.0001), draft=Line(0.0002, 0.001, 0.0002))
    many = words_of(measurement(), Question(32, 6, shared=False), wide)
    assert any("32 sessions needs" in line and "draft workers" in line for line in many)


def test_a_pair_that_does_not_pay_is_to_decode_plainly() -> None:
    far = [sample_of("code", temperature, 0.0) for temperature in (0.0, 1.0)]
    far = [
        replace(
            s, tracks={mode: replace(t, log_ratios=[NEVER] * 400) for mode, t in s.tracks.items()}
        )
        for s in far
    ]
    words = words_of(measurement(samples=far), Question(1, 6, shared=True))
    assert all("decode plainly" in line for line in words)


def test_rejection_is_advised_only_where_it_brings_more() -> None:
    question = Question(1, 6, shared=True)
    better = build_report(measurement(), COSTS, question, {"shared": True})["recommendation"][1]
    assert better["mode"] == REJECTION and set(better["others"]) == {COUPLED}
    samples = [
        replace(s, tracks={**s.tracks, REJECTION: s.tracks[COUPLED]}) if s.temperature else s
        for s in measurement().samples
    ]
    found = measurement(samples=samples)
    equal = build_report(found, COSTS, question, {"shared": True})["recommendation"][1]
    assert equal["mode"] == COUPLED and set(equal["others"]) == {REJECTION}
