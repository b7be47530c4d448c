"""What passes and proposals cost on the device at hand: lines fitted to measured times.

A verification is a pass of so many sequences with so many rows each over a context, a proposal
several passes of a row a sequence. Medians of interleaved repeats; least squares of relative
errors.
"""

import random
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.engine.engine import Runner
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.rows import Draw, Rows
from outrider.speculation.costs import Line
from outrider.types import GenerationSpec, SamplingParams

BLOCK_TOKENS = 32
GREEDY = GenerationSpec(SamplingParams(temperature=0.0))

_WARM_UPS = 2

Case = Callable[[], object]


class Fit(NamedTuple):
    """A line in seconds, and how far from it single cases are, relatively."""

    line: Line
    largest_error: float
    mean_error: float


class Verification(NamedTuple):
    """A pass of `sequences` with `rows` each, after `context` tokens."""

    sequences: int
    rows: int
    context: int


class Proposal(NamedTuple):
    """`steps` passes of a row for each of `sequences`, after `context` tokens."""

    sequences: int
    steps: int
    context: int


def make_runner(loaded: LoadedModel, *, num_blocks: int, max_rows: int, max_context: int) -> Runner:
    """What runs the model's passes, with KV of its own and warmed up."""
    if loaded.device.type == "cuda":
        from outrider.engine.cuda_runner import CudaRunner

        cuda = CudaRunner(loaded, num_blocks=num_blocks, max_rows=max_rows, max_context=max_context)
        cuda.warm_up()
        return cuda
    from outrider.engine.model_runner import ModelRunner

    return ModelRunner(loaded, num_blocks=num_blocks, block_tokens=BLOCK_TOKENS)


def fit_costs(
    verify: tuple[Runner, Sequence[Verification]],
    draft: tuple[Runner, Sequence[Proposal]],
    repeats: int,
) -> tuple[Fit, Fit]:
    """Seconds of verifications over rows, and over rows times tokens of context; of proposals over
    steps, and over steps of sequences beyond the first."""
    passes, proposals = verify[1], draft[1]
    cases = [_verification(verify[0], case) for case in passes]
    times = measure(cases + [_proposal(draft[0], case) for case in proposals], repeats)
    rows = [float(n * rows) for n, rows, _ in passes]
    contexts = [n * rows * float(context) for n, rows, context in passes]
    steps = [float(steps) for _, steps, _ in proposals]
    further = [(n - 1.0) * steps for n, steps, _ in proposals]
    return fit(rows, contexts, times[: len(passes)]), fit(steps, further, times[len(passes) :])


def measure(cases: Sequence[Case], repeats: int) -> list[float]:
    """Seconds of each case. All take turns, and each counts by its share of its turn (the median
    of these), so that a machine that is slower for a while is so for all alike."""
    took = np.zeros((repeats + _WARM_UPS, len(cases)))
    for times in took:
        for number, case in enumerate(cases):
            started = time.perf_counter()
            case()
            times[number] = time.perf_counter() - started
    turns = took[_WARM_UPS:].sum(axis=1, keepdims=True)
    shares = np.median(took[_WARM_UPS:] / turns, axis=0)
    seconds: list[float] = (shares * np.median(turns)).tolist()
    return seconds


def fit(sizes: Sequence[float], others: Sequence[float], times: Sequence[float]) -> Fit:
    """The line of two sizes that is nearest to the times; nothing of it is below 0."""
    matrix = np.column_stack([np.ones(len(times)), sizes, others])
    measured = np.asarray(times)
    solved = _least_squares(matrix / measured[:, None])
    off = np.abs(matrix @ solved / measured - 1.0)
    return Fit(Line(*map(float, solved)), float(off.max()), float(off.mean()))


def _least_squares(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """x >= 0 with matrix @ x nearest to 1: without the columns that would have to be negative."""
    kept = list(range(matrix.shape[1]))
    solved = np.zeros(matrix.shape[1])
    while kept:
        found, *_ = np.linalg.lstsq(matrix[:, kept], np.ones(len(matrix)), rcond=None)
        if found.min() >= 0.0:
            solved[kept] = found
            break
        kept.pop(int(found.argmin()))
    return solved


def blocks_for(tokens: int) -> int:
    """KV blocks of a sequence."""
    return -(-tokens // BLOCK_TOKENS)


def _verification(runner: Runner, case: Verification) -> Case:
    tokens = random.Random(case.rows).choices(range(256), k=case.rows)
    draw = Draw(GREEDY, case.context + 1)
    batch = [
        Rows(tokens, case.context, blocks, case.rows, draw)
        for blocks in _tables(case.sequences, case.context + case.rows)
    ]
    return lambda: runner.run(batch)


def _proposal(runner: Runner, case: Proposal) -> Case:
    draw = Draw(GREEDY, case.context + 1, case.steps)
    batch = [
        Rows([5], case.context, blocks, 1, draw)
        for blocks in _tables(case.sequences, case.context + case.steps)
    ]
    return lambda: runner.run(batch)


def _tables(sequences: int, tokens: int) -> list[list[int]]:
    each = blocks_for(tokens)
    return [list(range(i * each, (i + 1) * each)) for i in range(sequences)]
