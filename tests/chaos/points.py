"""Named points of the services, wrapped from outside; nothing happens at one unless it is armed.

Services know nothing of this: `install` replaces functions of theirs by ones that call `reach`, in
processes that the harness has started. Orders come as a file (`CHAOS_ORDERS` names it) with a
signal, SIGUSR1:

    {"point": "after-verify", "passage": 17, "action": "kill"}    at the 17th time from now on
    {"report": "/path"}                                           what this process holds
    {"stacks": "/path"}                                           where its tasks are
    {}                                                            nothing any more

Before it acts, a process makes the file `CHAOS_ORDERS`.fired.
"""

import asyncio
import contextlib
import gc
import json
import os
import signal
import sys
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from outrider.errors import Unavailable

ORDERS = "CHAOS_ORDERS"

ORCHESTRATOR_POINTS = {
    "after-verify": "a verdict is here, and nobody was told",
    "before-commit": "tokens are about to be stored",
    "after-commit": "tokens were stored, the store's reply has not been read",
    "after-emit": "a chunk was handed to gRPC",
    "after-begin": "a generation was stored as running, the reply has not been read",
    "after-finish": "the end of a generation was stored, and not told",
    "before-takeover": "somebody wants to resume a session whose owner is silent",
    "after-takeover": "a session was taken over, nothing was done with it",
}
WORKER_POINTS = {
    "before-reply": "replies are made, and not sent",
    "after-reply": "replies were handed to gRPC",
}
POINTS: Mapping[str, Mapping[str, str]] = {
    "orchestrator": ORCHESTRATOR_POINTS,
    "target": WORKER_POINTS,
    "draft": WORKER_POINTS,
}
_LOSABLE = ("after-commit", "after-begin", "after-finish", "after-takeover")
ACTIONS: Mapping[str, tuple[str, ...]] = {
    point: ("kill", "kill", "stop", "lose") if point in _LOSABLE else ("kill", "stop")
    for point in (*ORCHESTRATOR_POINTS, *WORKER_POINTS)
}
"""`kill` and `stop` are SIGKILL and SIGSTOP; `lose` makes a reply of the store fail to arrive."""

SPOIL = "before-emit"
"""Not a fault but a fraud, for the negative control: `alter` or `double` what a client is told."""

_COUNTED = ("Generation", "RemoteSession", "CommitQueue", "Sequence", "DraftSession")
"""Classes whose instances must not outlive what they were made for."""


class Points:
    """The points of this process."""

    def __init__(self) -> None:
        self._point = self._action = ""
        self._left = 0
        self._orders = Path(os.environ[ORDERS])

    def obey(self, number: int, frame: object) -> None:
        """SIGUSR1: orders are there."""
        order: dict[str, Any] = json.loads(self._orders.read_text())
        if "report" in order:
            Path(order["report"]).write_text(json.dumps(_report()))
            return
        if "stacks" in order:
            with open(order["stacks"], "a", encoding="utf-8") as file:
                _write_stacks(file)
            return
        self._point, self._action = order.get("point", ""), order.get("action", "")
        self._left = order.get("passage", 0)

    def is_due(self, point: str) -> bool:
        """Whether this passage is the one."""
        if not point or point != self._point:
            return False
        self._left -= 1
        if self._left > 0:
            return False
        self._point = ""
        Path(f"{self._orders}.fired").touch()
        return True

    def reach(self, point: str) -> None:
        """May kill the process, put it to sleep, or raise Unavailable."""
        if not self.is_due(point):
            return
        if self._action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            raise Unavailable("the harness lost the reply of the session store")

    def spoil(self, response: Any) -> None:
        """Tell a client something else."""
        if not response.token_ids or not self.is_due(SPOIL):
            return
        if self._action == "alter":
            response.token_ids[0] ^= 1
        else:
            response.token_ids.append(response.token_ids[-1])
            response.token_sources.append(response.token_sources[-1])


def install(role: str) -> None:
    """Wrap the points of a service, in its process."""
    if ORDERS not in os.environ:
        return
    points = Points()
    signal.signal(signal.SIGUSR1, points.obey)
    if role == "orchestrator":
        _install_orchestrator(points)
    else:
        _install_worker(points)


def _install_orchestrator(points: Points) -> None:
    from services.orchestrator import decoder, service, store

    _wrap(points, decoder.Decoder, "_verify", after="after-verify")
    sessions = store.SessionStore
    _wrap(points, sessions, "commit", before="before-commit", after="after-commit")
    _wrap(points, sessions, "begin", after="after-begin")
    _wrap(points, sessions, "finish", after="after-finish")
    _wrap(points, sessions, "resume", before="before-takeover", after="after-takeover")
    stream: Any = service._stream

    async def watched(*args: Any) -> AsyncIterator[Any]:
        async with contextlib.aclosing(stream(*args)) as responses:
            async for response in responses:
                points.spoil(response)
                yield response
                points.reach("after-emit")

    service._stream = watched  # type: ignore[assignment]


def _install_worker(points: Points) -> None:
    from outrider.worker import servicer

    next_batch: Any = servicer._next_batch
    answered: weakref.WeakSet[Any] = weakref.WeakSet()

    async def watched(outbox: Any) -> Any:
        if outbox in answered:
            points.reach("after-reply")
        batch = await next_batch(outbox)
        if batch:
            points.reach("before-reply")
            answered.add(outbox)
        return batch

    servicer._next_batch = watched


def _wrap(points: Points, owner: Any, name: str, *, before: str = "", after: str = "") -> None:
    wrapped: Any = getattr(owner, name)

    async def watched(*args: Any, **kwargs: Any) -> Any:
        points.reach(before)
        result = await wrapped(*args, **kwargs)
        points.reach(after)
        return result

    setattr(owner, name, watched)


def _write_stacks(file: TextIO) -> None:
    """Where tasks are, and what keeps instances of the counted classes."""
    with contextlib.suppress(RuntimeError):
        for task in asyncio.all_tasks():
            print(task.get_name(), task.get_coro(), file=file)
            with contextlib.suppress(Exception):  # Coroutines of Cython have no frames.
                task.print_stack(file=file)
    gc.collect()
    own = [sys._getframe()]
    items = [item for item in gc.get_objects() if type(item).__name__ in _COUNTED]
    for item in items[:_MOST_SHOWN]:
        print(f"\n{type(item).__name__} is kept by", file=file)
        kept, seen = [item], {id(items), id(item)}
        for depth in range(1, _DEPTH):
            keepers = [k for k in gc.get_referrers(*kept) if id(k) not in seen]
            keepers = [k for k in keepers if k is not kept and k not in own]
            seen |= {id(k) for k in keepers} | {id(keepers)}
            for keeper in keepers[:_MOST_SHOWN]:
                print(f"{'  ' * depth}{type(keeper).__name__} {str(keeper)[:200]}", file=file)
            kept = keepers[:_MOST_SHOWN]
            seen.add(id(kept))
            if not kept:
                break


_MOST_SHOWN = 6
_DEPTH = 7


def _report() -> dict[str, int]:
    """Tasks, instances of the counted classes, file descriptors and memory of this process."""
    gc.collect()
    counts = Counter(type(item).__name__ for item in gc.get_objects())
    try:
        tasks = len(asyncio.all_tasks())
    except RuntimeError:  # Between two turns of the loop.
        tasks = 0
    resident = Path("/proc/self/statm").read_text().split()[1]
    return {
        **{name: counts[name] for name in _COUNTED},
        "tasks": tasks,
        "files": len(os.listdir("/proc/self/fd")),
        "memory": int(resident) * os.sysconf("SC_PAGE_SIZE"),
    }
