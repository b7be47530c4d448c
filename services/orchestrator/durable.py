"""The store's side of one generation: begun or taken up, committed, ended, let go.

What happens while the store is away is the generation's policy (`Durability`): under `require`
nothing counts that is not stored, and an error ends the generation; under `best-effort` it goes on
without, and the store catches up when it is back.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence

from outrider.errors import Cancelled, Fenced, NotFound, OutriderError, Unavailable
from outrider.token_log import TokenLog
from outrider.types import Durability, Fence
from services.orchestrator.lease import Lease
from services.orchestrator.requests import GenerationPlan
from services.orchestrator.stopping import Released
from services.orchestrator.store import SessionStore
from services.orchestrator.store_commit import FOR_EVER, CommitQueue, OnCommit
from services.orchestrator.store_values import GenerationRecord
from services.orchestrator.totals import Totals

logger = logging.getLogger(__name__)

_LATE_S = 2.0
"""Seconds for one more try to store the end of what was told without the store."""


class DurableGeneration:
    """`begin` or `take_up` first; then what comes out is committed; `let_go` in the end."""

    def __init__(
        self,
        plan: GenerationPlan,
        store: SessionStore,
        fence: Fence,
        *,
        tenant: str,
        deadline: float,
        lease_s: float,
        retry_s: float,
        wait_s: float,
        on_commit: OnCommit | None = None,
    ) -> None:
        """`deadline` is on the monotonic clock. A commit is repeated for `retry_s` under `require`;
        under `best-effort` a chunk waits `wait_s` for a store that has kept up so far."""
        self._plan = plan
        self._store = store
        self._fence = fence
        self._tenant = tenant
        self._deadline = deadline
        self._retry_s = retry_s
        self._wait_s = wait_s
        self._on_commit = on_commit
        self._strict = plan.durability is Durability.REQUIRE
        self._lease = Lease(lease_s)
        self._commits: CommitQueue | None = None
        self._told_len = plan.prompt_len
        self._finished: tuple[Released, Totals] | None = None
        """What it ended with, once that may be told."""
        self._is_stored = False
        """And in the store."""

    async def begin(self, record: GenerationRecord, log: TokenLog, notes_width: int) -> None:
        """Have the prompt, which `log` ends with, and the record stored."""
        prefix_hash = log.prefix_hash(record.prompt_end)
        await self._store.begin(
            self._fence,
            from_len=record.start,
            from_hash=log.prefix_hash(record.start),
            token_ids=self._plan.prompt_ids,
            new_hash=prefix_hash,
            generation=record,
            notes_width=notes_width,
            time_left_s=self._deadline - time.monotonic(),
        )
        self._queue_from(record.prompt_end, prefix_hash)

    def take_up(self, durable_len: int, prefix_hash: int) -> None:
        """The store has so much of the log already."""
        self._queue_from(durable_len, prefix_hash)

    def _queue_from(self, durable_len: int, prefix_hash: int) -> None:
        self._told_len = durable_len
        self._commits = CommitQueue(
            self._store,
            self._fence,
            durable_len=durable_len,
            prefix_hash=prefix_hash,
            retry_for_s=self._retry_s if self._strict else FOR_EVER,
            lease=self._lease,
            on_commit=self._on_commit,
        )

    async def commit(self, token_ids: Sequence[int], notes: bytes, totals: Totals) -> bool:
        """Have tokens stored; whether they, and all before them, are, which `best-effort` does not
        insist on."""
        assert self._commits is not None
        self._told_len += len(token_ids)
        if self._strict:
            await self._commits.store(token_ids, notes, totals.to_json())
            return True
        if not self._commits.error:
            self._commits.append(token_ids, notes, totals.to_json())
        durable = await self._commits.soon_durable(self._told_len, self._wait_s)
        if not durable:
            self._store.tally.sent_undurable += len(token_ids)
        return durable

    async def finish(self, released: Released, totals: Totals, *, durable: bool) -> bool:
        """Record how the generation ended, with its last piece; whether the store has that. With
        `durable` it has all tokens."""
        self._finished = released, totals
        try:
            if durable:
                await self._store_finish()
        except OutriderError as error:
            if self._strict or isinstance(error, Fenced):
                self._finished = None
                raise
        return self._is_stored

    async def _store_finish(self) -> None:
        assert self._finished is not None
        released, totals = self._finished
        await self._store.finish(
            self._fence,
            finish_reason=released.finish_reason,
            keep=self._plan.keep,
            matched_stop=released.matched_stop,
            cut_text=released.cut_text,
            progress=totals.to_json(),
        )
        self._is_stored = True

    async def keep_lease(self, *, at_once: bool) -> OutriderError:
        """Renew the lease until it is lost, and why it is; `best-effort` loses it to another owner
        only. `at_once`: the session has just been taken, let its index know."""
        lives_s = self._store.life_s(kept=self._plan.stays)
        while True:
            try:
                if not at_once:
                    await self._lease.renew(self._store, self._fence)
                at_once = False
                index = self._store.index
                await index.touch(self._tenant, self._plan.session_id, ttl_s=lives_s)
            except Fenced as error:
                return error
            except OutriderError as error:
                is_lost = isinstance(error, NotFound) or self._lease.left_s <= 0
                if is_lost and self._strict:
                    return error

    async def explained(self, error: OutriderError) -> OutriderError:
        """The cause: a worker drops what a session's former owner asks for without knowing why."""
        if isinstance(error, Fenced | Cancelled):
            try:
                await self._store.renew(self._fence)
            except (Fenced, NotFound) as cause:
                return cause
            except OutriderError:
                pass
        return error

    async def let_go(self, ended_by: OutriderError | None) -> None:
        """The session without an owner: kept, waiting to be resumed, or gone. Whoever has taken it
        meanwhile sees nothing of this."""
        if self._finished is not None and not self._is_stored:
            await self._finish_late()
        if self._commits is not None:
            await self._commits.close()  # Its error stays what it was.
        with contextlib.suppress(OutriderError):
            lives_s = await self._leave(ended_by)
            index, session_id = self._store.index, self._plan.session_id
            if lives_s:
                await index.touch(self._tenant, session_id, ttl_s=lives_s)
            else:
                await index.remove(self._tenant, session_id)

    async def _leave(self, ended_by: OutriderError | None) -> float:
        """How long the session is alive after this."""
        store, plan = self._store, self._plan
        if self._finished is not None and self._is_forgotten:
            await store.delete(self._fence)  # Of its keys some may be left, of use to nobody.
            return 0.0
        if self._finished is not None:
            return store.kept_s if plan.keep else 0.0
        if self._may_be_resumed(ended_by):
            await store.detach(self._fence, keep=plan.stays)
            return store.kept_s if plan.stays else store.resume_s
        if plan.stays:
            # It was cut off, and stays as far as it is durable.
            await store.finish(self._fence, finish_reason=None, keep=True)
            return store.kept_s
        await store.delete(self._fence)
        return 0.0

    @property
    def _is_forgotten(self) -> bool:
        """Told without the store, which lacks a key of the session."""
        is_gone = self._commits is not None and isinstance(self._commits.error, NotFound)
        return is_gone and not self._is_stored

    def _may_be_resumed(self, ended_by: OutriderError | None) -> bool:
        """Its client may come back: it or its connection is away, or what failed may be mended."""
        begun = self._commits is not None
        passing = ended_by is None or isinstance(ended_by, Unavailable | Cancelled)
        return self._plan.resumable and begun and passing and time.monotonic() < self._deadline

    async def _finish_late(self) -> None:
        """The client has all of it, the store has not: one more try, or the log stays cut short."""
        with contextlib.suppress(OutriderError, TimeoutError):
            async with asyncio.timeout(_LATE_S):
                if self._commits is not None:
                    await self._commits.drain()
                await self._store_finish()
        if not self._is_stored:
            logger.warning(
                "the session store lacks the end of a generation that was told in full",
                extra={"session_id": self._plan.session_id, "request_id": self._plan.request_id},
            )
