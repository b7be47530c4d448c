"""Runs a command that cannot outlive its parent: `python child.py PARENT_PID COMMAND...`.

On Linux the kernel kills the process when the thread that started it ends, kill -9 included; the
setting survives exec. Run as a file (with -I), so that it imports nothing of Outrider.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    parent = int(argv[0])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # It died before the line above.
        sys.exit(1)
    try:
        os.execvp(argv[1], argv[1:])
    except OSError as error:
        sys.exit(f"cannot run {argv[1]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
