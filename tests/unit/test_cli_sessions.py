"""`outrider sessions` against a scripted server."""

import json
from typing import Any

import pytest
from test_cli_commands import run
from test_client_fakes import FakeService, serving

from outrider.cli.__main__ import main
from outrider.errors import InvalidArgument, NotFound
from outrider.rpc.status import abort_with
from outrider.v1 import common_pb2, generation_pb2

IDS = [f"{n:022d}" for n in range(5)]


class Keeper(FakeService):
    """Has five sessions, in pages of two at most."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[generation_pb2.ListSessionsRequest] = []
        self.deleted: list[str] = []

    async def ListSessions(self, request: Any, context: Any) -> Any:
        self.asked.append(request)
        later = [session_id for session_id in IDS if session_id > request.page_token]
        page = later[: min(request.page_size, 2)]
        return generation_pb2.ListSessionsResponse(
            sessions=[
                generation_pb2.SessionSummary(
                    session_id=session_id,
                    model="fake",
                    length=40,
                    num_generations=2,
                    state=generation_pb2.SESSION_STATE_INTERRUPTED,
                    ttl_seconds=61,
                    age_seconds=3700,
                    request_id="[red]",
                )
                for session_id in page
            ],
            next_page_token=page[-1] if len(later) > len(page) else "",
            total=5,
        )

    async def GetSession(self, request: Any, context: Any) -> Any:
        if request.session_id not in IDS:
            await abort_with(context, NotFound("no such session"))
        run_ = generation_pb2.Generation(
            request_id="r",
            prompt_end=3,
            seed=2**64 - 1,
            sampling=common_pb2.SamplingParams(temperature=0.5),
            finish_reason=generation_pb2.FINISH_REASON_STOP_STRING,
            text="Hé\x1b[2J" if request.include_text else "",
            matched_stop="\n",
            engine_versions={"outrider": "0.1"},
        )
        run_.stop.stop_strings.append("\n")
        return generation_pb2.GetSessionResponse(
            session_id=request.session_id,
            model="fake",
            length=4,
            epoch=7,
            generations=[run_],
            token_ids=[1, 2, 3, 4] if request.include_tokens else [],
            state=generation_pb2.SESSION_STATE_IDLE,
            owner="here",
        )

    async def DeleteSession(self, request: Any, context: Any) -> Any:
        if request.session_id not in IDS:
            await abort_with(context, NotFound("no such session"))
        self.deleted.append(request.session_id)
        return generation_pb2.DeleteSessionResponse()

    async def PurgeSessions(self, request: Any, context: Any) -> Any:
        self.deleted += IDS
        return generation_pb2.PurgeSessionsResponse(sessions=5, kv_blocks=70)


async def test_list_goes_through_all_pages(capsys):
    service = Keeper()
    async with serving(service) as address:
        assert await run("sessions", "list", "--address", address) == 0
        lines = capsys.readouterr().out.splitlines()
        assert await run("sessions", "list", "--address", address, "--json") == 0
        data = json.loads(capsys.readouterr().out)
        assert await run("sessions", "list", "--address", address, "--limit", "3") == 0
        limited = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["session", "state", "model"]
    assert [line.split()[0] for line in lines[1:]] == IDS
    for part in ("interrupted", "fake", "40", "1:01:40", "0:01:01", "[red]"):
        assert part in lines[1]
    assert [one["session_id"] for one in data] == IDS and data[0]["state"] == "interrupted"
    assert len(limited) == 5 and limited[-1] == "3 of 5"
    assert [request.page_token for request in service.asked[:3]] == ["", IDS[1], IDS[3]]


async def test_show_tells_each_turn_and_its_text_when_asked(capsys):
    async with serving(Keeper()) as address:
        await run("sessions", "show", "--address", address, IDS[2])
        short = capsys.readouterr().out
        await run("sessions", "show", "--address", address, IDS[2], "--text")
        long = capsys.readouterr().out
    for part in (IDS[2], "idle", "here, epoch 7", "temperature 0.5", "stop_string", "seed 1844"):
        assert part in short
    assert "Hé" not in short and "Hé[2J" in long and "\x1b" not in long


async def test_export_is_json_with_the_whole_log(capsys, tmp_path):
    async with serving(Keeper()) as address:
        await run("sessions", "export", "--address", address, IDS[0])
        out = capsys.readouterr().out
        file = tmp_path / "session.json"
        await run("sessions", "export", "--address", address, IDS[0], "--output", str(file))
    assert file.read_text(encoding="utf-8") == out
    data = json.loads(out)
    assert data["outrider_session"] == 1 and data["token_ids"] == [1, 2, 3, 4]
    [turn] = data["generations"]
    assert turn["text"] == "Hé\x1b[2J" and turn["seed"] == 2**64 - 1
    assert turn["finish_reason"] == "stop_string" and turn["stop"]["stop_strings"] == ["\n"]
    assert turn["sampling"]["temperature"] == 0.5 and turn["logprobs"] is None
    assert turn["engine_versions"] == {"outrider": "0.1"} and turn["durability"] == "require"


async def test_delete_says_what_it_did_and_stops_at_what_it_cannot(capsys):
    service = Keeper()
    async with serving(service) as address:
        await run("sessions", "delete", "--address", address, IDS[1], IDS[3])
        assert capsys.readouterr().out.split() == ["deleted", IDS[1], "deleted", IDS[3]]
        with pytest.raises(NotFound):
            await run("sessions", "delete", "--address", address, "x" * 22, IDS[0])
    assert service.deleted == [IDS[1], IDS[3]]


@pytest.mark.parametrize(
    "argv", [["sessions"], ["sessions", "list"], ["sessions", "show", "--address", "a:1"]]
)
def test_wrong_usage_exits_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert "usage: outrider sessions" in capsys.readouterr().err


async def test_several_addresses_are_tried_in_turn(capsys):
    async with serving(Keeper()) as address:
        for given in (f"127.0.0.1:1,{address}", f"ipv4:127.0.0.1:1,{address}"):
            assert await run("sessions", "list", "--address", given) == 0
            assert IDS[4] in capsys.readouterr().out


async def test_purge_is_said_first_and_done_when_it_is_meant(capsys):
    service = Keeper()
    async with serving(service) as address:
        with pytest.raises(InvalidArgument, match=r"5 live sessions .* --yes"):
            await run("sessions", "purge", "--address", address)
        assert not service.deleted
        assert await run("sessions", "purge", "--address", address, "--yes") == 0
    assert capsys.readouterr().out == "removed 5 sessions and 70 KV blocks\n"
    assert service.deleted == IDS
