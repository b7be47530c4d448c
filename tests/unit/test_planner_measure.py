"""Tiny pairs and made-up distributions, measured."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.engine.loading import load_model, read_tokenizer
from outrider.engine.surgery import optimise
from outrider.errors import FailedPrecondition, InvalidArgument, Unsupported
from outrider.planner.compare import LogitsRows, closeness, equality_track, rejection_track
from outrider.planner.costs import fit, make_runner
from outrider.planner.measure import measure
from outrider.planner.predict import walk
from outrider.planner.texts import PromptTokenizer, Text, windows, write
from outrider.planner.values import (
    COUPLED,
    GREEDY,
    NEVER,
    REJECTION,
    Measurement,
    Prompt,
    Request,
)
from outrider.sampling import coupled_picks
from outrider.speculation.costs import Line
from outrider.types import SamplingParams
from services.orchestrator.text import ChatTokenizer

PROMPTS = [
    Prompt("1", "writing", "Once upon a time", chat=True),
    Prompt("2", "code", "def main():", chat=False),
    Prompt("3", "writing", "Tell me more", chat=True),
]
TARGET, DRAFT = (0.5, 0.3, 0.2, 0.0), (0.2, 0.3, 0.4, 0.1)


def rows_of(
    target: tuple[float, ...], draft: tuple[float, ...], count: int, **sampling: Any
) -> LogitsRows:
    logits = [torch.tensor([p] * count).log() + 3.0 for p in (target, draft)]
    positions = range(10, 10 + count)
    return LogitsRows.of(*logits, positions, SamplingParams(seed=7, **sampling))


def test_a_known_pair_has_its_distance() -> None:
    found = closeness(rows_of(TARGET, DRAFT, 3, temperature=1.0))
    assert found.overlap == pytest.approx(0.2 + 0.3 + 0.2)
    assert found.target_entropy == pytest.approx(-sum(p * math.log(p) for p in TARGET if p))
    assert found.draft_entropy == pytest.approx(-sum(p * math.log(p) for p in DRAFT))
    divergence = sum(p * math.log(p / q) for p, q in zip(TARGET, DRAFT, strict=True) if p)
    assert found.divergence == pytest.approx(divergence)
    assert found.greedy_agreement == 0.0 and found.tokens == 3


def test_what_is_cut_off_counts_for_the_overlap_only() -> None:
    cut = closeness(rows_of(TARGET, DRAFT, 1, temperature=1.0, top_k=1))
    free = closeness(rows_of(TARGET, DRAFT, 1, temperature=1.0))
    assert cut.overlap == 0.0
    assert (cut.divergence, cut.target_entropy) == (free.divergence, free.target_entropy)
    half = closeness(rows_of(TARGET, DRAFT, 1, temperature=0.5))
    squares = [np.square(p) / np.square(p).sum() for p in (TARGET, DRAFT)]
    assert half.overlap == pytest.approx(np.minimum(*squares).sum(), abs=1e-6)


def test_a_head_that_ends_earlier_gives_its_padding_nothing() -> None:
    found = closeness(rows_of((0.5, 0.3, 0.1, 0.1), (0.5, 0.5), 1, temperature=1.0))
    assert found.overlap == pytest.approx(0.8)
    assert math.isfinite(found.divergence)


def test_agreement_under_one_noise_is_between_its_bounds() -> None:
    """(1 - TV) / (1 + TV) at least, 1 - TV at most: Daliri, Musco, Suresh 2024."""
    rows = rows_of(TARGET, DRAFT, 4000, temperature=1.0)
    agreement = closeness(rows).coupled_agreement
    assert agreement is not None
    assert 0.7 / 1.3 - 0.02 < agreement < 0.7 + 0.02


def test_the_track_is_that_of_the_picks_with_the_same_noise() -> None:
    rows = rows_of(TARGET, DRAFT, 200, temperature=1.0)
    seeds, positions = [7] * 200, list(rows.positions)
    own = coupled_picks(rows.target.log_softmax(-1), seeds, positions).tolist()
    guesses = coupled_picks(rows.draft.log_softmax(-1), seeds, positions).tolist()
    track = equality_track(rows, own)
    agrees = [a == b for a, b in zip(own, guesses, strict=True)]
    assert list(track.log_ratios) == [0.0 if same else NEVER for same in agrees]
    assert [rank == 0 for rank in track.ranks] == agrees
    assert 0.3 < sum(agrees) / 200 < 0.9
    assert all(
        other == max(rank - 1, 0)
        for rank, other in zip(track.ranks, track.other_ranks, strict=True)
    )


def test_greedy_ranks_count_from_the_drafts_best() -> None:
    track = equality_track(rows_of(TARGET, DRAFT, 4), [0, 1, 2, 3])
    assert list(track.ranks) == [2, 1, 0, 3] and list(track.other_ranks) == [1, 0, 0, 2]
    assert list(track.log_ratios) == [NEVER, NEVER, 0.0, NEVER]


def test_rejection_knows_ratios_and_what_was_rejected() -> None:
    rows = rows_of(TARGET, DRAFT, 3000, temperature=1.0)
    track = rejection_track(rows, [0] * 1500 + [1] * 1500, seed=1)
    expected = [math.log(0.2 / 0.5), math.log(0.3 / 0.3)]
    assert [track.log_ratios[0], track.log_ratios[-1]] == pytest.approx(expected, abs=1e-3)
    assert set(track.ranks[:1500]) == {2} and set(track.ranks[1500:]) == {1}
    # Rejected were tokens 2 and 3, which the draft has 0.2 and 0.1 too much of.
    above = [rank == 1 for rank in track.other_ranks[:1500]]
    assert sum(above) / 1500 == pytest.approx(2 / 3, abs=0.05)
    never = rejection_track(rows_of(TARGET, (0.6, 0.4, 0.0, 0.0), 1, temperature=1.0), [2], 1)
    assert never.log_ratios[0] == NEVER


def request(target: Path, draft: Path, **change: Any) -> Request:
    asked = Request(
        target=str(target),
        draft=str(draft),
        dtype="float32",
        threads=0,
        prompts=PROMPTS,
        given="",
        limit=4,
        max_tokens=40,
        ignore_eos=True,
        sampling=SamplingParams(temperature=1.0, seed=5),
        sessions=1,
        k_max=4,
        with_costs=False,
    )
    return replace(asked, **change)


def test_a_draft_that_is_the_target_agrees_everywhere(tiny_models: dict[str, Path]) -> None:
    found = measure(request(tiny_models["target"], tiny_models["target"]))
    assert [(s.temperature, s.id) for s in found.samples] == [
        (t, p.id) for t in (0.0, 1.0) for p in PROMPTS
    ]
    for sample in found.samples:
        near = sample.closeness
        assert near.tokens == 40
        assert near.overlap == pytest.approx(1.0, abs=1e-5)
        assert near.greedy_agreement == 1.0 and near.coupled_agreement in (None, 1.0)
        assert near.divergence == pytest.approx(0.0, abs=1e-6)
        assert near.target_entropy == near.draft_entropy > 0.1
    for mode in (GREEDY, COUPLED):
        tracks = [s.tracks[mode] for s in found.samples if mode in s.tracks]
        assert len(tracks) == 3 and walk(tracks, 4).acceptance == [1.0] * 4
    # The draft sends no more than 64 tokens of its distribution, rounded.
    tracks = [s.tracks[REJECTION] for s in found.samples if REJECTION in s.tracks]
    assert walk(tracks, 4).acceptance[0] > 0.95
    assert Measurement.from_json(json.loads(json.dumps(asdict(found)))) == found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_texts_are_what_the_target_says(
    tiny_models: dict[str, Path], temperature: float
) -> None:
    """Decoded eight tokens at a time and in a batch, against one token after the other."""
    loaded = load_model(str(tiny_models["target"]), tier="target", dtype="float32")
    optimise(loaded.model)
    runner = make_runner(loaded, num_blocks=32, max_rows=64, max_context=512)
    tokenizer = PromptTokenizer(loaded.tokenizer)
    prompts = [
        Text(p.id, p.category, ids := tuple(tokenizer.encode(p.text, chat=p.chat)), len(ids))
        for p in PROMPTS
    ]
    samplings = [SamplingParams(temperature=temperature, seed=seed) for seed in range(3)]
    written = write(runner, prompts, samplings, max_tokens=20, stop_ids=())
    model = AutoModelForCausalLM.from_pretrained(tiny_models["target"], dtype=torch.float32)
    for text, sampling in zip(written, samplings, strict=True):
        assert len(text.token_ids) == text.start + 20
        log = list(text.token_ids[: text.start])
        for _ in range(20):
            with torch.inference_mode():
                logits = model(torch.tensor([log])).logits[0, -1:]
            log_probs = logits.float().log_softmax(-1)
            picked = coupled_picks(log_probs, [sampling.seed], [len(log)])
            log.append(int(picked if temperature else logits.argmax()))
        assert text.token_ids == tuple(log)
    stop = written[0].token_ids[written[0].start + 3]
    [ended] = write(runner, prompts[:1], samplings[:1], max_tokens=20, stop_ids=(stop,))
    first = written[0].token_ids.index(stop, written[0].start)
    assert ended.token_ids == written[0].token_ids[: first + 1]


def test_prompts_are_tokenized_as_the_orchestrator_does(tiny_models: dict[str, Path]) -> None:
    files = read_tokenizer(tiny_models["target"])
    ours, theirs = PromptTokenizer(files), ChatTokenizer.from_json(files.to_json())
    for text in ("What is <b>this</b>?", "  ünïcode 🙂\n"):
        assert ours.encode(text, chat=True) == theirs.render_chat([("user", text)])
        assert ours.encode(text, chat=False) == theirs.encode(text)
    with pytest.raises(Unsupported, match="text: the target has no chat template"):
        PromptTokenizer(replace(files, chat_template=None)).encode("hi", chat=True)


def test_a_given_text_is_compared_over_itself(tiny_models: dict[str, Path]) -> None:
    given = "It was a dark and stormy night. " * 4
    asked = request(tiny_models["target"], tiny_models["draft"], prompts=[], given=given)
    found = measure(asked)
    assert not found.own_text
    assert [sample.closeness.tokens for sample in found.samples] == [len(given) - 1] * 2
    for sample in found.samples:
        near = sample.closeness
        agreement = near.greedy_agreement if sample.temperature == 0 else near.coupled_agreement
        [track] = [t for mode, t in sample.tracks.items() if mode != REJECTION]
        assert agreement == pytest.approx(np.mean([rank == 0 for rank in track.ranks]))
        assert 0.3 < agreement < 1.0
    with pytest.raises(InvalidArgument, match="text: a text of less than two tokens"):
        measure(replace(asked, given="x"))


def test_a_given_text_is_cut_into_windows() -> None:
    pieces = windows(range(10), 4, 8)
    assert [piece.token_ids for piece in pieces] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    assert len(windows(range(10), 4, 2)) == 2
    assert [piece.token_ids for piece in windows(range(9), 4, 8)] == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_prompts_that_do_not_fit_are_left_out(tiny_models: dict[str, Path]) -> None:
    long = Prompt("long", "writing", "x" * 100, chat=False)
    asked = request(tiny_models["target"], tiny_models["short-draft"], prompts=[*PROMPTS, long])
    found = measure(asked)
    assert list(found.skipped) == ["long"] and "long" not in {s.id for s in found.samples}
    with pytest.raises(InvalidArgument, match="text: no prompt leaves room for 40 tokens"):
        measure(replace(asked, prompts=[long]))


def test_a_pair_must_share_its_tokenizer(tiny_models: dict[str, Path]) -> None:
    with pytest.raises(FailedPrecondition, match=r"draft: .* another tokenizer"):
        measure(request(tiny_models["target"], tiny_models["other-tokenizer"]))


def test_a_model_that_is_not_there_is_named_by_its_tier(tiny_models: dict[str, Path]) -> None:
    with pytest.raises(InvalidArgument, match="draft: no such folder"):
        measure(request(tiny_models["target"], Path("/nowhere")))


def test_greedy_requests_measure_nothing_else(tiny_models: dict[str, Path]) -> None:
    asked = request(tiny_models["target"], tiny_models["draft"], sampling=SamplingParams())
    found = measure(replace(asked, prompts=PROMPTS[:1], with_costs=True))
    assert [list(sample.tracks) for sample in found.samples] == [[GREEDY]]
    assert found.costs is not None and found.costs.verify.predict(1, 20) > 0.0
    assert found.costs.draft.predict(4) > 0.0 and found.fits.keys() == {"verify", "draft"}


def test_lines_are_found_and_never_negative() -> None:
    sizes, others = [1.0, 2.0, 4.0, 1.0, 2.0, 4.0], [0.0, 0.0, 0.0, 5.0, 5.0, 5.0]
    times = [0.01 + 0.002 * a + 0.001 * b for a, b in zip(sizes, others, strict=True)]
    found = fit(sizes, others, times)
    assert (found.line.base, found.line.slope, found.line.other_slope) == pytest.approx(
        (0.01, 0.002, 0.001)
    )
    assert found.largest_error < 1e-9
    falling = [0.01 - 0.001 * a + 0.001 * b for a, b in zip(sizes, others, strict=True)]
    line = fit(sizes, others, falling).line
    assert line.slope == 0.0 and isinstance(line, Line) and line.base > 0.0
