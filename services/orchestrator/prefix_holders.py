"""Which targets hold a prompt's prefix, of all that any orchestrator ever sent there: asked of the
index that workers keep in the KV store (outrider.kv_store.index).

A hint for placement, which must be in nobody's way: an answer that does not come within some
milliseconds is that nothing is known. It may still come, over a connection that has just been made
say; until then nobody else asks, and a store that gives none is left alone for a while.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from outrider.kv_store.index import index_salt
from outrider.token_log import TokenLog
from services.orchestrator.models import ServedModel
from services.orchestrator.placement import BLOCK_TOKENS
from services.orchestrator.prompt_threads import PromptThreads

MAX_TOKENS = 8192
"""Of a prompt that are looked at: hashing them takes longer than asking."""
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0

ANSWERS = ("known", "unknown", "late", "failed")
"""Of the index: somebody holds something of the prompt, or nobody; it came too late, or not."""
NOBODY: Mapping[int, int] = {}


class Index(Protocol):
    """`IndexReader`, as far as it is needed."""

    failures: int

    async def holders(self, salt: str, hashes: Sequence[int]) -> dict[int, int]: ...

    async def close(self) -> None: ...


class PrefixHolders:
    """Asks for each prompt once, and waits `wait_s` for it. `counters` tells how often each of
    ANSWERS was given. In the end `close`."""

    def __init__(
        self,
        index: Index,
        threads: PromptThreads,
        *,
        wait_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._index = index
        self._wait_s = wait_s
        self._asking: set[asyncio.Task[dict[int, int] | None]] = set()
        self._late = False
        """An answer is out that nobody waits for any more."""
        self._threads = threads
        self._now = now
        self._pause_s = _FIRST_PAUSE_S
        self._again_at = 0.0

    async def of(
        self, model: ServedModel, tenant: str, log: TokenLog, prompt_ids: Sequence[int]
    ) -> Mapping[int, int]:
        """For each target, by incarnation, how many blocks of BLOCK_TOKENS it holds of log and
        prompt together; raises nothing."""
        size = model.info.kv_block_tokens
        most = min(len(log) + len(prompt_ids), MAX_TOKENS)
        if not size or most < size or self._late or self._now() < self._again_at:
            return NOBODY
        hashes = await self._threads.run(_block_hashes, log, prompt_ids, size, most)
        salt = index_salt(model.info.model_fingerprint, "", tenant)
        task = asyncio.create_task(self._ask(salt, hashes), name="prefix-holders")
        self._asking.add(task)
        task.add_done_callback(self._answered)
        done, _ = await asyncio.wait({task}, timeout=self._wait_s)
        if not done:
            self._late = True
            self.counters["late"] += 1
            return NOBODY
        found = task.result()
        if found is None:
            self.counters["failed"] += 1
            return NOBODY
        self.counters["known" if found else "unknown"] += 1
        return {target: blocks * size // BLOCK_TOKENS for target, blocks in found.items()}

    async def close(self) -> None:
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)
        await self._index.close()

    async def _ask(self, salt: str, hashes: Sequence[int]) -> dict[int, int] | None:
        """None: the index did not answer."""
        failures = self._index.failures
        found = await self._index.holders(salt, hashes)
        if self._index.failures > failures:
            self._again_at = self._now() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            return None
        self._pause_s = _FIRST_PAUSE_S
        return found

    def _answered(self, task: "asyncio.Task[dict[int, int] | None]") -> None:
        self._asking.discard(task)
        self._late = self._late and bool(self._asking)


def _block_hashes(
    log: TokenLog, prompt_ids: Sequence[int], block_tokens: int, most: int
) -> Sequence[int]:
    """Of the first `most` tokens of log and prompt."""
    if most <= len(log):
        return log.block_hashes(block_tokens)[: most // block_tokens]
    whole = TokenLog()
    whole.take(log.tail(0))
    whole.append(prompt_ids[: most - len(log)])
    return whole.block_hashes(block_tokens)
