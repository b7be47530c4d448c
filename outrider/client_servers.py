"""The servers that a client may use: one connection each, made when it is needed."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from outrider.errors import InvalidArgument, Unavailable
from outrider.rpc.channel import ChannelSecurity, open_channel
from outrider.v1 import generation_pb2
from outrider.v1.generation_pb2_grpc import GenerationServiceStub

POLL_S = 0.01
KEEP_TRYING_S = 1.0
"""Failed attempts to connect are repeated for so long: a busy machine may be late to answer one."""


class Servers:
    """Addresses in the order in which they are tried; all calls go to the `current` one."""

    def __init__(
        self, addresses: Sequence[str], security: ChannelSecurity | None, *, keepalive_s: float
    ) -> None:
        if not addresses or not all(addresses):
            raise InvalidArgument("give at least one address, none empty", field="address")
        self.addresses = tuple(addresses)
        self.current = 0
        self._channels = [
            open_channel(address, security, keepalive_s=keepalive_s) for address in addresses
        ]
        self._stubs: list[Any] = [
            GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
            for channel in self._channels
        ]

    def __len__(self) -> int:
        return len(self.addresses)

    def stub(self, server: int) -> Any:
        return self._stubs[server]

    def failed(self, server: int) -> None:
        """A call to it failed: the next one goes on with its successor. Of many that fail together
        the first one counts."""
        if server == self.current:
            self.current = (server + 1) % len(self)

    async def connect(self, timeout_s: float) -> None:
        """Until one of them answers, or Unavailable."""
        started = time.perf_counter()
        failed: set[int] = set()
        while time.perf_counter() - started < self._patience(failed, timeout_s):
            for server, channel in enumerate(self._channels):
                state = channel.get_state(try_to_connect=True)
                if state is grpc.ChannelConnectivity.READY:
                    self.current = server
                    return
                if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                    failed.add(server)
            await asyncio.sleep(POLL_S)
        names = ", ".join(self.addresses)
        if not failed:
            raise Unavailable(f"{names} did not answer within {timeout_s:g} s")
        reason = await self._reason(min(failed), timeout_s)
        raise Unavailable(f"no Outrider server answers at {names}{reason}")

    def _patience(self, failed: set[int], timeout_s: float) -> float:
        return min(KEEP_TRYING_S, timeout_s) if len(failed) == len(self) else timeout_s

    async def _reason(self, server: int, timeout_s: float) -> str:
        try:  # A call on a failed channel is refused at once, with the reason.
            request = generation_pb2.ListModelsRequest()
            await self.stub(server).ListModels(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return f": {error.details()}"
        return ""

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels))
