"""From the decoding of a generation to its telling: what has come out and is not told yet."""

import asyncio

from outrider.errors import OutriderError
from services.orchestrator.decoder import Piece


class Pieces:
    """One task puts pieces in, another one takes them out, all that are there as one."""

    def __init__(self) -> None:
        self._waiting: list[Piece] = []
        self._error: OutriderError | None = None
        self._filled, self._emptied = asyncio.Event(), asyncio.Event()

    def put(self, piece: Piece) -> None:
        self._waiting.append(piece)
        self._filled.set()

    def end(self, error: OutriderError) -> None:
        """No more pieces come; those that are there are told first."""
        self._error = self._error or error
        self._filled.set()

    def break_off(self, error: OutriderError) -> None:
        """What is not taken yet will never be."""
        self._waiting.clear()
        self._error = error
        self._filled.set()

    async def room(self, limit: int) -> None:
        """Until fewer than `limit` pieces wait."""
        while len(self._waiting) >= limit:
            self._emptied.clear()
            await self._emptied.wait()

    async def take(self) -> Piece:
        """All that is there, as one: whoever lags behind the decoding catches up. Raises the error
        once there is nothing left."""
        while not self._waiting:
            if self._error is not None:
                raise self._error
            self._filled.clear()
            await self._filled.wait()
        pieces, self._waiting = self._waiting, []
        self._emptied.set()
        return pieces[0] if len(pieces) == 1 else Piece.joined(pieces)
