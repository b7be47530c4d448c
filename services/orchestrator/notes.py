"""What is kept about each generated token beside the log, so that it can be told again.

An entry of fixed width a token: where it came from (1 byte), and where log probabilities are asked
for its own (float32, as the target sent it) and those of the likeliest tokens (id, float32 each).
"""

import itertools
import struct
from collections.abc import Sequence

from outrider.errors import DataLoss
from outrider.types import PositionLogprobs, TokenSource

_CODES = {
    TokenSource.PLAIN: 1,
    TokenSource.ACCEPTED: 2,
    TokenSource.RECOVERED: 3,
    TokenSource.BONUS: 4,
}
_SOURCES = {code: source for source, code in _CODES.items()}
_NOBODY = (1 << 32) - 1
"""Stands for a token that the target did not name: it named fewer than asked for."""


class NoteFormat:
    """The entries of a generation that asks for so many `logprobs`; None: for none."""

    def __init__(self, logprobs: int | None) -> None:
        self._num_top = logprobs or 0
        self._with_logprobs = logprobs is not None
        own = "f" if self._with_logprobs else ""
        self._entry = struct.Struct("<B" + own + "If" * self._num_top)

    @property
    def width(self) -> int:
        """Bytes a token."""
        return self._entry.size

    def pack(self, sources: Sequence[TokenSource], logprobs: Sequence[PositionLogprobs]) -> bytes:
        """One entry a source; `logprobs` are as many, or none where none are asked for."""
        if not self._with_logprobs:
            return bytes(_CODES[source] for source in sources)
        return b"".join(
            self._entry.pack(_CODES[source], entry.logprob, *self._top(entry))
            for source, entry in zip(sources, logprobs, strict=True)
        )

    def unpack(
        self, notes: bytes, token_ids: Sequence[int]
    ) -> tuple[tuple[TokenSource, ...], tuple[PositionLogprobs, ...]]:
        """What was packed for these tokens. Raises DataLoss where it is not about them."""
        if len(notes) != self.width * len(token_ids):
            raise DataLoss(f"{len(notes)} bytes of notes on {len(token_ids)} tokens")
        entries = list(self._entry.iter_unpack(notes))
        sources = tuple(_SOURCES.get(entry[0], TokenSource.PLAIN) for entry in entries)
        if not self._with_logprobs:
            return sources, ()
        return sources, tuple(
            PositionLogprobs(token_id, entry[1], _pairs(entry[2:]))
            for token_id, entry in zip(token_ids, entries, strict=True)
        )

    def _top(self, entry: PositionLogprobs) -> list[float]:
        missing = self._num_top - len(entry.top)
        return list(itertools.chain(*entry.top[: self._num_top], *[(_NOBODY, 0.0)] * missing))


def _pairs(flat: tuple[float, ...]) -> tuple[tuple[int, float], ...]:
    pairs = zip(flat[::2], flat[1::2], strict=True)
    return tuple((int(token_id), value) for token_id, value in pairs if token_id != _NOBODY)
