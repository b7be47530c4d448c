"""Prompts tokenised on threads: a long one, or a template that takes its time, must not hold up the
streams of others."""

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

_PROMPTS_AT_ONCE = 4
"""Further ones wait."""

T = TypeVar("T")


class PromptThreads:
    """Threads for work on prompts."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_PROMPTS_AT_ONCE, thread_name_prefix="outrider-prompt")
        self._turns = asyncio.Semaphore(_PROMPTS_AT_ONCE)

    async def run(
        self,
        work: Callable[..., T],
        *args: Any,
        first: Callable[[], None] = lambda: None,
        **kwargs: Any,
    ) -> T:
        """Call it on a thread; what it raises is raised here. `first` is called when its turn is:
        of many that come at once most may be refused before any work goes into them."""
        async with self._turns:
            first()
            call = functools.partial(work, *args, **kwargs)
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)
