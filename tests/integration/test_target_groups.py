"""Targets of two ranks each behind a real orchestrator: same tokens, and ranks that die or hang."""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio
import psutil
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.cli.process import Child
from outrider.types import VerificationMode
from outrider.v1 import target_pb2_grpc
from scripted_workers import Parts, Rig, Stream, only_child_of
from store_servers import free_port
from tiny import make_model

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(120),
    pytest.mark.slow,
]

TIMEOUT_S = 3.0
PROMPTS = [f"two ranks {number}" for number in range(4)]
LONG: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": {"temperature": 1.0, "seed": 3},
    "top-p": {"temperature": 1.0, "top_p": 0.9, "seed": 4, "logprobs": 2},
    "rejection": {"temperature": 1.0, "seed": 5, "mode": VerificationMode.REJECTION},
}


class TargetGroup(NamedTuple):
    """A target of two ranks: the service, and the parent of rank 1."""

    child: Child
    address: str
    pod: Child

    @property
    def follower(self) -> psutil.Process:
        """Rank 1."""
        return only_child_of(self.pod)

    def logged(self, *messages: str) -> list[dict[str, Any]]:
        """Of both ranks."""
        logs = {self.child.log, self.pod.log}
        lines = [line for log in logs for line in log.read_text().splitlines()]
        entries = [json.loads(line) for line in lines if line.startswith("{")]
        return [entry for entry in entries if entry["message"] in messages]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def groups(
    parts: Parts, tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[TargetGroup, TargetGroup]]:
    """One on one host; one over two pods of a LeaderWorkerSet, which here share a host too.

    The first test that breaks one is the last that can use it.
    """
    model = tiny_models["target"]
    settings = {"tensor_parallel": 2, "group_timeout_s": TIMEOUT_S}
    token = tmp_path_factory.mktemp("group") / "token"
    token.write_text("known to both pods")
    pods = settings | {"group_port": free_port(), "group_token_file": token, "kv_memory": "8MiB"}
    lws = {"LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "127.0.0.1"}

    def pod(index: int, **options: Any) -> Any:
        flags = ("--model", str(model), "--dtype", "float32", "--threads", "1")
        environ = lws | {"LWS_WORKER_INDEX": str(index)}
        return parts.process("target", *flags, environ=environ, **pods, **options)

    async with contextlib.AsyncExitStack() as exits:
        last, _ = await exits.enter_async_context(pod(1, wait=False))
        starting = (parts.worker("target", model, **settings), pod(0, drain_s=1))
        one, two = await asyncio.gather(*map(exits.enter_async_context, starting))
        yield TargetGroup(*one, one[0]), TargetGroup(*two, last)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def rig(
    stack: Rig, parts: Parts, groups: tuple[TargetGroup, TargetGroup]
) -> AsyncIterator[Rig]:
    """Both groups behind one orchestrator."""
    async with parts.orchestrator(
        stack.store_url, targets=[group.address for group in groups], drafts=stack.drafts
    ) as made:
        yield made


@pytest.mark.parametrize("mode", MODES)
async def test_streams_of_a_group_are_those_of_one_rank(stack: Rig, rig: Rig, mode: str) -> None:
    options = {"max_tokens": 40, "num_speculative_tokens": 4, **MODES[mode]}
    ours = await rig.complete_all(PROMPTS, **options)
    theirs = await stack.complete_all(PROMPTS, **options)
    if mode == "rejection":  # Where the first draft comes in is up to time, and so are the guesses.
        assert all(len(done.token_ids) == 40 or done.finish_reason for done in ours)
    else:
        assert [done.token_ids for done in ours] == [done.token_ids for done in theirs]
        assert [done.text for done in ours] == [done.text for done in theirs]
    assert sum(done.stats.accepted for done in ours) > 20


async def test_info_tells_the_size_and_kv_of_all_ranks(
    stack: Rig, rig: Rig, groups: tuple[TargetGroup, TargetGroup]
) -> None:
    alone = await stack.info(stack.targets[0])
    group = await rig.info(groups[0].address)
    assert (alone.tensor_parallel, group.tensor_parallel) == (1, 2)
    assert group.model_fingerprint == alone.model_fingerprint
    # 8 MiB a rank here, 64 MiB there; a token takes half as much of a rank.
    assert group.kv_blocks_total == alone.kv_blocks_total // 4
    for group in groups:
        ranks = {(entry["message"], entry["rank"]) for entry in group.logged("ready", "serving")}
        assert ranks == {("ready", 1), ("serving", 0)}


async def test_a_killed_rank_moves_its_streams_to_the_other_group(
    stack: Rig, rig: Rig, groups: tuple[TargetGroup, TargetGroup]
) -> None:
    options = {**LONG, "temperature": 1.0, "top_p": 0.95, "seed": 8}
    expected = await stack.complete_all(PROMPTS, num_speculative_tokens=0, **options)
    first, second = groups
    own = Fate(first.address)
    streams = [Stream(rig, prompt, **options) for prompt in PROMPTS]
    for stream in streams:
        await stream.reaches(20)
    assert (await rig.info(first.address)).sessions > 0 < (await rig.info(second.address)).sessions
    first.follower.send_signal(signal.SIGKILL)
    done = [await stream.end() for stream in streams]
    assert [d.token_ids for d in done] == [d.token_ids for d in expected]
    assert sum(d.stats.accepted for d in done) > 100
    assert await asyncio.wait_for(first.child.wait(), 10) == 1
    reason = "rank 1 is gone: it was killed by SIGKILL"
    lost = first.logged("the group is lost")
    assert [(entry["rank"], entry["why"]) for entry in lost] == [(0, reason)]
    assert first.child.log_tail().splitlines()[-1] == f"error: {reason}"
    assert await own.seen() == (["SERVING", "NOT_SERVING"], "UNAVAILABLE", reason)
    assert (await rig.complete(PROMPTS[0], **options)).token_ids == expected[0].token_ids


async def test_a_rank_that_hangs_takes_its_group_out_of_service_in_time(
    stack: Rig, parts: Parts, groups: tuple[TargetGroup, TargetGroup]
) -> None:
    """Within a pass; the stream goes on at a target of one rank."""
    _, group = groups
    options = {**LONG, "seed": 9}
    streams: list[Stream] = []
    async with parts.orchestrator(
        stack.store_url, targets=[group.address, *stack.targets], drafts=stack.drafts
    ) as rig:
        own = Fate(group.address)
        while not (await rig.info(group.address)).sessions:  # Where each goes is placement's.
            assert len(streams) < 10
            prompt = f"{len(streams)} {PROMPTS[1]}"
            streams.append(await Stream(rig, prompt, **options).reaches(20))
        group.follower.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        assert await asyncio.wait_for(group.child.wait(), 15) == 1
        assert time.monotonic() - stopped < 2 * TIMEOUT_S + 2
        done = [await stream.end() for stream in streams]
    for number, one in enumerate(done):
        prompt = f"{number} {PROMPTS[1]}"
        expected = await stack.complete(prompt, num_speculative_tokens=0, **options)
        assert one.token_ids == expected.token_ids and one.stats.accepted > 50
    # Rank 1's pod ends when its rank does: rank 0, on another host, cannot end that.
    group.follower.send_signal(signal.SIGKILL)
    assert await asyncio.wait_for(group.pod.wait(), 10) == 1
    _, code, reason = await own.seen()
    assert code == "UNAVAILABLE" and reason.startswith(("rank 1 has not answered", "a pass of"))


async def test_a_group_that_does_not_come_about_ends_clearly(
    parts: Parts, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """Rank 0 killed while all load; and a vocabulary that cannot be split."""
    odd = make_model(tmp_path / "odd", padded_vocab=259)

    def process(model: Path) -> Any:
        flags = ("--model", str(model), "--dtype", "float32", "--threads", "1")
        return parts.process("target", *flags, wait=False, tensor_parallel=2)

    async with process(tiny_models["target"]) as (child, _), process(odd) as (uneven, _):
        follower = await _follower_of(child)
        os.kill(child.pid, signal.SIGKILL)
        await child.wait()
        deadline = time.monotonic() + 10
        while follower.is_running() and follower.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "rank 1 has outlived rank 0"
            await asyncio.sleep(0.05)
        assert await asyncio.wait_for(uneven.wait(), 60) == 1
        last = uneven.log_tail().splitlines()[-1]
        assert last.startswith("error: ") and "259 tokens of vocabulary" in last
        assert "over 2 ranks; allowed: 1" in last


async def _follower_of(child: Child) -> psutil.Process:
    for _ in range(300):
        if found := psutil.Process(child.pid).children():
            return found[0]
        await asyncio.sleep(0.1)
    raise AssertionError("rank 0 starts nobody")


class Fate:
    """What a caller and a probe see of a target until its end."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._probing = asyncio.create_task(self._probe())
        self._calling = asyncio.create_task(self._call())

    async def seen(self) -> tuple[list[str], str, str]:
        """Health in its course, status and details of a stream."""
        try:
            health, (code, details) = await asyncio.gather(self._probing, self._calling)
        finally:
            await self._channel.close()
        return health, code, details

    async def _probe(self) -> list[str]:
        stub = health_pb2_grpc.HealthStub(self._channel)
        seen: list[str] = []
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for response in stub.Watch(health_pb2.HealthCheckRequest()):
                seen.append(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))
        return seen

    async def _call(self) -> tuple[str, str]:
        call = target_pb2_grpc.TargetServiceStub(self._channel).Run()
        try:
            await call.read()
        except grpc.aio.AioRpcError as error:
            return error.code().name, error.details() or ""
        return "OK", ""
