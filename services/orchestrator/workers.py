"""The workers of a tier as they come and go: a link to each, how it is doing, who is there."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from outrider.errors import OutriderError, Unavailable
from outrider.remote.link import WorkerLink
from outrider.rpc.channel import ChannelSecurity
from outrider.v1 import worker_pb2
from services.orchestrator.discovery.endpoints import Endpoint, Standing

logger = logging.getLogger(__name__)

FRESH_S = 3.0
"""What a worker or another orchestrator said is believed for so long."""
CHANGES = ("came", "gone", "refused")
"""What happens to the workers of a tier; refused are those that do not fit the others."""
_SLOW = 2.0
"""A pass that takes so many times the usual one is a slow worker's; less is noise."""
_SLOWEST = 4.0


@dataclass(frozen=True, slots=True)
class Others:
    """What other orchestrators have at a worker, and how many of them have requests waiting."""

    sessions: int = 0
    tokens: int = 0
    waiting: int = 0
    until: float = 0.0
    """On the monotonic clock: nothing is known after that."""


class Worker:
    """One worker. Its counts are those of this orchestrator's running generations."""

    def __init__(self, link: WorkerLink, endpoint: Endpoint) -> None:
        self.link = link
        self.zone = endpoint.zone
        self.standing = endpoint.standing
        self.is_named = True
        """Discovery still names it."""
        self.fits = 0
        """The incarnation that was found to fit, 0 before."""
        self.misfit: OutriderError | None = None
        """Why the incarnation that is there does not fit."""
        self.seen = 0
        """The incarnation that was last looked at."""
        self.sessions = 0
        self.tokens = 0
        """Of KV that they may come to need."""
        self.others = Others()
        self._vitals: worker_pb2.WatchResponse | None = None
        self._excess = 0
        """Work under way there, when it last said so, beyond what this orchestrator had."""

    @property
    def address(self) -> str:
        return self.link.address

    @property
    def incarnation(self) -> int:
        """0 while it is away."""
        return self.link.info.incarnation if self.link.info is not None else 0

    @property
    def usable(self) -> bool:
        """It is there, and fits."""
        return self.fits != 0 and self.fits == self.incarnation

    @property
    def leaving(self) -> bool:
        """Sessions that it has are better off elsewhere."""
        return self.link.draining or self.standing is Standing.LEAVING

    @property
    def takes_sessions(self) -> bool:
        return self.usable and not self.leaving and self.standing is Standing.READY

    @property
    def kv_tokens(self) -> int:
        """That its KV holds in all; 0 where it does not say."""
        info = self.link.info
        return info.kv_blocks_total * info.kv_block_tokens if info is not None else 0

    def sessions_of_all(self, now: float) -> int:
        """Running generations, of other orchestrators too as far as known."""
        if now < self.others.until:
            return self.sessions + self.others.sessions
        return self.sessions + (self._excess if self._says(now) else 0)

    def tokens_of_all(self, now: float) -> int:
        """Likewise, of KV that they may come to need."""
        return self.tokens + (self.others.tokens if now < self.others.until else 0)

    def pass_s(self, now: float) -> float:
        """Time of a pass, 0 where it is not known."""
        return vitals.pass_us / 1e6 if (vitals := self._says(now)) else 0.0

    def queue_s(self, now: float) -> float:
        """How long work has waited there for KV."""
        return vitals.queue_us / 1e6 if (vitals := self._says(now)) else 0.0

    def note_vitals(self) -> None:
        """It may have said how it is doing."""
        vitals = self.link.vitals
        if vitals is not None and vitals is not self._vitals:
            self._excess = max(vitals.running - self.sessions, 0)
        self._vitals = vitals

    def _says(self, now: float) -> worker_pb2.WatchResponse | None:
        """How it is doing, as long as that can be believed."""
        fresh = now - self.link.vitals_at <= FRESH_S
        return self.link.vitals if fresh else None


class Tier:
    """All workers of a tier, by address. `examine` is called for a worker that may have changed,
    `tell` after any change."""

    def __init__(
        self,
        name: str,
        security: ChannelSecurity,
        *,
        examine: Callable[[Worker], Awaitable[None]],
        tell: Callable[[], None],
    ) -> None:
        self.name = name
        self.counters: Counter[str] = Counter()
        """How many workers CHANGES happened to."""
        self._security = security
        self._examine = examine
        self._tell = tell
        self._workers: dict[str, Worker] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def workers(self) -> tuple[Worker, ...]:
        return tuple(self._workers.values())

    def apply(self, endpoints: Iterable[Endpoint]) -> None:
        """These are the endpoints now. New ones are connected to; those that are not named any more
        take no new sessions, and are let go once they have none."""
        named = {endpoint.address: endpoint for endpoint in endpoints}
        for address, endpoint in named.items():
            worker = self._workers.get(address)
            if worker is not None:
                worker.zone, worker.standing = endpoint.zone, endpoint.standing
                worker.is_named = True
            elif endpoint.standing is Standing.READY:
                self._add(endpoint)
        for address, worker in self._workers.items():
            if address not in named and worker.is_named:
                worker.is_named = False
                if worker.standing is Standing.READY:
                    worker.standing = Standing.RESTING
        self.let_go()
        self._tell()

    def let_go(self) -> None:
        """Hang up on workers that nobody names and nobody uses."""
        for address, worker in list(self._workers.items()):
            if worker.is_named or worker.sessions:
                continue
            logger.info("worker gone", extra={"tier": self.name, "address": address})
            self.counters["gone"] += 1
            del self._workers[address]
            self._tasks.pop(address).cancel()
            closing = asyncio.create_task(worker.link.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def refuse(self, worker: Worker, error: OutriderError) -> None:
        """The incarnation that is there does not fit; said once."""
        if worker.misfit is None:
            self.counters["refused"] += 1
            logger.error(
                "worker refused",
                extra={"tier": self.name, "address": worker.address, "why": str(error)},
            )
        worker.fits, worker.misfit = 0, error

    def usual_pass_s(self, now: float) -> float:
        """The median of what passes take, 0 where nobody says."""
        known = sorted(p for worker in self._workers.values() if (p := worker.pass_s(now)) > 0)
        return known[(len(known) - 1) // 2] if known else 0.0

    async def wait_examined(self, worker: Worker, timeout_s: float) -> None:
        """Until the worker is found to fit. Raises why not, Unavailable after the timeout."""
        deadline = time.monotonic() + timeout_s
        await worker.link.wait_up(timeout_s)
        while not worker.usable:
            if worker.misfit is not None:
                raise worker.misfit
            changed = worker.link.changed
            left = deadline - time.monotonic()
            if left <= 0:
                raise Unavailable(f"the {self.name} at {worker.address} went away at the start")
            await _wait(changed, min(left, 0.05))

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        links = [worker.link.close() for worker in self._workers.values()]
        await asyncio.gather(*links, *self._closing, return_exceptions=True)

    def _add(self, endpoint: Endpoint) -> None:
        link = WorkerLink(endpoint.address, self.name, self._security, watch=True)
        worker = Worker(link, endpoint)
        self._workers[endpoint.address] = worker
        self.counters["came"] += 1
        link.start()
        self._tasks[endpoint.address] = asyncio.create_task(
            self._follow(worker), name=f"follow-{endpoint.address}"
        )

    async def _follow(self, worker: Worker) -> None:
        while True:
            changed = worker.link.changed
            worker.note_vitals()
            try:
                await self._examine(worker)
            except OutriderError as error:
                logger.warning(
                    "worker not understood",
                    extra={"tier": self.name, "address": worker.address, "why": str(error)},
                )
                await _wait(changed, 1.0)  # It may have gone away in the midst: try again.
                continue
            self._tell()
            await changed.wait()


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        pass


def relative_load(worker: Worker, usual_pass_s: float, now: float) -> float:
    """Sessions at a worker, weighed by how slow it is beside the others of its tier."""
    pass_s = worker.pass_s(now)
    slowness = pass_s / usual_pass_s if pass_s > 0 and usual_pass_s > 0 else 1.0
    weight = 1.0 if slowness < _SLOW else min(slowness, _SLOWEST)
    return worker.sessions_of_all(now) * weight
