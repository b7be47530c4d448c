"""The owner of one session's durability: tokens go in at once, commits follow behind.

The next round never waits for a commit; the client's chunk does (docs/design.md §2.9).
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Sequence

from outrider.errors import (
    Cancelled,
    Fenced,
    InternalError,
    OutriderError,
    ResourceExhausted,
    Unavailable,
)
from outrider.types import Fence, chain_hash
from services.orchestrator.lease import Lease
from services.orchestrator.store import SessionStore

OnCommit = Callable[[int, int, float], None]
"""Length of the log before a commit, tokens of it, when it started (monotonic clock)."""

_FIRST_BACKOFF_S = 0.02
_MAX_BACKOFF_S = 1.0
FOR_EVER = float("inf")


class CommitQueue:
    """Commits what is appended, one commit in flight; what comes meanwhile goes with the next.

    A commit that Redis does not answer is repeated (with what has come since) until `retry_for_s`
    after its first failure, or until the lease has run out. Then, and at once where the session is
    fenced or gone, the queue ends: `error` is set, and `append`, `wait_durable` and `drain` raise
    it.

    Its task lives only while there is something to commit: a queue that is drained holds nothing.
    One that may still be committing is ended by `close`. A queue is used through `append`, or
    through `store`, which needs no task.
    """

    def __init__(
        self,
        store: SessionStore,
        fence: Fence,
        *,
        durable_len: int,
        prefix_hash: int,
        retry_for_s: float = 10.0,
        lease: Lease | None = None,
        on_commit: OnCommit | None = None,
    ) -> None:
        """`retry_for_s` FOR_EVER outlasts the lease as well. `on_commit` is told of each commit
        that the store took."""
        self.durable_len = durable_len
        self.error: OutriderError | None = None
        self.commits = 0  # sent, repeated ones included
        self.lagging = False
        """The last commit failed, or took longer than somebody had patience for."""
        self._store = store
        self._fence = fence
        self._prefix_hash = prefix_hash
        self._retry_for_s = retry_for_s
        self._lease = lease
        self._on_commit = on_commit
        self._pending: list[int] = []
        self._notes = bytearray()  # as many bytes for each pending token
        self._progress = ""
        self._task: asyncio.Task[None] | None = None
        self._commits_now = False
        """In the task, or in that of whoever called `store`."""
        self._changed = asyncio.Event()

    @property
    def verified_len(self) -> int:
        """Length of the log with what is not durable yet."""
        return self.durable_len + len(self._pending)

    def append(self, token_ids: Sequence[int], notes: bytes = b"", progress: str = "") -> int:
        """Take tokens that follow `verified_len`; the new one. Raises `error` once it is set.

        `notes` are on these tokens, equally long ones on each; `progress` is as of the last one.
        """
        self._take(token_ids, notes, progress)
        if self._pending and not self._commits_now:
            self._commits_now = True
            self._task = asyncio.create_task(self._run(), name="commit-queue")
        return self.verified_len

    async def store(self, token_ids: Sequence[int], notes: bytes = b"", progress: str = "") -> None:
        """Take tokens as `append` does, and wait until Redis has them: without a task, which costs
        as much as the rest of a commit."""
        self._take(token_ids, notes, progress)
        length = self.verified_len
        if self._pending and not self._commits_now:
            self._commits_now = True
            await self._run()
        await self.wait_durable(length)

    def _take(self, token_ids: Sequence[int], notes: bytes, progress: str) -> None:
        if self.error:
            raise self.error
        self._pending.extend(token_ids)
        self._notes += notes
        self._progress = progress

    async def wait_durable(self, length: int) -> None:
        """Until Redis has the first `length` tokens, or `error`."""
        if length > self.verified_len:
            raise InternalError(f"nothing was appended up to {length}, only to {self.verified_len}")
        while self.durable_len < length:
            if self.error:
                raise self.error
            await self._changed.wait()

    async def soon_durable(self, length: int, patience_s: float) -> bool:
        """Whether Redis has the first `length` tokens, or gets them at once. It is waited for only
        while it keeps up. Raises Fenced: another one goes on with the session."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while self.durable_len < length and not self.lagging and not self.error:
                    await self._changed.wait()
        if isinstance(self.error, Fenced):
            raise self.error
        if self.durable_len >= length:
            return True
        self.lagging = True
        return False

    async def drain(self) -> None:
        """Until Redis has all that was appended, or `error`."""
        while self._pending:
            await self.wait_durable(self.verified_len)

    async def close(self) -> None:
        """Stop, and forget what is not durable (nothing after `drain`)."""
        self.error = self.error or Cancelled("the commit queue is closed")
        self._announce()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            while self._pending:
                await self._commit_all()
        except OutriderError as error:
            self.error = error
        except asyncio.CancelledError:
            self.error = self.error or Cancelled("the commit queue was cancelled")
            raise
        except Exception as error:  # must reach those who wait
            self.error = InternalError(f"commit failed: {type(error).__name__}: {error}")
            self.error.__cause__ = error
        finally:
            self._task, self._commits_now = None, False
            self._announce()

    async def _commit_all(self) -> None:
        """Commit what is pending, repeatedly where the answer is lost."""
        now = asyncio.get_running_loop().time
        give_up: float | None = None
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                return await self._commit_once(tuple(self._pending))
            except (Unavailable, ResourceExhausted) as error:
                self.lagging = True
                self._announce()
                give_up = give_up or now() + self._retry_for_s
                pause_s = backoff_s * random.uniform(0.5, 1.0)
                if now() + pause_s >= give_up:
                    raise
                self._check_lease(error)
                self._store.tally.commit_retries += 1
            await asyncio.sleep(pause_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    def _check_lease(self, error: OutriderError) -> None:
        if self._lease and self._lease.left_s <= 0 and self._retry_for_s != FOR_EVER:
            raise self._lease.ran_out(error) from error

    async def _commit_once(self, token_ids: tuple[int, ...]) -> None:
        started, from_len = time.monotonic(), self.durable_len
        new_hash = chain_hash(self._prefix_hash, token_ids)
        noted = len(self._notes)
        self.commits += 1
        asked_at = asyncio.get_running_loop().time()
        await self._store.commit(
            self._fence,
            from_len=from_len,
            from_hash=self._prefix_hash,
            token_ids=token_ids,
            new_hash=new_hash,
            notes=bytes(self._notes),
            progress=self._progress,
        )
        if self._lease:
            self._lease.confirm(asked_at)
        self._prefix_hash = new_hash
        self.durable_len += len(token_ids)
        del self._pending[: len(token_ids)]
        del self._notes[:noted]
        self.lagging = False
        self._announce()
        if self._on_commit is not None:
            self._on_commit(from_len, len(token_ids), started)

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
