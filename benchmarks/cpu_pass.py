"""A pass of the demo's models on a CPU, in Python and traced, its attention alone, and what int8
weights would give.

    GOMP_SPINCOUNT=20000 python benchmarks/cpu_pass.py     # as the workers set it

Medians of turns, in ms; the linears in microseconds. Attention is that of a layer of the target, on
one thread.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from outrider.engine.cpu_pass import _Forward, build_pass, inputs_of
from outrider.engine.kv_pool import CpuPool, KvShape
from outrider.engine.loading import load_model
from outrider.engine.rows import Rows
from outrider.engine.surgery import PackedLinear, optimise

CONTEXT = 200
ATTENTION = ((1, 500), (5, 500), (40, 200), (256, 0), (256, 512))
SHAPES = ((576, 3072), (1536, 576), (576, 49152))


@torch.inference_mode()
def main() -> None:
    for tier in ("target", "draft"):
        loaded = load_model("demo", tier=tier, dtype="bfloat16")
        optimise(loaded.model)
        pool = CpuPool(KvShape.of(loaded.config, loaded.dtype), 16, 32)
        python, traced = _Forward(loaded.model, pool), build_pass(loaded.model, pool, 1000)
        for rows in (1, 4, 8):
            inputs = inputs_of([Rows(list(range(rows)), CONTEXT, list(range(16)), rows)], pool)
            slow, fast = medians(partial(python, *inputs), partial(traced, *inputs))
            print(f"{tier}, {rows} rows: Python {slow:.2f}, traced {fast:.2f}", flush=True)
        if tier == "target":
            attention(KvShape.of(loaded.config, loaded.dtype))
    for width, out in SHAPES:
        linear = torch.nn.Linear(width, out, bias=False).to(torch.bfloat16)
        packed = PackedLinear(linear)
        scales = (linear.weight.float().abs().amax(1) / 127).to(torch.bfloat16)
        int8 = (linear.weight / scales[:, None]).round().to(torch.int8)
        for rows in (1, 4):
            x = torch.randn(rows, width).to(torch.bfloat16)
            bf16, q = medians(
                partial(packed, x), partial(torch._weight_int8pack_mm, x, int8, scales)
            )
            print(f"{width} x {out}, {rows} rows: bf16 {bf16 * 1e3:.0f}, int8 {q * 1e3:.0f} us")


def attention(shape: KvShape) -> None:
    """Rows of one sequence behind its context."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pool = CpuPool(replace(shape, layers=1), 64, 32)
    for rows, context in ATTENTION:
        query = torch.randn(rows, 3 * shape.kv_heads, shape.head_dim).to(shape.dtype)
        key, value = (query[:, : shape.kv_heads].contiguous() for _ in range(2))
        inputs = inputs_of([Rows(list(range(rows)), context, list(range(64)), 1)], pool)
        case = partial(
            torch.ops.outrider_cpu.paged_attention,
            query, key, value, pool.keys[0], pool.values[0], *inputs[3:7], 0.125,
        )  # fmt: skip
        (took,) = medians(case)
        print(f"attention, {rows} rows behind {context} tokens: {took:.3f}", flush=True)
    torch.set_num_threads(threads)


def medians(*cases: Callable[[], object], turns: int = 60) -> list[float]:
    took: list[list[float]] = [[] for _ in cases]
    for _ in range(turns):
        for case, times in zip(cases, took, strict=True):
            started = time.perf_counter()
            case()
            times.append((time.perf_counter() - started) * 1e3)
    return [statistics.median(times) for times in took]


if __name__ == "__main__":
    main()
