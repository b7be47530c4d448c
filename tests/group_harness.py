"""A group of two ranks: rank 0 in the test's process, rank 1 one of its own."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.engine.group_runner import Leader
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.steps import Kind
from outrider.worker.crew import Crew
from outrider.worker.ranks import device_of, layout_of, settings_of
from outrider.worker.service import WorkerConfig, load, make_shard
from outrider.worker.worker import WorkerLimits


@dataclass
class Pair:
    """What rank 0 has, and which steps it has told."""

    runner: Leader
    loaded: LoadedModel
    limits: WorkerLimits
    told: Counter[Kind]
    crew: Crew


@contextlib.contextmanager
def group_of_two(model: Path | str, **settings) -> Iterator[Pair]:
    """`settings` are those of a worker; by default a small one on a CPU, in float32."""
    small = {"dtype": "float32", "device": "cpu", "threads": 1, "kv_memory": "3MiB"}
    config = WorkerConfig(
        model=str(model),
        log_level="warning",
        tensor_parallel=2,
        **({"group_start_s": 60.0} | small | settings),
    )
    loop = asyncio.new_event_loop()

    async def make() -> Crew:
        return Crew(config, layout_of(config, {}))

    crew = loop.run_until_complete(make())
    crew.start(settings_of(config, WorkerConfig), "target")
    try:
        device = device_of(config.device, 0, 2)
        group = crew.meet(torch.device(device))
        loaded, limits = load(config, "target", device, group)
        runner = crew.lead(make_shard(loaded, limits, group))
        crew.arm()
        yield Pair(runner, loaded, limits, _count_steps(runner), crew)
        crew.end_now()
    finally:
        crew.kill()
        loop.close()


def _count_steps(runner: Leader) -> Counter[Kind]:
    told: Counter[Kind] = Counter()
    tell = runner._teller.tell

    def counted(kind: Kind, *args, **kwargs) -> None:
        told[kind] += 1
        tell(kind, *args, **kwargs)

    runner._teller.tell = counted
    return told
