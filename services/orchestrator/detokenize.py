"""Text that grows with the tokens: every piece that comes out is certain.

Streaming does not decode again and again. The tokenizer's decoder is rebuilt as a chain of small
stages; each piece of text that comes out is certain, whatever follows, and knows its tokens. So
a push costs what its own tokens cost, and the pieces joined are `decode(ids)` to the last bit.
"""

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from tokenizers import Tokenizer

from outrider.errors import Unsupported


class Span(NamedTuple):
    """Certain text and the tokens that it comes from: `first` to `last`, both included.

    Tokens are numbered from the start of their stream. A span of one token may hold many
    characters. A span of several tokens is one character that they share, or a run of bytes that
    is no valid UTF-8 and became U+FFFD as a whole.
    """

    text: str
    first: int
    last: int


class Pieces(Protocol):
    """What streaming needs of a tokenizer."""

    def piece(self, token_id: int) -> str | None:
        """The vocabulary's entry, None for a token that has no text."""

    def stages(self) -> "list[Stage]":
        """A fresh chain of decoder stages, for one stream."""


class IncrementalDetokenizer:
    """Text of a growing list of tokens, as soon as it is certain. One per stream.

    For every way of cutting ids into pushes, all pushes and the flush joined are `decode(ids)`.
    Characters come whole. Text waits for the token that completes its character, and, where the
    tokenizer falls back to single bytes, for the end of the run of bytes: one invalid byte turns
    the whole run into U+FFFD.
    """

    def __init__(self, tokenizer: Pieces) -> None:
        self._tokenizer = tokenizer
        self._stages = tokenizer.stages()
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Tokens pushed."""
        return self._num_tokens

    @property
    def pending_token(self) -> int | None:
        """Index of the first token whose text is not certain yet; None where all text is out."""
        held = [stage.held for stage in self._stages if stage.held is not None]
        return min(held, default=None)

    def push(self, token_ids: Iterable[int]) -> str:
        """Text that became certain with these tokens."""
        return "".join(span.text for span in self.push_spans(token_ids))

    def flush(self) -> str:
        """The rest, when no token follows; incomplete characters become U+FFFD."""
        return "".join(span.text for span in self.flush_spans())

    def push_spans(self, token_ids: Iterable[int]) -> list[Span]:
        """As `push`, with the tokens that each piece comes from; no span is empty."""
        return [span for token_id in token_ids for span in self.push_span(token_id)]

    def push_span(self, token_id: int) -> list[Span]:
        """The same of one token."""
        index, piece = self._num_tokens, self._tokenizer.piece(token_id)
        self._num_tokens += 1
        if piece is None:
            return []
        spans = _through(self._stages, [Span(piece, index, index)])
        return [span for span in spans if span.text]

    def flush_spans(self) -> list[Span]:
        """As `flush`, with the tokens that each piece comes from."""
        spans: list[Span] = []
        for index, stage in enumerate(self._stages):
            spans += _through(self._stages[index + 1 :], stage.flush())
        return [span for span in spans if span.text]


class Stage(Protocol):
    """One decoder of the tokenizer, fed piece by piece."""

    @property
    def held(self) -> int | None:
        """First token whose text waits in this stage."""

    def push(self, span: Span) -> Iterable[Span]: ...

    def flush(self) -> Iterable[Span]: ...


def _through(stages: Sequence[Stage], spans: Iterable[Span]) -> Iterable[Span]:
    for stage in stages:
        spans = [out for span in spans for out in stage.push(span)]
    return spans


class _Map:
    """A decoder that looks at one piece alone, and at whether it is the first."""

    held = None

    def __init__(self, function: Callable[[str, bool], str]) -> None:
        self._function = function
        self._first = True

    def push(self, span: Span) -> list[Span]:
        text = self._function(span.text, self._first)
        self._first = False
        return [Span(text, span.first, span.last)]

    def flush(self) -> list[Span]:
        return []


class _StripStart:
    """Strips up to `count` characters `content` at the start of the whole text."""

    held = None

    def __init__(self, content: str, count: int) -> None:
        self._content = content
        self._count = count

    def push(self, span: Span) -> list[Span]:
        text = _strip_start(span.text, self._content, self._count)
        self._count = 0 if text else self._count - len(span.text)
        return [Span(text, span.first, span.last)]

    def flush(self) -> list[Span]:
        return []


class _ByteLevel:
    """Pieces spell bytes; all bytes together are UTF-8, each invalid part of them U+FFFD.

    An invalid part is as Unicode recommends it (the longest start of a character): Rust does so.
    Python's incremental decoder waits for the third byte of a surrogate, so it does not serve.
    """

    def __init__(self) -> None:
        self._waiting = b""  # the start of a character
        self._next = range(0)  # what its next byte may be
        self._first = self._last = 0  # tokens of the bytes that wait

    @property
    def held(self) -> int | None:
        return self._first if self._waiting else None

    def push(self, span: Span) -> list[Span]:
        piece, first, last = span
        if not self._waiting and (text := _piece_text(piece)) is not None:
            return [Span(text, first, last)]
        return [out for byte in _piece_bytes(piece) for out in self._push_byte(byte, first)]

    def flush(self) -> list[Span]:
        if not self._waiting:
            return []
        self._waiting = b""
        return [Span("\ufffd", self._first, self._last)]

    def _push_byte(self, byte: int, token: int) -> Iterator[Span]:
        if self._waiting and byte not in self._next:
            yield from self.flush()
        if not self._waiting:
            self._first = token
            self._next = _second_bytes(byte)
        else:
            self._next = range(0x80, 0xC0)
        self._waiting += bytes((byte,))
        self._last = token
        if len(self._waiting) == _char_length(self._waiting[0]):
            text = self._waiting.decode("utf-8", "replace")
            self._waiting = b""
            yield Span(text, self._first, token)


def _char_length(lead: int) -> int:
    """Bytes of a character by its first byte; 1 for a byte that begins none."""
    if lead < 0xC2 or lead > 0xF4:
        return 1
    return 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4


def _second_bytes(lead: int) -> range:
    """Bytes that may follow the first one (Unicode, table 3-7)."""
    low = {0xE0: 0xA0, 0xF0: 0x90}.get(lead, 0x80)
    high = {0xED: 0x9F, 0xF4: 0x8F}.get(lead, 0xBF)
    return range(low, high + 1)


class _ByteFallback:
    """Runs of <0xNN> pieces are UTF-8, or as many U+FFFD as bytes where any of them is wrong."""

    def __init__(self) -> None:
        self._run: list[tuple[int, int]] = []  # (byte, token)

    @property
    def held(self) -> int | None:
        return self._run[0][1] if self._run else None

    def push(self, span: Span) -> list[Span]:
        match = _BYTE_PIECE.match(span.text)
        if match is None:
            return [*self.flush(), span]
        self._run.append((int(match[1], 16), span.first))
        return []

    def flush(self) -> list[Span]:
        run, self._run = self._run, []
        if not run:
            return []
        try:
            text = bytes(byte for byte, _ in run).decode("utf-8")
        except UnicodeDecodeError:
            return [Span("\ufffd" * len(run), run[0][1], run[-1][1])]
        spans, start = [], 0
        for char in text:
            end = start + len(char.encode("utf-8"))
            spans.append(Span(char, run[start][1], run[end - 1][1]))
            start = end
        return spans


_BYTE_PIECE = re.compile(r"<0x(\+?[0-9A-Fa-f]|[0-9A-Fa-f]{2})>\Z")


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: printable Latin-1 stands for itself, the rest from U+0100 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = [byte for byte in range(0x100) if byte not in own]
    alphabet = {chr(byte): byte for byte in own}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(other)})
    return alphabet


def _piece_bytes(piece: str) -> bytes:
    """Bytes that a piece spells; a piece with any other letter (an added token) is itself."""
    alphabet = _byte_alphabet()
    try:
        return bytes([alphabet[char] for char in piece])
    except KeyError:
        return piece.encode("utf-8")


@functools.lru_cache(maxsize=1 << 15)
def _piece_text(piece: str) -> str | None:
    """Characters that a piece spells, where it spells whole ones."""
    try:
        return _piece_bytes(piece).decode("utf-8")
    except UnicodeDecodeError:
        return None


def decoder_spec(tokenizer: Tokenizer) -> dict[str, Any] | None:
    decoder = tokenizer.decoder
    return None if decoder is None else json.loads(decoder.__getstate__())


def stage_factories(spec: dict[str, Any] | None) -> list[Callable[[], Stage]]:
    """How to build the stages of a decoder. Raises Unsupported where one cannot be streamed."""
    if spec is None:
        return [lambda: _Map(lambda piece, first: piece if first else f" {piece}")]
    factories: list[Callable[[], Stage]] = []
    unit = "token"  # what one piece is at this place: a token, some of the text, all of it
    for part in _flatten(spec):
        kind = part["type"]
        if kind == "Fuse":
            unit = "all"
            continue
        make = _stage_factory(kind, part, unit)
        if make is None:
            raise Unsupported(f"the tokenizer's decoder cannot be streamed: {part} in {spec}")
        factories.append(make)
        unit = {"ByteLevel": "all", "ByteFallback": "some"}.get(kind, unit)
    return factories


def _flatten(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if spec["type"] != "Sequence":
        yield spec
        return
    for part in spec["decoders"]:
        yield from _flatten(part)


def _stage_factory(kind: str, part: dict[str, Any], unit: str) -> Callable[[], Stage] | None:
    if kind == "ByteLevel" and unit == "token":
        return _ByteLevel
    if kind == "ByteFallback" and unit == "token":
        return _ByteFallback
    if kind == "Metaspace" and unit == "token":
        mark, drops = part["replacement"], part.get("prepend_scheme", "always") != "never"
        return lambda: _Map(lambda text, first: text.replace(mark, "" if first and drops else " "))
    if kind == "Replace":
        old, new = part["pattern"].get("String"), part["content"]
        if old and (unit == "token" or len(old) == 1):
            return lambda: _Map(lambda text, first: text.replace(old, new))
    if kind == "Strip" and part["stop"] == 0:  # the library panics over others on short pieces
        content, count = part["content"], part["start"]
        if unit == "token":
            return lambda: _Map(lambda text, first: _strip_start(text, content, count))
        if unit == "all":
            return lambda: _StripStart(content, count)
    return None


def _strip_start(text: str, content: str, count: int) -> str:
    """Text without up to `count` characters `content` at its start."""
    while count and text.startswith(content):
        text, count = text[1:], count - 1
    return text
