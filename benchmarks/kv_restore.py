"""Bringing KV back from a store on this machine, beside computing it again.

    GOMP_SPINCOUNT=20000 python benchmarks/kv_restore.py          # as the workers set it
    python benchmarks/kv_restore.py --tokens 1024 --cases demo --writing

Cases are the demo's target and two stacks of a 7B model's layers: of the shape of Mistral-7B (8 KV
heads, 128 KiB a token) and of Llama-2-7B (32 KV heads, 512 KiB a token).

* Computing: passes of 512 rows, of a long prompt 8 of them at even distances (`~`). Of the 7B
  stacks `--layers` layers are measured and their time is multiplied to 32; embeddings and head are
  left out.
* Bringing back: the real thing, nothing scaled by layers: `BlockReader` fetches, checks and hands
  over, and the blocks of all layers are copied into a pool. Beyond `--store-mib` of blocks the time
  for so many is multiplied (`~`).

"auto" is what a worker would choose by what it measures at start.
"""

import argparse
import contextlib
import statistics
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from outrider.cli.store import free_port, store_command, store_program
from outrider.engine import synthetic
from outrider.engine.block_copies import HostCopies
from outrider.engine.kv_pool import CpuPool, KvShape
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.loading import load_model
from outrider.engine.model_runner import ModelRunner
from outrider.engine.prefill_cost import measure_prefill
from outrider.engine.rows import Rows
from outrider.engine.surgery import optimise
from outrider.kv_store.blocks import BlockCodec, Bytes, blocks_of
from outrider.kv_store.connection import StoreAddress
from outrider.kv_store.estimate import Estimate, PrefillCost
from outrider.kv_store.health import Counts, Health
from outrider.kv_store.index import IndexWriter
from outrider.kv_store.reader import BlockReader, Fetch
from outrider.kv_store.writer import BlockWriter, Offer, Source
from outrider.token_log import TokenLog
from outrider.worker.kv_opening import layout_of

BLOCK_TOKENS = 32
CHUNK = 512
SAMPLES = 8
POOL_BLOCKS = 32
LAYERS = 32
SHAPES = {
    "7b": synthetic.Shape(4096, 14336, LAYERS, 32, 8, 128, 512, 2),
    "7b-mha": synthetic.Shape(4096, 11008, LAYERS, 32, 32, 128, 512, 2),
}


@dataclass(frozen=True)
class Case:
    """A model to compute with, whose time is multiplied by `factor`, and the whole one's KV."""

    name: str
    loaded: LoadedModel
    factor: float
    shape: KvShape


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads or torch.get_num_threads())
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, bf16", flush=True)
    with store(args.url) as url:
        for name in args.cases.split(","):
            case = demo() if name == "demo" else stack(name, args.layers)
            compare(case, StoreAddress(url, timeout_s=30.0), args)


def demo() -> Case:
    loaded = load_model("demo", tier="target", dtype="bfloat16", device="cpu")
    optimise(loaded.model)
    return Case("SmolLM2-135M", loaded, 1.0, KvShape.of(loaded.config, loaded.dtype))


def stack(name: str, layers: int) -> Case:
    synthetic.SHAPES[name] = replace(SHAPES[name], layers=layers)
    loaded = load_model(f"synthetic:{name}", tier="target", dtype="bfloat16", device="cpu")
    optimise(loaded.model)
    shape = replace(KvShape.of(loaded.config, loaded.dtype), layers=LAYERS)
    return Case(f"{name}, {layers} of {LAYERS} layers", loaded, LAYERS / layers, shape)


def compare(case: Case, address: StoreAddress, args: argparse.Namespace) -> None:
    lengths = [int(text) for text in args.tokens.split(",")]
    blocks = max(lengths) // BLOCK_TOKENS
    runner = ModelRunner(case.loaded, num_blocks=blocks, block_tokens=BLOCK_TOKENS)
    token_s, context_s = measure_prefill(
        runner, num_blocks=blocks, max_rows=CHUNK, context_length=max(lengths)
    )
    pool = CpuPool(case.shape, POOL_BLOCKS, BLOCK_TOKENS)
    prefill = PrefillCost(case.factor * token_s, case.factor * context_s)
    restoring = Restoring(case, pool.copies, address, prefill)
    kib = case.shape.token_bytes / 1024
    print(f"\n{case.name}: {kib:.0f} KiB of KV a token, {restoring.describe()}")
    print("| tokens | computed | brought back | MiB/s | computed : brought back | auto |")
    print("|---|---|---|---|---|---|", flush=True)
    for tokens in lengths:
        computed_s, sampled = compute(runner, tokens)
        computed_s *= case.factor
        restored_s, scaled = restoring.restore(tokens, args.store_mib << 20)
        rate = tokens * case.shape.token_bytes / restored_s / (1 << 20)
        auto = "brings back" if restoring.estimate.pays(0, tokens) else "computes"
        print(
            f"| {tokens} | {sampled}{computed_s:.2f} s | {scaled}{restored_s:.2f} s | {rate:.0f} | "
            f"{computed_s / restored_s:.1f} | {auto} |",
            flush=True,
        )
    if args.writing:
        writing(runner, restoring)
    restoring.close()


def compute(runner: ModelRunner, tokens: int) -> tuple[float, str]:
    """Seconds to compute KV of so many tokens, and "~" where not all of it was run."""
    starts = list(range(0, tokens, CHUNK))
    chosen = starts[:: max(len(starts) // SAMPLES, 1)]
    blocks = list(range(tokens // BLOCK_TOKENS))
    took = []
    for start in chosen:
        rows = min(CHUNK, tokens - start)
        began = time.perf_counter()
        runner.run([Rows([7] * rows, start, blocks, 1)])
        took.append(time.perf_counter() - began)
    return statistics.mean(took) * len(starts), "~" if len(chosen) < len(starts) else ""


class Restoring:
    """Blocks of a case's whole model, written into a store and brought back from it."""

    def __init__(
        self, case: Case, copies: HostCopies, address: StoreAddress, prefill: PrefillCost
    ) -> None:
        layout = layout_of(case.loaded, copies, BLOCK_TOKENS)
        self.layout = replace(layout, layers=case.shape.layers)
        self.codec = BlockCodec(self.layout)
        self.copies = copies
        self.estimate = Estimate(prefill, copies.block_bytes, BLOCK_TOKENS)
        self.counts = Counts(Counter())
        self.health = Health(address, self.counts)
        self.client = address.connect()
        self.writer = BlockWriter(
            self.client,
            self.codec,
            IndexWriter(self.client, 1, model_fingerprint="benchmark", adapter="", ttl_s=600.0),
            read=self._read,
            health=self.health,
            counts=self.counts,
            ttl_s=600.0,
            bytes_per_s=float(1 << 40),
        )
        self.reader = BlockReader(
            address.connect(),
            self.codec,
            estimate=self.estimate,
            health=self.health,
            counts=self.counts,
        )
        self.writer.start()
        self.reader.start()

    def describe(self) -> str:
        fetch = self.estimate.fetch
        assert fetch is not None
        mib_per_s = 1 / fetch.byte_s / (1 << 20)
        tokens_per_s = 1024 / self.estimate.recompute_s(0, 1024)
        return f"measured at start: {mib_per_s:.0f} MiB/s, {tokens_per_s:.0f} tokens/s"

    def restore(self, tokens: int, most_bytes: int) -> tuple[float, str]:
        """Seconds to bring so many tokens' blocks back, and "~" where not all of it was done."""
        blocks = tokens // BLOCK_TOKENS
        there = min(blocks, max(most_bytes // self.codec.value_bytes, 2))
        log = TokenLog([tokens % 32000] * (there * BLOCK_TOKENS))
        hashes = log.block_hashes(BLOCK_TOKENS)
        for block in blocks_of("", log.tokens, hashes, BLOCK_TOKENS):
            value = self.codec.encode(block, lambda into: self.copies.read(0, into))
            self.client.set(self.codec.key("", block), value, px=600_000)
        took = statistics.median(self._fetch(log) for _ in range(3))
        self.client.flushdb()
        return took * blocks / there, "~" if there < blocks else ""

    def _fetch(self, log: TokenLog) -> float:
        """What the worker's thread does with pieces, it does here on the reader's."""
        done, arrived = threading.Event(), 0

        def take(index: int, blocks: list[Bytes]) -> None:
            nonlocal arrived
            for place, block in enumerate(blocks, index):
                self.copies.write(place % POOL_BLOCKS, self.copies.stage(block))
            arrived += len(blocks)
            self.reader.taken()

        hashes = log.block_hashes(BLOCK_TOKENS)
        until = time.monotonic() + 600
        began = time.perf_counter()
        self.reader.submit(Fetch("", log.tokens, hashes, 0, until, take, done.set))
        done.wait()
        if arrived != len(hashes):
            raise SystemExit(f"only {arrived} of {len(hashes)} blocks came back")
        return time.perf_counter() - began

    def write_until(self, stop: threading.Event) -> None:
        """Keep the writer busy, at the rate that a worker keeps to by default."""
        number = 0
        while not stop.wait(8 * self.codec.value_bytes / (64 << 20)):
            number += 1
            log = TokenLog([number % 32000] * (8 * BLOCK_TOKENS))
            hashes = log.block_hashes(BLOCK_TOKENS)
            self.writer.offer(Source(), Offer("", log.tokens, hashes, 0, [(0, 0)] * 8))

    def close(self) -> None:
        self.writer.close(0.0)
        self.reader.close()

    def _read(self, place: tuple[int, int], into: Bytes) -> bool:
        self.copies.read(place[0], into)
        return True


def writing(runner: ModelRunner, restoring: Restoring) -> None:
    """A pass of one row, with and without blocks being written behind, in turns."""
    row = [Rows([7], 200, list(range(8)), 1)]

    def median_ms() -> float:
        took = []
        for _ in range(100):
            began = time.perf_counter()
            runner.run(row)
            took.append((time.perf_counter() - began) * 1e3)
        return statistics.median(took)

    still, busy = [], []
    for _ in range(5):
        still.append(median_ms())
        stop, before = threading.Event(), restoring.counts["kv_bytes_written"]
        thread = threading.Thread(target=restoring.write_until, args=(stop,))
        thread.start()
        began = time.perf_counter()
        busy.append(median_ms())
        seconds = time.perf_counter() - began
        mib = (restoring.counts["kv_bytes_written"] - before) / (1 << 20)
        stop.set()
        thread.join()
        print(
            f"{busy[-1]:.2f} ms a pass of one row while {mib / seconds:.0f} MiB/s are written, "
            f"{still[-1]:.2f} without",
            flush=True,
        )
        restoring.client.flushdb()


@contextlib.contextmanager
def store(url: str) -> Iterator[str]:
    """The store of `url`, or one of this benchmark's own."""
    if url:
        yield url
        return
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        command = store_command((store_program(),), port, Path(folder), persist=False)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        time.sleep(0.5)
        try:
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.kill()
            process.wait()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="demo,7b,7b-mha")
    parser.add_argument("--tokens", default="1024,4096,16384")
    parser.add_argument("--layers", type=int, default=2, help="of a 7B stack to compute with")
    parser.add_argument("--store-mib", type=int, default=512, help="of blocks to bring back")
    parser.add_argument("--url", default="", help="another store, which is emptied")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--writing", action="store_true", help="what writing costs a pass")
    return parser.parse_args()


if __name__ == "__main__":
    main()
