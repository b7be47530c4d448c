"""Connecting, and the unary calls."""

import socket
import time

import pytest
from test_client_fakes import FakeService, serving

from outrider import client_resume
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
    monkeypatch.setattr(client_resume, "FIRST_BACKOFF_S", 0.001)
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


async def test_one_of_several_servers_is_enough():
    dead = f"127.0.0.1:{free_port()}"
    async with serving(FakeService()) as alive:
        for addresses in ([dead, alive], [alive, dead], (alive,)):
            started = time.perf_counter()
            async with await OutriderClient.connect(address=addresses) as client:
                assert await client.tokenize("a") == (97,)
            assert time.perf_counter() - started < 3


async def test_a_call_goes_to_the_next_server_when_one_has_gone():
    first, second = FakeService(), FakeService()
    async with serving(second) as two:
        async with serving(first) as one:
            client = await OutriderClient.connect(address=[one, two])
            assert await client.tokenize("a") == (97,)
        async with client:
            assert await client.tokenize("b") == (98,)


async def test_where_no_server_answers_all_are_named():
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    with pytest.raises(Unavailable) as nobody:
        await OutriderClient.connect(address=addresses)
    assert all(address in nobody.value.message for address in addresses)
    for wrong in ([], [""], ""):
        with pytest.raises(InvalidArgument, match="address"):
            await OutriderClient.connect(address=wrong)
    with pytest.raises(InvalidArgument, match="keepalive_s"):
        await OutriderClient.connect(address=addresses, keepalive_s=0.5)
