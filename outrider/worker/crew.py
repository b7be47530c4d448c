"""The crew of a group: how its ranks are started, meet, watch each other and end.

Rank 0 is the service itself. Every other rank is a child process (`outrider.worker.follower`) of
the service in its pod, which gets its settings and the group's token over its standard input and
dies with it. A group that has lost a rank ends: its streams with UNAVAILABLE, its process with
status 1, so that its sessions go on elsewhere and its supervisor starts it anew.
"""

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch

from outrider.engine import meeting
from outrider.engine.group import Group, Seat, open_group
from outrider.engine.group_runner import Leader, Shard, lead
from outrider.engine.steps import Teller
from outrider.engine.watch import Watch
from outrider.errors import InvalidArgument, Unavailable
from outrider.worker.ranks import DEFAULT_PORT, GroupConfig, Layout, name_rank

logger = logging.getLogger(__name__)

_ALL_ADDRESSES = ("", "0.0.0.0", "::")
_END_S = 10.0
_EXIT_STATUS_S = 0.5
_OWN_ERROR_S = 1.0

T = TypeVar("T")


class Crew:
    """The other ranks of this host, as child processes; at rank 0 also the group that it leads.

    Without other ranks there is nothing to start, to lose or to end.
    """

    def __init__(self, config: GroupConfig, layout: Layout) -> None:
        self.layout = layout
        self.leads = layout.first == 0
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why the group is lost, once it is."""
        self._config = config
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._group: Group | None = None
        self._watch: Watch | None = None
        self._teller: Teller | None = None
        self._leader: Leader | None = None
        host = config.group_host or ("127.0.0.1" if layout.one_host else "")
        port = config.group_port or (0 if layout.one_host else DEFAULT_PORT)
        self._address = layout.leader
        if self.leads:
            self._address = "127.0.0.1" if host in _ALL_ADDRESSES else host
        self._port = port
        self._listener: socket.socket | None = None
        self._token = b""
        if layout.size > 1:
            self._token = _token(config, layout)
            if not self._token:
                logger.warning("no group token: whoever gets to the group's port may join it")
            if self.leads:
                self._listener = meeting.listen(host, port)
                self._port = self._listener.getsockname()[1]

    def start(self, settings: Mapping[str, Any], tier: str) -> None:
        """Start the ranks of this host but rank 0, on a thread that lives as long as they may."""
        layout = self.layout
        if layout.size > 1 and self.leads:
            name_rank(0)
        for local in range(1 if self.leads else 0, layout.here):
            seat = Seat(layout.first + local, layout.size)
            told = {
                "settings": dict(settings),
                "tier": tier,
                "seat": seat,
                "local": local,
                "here": layout.here,
                "address": self._address,
                "port": self._port,
                "token": self._token.hex(),
                "parent": os.getpid(),
            }
            command = [sys.executable, "-m", "outrider.worker.follower"]
            child = subprocess.Popen(command, stdin=subprocess.PIPE)
            self._children[seat.rank] = child
            if child.stdin is not None:
                with contextlib.suppress(BrokenPipeError):  # It has ended; `meet` says how.
                    child.stdin.write(json.dumps(told).encode())
                    child.stdin.close()

    async def unless_lost(
        self,
        work: "Awaitable[T]",
        *,
        last: Callable[[str], Awaitable[None]] | None = None,
    ) -> T:
        """The result of `work`. Where the group is lost the process ends with status 1, after
        `last`, whatever its threads wait for."""
        working = asyncio.ensure_future(work)
        ends: set[asyncio.Future[Any]] = {working, self.lost}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if self.lost.done():
            # Where all ranks fail alike, this one's own error says it best.
            await asyncio.wait({working}, timeout=_OWN_ERROR_S if last is None else 0)
            if not working.done() or working.exception() is None:
                if last is not None:
                    await last(self.lost.result())
                self._give_up(self.lost.result())
        try:
            return await working
        except BaseException:
            self.kill()
            raise

    def note_end(self, running: "asyncio.Future[None]") -> None:
        """The worker's thread has ended; an error there is the loss of the group."""
        if self.layout.size > 1 and not running.cancelled() and (error := running.exception()):
            self._lose(str(error))

    async def end(self, thread: Executor) -> None:
        """Let the other ranks go, on the thread that computed, and see that the children end."""
        ending = asyncio.get_running_loop().run_in_executor(thread, self.end_now)
        await asyncio.wait({ending}, timeout=2 * _END_S)
        if not ending.done():
            self._give_up("the group did not end")
        await ending

    def meet(self, device: torch.device) -> Group:
        """Rank 0: wait for all ranks. On the thread that will compute."""
        if self._listener is None:
            raise RuntimeError("only rank 0 leads")
        config, size = self._config, self.layout.size
        links, store = meeting.receive(
            self._listener,
            size,
            self._token,
            timeout_s=config.group_start_s,
            check=self._check_children,
        )
        loop = self.lost.get_loop()

        def lose(reason: str) -> None:
            loop.call_soon_threadsafe(self._lose, reason)

        self._watch = Watch(
            {rank: link.watch for rank, link in links.items()},
            timeout_s=config.group_timeout_s,
            on_loss=lose,
            explain=self._how_it_ended,
        )
        self._watch.start()
        self._teller = Teller(link.steps for link in links.values())
        self._group = open_group(
            Seat(0, size),
            device,
            store,
            start_s=config.group_start_s,
            timeout_s=config.group_timeout_s,
            reduction=config.group_sums,
            one_host=self.layout.one_host,
        )
        logger.info("the group is complete", extra={"ranks": size})
        return self._group

    def lead(self, shard: Shard) -> Leader:
        """Rank 0's runner, once all ranks are ready."""
        if self._teller is None or self._watch is None:
            raise RuntimeError("the group has not met")
        self._leader = lead(shard, self._teller, self._watch)
        return self._leader

    def arm(self) -> None:
        """All is loaded: a rank that does not answer is lost from now on."""
        if self._watch is not None and self._group is not None:
            # Between CPUs gloo sees a rank that hangs in a pass, and a pass may take its time.
            on_gpu = self._group.device.type == "cuda"
            self._watch.arm(self._config.group_timeout_s if on_gpu else None)

    def end_now(self) -> None:
        """`end`, and wait for it."""
        if self._leader is not None:
            self._leader.end()
        if self._watch is not None:
            self._watch.close()
        if self._teller is not None:
            self._teller.close()
        deadline = time.monotonic() + _END_S
        for child in self._children.values():
            try:
                child.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        if self._group is not None:
            self._group.close()

    def kill(self) -> None:
        """End the children at once, stopped ones too."""
        for child in self._children.values():
            child.kill()

    async def supervise(self) -> None:
        """A pod without rank 0: wait until its ranks have ended. Raises Unavailable where one
        failed; the others are ended then."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            # Rank 0 drains and needs its group until then; its end is theirs.
            loop.add_signal_handler(number, logger.info, "rank 0 decides when the group ends")
        while any(child.poll() is None for child in self._children.values()):
            if self._failed():
                break
            await asyncio.sleep(0.1)
        self.kill()
        if failed := self._failed():
            raise Unavailable(failed)

    def _give_up(self, reason: str) -> NoReturn:
        self.kill()
        logging.shutdown()
        print(f"error: {reason}", file=sys.stderr, flush=True)
        os._exit(1)

    def _failed(self) -> str:
        for rank, child in self._children.items():
            if child.poll():
                return f"rank {rank} {_ending(child.returncode)}"
        return ""

    def _check_children(self) -> None:
        for rank, child in self._children.items():
            if child.poll() is not None:
                ended = _ending(child.returncode)
                raise Unavailable(f"rank {rank} {ended} before it had joined; its log says why")

    def _how_it_ended(self, rank: int) -> str:
        child = self._children.get(rank)
        if child is None:
            return ""
        try:
            return _ending(child.wait(_EXIT_STATUS_S))
        except subprocess.TimeoutExpired:
            return ""

    def _lose(self, reason: str) -> None:
        if not self.lost.done():
            logger.error("the group is lost", extra={"why": reason})
            self.lost.set_result(reason)


def _token(config: GroupConfig, layout: Layout) -> bytes:
    path = config.group_token_file
    if not path:
        return secrets.token_bytes(32) if layout.one_host else b""
    try:
        token = Path(path).read_bytes().strip()
    except OSError as error:
        raise InvalidArgument(
            f"cannot read {path!r}: {error.strerror}", field="group_token_file"
        ) from error
    if not token:
        raise InvalidArgument(f"{path!r} is empty", field="group_token_file")
    return token


def _ending(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
