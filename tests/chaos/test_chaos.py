"""A short run of the fault harness, a rolling restart, and frauds that the harness must notice."""

import os
import tempfile
from pathlib import Path

import pytest

from chaos import rolling
from chaos.baseline import session_keys
from chaos.faults import Fault, Kind, schedule
from chaos.link import HERE, Network, why_not
from chaos.long_run import load_references, make_settings
from chaos.points import SPOIL
from chaos.run import Runner
from chaos.stack import ORCHESTRATORS, Stack
from chaos.verdicts import MAX_SHARE_OF_ONE

CACHE = Path(os.environ.get("OUTRIDER_CACHE", tempfile.gettempdir())) / "chaos"
SCHEDULES = (6, 9, 10, 53, 56)
"""Seeds whose faults hit orchestrators, targets, one rank of a target, drafts and the store."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
_REASON = why_not()
needs_networks = pytest.mark.skipif(
    bool(_REASON), reason=f"no networks can be made here: {_REASON}"
)


def test_a_schedule_is_the_same_for_the_same_seed() -> None:
    assert schedule(7) == schedule(7)
    assert len({schedule(seed) for seed in range(50)}) == 50
    kinds = {fault.kind for seed in range(200) for fault in schedule(seed)}
    assert kinds == set(Kind)
    labels = {fault.label for seed in range(200) for fault in schedule(seed)}
    of_ranks = {f"{what} target rank {rank}" for what in ("kill", "pause") for rank in (0, 1)}
    assert labels >= {"kill target", "pause target"} | of_ranks
    assert any(fault.rank == 1 for seed in SCHEDULES for fault in schedule(seed))


@needs_networks
def test_a_link_delays_and_cuts() -> None:
    import socket
    import subprocess
    import sys
    import time

    echo = (
        "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('', 7777))\n"
        "while True: data, who = s.recvfrom(99); s.sendto(data, who)"
    )
    with Network(["far"]) as network:
        far = subprocess.Popen(network.command("far", [sys.executable, "-c", echo]))
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as local:
                local.connect((network.address("far"), 7777))
                local.settimeout(0.2)

                def trip_s() -> float:
                    started = time.perf_counter()
                    try:
                        local.send(b"?")
                        local.recv(9)
                    except OSError:
                        return float("inf")
                    return time.perf_counter() - started

                while trip_s() == float("inf"):
                    pass  # Until it listens.
                network.slow(HERE, "far", delay_ms=20)
                assert 0.04 <= min(trip_s() for _ in range(5)) < 0.1
                network.heal(HERE, "far")
                network.cut("far", HERE, one_way=True)
                assert trip_s() == float("inf")
                network.heal_all()
                assert min(trip_s() for _ in range(5)) < 0.04
        finally:
            far.kill()
            far.wait()


@needs_networks
async def test_streams_survive_schedules_of_faults_and_frauds_are_noticed(tmp_path: Path) -> None:
    async with Stack(make_settings(tmp_path), tmp_path) as stack:
        runner = Runner(stack, await load_references(stack, CACHE))
        await runner.settle()
        results = [await runner.run(seed, schedule(seed)) for seed in SCHEDULES]
        for result in results:
            assert result.passed, (result.seed, result.problems, result.timeline)
            assert len(result.errors) <= MAX_SHARE_OF_ONE * len(result.verdicts)
        assert sum(verdict.hit for result in results for verdict in result.verdicts) > 5
        assert await session_keys(stack)  # What streams leave goes by itself, a while later.

        # An orchestrator that tells one token otherwise, or twice.
        for action in ("alter", "double"):
            fraud = Fault(
                Kind.POINT, 0.1, 0.0, ORCHESTRATORS[0], amount=20, point=SPOIL, action=action
            )
            result = await runner.run(0, [fraud])
            assert fraud in result.fired and len(result.problems) == 1, result.problems


@needs_networks
async def test_a_rolling_restart_under_load_fails_no_stream(tmp_path: Path) -> None:
    models = make_settings(tmp_path)
    async with Stack(rolling.settings(models.target, models.draft), tmp_path) as stack:
        rolled = await rolling.roll(stack, await load_references(stack, CACHE))
    assert not rolled.problems, rolled
    assert rolled.streams >= 20 and len(rolled.restarts) == 6
