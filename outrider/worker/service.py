"""The process of a worker: load the model, warm up, serve the worker protocol, drain."""

import asyncio
import hashlib
import logging
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from outrider.config import setting
from outrider.engine import cpu_kernels
from outrider.engine.engine import Runner
from outrider.engine.group import Group
from outrider.engine.group_runner import Shard
from outrider.engine.kv_pool import KvShape
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.loading import load_model
from outrider.engine.model_runner import ModelRunner
from outrider.engine.quantised import SCHEMES, quantise
from outrider.engine.rows import Rows
from outrider.engine.shard_runner import ShardRunner
from outrider.engine.surgery import optimise
from outrider.errors import InvalidArgument
from outrider.rpc.server import Server, ServerConfig
from outrider.telemetry.catalog import DRAFT
from outrider.telemetry.service import Telemetry
from outrider.types import MAX_PROPOSAL_TOKENS, new_nonce
from outrider.worker.crew import Crew
from outrider.worker.gathering import DEFAULT_MAX_PASSES
from outrider.worker.kv_opening import KvStoreConfig, open_store
from outrider.worker.metrics import watch_kv_store, watch_worker
from outrider.worker.ranks import (
    GroupConfig,
    Layout,
    device_of,
    layout_of,
    settings_of,
    threads_of,
)
from outrider.worker.servicer import WorkerServicer
from outrider.worker.traces import WorkTraces
from outrider.worker.worker import Tier, Worker, WorkerLimits

logger = logging.getLogger(__name__)

_BLOCK_TOKENS = 32


@dataclass(frozen=True)
class WorkerConfig(KvStoreConfig, GroupConfig, ServerConfig):
    """What both tiers can be told."""

    model: str = setting("demo", help="hub id, folder, .gguf file, or demo")
    model_name: str = setting("", help="name that requests use; default: from the reference")
    dtype: str = setting(
        "auto",
        help="weights and arithmetic; auto is bfloat16 where the processor has it",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantize: str = setting(
        "none",
        help="weights of this tier: none is as dtype says; int8 is half of bfloat16's bytes, on "
        "CUDA with the extra `quantised`",
        choices=SCHEMES,
    )
    device: str = setting("auto", help="auto, cpu, cuda or cuda:N")
    threads: int = setting(0, help="CPU threads of one pass; 0: all cores")
    kv_memory: str = setting(
        "1GiB",
        help="memory for KV, for example 512MiB or 20GiB; on each rank of a group, which then "
        "holds as many times as many tokens",
    )
    context_length: int = setting(0, help="longest session in tokens; 0: what the model allows")
    max_rows: int = setting(512, help="rows of one pass; long prompts are cut into chunks")
    max_sessions: int = setting(4096, help="sessions known at once")
    session_idle_s: float = setting(3600.0, help="seconds after which an unused session is closed")
    gather_passes: float = setting(
        DEFAULT_MAX_PASSES,
        help="longest wait for sessions that are about to return, in passes; at least 4 for those "
        "whose draft is on the target's device",
    )
    cache_dir: str = setting("", help="folder for converted weights; default: ~/.cache/outrider")


async def serve_worker(
    config: WorkerConfig,
    *,
    tier_name: str,
    service_name: str,
    make_tier: Callable[[LoadedModel, int], Tier],
    add_servicer: Callable[[Server, WorkerServicer], None],
    make_servicer: Callable[..., WorkerServicer],
    capabilities: Callable[[LoadedModel], tuple[str, ...]],
    telemetry: Telemetry,
) -> None:
    """Serve until stopped. `make_tier` gets the model and the context length.

    As a rank of a group other than rank 0 it serves nobody, and ends with rank 0. Raises
    Unavailable when the group has lost a rank.
    """
    crew = Crew(config, layout_of(config, os.environ))
    crew.start(settings_of(config, WorkerConfig), tier_name)
    if not crew.leads:
        await crew.supervise()
        return
    server = Server(config, [service_name])
    # Everything of torch happens on one thread. Each thread that runs a parallel region has a pool
    # of OpenMP threads, and with two pools on the cores of one OpenMP stops spinning between
    # regions: a pass then takes a third longer.
    thread = ThreadPoolExecutor(1, thread_name_prefix="outrider-engine")
    loop = asyncio.get_running_loop()
    worker, loaded = await crew.unless_lost(
        loop.run_in_executor(thread, _build, config, tier_name, make_tier, crew)
    )
    if telemetry.metrics is not None:
        watch_worker(telemetry.metrics, worker, tier=tier_name, model=loaded.name)
    if telemetry.spans is not None:
        worker.traces = WorkTraces(telemetry.spans, tier=tier_name, model=loaded.name)
    incarnation = new_nonce()
    store = await crew.unless_lost(
        loop.run_in_executor(thread, open_store, config, worker, loaded, incarnation)
    )
    if store is not None and telemetry.metrics is not None:
        watch_kv_store(
            telemetry.metrics,
            worker.counters,
            lambda: store.health.up,
            tier=tier_name,
            model=loaded.name,
        )
    servicer = make_servicer(
        worker,
        loaded,
        incarnation=incarnation,
        capabilities=capabilities(loaded),
        kv_store=store,
    )
    add_servicer(server, servicer)
    running = loop.run_in_executor(thread, worker.run)
    running.add_done_callback(crew.note_end)
    for end in (running, crew.lost):
        end.add_done_callback(lambda _: server.request_stop())

    async def drain() -> None:
        await crew.unless_lost(servicer.drain(config.drain_s), last=servicer.fail)

    try:
        await server.start()
        info = servicer.info()
        await server.serving(
            {
                "model": info.model,
                "dtype": info.dtype,
                "device": info.device,
                "kv_tokens": info.kv_blocks_total * info.kv_block_tokens,
                "context_length": info.context_length,
                **({"metrics": telemetry.metrics_address} if telemetry.metrics_address else {}),
            }
        )
        crew.arm()
        await server.until_stopped(drain)
    finally:
        worker.stop()
        await crew.unless_lost(running)
        await crew.end(thread)
        if store is not None:
            await asyncio.to_thread(store.close)


def _build(
    config: WorkerConfig,
    tier_name: str,
    make_tier: Callable[[LoadedModel, int], Tier],
    crew: Crew | None = None,
) -> tuple[Worker, LoadedModel]:
    layout = crew.layout if crew else Layout()
    torch.set_num_threads(threads_of(config.threads, layout.here))
    runner: Runner
    if crew is None or layout.size == 1:
        loaded, limits = load(config, tier_name, config.device)
        runner = _make_runner(loaded, limits, leaves_distributions=tier_name == DRAFT)
    else:
        device = device_of(config.device, 0, layout.here)
        group = crew.meet(torch.device(device))
        loaded, limits = load(config, tier_name, device, group)
        runner = crew.lead(make_shard(loaded, limits, group))
        local = range(1, layout.here)
        beside = (torch.device(device_of(config.device, rank, layout.here)) for rank in local)
        loaded = replace(loaded, beside=tuple(beside))
    tier = make_tier(loaded, limits.context_length)
    return Worker(runner, tier, limits, vocab_size=loaded.vocab_size), loaded


def load(
    config: WorkerConfig, tier_name: str, device: str, group: Group | None = None
) -> tuple[LoadedModel, WorkerLimits]:
    """The model, or a rank's part of it, ready to run, and what the worker takes on."""
    cache_dir = Path(config.cache_dir) if config.cache_dir else None
    loaded = load_model(
        config.model,
        tier=tier_name,
        dtype=config.dtype,
        device=device,
        cache_dir=cache_dir,
        group=group,
    )
    if loaded.device.type == "cpu":
        cpu_kernels.load(cache_dir)
    else:
        torch.cuda.set_device(loaded.device)  # Graphs are captured on the thread's device.
    if config.model_name:
        loaded = loaded.named(config.model_name)
    optimise(loaded.model, pack=config.quantize == "none")
    loaded = quantise(loaded, config.quantize)
    context = min(config.context_length or loaded.context_length, loaded.context_length)
    memory = parse_bytes(config.kv_memory, field="kv_memory")
    shape = KvShape.of(loaded.config, loaded.dtype, loaded.ranks)
    num_blocks = memory // (shape.token_bytes * _BLOCK_TOKENS)
    if num_blocks < 2:
        raise InvalidArgument(f"{config.kv_memory} is too little for any KV", field="kv_memory")
    limits = WorkerLimits(
        num_blocks=num_blocks,
        max_rows=_max_rows(config.max_rows, loaded),
        max_sessions=config.max_sessions,
        context_length=context,
        session_idle_s=config.session_idle_s,
        gather_passes=config.gather_passes,
    )
    return loaded, limits


def _max_rows(asked: int, loaded: LoadedModel) -> int:
    if asked < 1:
        raise InvalidArgument(f"{asked} is not at least 1", field="max_rows")
    if loaded.device.type == "cuda":
        from outrider.engine.cuda_runner import MAX_ROWS

        return min(asked, MAX_ROWS)
    return asked


def _make_runner(
    loaded: LoadedModel, limits: WorkerLimits, *, leaves_distributions: bool
) -> Runner:
    """The runner for the model's device, warmed up: no request pays for a first time.

    `leaves_distributions`: guesses are drawn by it, by their distributions too.
    """
    if loaded.device.type == "cuda":
        from outrider.engine.cuda_runner import CudaRunner

        cuda_runner = CudaRunner(
            loaded,
            num_blocks=limits.num_blocks,
            max_rows=limits.max_rows,
            max_context=limits.context_length,
            leaves_distributions=leaves_distributions,
        )
        cuda_runner.warm_up()
        return cuda_runner
    runner = ModelRunner(loaded, num_blocks=limits.num_blocks, block_tokens=_BLOCK_TOKENS)
    _warm_up(runner, loaded)
    return runner


def make_shard(loaded: LoadedModel, limits: WorkerLimits, group: Group) -> Shard:
    """A rank's part of a runner, warmed up together with the other ranks. Raises
    FailedPrecondition where they are not set up alike."""
    group.agree(
        {
            "the model's fingerprint": int.from_bytes(
                hashlib.sha256(loaded.fingerprint.encode()).digest()[:7]
            ),
            "the number of KV blocks": limits.num_blocks,
            "max_rows": limits.max_rows,
            "context_length": limits.context_length,
            "bytes of a number": loaded.dtype.itemsize,
        }
    )
    shard: Shard
    if loaded.device.type == "cuda":
        from outrider.engine.cuda_shard import CudaShard

        shard = CudaShard(
            loaded,
            group,
            num_blocks=limits.num_blocks,
            max_rows=limits.max_rows,
            max_context=limits.context_length,
        )
        shard.warm_up()
    else:
        shard = ShardRunner(loaded, group, num_blocks=limits.num_blocks, block_tokens=_BLOCK_TOKENS)
        _warm_up(shard, loaded)
    group.agree({"ready": 1})
    return shard


def _warm_up(runner: ModelRunner, loaded: LoadedModel) -> None:
    for rows in (1, 2, 5, 9, MAX_PROPOSAL_TOKENS // 4 + 1):
        token_ids = [i % loaded.vocab_size for i in range(rows)]
        runner.forward([Rows(token_ids, start=0, blocks=[0], num_logits=rows)])


_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "": 1}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(KiB|MiB|GiB|)\Z")


def parse_bytes(text: str, *, field: str) -> int:
    """A size such as 512MiB; a bare number is in bytes."""
    match = _SIZE.match(text)
    value = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if value <= 0:
        raise InvalidArgument(
            f"{text!r} is not a size above 0; write for example 512MiB", field=field
        )
    return value
