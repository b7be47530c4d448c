"""What a round takes beside the devices: the whole stack, with devices that are made up.

    python benchmarks/host_time.py --batches 8,32          # rounds, and CPU time of each process
    python benchmarks/host_time.py --batches 32 --k 0,auto --repeats 5

Draft and target are the real services in processes of their own, over gRPC, behind an orchestrator
and a store, and so is all that happens between two passes. Only their runners are made up: a pass
sleeps for as long as a card would compute (by default about as long as one H100 takes for the
synthetic pair), and its tokens are numbers that follow each other, of which the draft knows four in
five. What a round takes beyond the two sleeps is the host's.

On a machine with fewer cores than the five processes want it is an upper bound; before and after of
a change are to be compared in turn on the same machine (each in the folder of its checkout, with
`PYTHONPATH=$PWD`).
"""

import argparse
import asyncio
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Tokens
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.cli.stack import PROGRAMS, LocalStack, StackConfig
from outrider.client import Completion, GenerationOptions, OutriderClient
from outrider.engine.rows import Draw, Drawn, Output, Rows
from outrider.polling import poll_directly

PROMPT_TOKENS = 64
VOCABULARY = 512


class MadeUpDevice:
    """A runner that sleeps instead of computing, as `CudaRunner` waits for its card."""

    block_tokens = 32
    max_stream = 64

    def __init__(self, pass_s: float, row_s: float, step_s: float, knows: float) -> None:
        """A pass takes so long, and so much longer for each of its rows; what it draws after the
        first token takes `step_s` each. `knows`: how many of the numbers it gets right."""
        self._pass_s, self._row_s, self._step_s = pass_s, row_s, step_s
        self._knows = knows
        self._logits = torch.zeros(1024, 1)

    def run(self, batch: list[Rows]) -> Output:
        self._compute(batch)
        drawn: list[Drawn | None] = [self._drawn(rows) if rows.draw else None for rows in batch]
        return Output(self._logits[: sum(rows.num_logits for rows in batch)], drawn)

    def can_stream(self, draw: Draw) -> bool:
        return True

    def stream(self, batch: list[Rows], stop: Callable[[], bool]) -> Iterator[list[int]]:
        # As on a card: the next pass runs while the host looks at the tokens of the last one.
        steps = batch[0].draw.steps if batch[0].draw else 1
        pass_s = self._pass_s + self._row_s * len(batch)
        last = [rows.token_ids[-1] for rows in batch]
        places = [rows.stop for rows in batch]
        ends = time.monotonic() + pass_s
        for step in range(steps):
            time.sleep(max(ends - time.monotonic(), 0.0))
            goes_on = step + 1 < steps and not stop()
            ends = time.monotonic() + pass_s
            last = [self._next(token, place) for token, place in zip(last, places, strict=True)]
            places = [place + 1 for place in places]
            yield last
            if not goes_on:
                return

    def forward(self, batch: Tokens[Rows]) -> Tensor:
        raise NotImplementedError

    def _compute(self, batch: list[Rows]) -> None:
        rows = sum(len(rows.token_ids) for rows in batch)
        steps = max((rows.draw.steps for rows in batch if rows.draw), default=1)
        time.sleep(self._pass_s + self._row_s * rows + self._step_s * (steps - 1))

    def _drawn(self, rows: Rows) -> Drawn:
        draw = rows.draw
        assert draw is not None
        own = rows.token_ids[len(rows.token_ids) - rows.num_logits :]
        first = rows.stop - rows.num_logits + 1
        tokens = [self._next(token, first + i) for i, token in enumerate(own)]
        for step in range(1, draw.steps):
            tokens.append(self._next(tokens[-1], first + rows.num_logits - 1 + step))
        return Drawn(tokens)

    def _next(self, token: int, place: int) -> int:
        known = hash((token, place, "known")) % 1000 < 1000 * self._knows
        return (token + 1 + (not known)) % VOCABULARY


def serve(role: str) -> None:
    """Be one of the two services, with a made-up device."""
    import importlib

    from outrider.worker import service

    pass_ms, row_ms, step_ms, knows = map(float, os.environ["HOST_TIME_" + role.upper()].split())
    device = MadeUpDevice(pass_ms / 1e3, row_ms / 1e3, step_ms / 1e3, knows)
    make: Any = lambda *_, **__: device  # noqa: E731
    service._make_runner = make
    importlib.import_module(f"services.{role}.service").main()


async def main() -> None:
    args = parse()
    programs = dict(PROGRAMS) | {
        role: (sys.executable, __file__, "--serve", role) for role in ("target", "draft")
    }
    config = StackConfig(
        target="synthetic:tiny,eps=0.01",
        draft="synthetic:tiny-draft",
        dtype="float32",
        env={
            "PYTHONHASHSEED": "0",
            "OUTRIDER_TARGET_MORE_ROUNDS": "on",  # As on a card.
            "HOST_TIME_TARGET": f"{args.target_ms} {args.row_us / 1e3} 0 1",
            "HOST_TIME_DRAFT": f"{args.draft_ms} 0 {args.step_ms} {args.knows}",
        },
    )
    poll_directly()  # The services themselves say so before they import gRPC.
    async with LocalStack(config, programs=programs) as stack:
        client = await OutriderClient.connect(address=stack.addresses[0])
        pids = {service.name: service.pid for service in stack.services}
        async with client:
            for batch in args.batches:
                for _ in range(args.repeats):
                    for k in args.k:
                        await measure(client, pids, batch, k, args)


async def measure(
    client: OutriderClient,
    pids: dict[str, int],
    batch: int,
    k: int | None,
    args: argparse.Namespace,
) -> None:
    """One run of so many callers."""
    before, started = cpu_of(pids), time.monotonic()
    options = GenerationOptions(
        max_tokens=args.max_tokens, temperature=0.0, ignore_eos=True, num_speculative_tokens=k
    )
    drawn = random.Random(batch)
    prompts = [[drawn.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]
    done: list[Completion] = await asyncio.gather(
        *(client.complete(prompt, options) for prompt in prompts)
    )
    seconds, after = time.monotonic() - started, cpu_of(pids)
    rounds = [completion.usage.speculation.rounds for completion in done]
    tokens = sum(completion.usage.completion_tokens for completion in done)
    guesses = sum(completion.usage.speculation.proposed for completion in done)
    round_ms = 1e3 * seconds / statistics.mean(rounds)
    device_ms = args.target_ms + args.row_us * batch * (1 + (k or 0)) / 1e3
    device_ms += args.draft_ms + args.step_ms * (k - 1) if k else 0
    beside = "" if k is None else f", beside the devices {round_ms - device_ms:.2f}"
    threads = {
        name: 1e6 * (after[name] - before[name]) / sum(rounds)
        for name in after
        if (after[name] - before[name]) / seconds > 0.01
    }
    print(
        f"batch {batch} k={'auto' if k is None else k}: {tokens / seconds:.0f} tok/s, "
        f"{guesses / sum(rounds):.2f} guesses a round, round {round_ms:.2f} ms{beside}; "
        f"us of CPU a round and session: "
        + ", ".join(f"{name} {us:.0f}" for name, us in sorted(threads.items())),
        flush=True,
    )


def cpu_of(pids: dict[str, int]) -> Counter[str]:
    """Seconds of CPU of each process and its threads so far."""
    found: Counter[str] = Counter()
    tick = os.sysconf("SC_CLK_TCK")
    for name, pid in {**pids, "client": os.getpid()}.items():
        for task in Path(f"/proc/{pid}/task").iterdir():
            try:
                head, _, rest = (task / "stat").read_text().partition(") ")
            except OSError:
                continue
            fields = rest.split()
            thread = head.partition("(")[2]
            found[f"{name}/{thread}"] += (int(fields[11]) + int(fields[12])) / tick
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", default="8,32", type=numbers)
    parser.add_argument("--k", default="0,4", type=lengths, help="guesses a round, or auto")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--target-ms", type=float, default=6.8, help="a pass of the target")
    parser.add_argument("--row-us", type=float, default=8.0, help="each row of it")
    parser.add_argument("--draft-ms", type=float, default=2.8, help="the draft's first guess")
    parser.add_argument("--step-ms", type=float, default=1.4, help="each further one")
    parser.add_argument("--knows", type=float, default=0.8, help="of the draft, a guess")
    return parser.parse_args()


def lengths(text: str) -> list[int | None]:
    return [None if part == "auto" else int(part) for part in text.split(",")]


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        role = sys.argv[2]
        sys.argv[1:3] = []
        serve(role)
    else:
        asyncio.run(main())
