"""What is asked and what is measured of a pair of models, torch-free, and as JSON."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.errors import InvalidArgument
from outrider.speculation.costs import Line
from outrider.types import SamplingParams

GREEDY, COUPLED, REJECTION = MODES = ("greedy", "coupled", "rejection")
"""Temperature 0, and the modes of verification above it."""

NEVER = -1e9
"""Log-ratio of a token that the draft does not guess."""


@dataclass(frozen=True, slots=True)
class Track:
    """How a draft follows one text of the target's, a value a token.

    `log_ratios` is log(draft / target) of the token, of the probabilities that are sampled from.
    Where guesses are verified by equality it is 0 for a token that the draft picks too, else
    `NEVER`. `ranks` is the token's place among the draft's candidates there (0: its best),
    `other_ranks` its place where the draft's own guess, another one, is left out.
    """

    log_ratios: Sequence[float]
    ranks: Sequence[int]
    other_ranks: Sequence[int]


@dataclass(frozen=True, slots=True)
class Closeness:
    """How near draft and target are over some tokens, in means; nats.

    `overlap` is 1 - TV of what is sampled from. Entropies and the divergence KL(target || draft)
    are of the distributions at the text's temperature (1 for a greedy one) before anything is cut
    off. Agreement is the share of tokens at which both have the same argmax, or with the same
    noise the same pick.
    """

    tokens: int
    overlap: float
    target_entropy: float
    draft_entropy: float
    divergence: float
    greedy_agreement: float
    coupled_agreement: float | None = None

    @classmethod
    def mean(cls, parts: Sequence["Closeness"]) -> "Closeness":
        """Of all tokens of some texts, which are not none."""
        tokens = sum(part.tokens for part in parts)

        def average(values: Iterable[float]) -> float:
            pairs = zip(values, parts, strict=True)
            return sum(value * part.tokens for value, part in pairs) / tokens

        coupled = [p.coupled_agreement for p in parts if p.coupled_agreement is not None]
        return cls(
            tokens,
            average(part.overlap for part in parts),
            average(part.target_entropy for part in parts),
            average(part.draft_entropy for part in parts),
            average(part.divergence for part in parts),
            average(part.greedy_agreement for part in parts),
            average(coupled) if len(coupled) == len(parts) else None,
        )


@dataclass(frozen=True, slots=True)
class Sample:
    """One text, at one temperature; `tracks` by mode, `context_len` in its middle."""

    id: str
    category: str
    temperature: float
    context_len: int
    closeness: Closeness
    tracks: Mapping[str, Track]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Sample":
        """From `dataclasses.asdict`."""
        closeness = Closeness(**data["closeness"])
        tracks = {mode: Track(**track) for mode, track in data["tracks"].items()}
        return cls(**{**data, "closeness": closeness, "tracks": tracks})


@dataclass(frozen=True, slots=True)
class PairCosts:
    """Seconds of the parts of a round.

    `verify` is a pass over rows, and over rows times tokens of context; `draft` a proposal over
    steps, and over steps of further sequences. `plain_s` and `round_s` come on top of the pass in
    rounds without and with a proposal, `ask_s` is the trip to the draft.
    """

    verify: Line
    draft: Line
    plain_s: float = 0.0
    round_s: float = 0.0
    ask_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Measurement:
    """What the measuring process found. `skipped` are ids of texts that did not fit.

    `own_text` says that the target wrote the texts; else they were given.
    """

    samples: Sequence[Sample]
    costs: PairCosts | None
    own_text: bool
    device: str
    dtype: str
    names: Mapping[str, str]
    skipped: Sequence[str] = ()
    fits: Mapping[str, float] = field(default_factory=dict)
    """Largest relative deviation of a cost from its line."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Measurement":
        """From `dataclasses.asdict`."""
        samples = [Sample.from_json(sample) for sample in data["samples"]]
        costs = costs_from_json(data["costs"]) if data["costs"] else None
        return cls(**{**data, "samples": samples, "costs": costs})


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the target is to answer: a user's message when `chat`, raw text otherwise."""

    id: str
    category: str
    text: str
    chat: bool


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be measured. `given` is a text to compare the models over, in place of prompts.

    Text number i has the seed `sampling.seed` + i, as in `outrider bench`.
    """

    target: str
    draft: str
    dtype: str
    threads: int
    prompts: Sequence[Prompt]
    given: str
    limit: int
    max_tokens: int
    ignore_eos: bool
    sampling: SamplingParams
    sessions: int
    k_max: int
    with_costs: bool

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Request":
        """From `dataclasses.asdict`."""
        prompts = [Prompt(**prompt) for prompt in data["prompts"]]
        return cls(**{**data, "prompts": prompts, "sampling": SamplingParams(**data["sampling"])})

    @property
    def samplings(self) -> list[SamplingParams]:
        """Those that texts are compared at: the argmax always."""
        drawn = [] if self.sampling.greedy else [self.sampling]
        return [SamplingParams(seed=self.sampling.seed), *drawn]


def read_costs(path: Path) -> PairCosts:
    """Costs from a file; InvalidArgument names what is wrong with it."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"cannot read {path}: {error}", field="costs") from error
    if isinstance(data, dict) and isinstance(data.get("costs"), dict):
        data = data["costs"]  # A report of `outrider plan`.
    return costs_from_json(data)


def costs_from_json(data: Any) -> PairCosts:
    """From `dataclasses.asdict`; `plain_s`, `round_s` and `ask_s` may be left out."""
    _check_keys(data, "costs", {"verify", "draft"}, {"plain_s", "round_s", "ask_s"})
    extra = {
        name: _seconds(value, f"costs.{name}")
        for name, value in data.items()
        if name not in ("verify", "draft")
    }
    return PairCosts(
        _line(data["verify"], "costs.verify"), _line(data["draft"], "costs.draft"), **extra
    )


def _line(data: Any, name: str) -> Line:
    _check_keys(data, name, {"base", "slope"}, {"other_slope"})
    line = Line(**{key: _seconds(value, f"{name}.{key}") for key, value in data.items()})
    if line.base + line.slope <= 0.0:
        raise InvalidArgument("the smallest work costs nothing", field=name)
    return line


def _check_keys(data: Any, name: str, needed: set[str], allowed: set[str]) -> None:
    if not isinstance(data, dict):
        raise InvalidArgument(f"is no object with {', '.join(sorted(needed))}", field=name)
    if missing := needed - data.keys():
        raise InvalidArgument("is missing", field=f"{name}.{min(missing)}")
    if unknown := data.keys() - needed - allowed:
        raise InvalidArgument("is not known", field=f"{name}.{min(unknown)}")


def _seconds(value: Any, name: str) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0.0:
        raise InvalidArgument(f"{value!r} is not a number of seconds, 0 or more", field=name)
    return float(value)
