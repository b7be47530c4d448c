"""What rank 0 tells the other ranks to do: one packed line of numbers a step, no pickle.

A header of four numbers (which step, its kind, entries, numbers that follow), then the entries: the
rows of a pass with their places, blocks and draws, or pairs of blocks. All are int32, little
endian. What a rank need not know, stop ids and distributions say, does not travel: rank 0 decides
by them.

The line goes over the connection that a rank has had since it joined (`meeting.py`), not over
`torch.distributed`: gloo wakes several threads on either side for each message and wants its length
known before, and the time until a rank knows of a step is a gap on its GPU.
"""

import enum
import socket
import struct
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

import numpy as np

from outrider.engine.rows import Branch, Draw, Rows
from outrider.errors import Unavailable
from outrider.types import GenerationSpec, SamplingParams

_HEADER = struct.Struct("<4i")
_SAMPLING = struct.Struct("<4dQ")
_SAMPLING_WORDS = struct.Struct(f"<{_SAMPLING.size // 4}i")
_MAX_WORDS = 1 << 26


class Kind(enum.IntEnum):
    """What a step is."""

    RUN = 1
    """A pass and its draws, which every rank makes by itself."""
    FORWARD = 2
    """A pass whose logits rank 0 wants."""
    COPY = 3
    """Copies of KV blocks."""
    STREAM = 4
    """The first of passes that the device chains by itself; GO or HALT before each further one."""
    GO = 5
    HALT = 6
    END = 7
    """The group is no longer needed."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step as a rank gets it."""

    kind: Kind
    rows: tuple[Rows, ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()


class Teller:
    """Rank 0's side: tells all others the same."""

    def __init__(self, connections: Iterable[socket.socket]) -> None:
        self._connections = list(connections)
        self._serial = 0

    def tell(
        self, kind: Kind, rows: Tokens[Rows] = (), pairs: Tokens[tuple[int, int]] = ()
    ) -> None:
        """Raises OSError when a rank has hung up."""
        words = pack_rows(rows) if rows else [block for pair in pairs for block in pair]
        self._serial = (self._serial + 1) & 0x7FFFFFFF
        entries = len(rows) or len(pairs)
        header = _HEADER.pack(self._serial, kind, entries, len(words))
        line = header + np.array(words, dtype="<i4").tobytes()
        for connection in self._connections:
            connection.sendall(line)

    def close(self) -> None:
        """After the last step."""
        for connection in self._connections:
            connection.close()


class Listener:
    """The other ranks' side."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._serial = 0
        self._next: Step | None = None

    def hear(self) -> Step:
        """Wait for the next step. Raises Unavailable when rank 0 has hung up or makes no sense."""
        if self._next is not None:
            step, self._next = self._next, None
            return step
        serial, kind, entries, count = _HEADER.unpack(self._receive(_HEADER.size))
        self._serial = (self._serial + 1) & 0x7FFFFFFF
        if serial != self._serial or not 0 <= count <= _MAX_WORDS:
            raise Unavailable(f"step {serial} of {count} numbers came after {self._serial - 1}")
        words = np.frombuffer(self._receive(4 * count), dtype="<i4").tolist() if count else []
        if kind == Kind.COPY:
            return Step(Kind.COPY, pairs=tuple(zip(words[::2], words[1::2], strict=True)))
        return Step(Kind(kind), rows=tuple(unpack_rows(words, entries)))

    def goes_on(self) -> bool:
        """Whether a stream of passes has another one; any other step ends it, and comes next."""
        step = self.hear()
        if step.kind not in (Kind.GO, Kind.HALT):
            self._next = step
        return step.kind is Kind.GO

    def _receive(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            got = self._connection.recv_into(view)
            if not got:
                raise Unavailable("rank 0 is gone")
            view = view[got:]
        return data


def pack_rows(batch: Tokens[Rows]) -> list[int]:
    """Each entry's eight lengths and places, its lists, then its draw if it has one."""
    words: list[int] = []
    for rows in batch:
        lists = (rows.token_ids, rows.blocks, rows.scratch, rows.parents)
        words += map(len, lists)
        words += (len(rows.known), rows.start, rows.num_logits, rows.draw is not None)
        for numbers in lists:
            words += numbers
        for ranked in rows.known:
            words += (len(ranked), *ranked)
        if rows.draw is not None:
            words += _pack_draw(rows.draw)
    return words


def unpack_rows(words: list[int], entries: int) -> Iterator[Rows]:
    """What `pack_rows` packed."""
    reader = _Reader(words)
    for _ in range(entries):
        *lengths, num_known, start, num_logits, draws = reader.take(8)
        token_ids, blocks, scratch, parents = map(reader.take, lengths)
        known = [reader.take(*reader.take(1)) for _ in range(num_known)]
        draw = _unpack_draw(reader) if draws else None
        yield Rows(token_ids, start, blocks, num_logits, draw, scratch, parents, known)
    reader.finish()


def _pack_draw(draw: Draw) -> list[int]:
    words = [draw.base_len, draw.steps, draw.alternatives, len(draw.branches)]
    for branch in draw.branches:
        words += map(int, branch)
    s = draw.spec.sampling
    packed = _SAMPLING.pack(s.temperature, s.top_k, s.top_p, s.min_p, s.seed)
    return [*words, *_SAMPLING_WORDS.unpack(packed)]


def _unpack_draw(reader: "_Reader") -> Draw:
    base_len, steps, alternatives, branches = reader.take(4)
    found = []
    for _ in range(branches):
        num_accepted, rank, run_ahead = reader.take(3)
        found.append(Branch(num_accepted, rank, bool(run_ahead)))
    packed = _SAMPLING_WORDS.pack(*reader.take(_SAMPLING.size // 4))
    temperature, top_k, top_p, min_p, seed = _SAMPLING.unpack(packed)
    sampling = SamplingParams(temperature, int(top_k), top_p, min_p, seed)
    return Draw(GenerationSpec(sampling), base_len, steps, tuple(found), alternatives)


class _Reader:
    def __init__(self, words: list[int]) -> None:
        self._words = words
        self._at = 0

    def take(self, count: int) -> list[int]:
        taken = self._words[self._at : self._at + count]
        if count < 0 or len(taken) != count:
            raise Unavailable("a step is shorter than it says")
        self._at += count
        return taken

    def finish(self) -> None:
        if self._at != len(self._words):
            raise Unavailable("a step is longer than it says")
