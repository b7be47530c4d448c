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

    async def run(self, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call it on a thread; what it raises is raised here."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, functools.partial(work, *args, **kwargs))
