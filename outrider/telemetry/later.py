"""What can be done a moment later, off the thread that serves."""

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

MAX_WAITING = 4096
_CLOSE_S = 1.0


class Later:
    """Does small jobs on a thread of its own, in order; what comes while too many wait is dropped.

    The thread starts with the first job.
    """

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self.dropped = 0
        self._jobs: queue.Queue[Callable[[], object] | None] = queue.Queue(max_waiting)
        self._thread: threading.Thread | None = None

    def do(self, job: Callable[[], object]) -> None:
        """From one thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
            self._thread.start()
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            self.dropped += 1

    def finish(self) -> None:
        """Until all that was given is done."""
        self._jobs.join()

    def close(self) -> None:
        """Do what is left, for a moment at most."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                logger.exception("telemetry failed")
            finally:
                self._jobs.task_done()
