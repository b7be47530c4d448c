"""A session's draft: one at a time, and another one when it is gone, about to go, or keeps failing.

What a draft has of a session is a cache, and guesses change nothing that is said. So the next
round may simply ask another one.
"""

from collections.abc import Callable
from dataclasses import dataclass

from outrider.remote.outcomes import Chosen
from services.orchestrator.decoder import DirectDraft
from services.orchestrator.proposers import DraftModel, Wanted
from services.orchestrator.seats import Seat
from services.orchestrator.workers import Worker


@dataclass(frozen=True, slots=True)
class Drafting:
    """One draft for one session: to be asked from here, by the target unless `direct` is None."""

    model: DraftModel
    direct: DirectDraft | None


class SessionDraft:
    """The proposer of a session that has a draft; `make` readies a draft for it."""

    def __init__(self, seat: Seat, first: Worker, make: Callable[[Worker], Drafting]) -> None:
        self._seat = seat
        self._make = make
        self._worker = first
        self._drafting = make(first)

    async def propose(self, wanted: Wanted, deadline: float) -> Chosen:
        """Ask from here, for a target that does not."""
        proposed = await self._now().model.propose(wanted, deadline)
        if proposed.report.asked or proposed.report.failed:
            self._seat.drafted(failed=proposed.report.failed)
        return proposed

    def direct(self) -> DirectDraft | None:
        """The draft that the target is to ask in its next rounds."""
        return self._now().direct

    def close(self) -> None:
        self._drafting.model.close()

    def _now(self) -> Drafting:
        worker = self._seat.draft_now()
        if worker is not None and worker is not self._worker:
            self._drafting.model.close()
            self._worker, self._drafting = worker, self._make(worker)
        return self._drafting


class Whereabouts:
    """What a decoder asks between rounds: whether its workers are still the right ones."""

    def __init__(self, seat: Seat, draft: SessionDraft | None) -> None:
        self._seat = seat
        self._draft = draft

    def target_should_change(self) -> bool:
        return self._seat.target_should_change()

    def direct_draft(self) -> DirectDraft | None:
        return self._draft.direct() if self._draft is not None else None

    def drafted(self, *, failed: bool) -> None:
        self._seat.drafted(failed=failed)
