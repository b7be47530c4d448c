"""A forward pass on a CPU as one traced graph.

Run from Python, a third of a small model's pass is the interpreter going through `transformers`'
modules. The pass is traced once at load (a second at most) and then runs in C++, the same
operations in the same order, with the interpreter free for others. Whether the graph does what the
modules do is checked bit by bit; a model whose code branches on its input stays as it is.
"""

import logging
import warnings
from collections.abc import Callable
from collections.abc import Sequence as Tokens

import torch
from torch import Tensor, nn

from outrider.engine.kv_pool import CpuLayout, CpuPool, int64s
from outrider.engine.rows import Rows

logger = logging.getLogger(__name__)

Pass = Callable[..., Tensor]
"""From what `inputs_of` gives to logits [logits rows of all, vocab] float32."""

_EXAMPLE_ROWS = 3
_CHECKED_ROWS = (1, 2, 7)
_CHECKED_PARENTS = (-1, 0, -1, 0)


class _Forward(nn.Module):
    def __init__(self, model: nn.Module, pool: CpuPool) -> None:
        super().__init__()
        self._model = model
        self._pool = pool

    def forward(
        self,
        token_ids: Tensor,  # [1, rows] int64
        positions: Tensor,  # [1, rows] int64
        wanted: Tensor,  # [logits rows] int64
        slots: Tensor,
        tasks: Tensor,
        tables: Tensor,
        sights: Tensor,
    ) -> Tensor:
        output = self._model(
            input_ids=token_ids,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=wanted,
            row_layout=CpuLayout(self._pool.keys, self._pool.values, slots, tasks, tables, sights),
        )
        logits: Tensor = output.logits[0].float()
        return logits


@torch.inference_mode()
def build_pass(model: nn.Module, pool: CpuPool, vocab_size: int) -> Pass:
    """The pass of `model` over KV in `pool`. Writes into the pool's first block."""
    eager = _Forward(model, pool)

    def example(rows: int, parents: Tokens[int] = ()) -> tuple[Tensor, ...]:
        token_ids = [(7 * i + rows) % vocab_size for i in range(rows)]
        start = pool.block_tokens - rows
        return inputs_of([Rows(token_ids, start, [0], rows, parents=parents)], pool)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced: Pass = torch.jit.trace(  # type: ignore[no-untyped-call]
                eager, example(_EXAMPLE_ROWS), check_trace=False
            )
            tree = example(1 + len(_CHECKED_PARENTS), _CHECKED_PARENTS)
            # All of them, because in a group every rank must run as many passes.
            equal = [
                torch.equal(traced(*inputs), eager(*inputs))
                for inputs in (*map(example, _CHECKED_ROWS), tree)
            ]
    except Exception as error:
        logger.warning("the pass cannot be traced and runs in Python: %s", error)
        return eager
    if not all(equal):
        logger.warning("the traced pass differs from the model's own, which runs in its place")
        return eager
    return traced


def inputs_of(batch: Tokens[Rows], pool: CpuPool) -> tuple[Tensor, ...]:
    """What a pass over the rows is called with."""
    token_ids: list[int] = []
    positions: list[int] = []
    wanted: list[int] = []
    for rows in batch:
        token_ids.extend(rows.token_ids)
        positions.extend(rows.positions)
        wanted.extend(range(len(token_ids) - rows.num_logits, len(token_ids)))
    layout = pool.layout(batch)
    return (
        int64s([token_ids]),
        int64s([positions]),
        int64s(wanted),
        layout.slots,
        layout.tasks,
        layout.tables,
        layout.sights,
    )
