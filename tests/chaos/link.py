"""Hosts of one's own on this machine, joined by links that delay, lose and cut.

    with Network(["orchestrator", "draft"]) as network:
        network.slow("orchestrator", "draft", delay_ms=0.5)  # each way
        command = network.command("draft", ["python", "-m", "services.draft", "--host", ...])
        address = network.address("draft")

Each host is a network namespace with an address; the process that makes the network has one too
(`HERE`), so that it can talk to all of them. Between any two hosts packets go through a small
program (link.c), which can be told for each direction how late they come, how many never do, and
whether the link is cut. A cut says nothing to anybody: connections become half-open, without a
reset.

Nothing is left behind, however this process ends: namespaces and devices live as long as the
processes that hold them open.
"""

import ctypes
import fcntl
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

HERE = "here"
_SOURCE = Path(__file__).with_name("link.c")
_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_MTU = 8960
_NEEDED = ("ip", "nsenter", "cc")


class NoNetwork(Exception):
    """This machine does not let us make networks; the text says what is missing."""


def why_not() -> str:
    """What is missing here; "" where networks can be made."""
    try:
        with Network(["probe"]):
            return ""
    except NoNetwork as error:
        return str(error)


@dataclass(frozen=True, slots=True)
class LinkState:
    """One direction of a link."""

    delay_ms: float = 0.0
    loss: float = 0.0
    """Share of packets that are lost, 0 to 1."""
    cut: bool = False


GOOD = LinkState()


class Network:
    """Some hosts; made on entry, gone on exit. `names` are theirs, besides `HERE`.

    Raises NoNetwork on entry where this machine has no rights or tools for it.
    """

    def __init__(self, names: Sequence[str], *, seed: int = 0) -> None:
        self.names = (HERE, *names)
        self._seed = seed
        self._numbers = {name: number for number, name in enumerate(self.names)}
        self._states: dict[tuple[str, str], LinkState] = {}
        self._subnet = ""
        self._spaces: dict[str, int] = {}
        self._devices: list[int] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            self._process = None
        for fd in (*self._devices, *self._spaces.values()):
            os.close(fd)
        self._devices, self._spaces = [], {}

    # --- what hosts need ----------------------------------------------------------------------

    def address(self, name: str) -> str:
        """The IPv4 address of a host."""
        return f"{self._subnet}.{self._numbers[name] + 1}"

    def namespace(self, name: str) -> str:
        """A path to the host's network namespace, for as long as this process lives."""
        if name == HERE:
            return "/proc/self/ns/net"
        return f"/proc/{os.getpid()}/fd/{self._spaces[name]}"

    def command(self, name: str, command: Sequence[str]) -> list[str]:
        """What runs a command on a host; it keeps the process id."""
        if name == HERE:
            return list(command)
        return ["nsenter", f"--net={self.namespace(name)}", "--", *command]

    # --- what becomes of packets --------------------------------------------------------------

    def state(self, source: str, destination: str) -> LinkState:
        return self._states.get((source, destination), GOOD)

    def set(self, source: str, destination: str, state: LinkState) -> None:
        """One direction, from now on."""
        self._states[source, destination] = state
        self._tell(source, destination, state)

    def slow(self, one: str, other: str, *, delay_ms: float, back_ms: float | None = None) -> None:
        """Delay packets in each direction; `back_ms` from `other` to `one`, else as much."""
        self._change(one, other, delay_ms=delay_ms)
        self._change(other, one, delay_ms=delay_ms if back_ms is None else back_ms)

    def lose(self, one: str, other: str, *, loss: float) -> None:
        self._change(one, other, loss=loss)
        self._change(other, one, loss=loss)

    def cut(self, one: str, other: str, *, one_way: bool = False) -> None:
        """No packet comes through any more; `one_way`: from `one` to `other` only."""
        self._change(one, other, cut=True)
        if not one_way:
            self._change(other, one, cut=True)

    def heal(self, one: str, other: str) -> None:
        """As it was in the beginning, in both directions."""
        for source, destination in ((one, other), (other, one)):
            self.set(source, destination, GOOD)

    def heal_all(self) -> None:
        for (source, destination), state in list(self._states.items()):
            if state != GOOD:
                self.set(source, destination, GOOD)

    def _change(self, source: str, destination: str, **changes: float) -> None:
        self.set(source, destination, replace(self.state(source, destination), **changes))  # type: ignore[arg-type]

    def _tell(self, source: str, destination: str, state: LinkState) -> None:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        values = (
            self._numbers[source],
            self._numbers[destination],
            round(state.delay_ms * 1000),
            round(state.loss * 1_000_000),
            int(state.cut),
            self._seed,
        )
        process.stdin.write(" ".join(map(str, values)) + "\n")
        process.stdin.flush()
        if process.stdout.readline() != "ok\n":
            raise RuntimeError("the program that joins the hosts has died")

    # --- making it ----------------------------------------------------------------------------

    def _make(self) -> None:
        missing = [tool for tool in _NEEDED if shutil.which(tool) is None]
        if missing:
            raise NoNetwork(f"{', '.join(missing)} is not installed")
        program = _compiled()
        self._subnet = _free_subnet()
        for name in self.names[1:]:
            self._spaces[name] = _in_new_namespace(self._add_device)
        self._add_device()
        devices = [self._devices[-1], *self._devices[:-1]]
        for name, number in self._numbers.items():
            self._configure(name, number)
        self._process = subprocess.Popen(
            [
                str(program),
                *(f"{fd}:{self.address(n)}" for fd, n in zip(devices, self.names, strict=True)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=devices,
        )

    def _add_device(self) -> None:
        """A TUN device in the namespace of this thread."""
        try:
            fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise NoNetwork(f"/dev/net/tun cannot be opened: {error.strerror}") from None
        self._devices.append(fd)
        try:
            flags = _IFF_TUN | _IFF_NO_PI
            fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", self._device_name(), flags))
        except OSError as error:
            raise NoNetwork(f"no TUN device can be made: {error.strerror}") from None

    def _device_name(self) -> bytes:
        return f"chaos{os.getpid() % 1_000_000}".encode()

    def _configure(self, name: str, number: int) -> None:
        device = self._device_name().decode()
        for order in (
            ["link", "set", "lo", "up"],
            ["link", "set", device, "up", "mtu", str(_MTU)],
            ["addr", "add", f"{self.address(name)}/24", "dev", device],
        ):
            command = self.command(name, ["ip", *order])
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise NoNetwork(f"{' '.join(command)} failed: {done.stderr.strip()}")


def _in_new_namespace(act: Callable[[], None]) -> int:
    """Do something in a new network namespace; a descriptor that keeps it alive. A thread of its
    own goes there and ends: this process stays where it is."""
    result: list[int | BaseException] = []

    def run() -> None:
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.unshare(_CLONE_NEWNET):
                reason = os.strerror(ctypes.get_errno())
                raise NoNetwork(f"no network namespace can be made ({reason}); root is needed")
            act()
            thread = threading.get_native_id()
            result.append(os.open(f"/proc/self/task/{thread}/ns/net", os.O_RDONLY | os.O_CLOEXEC))
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(result[0], BaseException):
        raise result[0]
    return result[0]


def _free_subnet() -> str:
    """The first three numbers of a private subnet that nothing here routes to."""
    routes = subprocess.run(
        ["ip", "-4", "route"], capture_output=True, text=True, check=False
    ).stdout
    for attempt in range(256):
        number = os.getpid() + 97 * attempt
        subnet = f"10.{96 + number // 256 % 32}.{number % 256}"
        if f"{subnet}." not in routes:
            return subnet
    raise NoNetwork("no private subnet is free")


def _compiled() -> Path:
    """The program, compiled once for each state of its source."""
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"outrider-chaos-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    program = folder / f"link-{digest}"
    if not program.exists():
        scratch = folder / f"link-{digest}.{os.getpid()}"
        command = ["cc", "-O2", "-Wall", "-Wextra", "-o", str(scratch), str(_SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NoNetwork(f"the C compiler fails: {done.stderr.strip()}")
        scratch.rename(program)
    return program
