"""Renders a chat template in a process of its own; `chat_template` starts it and talks to it.

A template is a program that came with the model's files. Jinja's sandbox keeps it from reaching
Python; this process bounds what the sandbox does not: time, by an alarm that ends the process in
whatever it is doing, memory, files, and how much text comes out. It imports nothing of Outrider.

Messages both ways are a length of four bytes and so many bytes of JSON. The first one holds the
template; each further one a conversation.
"""

import contextlib
import json
import os
import resource
import signal
import struct
import sys
from datetime import datetime
from typing import Any, BinaryIO

import jinja2
import jinja2.ext
import jinja2.parser
import jinja2.sandbox
from jinja2 import nodes

MAX_MEMORY_BYTES = 1 << 30
MAX_TEXT_CHARS = 16 << 20
_MAX_REASON_CHARS = 500


class Refused(Exception):
    """The template itself refuses the messages."""


class TooLong(Exception):
    """More text came out than any prompt may have."""


def main() -> None:
    """`chat_child.py SECONDS`: how long each message may take."""
    seconds = float(sys.argv[1])
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    _confine()
    template: jinja2.Template | None = None
    specials: dict[str, str] = {}
    while (request := _read(requests)) is not None:
        signal.setitimer(signal.ITIMER_REAL, seconds)  # Its signal ends the process.
        if "source" in request:
            template, specials, reply = _compile(request)
        else:
            assert template is not None
            reply = _render(template, specials, request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(replies, reply)


def _confine() -> None:
    """Nothing to read or to write but the two pipes, and a bounded part of the memory."""
    for limit, value in (
        (resource.RLIMIT_AS, MAX_MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        with contextlib.suppress(ValueError, OSError):  # A lower limit may be there already.
            resource.setrlimit(limit, (value, value))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _compile(request: dict[str, Any]) -> tuple[Any, dict[str, str], dict[str, str]]:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _GenerationBlock],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        template = environment.from_string(request["source"])
    except (jinja2.TemplateError, RecursionError, MemoryError, ValueError) as error:
        return None, {}, {"failed": _reason(error)}
    return template, request["special_tokens"], {"text": ""}


def _render(
    template: jinja2.Template, specials: dict[str, str], request: dict[str, Any]
) -> dict[str, str]:
    pieces: list[str] = []
    length = 0
    try:
        for piece in template.generate(
            messages=[{"role": role, "content": text} for role, text in request["messages"]],
            tools=None,
            documents=None,
            add_generation_prompt=request["add_generation_prompt"],
            **specials,
        ):
            length += len(piece)
            if length > MAX_TEXT_CHARS:
                raise TooLong(f"more than {MAX_TEXT_CHARS} characters came out")
            pieces.append(piece)
        return {"text": "".join(pieces)}
    except Refused as error:
        return {"refused": _reason(error)}
    except Exception as error:
        return {"failed": _reason(error)}


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:_MAX_REASON_CHARS]


def _read(file: BinaryIO) -> dict[str, Any] | None:
    head = file.read(4)
    if len(head) < 4:
        return None
    (length,) = struct.unpack(">I", head)
    message: dict[str, Any] = json.loads(file.read(length))
    return message


def _write(file: BinaryIO, message: dict[str, str]) -> None:
    data = json.dumps(message).encode()
    file.write(struct.pack(">I", len(data)) + data)
    file.flush()


def _raise_exception(message: object) -> None:
    raise Refused(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which models were not trained on."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks an assistant's words for training; text here."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it as an instance attribute)

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


if __name__ == "__main__":
    main()
