"""The subcommands against a scripted server: what they print, and their exit codes."""

import asyncio
import io
import json
import signal
import sys

import pytest
from rich.console import Console
from test_client_fakes import (
    FakeService,
    playing,
    response,
    serving,
)

from outrider.cli import chat
from outrider.cli.__main__ import build_parser, main
from outrider.cli.render import StreamPrinter, segments
from outrider.cli.store import free_port
from outrider.client import GenerationChunk, GenerationOptions, OutriderClient
from outrider.errors import InvalidArgument, Unavailable
from outrider.types import TokenSource


async def run(*argv: str) -> int:
    args = build_parser().parse_args(argv)
    return await args.run(args)


async def start_cli(*argv: str) -> asyncio.subprocess.Process:
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "outrider.cli", *argv, stdin=asyncio.subprocess.DEVNULL, **pipes
    )


async def test_generate_streams_text_and_ends_with_one_line_of_totals(capsys):
    service = FakeService()
    async with serving(service) as address:
        flags = ("--k", "4", "--alternatives", "1", "--stop", "x")
        assert await run("generate", "--address", address, "hello", *flags) == 0
    out, err = capsys.readouterr()
    assert out == "Hi there!\n"
    line = err.strip()
    assert "\n" not in line
    for part in ("4 tokens", "tok/s", "acceptance rate 50.0%", "mean acceptance length 2.00"):
        assert part in line
    assert "first token" in line
    (request,) = service.requests
    assert request.prompt[0].chat.messages[0].role == "user"
    assert request.speculation.num_speculative_tokens == 4
    assert request.speculation.alternatives == 1 and not request.speculation.HasField("fan_out")
    assert list(request.stop.stop_strings) == ["x"]


async def test_generate_raw_session_and_stdin(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    service = FakeService()
    async with serving(service) as address:
        await run("generate", "--address", address, "--raw", "--session", "abc", "--keep-session")
    assert service.requests[0].prompt[0].text == "from a pipe"
    assert service.requests[0].session_id == "abc" and service.requests[0].keep_session
    assert f"session {'s' * 22}" in capsys.readouterr().err


async def test_generate_json_is_one_object_with_everything(capsys):
    async with serving(FakeService()) as address:
        await run("generate", "--address", address, "hello", "--json")
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert out.count("\n") == 1 and not err
    assert data["text"] == "Hi there!" and data["token_ids"] == [10, 11, 12, 13]
    assert data["sources"] == ["plain", "accepted", "accepted", "recovered"]
    assert (data["finish_reason"], data["seed"], data["tokens"]) == ("eos", 7, 4)
    assert data["acceptance_rate"] == 0.5 and data["mean_acceptance_length"] == 2.0
    assert data["usage"]["speculation"]["accepted_by_position"] == [1, 1, 0, 0]
    assert data["usage"]["time"]["draft_us"] == 300 and data["ttft_s"] > 0


def printed(*chunks: GenerationChunk, show: bool = True, terminal: bool = True) -> str:
    file = io.StringIO()
    console = Console(
        file=file, force_terminal=terminal, color_system="standard", width=20, highlight=False
    )
    printer = StreamPrinter(console, show_speculation=show)
    for chunk in chunks:
        printer.show(chunk)
    return file.getvalue()


MIXED = GenerationChunk(
    text="abécd",
    token_ids=(1, 2, 3, 4),
    sources=tuple(TokenSource),
    text_segments=((2, TokenSource.ACCEPTED), (1, TokenSource.BONUS), (2, TokenSource.PLAIN)),
)


def test_show_speculation_colours_each_tokens_own_characters():
    assert list(segments(MIXED)) == [
        ("ab", TokenSource.ACCEPTED),
        ("é", TokenSource.BONUS),
        ("cd", TokenSource.PLAIN),
    ]
    assert printed(MIXED) == "\x1b[32mab\x1b[0m\x1b[36mé\x1b[0mcd"
    recovered = GenerationChunk(text="x", text_segments=((1, TokenSource.RECOVERED),))
    assert printed(recovered) == "\x1b[33mx\x1b[0m"
    assert printed(MIXED, show=False) == "abécd"


def test_a_model_cannot_steer_the_terminal():
    evil = GenerationChunk(text="a\x1b[2Jb\x07\x9bc\n\td[bold]")
    assert printed(evil, show=False) == "a[2Jbc\n\td[bold]"
    assert printed(evil, show=False, terminal=False) == "a\x1b[2Jb\x07\x9bc\n\td[bold]"


def test_long_lines_are_not_broken():
    assert printed(GenerationChunk(text="word " * 20), show=False) == "word " * 20


async def test_chat_continues_its_session_with_only_the_new_message():
    service = FakeService()
    printer = StreamPrinter(Console(file=io.StringIO()))
    async with serving(service) as address, await OutriderClient.connect(address=address) as client:
        conversation = chat.Conversation(client, GenerationOptions(max_tokens=5))
        await conversation.say("one", printer)
        await conversation.say("two", printer)
        conversation.start_over()
        await conversation.say("three", printer)
    assert [r.session_id for r in service.requests] == ["", "s" * 22, ""]
    assert all(r.keep_session and len(r.prompt[0].chat.messages) == 1 for r in service.requests)
    assert service.requests[1].prompt[0].chat.messages[0].content == "two"


async def test_chat_reads_lines_until_quit():
    async with serving(FakeService()) as address:
        piped = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "outrider.cli", "chat", "--address", address),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await piped.communicate(b"hello\n/what\n/new\nagain\n/quit\nnever\n")
    assert piped.returncode == 0, err
    assert out.decode().count("Hi there!") == 2
    assert err.decode().count("tok/s") == 2


async def test_ctrl_c_exits_130_and_cancels_the_request():
    async def stalls(request, context):
        yield response(0, [1], text="Hi")
        await asyncio.Event().wait()

    service = FakeService(stalls)
    async with serving(service) as address:
        process = await start_cli("generate", "--address", address, "hello")
        assert process.stdout is not None
        assert await process.stdout.read(2) == b"Hi"
        process.send_signal(signal.SIGINT)
        _, err = await asyncio.wait_for(process.communicate(), 10)
        assert process.returncode == 130
        assert b"Traceback" not in err
        await asyncio.wait_for(service.cancelled.wait(), 5)


async def test_server_errors_are_one_line_with_field_and_hint():
    service = FakeService(playing([InvalidArgument("99 is above 16", field="k")]))
    async with serving(service) as address:
        process = await start_cli("generate", "--address", address, "hello", "--k", "99")
        out, err = await process.communicate()
    assert process.returncode == 1 and not out
    assert err.decode().strip() == (
        "error: k: 99 is above 16 / `outrider generate --help` lists what is allowed"
    )


def test_no_server_is_one_line_that_says_what_to_do(capsys):
    assert main(["generate", "--address", f"127.0.0.1:{free_port()}", "hello"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: no Outrider server answers at 127.0.0.1:")
    assert "outrider up" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["fly"],
        ["generate", "x", "--k", "many"],
        ["generate", "x", "--mode", "guess"],
        ["up", "--targets", "0"],
        ["up", "--drafts", "-1"],
        ["bench", "--compare", "plain,magic"],
        ["bench", "--limit", "0"],
    ],
)
def test_wrong_usage_exits_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert "usage: outrider" in capsys.readouterr().err


async def test_a_death_in_the_stack_explains_a_failed_call(monkeypatch):
    from outrider.cli import backend
    from outrider.cli.stack import StackError

    class Stack:
        async def failed(self):
            return StackError("target-0 was killed by SIGKILL", detail="out of memory")

    cause = await backend._cause(Stack(), Unavailable("connection reset"))  # type: ignore[arg-type]
    assert "target-0" in str(cause)
