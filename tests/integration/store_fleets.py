"""Redis as it is run where it must not go away: replicas with sentinels, and clusters."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis import Redis
from redis.crc import key_slot
from redis.exceptions import RedisError

from store_servers import Server, binary, free_port, running_server, spawn

SERVICE = "sessions"
FAST = ("--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1")


def wait(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(RedisError, OSError):
            if condition():
                return
        assert time.monotonic() < deadline, f"not in {timeout_s:g} s: {what}"
        time.sleep(0.02)


def ask(server: Server, *command: str | int) -> Any:
    with Redis.from_url(
        server.url, socket_timeout=5, decode_responses=True, password=server.password or None
    ) as redis:
        return redis.execute_command(*command)


def pause(server: Server) -> None:
    os.kill(server.process.pid, signal.SIGSTOP)


def resume(server: Server) -> None:
    os.kill(server.process.pid, signal.SIGCONT)


@contextlib.contextmanager
def running_pair(
    folder: Path, *options: str, password: str = ""
) -> Iterator[tuple[Server, Server]]:
    """A primary, and a replica that has caught up with it."""
    with contextlib.ExitStack() as stack:
        folders = [folder / "first", folder / "second"]
        for one in folders:
            one.mkdir()
        first = stack.enter_context(running_server("valkey", folders[0], *FAST, *options))
        of = ("--replicaof", f"127.0.0.1 {first.port}")
        second = stack.enter_context(running_server("valkey", folders[1], *FAST, *of, *options))
        first.password = second.password = password
        caught_up(second)
        yield first, second


def caught_up(replica: Server) -> None:
    wait(
        lambda: ask(replica, "INFO", "replication")["master_link_status"] == "up",
        "the replica follows",
    )


def promote(replica: Server) -> None:
    """As whoever runs a failover does, without asking the primary."""
    ask(replica, "REPLICAOF", "NO", "ONE")


@contextlib.contextmanager
def running_sentinels(
    folder: Path, primary: Server, *lines: str, count: int = 3, password: str = ""
) -> Iterator[list[Server]]:
    """Sentinels that find a primary dead after half a second."""
    with contextlib.ExitStack() as stack:
        found = []
        for number in range(count):
            own = folder / f"sentinel-{number}"
            own.mkdir()
            config = [
                f"sentinel monitor {SERVICE} 127.0.0.1 {primary.port} {count // 2 + 1}",
                f"sentinel down-after-milliseconds {SERVICE} 500",
                f"sentinel failover-timeout {SERVICE} 3000",
                *lines,
                *([f"sentinel sentinel-pass {password}"] if password else []),
            ]
            (own / "sentinel.conf").write_text("\n".join(config) + "\n")
            found.append(stack.enter_context(_running_sentinel(own, password)))
        wait(
            lambda: all(_peers(sentinel) == (count - 1, 1) for sentinel in found),
            "the sentinels know each other and the replica",
        )
        yield found


@contextlib.contextmanager
def _running_sentinel(folder: Path, password: str) -> Iterator[Server]:
    port, path = free_port(), binary("valkey")
    assert path is not None
    (folder / "sentinel.conf").write_text(
        f"port {port}\nbind 127.0.0.1\ndir {folder}\n" + (folder / "sentinel.conf").read_text()
    )
    command = [path, str(folder / "sentinel.conf"), "--sentinel"]
    server = Server(command, port, spawn(command, port), password)
    try:
        yield server
    finally:
        server.stop()


def _peers(sentinel: Server) -> tuple[int, int]:
    flat = ask(sentinel, "SENTINEL", "MASTER", SERVICE)
    state = flat if isinstance(flat, dict) else dict(zip(flat[::2], flat[1::2], strict=True))
    return int(state["num-other-sentinels"]), int(state["num-slaves"])


@dataclass
class Fleet:
    """A cluster: primaries that share the slots evenly, and one replica of the first."""

    primaries: list[Server]
    replica: Server

    @property
    def url(self) -> str:
        nodes = ",".join(f"127.0.0.1:{node.port}" for node in self.primaries[:2])
        return f"redis+cluster://{nodes}"

    @property
    def nodes(self) -> list[Server]:
        return [*self.primaries, self.replica]

    def id_of(self, node: Server) -> str:
        return str(ask(node, "CLUSTER", "MYID"))

    def owner(self, session_id: str) -> Server:
        """The primary that has a session's slot, as the first node that lives has it."""
        slot = key_slot(f"{{{session_id}}}".encode())
        for node in self.nodes:
            if node.process.poll() is not None:
                continue
            for first, last, primary in _ranges(node):
                if first <= slot <= last:
                    return next(n for n in self.nodes if n.port == primary)
        raise AssertionError(f"nobody has slot {slot}")

    def is_whole(self) -> bool:
        alive = [node for node in self.nodes if node.process.poll() is None]
        return all(
            ask(node, "CLUSTER INFO")["cluster_state"] == "ok"
            and sum(last - first + 1 for first, last, _ in _ranges(node)) == 16384
            for node in alive
        )


def _ranges(node: Server) -> list[tuple[int, int, int]]:
    reply = ask(node, "CLUSTER", "SLOTS")
    if isinstance(reply, dict):
        return [(a, b, int(found["primary"][1])) for (a, b), found in reply.items()]
    return [(int(a), int(b), int(primary[1])) for a, b, primary, *_ in reply]


@contextlib.contextmanager
def running_cluster(folder: Path, *options: str) -> Iterator[Fleet]:
    """Three primaries and a replica of the first, which takes over about a second after it died."""
    with contextlib.ExitStack() as stack:
        nodes = []
        for number in range(4):
            own = folder / f"node-{number}"
            own.mkdir()
            cluster = ("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
            fast = ("--cluster-node-timeout", "800", *FAST)
            nodes.append(
                stack.enter_context(running_server("valkey", own, *cluster, *fast, *options))
            )
        fleet = Fleet(nodes[:3], nodes[3])
        _join(fleet)
        yield fleet


def _join(fleet: Fleet) -> None:
    first = fleet.nodes[0]
    for number, node in enumerate(fleet.primaries):
        bounds = [16384 * i // 3 for i in (number, number + 1)]
        ask(node, "CLUSTER", "ADDSLOTSRANGE", bounds[0], bounds[1] - 1)
        ask(node, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
    for node in fleet.nodes[1:]:
        bus = node.command[node.command.index("--cluster-port") + 1]
        ask(first, "CLUSTER", "MEET", "127.0.0.1", node.port, bus)
    known = "cluster_known_nodes"
    wait(
        lambda: all(int(ask(n, "CLUSTER INFO")[known]) == 4 for n in fleet.nodes),
        "the nodes know each other",
    )
    ask(fleet.replica, "CLUSTER", "REPLICATE", fleet.id_of(first))
    wait(fleet.is_whole, "the cluster is whole")
    caught_up(fleet.replica)
