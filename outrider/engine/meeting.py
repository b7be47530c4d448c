"""Where the ranks of a group meet: who may join, and the connections that each then has to rank 0.

A rank connects twice, for steps and for the watch. Rank 0 sends a nonce, the rank answers with an
HMAC of it under the group's token and gets one back, so that neither talks to a stranger by
accident. Then it learns where the store of `torch.distributed` is, and under which name, drawn at
random, this group meets in it.
"""

import contextlib
import enum
import hmac
import logging
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    Store,
    TCPStore,
)

from outrider.engine.group import Seat
from outrider.errors import FailedPrecondition, InvalidArgument, Unauthenticated, Unavailable

logger = logging.getLogger(__name__)

_VERSION = 1
_HELLO = struct.Struct("!8sHHHH")
_MAGIC = b"outrider"
_NONCE_BYTES = _PROOF_BYTES = 32
_WELCOME = struct.Struct("!BH16s")
"""1 for welcome, the store's port, the group's name; 0, the length of the reason, which follows."""
_TALK_S = 5.0
"""How long a stranger is listened to."""
_RETRY_S = 0.2


class Purpose(enum.IntEnum):
    """What a connection is for."""

    STEPS = 1
    WATCH = 2


class Links(NamedTuple):
    """The connections of a rank with rank 0."""

    steps: socket.socket
    watch: socket.socket


class Place(NamedTuple):
    """What a rank that has joined knows."""

    links: Links
    store: Store


def listen(host: str, port: int) -> socket.socket:
    """Listen where the ranks are to meet; an empty host means all of this machine's addresses."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
    except (OSError, OverflowError) as error:
        listener.close()
        raise InvalidArgument(
            f"cannot listen on {host}:{port}: {error}", field="group_host"
        ) from None
    return listener


def receive(
    listener: socket.socket,
    size: int,
    token: bytes,
    *,
    timeout_s: float,
    check: Callable[[], None] = lambda: None,
) -> tuple[dict[int, Links], Store]:
    """Rank 0: wait for the others; their links, and the store to meet in.

    `check` is called now and then and may raise. Raises Unavailable when not all come in time.
    """
    deadline = time.monotonic() + timeout_s
    host = listener.getsockname()[0]
    for_store = listen(host, 0)
    port = for_store.getsockname()[1]
    name = os.urandom(16)
    # The store listens on this socket from now on, and closes it.
    master = TCPStore(
        "127.0.0.1" if host == "0.0.0.0" else host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=for_store.detach(),
    )
    wanted = {(rank, purpose) for rank in range(1, size) for purpose in Purpose}
    came: dict[tuple[int, Purpose], socket.socket] = {}
    listener.settimeout(_RETRY_S)
    try:
        while came.keys() != wanted:
            check()
            if time.monotonic() > deadline:
                missing = sorted({rank for rank, _ in wanted - came.keys()})
                raise Unavailable(
                    f"after {timeout_s:g} s ranks {missing} have not joined the group"
                )
            _accept(listener, size, token, port, name, came)
    except BaseException:
        for connection in came.values():
            connection.close()
        raise
    finally:
        listener.close()
    links = {
        rank: Links(came[rank, Purpose.STEPS], came[rank, Purpose.WATCH]) for rank in range(1, size)
    }
    return links, PrefixStore(name.hex(), master)


def _accept(
    listener: socket.socket,
    size: int,
    token: bytes,
    store_port: int,
    name: bytes,
    came: dict[tuple[int, Purpose], socket.socket],
) -> None:
    """Take in who knocks, if anybody does for a moment."""
    try:
        connection, address = listener.accept()
    except TimeoutError:
        return
    try:
        key = _welcome(connection, size, came, token, store_port, name)
    except (OSError, ValueError) as error:
        logger.warning("a stranger was refused", extra={"peer": str(address), "why": str(error)})
        connection.close()
        return
    if key in came:
        came[key].close()
    came[key] = connection


def join(address: str, port: int, seat: Seat, token: bytes, *, timeout_s: float) -> Place:
    """Another rank: meet rank 0 at its address. Raises Unavailable when it is not there in time,
    Unauthenticated for another token, FailedPrecondition when it does not want this rank."""
    deadline = time.monotonic() + timeout_s
    steps, _, _ = _knock(address, port, seat, Purpose.STEPS, token, deadline)
    with _closed_on_error(steps):
        watch, store_port, name = _knock(address, port, seat, Purpose.WATCH, token, deadline)
    with _closed_on_error(steps), _closed_on_error(watch):
        left = max(deadline - time.monotonic(), 1.0)
        store = TCPStore(
            address,
            store_port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=left),
        )
        return Place(Links(steps, watch), PrefixStore(name.hex(), store))


def _knock(
    address: str, port: int, seat: Seat, purpose: Purpose, token: bytes, deadline: float
) -> tuple[socket.socket, int, bytes]:
    """Connect, again and again until the deadline: ranks start in any order."""
    while True:
        try:
            connection = socket.create_connection((address, port), timeout=_TALK_S)
            with _closed_on_error(connection):
                return connection, *_introduce(connection, seat, purpose, token)
        except OSError as error:
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"rank {seat.rank} does not get to rank 0 at {address}:{port}: {error}"
                ) from None
            time.sleep(_RETRY_S)


@contextlib.contextmanager
def _closed_on_error(connection: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise


def _introduce(
    connection: socket.socket, seat: Seat, purpose: Purpose, token: bytes
) -> tuple[int, bytes]:
    hello = _HELLO.pack(_MAGIC, _VERSION, purpose, *seat)
    connection.sendall(hello)
    nonce = _read(connection, _NONCE_BYTES)
    connection.sendall(_proof(token, b"join", nonce, hello))
    welcome, number, name = _WELCOME.unpack(_read(connection, _WELCOME.size))
    if not welcome:
        raise FailedPrecondition(
            f"rank 0 does not take rank {seat.rank} in: {_read(connection, number).decode()}"
        )
    if not hmac.compare_digest(
        _read(connection, _PROOF_BYTES), _proof(token, b"lead", nonce, hello)
    ):
        raise Unauthenticated("who listens at rank 0's address has another group token")
    _make_ready(connection)
    return number, name


def _welcome(
    connection: socket.socket,
    size: int,
    came: Mapping[tuple[int, Purpose], socket.socket],
    token: bytes,
    store_port: int,
    name: bytes,
) -> tuple[int, Purpose]:
    """Who it is that has connected; ValueError for who may not."""
    connection.settimeout(_TALK_S)
    hello = _read(connection, _HELLO.size)
    magic, version, number, rank, ranks = _HELLO.unpack(hello)
    if magic != _MAGIC or version != _VERSION:
        raise ValueError("it does not speak as a rank of this version does")
    purpose = Purpose(number)
    nonce = os.urandom(_NONCE_BYTES)
    connection.sendall(nonce)
    proof = _read(connection, _PROOF_BYTES)
    reason = ""
    if not hmac.compare_digest(proof, _proof(token, b"join", nonce, hello)):
        reason = "it has another group token"
    elif ranks != size or not 0 < rank < size:
        reason = f"it is rank {rank} of {ranks}, and the group has {size}"
    elif (rank, purpose) in came and not _hung_up(came[rank, purpose]):
        reason = f"there is a rank {rank} already"
    if reason:
        connection.sendall(_WELCOME.pack(0, len(reason), b"") + reason.encode())
        raise ValueError(reason)
    connection.sendall(_WELCOME.pack(1, store_port, name) + _proof(token, b"lead", nonce, hello))
    _make_ready(connection)
    return rank, purpose


def _make_ready(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _hung_up(connection: socket.socket) -> bool:
    """Whether the other end is gone; before the first step nothing else is said."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _proof(token: bytes, side: bytes, nonce: bytes, hello: bytes) -> bytes:
    return hmac.digest(token, side + nonce + hello, "sha256")


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise ConnectionError("hung up")
        data += piece
    return data
