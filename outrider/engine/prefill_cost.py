"""What computing KV costs on this machine, measured by passes before anybody is served."""

import time

from outrider.engine.engine import Runner
from outrider.engine.rows import Rows

_ENOUGH_S = 0.2
_LONG_S = 1.0
_FIRST_ROWS = 32
_DEEP_BLOCKS = 64


def measure_prefill(
    runner: Runner, *, num_blocks: int, max_rows: int, context_length: int
) -> tuple[float, float]:
    """Seconds of a token at the start of a prompt, and seconds more for each token before it.

    Passes get longer until one takes 0.2 s; one of that length is then run deep in a context. They
    write into the pool, which must hold nothing yet.
    """
    size = runner.block_tokens
    room = min(num_blocks * size, context_length)
    rows = min(_FIRST_ROWS, max_rows, room)
    took = _pass_s(runner, rows, 0)
    while took < _ENOUGH_S and 2 * rows <= min(max_rows, room):
        rows *= 2
        took = _pass_s(runner, rows, 0)
    token_s = took / rows
    depth = min(_DEEP_BLOCKS * size, room - rows) // size * size
    if depth < 4 * rows:  # Too near to tell the difference from noise.
        return token_s, 0.0
    deep_s = _pass_s(runner, rows, depth)
    return token_s, max(deep_s - took, 0.0) / rows / depth


def _pass_s(runner: Runner, rows: int, start: int) -> float:
    """The better of two, where the first was short."""
    blocks = list(range(-(-(start + rows) // runner.block_tokens)))
    batch = [Rows([0] * rows, start, blocks, 1)]
    times = []
    for _ in range(2):
        started = time.monotonic()
        float(runner.run(batch).logits[0, 0])  # A device has done its work only then.
        times.append(time.monotonic() - started)
        if times[0] > _LONG_S:
            break
    return min(times)
