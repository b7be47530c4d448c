"""Who may begin: requests wait here until a target has room, in a queue that is bounded every way.

What a target has no room for would slow down everyone who is there, so it is held back here rather
than piled up there. Classes of priority go in order. Within a class the caller goes first who has
the least running for its weight, of equals the one whose turn it is (start-time fair queueing:
Goyal, Vin and Cheng, 1996), so that callers get equal parts of what there is however many requests
each of them sends. A request is refused at once where the queue is full or its turn would
come too late, and later where its turn does not come in time; the refusal says when to try again.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from outrider.errors import OutriderError, PermissionDenied, ResourceExhausted, Unavailable
from outrider.types import Priority
from services.orchestrator.callers import Callers
from services.orchestrator.models import ServedModel
from services.orchestrator.seats import Demand, Seat
from services.orchestrator.waiting import Queue, Waiter

_CLASSES = tuple(Priority)
"""The first one goes first."""
_RETRY_S = 1.0
"""When to try again as long as nothing is known about how long things take."""
_LEAST_RETRY_S, _MOST_RETRY_S = 0.1, 60.0
_SMOOTHING = 0.1
_ENOUGH_ENDED = 8
"""Generations that have to end before their mean duration is believed."""
_MARGIN = 0.1
_MOST_MARGIN_S = 0.25
"""A request is refused so long before its deadline, of which its caller would hear nothing."""


class Seats(Protocol):
    """What admission needs of `Seating`."""

    def try_seat(self, demand: Demand) -> Seat | None: ...

    def serves(self, model: ServedModel) -> bool: ...


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Generations that run and requests that wait (in each class) at most, and how long these do;
    `target_wait_s` where there is no target at all."""

    max_running: int
    max_waiting: int
    max_wait_s: float
    target_wait_s: float


OUTCOMES = {
    "began": "began",
    "full": "refused_full",
    "late": "refused_late",
    "no_target": "refused_without_target",
}
"""What comes of requests, and the counter of each."""


class Admission:
    """`seat` for each request; `dispatch` whenever there may be room."""

    def __init__(
        self,
        limits: AdmissionLimits,
        callers: Callers,
        seats: Seats,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters: Counter[str] = Counter()
        """Requests by OUTCOMES, and those that waited for theirs."""
        self._limits = limits
        self._callers = callers
        self._seats = seats
        self._now = now
        self._queues = {priority: Queue() for priority in _CLASSES}
        self._running: Counter[str] = Counter()
        self._num_running = 0
        self._finish: dict[str, float] = {}
        """Of callers who are there: how far each has come, in turns of weight 1."""
        self._virtual_time = 0.0
        """How far the one had come who had the last turn."""
        self._mean_s = 0.0
        self._num_ended = 0
        self._closed = False

    def num_waiting(self, model: str) -> int:
        """Requests for a model that have not got a seat. From any thread."""
        waiters = (waiter for queue in list(self._queues.values()) for waiter in list(queue))
        return sum(waiter.demand.model.name == model for waiter in waiters)

    @property
    def num_running(self) -> int:
        return self._num_running

    def check(self, caller: str, priority: Priority, deadline: float) -> None:
        """Refuse what would be refused anyway, before any work goes into it. Raises
        PermissionDenied, ResourceExhausted."""
        limits = self._callers.of(caller)
        if _CLASSES.index(priority) < _CLASSES.index(limits.priority):
            raise PermissionDenied(
                f"{priority.value} is above {limits.priority.value}, the highest class of this "
                "caller",
                field="priority",
            )
        queue = self._queues[priority]
        own = len(queue.by_caller.get(caller, ()))
        if limits.waiting and own >= limits.waiting:
            raise self._full(f"{own} of this caller's requests wait")
        is_full = self._limits.max_waiting and queue.size >= self._limits.max_waiting
        if is_full and self._share(caller, own + 1) >= self._largest_share(queue):
            raise self._full(f"{self._num_running} generations are running, {queue.size} wait")
        if queue.size:
            expected_s = self._expected_s(priority, queue.ahead_of_next(caller))
            self._check_in_time(expected_s, self._most_s(deadline))

    @contextlib.asynccontextmanager
    async def seat(
        self, caller: str, priority: Priority, demand: Demand, deadline: float
    ) -> AsyncIterator[Seat]:
        """A seat for as long as the context lasts. `deadline` is on the monotonic clock. Raises
        ResourceExhausted, Unavailable where there is no target."""
        seat = await self._wait(caller, priority, demand, deadline)
        started = self._now()
        try:
            yield seat
        finally:
            self._ended(caller, self._now() - started)
            seat.leave()
            self.dispatch()

    def dispatch(self) -> None:
        """Give seats to those whose turn it is, as long as there are any."""
        full: set[str] = set()
        """Models whose next request finds no room: it is not overtaken by smaller ones."""
        while self._num_running < self._limits.max_running:
            waiter = self._next(full)
            if waiter is None:
                return
            seat = self._seats.try_seat(waiter.demand)
            if seat is None:
                full.add(waiter.demand.model.name)
                continue
            self._queues[waiter.priority].remove(waiter)
            self._virtual_time = self._turn_of(waiter.caller)
            weight = self._callers.of(waiter.caller).weight
            self._finish[waiter.caller] = self._virtual_time + 1 / weight
            self._count(waiter.caller, 1)
            waiter.seat.set_result(seat)

    def close(self) -> None:
        """Refuse all that wait, and that come."""
        self._closed = True
        for queue in self._queues.values():
            for waiter in list(queue):
                queue.remove(waiter)
                waiter.seat.set_exception(_closing())

    async def _wait(self, caller: str, priority: Priority, demand: Demand, deadline: float) -> Seat:
        if self._closed:
            raise _closing()
        queue = self._queues[priority]
        future: asyncio.Future[Seat] = asyncio.get_running_loop().create_future()
        waiter = Waiter(caller, priority, demand, self._now(), future)
        queue.add(waiter)
        self.dispatch()
        try:
            if not future.done():
                self._check_chances(waiter, deadline)
                self.counters["waited"] += 1
                await asyncio.wait([future], timeout=self._patience_s(waiter, deadline))
            if not future.done():
                raise self._too_late(waiter)
            seat = future.result()
        except BaseException:
            self._give_up(waiter)
            raise
        self.counters["began"] += 1
        return seat

    def _check_chances(self, waiter: Waiter, deadline: float) -> None:
        """Refuse a request that cannot wait, or not long enough."""
        queue, limits = self._queues[waiter.priority], self._callers.of(waiter.caller)
        if queue.size > self._limits.max_waiting:
            self._crowd_out(waiter, queue)
        num_own = len(queue.by_caller[waiter.caller])
        if limits.waiting is not None and num_own > limits.waiting:
            raise self._full(f"{num_own - 1} of this caller's requests wait")
        # Without a target nobody's turn comes, and as soon as there is one maybe everybody's.
        if self._seats.serves(waiter.demand.model):
            expected_s = self._expected_s(waiter.priority, queue.ahead_of(waiter))
            self._check_in_time(expected_s, self._patience_s(waiter, deadline))

    def _check_in_time(self, expected_s: float, patience_s: float) -> None:
        if expected_s > patience_s:
            self.counters["refused_late"] += 1
            raise ResourceExhausted(
                f"its turn would come in {expected_s:.1f} s; it can wait for {patience_s:.1f} s",
                retry_after_s=self._retry_after_s(),
            )

    def _crowd_out(self, waiter: Waiter, queue: Queue) -> None:
        """Refuse the one that a full queue has no place for: the newest of the caller who has the
        most there for its weight, so that no caller keeps others out."""
        full = self._full(f"{self._num_running} generations are running, {queue.size - 1} wait")
        own = self._share(waiter.caller, len(queue.by_caller[waiter.caller]))
        share, caller = max((self._share(c, len(q)), c) for c, q in queue.by_caller.items())
        if own >= share:
            raise full
        victim = queue.by_caller[caller][-1]
        queue.remove(victim)
        victim.seat.set_exception(full)

    def _share(self, caller: str, num_waiting: int) -> float:
        return num_waiting / self._callers.of(caller).weight

    def _largest_share(self, queue: Queue) -> float:
        return max((self._share(c, len(q)) for c, q in queue.by_caller.items()), default=0.0)

    def _patience_s(self, waiter: Waiter, deadline: float) -> float:
        """How long it may wait from now on."""
        most = self._most_s(deadline)
        if not self._seats.serves(waiter.demand.model):
            most = min(most, self._limits.target_wait_s)
        return most

    def _most_s(self, deadline: float) -> float:
        left = deadline - self._now()
        left -= min(_MARGIN * left, _MOST_MARGIN_S)
        return max(min(left, self._limits.max_wait_s), 0.0)

    def _next(self, full: set[str]) -> Waiter | None:
        """Whose turn it is: the highest class, in it the caller with the least for its weight."""
        for queue in self._queues.values():
            firsts = []
            for caller, waiters in queue.by_caller.items():
                limits = self._callers.of(caller)
                running = self._running[caller]
                if limits.running is not None and running >= limits.running:
                    continue
                first = next((w for w in waiters if w.demand.model.name not in full), None)
                if first is not None:
                    rank = running / limits.weight, self._turn_of(caller), first.arrived
                    firsts.append((rank, id(first), first))
            if firsts:
                return min(firsts)[-1]
        return None

    def _turn_of(self, caller: str) -> float:
        """When it is a caller's turn; one who comes anew has missed none."""
        return max(self._finish.get(caller, 0.0), self._virtual_time)

    def _expected_s(self, priority: Priority, ahead: int) -> float:
        """How long until its turn, 0 as long as nothing is known: as many as are ahead have to end,
        and of those who run one ends every mean duration / number of them (Little's law)."""
        higher = _CLASSES[: _CLASSES.index(priority)]
        ahead += sum(self._queues[other].size for other in higher)
        return (ahead + 1) * self._interval_s()

    def _interval_s(self) -> float:
        if self._num_ended < _ENOUGH_ENDED or not self._num_running:
            return 0.0
        return self._mean_s / self._num_running

    def _retry_after_s(self) -> float:
        waiting = sum(queue.size for queue in self._queues.values())
        expected_s = waiting * self._interval_s() or _RETRY_S
        return min(max(expected_s, _LEAST_RETRY_S), _MOST_RETRY_S)

    def _ended(self, caller: str, seconds: float) -> None:
        self._count(caller, -1)
        self._num_ended += 1
        pace = max(1 / self._num_ended, _SMOOTHING)
        self._mean_s += pace * (seconds - self._mean_s)

    def _give_up(self, waiter: Waiter) -> None:
        """It does not wait any more; a seat that it got meanwhile is free again."""
        future = waiter.seat
        if not future.done():
            self._queues[waiter.priority].remove(waiter)
        elif future.exception() is None:
            self._count(waiter.caller, -1)
            future.result().leave()
            self.dispatch()

    def _count(self, caller: str, change: int) -> None:
        self._num_running += change
        self._running[caller] += change
        if not self._running[caller]:
            del self._running[caller]
            if not any(caller in queue.by_caller for queue in self._queues.values()):
                self._finish.pop(caller, None)

    def _full(self, what: str) -> ResourceExhausted:
        self.counters["refused_full"] += 1
        after_s = self._retry_after_s()
        return ResourceExhausted(f"{what}; retry in {after_s:.1f} s", retry_after_s=after_s)

    def _too_late(self, waiter: Waiter) -> OutriderError:
        model = waiter.demand.model
        waited_s = self._now() - waiter.arrived
        if not self._seats.serves(model):
            self.counters["refused_without_target"] += 1
            return Unavailable(f"no target of {model.name} came within {waited_s:.1f} s")
        self.counters["refused_late"] += 1
        after_s = self._retry_after_s()
        return ResourceExhausted(
            f"no room at the targets of {model.name} within {waited_s:.1f} s; retry in "
            f"{after_s:.1f} s",
            retry_after_s=after_s,
        )


def _closing() -> Unavailable:
    return Unavailable("this orchestrator is shutting down; retry at another")
