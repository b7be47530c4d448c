"""A model's chat template, set up as `transformers` sets it up, in a process that can be stopped.

Its source comes from the model's files, and its input from callers: neither may hold up or take
down the orchestrator. What Jinja's sandbox does not bound, its process does (`chat_child`).
"""

import json
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence

from outrider.errors import (
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
    Unsupported,
)
from services.orchestrator import chat_child

MAX_TEMPLATE_CHARS = 1 << 20
TIME_LIMIT_S = 5.0
"""Seconds that a template has for one conversation. Real ones take a millisecond; the rest is for
a busy machine."""

_GRACE_S = 2.0
_START_S = 30.0
_MAX_REPLY_BYTES = 128 << 20
_CANNOT_CONTINUE = "the model's chat template cannot continue a session"

Messages = Sequence[tuple[str, str]]
"""(role, content) of each message."""


class ChatTemplate:
    """Renders conversations, one after the other; may be used from any thread, of which it takes
    the time: never from an event loop's."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        """Raises FailedPrecondition for a template that cannot be used."""
        if len(source) > MAX_TEMPLATE_CHARS:
            raise FailedPrecondition(
                f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS}"
            )
        self._setup = {"source": source, "special_tokens": special_tokens}
        self._lock = threading.Lock()
        self._child = _Child(self._setup)

    def render(self, messages: Messages, *, add_generation_prompt: bool = True) -> str:
        """The conversation as text.

        Raises InvalidArgument where the template itself refuses the messages (roles that it does
        not know or that do not alternate), Unsupported where it fails, or takes more time, memory
        or text than it may, ResourceExhausted where others keep it busy.
        """
        if not self._lock.acquire(timeout=TIME_LIMIT_S):
            raise ResourceExhausted(
                f"the model's chat template is busy; retry in {TIME_LIMIT_S:g} s",
                retry_after_s=TIME_LIMIT_S,
            )
        try:
            if not self._child.alive:
                self._child = _Child(self._setup)
            reply = self._child.ask(
                {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
            )
        finally:
            self._lock.release()
        if "refused" in reply:
            raise InvalidArgument(
                f"the model's chat template refuses it: {reply['refused']}", field="messages"
            )
        if "failed" in reply:
            raise Unsupported(
                f"the model's chat template fails on these messages: {reply['failed']}"
            )
        return reply["text"]

    def render_after_reply(self, messages: Messages) -> tuple[str, str]:
        """A dummy conversation up to the end of the assistant's reply, and what follows it."""
        marker = _absent_marker(content for _, content in messages)
        short = [("user", "x"), ("assistant", marker)]
        long = [("user", "y"), ("assistant", "z"), *short]
        try:
            self.render(short, add_generation_prompt=False)
        except InvalidArgument as error:
            raise Unsupported(f"{_CANNOT_CONTINUE}: it takes no plain dialogue") from error
        before, after = self._split(short, marker, messages)
        if self._split(long, marker, messages)[1] != after:
            raise Unsupported(f"{_CANNOT_CONTINUE}: what it adds depends on earlier messages")
        return before, after

    def _split(self, dialogue: Messages, marker: str, messages: Messages) -> tuple[str, str]:
        parts = self.render([*dialogue, *messages]).split(marker)
        if len(parts) != 2:
            raise Unsupported(f"{_CANNOT_CONTINUE}: it does not keep a reply once and as it is")
        return parts[0] + marker, parts[1]


class _Child:
    """The process, with the template loaded. It ends with whoever started it, and when told."""

    def __init__(self, setup: Mapping[str, object]) -> None:
        """Raises FailedPrecondition where the template cannot be compiled, Unavailable where no
        process can be started."""
        # Isolated: nothing of the surroundings is imported, and no secret is in its environment.
        command = [sys.executable, "-I", chat_child.__file__, str(TIME_LIMIT_S)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in ("TZ",) if name in os.environ},
                cwd="/",
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            raise Unavailable(f"no process for the chat template: {error.strerror}") from error
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests = self._process.stdin.fileno()
        self._replies = self._process.stdout.fileno()
        for descriptor in (self._requests, self._replies):
            os.set_blocking(descriptor, False)
        self.stop = weakref.finalize(self, _stop, self._process)
        try:
            reply = self.ask(setup, starts=True)
        except Unsupported as error:
            raise FailedPrecondition(f"the chat template cannot be compiled: {error}") from error
        if "failed" in reply:
            self.stop()
            raise FailedPrecondition(f"the chat template cannot be compiled: {reply['failed']}")

    @property
    def alive(self) -> bool:
        return self.stop.alive and self._process.poll() is None

    def ask(self, message: Mapping[str, object], *, starts: bool = False) -> dict[str, str]:
        """The answer; Unsupported where there is none, and the process is gone then."""
        deadline = time.monotonic() + TIME_LIMIT_S + (_START_S if starts else _GRACE_S)
        data = json.dumps(message).encode()
        try:
            self._write(struct.pack(">I", len(data)) + data, deadline)
            (length,) = struct.unpack(">I", self._read(4, deadline))
            if length > _MAX_REPLY_BYTES:
                raise EOFError
            reply: dict[str, str] = json.loads(self._read(length, deadline))
            return reply
        except (OSError, EOFError, ValueError):  # OSError: a broken pipe, TimeoutError
            self.stop()
        if self._process.returncode in (-signal.SIGALRM, -signal.SIGKILL):
            raise Unsupported(
                f"the model's chat template does not come to an end within {TIME_LIMIT_S:g} s"
            )
        raise Unsupported("the model's chat template broke down on these messages")

    def _write(self, data: bytes, deadline: float) -> None:
        left = memoryview(data)
        while left:
            _wait(self._requests, select.POLLOUT, deadline)
            left = left[os.write(self._requests, left[: 1 << 16]) :]

    def _read(self, length: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < length:
            _wait(self._replies, select.POLLIN, deadline)
            part = os.read(self._replies, min(length - len(data), 1 << 20))
            if not part:
                raise EOFError
            data += part
        return bytes(data)


def _wait(descriptor: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(max(deadline - time.monotonic(), 0) * 1000):
        raise TimeoutError


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """End the process, unless it has ended, and let go of its pipes."""
    for pipe in (process.stdin, process.stdout):
        if pipe:
            pipe.close()
    try:
        # It may be on its way to end by itself, by its alarm say: that is how we know why.
        process.wait(0.2)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _absent_marker(texts: Iterable[str]) -> str:
    texts = list(texts)
    number = 0
    while any((marker := f"outrider reply {number}") in text for text in texts):
        number += 1
    return marker
