"""Who watches that all ranks of a group live: a rank that is gone, or hangs, takes the group along.

Each rank says a byte over a connection of its own every now and then, rank 0 to all, the others to
rank 0. An end of the connection is a death, silence is a hang; a pass that does not end is one too,
where nobody else notices (a kernel waits for its peer for ever). A rank that ends with an error
says why, so that rank 0's log and status name the cause and not its effects. Silence means nothing
while ranks load; rank 0 says from when on it does.
"""

import contextlib
import logging
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping

logger = logging.getLogger(__name__)

_LOADING, _BEAT, _WORDS, _BYE = b"-", b".", b"!", b"q"
_LENGTH = struct.Struct("!H")
_BEATS_A_TIMEOUT = 5
_MAX_REASON = 1000


class Watch:
    """Beats, and listens to the others' beats, on a thread of its own.

    `on_loss` is called once, on that thread, with the reason. `explain` may say more of a rank that
    has hung up: how its process ended.
    """

    def __init__(
        self,
        peers: Mapping[int, socket.socket],
        *,
        timeout_s: float,
        on_loss: Callable[[str], None],
        explain: Callable[[int], str] = lambda rank: "",
    ) -> None:
        self._peers = dict(peers)
        self._timeout_s = timeout_s
        self._on_loss = on_loss
        self._explain = explain
        self._heard = dict.fromkeys(peers, time.monotonic())
        self._armed = False
        self._longest_s: float | None = None
        self._since: float | None = None
        self._told = False
        self._lost = threading.Event()
        self._closing = threading.Event()
        self.reason = ""
        self._thread = threading.Thread(target=self._run, name="outrider-watch", daemon=True)

    def start(self) -> None:
        """Deaths count from now on."""
        for connection in self._peers.values():
            connection.setblocking(False)
        self._thread.start()

    def arm(self, longest_pass_s: float | None = None) -> None:
        """Rank 0: silence counts from now on, for all ranks. A pass may take so long at most."""
        now = time.monotonic()
        self._heard = dict.fromkeys(self._heard, now)
        self._longest_s = longest_pass_s
        self._armed = True

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """A pass is going on within."""
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None

    def verdict(self, wait_s: float) -> str:
        """Why the group is lost, if that is known within `wait_s`; else an empty text."""
        return self.reason if self._lost.wait(wait_s) else ""

    def say_why(self, reason: str) -> None:
        """Tell the others why this rank is about to end."""
        text = reason.encode()[:_MAX_REASON]
        self._say(_WORDS + _LENGTH.pack(len(text)) + text)

    def close(self) -> None:
        """The group has done its work: hanging up is no death any more."""
        self._closing.set()
        self._say(_BYE)
        self._thread.join(self._timeout_s)
        for connection in self._peers.values():
            connection.close()

    def _say(self, data: bytes) -> None:
        for connection in self._peers.values():
            with contextlib.suppress(OSError):  # Gone, or it does not read: its silence counts.
                connection.send(data)

    def _run(self) -> None:
        interval = self._timeout_s / _BEATS_A_TIMEOUT
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._peers.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            next_beat = time.monotonic()
            while not (self._closing.is_set() or self._lost.is_set()):
                now = time.monotonic()
                if now >= next_beat:
                    self._say(_BEAT if self._armed else _LOADING)
                    next_beat = now + interval
                for key, _ in selector.select(min(interval, 0.1)):
                    self._listen(key.data, selector)
                self._check_silence()

    def _listen(self, rank: int, selector: selectors.BaseSelector) -> None:
        connection = self._peers[rank]
        try:
            data = connection.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._heard[rank] = time.monotonic()
        if _WORDS in data:
            told = data.partition(_WORDS)[2]
            length = int.from_bytes(told[: _LENGTH.size])
            text = told[_LENGTH.size : _LENGTH.size + length].decode(errors="replace")
            self._lose(f"rank {rank} failed: {text}")
        elif _BYE in data:
            selector.unregister(connection)
            self._heard.pop(rank)
            if not self._heard:
                self._closing.set()
        elif _BEAT in data:
            self._armed = True
        elif not data:
            ended = self._explain(rank)
            self._lose(f"rank {rank} is gone" + (f": it {ended}" if ended else ""))

    def _check_silence(self) -> None:
        if not self._armed:
            return
        now, since = time.monotonic(), self._since
        for rank, heard in self._heard.items():
            if now - heard > self._timeout_s:
                self._lose(f"rank {rank} has not answered for {self._timeout_s:g} s")
        if self._longest_s and since is not None and now - since > self._longest_s:
            self._lose(f"a pass has not ended for {self._longest_s:g} s: a rank hangs")

    def _lose(self, reason: str) -> None:
        if self._lost.is_set():
            return
        self.reason = reason
        self._lost.set()
        self._on_loss(reason)
