"""gRPC is told how to wait for the network where that was tried, unless the environment says so."""

import os
import subprocess
import sys

import pytest

from outrider import polling

VARIABLE = "GRPC_EXPERIMENTS"
BEFORE = os.environ.get(VARIABLE)


@pytest.mark.parametrize(
    ("version", "known"),
    [("1.80.0", True), ("1.85.3", True), ("1.82rc1", True), ("1.79.9", False), ("1.86.0", False)],
)
def test_versions_that_were_not_tried_are_left_alone(monkeypatch, version, known):
    monkeypatch.setattr(polling.metadata, "version", {"grpcio": version}.get)
    monkeypatch.setenv(VARIABLE, "")  # Also what is set below is undone.
    monkeypatch.delenv(VARIABLE)
    polling.poll_directly()
    assert (VARIABLE in os.environ) == known
    monkeypatch.setenv(VARIABLE, "other")
    polling.poll_directly()
    assert os.environ[VARIABLE] == "other"


def test_it_is_said_before_grpc_is_there_and_grpc_knows_it():
    code = (
        "import sys; from outrider.polling import poll_directly; assert 'grpc' not in sys.modules;"
        "poll_directly(); import grpc.aio, asyncio\n"
        "async def main():\n    await grpc.aio.insecure_channel('unix:/nowhere').close()\n"
        "asyncio.run(main())"
    )
    env = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "xperiment" not in done.stderr


def test_tests_leave_no_trace_of_it():
    """gRPC of this process, which has many event loops, and its children are as they were."""
    assert os.environ.get(VARIABLE) == BEFORE
