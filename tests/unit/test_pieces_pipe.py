"""Between decoding and telling: nothing lost, nothing out of order, nobody waits in vain."""

import asyncio

import pytest

from outrider.errors import Fenced, InternalError
from outrider.types import FinishReason, SpeculationStats, TokenSource
from services.orchestrator.decoder import Piece, RoundTimes
from services.orchestrator.pieces import Pieces
from services.orchestrator.stopping import Released


def piece(token: int, **more: object) -> Piece:
    sources = (TokenSource.PLAIN,)
    released = Released((token,), sources, text=f"{token} ", segments=((2, sources[0]),), **more)
    return Piece(released, SpeculationStats(rounds=1, plain=1), RoundTimes(rounds_us=10))


async def test_what_came_meanwhile_is_taken_as_one() -> None:
    pieces = Pieces()
    for token in range(3):
        pieces.put(piece(token))
    pieces.put(piece(3, finish_reason=FinishReason.MAX_TOKENS))
    taken = await pieces.take()
    assert taken.released.token_ids == (0, 1, 2, 3)
    assert taken.released.text == "0 1 2 3 " and len(taken.released.segments) == 4
    assert taken.released.finish_reason is FinishReason.MAX_TOKENS
    assert (taken.stats.rounds, taken.times.rounds_us) == (4, 40)


async def test_whoever_takes_waits_for_a_piece() -> None:
    pieces = Pieces()
    taking = asyncio.create_task(pieces.take())
    await asyncio.sleep(0)
    assert not taking.done()
    pieces.put(piece(5))
    assert (await taking).released.token_ids == (5,)


async def test_room_is_there_once_enough_is_taken() -> None:
    pieces = Pieces()
    await pieces.room(1)
    pieces.put(piece(1))
    await pieces.room(2)
    waiting = asyncio.create_task(pieces.room(1))
    await asyncio.sleep(0)
    assert not waiting.done()
    await pieces.take()
    await waiting


async def test_an_end_is_told_after_all_that_came_before_it() -> None:
    pieces = Pieces()
    pieces.put(piece(1))
    pieces.end(InternalError("the end"))
    pieces.end(InternalError("another"))
    assert (await pieces.take()).released.token_ids == (1,)
    for _ in range(2):
        with pytest.raises(InternalError, match="the end"):
            await pieces.take()


async def test_a_break_takes_back_what_nobody_has_taken() -> None:
    pieces = Pieces()
    pieces.put(piece(1))
    pieces.break_off(Fenced("taken over"))
    with pytest.raises(Fenced):
        await pieces.take()
    waiting = Pieces()
    taking = asyncio.create_task(waiting.take())
    await asyncio.sleep(0)
    waiting.break_off(Fenced("taken over"))
    with pytest.raises(Fenced):
        await taking
