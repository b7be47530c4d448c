"""One supervised child process: how it is started, watched and stopped."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from outrider.cli import child

LOG_TAIL_LINES = 15


def guarded(command: Sequence[str]) -> list[str]:
    """The command, run so that it dies with this process whatever ends it."""
    return [sys.executable, "-I", child.__file__, str(os.getpid()), *command]


class Child:
    """A process with a log file. It leads a session of its own: Ctrl-C goes to its parent only."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.log = log
        self._process = process

    @classmethod
    async def start(
        cls, name: str, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None
    ) -> "Child":
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *guarded(command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
            )
        return cls(name, process, log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()

    async def stop(self, grace_s: float) -> bool:
        """SIGTERM, and SIGKILL after `grace_s`; True when it ended by itself."""
        try:
            if self.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.terminate()
            async with asyncio.timeout(grace_s):
                await self.wait()
            return True
        except TimeoutError:
            return False
        finally:
            if self.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self.wait()

    def log_tail(self) -> str:
        """The last lines that it wrote."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-LOG_TAIL_LINES:])

    def how_it_ended(self) -> str:
        code = self.returncode
        if code is None:
            return "is running"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"
