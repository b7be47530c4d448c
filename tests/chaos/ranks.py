"""The other ranks of a target group, forked ahead from the service's process: one that has imported
torch already is there in no time, as the services themselves are (serve.py).

A service starts its ranks by `subprocess.Popen`, in `outrider.worker.crew`. Here that gets a
process which waits for what it is told on its standard input, and then does what it would have done
anyway.
"""

import contextlib
import ctypes
import io
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import IO, Any

_POLL_S = 0.01
_PR_SET_PDEATHSIG = 1


class ForkedRank:
    """As much of a `Popen` as a crew needs."""

    def __init__(self, pid: int, stdin: IO[bytes]) -> None:
        self.pid = pid
        self.stdin = stdin
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        ends = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > ends:
                raise subprocess.TimeoutExpired("rank", timeout or 0.0)
            time.sleep(_POLL_S)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def fork_ahead(count: int) -> None:
    """Make so many ranks for the crew of this process, which has no threads yet."""
    from outrider.worker import crew

    ranks = [_fork() for _ in range(count)]

    def start(command: list[str], stdin: int) -> ForkedRank:
        assert command[-1] == "outrider.worker.follower" and stdin == subprocess.PIPE
        return ranks.pop(0)

    crew.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=start, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired
    )


def _fork() -> ForkedRank:
    reads, writes = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.close(reads)
        return ForkedRank(pid, os.fdopen(writes, "wb"))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    os.dup2(reads, 0)
    os.close(reads)
    os.close(writes)
    _follow()


def _follow() -> None:
    from outrider.worker import follower

    sys.stdin = io.TextIOWrapper(os.fdopen(0, "rb"))
    code: Any = 1
    try:
        follower.main()
        code = 0
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    finally:
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0)
