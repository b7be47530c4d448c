"""The command line as a user has it: the demo pair, a real answer, and nothing left behind."""

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest

QUESTION = "Why is the sky blue? Answer in one sentence."
MAX_TOKENS = 24


async def watch(pid: int) -> dict[int, psutil.Process]:
    """All descendants that the process ever has, until it ends."""
    seen: dict[int, psutil.Process] = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        while parent.status() != psutil.STATUS_ZOMBIE:
            seen.update({child.pid: child for child in parent.children(recursive=True)})
            await asyncio.sleep(0.1)
    return seen


def running(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended; a process that has got an old one's id is not among them."""
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


async def start(*words: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "outrider.cli", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def generate(*flags: str) -> dict[str, Any]:
    """What `outrider generate --json` prints; nothing that it started is left."""
    process = await start("generate", "--json", "--max-tokens", str(MAX_TOKENS), *flags, QUESTION)
    family, (out, err) = await asyncio.gather(watch(process.pid), process.communicate())
    assert process.returncode == 0, err.decode()
    assert len(family) == (0 if "--address" in flags else 4)
    assert running(family.values()) == []
    answer: dict[str, Any] = json.loads(out)
    return answer


def check_speculation(answer: dict[str, Any]) -> None:
    print(answer["text"], answer["mean_acceptance_length"])
    assert "light" in answer["text"] or "blue" in answer["text"]
    assert len(answer["token_ids"]) == answer["tokens"] <= MAX_TOKENS
    assert answer["mean_acceptance_length"] > 1.3
    assert 0 < answer["acceptance_rate"] <= 1
    assert {"accepted", "plain"} <= set(answer["sources"])


@pytest.mark.timeout(240)
async def test_a_question_is_answered_alike_with_and_without_speculation(tmp_path: Path) -> None:
    """`outrider up` serves the demo pair, `outrider generate` asks it; Ctrl-C ends all of it."""
    told = tmp_path / "up.json"
    up = await start("up", "--dtype", "float32", "--json", str(told))
    try:
        while not told.exists():
            assert up.returncode is None, await up.communicate()
            await asyncio.sleep(0.1)
        stack = json.loads(told.read_text())
        roles = [service["role"] for service in stack["services"]]
        assert sorted(roles) == ["draft", "orchestrator", "store", "target"]
        services = psutil.Process(up.pid).children()
        assert {child.pid for child in services} == {s["pid"] for s in stack["services"]}
        family = psutil.Process(up.pid).children(recursive=True)
        address = ("--address", stack["address"])
        guessed = await generate(*address, "--k", "4")
        plain = await generate(*address, "--k", "0")
    finally:
        if up.returncode is None:
            up.send_signal(signal.SIGINT)
        await up.communicate()
    assert running(family) == []
    check_speculation(guessed)
    assert guessed["token_ids"] == plain["token_ids"] and guessed["text"] == plain["text"]
    assert set(plain["sources"]) == {"plain"} and plain["acceptance_rate"] is None


@pytest.mark.exactness
@pytest.mark.timeout(240)
async def test_generate_brings_its_own_stack_and_takes_it_away() -> None:
    check_speculation(await generate("--dtype", "float32", "--k", "4"))
