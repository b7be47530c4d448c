"""A pair of models, measured: a process of its own for `outrider plan`, which has no torch.

It reads one JSON object, a `Request`, from stdin and writes JSON lines to stdout: {"progress"}
while it works, at the end {"result"}, a `Measurement`, or {"error": {"kind", "message", "field"}}.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.engine.engine import Runner
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.loading import load_model
from outrider.engine.rows import Rows
from outrider.engine.surgery import optimise
from outrider.errors import FailedPrecondition, InvalidArgument, OutriderError
from outrider.planner.compare import (
    LogitsRows,
    closeness,
    equality_track,
    joined,
    own_picks,
    rejection_track,
)
from outrider.planner.costs import (
    Proposal,
    Verification,
    blocks_for,
    fit_costs,
    make_runner,
)
from outrider.planner.predict import FAN_OUT
from outrider.planner.texts import (
    AT_ONCE,
    CHUNK_ROWS,
    PromptTokenizer,
    Text,
    blocks_of,
    prefill,
    windows,
    write,
)
from outrider.planner.values import (
    COUPLED,
    GREEDY,
    REJECTION,
    Closeness,
    Measurement,
    PairCosts,
    Request,
    Sample,
    Track,
)
from outrider.types import SamplingParams

_CAPACITY_TOKENS = 8192
"""KV of texts that are worked on together."""

_COMPARED_ROWS = 32
_WINDOW_TOKENS = 1024
_STEPS = (1, 2, 4, 8)
_REPEATS = 9

_TRIPS_S = {"cpu": (0.0011, 0.0011, 0.0009), "cuda": (0.0001, 0.0003, 0.0018)}
"""What is added to a plain round, to one with a proposal, and to a proposal (docs/performance.md):
a GPU's target asks the draft by itself, and its plain rounds run ahead."""

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Pair:
    """Both models, each with a runner of its own."""

    target: LoadedModel
    draft: LoadedModel
    target_runner: Runner
    draft_runner: Runner


def measure(request: Request, tell: Tell = lambda progress: None) -> Measurement:
    """Raises OutriderError for models or texts that do not fit."""
    tell("loading the models")
    target, draft = _load(request, "target"), _load(request, "draft")
    if target.tokenizer.fingerprint != draft.tokenizer.fingerprint:
        raise FailedPrecondition(
            f"{draft.name} has another tokenizer than {target.name}", field="draft"
        )
    longest = min(target.context_length, draft.context_length, _CAPACITY_TOKENS)
    texts, skipped = _texts(request, target, longest)
    context_len = _middle(texts, request)
    pair = _pair(request, target, draft, context_len)
    samples = _samples(request, pair, texts, tell)
    costs: PairCosts | None = None
    fits: dict[str, float] = {}
    if request.with_costs:
        tell("measuring costs")
        costs, fits = _costs(request, pair, context_len)
    return Measurement(
        samples=samples,
        costs=costs,
        own_text=not request.given,
        device=_device_name(target),
        dtype=str(target.dtype).removeprefix("torch."),
        names={"target": target.name, "draft": draft.name},
        skipped=skipped,
        fits=fits,
    )


def _load(request: Request, tier: str) -> LoadedModel:
    try:
        loaded = load_model(getattr(request, tier), tier=tier, dtype=request.dtype)
    except InvalidArgument as error:
        raise InvalidArgument(error.message, field=tier) from error
    if loaded.device.type == "cuda":
        torch.cuda.set_device(loaded.device)  # Graphs are captured on the thread's device.
    optimise(loaded.model)
    return loaded


def _texts(request: Request, target: LoadedModel, longest: int) -> tuple[list[Text], list[str]]:
    """Prompts, or pieces of the given text; and the ids of prompts that are too long."""
    tokenizer = PromptTokenizer(target.tokenizer)
    if request.given:
        token_ids = tokenizer.encode(request.given, chat=False)
        texts = windows(token_ids, min(_WINDOW_TOKENS, longest), request.limit)
        if not texts:
            raise InvalidArgument("a text of less than two tokens", field="text")
        return texts, []
    texts, skipped = [], []
    for prompt in request.prompts:
        token_ids = tokenizer.encode(prompt.text, chat=prompt.chat)
        text = Text(prompt.id, prompt.category, tuple(token_ids), len(token_ids))
        fits = 0 < text.start <= longest - request.max_tokens
        if fits:
            texts.append(text)
        else:
            skipped.append(text.id)
    if not texts:
        raise InvalidArgument(
            f"no prompt leaves room for {request.max_tokens} tokens in a context of {longest}",
            field="text",
        )
    return texts, skipped


def _middle(texts: Sequence[Text], request: Request) -> int:
    """Tokens of context at the average compared token."""
    added = 0 if request.given else request.max_tokens
    lengths = [(text.start + len(text.token_ids) + added) // 2 for text in texts]
    return max(sum(lengths) // len(lengths), 16)


def _pair(request: Request, target: LoadedModel, draft: LoadedModel, context_len: int) -> Pair:
    each = blocks_for(2 * context_len + CHUNK_ROWS)
    texts = blocks_for(_CAPACITY_TOKENS) + AT_ONCE
    outcomes = request.sessions * FAN_OUT
    rows = request.sessions * (request.k_max + 1)
    target_runner = make_runner(
        target,
        num_blocks=max(texts, request.sessions * each),
        max_rows=max(CHUNK_ROWS, rows),
        max_context=_CAPACITY_TOKENS,
    )
    draft_runner = make_runner(
        draft,
        num_blocks=max(texts, outcomes * each),
        max_rows=max(CHUNK_ROWS, outcomes),
        max_context=_CAPACITY_TOKENS,
    )
    return Pair(target, draft, target_runner, draft_runner)


def _samples(request: Request, pair: Pair, texts: Sequence[Text], tell: Tell) -> list[Sample]:
    """Each text at each temperature."""
    samples = []
    for sampling in request.samplings:
        done = 0
        for batch in _batches(texts, request.max_tokens):
            seeds = range(sampling.seed + done, sampling.seed + done + len(batch))
            samplings = [dataclasses.replace(sampling, seed=seed) for seed in seeds]
            tell(f"temperature {sampling.temperature:g}, text {done + 1} of {len(texts)}")
            if not request.given:
                stop_ids = () if request.ignore_eos else pair.target.eos_token_ids
                batch = write(
                    pair.target_runner,
                    batch,
                    samplings,
                    max_tokens=request.max_tokens,
                    stop_ids=stop_ids,
                )
            for text, own_sampling in zip(batch, samplings, strict=True):
                samples.append(_compare(pair, text, own_sampling, own_text=not request.given))
            done += len(batch)
    return samples


def _batches(texts: Sequence[Text], max_tokens: int) -> Iterator[list[Text]]:
    """Texts in order, as many together as there is KV for."""
    batch: list[Text] = []
    used = 0
    for text in texts:
        blocks = blocks_of(len(text.token_ids), max_tokens)
        if batch and (len(batch) == AT_ONCE or used + blocks > blocks_for(_CAPACITY_TOKENS)):
            yield batch
            batch, used = [], 0
        batch.append(text)
        used += blocks
    if batch:
        yield batch


def _compare(pair: Pair, text: Text, sampling: SamplingParams, *, own_text: bool) -> Sample:
    """Both models over one text; its own tokens are what the target said, or would have said."""
    parts: list[Closeness] = []
    tracks: dict[str, list[Track]] = {}
    for rows in _rows(pair, text, sampling):
        own = [text.token_ids[p] for p in rows.positions] if own_text else own_picks(rows)
        parts.append(closeness(rows))
        by_equality = GREEDY if sampling.greedy else COUPLED
        tracks.setdefault(by_equality, []).append(equality_track(rows, own))
        if not sampling.greedy:
            track = rejection_track(rows, own, sampling.seed)
            tracks.setdefault(REJECTION, []).append(track)
    return Sample(
        id=text.id,
        category=text.category,
        temperature=sampling.temperature,
        context_len=(text.start + len(text.token_ids)) // 2,
        closeness=Closeness.mean(parts),
        tracks={mode: joined(pieces) for mode, pieces in tracks.items()},
    )


@torch.inference_mode()
def _rows(pair: Pair, text: Text, sampling: SamplingParams) -> Iterator[LogitsRows]:
    """Logits of both models before each compared token, some at a time."""
    token_ids, first = text.token_ids, text.start - 1
    blocks = range(blocks_for(len(token_ids)))
    for runner in (pair.target_runner, pair.draft_runner):
        prefill(runner, token_ids[:first], blocks)
    for start in range(first, len(token_ids) - 1, _COMPARED_ROWS):
        stop = min(start + _COMPARED_ROWS, len(token_ids) - 1)
        rows = [Rows(token_ids[start:stop], start, blocks, stop - start)]
        positions = range(start + 1, stop + 1)
        target: Tensor = pair.target_runner.run(rows).logits
        draft: Tensor = pair.draft_runner.run(rows).logits
        yield LogitsRows.of(target, draft, positions, sampling)


def _costs(request: Request, pair: Pair, context_len: int) -> tuple[PairCosts, dict[str, float]]:
    """Lines for the number of sessions and about the contexts that are asked for."""
    sessions = request.sessions
    lengths = sorted({1, 2, 4, 6, request.k_max + 1})
    room = min(pair.target.context_length, pair.draft.context_length, _CAPACITY_TOKENS)
    room -= max(*lengths, *_STEPS)
    contexts = sorted({min(c, room) for c in (context_len // 2, context_len, 2 * context_len)})
    passes = [Verification(sessions, rows, context) for context in contexts for rows in lengths]
    widths = sorted({1, sessions, sessions * FAN_OUT // 2, sessions * FAN_OUT})
    proposals = [
        Proposal(width, steps, contexts[len(contexts) // 2]) for steps in _STEPS for width in widths
    ]
    verify, draft = fit_costs(
        (pair.target_runner, passes), (pair.draft_runner, proposals), _REPEATS
    )
    costs = PairCosts(verify.line, draft.line, *_TRIPS_S[pair.target.device.type])
    return costs, {"verify": verify.largest_error, "draft": draft.largest_error}


def _device_name(loaded: LoadedModel) -> str:
    if loaded.device.type == "cuda":
        return str(torch.cuda.get_device_name(loaded.device))
    return "CPU"


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # What libraries print must not mix with the answers.

    def tell(progress: str) -> None:
        answers.write(json.dumps({"progress": progress}) + "\n")

    request = Request.from_json(json.load(sys.stdin))
    if request.threads:
        torch.set_num_threads(request.threads)
    try:
        reply = {"result": dataclasses.asdict(measure(request, tell))}
    except OutriderError as error:
        kind = type(error).__name__
        reply = {"error": {"kind": kind, "message": error.message, "field": error.field}}
    answers.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
