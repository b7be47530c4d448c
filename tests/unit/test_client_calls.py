"""Connecting, and the unary calls."""

import socket
import time

import pytest
from test_client_fakes import FakeService, serving

from outrider import client as client_module
from outrider.cli.store import free_port
from outrider.client import Message, OutriderClient
from outrider.errors import InvalidArgument, NotFound, Unavailable


async def test_connecting_to_nothing_fails_at_once_and_says_where():
    address = f"127.0.0.1:{free_port()}"
    started = time.perf_counter()
    with pytest.raises(Unavailable, match=address):
        await OutriderClient.connect(address=address)
    assert time.perf_counter() - started < 3


async def test_a_server_that_is_silent_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        started = time.perf_counter()
        with pytest.raises(Unavailable, match="answer"):
            await OutriderClient.connect(address=f"127.0.0.1:{port}", timeout_s=0.3)
    assert time.perf_counter() - started < 3


async def test_unary_calls_return_values():
    async with (
        serving(FakeService()) as address,
        await OutriderClient.connect(address=address) as client,
    ):
        (model,) = await client.list_models()
        ids = await client.tokenize([Message("user", "ab")])
        session = await client.get_session("s" * 22, include_tokens=True)
    assert (model.name, model.proposers, model.eos_token_ids) == ("fake", ("draft",), (2,))
    assert ids == (97, 98)
    assert session.token_ids == (1, 2, 3, 4) and session.length == 4
    assert session.generations[0].seed == 9
    assert session.generations[0].finish_reason is None


async def test_errors_arrive_with_type_message_and_field(monkeypatch):
    monkeypatch.setattr(client_module, "FIRST_BACKOFF_S", 0.001)
    service = FakeService()
    async with serving(service) as address, await OutriderClient.connect(address=address) as client:
        service.unary_failures = [NotFound("no session x", field="session_id")]
        with pytest.raises(NotFound) as caught:
            await client.get_session("x")
        assert caught.value.field == "session_id" and caught.value.message == "no session x"
        service.unary_failures = [Unavailable("not yet"), Unavailable("not yet")]
        assert await client.tokenize("a") == (97,)


async def test_messages_and_ids_do_not_mix():
    async with (
        serving(FakeService()) as address,
        await OutriderClient.connect(address=address) as client,
    ):
        with pytest.raises(InvalidArgument, match="prompt"):
            await client.tokenize([Message("user", "a"), 3])  # type: ignore[list-item]
