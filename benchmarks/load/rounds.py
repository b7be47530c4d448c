"""What a round costs the orchestrator: CPU time a round and session, before a scripted target.

    python benchmarks/load/rounds.py                       # 32 sessions, a pass of 16 ms, plain
    python benchmarks/load/rounds.py --pass-ms 0           # as fast as the orchestrator follows
    python benchmarks/load/rounds.py --guesses 4           # as a target makes rounds with a draft
    python benchmarks/load/rounds.py --asked               # each round asked for, a trip each
    python benchmarks/load/rounds.py --against ../before   # in turn with the code of a folder
    python benchmarks/load/rounds.py --profile rounds.txt  # where the time goes, by py-spy

The target is scripted: it speaks the worker protocol and tells one verdict for each session every
`--pass-ms`, all in one message, as a GPU does. Target and clients live here, the store is a real
one, and the orchestrator a process as it is deployed: its CPU time is what is measured, in all and
by thread.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc.aio
import psutil

from outrider.cli.process import Child
from outrider.cli.store import answers, free_port, store_command, store_program
from outrider.v1 import (
    draft_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    target_pb2,
    target_pb2_grpc,
    worker_pb2,
)

ROOT = Path(__file__).resolve().parents[2]
START_S = 60.0
CONTEXT = 1 << 20
VOCABULARY = 256


# --- the target ---------------------------------------------------------------------------------


@dataclass(slots=True)
class Work:
    """A verification that the target goes on with."""

    header: worker_pb2.EntryHeader
    left: int
    plan: bool
    said: int = 0


@dataclass(slots=True)
class ScriptedTarget(target_pb2_grpc.TargetServiceServicer):
    """Says any tokens, a round of each session in every pass."""

    pass_s: float
    guesses: int
    asked: bool
    """It goes on with nothing by itself."""
    tokenizer: bytes
    _works: dict[str, Work] = field(default_factory=dict)

    async def Info(self, request: Any, context: Any) -> worker_pb2.InfoResponse:
        return info("target", *(() if self.asked else ("more_rounds", "drafts")))

    async def GetTokenizer(
        self, request: Any, context: Any
    ) -> AsyncIterator[target_pb2.GetTokenizerResponse]:
        yield target_pb2.GetTokenizerResponse(data=self.tokenizer)

    async def Run(self, requests: Any, context: Any) -> None:
        opened: list[worker_pb2.Reply] = []
        reading = asyncio.create_task(self._read(requests, opened))
        try:
            due = time.monotonic()
            while not reading.done():
                due = max(due + self.pass_s, time.monotonic())
                await asyncio.sleep(due - time.monotonic())
                replies = opened + [self._round(work) for work in list(self._works.values())]
                opened.clear()
                if replies:
                    await context.write(worker_pb2.RunResponse(replies=replies))
                elif not self.pass_s:
                    await asyncio.sleep(0.001)
        finally:
            reading.cancel()

    async def _read(self, requests: Any, opened: list[worker_pb2.Reply]) -> None:
        async for request in requests:
            for entry in request.entries:
                session = entry.header.session_id
                match entry.WhichOneof("op"):
                    case "open":
                        reply = worker_pb2.Reply(header=head(entry.header))
                        reply.opened.have_len = 0
                        opened.append(reply)
                    case "verify":
                        plan = entry.verify.HasField("draft")
                        more = entry.verify.more_rounds
                        self._works[session] = Work(entry.header, more, plan)
                    case "cancel" | "close":
                        self._works.pop(session, None)

    def _round(self, work: Work) -> worker_pb2.Reply:
        guesses = self.guesses if work.plan else 0
        reply = worker_pb2.Reply(header=head(work.header))
        reply.header.more = work.left > 0
        reply.header.elapsed_us = 900
        verified = reply.verified
        accepted = (work.said % (guesses + 1)) if guesses else 0
        verified.token_ids.extend((work.said + i) % 200 for i in range(accepted + 1))
        verified.num_accepted, verified.num_proposed = accepted, guesses
        verified.timing.compute_us = 800
        verified.timing.batch_rows = len(self._works)
        if work.plan:
            verified.draft.asked, verified.draft.wait_us = guesses, 200
        work.said += 1
        work.left -= 1
        if work.left < 0:
            del self._works[work.header.session_id]
        return reply


class ScriptedDraft(draft_pb2_grpc.DraftServiceServicer):
    """Is there, so that plans name it; nobody asks it anything."""

    async def Info(self, request: Any, context: Any) -> worker_pb2.InfoResponse:
        return info("draft", "ahead")

    async def Run(self, requests: Any, context: Any) -> None:
        async for _ in requests:
            pass


def info(tier: str, *capabilities: str) -> worker_pb2.InfoResponse:
    return worker_pb2.InfoResponse(
        model=tier,
        model_fingerprint=tier,
        tokenizer_fingerprint="scripted",
        vocab_size=VOCABULARY,
        context_length=CONTEXT,
        dtype="float32",
        device="cpu",
        device_id=tier,
        incarnation=1 if tier == "target" else 2,
        protocol_min=1,
        protocol_max=1,
        capabilities=["coupled", "greedy", "chain", "bulk", *capabilities],
        max_rows=1 << 16,
        max_proposal_tokens=16,
    )


def head(header: worker_pb2.EntryHeader) -> worker_pb2.ReplyHeader:
    return worker_pb2.ReplyHeader(
        session_id=header.session_id,
        completion=header.completion,
        epoch=header.epoch,
        number=header.number,
        owner_nonce=header.owner_nonce,
    )


def tokenizer() -> bytes:
    """One token a byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_ = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_.decoder = decoders.ByteLevel()
    return json.dumps({"tokenizer": bytes_.to_str(), "chat_template": None}).encode()


# --- the measurement ----------------------------------------------------------------------------


@dataclass
class Told:
    """What the clients were told."""

    rounds: int = 0
    tokens: int = 0
    chunks: int = 0


@dataclass(frozen=True)
class Cost:
    """CPU time of the orchestrator in a while: `us` microseconds a round and session."""

    us: float
    us_by_thread: dict[str, float]
    store_us: float
    """Of the store's process."""
    busy: float
    """Cores that the orchestrator used."""
    rounds_per_s: float
    rounds_per_cpu_s: float
    tokens_per_chunk: float


class Stack:
    """Store, orchestrator, target and clients, the orchestrator by the code in `root`."""

    def __init__(self, args: argparse.Namespace, root: Path, folder: Path) -> None:
        self.args = args
        self.root = root
        self.folder = folder
        self.told = Told()
        self._children: dict[str, Child] = {}
        self._server = grpc.aio.server()
        self._address = ""

    async def __aenter__(self) -> "Stack":
        args, port = self.args, free_port()
        self.folder.mkdir()
        command = store_command((store_program(),), port, self.folder, persist=False)
        store = await self._start("store", command)
        while not await answers(port, store.pid):
            await asyncio.sleep(0.05)
        workers = f"unix:{self.folder}/workers.sock"
        target = ScriptedTarget(args.pass_ms / 1000, args.guesses, args.asked, tokenizer())
        target_pb2_grpc.add_TargetServiceServicer_to_server(target, self._server)
        draft_pb2_grpc.add_DraftServiceServicer_to_server(ScriptedDraft(), self._server)
        self._server.add_insecure_port(workers)
        await self._server.start()
        ready = self.folder / "ready"
        flags = ["--port", "0", "--ready-file", str(ready), "--targets", workers, "--drain-s", "1"]
        flags += ["--store-url", f"redis://127.0.0.1:{port}/0"]
        flags += ["--num-speculative-tokens", str(-1 if args.adaptive else args.guesses)]
        flags += ["--drafts", workers] if args.guesses else []
        command = (sys.executable, "-m", "services.orchestrator", *flags)
        orchestrator = await self._start("orchestrator", command)
        deadline = time.monotonic() + START_S
        while not ready.exists():
            if orchestrator.returncode is not None or time.monotonic() > deadline:
                sys.exit(f"the orchestrator did not start:\n{orchestrator.log_tail()}")
            await asyncio.sleep(0.05)
        self._address = json.loads(ready.read_text())["address"]
        return self

    async def __aexit__(self, *error: object) -> None:
        for child in reversed(self._children.values()):
            await child.stop(5)
        await self._server.stop(0)

    async def _start(self, name: str, command: Sequence[str]) -> Child:
        env = {"PYTHONPATH": str(self.root), "PYTHONSAFEPATH": "1"}
        child = await Child.start(name, command, self.folder / f"{name}.log", env)
        self._children[name] = child
        return child

    async def measure(self) -> Cost:
        """Let all sessions run for a while."""
        args = self.args
        async with grpc.aio.insecure_channel(self._address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
            sessions = [asyncio.create_task(self._ask(stub, n)) for n in range(args.sessions)]
            await asyncio.sleep(args.warm_s)
            profiler = await self._profile() if args.profile else None
            before, store, told = self._threads(), self._cpu_s("store"), replace(self.told)
            started = time.monotonic()
            await asyncio.sleep(args.seconds)
            passed = time.monotonic() - started
            cost = self._cost(passed, before, store, told)
            if profiler is not None:
                await profiler.wait()
            for session in sessions:
                session.cancel()
            ended = await asyncio.gather(*sessions, return_exceptions=True)
        faults = [error for error in ended if not isinstance(error, asyncio.CancelledError)]
        if faults:
            sys.exit(f"a session ended: {faults[0]}")
        await asyncio.sleep(0.5)
        return cost

    async def _ask(self, stub: Any, number: int) -> None:
        request = generation_pb2.GenerateRequest()
        request.prompt.add().tokens.ids.extend((number + i) % 200 for i in range(64))
        request.sampling.seed = number
        request.stop.max_tokens, request.stop.ignore_eos = CONTEXT // 2, True
        async for chunk in stub.Generate(request):
            self.told.chunks += 1
            self.told.tokens += len(chunk.token_ids)
            self.told.rounds += chunk.speculation.rounds

    def _cost(self, passed: float, before: dict[str, float], store_s: float, told: Told) -> Cost:
        rounds = max(self.told.rounds - told.rounds, 1)
        threads = {
            name: (seconds - before.get(name, 0.0)) * 1e6 / rounds
            for name, seconds in self._threads().items()
        }
        us = sum(threads.values())
        return Cost(
            us=round(us, 1),
            us_by_thread={name: round(own, 1) for name, own in threads.items() if own >= 0.5},
            store_us=round((self._cpu_s("store") - store_s) * 1e6 / rounds, 1),
            busy=round(us * rounds / passed / 1e6, 2),
            rounds_per_s=round(rounds / passed),
            rounds_per_cpu_s=round(1e6 / us),
            tokens_per_chunk=round(
                (self.told.tokens - told.tokens) / max(self.told.chunks - told.chunks, 1), 2
            ),
        )

    def _threads(self) -> dict[str, float]:
        """CPU seconds of the orchestrator's threads, those of one name together."""
        found: dict[str, float] = {}
        for task in Path(f"/proc/{self._children['orchestrator'].pid}/task").iterdir():
            with contextlib.suppress(OSError):
                nanoseconds = int((task / "schedstat").read_text().split()[0])
                name = (task / "comm").read_text().strip()
                found[name] = found.get(name, 0.0) + nanoseconds / 1e9
        return found

    def _cpu_s(self, name: str) -> float:
        times = psutil.Process(self._children[name].pid).cpu_times()
        return float(times.user + times.system)

    async def _profile(self) -> asyncio.subprocess.Process:
        """The orchestrator's stacks, by py-spy: https://github.com/benfred/py-spy."""
        command = ["py-spy", "record", "--pid", str(self._children["orchestrator"].pid)]
        command += ["--duration", str(int(self.args.seconds)), "--rate", "500", "--function"]
        command += ["--threads", "--format", "raw", "--output", str(self.args.profile)]
        return await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)


async def run(args: argparse.Namespace) -> None:
    roots = [ROOT, args.against.absolute()] if args.against else [ROOT]
    with tempfile.TemporaryDirectory(prefix="outrider-rounds-") as folder:
        async with contextlib.AsyncExitStack() as started:
            stacks = [
                await started.enter_async_context(Stack(args, root, Path(folder, str(number))))
                for number, root in enumerate(roots)
            ]
            costs: dict[Path, list[float]] = {root: [] for root in roots}
            for _ in range(args.turns):
                for stack in stacks:
                    cost = await stack.measure()
                    costs[stack.root].append(cost.us)
                    print(json.dumps({"code": str(stack.root), **asdict(cost)}), flush=True)
    medians = [statistics.median(costs[root]) for root in roots]
    if args.against:
        print(
            json.dumps(
                {
                    "us": medians[0],
                    "against_us": medians[1],
                    "ratio": round(medians[1] / medians[0], 2),
                }
            )
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--pass-ms", type=float, default=16.0, help="from one round to the next")
    parser.add_argument("--guesses", type=int, default=0, help="guesses of a round; 0: plain ones")
    parser.add_argument("--adaptive", action="store_true", help="the controller decides how many")
    parser.add_argument("--asked", action="store_true", help="the target waits to be asked")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--warm-s", type=float, default=2.0, help="seconds before it")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--against", type=Path, help="folder with other code, measured in turn")
    parser.add_argument("--profile", type=Path, help="file for stacks of the orchestrator")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(run(parse()))
