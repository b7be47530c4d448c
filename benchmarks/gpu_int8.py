"""Int8 weights beside bf16 on a GPU: single linears by rows, then whole passes.

    python benchmarks/gpu_int8.py

The linears of `synthetic:8b` and `synthetic:1b`, fused as the engine fuses them, in microseconds
under a CUDA graph; weights take turns, so that they come from memory and not from the cache. The
error is that of the product with the rounded weights. Passes are in ms, as in gpu_pass.py.
"""

import gc
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from gpu_pass import graph_ms
from torch import Tensor

from outrider.engine.cuda_runner import CudaRunner
from outrider.engine.loading import load_model
from outrider.engine.quantised import (
    SCHEMES,
    HummingLinear,
    _check_cuda,
    _to_int8,
    humming_linear,
    quantise,
    weight_bytes,
)
from outrider.engine.surgery import optimise

SHAPES = (
    *((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (4096, 128256)),
    *((2048, 3072), (2048, 2048), (2048, 16384), (8192, 2048), (2048, 128256)),
)
ROWS = (1, 8, 16, 32, 64, 128, 512)
MODELS = ("synthetic:1b", "synthetic:8b,eps=0.01")
CACHE_BYTES = 50 << 20


@torch.inference_mode()
def main() -> None:
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    _check_cuda(torch.bfloat16)
    for in_features, out_features in SHAPES:
        compare_linears(in_features, out_features)
        torch.cuda.empty_cache()
    for reference in MODELS:
        for scheme in SCHEMES:
            time_passes(reference, scheme)
            gc.collect()
            torch.cuda.empty_cache()


def compare_linears(in_features: int, out_features: int) -> None:
    weight = torch.empty(out_features, in_features, device="cuda").normal_(0, 0.02)
    rounded, scales = _to_int8(weight.bfloat16())
    linear = HummingLinear(rounded, scales, None)
    full, small = copies(weight.bfloat16()), copies(linear.weight)
    print(f"{in_features} x {out_features}", flush=True)
    for count in ROWS:
        rows = torch.randn(count, in_features, device="cuda").bfloat16()

        def multiply(weight: Tensor, rows: Tensor = rows) -> Tensor:
            product: Tensor = humming_linear(
                rows, weight, linear.scales, out_features, linear.config, linear.tunings
            )
            return product

        found = multiply(linear.weight)
        again = torch.cat([rows[:1], torch.randn_like(rows[1:])])
        alone = torch.equal(multiply(linear.weight, again)[0], found[0])
        bf16 = microseconds([partial(F.linear, rows, w) for w in full])
        int8 = microseconds([partial(multiply, w) for w in small])
        print(
            f"  {count} rows: bf16 {bf16:.1f}, int8 {int8:.1f}, error "
            f"{error(found, rows, rounded, scales):.4f}, row 0 alike among others: {alone}",
            flush=True,
        )


def time_passes(reference: str, scheme: str) -> None:
    loaded = load_model(reference, tier="target", dtype="bfloat16", device="cuda")
    optimise(loaded.model, pack=False)
    started = time.perf_counter()
    loaded = quantise(loaded, scheme)
    took = time.perf_counter() - started
    runner = CudaRunner(loaded, num_blocks=512, max_rows=64, max_context=2048)
    print(
        f"{reference}, {scheme}: {weight_bytes(loaded.model) / 1e9:.2f} GB, quantised in "
        f"{took:.1f} s, compiled and captured in {runner.warm_up():.1f} s",
        flush=True,
    )
    for rows in (1, 2, 4, 8, 16, 32, 64):
        print(f"  {rows} rows: {graph_ms(runner, rows):.2f}", flush=True)


def copies(weight: Tensor) -> list[Tensor]:
    """Together more than the cache holds, three times over."""
    size = weight.numel() * weight.element_size()
    count = max(1, min(40, -(-3 * CACHE_BYTES // size)))
    return [weight, *(weight.clone() for _ in range(count - 1))]


def microseconds(calls: list[Callable[[], Tensor]]) -> float:
    """Of one call, when all are replayed in a graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    took = []
    for _ in range(7):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        graph.replay()
        after.record()
        after.synchronize()
        took.append(before.elapsed_time(after) * 1e3 / len(calls))
    return statistics.median(took)


def error(found: Tensor, rows: Tensor, rounded: Tensor, scales: Tensor) -> float:
    pieces = zip(rounded.split(8192), scales.split(8192), strict=True)
    exact = torch.cat([(rows.float() @ q.float().t()) * s.float() for q, s in pieces], 1)
    return float((found.float() - exact).norm() / exact.norm())


if __name__ == "__main__":
    main()
