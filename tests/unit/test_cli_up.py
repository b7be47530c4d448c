"""`outrider up` with dummy programs, as a process: its table, its JSON, its ends."""

import asyncio
import json
import os
import signal
import sys

import pytest
from test_cli_stack import gone, programs, until, written  # noqa: F401  (programs: a fixture)

CODE = """
import functools, sys
from outrider.cli import __main__, up
from outrider.cli.stack import LocalStack
up.LocalStack = functools.partial(LocalStack, programs=PROGRAMS)
sys.exit(__main__.main(["up", "--store-url", "redis://x", *sys.argv[1:]]))
"""


@pytest.fixture
async def stack(programs, tmp_path):  # noqa: F811
    path = tmp_path / "stack.json"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", f"PROGRAMS = {programs!r}\n{CODE}", "--json", str(path)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    await until(path.exists)
    yield process, json.loads(path.read_text())
    if process.returncode is None:
        process.kill()
        await process.communicate()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
async def test_a_signal_drains_everything(stack, tmp_path, number, code):
    process, told = stack
    assert told["pid"] == process.pid
    assert [service["role"] for service in told["services"]] == ["target", "draft", "orchestrator"]
    assert told["address"] == told["services"][-1]["address"]
    await asyncio.sleep(0.3)
    process.send_signal(number)
    out, err = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == code
    assert b"Traceback" not in err
    for word in ("process", "model", "address", "pid", "target-0", told["address"]):
        assert word in out.decode()
    assert all(gone(service["pid"]) for service in told["services"])
    stopped = [row["role"] for row in written(tmp_path) if row["what"] == "stopped"]
    assert stopped[0] == "orchestrator" and len(stopped) == 3


async def test_a_dead_target_ends_it_with_1_and_says_which(stack):
    process, told = stack
    os.kill(told["services"][1]["pid"], signal.SIGKILL)  # the draft: reported, no more
    await asyncio.sleep(0.5)
    assert process.returncode is None
    os.kill(told["services"][0]["pid"], signal.SIGKILL)
    _, err = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 1
    assert "draft-0 was killed by SIGKILL" in err.decode()
    assert "error: target-0 was killed by SIGKILL" in err.decode()
    assert "target loads" in err.decode()
    assert all(gone(service["pid"]) for service in told["services"])


async def test_kill_9_leaves_nothing_running(stack):
    process, told = stack
    process.kill()
    await process.communicate()
    await until(lambda: all(gone(service["pid"]) for service in told["services"]))
