"""How a generation looks: streamed text, coloured by where each token came from, and its totals."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from outrider.client import Completion, GenerationChunk
from outrider.types import TokenSource

COLOURS = {TokenSource.ACCEPTED: "32", TokenSource.RECOVERED: "33", TokenSource.BONUS: "36"}
"""ANSI codes: green, yellow, cyan; plain tokens keep the terminal's own."""

LEGEND = "[green]accepted[/] [yellow]recovered[/] [cyan]bonus[/] plain"

_CONTROL = {code: "" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


class StreamPrinter:
    """Prints chunks as they come; a model's text never steers the terminal.

    Straight to the file, since rich would break lines and expand tabs.
    """

    def __init__(self, console: Console, *, show_speculation: bool = False) -> None:
        self._file = console.file
        self._terminal = console.is_terminal
        self._show_speculation = show_speculation
        self._colour = (
            show_speculation and console.color_system is not None and not console.no_color
        )

    def show(self, chunk: GenerationChunk) -> None:
        pieces = segments(chunk) if self._colour else [(chunk.text, TokenSource.PLAIN)]
        for text, source in pieces:
            self._file.write(self._painted(text, source))
        self._file.flush()

    def end(self) -> None:
        self._file.write("\n")
        self._file.flush()

    def _painted(self, text: str, source: TokenSource) -> str:
        if self._terminal:
            text = printable(text)
        code = COLOURS.get(source)
        return f"\x1b[{code}m{text}\x1b[0m" if code and self._colour else text


def printable(text: str) -> str:
    """Without what would steer a terminal; lines and tabs stay."""
    return text.translate(_CONTROL)


def segments(chunk: GenerationChunk) -> Iterator[tuple[str, TokenSource]]:
    """The chunk's text, cut by where its tokens came from."""
    start = 0
    for length, source in chunk.text_segments:
        yield chunk.text[start : start + length], source
        start += length


def stats_line(completion: Completion) -> str:
    """Tokens, tokens/s, acceptance rate, mean acceptance length, time to first token."""
    stats = completion.stats
    parts = [f"{len(completion.token_ids)} tokens", f"{completion.tokens_per_s:.1f} tok/s"]
    rate, length = stats.acceptance_rate, stats.mean_acceptance_length
    parts.append("no proposals" if rate is None else f"acceptance rate {rate:.1%}")
    if length is not None:
        parts.append(f"mean acceptance length {length:.2f}")
    if completion.ttft_s is not None:
        parts.append(f"first token {completion.ttft_s * 1000:.0f} ms")
    if completion.resumes:
        times = "once" if completion.resumes == 1 else f"{completion.resumes} times"
        parts.append(f"resumed {times}, {completion.interrupted_s:.1f} s without a token")
    if not completion.durable:
        parts.append(f"{completion.usage.tokens_sent_undurable} tokens were told before stored")
    return " · ".join(parts)


def completion_json(completion: Completion) -> dict[str, Any]:
    """The completion as data: enums by value, derived numbers beside the counts."""
    stats = completion.stats
    data = dataclasses.asdict(completion)
    data["sources"] = [source.value for source in completion.sources]
    data["finish_reason"] = completion.finish_reason.value
    data["token_ids"] = list(completion.token_ids)
    data["tokens"] = len(completion.token_ids)
    data["tokens_per_s"] = completion.tokens_per_s
    data["acceptance_rate"] = stats.acceptance_rate
    data["mean_acceptance_length"] = stats.mean_acceptance_length
    return data
