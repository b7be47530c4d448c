"""A rank other than rank 0: `python -m outrider.worker.follower`, started by the service.

It gets its settings over standard input (JSON), and dies with the process that started it.
"""

import ctypes
import json
import os
import signal
import sys

from outrider.errors import OutriderError

_PR_SET_PDEATHSIG = 1


def main() -> None:
    told = json.load(sys.stdin.buffer)
    _die_with(told["parent"])
    # Rank 0 is told to stop, drains, and ends the group then.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    # Only now, because torch takes seconds to load.
    from outrider.worker.following import follow_rank_0

    try:
        follow_rank_0(told)
    except OutriderError as error:
        sys.exit(f"error: rank {told['seat'][0]}: {error}")


def _die_with(parent: int) -> None:
    """Let the kernel end this process with its parent, kill -9 included."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # It died before the line above.
        sys.exit(1)


if __name__ == "__main__":
    main()
