"""A tensor-parallel group: what its ranks say to each other within a pass.

Everything that all ranks compute together goes through `torch.distributed`: NCCL between GPUs,
gloo between CPUs. Sums inside a model's layers are operators of their own, so that a compiled layer
has nothing to look into, a trace can hold them and a CUDA graph captures what they launch. Small
sums between GPUs of one host are made in one kernel that reads the others' memory (`symm_mem`): a
pass of 32 layers has 64 of them, and waits for each.
"""

import itertools
import logging
import os
import socket
import weakref
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from outrider.errors import FailedPrecondition

logger = logging.getLogger(__name__)

REDUCTIONS = ("auto", "nccl")
"""How sums between GPUs are made: in one kernel where that can be, or by NCCL always."""

_ONE_SHOT_BYTES = 1 << 20
"""Larger sums of two ranks are NCCL's: one kernel that reads all of everyone is for small ones."""

_ONE_SHOT_RANKS = 8

_groups: "weakref.WeakValueDictionary[int, Group]" = weakref.WeakValueDictionary()
"""An operator takes numbers and tensors only, so it finds its group here."""

_keys = itertools.count()


class Seat(NamedTuple):
    """Which rank of how many."""

    rank: int = 0
    size: int = 1


class Group:
    """The ranks' common operations. Every rank calls the same ones in the same order.

    Made by `open_group`; any failure of one means that the group is lost.
    """

    def __init__(self, seat: Seat, device: torch.device) -> None:
        self.seat = seat
        self.device = device
        self.key = next(_keys)
        self.one_shot_bytes = 0
        """Sums of up to so many bytes are made in one kernel; 0: none."""
        self._passes: dist.ProcessGroup | None = None
        self._buffer: Tensor | None = None
        _groups[self.key] = self

    def sum_in_place(self, rows: Tensor) -> None:
        """Add up what the ranks have; every rank gets the same bits."""
        dist.all_reduce(rows, group=self._passes)

    def one_shot_sum(self, rows: Tensor) -> Tensor:
        """The same of few bytes, as another tensor."""
        if self._buffer is None:
            raise RuntimeError("this group has no memory that its ranks share")
        count = rows.numel()
        mine = self._buffer.view(rows.dtype)[:count].view(rows.shape)
        name = dist.group.WORLD.group_name  # type: ignore[union-attr]
        total: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(mine, rows, "sum", name)
        return total

    def largest(self, values: Tensor) -> Tensor:
        """Element by element the largest that a rank has."""
        found = values.clone()
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._passes)
        return found

    def all_gather(self, part: Tensor) -> Tensor:  # [rows, columns] -> [ranks, rows, columns]
        """What each rank has, on every rank."""
        rows, columns = part.shape
        everyone = part.new_empty(self.seat.size * rows, columns)
        # The same under its newer name, where there is one.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(everyone, part.contiguous(), group=self._passes)
        return everyone.view(self.seat.size, rows, columns)

    def join_columns(self, part: Tensor) -> Tensor:  # [rows, columns of a rank] -> [rows, columns]
        """The columns of all ranks side by side, on every rank."""
        rows = len(part)
        if not rows:
            return part.new_empty(0, part.shape[1] * self.seat.size)
        return self.all_gather(part).transpose(0, 1).reshape(rows, -1)

    def broadcast(self, values: Tensor) -> None:
        """Give every rank what rank 0 has."""
        dist.broadcast(values, 0, group=self._passes)

    def agree(self, numbers: dict[str, int]) -> None:
        """Wait for all ranks; FailedPrecondition where one has another number than rank 0."""
        own = torch.tensor(list(numbers.values()), dtype=torch.int64)
        everyone = [torch.empty_like(own) for _ in range(self.seat.size)]
        dist.all_gather(everyone, own)
        for rank, theirs in enumerate(everyone):
            for name, first, other in zip(numbers, everyone[0], theirs, strict=True):
                if first != other:
                    raise FailedPrecondition(
                        f"the ranks of a group must be set up alike: {name} is {int(first)} at "
                        f"rank 0 and {int(other)} at rank {rank}"
                    )

    def close(self) -> None:
        """After the last operation of all ranks."""
        if dist.is_initialized():
            dist.destroy_process_group()


def open_group(
    seat: Seat,
    device: torch.device,
    store: Store,
    *,
    start_s: float,
    timeout_s: float,
    reduction: str = "auto",
    one_host: bool = True,
) -> Group:
    """Meet the other ranks in `store` and make ready to compute with them.

    `start_s` is how long a rank may take to get there and to load, `timeout_s` how far ranks may be
    apart in a pass (on CPUs; a hung GPU is for `Watch` to see). The process can be in one group at
    a time.
    """
    group = Group(seat, device)
    if one_host and (loopback := _loopback()):  # Strangers have no business there.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.set_device(device)
        # One kernel reads the others' memory itself; multicast is not needed, and not everywhere.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
        store=store,
        rank=seat.rank,
        world_size=seat.size,
        timeout=timedelta(seconds=start_s),
        device_id=device if on_cuda else None,
    )
    if not on_cuda:
        group._passes = dist.new_group(timeout=timedelta(seconds=timeout_s), backend="gloo")
    elif reduction == "auto" and one_host and seat.size <= _ONE_SHOT_RANKS:
        _share_memory(group)
    return group


def _loopback() -> str:
    """The name of the loopback interface."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "")


def _share_memory(group: Group) -> None:
    """Let small sums be made in one kernel, if all ranks can and it adds up as NCCL does."""
    try:
        import torch.distributed._symmetric_memory as symm_mem

        buffer = symm_mem.empty(_ONE_SHOT_BYTES, dtype=torch.uint8, device=group.device)
        symm_mem.rendezvous(buffer, dist.group.WORLD)  # type: ignore[arg-type]
        group._buffer = buffer
    except Exception as error:
        logger.warning("the GPUs of this group share no memory: %s", error)
    if _all_say(group._buffer is not None) and _all_say(_adds_up(group)):
        group.one_shot_bytes = 2 * _ONE_SHOT_BYTES // group.seat.size
    logger.info(
        "sums of ranks", extra={"made_by": "one kernel" if group.one_shot_bytes else "NCCL"}
    )


def _adds_up(group: Group) -> bool:
    """Whether sums in one kernel are those of NCCL."""
    generator = torch.Generator(device=group.device).manual_seed(group.seat.rank)
    right = True
    for count in (8, 4096, _ONE_SHOT_BYTES // 4):
        rows = torch.randn(count, generator=generator, device=group.device)
        expected = rows.clone()
        dist.all_reduce(expected)
        right &= torch.allclose(group.one_shot_sum(rows), expected, rtol=1e-5, atol=1e-5)
    return right


def _all_say(yes: bool) -> bool:
    votes = torch.tensor([int(yes)])
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    return bool(votes.item())


def summed(rows: Tensor, group: int, one_shot_bytes: int) -> Tensor:
    """The sum of `rows` over the ranks of a group (its key); `rows` may be overwritten."""
    if rows.numel() * rows.element_size() <= one_shot_bytes and rows.dtype != torch.float16:
        total: Tensor = torch.ops.outrider_group.one_shot_sum(rows, group)
        return total
    torch.ops.outrider_group.sum_in_place(rows, group)
    return rows


@torch.library.custom_op("outrider_group::sum_in_place", mutates_args=("rows",))
def _sum_in_place(rows: Tensor, group: int) -> None:
    _groups[group].sum_in_place(rows)


@_sum_in_place.register_fake
def _(rows: Tensor, group: int) -> None:
    return None


@torch.library.custom_op("outrider_group::one_shot_sum", mutates_args=())
def _one_shot_sum(rows: Tensor, group: int) -> Tensor:
    return _groups[group].one_shot_sum(rows)


@_one_shot_sum.register_fake
def _(rows: Tensor, group: int) -> Tensor:
    return torch.empty_like(rows)
