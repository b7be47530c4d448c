"""What was measured and foretold, as one JSON object, as tables and in words."""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from outrider.planner.predict import (
    FAN_OUT,
    Forecast,
    LengthForecast,
    Setting,
    forecast,
)
from outrider.planner.values import (
    COUPLED,
    GREEDY,
    MODES,
    REJECTION,
    Closeness,
    Measurement,
    PairCosts,
    Sample,
)
from outrider.speculation.length import Mode

ALL = "all"

_WORTH_REJECTION = 0.03
"""`coupled` is exact, can be replayed, and is verified at less cost: another mode must gain more
than this and what chance may do (two standard deviations)."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be recommended for; `shared` says that draft and target have one device."""

    sessions: int
    k_max: int
    shared: bool

    @property
    def mode(self) -> Mode:
        """On one device drafting takes its time from verifying: nothing is prepared ahead."""
        return Mode.SEQUENTIAL if self.shared else Mode.PIPELINED


@dataclass(frozen=True, slots=True)
class Advice:
    """The best of one temperature; `length` None is plain decoding. `error` is that of a_1."""

    temperature: float
    mode: str
    length: LengthForecast | None
    error: float
    others: dict[str, LengthForecast | None]


def build_report(
    found: Measurement, costs: PairCosts, question: Question, settings: dict[str, Any]
) -> dict[str, Any]:
    """`settings` is what was asked for."""
    context_len = _mean_context(found.samples)
    setting = Setting(costs, question.sessions, context_len)
    modes = [mode for mode in MODES if any(mode in sample.tracks for sample in found.samples)]
    overall = {m: forecast(found.samples, m, setting, k_max=question.k_max) for m in modes}
    advice = [_advise(found.samples, mode_set, overall, question) for mode_set in _sets(modes)]
    groups = _by_category(found.samples)
    return {
        "settings": {**settings, "context_len": context_len},
        "device": found.device,
        "dtype": found.dtype,
        "models": dict(found.names),
        "own_text": found.own_text,
        "skipped": list(found.skipped),
        "closeness": [
            {"temperature": t, "category": category, **dataclasses.asdict(mean)}
            for t in sorted({sample.temperature for sample in found.samples})
            for category, mean in _closeness(groups, t)
        ],
        "costs": dataclasses.asdict(costs),
        "cost_errors": dict(found.fits),
        "modes": {mode: _forecast(result) for mode, result in overall.items()},
        "categories": {
            mode: {
                category: _forecast(forecast(samples, mode, setting, k_max=question.k_max))
                for category, samples in groups.items()
            }
            for mode in modes
        },
        "recommendation": [dataclasses.asdict(entry) for entry in advice],
        "words": [*_notes(found), *(_words(entry, question) for entry in advice)],
    }


def _sets(modes: Sequence[str]) -> list[tuple[str, ...]]:
    """Modes that one request could have: by temperature."""
    drawn = tuple(mode for mode in modes if mode != GREEDY)
    return [(GREEDY,), *([drawn] if drawn else [])]


def _advise(
    samples: Iterable[Sample],
    modes: Sequence[str],
    overall: dict[str, Forecast],
    question: Question,
) -> Advice:
    best = {mode: overall[mode].best(question.mode) for mode in modes}
    chosen = modes[0]
    if REJECTION in best:
        gain = _speed(best[REJECTION], question) / _speed(best[COUPLED], question) - 1.0
        worth = _WORTH_REJECTION + 2.0 * overall[COUPLED].error
        chosen = REJECTION if gain > worth else COUPLED
    temperature = next(s.temperature for s in samples if chosen in s.tracks)
    others = {mode: length for mode, length in best.items() if mode != chosen}
    return Advice(temperature, chosen, best[chosen], overall[chosen].error, others)


def _speed(length: LengthForecast | None, question: Question) -> float:
    if length is None:
        return 1.0
    return length.sequential if question.shared else length.pipelined


def _by_category(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.category, []).append(sample)
    return groups


def _closeness(groups: dict[str, list[Sample]], temperature: float) -> list[tuple[str, Closeness]]:
    """Of all texts, then by category."""
    parts = {
        category: [s.closeness for s in samples if s.temperature == temperature]
        for category, samples in groups.items()
    }
    everything = [part for group in parts.values() for part in group]
    named = [(category, Closeness.mean(group)) for category, group in parts.items()]
    return [(ALL, Closeness.mean(everything)), *named]


def _mean_context(samples: Sequence[Sample]) -> int:
    return sum(sample.context_len for sample in samples) // len(samples)


def _forecast(found: Forecast) -> dict[str, Any]:
    best = {mode.value: found.best(mode) for mode in Mode}
    return {
        "rounds": found.rounds,
        "acceptance_error": found.error,
        "best_k": {mode: length.k if length else 0 for mode, length in best.items()},
        "lengths": [dataclasses.asdict(length) for length in found.lengths],
    }


# ------------------------------------------------------------------------------------- words


def _notes(found: Measurement) -> list[str]:
    notes = []
    if not found.own_text:
        notes.append(
            "The text was given, not written by the target: a weaker estimate, because what a "
            "server drafts for is what the target itself says. Prompts would tell more."
        )
    if found.skipped:
        notes.append(f"Left out, for they do not fit the context: {', '.join(found.skipped)}.")
    return notes


def _words(advice: Advice, question: Question) -> str:
    length = advice.length
    start = f"Temperature {advice.temperature:g}: "
    if length is None:
        return (
            f"{start}decode plainly; no length of proposals is faster.{_others(advice, question)}"
        )
    ahead = length.fan_out > 0 and not question.shared
    mode = "" if advice.mode == GREEDY else f"{advice.mode}, "
    said = (
        f"{start}{mode}k = {length.k}, {'pipelined' if ahead else 'sequential'}: "
        f"{_speed(length, question):.2f} times plain decoding, "
        f"{length.mean_acceptance_length:.2f} tokens a round "
        f"(a_1 = {length.acceptance[0]:.2f} ± {advice.error:.2f})."
    )
    return said + _others(advice, question) + _workers(length, question, ahead=ahead)


def _others(advice: Advice, question: Question) -> str:
    said = [
        f"{mode} {_speed(length, question):.2f} times at k = {length.k if length else 0}"
        for mode, length in advice.others.items()
    ]
    return f" ({'; '.join(said)}.)" if said else ""


def _workers(length: LengthForecast, question: Question, *, ahead: bool) -> str:
    if question.shared:
        return (
            f" With a device for the draft: {length.pipelined:.2f} times at this k."
            if length.fan_out
            else ""
        )
    sessions = f"{question.sessions} session{'s' if question.sessions > 1 else ''}"
    drafts = f"{length.workers} draft worker{'s' if length.workers > 1 else ''}"
    said = f" A target group with {sessions} needs {drafts}, busy {length.busy:.0%} of the time"
    groups = int(1.0 / length.busy) if length.busy > 0.0 else 0
    if length.workers == 1 and groups > 1:
        said += f": one can serve {groups} such groups"
    hits = f" {length.hit_probability:.0%} of verdicts are prepared for with fan-out {FAN_OUT}."
    return said + "." + (hits if ahead else "")


# ------------------------------------------------------------------------------------- tables


def tables(report: dict[str, Any]) -> list[Table]:
    """How near the pair is; each mode by length; categories, where there are several."""
    found = [_pair_table(report["closeness"])]
    found += [_mode_table(mode, entry) for mode, entry in report["modes"].items()]
    return found + ([_category_table(report)] if _num_categories(report) > 1 else [])


def _num_categories(report: dict[str, Any]) -> int:
    return len({entry["category"] for entry in report["closeness"]} - {ALL})


def _table(*titles: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for number, title in enumerate(titles):
        lines = title if "\n" in title else f"\n{title}"
        table.add_column(lines, justify="right" if number else "left", no_wrap=True)
    return table


def _pair_table(entries: Sequence[dict[str, Any]]) -> Table:
    table = _table(
        "the pair", "tokens", "overlap", "greedy\nagrees", "coupled\nagrees",
        "entropy,\ntarget", "entropy,\ndraft", "KL(target\n||draft)",
    )  # fmt: skip
    for entry in entries:
        if entry["category"] == ALL:
            table.add_row(f"temperature {entry['temperature']:g}", *_closeness_cells(entry))
    return table


def _closeness_cells(entry: dict[str, Any]) -> list[str]:
    shares = [entry["overlap"], entry["greedy_agreement"], entry["coupled_agreement"]]
    nats = [entry["target_entropy"], entry["draft_entropy"], entry["divergence"]]
    return [
        str(entry["tokens"]),
        *("-" if share is None else f"{share:.3f}" for share in shares),
        *(f"{value:.2f}" for value in nats),
    ]


def _mode_table(mode: str, entry: dict[str, Any]) -> Table:
    title = {GREEDY: "temperature 0"}.get(mode, mode)
    table = _table(
        f"{title}\nk", "a_k", "tokens\na round", "sequential", "pipelined", "fan-\nout",
        f"hits\nof {FAN_OUT}", "drafts", "busy",
    )  # fmt: skip
    best = entry["best_k"]
    for length in entry["lengths"]:
        k = length["k"]
        marks = ["*" if best[mode.value] == k else "" for mode in Mode]
        table.add_row(
            str(k),
            f"{length['acceptance'][-1]:.2f}",
            f"{length['mean_acceptance_length']:.2f}",
            f"{marks[0]}{length['sequential']:.2f}x",
            f"{marks[1]}{length['pipelined']:.2f}x",
            str(length["fan_out"]),
            f"{length['hit_probability']:.0%}",
            str(length["workers"]),
            f"{length['busy']:.0%}",
        )
    return table


def _category_table(report: dict[str, Any]) -> Table:
    """The categories at the last temperature, in the recommended mode."""
    advice = report["recommendation"][-1]
    way = (Mode.SEQUENTIAL if report["settings"]["shared"] else Mode.PIPELINED).value
    table = _table(
        f"{advice['mode']}", "tokens", "overlap", "KL", "a_1", "best\nk", "tokens\na round",
        "over\nplain",
    )  # fmt: skip
    for entry in report["closeness"]:
        if entry["temperature"] != advice["temperature"] or entry["category"] == ALL:
            continue
        found = report["categories"][advice["mode"]][entry["category"]]
        k = found["best_k"][way]
        length = found["lengths"][max(k, 1) - 1]
        table.add_row(
            entry["category"],
            str(entry["tokens"]),
            f"{entry['overlap']:.3f}",
            f"{entry['divergence']:.2f}",
            f"{found['lengths'][0]['acceptance'][0]:.2f}",
            str(k),
            f"{length['mean_acceptance_length']:.2f}" if k else "1.00",
            f"{length[way]:.2f}x" if k else "1.00x",
        )
    return table
