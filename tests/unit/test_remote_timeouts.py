"""Timeouts share timers, and still end when they should."""

import asyncio
import time

import pytest

from outrider.remote.timeouts import Timeouts


async def test_a_timeout_ends_in_its_time_and_not_before():
    timeouts, ended = Timeouts(), {}
    started = time.monotonic()
    for seconds in (0.0, 0.03, 0.1, 0.2):
        timeouts.start(seconds, lambda s=seconds: ended.setdefault(s, time.monotonic() - started))
    await asyncio.sleep(0.4)
    assert list(ended) == [0.0, 0.03, 0.1, 0.2]
    assert all(took >= seconds for seconds, took in ended.items())
    assert ended[0.2] < 0.3


async def test_what_is_cancelled_does_not_end_whoever_cancels_it():
    timeouts, ended = Timeouts(), []
    first = timeouts.start(0.02, lambda: ended.append("first"))
    second = timeouts.start(0.05, lambda: ended.append("second"))
    # Those two end together: the one that is called first cancels the other.
    pair = [
        timeouts.start(0.05, lambda n=n: (ended.append(n), pair[1 - n].cancel())) for n in (0, 1)
    ]
    first.cancel()
    await asyncio.sleep(0.15)
    assert "first" not in ended and "second" in ended
    assert len(ended) == 2
    second.cancel()  # Too late, and no error.


async def test_one_that_fails_holds_up_no_other(caplog: pytest.LogCaptureFixture):
    timeouts, ended = Timeouts(), []

    def fail() -> None:
        raise RuntimeError("nothing works")

    timeouts.start(0.02, fail)
    timeouts.start(0.02, lambda: ended.append(1))
    timeouts.start(0.02, fail)
    await asyncio.sleep(0.1)
    assert ended == [1] and "a timeout failed" in caplog.text


async def test_many_share_few_timers():
    """A round's timeout is a second or a minute, and rounds are thousands a second."""
    timeouts = Timeouts()
    for _ in range(5000):
        timeouts.start(60.0, lambda: None).cancel()
    assert len(timeouts._slots) <= 2
