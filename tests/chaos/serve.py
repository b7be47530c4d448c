"""The services as the harness runs them: forked from one process that has imported them already.

`python -m tests.chaos.serve` reads orders, JSON objects, one a line, and answers likewise:

    {"id": 1, "role": "target", "argv": [...], "env": {...}, "namespace": "/proc/...", "log": "..."}
    {"id": 1, "pid": 4711}      it runs
    {"pid": 4711, "status": -9} it has ended: its exit code, or the signal that killed it

What runs is the service's own `main`, in a process, a session and a network namespace of its own,
with its named points (points.py) wrapped from outside. Importing torch takes five seconds of a
core, a fork a few milliseconds: that is all that this is for. The role `exec` runs a program.

`python -m tests.chaos.serve orchestrator --targets ...` runs one service in this process.
"""

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import sys
from typing import Any

ROLES = ("orchestrator", "target", "draft")
EXEC = "exec"
FOLLOWER = ("torch.distributed", "outrider.worker.following")
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve orders until stdin ends; what was forked dies with this process."""
    for role in ROLES:
        importlib.import_module(f"services.{role}.service")
    # What services import when they serve; nothing here may start a thread.
    for name in ("uvloop", "torch", "transformers", "outrider.engine.cpu_pass", *FOLLOWER):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    order = _forked_with()
    if order is not None:
        _become(order)


def _forked_with() -> dict[str, Any] | None:
    """Fork as ordered; returns the order in the child, None in the end."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Until a service listens to its points.
    orders = b""
    _say({"ready": os.getpid()})
    while True:
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _reap()
        if 0 not in ready:
            continue
        data = os.read(0, 1 << 16)
        if not data:
            return None
        *lines, orders = (orders + data).split(b"\n")
        for line in lines:
            order: dict[str, Any] = json.loads(line)
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(woken)
                os.close(wake)
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
                if os.getppid() != parent:
                    os._exit(1)
                return order
            _say({"id": order["id"], "pid": pid})


def _reap() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _say({"pid": pid, "status": os.waitstatus_to_exitcode(status)})


def _say(answer: dict[str, Any]) -> None:
    os.write(1, json.dumps(answer).encode() + b"\n")


def _become(order: dict[str, Any]) -> None:
    """In the forked process: another session, network and log, then the service."""
    os.setsid()
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, fd in ((0, nothing), (1, log), (2, log)):
        os.dup2(fd, number)
    _enter(order["namespace"])
    os.environ.update(order["env"])
    if order["role"] == EXEC:
        os.execvp(order["argv"][0], order["argv"])
    _run(order["role"], order["argv"])


def _enter(namespace: str) -> None:
    fd = os.open(namespace, os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    os.close(fd)


def _run(role: str, argv: list[str]) -> None:
    from .points import install
    from .ranks import fork_ahead

    sys.argv = [role, *argv]
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    fork_ahead(int(os.environ.get(f"OUTRIDER_{role.upper()}_TENSOR_PARALLEL", 1)) - 1)
    install(role)
    importlib.import_module(f"services.{role}.service").main()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _run(sys.argv[1], sys.argv[2:])
    else:
        main()
