"""Verification by distributions on a CUDA device, from captured graphs.

The log probs of a pass's rows are made behind it without the host. When it is over, the chains go
to the device in one copy, a second graph decides about them, and ids come back.
"""

from collections.abc import Callable
from collections.abc import Sequence as Tokens

import numpy as np
import torch
from torch import Tensor

from outrider.engine.cuda_inputs import Inputs
from outrider.engine.deciding import EagerDecider, Verified
from outrider.engine.drawing import bans, has_cuts
from outrider.sampling import BlockOutcome, Chain
from outrider.sampling.cuda_block import KEY_WORDS, DeviceChains, decide_chains
from outrider.sampling.cuda_sampler import ROW_WORDS, fill_rows, processed_rows
from outrider.types import MAX_SPARSE_ENTRIES

MAX_DECIDED_ROWS = 128
"""Rows of a pass that it decides about; more are decided by tensor operations."""
_BUCKETS = (4, 16, 64, MAX_DECIDED_ROWS)


class CapturedDecider:
    """A `Decider` (outrider.engine.deciding). Nothing is compiled or allocated after it is made,
    except for what the graphs do not take: tokens that are masked (min_tokens), and more rows."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        size = (MAX_DECIDED_ROWS, vocab_size)
        self._device = device
        self._logits = torch.zeros(size, dtype=torch.float32, device=device)
        self._log_probs = torch.zeros(size, dtype=torch.float32, device=device)
        self._buckets = [_Bucket(rows, device) for rows in _BUCKETS]
        self._eager = EagerDecider()
        self._bucket: _Bucket | None = None
        """That of the rows read last; None: they are the eager one's."""
        memory = torch.cuda.graph_pool_handle()

        def capturing(graph: torch.cuda.CUDAGraph) -> torch.cuda.graph:
            # Threads of NCCL ask the device things while this one captures.
            return torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local")

        with torch.inference_mode():
            for bucket in self._buckets:
                bucket.capture(self._logits, self._log_probs, capturing)

    @torch.inference_mode()
    def read(self, rows: Tokens[Verified]) -> None:
        count = sum(len(each.positions) for each in rows)
        self._bucket = None
        masked = any(bans(each.spec, each.positions[0]) for each in rows)
        if count > MAX_DECIDED_ROWS or masked:
            self._eager.read(rows)
            return
        torch.cat([each.logits for each in rows], out=self._logits[:count])
        self._bucket = next(bucket for bucket in self._buckets if bucket.rows >= count)
        self._bucket.process(rows)
        torch.cuda.current_stream(self._device).synchronize()

    @torch.inference_mode()
    def decide(self, chains: Tokens[Chain]) -> list[BlockOutcome]:
        if self._bucket is None:
            return self._eager.decide(chains)
        return self._bucket.decide(chains)


class _Bucket:
    """The static inputs of up to `rows` rows, and the graphs that read them."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.rows = rows
        self._params = Inputs({"params": rows * ROW_WORDS}, device)
        self._host_params = self._params.host["params"].reshape(rows, ROW_WORDS)
        entries = rows * MAX_SPARSE_ENTRIES
        self._chains = Inputs(
            {
                "first_rows": rows,
                "lengths": rows,
                "bonuses": rows,
                "keys": rows * KEY_WORDS,
                "guesses": rows,
                "ids": entries,
                "weights": entries,
            },
            device,
        )
        self._host = host = self._chains.host
        self._host_keys = host["keys"].reshape(rows, KEY_WORDS)
        self._host_ids = host["ids"].reshape(rows, MAX_SPARSE_ENTRIES)
        self._host_weights = host["weights"].reshape(rows, MAX_SPARSE_ENTRIES)
        host["lengths"][:] = -1
        self._chains.send()
        on_device = self._chains.device
        self._inputs = DeviceChains(
            on_device["first_rows"],
            on_device["lengths"],
            on_device["bonuses"],
            on_device["keys"].view(rows, KEY_WORDS),
            on_device["guesses"],
            on_device["ids"].view(rows, MAX_SPARSE_ENTRIES),
            on_device["weights"].view(rows, MAX_SPARSE_ENTRIES),
        )
        self._found = torch.zeros(rows, 2, dtype=torch.int64).pin_memory()
        self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._process: dict[bool, torch.cuda.CUDAGraph] = {}
        """By whether tokens are cut off."""
        self._decide = torch.cuda.CUDAGraph()

    def capture(
        self,
        logits: Tensor,
        log_probs: Tensor,
        capturing: Callable[[torch.cuda.CUDAGraph], torch.cuda.graph],
    ) -> None:
        """Capture what reads `logits` and writes `log_probs`, both of at least `rows` rows."""
        logits, log_probs = logits[: self.rows], log_probs[: self.rows]
        params = self._params.device["params"].view(self.rows, ROW_WORDS)

        def process(cuts: bool) -> None:
            processed_rows(logits, params, cuts=cuts, out=log_probs)

        def decide() -> Tensor:
            return decide_chains(log_probs, self._inputs)

        for cuts in (False, True):
            process(cuts)  # Compiles what a capture cannot.
            torch.cuda.synchronize()
            graph = self._process[cuts] = torch.cuda.CUDAGraph()
            with capturing(graph):
                process(cuts)
        decide()
        torch.cuda.synchronize()
        with capturing(self._decide):
            self._on_device = decide()

    def process(self, rows: Tokens[Verified]) -> None:
        """Make the log probs of the rows; in the order of the stream."""
        self._params.wait()
        first = 0
        for each in rows:
            fill_rows(self._host_params, first, each.spec.sampling, each.positions)
            first += len(each.positions)
        self._host_params[first:] = 0
        self._params.send()
        self._process[any(has_cuts(each.spec.sampling) for each in rows)].replay()

    def decide(self, chains: Tokens[Chain]) -> list[BlockOutcome]:
        """What becomes of the chains of the rows processed last."""
        self._chains.wait()
        self._fill(chains)
        self._chains.send()
        self._decide.replay()
        count = len(chains)
        self._found[:count].copy_(self._on_device[:count], non_blocking=True)
        self._arrived.record()
        self._arrived.synchronize()
        found = self._found[:count].tolist()
        return [BlockOutcome(accepted, final if final >= 0 else None) for accepted, final in found]

    def _fill(self, chains: Tokens[Chain]) -> None:
        host = self._host
        row = 0
        for number, chain in enumerate(chains):
            start = chain.base_len if chain.round_start is None else chain.round_start
            host["first_rows"][number] = row
            host["lengths"][number] = len(chain.token_ids)
            host["bonuses"][number] = chain.bonus
            self._host_keys[number] = np.array(
                [chain.seed, chain.base_len, start], dtype="<u8"
            ).view("<i4")
            for index, draft in enumerate(chain.draft(), row):
                size = len(draft.ids)
                host["guesses"][index] = chain.token_ids[index - row]
                self._host_ids[index, :size] = draft.ids
                self._host_weights[index, :size] = draft.weights
                self._host_weights[index, size:] = 0
            row += chain.num_rows
        host["lengths"][len(chains) :] = -1
