"""Files that may be renewed while the process runs: certificates, tokens, key sets.

They are looked at by content, and only when somebody wants what is in them: no watcher to own, and
what a Kubernetes secret does (a symbolic link swapped under all files at once) is nothing special.
"""

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from outrider.errors import InvalidArgument

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
"""Seconds from one look at the files to the next."""

MAX_FILE_BYTES = 16 << 20
_MAX_READS = 4

T = TypeVar("T")
Contents = Mapping[str, bytes]
"""What is in each file, by the name of the setting that names it."""


class Renewed(Generic[T]):
    """A value made of files, and made anew when they change. May be used from any thread.

    New files that cannot be read or used change nothing: the value stays, and an error is logged
    once, with the files' paths and never with what is in them.
    """

    def __init__(self, paths: Mapping[str, str], make: Callable[[Contents], T]) -> None:
        """`paths` by the name of their settings; empty ones are left out. `make` must raise
        InvalidArgument for contents that it cannot use. Raises that now."""
        self._paths = {field: path for field, path in paths.items() if path}
        self._make = make
        contents = _read_settled(self._paths)
        self._value = make(contents)
        self._used = self._refused = _fingerprint(contents)
        self._complaint = ""
        self._next_look = time.monotonic() + LOOK_EVERY_S
        self._looking = threading.Lock()

    def get(self) -> T:
        """The value, of files as they were at most LOOK_EVERY_S ago."""
        if time.monotonic() >= self._next_look and self._looking.acquire(blocking=False):
            try:
                self._look()
                self._next_look = time.monotonic() + LOOK_EVERY_S
            finally:
                self._looking.release()
        return self._value

    def _look(self) -> None:
        try:
            contents = _read_settled(self._paths)
            found = _fingerprint(contents)
            if found in (self._used, self._refused):
                return
            self._refused = found
            self._value = self._make(contents)
        except InvalidArgument as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                logger.error(
                    "changed files cannot be used; what was in them before stays in force",
                    extra={"files": self._paths, "why": self._complaint},
                )
            return
        self._used, self._complaint = found, ""
        logger.info("changed files are in use", extra={"files": self._paths})


def read_file(path: str, field: str) -> bytes:
    """Contents of a file that a setting names. What is no file but a pipe (/dev/stdin, a shell's
    <(…)) can be read once only: what it held is kept. Raises InvalidArgument."""
    try:
        content = _read(path) if Path(path).is_file() else _read_pipe(path)
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror}", field=field) from error
    if len(content) > MAX_FILE_BYTES:
        raise InvalidArgument(f"{path} has more than {MAX_FILE_BYTES} bytes", field=field)
    return content


def _read(path: str) -> bytes:
    with Path(path).open("rb") as file:
        return file.read(MAX_FILE_BYTES + 1)


_pipes: dict[str, bytes] = {}
_piping = threading.Lock()


def _read_pipe(path: str) -> bytes:
    with _piping:
        if path not in _pipes:
            _pipes[path] = _read(path)
        return _pipes[path]


def _read_settled(paths: Mapping[str, str]) -> Contents:
    """All files, read again until nothing changes meanwhile: a key never meets the certificate of
    another one because they were swapped between two reads."""
    contents = _read_all(paths)
    for _ in range(_MAX_READS):
        again = _read_all(paths)
        if again == contents:
            break
        contents = again
    return contents


def _read_all(paths: Mapping[str, str]) -> Contents:
    return {field: read_file(path, field) for field, path in paths.items()}


def _fingerprint(contents: Contents) -> bytes:
    """Tells contents apart without keeping them: some are secret."""
    digest = hashlib.sha256()
    for field, content in contents.items():
        digest.update(f"{field}:{len(content)}:".encode() + content)
    return digest.digest()
