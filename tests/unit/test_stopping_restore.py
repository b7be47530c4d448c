"""A generation that another takes up in its midst releases what it would have released anyway."""

import dataclasses
import random

import pytest
from test_stopping_rules import (
    FALLBACK,
    SOURCES,
    TOY,
    random_cuts,
    random_ids,
    random_stop,
    rules,
    run,
    toy,
)

from outrider.errors import InternalError
from outrider.types import FinishReason
from services.orchestrator.stopping import OutputStream, Released, StopRules
from services.orchestrator.text import ChatTokenizer


def sources_of(start: int, end: int) -> list:
    return [SOURCES[index % len(SOURCES)] for index in range(start, end)]


@dataclasses.dataclass
class Cut:
    """A stream up to the death of its owner: what is durable, what the client has."""

    durable: int = 0
    offset: int = 0
    text: str = ""
    ended: bool = False


def first_owner(
    rng: random.Random, tokenizer: ChatTokenizer, stop: StopRules, ids: list[int]
) -> Cut:
    """Push a random part of the ids. The last releases may be durable and not told; of the one
    that ends the generation the client has nothing."""
    stream, cut, start = OutputStream(tokenizer, stop, prompt_len=5), Cut(), 0
    last = rng.randint(0, len(ids))
    untold = rng.choice((0, 0, 1, 2))
    released: list[Released] = []
    for size in random_cuts(rng, last):
        released.append(stream.push(ids[start : start + size], sources_of(start, start + size)))
        start += size
        if released[-1].finish_reason is not None:
            untold = max(untold, 1)
            break
    told = released[: max(len(released) - untold, 0)]
    cut.durable = sum(len(r.token_ids) for r in released)
    cut.offset = sum(len(r.token_ids) for r in told)
    cut.text = "".join(r.text for r in told)
    cut.ended = stream.finish_reason is not None
    return cut


@pytest.mark.parametrize("tokenizer", [TOY, FALLBACK], ids=["byte level", "byte fallback"])
def test_whoever_takes_up_a_stream_ends_it_alike(tokenizer: ChatTokenizer) -> None:
    rng = random.Random(3)
    size = tokenizer.vocab_size - 1
    seen: dict[str, int] = {"behind": 0, "text ahead": 0, "ended": 0}
    reasons: dict[FinishReason | None, int] = {}
    for _ in range(4000):
        stop, ids = random_stop(rng), random_ids(rng, size)
        stop = dataclasses.replace(stop, eos_token_ids=frozenset({size}))
        expected = run(tokenizer, stop, ids)
        cut = first_owner(rng, tokenizer, stop, ids)
        stream = OutputStream(tokenizer, stop, prompt_len=5)
        log = ids[: cut.durable]
        again = stream.restore(log, sources_of(0, len(log)), told_chars=len(cut.text))
        assert stream.num_released == stream.num_taken == len(log) and again.token_ids == ()
        token_ids, text, last = list(log), cut.text + again.text, again
        segments = [*again.segments]
        start = len(log)
        for push in random_cuts(rng, len(ids) - start):
            if last.finish_reason is not None:
                break
            last = stream.push(ids[start : start + push], sources_of(start, start + push))
            start += push
            token_ids += last.token_ids
            text += last.text
            segments += last.segments
        case = (stop, ids, cut)
        assert last.finish_reason is expected.reason, case
        if expected.reason is None:
            continue
        assert token_ids == expected.token_ids, case
        assert (text, last.cut_text) == (expected.text, expected.cut_text), case
        assert last.matched_stop == expected.matched_stop, case
        assert sum(length for length, _ in segments) == len(text) - len(cut.text)
        assert stream.num_released == len(token_ids) and stream.held_ids == 0
        reasons[expected.reason] = reasons.get(expected.reason, 0) + 1
        seen["behind"] += cut.offset < cut.durable
        seen["ended"] += cut.ended
        certain = OutputStream(tokenizer, stop, prompt_len=5)
        known = certain.restore(log, sources_of(0, len(log)), told_chars=0).text
        seen["text ahead"] += len(known) < len(cut.text)
    assert min(reasons.values()) > 30 and len(reasons) == 5 and min(seen.values()) > 20, seen


def test_another_continuation_takes_back_nothing_that_was_told() -> None:
    """Where decoding is not the same each time: "S" was told since "x" followed it; now "TOP" does,
    and no stop string begins in what was told."""
    stop = rules(stop_strings=("abc",))
    stream = OutputStream(TOY, stop, prompt_len=5)
    stream.restore(toy("x", "a"), SOURCES[:2], told_chars=2)
    released = stream.push(toy("bc", "x"), SOURCES[:2])
    assert released.finish_reason is None and released.text == "bcx"
    # What is durable and was not told may begin one; its token stays, with the text cut off.
    stream = OutputStream(TOY, stop, prompt_len=5)
    assert stream.restore(toy("x", "a"), SOURCES[:2], told_chars=0).text == "x"
    released = stream.push(toy("bc", "x"), SOURCES[:2])
    assert released.finish_reason is FinishReason.STOP_STRING
    assert (released.token_ids, released.text, released.cut_text) == ((), "", "a")


def test_a_log_that_goes_on_behind_its_end_is_a_fault() -> None:
    stream = OutputStream(TOY, rules(max_tokens=1), prompt_len=5)
    with pytest.raises(InternalError, match="behind the end"):
        stream.restore(toy("a", "b"), SOURCES[:2], told_chars=0)
    stream = OutputStream(TOY, rules(), prompt_len=5)
    stream.push(toy("a"), SOURCES[:1])
    with pytest.raises(InternalError, match="before anything"):
        stream.restore(toy("a"), SOURCES[:1], told_chars=0)
