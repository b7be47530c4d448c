"""How long an owner may be sure of its session, on its own monotonic clock."""

import asyncio

from outrider.errors import Fenced, NotFound, OutriderError, Unavailable
from outrider.types import Fence
from services.orchestrator.store import SessionStore


class Lease:
    """The lease of one session. Whoever has written to the session since confirms it.

    It counts from when the store was asked, not from its answer: it never ends later here than
    there.
    """

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._until = asyncio.get_running_loop().time() + lease_s

    @property
    def left_s(self) -> float:
        """At most 0: the store may have given the session to somebody else."""
        return self._until - asyncio.get_running_loop().time()

    def confirm(self, asked_at: float) -> None:
        """The store has renewed it; it was asked at a time of the loop's clock."""
        self._until = max(self._until, asked_at + self.lease_s)

    async def renew(self, store: SessionStore, fence: Fence) -> None:
        """After a third of it has passed: for when no commit does, during a long prefill say.

        Raises Fenced and NotFound, Unavailable when it has run out. Until then a store that does
        not answer is asked again the next time.
        """
        await asyncio.sleep(self.lease_s / 3)
        asked_at = asyncio.get_running_loop().time()
        try:
            await store.renew(fence)
            self.confirm(asked_at)
        except (Fenced, NotFound):
            raise
        except OutriderError as error:
            if self.left_s <= 0:
                raise self.ran_out(error) from error

    def ran_out(self, error: OutriderError) -> Unavailable:
        return Unavailable(
            f"the lease of the session ran out: {self.lease_s:g} s without the session store "
            f"({error.message})"
        )
