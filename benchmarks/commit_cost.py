"""What storing sessions costs: `python benchmarks/commit_cost.py [--target demo --sessions 1,8]`.

A whole stack, twice: with its store, and with an orchestrator that takes every commit for done at
once, in turn, so that the machine's moods meet both. In steady state, for each number of sessions:

* what commits keep the orchestrator's event loop busy with, the only thing of them that a round can
  have to wait for (the next round leaves before the commit of the last one): time within the
  tasks that commit, measured in the process; and all of it, sockets included, as the difference of
  the two orchestrators' CPU time;
* what a round takes outside of the workers, from verdict to verdict, with commits and without: that
  is a round's critical path at the orchestrator, whatever its event loop does beside;
* calls of Redis, commands within its scripts and bytes, by its own counters.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from redis.asyncio import Redis

from outrider.cli.stack import PROGRAMS, LocalStack, StackConfig
from outrider.client import GenerationChunk, GenerationOptions, OutriderClient

STORED, UNSTORED = "stored", "unstored"
_OUT = "COMMIT_COST_FILE"
_TELL_S = 0.05
_CALLS = ("evalsha", "eval")


# The orchestrator's process


class Spent:
    """Seconds on the event loop within commits, and what they committed."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.commits = self.tokens = 0

    def tell(self, path: Path) -> None:
        """Write it down ever anew."""
        while True:
            time.sleep(_TELL_S)
            fresh = path.with_suffix(".new")
            fresh.write_text(json.dumps(vars(self)))
            fresh.replace(path)


class Timed:
    """A coroutine whose steps are timed; what it waits for is not."""

    def __init__(self, coroutine: Any, spent: Spent) -> None:
        self._coroutine = coroutine
        self._spent = spent

    def __await__(self) -> Iterator[Any]:
        value: Any = None
        send = self._coroutine.send
        while True:
            started = time.perf_counter()
            try:
                waits_for = send(value)
            except StopIteration as end:
                return end.value
            finally:
                self._spent.seconds += time.perf_counter() - started
            try:
                value, send = (yield waits_for), self._coroutine.send
            except BaseException as error:
                value, send = error, self._coroutine.throw


def serve_orchestrator(mode: str) -> None:
    """In place of `python -m services.orchestrator`: the same with a clock on its commits."""
    from services.orchestrator.service import main
    from services.orchestrator.store import SessionStore
    from services.orchestrator.store_batches import Batches
    from services.orchestrator.store_commit import CommitQueue

    spent = Spent()
    run, commit, carry_out = CommitQueue._run, SessionStore.commit, Batches._carry_out

    async def timed_run(queue: CommitQueue) -> None:
        await Timed(run(queue), spent)

    async def timed_batch(batches: Batches, batch: Any) -> None:
        await Timed(carry_out(batches, batch), spent)

    async def counted(store: SessionStore, fence: Any, **what: Any) -> int:
        spent.commits += 1
        spent.tokens += len(what["token_ids"])
        if mode == UNSTORED:
            return int(what["from_len"]) + len(what["token_ids"])
        return await commit(store, fence, **what)

    CommitQueue._run = timed_run  # type: ignore[method-assign]
    Batches._carry_out = timed_batch  # type: ignore[method-assign]
    SessionStore.commit = counted  # type: ignore[method-assign, assignment]
    path = Path(os.environ[_OUT])
    threading.Thread(target=spent.tell, args=(path,), daemon=True).start()
    main()


# Beside it


@dataclass(frozen=True)
class Counters:
    """Of one moment; `redis` by name, `calls` by command."""

    cpu_s: float
    seconds: float
    commits: int
    redis: dict[str, int]
    calls: dict[str, int]
    script_us: int


@dataclass(frozen=True)
class Sample:
    """A span of steady state."""

    before: Counters
    after: Counters
    rounds: int
    tokens: int
    wall_s: float
    outside_s: float
    """Of a round: what it takes from verdict to verdict, less the time within the workers."""

    def change(self, name: str) -> float:
        return float(getattr(self.after, name) - getattr(self.before, name))

    def redis(self, name: str) -> int:
        return self.after.redis[name] - self.before.redis[name]

    def calls(self, *, scripts: bool) -> int:
        return sum(
            count - self.before.calls.get(name, 0)
            for name, count in self.after.calls.items()
            if (name in _CALLS) == scripts
        )


class Side:
    """One of the two stacks, with its client."""

    def __init__(self, stack: LocalStack, client: OutriderClient, told: Path) -> None:
        self._stack, self._client, self._told = stack, client, told
        [orchestrator] = [s for s in stack.services if s.role == "orchestrator"]
        self._process = psutil.Process(orchestrator.pid)

    async def counters(self) -> Counters:
        await asyncio.sleep(3 * _TELL_S)
        async with Redis.from_url(self._stack.store_url) as redis:
            stats, commands = await redis.info("stats"), await redis.info("commandstats")
        calls = {name.removeprefix("cmdstat_"): int(c["calls"]) for name, c in commands.items()}
        calls.pop("info", None)
        times = self._process.cpu_times()
        told = json.loads(self._told.read_text())
        return Counters(
            cpu_s=times.user + times.system,
            seconds=told["seconds"],
            commits=told["commits"],
            redis={name: int(stats[f"total_net_{name}_bytes"]) for name in ("input", "output")},
            calls=calls,
            script_us=sum(int(commands.get(f"cmdstat_{n}", {}).get("usec", 0)) for n in _CALLS),
        )

    async def sample(self, sessions: int, tokens: int) -> Sample:
        before = await self.counters()
        started = time.perf_counter()
        streams = await asyncio.gather(*(self._stream(n, tokens) for n in range(sessions)))
        wall_s = time.perf_counter() - started
        after = await self.counters()
        rounds = sum(chunk.speculation.rounds for s in streams for chunk in s)
        return Sample(
            before,
            after,
            rounds=rounds,
            tokens=sum(len(chunk.token_ids) for s in streams for chunk in s),
            wall_s=wall_s,
            outside_s=sum(map(_outside_s, streams)) / rounds,
        )

    async def _stream(self, number: int, tokens: int) -> list[GenerationChunk]:
        options = GenerationOptions(max_tokens=tokens, ignore_eos=True, seed=number)
        prompt = f"Story {number}: once upon a time there was"
        return [chunk async for chunk in self._client.generate(prompt, options, timeout_s=600)]


def _outside_s(stream: Sequence[GenerationChunk]) -> float:
    """Of all its rounds together."""
    usage = stream[-1].usage
    if usage is None:
        raise RuntimeError("the last chunk lacks its usage")
    time_ = usage.time
    return (time_.rounds_us - time_.draft_worker_us - time_.verify_worker_us) / 1e6


async def _open(args: argparse.Namespace, mode: str, stack: AsyncExitStack, folder: Path) -> Side:
    told = folder / f"{mode}.json"
    config = StackConfig(
        target=args.target,
        draft=args.draft,
        threads=args.threads,
        env={_OUT: str(told)},
    )
    program = (sys.executable, str(Path(__file__).resolve()), "--serve-orchestrator", mode)
    programs = {**PROGRAMS, "orchestrator": program}
    running = await stack.enter_async_context(LocalStack(config, programs=programs))
    client = await stack.enter_async_context(await OutriderClient.connect(address=running.address))
    return Side(running, client, told)


def _median(samples: Sequence[Sample], of: Any) -> float:
    return statistics.median(of(sample) for sample in samples)


def _show(sessions: int, stored: Sequence[Sample], unstored: Sequence[Sample]) -> None:
    def line(what: str, value: str) -> None:
        print(f"  {what:<66}{value:>14}", flush=True)

    def ms(seconds: float) -> str:
        return f"{seconds * 1e3:.3f} ms"

    per_token = _median(stored, lambda s: s.tokens / s.rounds)
    commits = _median(stored, lambda s: s.change("commits") / s.rounds)
    print(f"{sessions} sessions, {per_token:.2f} tokens a round, {commits:.2f} commits a round")
    task = _median(stored, lambda s: s.change("seconds") / s.rounds)
    empty = _median(unstored, lambda s: s.change("seconds") / s.rounds)
    line("event loop within commits, a round", ms(task))
    line("  of it without a store (hashes, wake-ups)", ms(empty))
    cpu = [_median(side, lambda s: s.change("cpu_s") / s.rounds) for side in (stored, unstored)]
    line("CPU of the orchestrator, a round: with the store", ms(cpu[0]))
    line("  without", ms(cpu[1]))
    line("  a commit, sockets and all", ms(cpu[0] - cpu[1]))
    outside = [[sample.outside_s for sample in side] for side in (stored, unstored)]
    line("a round outside of the workers: with the store", ms(statistics.median(outside[0])))
    line("  without", ms(statistics.median(outside[1])))
    added = [with_it - without for with_it, without in zip(*outside, strict=True)]
    line(
        "  what commits add to a round's critical path, median of pairs",
        ms(statistics.median(added)),
    )
    line("    lowest and highest pair", f"{min(added) * 1e3:.3f} {max(added) * 1e3:.3f}")
    calls = _median(stored, lambda s: s.calls(scripts=True) / s.tokens)
    line("calls of Redis a token", f"{calls:.3f}")
    line("  a round", f"{_median(stored, lambda s: s.calls(scripts=True) / s.rounds):.3f}")
    inner = _median(stored, lambda s: s.calls(scripts=False) / s.calls(scripts=True))
    line("  commands within one", f"{inner:.1f}")
    used = _median(stored, lambda s: s.change("script_us") / s.calls(scripts=True))
    line("  Redis itself takes for one", f"{used:.0f} us")
    for name, what in (("input", "to"), ("output", "from")):
        size = _median(stored, lambda s, name=name: s.redis(name) / s.tokens)
        line(f"bytes a token {what} Redis", f"{size:.0f}")


async def measure(args: argparse.Namespace, folder: Path) -> None:
    async with AsyncExitStack() as stack:
        sides = {mode: await _open(args, mode, stack, folder) for mode in (STORED, UNSTORED)}
        for side in sides.values():
            await side.sample(2, 32)  # Warm up.
        for sessions in map(int, args.sessions.split(",")):
            samples: dict[str, list[Sample]] = {mode: [] for mode in sides}
            for _ in range(args.repeats):
                for mode, side in sides.items():
                    samples[mode].append(await side.sample(sessions, args.tokens))
            _show(sessions, samples[STORED], samples[UNSTORED])


def main() -> None:
    if sys.argv[1:2] == ["--serve-orchestrator"]:
        mode = sys.argv[2]
        del sys.argv[1:3]
        serve_orchestrator(mode)
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", default="demo")
    parser.add_argument("--threads", type=int, default=0, help="of each worker; 0: as it chooses")
    parser.add_argument("--sessions", default="1,8")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(parser.parse_args(), Path(folder)))


if __name__ == "__main__":
    main()
