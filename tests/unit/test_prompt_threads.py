"""Prompts that come all at once: only those are worked on that are not refused meanwhile."""

import asyncio
import threading
import time

import pytest

from outrider.errors import ResourceExhausted
from services.orchestrator.prompt_threads import PromptThreads


async def test_of_a_burst_no_more_is_worked_on_than_is_taken() -> None:
    threads, taken = PromptThreads(), 0
    worked: list[int] = []

    def first() -> None:
        if taken >= 6:
            raise ResourceExhausted("full")

    async def one(number: int) -> None:
        nonlocal taken
        await threads.run(worked.append, number, first=first)
        taken += 1

    ended = await asyncio.gather(*map(one, range(100)), return_exceptions=True)
    refused = [error for error in ended if isinstance(error, ResourceExhausted)]
    assert 6 <= len(worked) <= 9  # Up to four at a time do not know of each other.
    assert len(refused) == 100 - len(worked)


async def test_others_go_on_while_prompts_are_worked_on() -> None:
    threads, at_once = PromptThreads(), 0
    most, lock = 0, threading.Lock()

    def work() -> str:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        time.sleep(0.02)
        with lock:
            at_once -= 1
        return "done"

    works = [asyncio.create_task(threads.run(work)) for _ in range(12)]
    turns = 0
    while not all(work.done() for work in works):
        await asyncio.sleep(0.001)
        turns += 1
    assert [work.result() for work in works] == ["done"] * 12
    assert 1 < most <= 4 and turns > 5


async def test_an_error_of_the_work_is_raised_and_its_turn_is_over() -> None:
    threads = PromptThreads()
    for _ in range(10):
        with pytest.raises(ZeroDivisionError):
            await threads.run(lambda: 1 // 0)
