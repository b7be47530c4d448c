"""What a caller gets of another one's session, by each method that there is."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import ServiceDescriptor

from outrider.client import OutriderClient
from outrider.errors import NotFound, OutriderError, PermissionDenied
from outrider.rpc.channel import ChannelSecurity, open_channel
from outrider.rpc.status import error_from_rpc
from outrider.v1 import diagnosis_pb2, generation_pb2
from scripted_workers import Parts, Rig, Stream
from test_resume import callers

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

SECRET = "what alice alone may know"
KEY = "alice's key, which is no secret"
SERVICES: tuple[ServiceDescriptor, ...] = (
    *generation_pb2.DESCRIPTOR.services_by_name.values(),
    *diagnosis_pb2.DESCRIPTOR.services_by_name.values(),
)
METHODS = {method.name: method for service in SERVICES for method in service.methods}
NAMING = {"session_id", "request_id", "idempotency_key"}
"""Fields by which a request names what may be somebody else's."""


def text(prompt: str) -> list[generation_pb2.PromptPart]:
    return [generation_pb2.PromptPart(text=prompt)]


def refused_requests(session_id: str, request_id: str) -> dict[str, Any]:
    """Of each method that can name a session, a request that names alice's."""
    both = {"session_id": session_id, "request_id": request_id}
    return {
        "Generate": generation_pb2.GenerateRequest(session_id=session_id, prompt=text("and?")),
        "Resume": generation_pb2.ResumeRequest(**both),
        "Cancel": generation_pb2.CancelRequest(**both),
        "GetSession": generation_pb2.GetSessionRequest(
            session_id=session_id, include_tokens=True, include_text=True
        ),
        "DeleteSession": generation_pb2.DeleteSessionRequest(session_id=session_id),
    }


OTHERS: dict[str, Any] = {
    "ListSessions": generation_pb2.ListSessionsRequest(),
    "PurgeSessions": generation_pb2.PurgeSessionsRequest(),
    "ListModels": generation_pb2.ListModelsRequest(),
    "Tokenize": generation_pb2.TokenizeRequest(prompt=text("x")),
    "Diagnose": diagnosis_pb2.DiagnoseRequest(samples=1),
}
"""Methods whose requests name nobody's session."""


async def ask(channel: grpc.aio.Channel, name: str, request: Any) -> list[bytes] | OutriderError:
    """What a method answers, as it came over the wire, or what it refuses with."""
    method = METHODS[name]
    kind = "unary_stream" if method.server_streaming else "unary_unary"
    start = getattr(channel, kind)(f"/{method.containing_service.full_name}/{name}")
    call = start(request.SerializeToString(), timeout=20)
    try:
        return [part async for part in call] if method.server_streaming else [await call]
    except grpc.aio.AioRpcError as error:
        return error_from_rpc(error)


async def test_no_method_is_forgotten_here() -> None:
    naming = {
        name for name, method in METHODS.items() if NAMING & set(method.input_type.fields_by_name)
    }
    assert not any(method.client_streaming for method in METHODS.values())
    assert naming == set(refused_requests("", ""))
    assert set(OTHERS) == set(METHODS) - naming


async def test_no_method_gives_a_caller_anything_of_another_ones_session(
    stack: Rig, parts: Parts, tmp_path: Path
) -> None:
    async with callers(stack, parts, tmp_path) as (alice, _):
        done = await alice.complete(SECRET, max_tokens=8, keep_session=True, request_id="mine")
        stream = Stream(alice, SECRET, max_tokens=300, ignore_eos=True, request_id="running")
        await stream.reaches(3)
        running_id = stream.chunks[0].session_id
        kept = await alice.client.get_session(done.session_id, include_tokens=True)
        assert len(kept.token_ids) > 8
        bob = ChannelSecurity(token_file=str(tmp_path / "bob"))
        async with open_channel(alice.address, bob) as channel:
            for ids in ((done.session_id, "mine"), (running_id, "running")):
                for name, request in refused_requests(*ids).items():
                    refused = await ask(channel, name, request)
                    assert isinstance(refused, PermissionDenied), (name, refused)
                    assert SECRET not in str(refused), name
            answers = {name: await ask(channel, name, asked) for name, asked in OTHERS.items()}
        assert isinstance(answers.pop("Diagnose"), PermissionDenied)
        for name, answer in answers.items():
            assert isinstance(answer, list), (name, answer)
            for known in (SECRET, done.session_id, running_id, "mine"):
                assert not any(known.encode() in part for part in answer), name
        assert answers["PurgeSessions"] == [b""], "nothing was there to be purged"

        # None of it has touched what is alice's.
        after = await alice.client.get_session(done.session_id, include_tokens=True)
        assert after.token_ids == kept.token_ids
        assert len((await stream.end()).token_ids) == 300
        await alice.client.delete_session(done.session_id)


async def test_ids_that_callers_choose_are_theirs_alone(
    stack: Rig, parts: Parts, tmp_path: Path
) -> None:
    """The same request id and the same idempotency key mean something else by each caller."""
    async with callers(stack, parts, tmp_path) as (alice, bob):

        async def asked(client: OutriderClient, prompt: str) -> tuple[str, tuple[int, ...]]:
            request = generation_pb2.GenerateRequest(
                prompt=text(prompt),
                stop=generation_pb2.StopCriteria(max_tokens=120, ignore_eos=True),
                request_id="the same",
                idempotency_key=KEY,
                keep_session=True,
            )
            responses = [r async for r in client._servers.stub(0).Generate(request, timeout=60)]
            ids = tuple(i for r in responses for i in r.token_ids)
            return responses[0].session_id, ids

        mine, yours = await asyncio.gather(asked(alice.client, SECRET), asked(bob, "another"))
        assert mine[0] != yours[0] and mine[1] != yours[1]
        assert len(mine[1]) == len(yours[1]) == 120
        # By the key a caller finds its own, at most.
        await bob.delete_session(yours[0])
        cancel = generation_pb2.CancelRequest(request_id="the same", idempotency_key=KEY)
        async with open_channel(
            alice.address, ChannelSecurity(token_file=str(tmp_path / "bob"))
        ) as channel:
            assert isinstance(await ask(channel, "Cancel", cancel), NotFound)
        assert (await alice.client.get_session(mine[0])).length > 120
        await alice.client.delete_session(mine[0])
