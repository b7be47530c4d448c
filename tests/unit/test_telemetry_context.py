"""Trace context: what is taken for one, which rounds are told, and that logs name it."""

import asyncio
import json
import logging

import pytest

from outrider.telemetry.context import TraceContext, current_trace, enter_trace, within_trace
from outrider.telemetry.logs import JsonFormatter

GIVEN = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
TRACE = TraceContext(0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7, sampled=True)


def test_what_is_parsed_is_written_again():
    assert TraceContext.parse(GIVEN) == TRACE
    assert str(TRACE) == GIVEN
    unsampled = TraceContext.parse(GIVEN[:-1] + "0")
    assert unsampled is not None and not unsampled.sampled
    assert TraceContext.parse(GIVEN[:-1] + "3") == TRACE, "other flags do not matter"
    assert TraceContext.parse("cc" + GIVEN[2:] + "-what") == TRACE, "a later version may say more"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        GIVEN.upper(),
        GIVEN + "-more",
        "ff" + GIVEN[2:],
        "00-" + 32 * "0" + "-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-" + 16 * "0" + "-01",
        GIVEN[:-1],
        GIVEN + "\n",
        "cc" + GIVEN[2:] + "-" + 100 * "x",
    ],
)
def test_what_is_no_traceparent_is_no_trace(text):
    assert TraceContext.parse(text) is None


@pytest.mark.parametrize("every", [1, 3, 16])
def test_the_first_two_rounds_and_one_place_in_so_many_are_told(every):
    told = [n for n in range(100, 100 + 10 * every) if TRACE.tells(n, 100, every)]
    assert told[0] == 100
    assert 101 in told
    assert len([n for n in told if n > 101]) in (9, 10) if every > 2 else len(told) == 10 * every
    assert not any(TRACE.tells(n, 100, 0) for n in range(200))


def test_all_tiers_work_out_the_same_spans():
    """A worker knows no more than the header's text and the base length."""
    elsewhere = TraceContext.parse(str(TRACE))
    assert elsewhere is not None
    assert [elsewhere.round_id(n) for n in range(50)] == [TRACE.round_id(n) for n in range(50)]
    below = elsewhere.below()
    assert (below.trace_id, below.sampled) == (TRACE.trace_id, True)
    ids = {TRACE.span_id, below.span_id}
    ids |= {context.round_id(n) for n in range(500) for context in (TRACE, below)}
    assert len(ids) == 2 + 2 * 500 and all(0 < span_id < 1 << 64 for span_id in ids)


def logged(**extra):
    record = logging.makeLogRecord({"name": "outrider", "msg": "said", **extra})
    return json.loads(JsonFormatter().format(record))


async def test_logs_name_the_trace_of_their_task_and_of_no_other():
    async def request(trace):
        enter_trace(trace)
        await asyncio.sleep(0)
        found = logged()
        inner = await asyncio.create_task(asyncio.to_thread(logged))
        assert inner.get("trace_id") == found.get("trace_id")
        return found.get("trace_id"), found.get("span_id")

    other = TraceContext(7, 9)
    assert await asyncio.gather(request(TRACE), request(None), request(other)) == [
        ("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"),
        (None, None),
        ("0" * 31 + "7", "0" * 15 + "9"),
    ]
    assert current_trace() is None and "trace_id" not in logged()


def test_an_entry_has_its_trace_for_as_long_as_it_is_handled():
    with within_trace(GIVEN):
        assert logged()["trace_id"] == GIVEN[3:35]
        with within_trace(""):
            assert "trace_id" not in logged()
    assert current_trace() is None
