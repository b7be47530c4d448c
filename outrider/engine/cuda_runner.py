"""One forward pass over ragged rows of many sequences, on a CUDA device.

Passes run as captured CUDA graphs, one for each bucket of rows; what a pass needs to know goes to
the device in one copy. Every layer is compiled once a bucket for all layers together: what differs
between layers, weights and KV, are tensors. Nothing compiles or allocates after `warm_up`.
"""

import bisect
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from outrider.engine import cuda_kernels, drawing
from outrider.engine.block_copies import DeviceCopies
from outrider.engine.cuda_drawing import (
    MAX_SPARSE_ROWS,
    MAX_STEPS,
    DraftLoop,
    DrawBuffers,
    LoopRow,
    PassInputs,
    can_draw,
    loop_rows,
    loops,
)
from outrider.engine.cuda_inputs import Inputs
from outrider.engine.cuda_kernels import BLOCK_TOKENS
from outrider.engine.drawing import has_cuts
from outrider.engine.kv_pool import KvShape
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.rows import Draw, Drawn, Output, Rows
from outrider.sampling.cuda_sampler import CANDIDATES, sample_candidates, sample_rows
from outrider.sampling.cuda_sparse import sample_sparse
from outrider.sampling.row_params import ROW_WORDS, packed_rows
from outrider.types import SamplingParams

logger = logging.getLogger(__name__)

_BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 256, 384, 512)
MAX_ROWS = _BUCKETS[-1]
"""Rows of the largest pass."""

_COMPILED: dict[str, str | int | bool | Callable[..., Any]] = {"combo_kernels": True}
"""What queries, keys and values need before attention is one launch for all three."""


@dataclass(frozen=True, slots=True)
class CudaLayout:
    """A `RowLayout` (outrider.engine.attention) for the Triton kernel."""

    slots: Tensor  # [rows] int32, -1: padding
    sights: Tensor  # [4, rows] int32: place, `Sight.full`, low and high word of `Sight.mask`
    tiles: Tensor  # [4, rows] int32: sequence, first row, rows (0: none), place of the first
    tables: Tensor  # [sequences, blocks] int32
    max_context: int

    def attend(
        self,
        module: nn.Module,
        query: Tensor,  # [rows, heads, head_dim]
        key: Tensor,  # [rows, kv_heads, head_dim]
        value: Tensor,  # [rows, kv_heads, head_dim]
        scaling: float,
    ) -> Tensor:  # [rows, heads, head_dim]
        # Not by layer number: a number would make every layer compile anew.
        output: Tensor = torch.ops.outrider_cuda.paged_attention(
            query,
            key,
            value,
            module.kv_keys,
            module.kv_values,
            self.slots,
            self.sights,
            self.tiles,
            self.tables,
            scaling,
            self.max_context,
        )
        return output


_NOT_DRAWN = SamplingParams()
"""Of rows whose logits alone are wanted: nobody looks at what is drawn there."""


class _Bucket:
    """The static inputs of a pass of `rows` rows, and its graphs."""

    def __init__(self, rows: int, table_width: int, max_context: int, device: torch.device) -> None:
        self.rows = rows
        self.table_width = table_width
        self._inputs = Inputs(
            {
                "token_ids": rows,
                "positions": rows,
                "slots": rows,
                "sights": 4 * rows,
                "tiles": 4 * rows,
                "wanted": rows,
                "params": rows * ROW_WORDS,
                "round_starts": rows,
                "tables": rows * table_width,
            },
            device,
        )
        self.host = self._inputs.host
        self._host_tables = self.host["tables"].reshape(rows, table_width)
        self._host_sights = self.host["sights"].reshape(4, rows)
        self._host_tiles = self.host["tiles"].reshape(4, rows)
        self._host_params = self.host["params"].reshape(rows, ROW_WORDS)
        on_device = self._inputs.device
        self.inputs = PassInputs(
            token_ids=on_device["token_ids"],
            positions=on_device["positions"],
            slots=on_device["slots"],
            sights=on_device["sights"].view(4, rows),
            tiles=on_device["tiles"].view(4, rows),
            tables=on_device["tables"].view(rows, table_width),
            wanted=on_device["wanted"],
            params=on_device["params"].view(rows, ROW_WORDS),
            round_starts=on_device["round_starts"],
        )
        self.layout = CudaLayout(
            slots=self.inputs.slots,
            sights=self.inputs.sights,
            tiles=self.inputs.tiles,
            tables=self.inputs.tables,
            max_context=max_context,
        )
        self.graph: torch.cuda.CUDAGraph | None = None
        self.draw_graphs: dict[tuple[bool, int], torch.cuda.CUDAGraph] = {}
        """By whether tokens are cut off, and the candidates of a row."""
        self.sparse_graphs: dict[tuple[bool, bool], torch.cuda.CUDAGraph] = {}
        """Draws that leave distributions; by whether tokens are cut off, and are ranked."""
        self.logits: Tensor | None = None
        # Rows of a pass that was never filled, in warm-up, belong nowhere.
        self.host["slots"][:] = -1
        self._inputs.send()

    def fill(self, batch: Tokens[Rows]) -> int:
        """Describe a pass; the number of logits rows that it wants."""
        self._inputs.wait()
        host, tile_rows = self.host, cuda_kernels.TILE_ROWS
        # Lists first: a number costs less there than in an array.
        token_ids: list[int] = []
        positions: list[int] = []
        places: list[int] = []
        slots: list[int] = []
        wanted: list[int] = []
        tiles: list[tuple[int, int, int, int]] = []
        for number, rows in enumerate(batch):
            row, start, stop = len(places), rows.start, rows.stop
            own = range(start, stop)
            blocks = rows.blocks[: -(-stop // BLOCK_TOKENS)]
            self._host_tables[number, : len(blocks)] = blocks
            token_ids += rows.token_ids
            positions += rows.positions
            places += own
            slots += [blocks[p // BLOCK_TOKENS] * BLOCK_TOKENS + p % BLOCK_TOKENS for p in own]
            for place in range(start, stop, tile_rows):
                tiles.append((number, row + place - start, min(tile_rows, stop - place), place))
            wanted += range(len(places) - rows.num_logits, len(places))
        total = len(places)
        host["token_ids"][:total] = token_ids
        host["positions"][:total] = positions
        host["slots"][:total] = slots
        host["slots"][total:] = -1
        host["wanted"][: len(wanted)] = wanted
        self._host_tiles[:, : len(tiles)] = np.array(tiles).T
        self._host_tiles[2, len(tiles) :] = 0
        self._fill_params(batch, len(wanted))
        self._fill_sights(batch, places)
        self._inputs.send()
        return len(wanted)

    def _fill_sights(self, batch: Tokens[Rows], places: list[int]) -> None:
        sights = self._host_sights[:, : len(places)]
        sights[0] = places
        sights[1] = sights[0] + 1
        sights[2:] = 0
        first = 0
        for rows in batch:
            if rows.parents:
                own = sights[1:, first : first + len(rows.token_ids)]
                full, masks = zip(*rows.sights, strict=True)
                own[0] = full
                own[1:] = np.array(masks, dtype="<u8").view("<i4").reshape(-1, 2).T
            first += len(rows.token_ids)

    def _fill_params(self, batch: Tokens[Rows], total: int) -> None:
        runs: list[tuple[SamplingParams, Tokens[int]]] = []
        round_starts: list[int] = []
        for rows in batch:
            draw, count = rows.draw, rows.num_logits
            if draw is None:
                runs.append((_NOT_DRAWN, (0,) * count))
                round_starts += (0,) * count
            else:
                runs.append((draw.spec.sampling, rows.drawn_positions(draw)))
                round_starts += (draw.base_len,) * count
        self._host_params[:total] = packed_rows(runs)
        self._host_params[total:] = 0
        self.host["round_starts"][:total] = round_starts


class CudaRunner:
    """Holds a model and its KV pool; `forward` is the only thing that touches either."""

    block_tokens: int = BLOCK_TOKENS
    max_stream: int = MAX_STEPS
    _capture_mode = "global"

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_blocks: int,
        max_rows: int,
        max_context: int,
        leaves_distributions: bool = True,
    ) -> None:
        """`leaves_distributions`: its kernels draw the guesses of `rejection` too."""
        self.model = loaded.model
        self._leaves_distributions = leaves_distributions
        self._device = loaded.device
        # Graphs run one at a time, so they share their memory.
        self._memory = torch.cuda.graph_pool_handle()
        self._attach_pool(KvShape.of(loaded.config, loaded.dtype, loaded.ranks), num_blocks)
        width = -(-max_context // self.block_tokens)
        self._buckets = [
            _Bucket(rows, width, max_context, loaded.device)
            for rows in _BUCKETS[: bisect.bisect_left(_BUCKETS, max_rows) + 1]
        ]
        self._buffers = DrawBuffers(self._buckets[-1].rows, loaded.device)
        self._loops = {
            bucket.rows: DraftLoop(bucket.inputs, self._buffers, self._pools, loaded.device)
            for bucket in self._buckets
        }

    def warm_up(self) -> float:
        """Compile and capture every bucket, largest first; seconds that it took."""
        started = time.monotonic()
        # A bucket is a shape of its own for the same code.
        torch._dynamo.config.recompile_limit = 4 * len(_BUCKETS)
        for layer in self._layers():
            layer.forward = torch.compile(layer.forward, dynamic=False, options=_COMPILED)
        for bucket in reversed(self._buckets):
            self._capture(bucket)
            logger.info(
                "captured a graph",
                extra={"rows": bucket.rows, "seconds": round(time.monotonic() - started, 1)},
            )
        seconds = time.monotonic() - started
        logger.info("compiled and captured", extra={"seconds": round(seconds, 1)})
        return seconds

    @torch.inference_mode()
    def run(self, batch: Tokens[Rows]) -> Output:
        """A pass, what it draws, and the further passes that draws ask for."""
        draws = [rows.draw for rows in batch if rows.draw]
        if not draws or not self._takes(batch):
            return drawing.run(batch, self)
        cuts = any(has_cuts(draw.spec.sampling) for draw in draws)
        if draws[0].spec.uses_distributions:
            return self._run_sparse(batch, cuts)
        ranked = any(draw.branches or draw.alternatives for draw in draws)
        candidates = CANDIDATES if ranked else 1
        logits = torch.empty(0)
        computed = [rows for rows in batch if rows.token_ids]
        if computed:
            logits = self._run_rows(computed)
            count = sum(len(rows.token_ids) for rows in computed)
            self._draw(self.bucket_for(count), cuts, candidates)
        if any(map(loops, draws)):
            return self._loop(batch, logits, cuts, candidates)
        picks = self._buffers.read_picks(len(logits), candidates)
        drawn: list[Drawn | None] = []
        first = 0
        for rows in batch:
            own = picks[first : first + rows.num_logits]
            first += rows.num_logits
            others = [best[1:] for best in own] if candidates > 1 else []
            drawn.append(_chain(rows.draw, [best[0] for best in own], others))
        return Output(logits, drawn)

    def _takes(self, batch: Tokens[Rows]) -> bool:
        """Whether the kernels draw what these ask for."""
        entries = [(rows, rows.draw) for rows in batch if rows.draw]
        if not all(can_draw(draw) for _, draw in entries):
            return False
        sparse = [draw.spec.uses_distributions for _, draw in entries]
        if any(sparse):
            return all(sparse) and self._takes_sparse(batch)
        if not any(loops(draw) for _, draw in entries):
            return True
        going = sum(len(draw.branches) or 1 for _, draw in entries)
        from_last_rows = all(rows.num_logits == 1 or draw.branches for rows, draw in entries)
        return from_last_rows and going <= self._buckets[-1].rows

    def _takes_sparse(self, batch: Tokens[Rows]) -> bool:
        """Whether the draws of a batch, which all leave distributions, are few enough."""
        computed = sum(len(rows.token_ids) for rows in batch)
        going = sum(len(rows.draw.branches) or 1 for rows in batch if rows.draw)
        return self._leaves_distributions and max(computed, going) <= MAX_SPARSE_ROWS

    def can_stream(self, draw: Draw) -> bool:
        picks = not (draw.spec.uses_distributions or draw.branches or draw.alternatives)
        return picks and can_draw(draw)

    @torch.inference_mode()
    def stream(self, batch: Tokens[Rows], stop: Callable[[], bool]) -> Iterator[list[int]]:
        """What each entry draws in each of its `draw.steps` passes; fewer once `stop` says so.

        Every entry has one row of logits. The next pass already runs when the tokens of one are
        handed out: the host has its work done meanwhile.
        """
        going = [row for own in loop_rows(batch, 1) for row in own]
        cuts = any(has_cuts(row.sampling) for row in going)
        steps = min(row.tokens for row in going)
        self._run_rows(batch)
        self._draw(self.bucket_for(sum(len(rows.token_ids) for rows in batch)), cuts)
        bucket = self.bucket_for(len(going))
        loop = self._loops[bucket.rows]
        loop.start(going)
        self._buffers.send(0)
        sent = 1
        for step in range(steps):
            if sent == step + 1 < steps and not stop():
                self._replay(bucket)
                self._draw(bucket, cuts)
                loop.feed()
                self._buffers.send(sent)
                sent += 1
            yield self._buffers.receive(step, len(going))
            if sent == step + 1:
                return

    def _loop(self, batch: Tokens[Rows], logits: Tensor, cuts: bool, candidates: int) -> Output:
        """Feed each pick to a pass of its own until every draw has its steps."""
        rows_of = loop_rows(batch, candidates)
        going = [row for own in rows_of for row in own]
        steps = max(row.tokens for row in going)
        bucket = self.bucket_for(len(going))
        loop, buffers = self._loops[bucket.rows], self._buffers
        ranks = max(rows.draw.alternatives if rows.draw else 0 for rows in batch)
        further = CANDIDATES if ranks else 1
        works_on = ranks > 0 and _only_branches(batch) and steps < MAX_STEPS
        if works_on:  # By one step, while the host has its work with the others.
            going = [row._replace(tokens=row.tokens + 1) for row in going]

        def step() -> None:
            self._replay(bucket)
            self._draw(bucket, cuts, further)
            loop.feed(further)

        loop.start(going, further)
        for _ in range(steps - 1):
            step()
        asked, last = range(steps), range(steps, steps + 1)
        buffers.send_history(asked, others=ranks > 0)
        if works_on:
            step()
            buffers.send_history(last, others=True)

        def after_branches() -> list[Drawn]:
            rows = buffers.read_history(last, len(going), ranks)
            return [Drawn(picks, alternatives=others) for picks, others in rows]

        found = iter(buffers.read_history(asked, len(going), ranks))
        drawn = [
            _drawn(rows.draw, own, list(itertools.islice(found, len(own))))
            for rows, own in zip(batch, rows_of, strict=True)
        ]
        return Output(logits, drawn, after_branches if works_on else None)

    def _run_sparse(self, batch: Tokens[Rows], cuts: bool) -> Output:
        """A pass whose draws leave distributions, and their further passes."""
        logits = self._run_rows(batch)
        bucket = self.bucket_for(sum(len(rows.token_ids) for rows in batch))
        ranked = any(rows.draw.branches for rows in batch if rows.draw)
        self._draw_sparse(bucket, cuts, ranked)
        buffers = self._buffers
        buffers.keep_sparse(0)
        picks = buffers.read_picks(len(logits), 1 + CANDIDATES if ranked else 1)
        given = [each for (each,) in buffers.read_sparse(1, len(logits))]
        own = [Drawn([pick], [kept]) for (pick, *_), kept in zip(picks, given, strict=True)]
        likeliest = [others for _, *others in picks]
        drawn, chains = drawing.start_sparse(batch, own, likeliest, self.block_tokens)
        going = [
            LoopRow(
                chain.draw.spec.sampling,
                chain.blocks,
                -1,
                chain.position,
                chain.left + 1,
                copied,
                chain.drawn.token_ids[-1],
                chain.draw.base_len,
            )
            for chain, copied in chains
        ]
        steps = max((row.tokens for row in going), default=1)
        if steps > 1:
            bucket = self.bucket_for(len(going))
            loop = self._loops[bucket.rows]
            loop.start(going)
            for step in range(steps - 1):
                self._replay(bucket)
                self._draw_sparse(bucket, cuts)
                buffers.keep_sparse(step)
                loop.feed()
            buffers.send_history(range(steps), others=False)
            found = buffers.read_history(range(steps), len(going), 0)
            kept = buffers.read_sparse(steps - 1, len(going))
            for (chain, _), (tokens, _), sparse in zip(chains, found, kept, strict=True):
                chain.drawn.token_ids += tokens[1 : chain.left + 1]
                chain.drawn.distributions += sparse[: chain.left]
        return Output(logits, drawn)

    def _draw_sparse(self, bucket: _Bucket, cuts: bool, ranked: bool = False) -> None:
        """Pick at every row of logits of the pass that has just run, and leave its distribution; if
        `ranked` its CANDIDATES likeliest tokens stand behind each pick."""
        graph = bucket.sparse_graphs.get((cuts, ranked))
        if graph is None:
            self._pick_sparse(bucket, cuts, ranked)
        else:
            graph.replay()

    def _pick_sparse(self, bucket: _Bucket, cuts: bool, ranked: bool) -> None:
        if bucket.logits is None:
            raise RuntimeError("nothing was computed yet")
        inputs = bucket.inputs
        drawn = sample_sparse(
            bucket.logits, inputs.params, inputs.round_starts, cuts=cuts, ranked=ranked
        )
        columns = [drawn.picks[:, None]]
        if drawn.likeliest is not None:
            columns.append(drawn.likeliest)
        self._note(torch.cat(columns, 1))
        self._buffers.sparse[: len(drawn.packed)].copy_(drawn.packed)

    def _draw(self, bucket: _Bucket, cuts: bool, candidates: int = 1) -> None:
        """Pick at every row of logits of the pass that has just run: a token, or CANDIDATES."""
        graph = bucket.draw_graphs.get((cuts, candidates))
        if graph is None:
            self._pick(bucket, cuts, candidates)
        else:
            graph.replay()

    def _pick(self, bucket: _Bucket, cuts: bool, candidates: int) -> None:
        if bucket.logits is None:
            raise RuntimeError("nothing was computed yet")
        self._note(self._pick_among(bucket.logits, bucket.inputs.params, cuts, candidates))

    def _pick_among(
        self,
        logits: Tensor,  # [rows, vocab] float32
        params: Tensor,  # [rows, ROW_WORDS] int32
        cuts: bool,
        candidates: int,
    ) -> Tensor:  # [rows, candidates] int64
        sample = sample_rows if candidates == 1 else sample_candidates
        return sample(logits, params, cuts=cuts).view(len(logits), candidates)

    def _note(self, picks: Tensor) -> None:  # [rows, picks of each] int64
        self._buffers.picks[: picks.numel()].copy_(picks.flatten())

    @torch.inference_mode()
    def forward(self, batch: Tokens[Rows]) -> Tensor:  # [logits rows of all, vocab] float32
        """Run the rows; logits come in the order of `batch`, float32, valid until the next pass."""
        return self._run_rows(batch)

    def _run_rows(self, batch: Tokens[Rows]) -> Tensor:
        total = sum(len(rows.token_ids) for rows in batch)
        if total > self._buckets[-1].rows and len(batch) > 1:  # More branches than rows of a pass.
            halves = batch[: len(batch) // 2], batch[len(batch) // 2 :]
            return torch.cat([self._run_rows(half).clone() for half in halves])
        bucket = self.bucket_for(total)
        wanted = bucket.fill(batch)
        return self._replay(bucket)[:wanted]

    @torch.inference_mode()
    def copy_blocks(self, pairs: Tokens[tuple[int, int]]) -> None:
        """Copy the KV of whole blocks, of all layers: (from, to)."""
        on_device = torch.tensor(pairs, dtype=torch.int32, device=self._device)
        cuda_kernels.copy_blocks(*self._pools, on_device.view(-1, 2))

    def _replay(self, bucket: _Bucket) -> Tensor:
        if bucket.graph is None:
            bucket.logits = self._pass(bucket)
        else:
            bucket.graph.replay()
        if bucket.logits is None:
            raise RuntimeError("a graph without its logits")
        return bucket.logits

    def bucket_for(self, rows: int) -> _Bucket:
        """The smallest bucket that takes so many rows."""
        return next(bucket for bucket in self._buckets if bucket.rows >= rows)

    def _pass(self, bucket: _Bucket) -> Tensor:
        output = self.model(
            input_ids=bucket.inputs.token_ids[None],
            position_ids=bucket.inputs.positions[None],
            use_cache=False,
            logits_to_keep=bucket.inputs.wanted,
            row_layout=bucket.layout,
        )
        logits: Tensor = output.logits[0].float()
        return logits

    @torch.inference_mode()
    def _capture(self, bucket: _Bucket) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._pass(bucket)
        torch.cuda.current_stream().wait_stream(stream)
        bucket.graph = torch.cuda.CUDAGraph()
        with self._capturing(bucket.graph):
            bucket.logits = self._pass(bucket)
        for cuts, candidates in itertools.product((False, True), (1, CANDIDATES)):
            self._pick(bucket, cuts, candidates)  # Compiles what a capture cannot.
            torch.cuda.synchronize()
            graph = bucket.draw_graphs[cuts, candidates] = torch.cuda.CUDAGraph()
            with self._capturing(graph):
                self._pick(bucket, cuts, candidates)
        if self._leaves_distributions and bucket.rows <= MAX_SPARSE_ROWS:
            for cuts, ranked in itertools.product((False, True), repeat=2):
                self._pick_sparse(bucket, cuts, ranked)
                torch.cuda.synchronize()
                graph = bucket.sparse_graphs[cuts, ranked] = torch.cuda.CUDAGraph()
                with self._capturing(graph):
                    self._pick_sparse(bucket, cuts, ranked)
        # A loop of one token, for its kernels to be compiled: it copies a block onto itself.
        for candidates in (1, CANDIDATES):
            only = LoopRow(SamplingParams(), [0], 0, 1, 1, copied=(0, 0))
            self._loops[bucket.rows].start([only], candidates)

    def _capturing(self, graph: torch.cuda.CUDAGraph) -> torch.cuda.graph:
        return torch.cuda.graph(graph, pool=self._memory, capture_error_mode=self._capture_mode)

    def _layers(self) -> list[nn.Module]:
        """The decoder layers: modules that hold an attention module."""
        return [
            module
            for module in self.model.modules()
            if any(hasattr(child, "layer_idx") for child in module.children())
        ]

    def _attach_pool(self, shape: KvShape, num_blocks: int) -> None:
        size = (shape.layers, num_blocks * self.block_tokens, shape.kv_heads, shape.head_dim)
        keys = torch.zeros(size, dtype=shape.dtype, device=self._device)
        values = torch.zeros(size, dtype=shape.dtype, device=self._device)
        in_blocks = (shape.layers, num_blocks, self.block_tokens, *size[2:])
        self._pools = keys.view(in_blocks), values.view(in_blocks)
        self.block_copies = DeviceCopies(*self._pools, "keys and values by token, then head")
        for module in self.model.modules():
            layer = getattr(module, "layer_idx", None)
            if layer is not None:
                module.register_buffer("kv_keys", keys[layer], persistent=False)
                module.register_buffer("kv_values", values[layer], persistent=False)


def _chain(draw: Draw | None, picks: list[int], others: list[list[int]]) -> Drawn | None:
    """Picks, and of those that came next as many as were asked for."""
    if draw is None:
        return None
    asked = [best[: draw.alternatives] for best in others] if draw.alternatives else []
    return Drawn(picks, alternatives=asked)


def _only_branches(batch: Tokens[Rows]) -> bool:
    """Whether these are the branches of one entry."""
    return len(batch) == 1 and batch[0].draw is not None and bool(batch[0].draw.branches)


def _drawn(
    draw: Draw | None, rows: list[LoopRow], chains: list[tuple[list[int], list[list[int]]]]
) -> Drawn | None:
    """What an entry drew: the tokens of its branches, or of its only chain."""
    made = [
        _chain(draw, picks[: row.tokens], others[: row.tokens])
        for row, (picks, others) in zip(rows, chains, strict=True)
    ]
    if draw and draw.branches:
        for branch in made:
            if branch:
                del branch.alternatives[:1]  # Its own token was not drawn.
        return Drawn(branches=[branch for branch in made if branch])
    return made[0] if made else None
