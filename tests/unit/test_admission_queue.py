"""Requests that wait for room: whose turn it is, who is refused, when, and with what word."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from seat_fakes import Clock

from outrider.errors import InvalidArgument, PermissionDenied, ResourceExhausted, Unavailable
from outrider.types import Priority
from services.orchestrator.admission import Admission, AdmissionLimits
from services.orchestrator.callers import CallerLimits, Callers
from services.orchestrator.seats import Demand

HIGH, NORMAL, LOW = Priority.HIGH, Priority.NORMAL, Priority.LOW
FAR = 1e9


class FakeSeats:
    """Room for so many tokens."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.there = True

    def serves(self, model: Any) -> bool:
        return self.there

    def try_seat(self, wanted: Demand) -> Any:
        if not self.there or wanted.tokens > self.room:
            return None
        self.room -= wanted.tokens

        def leave() -> None:
            self.room += wanted.tokens

        return SimpleNamespace(leave=leave)


class Desk:
    """An admission and its requests. Each holds its seat until it is told to end."""

    def __init__(
        self,
        room: int,
        *,
        caller_limits: tuple[str, ...] = (),
        now: Callable[[], float] = time.monotonic,
        **limits: Any,
    ) -> None:
        self.seats = FakeSeats(room)
        values = {"max_running": 100, "max_waiting": 10, "max_wait_s": 5.0, "target_wait_s": 0.05}
        self.admission = Admission(
            AdmissionLimits(**{**values, **limits}),
            Callers.parse(caller_limits),
            self.seats,
            now=now,
        )
        self.began: list[str] = []
        self.refused: dict[str, Exception] = {}
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(
        self,
        name: str,
        caller: str = "a",
        priority: Priority = NORMAL,
        tokens: int = 1,
        deadline: float = FAR,
        model: str = "m",
    ) -> None:
        wanted = Demand(SimpleNamespace(name=model), name, tokens)

        async def hold() -> None:
            try:
                self.admission.check(caller, priority, deadline)
                async with self.admission.seat(caller, priority, wanted, deadline):
                    self.began.append(name)
                    await self._ends[name].wait()
            except (ResourceExhausted, Unavailable, PermissionDenied) as error:
                self.refused[name] = error

        self._ends[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(hold())
        await settle()

    async def end(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()
            await settle()

    async def cancel(self, name: str) -> None:
        self._tasks[name].cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._tasks[name]
        await settle()

    async def close(self) -> None:
        for event in self._ends.values():
            event.set()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    @property
    def running(self) -> list[str]:
        return [name for name in self.began if not self._ends[name].is_set()]


async def settle() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def desk(room: int, **kind: Any):
    """Whatever happens at a desk, in the end all room is free again and nobody waits."""
    one = Desk(room, **kind)
    try:
        yield one
    finally:
        await one.close()
        assert one.seats.room == room
        assert one.admission.num_running == 0 and not one.admission._running
        assert one.admission.num_waiting("m") == 0


async def test_requests_wait_for_room_in_the_order_in_which_they_came():
    async with desk(2) as one:
        for name in ("1", "2", "3", "4"):
            await one.ask(name)
        assert one.began == ["1", "2"] and one.admission.num_waiting("m") == 2
        await one.end("2")
        assert one.began == ["1", "2", "3"]
        await one.end("1", "3")
        assert one.began == ["1", "2", "3", "4"]


async def test_room_that_comes_from_elsewhere_is_given_at_dispatch():
    async with desk(0) as one:
        await one.ask("1")
        assert one.began == []
        one.seats.room = 1
        one.admission.dispatch()
        await settle()
        assert one.began == ["1"]
        await one.end("1")
        one.seats.room = 0


async def test_higher_classes_go_first():
    async with desk(1) as one:
        await one.ask("running")
        for name, priority in (("low", LOW), ("normal", NORMAL), ("high", HIGH)):
            await one.ask(name, priority=priority)
        await one.end("running", "high", "normal")
        assert one.began == ["running", "high", "normal", "low"]


async def test_a_big_request_is_not_overtaken_by_small_ones_of_its_model():
    async with desk(4) as one:
        await one.ask("first", tokens=3)
        await one.ask("big", tokens=3)
        await one.ask("small", tokens=1)
        await one.ask("low", tokens=1, priority=LOW)
        assert one.began == ["first"], "there is room for the small ones, but it is not their turn"
        await one.ask("other", tokens=1, model="another")
        assert one.began == ["first", "other"], "another model's targets are others"
        await one.end("other", "first")
        assert one.began == ["first", "other", "big", "small"]


async def test_callers_get_equal_parts_however_much_they_send():
    async with desk(4, max_waiting=200) as one:
        for n in range(60):
            await one.ask(f"a{n}", caller="a")
        for n in range(20):
            await one.ask(f"b{n}", caller="b")
        assert one.began == ["a0", "a1", "a2", "a3"]
        for _ in range(30):
            await one.end(one.running[0])
        counts = Counter(name[0] for name in one.began[4:])
        assert abs(counts["a"] - counts["b"]) <= 4, counts
        assert Counter(name[0] for name in one.running) == {"a": 2, "b": 2}
        assert [n for n in one.began if n[0] == "b"] == [f"b{n}" for n in range(counts["b"])]


async def test_weights_set_the_parts():
    async with desk(8, max_waiting=200, caller_limits=("b:weight=3",)) as one:
        for n in range(40):
            await one.ask(f"a{n}", caller="a")
            await one.ask(f"b{n}", caller="b")
        for _ in range(40):
            await one.end(one.running[0])
        assert Counter(name[0] for name in one.running) == {"a": 2, "b": 6}


async def test_a_callers_own_limits_hold_and_hold_up_nobody_else():
    async with desk(10, caller_limits=("a:running=2:waiting=1", "*:running=5")) as one:
        for n in range(4):
            await one.ask(f"a{n}", caller="a")
        await one.ask("b", caller="b")
        assert one.began == ["a0", "a1", "b"]
        assert list(one.refused) == ["a3"]
        assert "this caller's" in str(one.refused["a3"])
        for n in range(6):
            await one.ask(f"c{n}", caller="c")
        assert len([n for n in one.began if n[0] == "c"]) == 5
        await one.end("a0")
        assert one.began[-1] == "a2"


async def test_a_class_that_is_not_the_callers_is_refused():
    async with desk(10, caller_limits=("a:priority=normal", "z:priority=low")) as one:
        await one.ask("1", caller="a", priority=HIGH)
        await one.ask("2", caller="z", priority=NORMAL)
        await one.ask("3", caller="a", priority=LOW)
        await one.ask("4", caller="b", priority=HIGH)
        assert one.began == ["3", "4"]
        for name in ("1", "2"):
            assert isinstance(one.refused[name], PermissionDenied)
            assert one.refused[name].field == "priority"


async def test_a_full_queue_refuses_at_once_and_says_when_to_retry():
    async with desk(1, max_waiting=2) as one:
        for n in range(5):
            await one.ask(f"n{n}")
        await one.ask("high", priority=HIGH)
        assert one.began == ["n0"] and list(one.refused) == ["n3", "n4"]
        assert one.admission.num_waiting("m") == 3, "each class has a queue of its own"
        for error in one.refused.values():
            assert isinstance(error, ResourceExhausted)
            assert 0.1 <= error.retry_after_s <= 60
    async with desk(1, max_waiting=0) as strict:
        await strict.ask("1")
        await strict.ask("2")
        assert strict.began == ["1"] and list(strict.refused) == ["2"]


async def test_a_caller_who_fills_the_queue_keeps_nobody_out():
    async with desk(1, max_waiting=4, caller_limits=("c:weight=2",)) as one:
        for n in range(6):
            await one.ask(f"a{n}", caller="a")
        assert list(one.refused) == ["a5"]
        for n in range(3):
            await one.ask(f"b{n}", caller="b")
        assert list(one.refused) == ["a5", "a4", "a3", "b2"], "the newest of who has the most"
        for n in range(4):
            await one.ask(f"c{n}", caller="c")
        assert [*one.refused][4:] == ["b1", "a2", "c2", "c3"]
        assert one.admission.counters["refused_full"] == 8
        for name in ("a0", "b0", "c0", "c1"):
            await one.end(name)
        assert one.began == ["a0", "b0", "c0", "c1", "a1"]


async def test_with_one_place_callers_take_turns():
    async with desk(1, max_waiting=100, caller_limits=("c:weight=2",)) as one:
        for n in range(12):
            await one.ask(f"a{n}", caller="a")
        for n in range(12):
            await one.ask(f"b{n}", caller="b")
            await one.ask(f"c{n}", caller="c")
        for _ in range(16):
            await one.end(one.running[0])
        assert Counter(name[0] for name in one.began[1:]) == {"a": 4, "b": 4, "c": 8}
        await one.ask("new", caller="d")
        for _ in range(4):
            await one.end(one.running[0])
        assert "new" in one.began, "who comes anew waits for no round that was before"
    assert not one.admission._finish


async def test_no_more_run_than_may_even_where_there_is_room():
    async with desk(100, max_running=3) as one:
        for n in range(5):
            await one.ask(f"{n}")
        assert len(one.began) == 3
        await one.end("1")
        assert len(one.began) == 4


async def test_a_request_that_waits_too_long_is_refused_before_its_deadline():
    loop = asyncio.get_running_loop()
    async with desk(1, max_wait_s=0.3) as one:
        await one.ask("running")
        await one.ask("patient")
        await one.ask("hurried", deadline=loop.time() + 0.05)
        await asyncio.sleep(0.049)
        assert list(one.refused) == ["hurried"], "just before its caller hangs up"
        await asyncio.sleep(0.27)
        assert list(one.refused) == ["hurried", "patient"]
        assert "no room" in str(one.refused["patient"])
        assert one.admission.counters["refused_late"] == 2


async def test_a_request_whose_turn_comes_too_late_is_refused_before_it_joins():
    clock = Clock()
    async with desk(1, max_wait_s=100.0, now=clock) as one:
        for number in range(8):  # Ten seconds each.
            await one.ask(f"{number}")
            clock.now += 10.0
            await one.end(f"{number}")
        await one.ask("runs")
        one.admission.check("a", NORMAL, clock.now + 5.0)  # Nobody waits: it may get a seat.
        await one.ask("waits", deadline=clock.now + 50.0)
        with pytest.raises(ResourceExhausted, match=r"turn would come in 20\.0 s") as late:
            one.admission.check("a", NORMAL, clock.now + 15.0)
        assert late.value.retry_after_s
        one.admission.check("b", NORMAL, clock.now + 25.0)


async def test_a_request_whose_turn_comes_too_late_is_refused_at_once():
    """Ten generations of a second have been seen, of which one runs at a time."""
    clock = Clock()
    async with desk(1, max_waiting=100, max_wait_s=4.5, now=clock) as one:
        for n in range(10):
            await one.ask(f"seen{n}")
            clock.now += 1
            await one.end(f"seen{n}")
        await one.ask("running")
        await one.ask("second", deadline=clock.now + 50)
        await one.ask("hurried", deadline=clock.now + 2)
        assert "turn would come" in str(one.refused["hurried"])
        for n in range(10):
            await one.ask(f"more{n}")
        assert one.admission.num_waiting("m") == 4, "a second each, and 4.5 at most"
        assert one.refused["more9"].retry_after_s == pytest.approx(4)


async def test_callers_who_cancel_leave_no_trace():
    async with desk(1) as one:
        await one.ask("running")
        await one.ask("waiting")
        await one.ask("next")
        await one.cancel("waiting")
        await one.cancel("running")
        assert one.began == ["running", "next"]
        # Cancelled in the moment in which it gets its seat.
        await one.ask("late")
        one._ends["next"].set()
        await asyncio.sleep(0)
        await one.cancel("late")
        await one.ask("last")
        assert one.began[-1] == "last"


async def test_without_a_target_requests_wait_a_little_and_are_told_so():
    async with desk(1) as one:
        one.seats.there = False
        await one.ask("hopeless")
        await asyncio.sleep(0.06)
        assert isinstance(one.refused["hopeless"], Unavailable)
        await one.ask("lucky")
        one.seats.there = True
        one.admission.dispatch()
        await settle()
        assert one.began == ["lucky"]


async def test_without_a_target_nobody_is_refused_for_what_turns_took_before():
    """While the only target restarts: as soon as it is back it may have room for all."""
    clock = Clock()
    async with desk(1, target_wait_s=5.0, now=clock) as one:
        for n in range(10):  # Ten seconds each.
            await one.ask(f"seen{n}")
            clock.now += 10
            await one.end(f"seen{n}")
        await one.ask("running")
        one.seats.there = False
        await one.ask("patient")
        assert not one.refused
        one.seats.there = True
        await one.ask("late")
        assert "turn would come" in str(one.refused["late"])


async def test_at_the_end_those_who_wait_are_sent_elsewhere():
    async with desk(1) as one:
        await one.ask("running")
        await one.ask("waiting")
        one.admission.close()
        await settle()
        await one.ask("new")
        assert set(one.refused) == {"waiting", "new"}
        assert all(isinstance(error, Unavailable) for error in one.refused.values())


async def test_thousands_of_requests_pass_in_bounded_queues():
    async with desk(8, max_waiting=32) as one:
        for n in range(2000):
            await one.ask(f"{n}", caller=f"c{n % 7}")
            assert one.admission.num_waiting("m") <= 32 and len(one.running) <= 8
            if n % 2:
                await one.end(one.running[0])
        assert len(one.began) + len(one.refused) + one.admission.num_waiting("m") == 2000
        assert len(one.began) > 1000


# --- the settings -------------------------------------------------------------------------------


def test_limits_are_parsed_and_apply_to_who_is_named():
    callers = Callers.parse(["a:running=8:waiting=0:weight=2.5:priority=low", "*:running=1"])
    assert callers.of("a") == CallerLimits(8, 0, 2.5, LOW)
    assert callers.of("anyone") == CallerLimits(running=1)
    assert Callers.parse([]).of("anyone") == CallerLimits()


@pytest.mark.parametrize(
    "wrong",
    [
        ":running=1",
        "a:running=0",
        "a:running=x",
        "a:waiting=-1",
        "a:weight=0",
        "a:weight=nan",
        "a:priority=urgent",
        "a:speed=3",
        "a:running",
    ],
)
def test_wrong_limits_are_refused_with_what_is_allowed(wrong):
    with pytest.raises(InvalidArgument, match="caller") as caught:
        Callers.parse([wrong])
    assert caught.value.field == "caller_limits"


def test_a_caller_is_named_once():
    with pytest.raises(InvalidArgument):
        Callers.parse(["a:running=1", "a:running=2"])
