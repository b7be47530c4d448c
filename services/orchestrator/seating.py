"""The seats of an orchestrator's generations: who sits where, and where there is room.

Targets are chosen by prefix and load (services.orchestrator.placement), drafts by load alone: what
a draft has of a session is soon made again. A session that was kept goes back to where its KV is.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from outrider.errors import Unavailable
from outrider.v1 import worker_pb2
from services.orchestrator.models import ModelRegistry, ServedModel
from services.orchestrator.placement import Candidate, PrefixIndex, choose, first_unseen
from services.orchestrator.seats import Demand, Seat
from services.orchestrator.workers import Worker, relative_load

_MAX_PLACES = 65_536
_MAX_BLOCKS = 131_072
"""Of the index of prefixes: 4 million tokens."""
_PRUNE_EVERY = 1024
_QUEUE_PASSES = 4.0
_QUEUE_S = 0.25
"""Work that has waited for KV so many passes, and so long, says that a target is full."""
_MOVE_FACTOR, _MOVE_SLACK = 1.5, 2.0
"""A draft has too many if it has so many times another one's and so many more."""
CHOSEN_FOR = ("session", "prefix", "index", "load")
"""What a target is chosen for: KV of a kept session; a prefix that this orchestrator sent there, or
that the index of KV blocks alone knows of; its load, where nobody has anything."""


@dataclass(frozen=True, slots=True)
class Room:
    """What a target may be given: generations (0: as many as its pass has rows), and the share of
    its KV that they may come to need at most."""

    max_sessions: int = 0
    kv_overcommit: float = 1.0
    zone: str = ""
    """This orchestrator's own; "": unknown."""


class Seating:
    """The seats of all generations of this orchestrator."""

    def __init__(
        self, registry: ModelRegistry, room: Room, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.now = now
        self.counters: Counter[str] = Counter()
        """How often a target was chosen, by what for (CHOSEN_FOR); targets and drafts that were
        changed."""
        self._registry = registry
        self._room = room
        self._prefixes = PrefixIndex(_MAX_BLOCKS)
        self._places: OrderedDict[str, int] = OrderedDict()
        """Of kept sessions, the incarnation of the target that has their KV."""
        self._on_free: Callable[[], None] = lambda: None
        self._num_chosen = 0

    def on_free(self, listener: Callable[[], None]) -> None:
        """Call this whenever a place has become free."""
        self._on_free = listener

    def may_choose(self, model: ServedModel, session_id: str) -> bool:
        """Whether it is open where a new generation goes: there are several targets, and none has
        had the session."""
        workers = self._registry.targets_of(model)
        open_ = [worker.incarnation for worker in workers if worker.takes_sessions]
        return len(open_) > 1 and self._places.get(session_id) not in open_

    def serves(self, model: ServedModel) -> bool:
        """Whether there is a target for new sessions, full or not."""
        return any(worker.takes_sessions for worker in self._registry.targets_of(model))

    def try_seat(self, demand: Demand) -> Seat | None:
        """A seat at a target that has room; None: there is none now."""
        now = self.now()
        seat = Seat(self, demand)
        open_ = [w for w in self._registry.targets_of(demand.model) if w.takes_sessions]
        with_room = [worker for worker in open_ if self._has_room(worker, demand, now)]
        if not with_room:
            return None
        seat.sit(self._choose_target(demand, with_room, now))
        return seat

    def other_target(self, seat: Seat) -> Worker:
        """A target for a generation that has lost its own, or that goes: one with room where there
        is one, but any rather than none. Raises Unavailable."""
        now = self.now()
        demand = seat.demand
        staying = [w for w in self._registry.targets_of(demand.model) if not w.leaving]
        # One that discovery calls unready is better than none at all.
        choices = [worker for worker in staying if worker.takes_sessions] or staying
        if not choices:
            raise Unavailable(f"no target of {demand.model.name} is there; retry later")
        with_room = [worker for worker in choices if self._has_room(worker, demand, now)]
        if seat.target is not None:
            self.counters["targets_changed"] += 1
        return self._choose_target(demand, with_room or choices, now)

    def has_other(self, seat: Seat) -> bool:
        """Whether a generation could go on at another target."""
        return any(
            worker is not seat.target and worker.takes_sessions
            for worker in self._registry.targets_of(seat.demand.model)
        )

    def choose_draft(self, seat: Seat, avoid: Iterable[int]) -> Worker | None:
        """The draft with the least load, of the target's zone if it can be, like the one that the
        generation began with."""
        now, avoided = self.now(), frozenset(avoid)
        workers = [
            worker
            for worker in self._registry.drafts_of(seat.demand.model)
            if worker.takes_sessions
            and worker.incarnation not in avoided
            and _is_alike(worker.link.info, seat.draft_info)
        ]
        if not workers:
            return None
        zone = seat.target.zone if seat.target is not None else self._room.zone
        usual = self._registry.drafts.usual_pass_s(now)
        candidates = [
            Candidate(
                key=index,
                load=relative_load(worker, usual, now) - (worker is seat.draft),
                near=not zone or worker.zone == zone,
            )
            for index, worker in enumerate(workers)
        ]
        return workers[choose(candidates).key]

    def has_too_many(self, seat: Seat, draft: Worker) -> bool:
        """Whether a draft has so much more to do than another one that changing pays."""
        now = self.now()
        usual = self._registry.drafts.usual_pass_s(now)
        own = relative_load(draft, usual, now)
        others = [
            relative_load(worker, usual, now)
            for worker in self._registry.drafts_of(seat.demand.model)
            if worker is not draft and worker.takes_sessions
        ]
        least = min(others, default=own)
        return own > _MOVE_FACTOR * least + _MOVE_SLACK

    def remember(self, seat: Seat, *, keep: bool) -> None:
        """Where a session was that has ended."""
        session_id, target = seat.demand.session_id, seat.target
        self._places.pop(session_id, None)
        if keep and target is not None and target.incarnation:
            self._places[session_id] = target.incarnation
            while len(self._places) > _MAX_PLACES:
                self._places.popitem(last=False)

    def been_at(self, session_id: str, address: str) -> None:
        """Another orchestrator had the session at this target, where its KV is."""
        for worker in self._registry.targets.workers:
            if worker.address == address and worker.incarnation:
                self._places[session_id] = worker.incarnation

    def left(self, worker: Worker | None) -> None:
        """A generation is no longer there."""
        if worker is None:
            return
        if not worker.sessions and not worker.is_named:
            self._registry.targets.let_go()
            self._registry.drafts.let_go()
        self._on_free()

    def _has_room(self, worker: Worker, demand: Demand, now: float) -> bool:
        """Whether one more generation finds its speed there and takes no other's."""
        if worker.queue_s(now) > max(_QUEUE_S, _QUEUE_PASSES * worker.pass_s(now)):
            return False
        here = worker.sessions_of_all(now)
        if not here:
            return True  # What is too long for it is the target's to say.
        info = worker.link.info
        most = self._room.max_sessions or (info.max_rows if info is not None else 0)
        kv_tokens = worker.kv_tokens * self._room.kv_overcommit
        if most and (here >= most or self._has_its_part(worker, most, now)):
            return False
        return not kv_tokens or worker.tokens_of_all(now) + demand.tokens <= kv_tokens

    def _has_its_part(self, worker: Worker, most: int, now: float) -> bool:
        """Where other orchestrators have requests waiting too, none takes more than its part."""
        others = worker.others
        if now >= others.until or not others.waiting:
            return False
        return worker.sessions >= -(-most // (others.waiting + 1))

    def _choose_target(self, demand: Demand, workers: list[Worker], now: float) -> Worker:
        """By prefix and load; a kept session's own target, if it is among them."""
        self._num_chosen += 1
        place = self._places.get(demand.session_id)
        for worker in workers:
            if worker.incarnation == place:
                self.counters["session"] += 1
                return worker
        cached = self._prefixes.cached(demand.blocks)
        held = demand.holders
        usual = self._registry.targets.usual_pass_s(now)
        zone = self._room.zone
        candidates = [
            Candidate(
                key=worker.incarnation,
                load=relative_load(worker, usual, now),
                cached=max(cached.get(worker.incarnation, 0), held.get(worker.incarnation, 0)),
                near=not zone or worker.zone == zone,
            )
            for worker in workers
        ]
        most_cached = max(candidate.cached for candidate in candidates)
        chosen = choose(candidates, first_unseen(demand.blocks, most_cached))
        self.counters[_chosen_for(chosen.cached, cached.get(chosen.key, 0))] += 1
        self._prefixes.add(demand.blocks, chosen.key)
        if self._num_chosen % _PRUNE_EVERY == 0:
            self._prefixes.retain(worker.incarnation for worker in self._registry.targets.workers)
        return next(worker for worker in workers if worker.incarnation == chosen.key)


def _chosen_for(cached: int, sent: int) -> str:
    """Of a target with so many cached blocks, as many of which this orchestrator sent there."""
    if not cached:
        return "load"
    return "index" if cached > sent else "prefix"


def _is_alike(info: worker_pb2.InfoResponse | None, before: worker_pb2.InfoResponse | None) -> bool:
    """Whether a session's rounds go on with this draft: the same model, able to do the same."""
    if before is None or info is None:
        return info is not None
    return info.model_fingerprint == before.model_fingerprint and set(info.capabilities) >= set(
        before.capabilities
    )
