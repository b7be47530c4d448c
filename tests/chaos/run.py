"""One schedule: streams start, faults happen to them, all is mended, and everything is compared."""

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from outrider.client import OutriderClient
from outrider.errors import OutriderError

from .baseline import Baseline
from .faults import Fault, Kind
from .races import Race
from .stack import ORCHESTRATORS, Stack, links
from .streams import Ended, Plan, References, clients_of, plans_of, run_stream
from .verdicts import Outages, Verdict, judge

CLIENTS = 4
_STREAMS_S = 90.0
_FIRE_POLL_S = 0.02


@dataclass
class Result:
    """What came of a schedule."""

    seed: int
    faults: tuple[Fault, ...]
    timeline: list[str] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    fired: set[Fault] = field(default_factory=set)
    """Points that a process came by."""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.problems

    @property
    def errors(self) -> list[Verdict]:
        """Streams that ended by an error that the policy allows."""
        return [verdict for verdict in self.verdicts if verdict.allowed]


class Runner:
    """Runs schedules, one after the other, on one stack."""

    def __init__(self, stack: Stack, references: References) -> None:
        self._stack = stack
        self._references = references
        self._baseline = Baseline(stack)

    async def settle(self) -> None:
        """Take note of what an idle stack holds."""
        await self._baseline.excess()

    async def run(self, seed: int, faults: Sequence[Fault]) -> Result:
        result = Result(seed, tuple(faults))
        rng = random.Random(f"streams {seed}")
        plans = plans_of(rng, num_clients=CLIENTS)
        started = time.monotonic()
        outages = Outages(started)
        async with clients(self._stack) as given:
            act = _Act(self._stack, result, outages, started)
            streams = [
                asyncio.create_task(self._stream(given[plan.client], plan, act)) for plan in plans
            ]
            acting = [asyncio.create_task(act.carry_out(fault)) for fault in faults]
            races = [asyncio.create_task(self._race(rng, act, f)) for f in faults if _races(f)]
            try:
                await self._end_of(result, streams, "streams")
                act.close()
                await self._end_of(result, [*acting, *races], "faults")
            finally:
                for task in (*streams, *acting, *races):
                    task.cancel()
                await asyncio.gather(*streams, *acting, *races, return_exceptions=True)
            await self._mend(result)
        ended = [task.result() for task in streams if not task.cancelled() and not task.exception()]
        outages.close(time.monotonic())
        for one in ended:
            verdict = judge(one, outages)
            result.verdicts.append(verdict)
            if verdict.problem:
                at = f"[{one.started - started:.2f} s to {one.ended - started:.2f} s]"
                result.problems.append(f"{one.plan.describe()} {at}: {verdict.problem}")
        await self._check(result)
        result.seconds = time.monotonic() - started
        return result

    async def _stream(self, client: OutriderClient, plan: Plan, act: "_Act") -> Ended:
        await asyncio.sleep(plan.start_s)
        return await run_stream(client, plan, self._references)

    async def _race(self, rng: random.Random, act: "_Act", fault: Fault) -> None:
        await asyncio.sleep(fault.at_s)
        race = Race(self._stack, self._references, rng, after_tokens=int(fault.amount))
        act.note(f"race: {race.spec.prompt!r}")
        problem = await race.run()
        if problem:
            act.result.problems.append(f"race of two readers, {race.spec.prompt!r}: {problem}")

    async def _end_of(
        self, result: Result, tasks: Sequence["asyncio.Task[object]"], what: str
    ) -> None:
        if not tasks:
            return
        done, pending = await asyncio.wait(tasks, timeout=_STREAMS_S)
        if pending:
            result.problems.append(f"{len(pending)} {what} did not end in {_STREAMS_S:g} s")
            self._stack.write_stacks(f"schedule-{result.seed}")
        for task in done:
            error = task.exception()
            if error is not None:
                result.problems.append(f"{what}: {type(error).__name__}: {error}")

    async def _mend(self, result: Result) -> None:
        try:
            await self._stack.mend()
        except (RuntimeError, OSError, OutriderError) as error:
            result.problems.append(f"the stack does not come back: {error}")

    async def _check(self, result: Result) -> None:
        try:
            excess = await self._baseline.excess()
        except Exception as error:
            excess = f"the parts do not say what they hold: {type(error).__name__}: {error}"
        if excess:
            result.problems.append(f"not back to the baseline: {excess}")
            self._stack.write_stacks(f"schedule-{result.seed}")
        result.problems += self._stack.deaths
        self._stack.deaths.clear()


def _races(fault: Fault) -> bool:
    return fault.kind is Kind.RACE


class _Act:
    """Carries out faults, and writes down what happened when."""

    def __init__(self, stack: Stack, result: Result, outages: Outages, started: float) -> None:
        self.result = result
        self._stack = stack
        self._outages = outages
        self._started = started
        self._closed = asyncio.Event()

    def note(self, text: str) -> None:
        self.result.timeline.append(f"{time.monotonic() - self._started:6.2f} s  {text}")

    def close(self) -> None:
        """All streams have ended: what has not happened yet need not, what lasts may end."""
        self._closed.set()

    async def carry_out(self, fault: Fault) -> None:
        if _races(fault):
            return
        if not await self._until(fault.at_s):
            return
        match fault.kind:
            case Kind.KILL:
                await self._kill(fault)
            case Kind.RESTART:
                await self._restart(fault)
            case Kind.PAUSE:
                await self._pause(fault)
            case Kind.VANISH:
                await self._vanish(fault)
            case Kind.POINT:
                await self._point(fault)
            case _:
                await self._link(fault)

    async def _until(self, at_s: float) -> bool:
        """Sleep until then; False where all streams have ended before."""
        left = self._started + at_s - time.monotonic()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), max(left, 0.0))
            return False
        return True

    async def _kill(self, fault: Fault) -> None:
        self.note(f"kill {fault.part}{fault.of_group}")
        with self._outages.of(fault.part):
            self._stack.send_rank(fault.part, fault.rank or 0, signal.SIGKILL)
            await self._bring_back(fault)

    async def _bring_back(self, fault: Fault) -> None:
        await self._stack.processes[fault.part].wait(10.0)
        await asyncio.sleep(fault.duration_s)
        self.note(f"start {fault.part}")
        await self._stack.start(fault.part)
        self.note(f"{fault.part} serves")

    async def _restart(self, fault: Fault) -> None:
        self.note(f"SIGTERM to {fault.part}")
        with self._outages.of(fault.part):
            self._stack.send(fault.part, signal.SIGTERM)
            await self._bring_back(fault)

    async def _pause(self, fault: Fault) -> None:
        self.note(f"pause {fault.part}{fault.of_group}")
        with self._outages.of(fault.part):
            self._stack.send_rank(fault.part, fault.rank or 0, signal.SIGSTOP)
            await asyncio.sleep(fault.duration_s)
            self._stack.send_rank(fault.part, fault.rank or 0, signal.SIGCONT)
            await self._stack.settle(fault.part)
        self.note(f"{fault.part} goes on")

    async def _vanish(self, fault: Fault) -> None:
        peers = [a if b == fault.part else b for a, b in links() if fault.part in (a, b)]
        self.note(f"cut off and kill {fault.part}")
        with self._outages.of(fault.part):
            for peer in peers:
                self._stack.network.cut(fault.part, peer)
            self._stack.send(fault.part, signal.SIGKILL)
            await self._stack.processes[fault.part].wait(10.0)
            await asyncio.sleep(fault.duration_s)
            for peer in peers:
                self._stack.network.heal(fault.part, peer)
            self.note(f"start {fault.part}, its links are whole")
            await self._stack.start(fault.part)

    async def _link(self, fault: Fault) -> None:
        network, one, other = self._stack.network, fault.part, fault.other
        self.note(fault.describe().partition(":")[2].strip())
        with self._outages.of(one, other) if fault.kind is Kind.CUT else contextlib.nullcontext():
            match fault.kind:
                case Kind.CUT:
                    network.cut(one, other, one_way=fault.one_way)
                case Kind.SLOW:
                    network.slow(one, other, delay_ms=fault.amount)
                case _:
                    network.lose(one, other, loss=fault.amount)
            await asyncio.sleep(fault.duration_s)
            network.heal(one, other)
        self.note(f"{one}-{other} is whole")

    async def _point(self, fault: Fault) -> None:
        stack, part = self._stack, fault.part
        stack.arm(part, point=fault.point, passage=int(fault.amount), action=fault.action)
        if fault.action == "kill":
            stack.expect_end(part)
        while not stack.has_fired(part):
            if self._closed.is_set():
                stack.order(part, {})
                stack.expect_life(part)
                return
            await asyncio.sleep(_FIRE_POLL_S)
        self.result.fired.add(fault)
        self.note(f"{fault.action} {part} {fault.point}")
        if fault.action == "kill":
            with self._outages.of(part):
                await self._bring_back(fault)
        elif fault.action == "stop":
            with self._outages.of(part):
                stack.may_lose(part)
                await asyncio.sleep(fault.duration_s)
                stack.send(part, signal.SIGCONT)
                await stack.settle(part)
            self.note(f"{part} goes on")


@contextlib.asynccontextmanager
async def clients(stack: Stack) -> AsyncIterator[list[OutriderClient]]:
    """As many as there are, each with another order of servers; they notice silence soon."""
    addresses = [stack.address(name) for name in ORCHESTRATORS]
    made = await asyncio.gather(
        *(
            OutriderClient.connect(address=clients_of(addresses, number), keepalive_s=1)
            for number in range(CLIENTS)
        )
    )
    try:
        yield made
    finally:
        await asyncio.gather(*(client.close() for client in made))
