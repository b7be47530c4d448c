"""Time to the first token of a long prompt: a target over gRPC, and `transformers` by itself.

    python benchmarks/gpu_prompt.py synthetic:8b,eps=0.01 --tokens 4096

Each prompt is random token ids of its own: no prefix is shared. `transformers` runs the same
weights in one pass with its `sdpa` attention, in this process, the card being free again.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable

import torch

from outrider.cli.stack import LocalStack, StackConfig
from outrider.client import GenerationOptions, OutriderClient
from outrider.engine.loading import load_model

VOCABULARY = 128_256


def main() -> None:
    args = parse()
    asyncio.run(over_grpc(args))
    alone(args)


async def over_grpc(args: argparse.Namespace) -> None:
    context = str(args.tokens + 64)
    config = StackConfig(
        target=args.model,
        num_drafts=0,
        dtype="auto",
        start_timeout_s=400,
        env={
            "OUTRIDER_TARGET_DEVICE": "cuda:0",
            "OUTRIDER_TARGET_CONTEXT_LENGTH": context,
            "OUTRIDER_TARGET_KV_MEMORY": "8GiB",
            "OUTRIDER_TARGET_MAX_ROWS": str(args.rows),
        },
    )
    async with LocalStack(config) as stack:
        client = await OutriderClient.connect(address=stack.address)
        took = []
        for number in range(args.repeats + 1):
            done = await client.complete(
                prompt(number, args.tokens), GenerationOptions(max_tokens=1, ignore_eos=True)
            )
            took.append(done.ttft_s or 0.0)
        report(f"over gRPC, {args.rows} rows a pass", took)
        await client.close()


@torch.inference_mode()
def alone(args: argparse.Namespace) -> None:
    model = load_model(args.model, tier="target", dtype="bfloat16", device="cuda").model
    model.set_attn_implementation("sdpa")
    forward: Callable[..., object] = model.forward
    took = []
    for number in range(args.repeats + 1):
        ids = torch.tensor([prompt(number, args.tokens)], device="cuda")
        torch.cuda.synchronize()
        started = time.perf_counter()
        output = forward(input_ids=ids, use_cache=True, logits_to_keep=1)
        int(output.logits[0, -1].argmax())  # type: ignore[attr-defined]
        took.append(time.perf_counter() - started)
    report("transformers, one pass", took)


def prompt(number: int, tokens: int) -> list[int]:
    return random.Random(number).choices(range(VOCABULARY), k=tokens)


def report(name: str, took: list[float]) -> None:
    """The first of them warms up."""
    ms = [seconds * 1e3 for seconds in took[1:]]
    print(f"{name}: {statistics.median(ms):.0f} ms ({min(ms):.0f} to {max(ms):.0f})", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
