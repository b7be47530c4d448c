"""What a rank other than rank 0 does: join, load its part of the model, do what rank 0 says."""

import logging
import os
from typing import Any

import torch

from outrider.engine import meeting
from outrider.engine.group import Seat, open_group
from outrider.engine.group_runner import follow
from outrider.engine.steps import Listener
from outrider.engine.watch import Watch
from outrider.telemetry.logs import configure_logging
from outrider.worker.ranks import device_of, name_rank, threads_of
from outrider.worker.service import WorkerConfig, load, make_shard

logger = logging.getLogger(__name__)

_CAUSE_S = 1.0


def follow_rank_0(told: dict[str, Any]) -> None:
    """Until rank 0 ends the group; `told` is what `Crew.start` says. Serves nobody.

    Raises whatever goes wrong, after rank 0 was told of it. Where rank 0 is gone the process ends
    at once: a pass that waits for it would wait for ever.
    """
    config = WorkerConfig(**told["settings"])
    seat, here = Seat(*told["seat"]), told["here"]
    configure_logging(config.log_level, as_json=config.log_json)
    name_rank(seat.rank)
    torch.set_num_threads(threads_of(config.threads, here))
    device = device_of(config.device, told["local"], here)
    token = bytes.fromhex(told["token"])
    links, store = meeting.join(
        told["address"], told["port"], seat, token, timeout_s=config.group_start_s
    )
    watch = Watch({0: links.watch}, timeout_s=config.group_timeout_s, on_loss=_give_up)
    watch.start()
    try:
        group = open_group(
            seat,
            torch.device(device),
            store,
            start_s=config.group_start_s,
            timeout_s=config.group_timeout_s,
            reduction=config.group_sums,
            one_host=here == seat.size,
        )
        loaded, limits = load(config, told["tier"], device, group)
        shard = make_shard(loaded, limits, group)
        logger.info("ready", extra={"device": device})
        follow(shard, Listener(links.steps))
    except Exception as error:
        # What another rank's end did to this one is not worth telling.
        if not watch.verdict(_CAUSE_S):
            watch.say_why(f"{type(error).__name__}: {error}")
        raise
    watch.close()
    group.close()


def _give_up(reason: str) -> None:
    logger.error("the group is lost", extra={"why": reason})
    logging.shutdown()
    os._exit(1)
