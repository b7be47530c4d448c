"""The session store over TLS, with certificates that are renewed while it is in use."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from certificates import Issued, cert_pem, certificate, pem
from outrider.errors import Unavailable
from store_servers import begin, commit, create, open_store, running_server

pytestmark = pytest.mark.timeout(60)


def write(folder: Path, authority: Issued, **options: float) -> Path:
    """ca, crt and key of one authority, for either end."""
    folder.mkdir(exist_ok=True)
    issued = certificate("localhost", issuer=authority, **options)
    (folder / "ca").write_bytes(cert_pem(authority))
    (folder / "crt").write_bytes(cert_pem(issued))
    (folder / "key").write_bytes(pem(issued[1]))
    return folder


class TlsFront:
    """Speaks TLS in front of a plain server, asks for client certificates, can change its own."""

    def __init__(self, port: int) -> None:
        self._behind = port
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None
        self.port = 0
        self.connections = 0

    async def serve(self, files: Path) -> None:
        """Hang up on everybody, and go on with these certificates."""
        await self.close()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files / "crt", files / "key")
        context.load_verify_locations(files / "ca")
        context.verify_mode = ssl.CERT_REQUIRED
        self._server = await asyncio.start_server(
            self._relay, "127.0.0.1", self.port, ssl=context, reuse_address=True
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        behind_reader, behind_writer = await asyncio.open_connection("127.0.0.1", self._behind)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await source.read(1 << 16):
                    sink.write(data)
            sink.close()
            with contextlib.suppress(OSError):
                await sink.wait_closed()

        for source, sink in ((reader, behind_writer), (behind_reader, writer)):
            self._writers.append(sink)
            task = asyncio.create_task(pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        if self._server:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[TlsFront]:
    with running_server("valkey", tmp_path) as server:
        front = TlsFront(server.port)
        yield front
        await front.close()


async def test_renewed_certificates_are_used_without_a_restart(
    front: TlsFront, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = certificate("first", ca=True), certificate("second", ca=True)
    own = write(tmp_path / "own", first)
    await front.serve(write(tmp_path / "server", first))
    url = f"rediss://127.0.0.1:{front.port}/0"
    files = {f"{name}_file": str(own / part) for name, part in
             (("ca", "ca"), ("cert", "crt"), ("key", "key"))}  # fmt: skip
    async with open_store(url, **files, command_timeout_s=2) as store:
        fence = await create(store)
        await begin(store, fence, [1])
        connections = front.connections
        write(own, second)
        # The connection that stands is used on.
        assert await commit(store, fence, [1], [2]) == 2
        assert front.connections == connections

        await front.serve(write(tmp_path / "server", second))
        with contextlib.suppress(Unavailable):  # It notices that its connection is gone.
            await store.ping()
        assert await commit(store, fence, [1, 2], [3]) == 3

        (own / "key").write_bytes(b"no key")
        await front.serve(tmp_path / "server")
        for _ in range(3):
            with contextlib.suppress(Unavailable):
                await store.ping()
        assert await commit(store, fence, [1, 2, 3], [4]) == 4
    assert "cannot be used" in caplog.text and "no key" not in caplog.text
