"""The ranks of a worker that share one model: who runs where, with what.

All on one host, or spread evenly over the pods of a LeaderWorkerSet: the same command in each pod,
whose index decides. `Crew` (outrider.worker.crew) starts and ends them.
"""

import dataclasses
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from outrider.config import setting
from outrider.engine.group import REDUCTIONS
from outrider.errors import InvalidArgument
from outrider.telemetry.logs import JsonFormatter

DEFAULT_PORT = 29600
"""Where the pods of a LeaderWorkerSet meet unless told otherwise."""

_TEXT = "%(asctime)s %(levelname)s rank %(rank)d %(name)s: %(message)s"


@dataclass(frozen=True)
class GroupConfig:
    """What a worker can be told about its group."""

    tensor_parallel: int = setting(
        1,
        help="ranks that share the model, a GPU each; all on this host, or spread evenly over the "
        "pods of a LeaderWorkerSet",
    )
    group_host: str = setting(
        "",
        help="address where rank 0 listens for the others; default: 127.0.0.1, in a "
        "LeaderWorkerSet all addresses",
    )
    group_port: int = setting(
        0, help=f"port there; 0: a free one, in a LeaderWorkerSet {DEFAULT_PORT}"
    )
    group_token_file: str = setting(
        "",
        help="file with a secret that ranks on other hosts must know; on one host one is drawn",
    )
    group_timeout_s: float = setting(
        5.0, help="seconds after which a rank that does not answer takes its group out of service"
    )
    group_start_s: float = setting(
        900.0, help="longest wait for all ranks to come and to load the model"
    )
    group_sums: str = setting(
        "auto",
        help="sums between GPUs; auto makes small ones in one kernel where the GPUs of one host "
        "share memory, nccl makes all by NCCL",
        choices=REDUCTIONS,
    )


class Layout(NamedTuple):
    """Ranks in all, the first one here, how many are here, and where rank 0 is."""

    size: int = 1
    first: int = 0
    here: int = 1
    leader: str = "127.0.0.1"

    @property
    def one_host(self) -> bool:
        return self.here == self.size


def layout_of(config: GroupConfig, env: Mapping[str, str]) -> Layout:
    """Who runs here. Raises InvalidArgument for numbers that do not go together."""
    size = config.tensor_parallel
    if size < 1:
        raise InvalidArgument(f"{size} is not at least 1", field="tensor_parallel")
    if min(config.group_timeout_s, config.group_start_s) <= 0:
        raise InvalidArgument("a time must be above 0", field="group_timeout_s")
    pods = _number(env, "LWS_GROUP_SIZE", 1)
    if pods == 1:
        return Layout(size, here=size)
    index, leader = _number(env, "LWS_WORKER_INDEX", -1), env.get("LWS_LEADER_ADDRESS", "")
    if not 0 <= index < pods or not leader:
        raise InvalidArgument(
            f"a LeaderWorkerSet of {pods} pods needs LWS_WORKER_INDEX below that and "
            f"LWS_LEADER_ADDRESS; they are {index} and {leader!r}",
            field="LWS_GROUP_SIZE",
        )
    if size % pods:
        raise InvalidArgument(
            f"{size} ranks cannot be spread evenly over the {pods} pods of this LeaderWorkerSet",
            field="tensor_parallel",
        )
    here = size // pods
    return Layout(size, index * here, here, leader)


def device_of(wanted: str, local: int, here: int) -> str:
    """The device of the rank number `local` of those here; InvalidArgument where GPUs are short."""
    name, _, first = wanted.partition(":")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return "cpu"
    index = int(first or 0) + local
    if index >= torch.cuda.device_count():
        raise InvalidArgument(
            f"{here} ranks from GPU {first or 0} on need {int(first or 0) + here} GPUs on this "
            f"host; there are {torch.cuda.device_count()}",
            field="tensor_parallel",
        )
    return f"cuda:{index}"


def threads_of(wanted: int, here: int) -> int:
    """CPU threads of a rank: by default those on one host share its cores."""
    return wanted or max((os.cpu_count() or 1) // here, 1)


def name_rank(rank: int) -> None:
    """Let each log record of this process say which rank it comes from."""

    def add_rank(record: logging.LogRecord) -> bool:
        record.rank = rank
        return True

    for handler in logging.getLogger().handlers:
        handler.addFilter(add_rank)
        if not isinstance(handler.formatter, JsonFormatter):
            handler.setFormatter(logging.Formatter(_TEXT))


def settings_of(config: Any, cls: type) -> dict[str, Any]:
    """The settings of `config` that `cls` has."""
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(cls)}


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "")
    if text and not text.isdecimal():
        raise InvalidArgument(f"{text!r} is not a number", field=name)
    return int(text) if text else default
