"""Drawing on a CUDA device: picks of a pass, and the draft's loop, without the host in between.

A pass leaves its picks in one buffer, or the candidates of its rows, where branches start from it.
Before each further pass of a loop a kernel (`_feed`) turns the pick of every row into that row's
next input, so that host and device meet once a round, when the tokens drawn are read.
"""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.engine.cuda_inputs import Inputs
from outrider.engine.cuda_kernels import BLOCK_TOKENS, copy_blocks
from outrider.engine.drawing import bans
from outrider.engine.rows import Draw, Rows, branch_places
from outrider.sampling import cuda_sampler, cuda_sparse
from outrider.sampling.cuda_sampler import CANDIDATES
from outrider.sampling.row_params import packed_rows
from outrider.types import (
    MAX_PROPOSAL_TOKENS,
    MAX_SPARSE_ENTRIES,
    SamplingParams,
    SparseDistribution,
)

MAX_STEPS = MAX_PROPOSAL_TOKENS
"""Passes of one loop at most."""
MAX_OTHERS = CANDIDATES - 1
"""Alternatives of a pick at most."""
MAX_SPARSE_ROWS = 64
"""Rows of a pass whose draws leave distributions."""


def can_draw(draw: Draw) -> bool:
    """Whether the kernels draw this: nothing masked (min_tokens), and branches whose tokens are
    among the candidates, of which one can be the token that stands."""
    if bans(draw.spec, draw.base_len) or draw.steps + bool(draw.branches) > MAX_STEPS:
        return False
    ranks = all(branch.rank < MAX_OTHERS for branch in draw.branches)
    return ranks and draw.alternatives <= MAX_OTHERS


def loops(draw: Draw) -> bool:
    """Whether it takes further passes."""
    return draw.steps > 1 or bool(draw.branches)


@dataclass(frozen=True, slots=True)
class PassInputs:
    """The device side of a pass of `rows` rows: what the loop's kernel writes."""

    token_ids: Tensor  # [rows] int32
    positions: Tensor  # [rows] int32
    slots: Tensor  # [rows] int32
    sights: Tensor  # [4, rows] int32
    tiles: Tensor  # [4, rows] int32
    tables: Tensor  # [rows, blocks] int32
    wanted: Tensor  # [rows] int32
    params: Tensor  # [rows, ROW_WORDS] int32
    round_starts: Tensor  # [rows] int32


class DrawBuffers:
    """What was drawn: by the last pass, and in each step of a loop.

    The picks are one of each row of logits, or its CANDIDATES, or both. `others` are the
    candidates after each pick of the history, in a loop that keeps them.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        # A branch begins at any candidate, and a loop reads on from there.
        size = max_rows * (1 + CANDIDATES) + MAX_OTHERS
        self.picks = torch.zeros(size, dtype=torch.int64, device=device)
        self.history = torch.zeros(MAX_STEPS, max_rows, dtype=torch.int64, device=device)
        self._on_host = torch.zeros(MAX_STEPS, max_rows, dtype=torch.int64).pin_memory()
        self._numbers = self._on_host.numpy()
        every = (MAX_STEPS, max_rows, MAX_OTHERS)
        self.others = torch.zeros(every, dtype=torch.int64, device=device)
        self._others_on_host = torch.zeros(every, dtype=torch.int64).pin_memory()
        self.sparse = torch.zeros(
            MAX_SPARSE_ROWS, MAX_SPARSE_ENTRIES, dtype=torch.int64, device=device
        )
        every = (MAX_STEPS, *self.sparse.shape)
        self._sparse_history = torch.zeros(every, dtype=torch.int64, device=device)
        self._sparse_on_host = torch.zeros(every, dtype=torch.int64).pin_memory()
        self._arrived = [
            torch.cuda.Event()  # type: ignore[no-untyped-call]
            for _ in range(MAX_STEPS)
        ]

    def read_picks(self, count: int, each: int) -> list[list[int]]:
        """So many picks of each of the last pass's rows; waits for the device."""
        total = count * each
        self._on_host.view(-1)[:total].copy_(self.picks[:total], non_blocking=True)
        self._arrived[0].record()
        self._arrived[0].synchronize()
        rows: list[list[int]] = self._numbers.reshape(-1)[:total].reshape(count, -1).tolist()
        return rows

    def keep_sparse(self, step: int) -> None:
        """Note what the draws of a step were drawn from, in the order of the stream."""
        self._sparse_history[step].copy_(self.sparse)

    def read_sparse(self, steps: int, count: int) -> list[list[SparseDistribution]]:
        """Of each of `count` rows what was kept of so many steps; waits for the device."""
        if not steps:
            return [[] for _ in range(count)]
        self._sparse_on_host[:steps].copy_(self._sparse_history[:steps], non_blocking=True)
        self._arrived[0].record()
        self._arrived[0].synchronize()
        kept = self._sparse_on_host[:steps, :count].transpose(0, 1).flatten(0, 1)
        flat = cuda_sparse.unpack(kept).unpack()
        return [flat[row * steps : (row + 1) * steps] for row in range(count)]

    def send_history(self, steps: range, *, others: bool) -> None:
        """Bring what was drawn in these steps to the host, in the order of the stream; with the
        candidates that came next, if there are."""
        part = slice(steps.start, steps.stop)
        self._on_host[part].copy_(self.history[part], non_blocking=True)
        if others:
            self._others_on_host[part].copy_(self.others[part], non_blocking=True)
        self._arrived[steps.start].record()

    def read_history(
        self, steps: range, count: int, ranks: int
    ) -> list[tuple[list[int], list[list[int]]]]:
        """What each of `count` rows drew in steps that were sent, and after each pick so many of
        the candidates that came next; waits for the device."""
        self._arrived[steps.start].synchronize()
        part = slice(steps.start, steps.stop)
        picks: list[list[int]] = self._numbers[part, :count].T.tolist()
        others: list[list[list[int]]] = [[]] * count
        if ranks:
            others = self._others_on_host[part, :count, :ranks].transpose(0, 1).tolist()
        return list(zip(picks, others, strict=True))

    def send(self, step: int) -> None:
        """Bring what a step drew to the host, in the order of the stream."""
        self._on_host[step].copy_(self.history[step], non_blocking=True)
        self._arrived[step].record()

    def receive(self, step: int, count: int) -> list[int]:
        """What each of `count` rows drew in a step that was sent; waits for it."""
        self._arrived[step].synchronize()
        picks: list[int] = self._numbers[step, :count].tolist()
        return picks


class LoopRow(NamedTuple):
    """A row of a loop: it draws so many `tokens` from position `start` on. The first stands at
    index `source` in the picks of the pass before, or is `given`, where that is below 0; all but
    the last are fed to passes."""

    sampling: SamplingParams
    blocks: Tokens[int]
    source: int
    start: int
    tokens: int
    copied: tuple[int, int] | None = None
    """The KV block to copy before (from, to)."""
    given: int = 0
    round_start: int = 0
    """What its noise is keyed by where distributions are left."""


def loop_rows(batch: Tokens[Rows], candidates: int) -> list[list[LoopRow]]:
    """For each entry the rows that its draw makes go on, after a pass whose picks are so many
    candidates of each row of logits."""
    found, first = [], 0
    for rows in batch:
        found.append(_entry_rows(rows, rows.draw, first, candidates) if rows.draw else [])
        first += rows.num_logits
    return found


def _entry_rows(rows: Rows, draw: Draw, first: int, candidates: int) -> list[LoopRow]:
    """Of one entry, whose rows of logits begin at the row `first` of all."""
    sampling, last = draw.spec.sampling, rows.num_logits - 1
    if not draw.branches:
        source = (first + last) * candidates
        return [LoopRow(sampling, rows.blocks, source, draw.base_len, draw.steps)]
    found = []
    for branch, place in zip(draw.branches, branch_places(rows, BLOCK_TOKENS), strict=True):
        source, given = -1, 0
        if rows.known:
            given = rows.known[branch.num_accepted][branch.rank]
        else:
            # A token that stands is taken to be the first candidate: the draft guessed it by the
            # same noise. A branch that this is wrong for repeats the token, which only wastes it.
            rank = branch.rank + (branch.num_accepted < last)
            source = (first + branch.num_accepted) * candidates + rank
        tokens = draw.steps + 1
        found.append(
            LoopRow(sampling, place.blocks, source, place.start, tokens, place.copied, given)
        )
    return found


class DraftLoop:
    """Starts and continues a loop of up to `rows` rows on the inputs of their pass."""

    def __init__(
        self,
        target: PassInputs,
        buffers: DrawBuffers,
        pools: tuple[Tensor, Tensor],  # keys and values, each [layers, blocks, …]
        device: torch.device,
    ) -> None:
        rows, width = target.tables.shape
        self.rows = rows
        self._target = target
        self._buffers = buffers
        self._pools = pools
        self._inputs = Inputs(
            {
                "step": 1,
                "sources": rows,
                "given": rows,
                "positions": rows,
                "limits": rows,
                "round_starts": rows,
                "copied": 2 * rows,
                "params": target.params.numel(),
                "tables": rows * width,
            },
            device,
        )

    def start(self, going: Tokens[LoopRow], candidates: int = 1) -> None:
        """Make the first tokens the input of the next pass, with the KV copies that it needs.

        `candidates` as for `feed`; if several, then of the pass before the loop too.
        """
        self._inputs.wait()
        host = self._inputs.host
        tables = host["tables"].reshape(self.rows, -1)
        params = host["params"].reshape(self.rows, -1)
        columns = ("sources", "given", "positions", "limits", "round_starts")
        sources, given, positions, limits, round_starts = (host[name] for name in columns)
        limits[len(going) :] = 0
        for row, each in enumerate(going):
            last = each.start + each.tokens - 1
            blocks = each.blocks[: -(-last // BLOCK_TOKENS)]
            tables[row, : len(blocks)] = blocks
            sources[row] = each.source
            given[row] = each.given
            positions[row] = each.start - 1
            limits[row] = last
            round_starts[row] = each.round_start
        params[: len(going)] = packed_rows([(each.sampling, (each.start,)) for each in going])
        copied = [block for row in going for block in row.copied or ()]
        host["copied"][: len(copied)] = copied
        host["step"][0] = 0
        self._inputs.send()
        device, target = self._inputs.device, self._target
        copy_blocks(*self._pools, device["copied"][: len(copied)].view(-1, 2))
        target.tables.copy_(device["tables"].view_as(target.tables))
        target.params.copy_(device["params"].view_as(target.params))
        target.round_starts.copy_(device["round_starts"])
        self.feed(candidates)

    def feed(self, candidates: int = 1) -> None:
        """Note what was drawn, and make it the input of the next pass.

        The loop's own passes pick so many candidates of each row; if several, those that came next
        are noted too.
        """
        device, target, buffers = self._inputs.device, self._target, self._buffers
        _feed[(1,)](
            device["step"],
            device["sources"],
            device["given"],
            device["positions"],
            device["limits"],
            buffers.picks,
            buffers.history,
            buffers.history.stride(0),
            buffers.others,
            target.token_ids,
            target.positions,
            target.slots,
            target.sights,
            target.tiles,
            target.tables,
            target.tables.stride(0),
            target.wanted,
            target.params,
            ROWS=self.rows,
            PADDED=triton.next_power_of_2(self.rows),
            BLOCK=BLOCK_TOKENS,
            ROW_WORDS=cuda_sampler.ROW_WORDS,
            CANDIDATES=candidates,
            OTHERS=MAX_OTHERS if candidates > 1 else 0,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _feed(  # type: ignore[no-untyped-def]
    step,
    sources,
    given,
    last_positions,
    limits,
    picks,
    history,
    history_stride,
    others,
    token_ids,
    positions,
    slots,
    sights,
    tiles,
    tables,
    table_stride,
    wanted,
    words,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    OTHERS: tl.constexpr,
):
    row = tl.arange(0, PADDED)
    exists = row < ROWS
    now = tl.load(step)
    limit = tl.load(limits + row, mask=exists, other=0)
    source = tl.load(sources + row, mask=exists, other=0)
    drawn = (limit > 0) & (source >= 0)
    pick = tl.load(picks + source, mask=drawn, other=0)
    first = tl.load(given + row, mask=exists, other=0).to(tl.int64)
    pick = tl.where(source < 0, first, pick)
    tl.store(history + now * history_stride + row, pick, mask=limit > 0)
    for rank in tl.static_range(OTHERS):
        other = tl.load(picks + source + 1 + rank, mask=drawn, other=0)
        tl.store(others + (now * history_stride + row) * OTHERS + rank, other, mask=limit > 0)
    position = tl.load(last_positions + row, mask=exists, other=0) + 1
    goes_on = position < limit
    block = tl.load(tables + row * table_stride + position // BLOCK, mask=goes_on, other=0)
    slot = tl.where(goes_on, block * BLOCK + position % BLOCK, -1)
    tl.store(token_ids + row, tl.where(goes_on, pick, 0).to(tl.int32), mask=exists)
    tl.store(positions + row, tl.where(goes_on, position, 0), mask=exists)
    tl.store(slots + row, slot, mask=exists)
    tl.store(sights + row, position, mask=exists)
    tl.store(sights + ROWS + row, position + 1, mask=exists)
    tl.store(sights + 2 * ROWS + row, tl.zeros([PADDED], tl.int32), mask=exists)
    tl.store(sights + 3 * ROWS + row, tl.zeros([PADDED], tl.int32), mask=exists)
    tl.store(tiles + row, row, mask=exists)
    tl.store(tiles + ROWS + row, row, mask=exists)
    tl.store(tiles + 2 * ROWS + row, goes_on.to(tl.int32), mask=exists)
    tl.store(tiles + 3 * ROWS + row, position, mask=exists)
    tl.store(wanted + row, row, mask=exists)
    # Words 7 and 8 of the parameters are the position that the next pick will have.
    tl.store(words + row * ROW_WORDS + 7, position + 1, mask=exists)
    tl.debug_barrier()
    tl.store(sources + row, row * CANDIDATES, mask=exists)
    tl.store(last_positions + row, position, mask=exists)
    tl.store(step, now + 1)
