"""Where a generation runs: its seat, a place at one target and at one draft."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.v1 import worker_pb2
from services.orchestrator.models import ServedModel
from services.orchestrator.workers import Worker

if TYPE_CHECKING:
    from services.orchestrator.seating import Seating

logger = logging.getLogger(__name__)

_MAX_FAILURES = 3
"""Rounds in a row that a draft failed in before its session looks for another one."""
_AVOID_S = 10.0
_MAX_AVOID_S = 600.0
_MAX_AVOIDED = 64
_COMPARE_S = 1.0
"""How often a session asks whether its draft has too many."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a generation needs of a target.

    `blocks` are the hashes of its prompt's blocks, `tokens` is the length that it may come to.
    `holders` is what the KV index knows: how many of the blocks a target holds, by incarnation.
    """

    model: ServedModel
    session_id: str
    tokens: int
    blocks: tuple[int, ...] = ()
    holders: Mapping[int, int] = field(default_factory=dict)


class Seat:
    """The places of one generation; made by `Seating`, given back by `leave`."""

    def __init__(self, seating: "Seating", demand: Demand) -> None:
        self.demand = demand
        self.target: Worker | None = None
        self.draft: Worker | None = None
        self.draft_info: worker_pb2.InfoResponse | None = None
        """What the first draft said of itself; those that follow must be like it."""
        self._seating = seating
        self._left = False
        self._failures = 0
        self._avoided: dict[int, tuple[float, float]] = {}
        """Drafts that failed, by incarnation: until when, and for how long this time."""
        self._compared = 0.0

    # --- the target ---------------------------------------------------------------------------

    def find_target(self) -> Worker:
        """A target to go on at, or to begin: the last one where it is there to stay, else another.
        Raises Unavailable."""
        target = self.target
        if target is None or not target.usable or target.leaving:
            target = self._seating.other_target(self)
            self.sit(target)
        return target

    def target_should_change(self) -> bool:
        """The target is about to go, and there is another one."""
        target = self.target
        return target is not None and target.leaving and self._seating.has_other(self)

    def sit(self, target: Worker | None) -> None:
        """Count this generation there, and no longer where it was."""
        for worker, sign in ((self.target, -1), (target, 1)):
            if worker is not None:
                worker.sessions += sign
                worker.tokens += sign * self.demand.tokens
        before, self.target = self.target, target
        self._seating.left(before)

    # --- the draft ----------------------------------------------------------------------------

    def take_draft(self) -> Worker | None:
        """A draft to begin with, None where there is none."""
        self._sit_by(self._seating.choose_draft(self, ()))
        if self.draft is not None:
            self.draft_info = self.draft.link.info
        return self.draft

    def draft_now(self) -> Worker | None:
        """The draft to ask in the next round: another one than before where that one is away, about
        to go, failing, or has far more to do."""
        draft = self.draft
        if draft is None or not self._draft_should_change(draft):
            return draft
        other = self._seating.choose_draft(self, self._avoid(draft))
        if other is not None and other is not draft:
            logger.debug("another draft", extra={"from": draft.address, "to": other.address})
            self._seating.counters["drafts_changed"] += 1
            self._sit_by(other)
        self._failures = 0
        return self.draft

    def drafted(self, *, failed: bool) -> None:
        """How a round with the draft went."""
        self._failures = self._failures + 1 if failed else 0

    def _draft_should_change(self, draft: Worker) -> bool:
        if self._failures >= _MAX_FAILURES or not draft.usable or draft.leaving:
            return True
        now = self._seating.now()
        if now < self._compared + _COMPARE_S:
            return False
        self._compared = now
        return self._seating.has_too_many(self, draft)

    def _avoid(self, draft: Worker) -> tuple[int, ...]:
        """Drafts not to be asked now; the one that has failed is one of them, longer each time."""
        now = self._seating.now()
        if self._failures >= _MAX_FAILURES:
            _, before = self._avoided.get(draft.incarnation, (0.0, 0.0))
            seconds = min(before * 2, _MAX_AVOID_S) or _AVOID_S
            self._avoided[draft.incarnation] = now + seconds, seconds
            while len(self._avoided) > _MAX_AVOIDED:
                del self._avoided[next(iter(self._avoided))]
        return tuple(key for key, (until, _) in self._avoided.items() if until > now)

    def _sit_by(self, draft: Worker | None) -> None:
        for worker, sign in ((self.draft, -1), (draft, 1)):
            if worker is not None:
                worker.sessions += sign
        before, self.draft = self.draft, draft
        self._seating.left(before)

    # --- the end ------------------------------------------------------------------------------

    def leave(self, *, keep: bool = False) -> None:
        """The generation is over; with `keep` its session may come back for its KV."""
        if self._left:
            return
        self._left = True
        self._seating.remember(self, keep=keep)
        self._sit_by(None)
        self.sit(None)
