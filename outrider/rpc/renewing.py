"""A channel whose certificates may change; gRPC fixes those of a channel when it is made."""

import asyncio
from collections.abc import Callable
from typing import Any, Self

import grpc
import grpc.aio

from outrider.rpc.files import Renewed

Method = tuple[str, str, tuple[Any, ...], tuple[tuple[str, Any], ...]]
"""Kind, as "unary_stream", path, and the other arguments."""


class _Generation:
    """A channel with the credentials that it was made with, and how many calls it carries."""

    def __init__(self, channel: grpc.aio.Channel, credentials: grpc.ChannelCredentials) -> None:
        self.channel = channel
        self.credentials = credentials
        self.calls = 0
        self._methods: dict[Method, Any] = {}

    def method(self, method: Method) -> Any:
        if method not in self._methods:
            kind, path, args, options = method
            self._methods[method] = getattr(self.channel, kind)(path, *args, **dict(options))
        return self._methods[method]


# mypy: disable-error-code="override"
class RenewingChannel(grpc.aio.Channel):
    """Calls go over a channel with the credentials of the day; when they change, new calls get a
    new channel, and the old one is closed once its last call is over. So streams go on undisturbed,
    and whoever comes back after an expired certificate comes with the renewed one."""

    def __init__(
        self,
        credentials: Renewed[grpc.ChannelCredentials],
        make: Callable[[grpc.ChannelCredentials], grpc.aio.Channel],
    ) -> None:
        self._credentials = credentials
        self._make = make
        self._retired: set[_Generation] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._current = self._open()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        generations = [self._current, *self._retired]
        self._retired.clear()
        await asyncio.gather(
            *(generation.channel.close(grace) for generation in generations), *self._closing
        )

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._use().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._use().channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._use().channel.channel_ready()

    def unary_unary(self, method: str, *args: Any, **options: Any) -> Any:
        return self._callable("unary_unary", method, args, options)

    def unary_stream(self, method: str, *args: Any, **options: Any) -> Any:
        return self._callable("unary_stream", method, args, options)

    def stream_unary(self, method: str, *args: Any, **options: Any) -> Any:
        return self._callable("stream_unary", method, args, options)

    def stream_stream(self, method: str, *args: Any, **options: Any) -> Any:
        return self._callable("stream_stream", method, args, options)

    def _callable(
        self, kind: str, path: str, args: tuple[Any, ...], options: dict[str, Any]
    ) -> Callable[..., Any]:
        method = (kind, path, args, tuple(options.items()))

        def start(*call_args: Any, **call_options: Any) -> Any:
            generation = self._use()
            call = generation.method(method)(*call_args, **call_options)
            generation.calls += 1
            call.add_done_callback(lambda _: self._ended(generation))
            return call

        return start

    def _use(self) -> _Generation:
        """The channel with the credentials as they are now."""
        if self._credentials.get() is not self._current.credentials:
            retired, self._current = self._current, self._open()
            self._retired.add(retired)
            self._close_if_unused(retired)
        return self._current

    def _open(self) -> _Generation:
        credentials = self._credentials.get()
        return _Generation(self._make(credentials), credentials)

    def _ended(self, generation: _Generation) -> None:
        generation.calls -= 1
        self._close_if_unused(generation)

    def _close_if_unused(self, generation: _Generation) -> None:
        if generation in self._retired and not generation.calls:
            self._retired.discard(generation)
            task = asyncio.get_running_loop().create_task(generation.channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
