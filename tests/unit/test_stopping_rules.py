"""When a generation ends, with which tokens, text, reason and usage."""

import dataclasses
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from outrider.errors import InternalError, InvalidArgument
from outrider.types import FinishReason, PositionLogprobs, TokenSource
from services.orchestrator.stopping import OutputStream, Released, StopRules
from services.orchestrator.text import ChatTokenizer

SOURCES = tuple(TokenSource)
END = "<end>"
# Whole and partial characters, pieces that hold several, bytes that are never valid.
PIECES = [
    *(b"a b c ab bc abc ca cab x xa".split()),
    *("é", "aé", "éb", "你", "你a"),
    *(
        b"\xc3",
        b"\xa9",
        b"a\xc3",
        b"\xa9b",
        b"\xa9\xc3",
        b"\xe4",
        b"\xbd\xa0",
        b"\xbd",
        b"\xff",
        b"xb\xc3",
    ),
    b"",
]


def byte_letters() -> list[str]:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = [letter for letter in letters if ord(letter) < 0x100]
    other = iter(letter for letter in letters if ord(letter) >= 0x100)
    return [chr(byte) if chr(byte) in own else next(other) for byte in range(0x100)]


LETTERS = byte_letters()
BYTES = [piece.encode() if isinstance(piece, str) else piece for piece in PIECES]
EOS = len(BYTES)


def tokenizer_of(pieces: Iterable[str], decoder: Any) -> ChatTokenizer:
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return ChatTokenizer(tokenizer)


TOY = tokenizer_of(("".join(LETTERS[byte] for byte in p) for p in BYTES), decoders.ByteLevel())
FALLBACK = tokenizer_of(
    [*"abcx", "ab", "bc", "▁a", "▁", "é", *(f"<0x{b:02X}>" for b in "é你".encode()), "<0xFF>"],
    decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    ),
)


def toy(*pieces: str | bytes) -> list[int]:
    """Ids of pieces; END is the special token."""
    wanted = [p.encode() if isinstance(p, str) else p for p in pieces]
    return [EOS if piece == END.encode() else BYTES.index(piece) for piece in wanted]


def rules(**options: Any) -> StopRules:
    defaults: dict[str, Any] = {"max_tokens": 1000, "context_length": 2000, "eos_token_ids": {EOS}}
    return StopRules(**{**defaults, **options})


def logprobs_of(ids: Sequence[int]) -> list[PositionLogprobs]:
    return [PositionLogprobs(token_id, -float(index)) for index, token_id in enumerate(ids)]


@dataclasses.dataclass
class Outcome:
    """All that a stream released, put together."""

    token_ids: list[int]
    sources: list[TokenSource]
    logprobs: list[PositionLogprobs]
    text: str
    reason: FinishReason | None
    cut_text: str
    matched_stop: str


def run(
    tokenizer: ChatTokenizer,
    stop: StopRules,
    ids: Sequence[int],
    cuts: Sequence[int] | None = None,
    prompt_len: int = 5,
) -> Outcome:
    """Push ids in the given cuts (one by one by default) until the end; checks each release."""
    stream = OutputStream(tokenizer, stop, prompt_len=prompt_len)
    out = Outcome([], [], [], "", None, "", "")
    logprobs, start = logprobs_of(ids), 0
    for size in cuts if cuts is not None else [1] * len(ids):
        end = start + size
        sources = [SOURCES[index % len(SOURCES)] for index in range(start, end)]
        released = stream.push(ids[start:end], sources, logprobs[start:end])
        start = end
        out.token_ids += released.token_ids
        out.sources += released.sources
        out.logprobs += released.logprobs
        out.text += released.text
        assert stream.num_released == len(out.token_ids)
        if released.finish_reason:
            out.reason, out.cut_text = released.finish_reason, released.cut_text
            out.matched_stop = released.matched_stop
            assert stream.finish_reason is released.finish_reason
            assert (stream.held_ids, stream.remaining) == (0, 0)
            break
        assert released.cut_text == released.matched_stop == ""
        assert stream.held_ids == start - len(out.token_ids)
        # Text never runs ahead of the ids that it comes from.
        assert tokenizer.decode(out.token_ids).startswith(out.text)
    assert out.token_ids == list(ids[: len(out.token_ids)])
    assert out.sources == [SOURCES[i % len(SOURCES)] for i in range(len(out.token_ids))]
    assert out.logprobs == logprobs[: len(out.token_ids)]
    if out.reason:
        assert tokenizer.decode(out.token_ids) == out.text + out.cut_text
    return out


# ------------------------------------------------------------------ tokens and counts


def test_eos_is_the_last_token_and_what_follows_it_in_the_push_is_dropped() -> None:
    out = run(TOY, rules(), toy("a", "b", END, "c", "a"), [5])
    assert (out.token_ids, out.text) == (toy("a", "b", END), "ab")
    assert out.reason is FinishReason.EOS


def test_a_stop_id_is_the_last_token_with_its_text() -> None:
    out = run(TOY, rules(stop_token_ids=frozenset(toy("x"))), toy("a", "x", "b"), [3])
    assert (out.token_ids, out.text, out.reason) == (toy("a", "x"), "ax", FinishReason.STOP_TOKEN)


def test_eos_wins_over_a_stop_id_that_is_the_same() -> None:
    out = run(TOY, rules(stop_token_ids=frozenset({EOS})), toy("a", END))
    assert out.reason is FinishReason.EOS


def test_eos_can_be_ignored_and_a_stop_id_that_is_the_same_still_counts() -> None:
    out = run(TOY, rules(ignore_eos=True, max_tokens=3), toy("a", END, "b"))
    assert (out.token_ids, out.text, out.reason) == (
        toy("a", END, "b"),
        "ab",
        FinishReason.MAX_TOKENS,
    )
    out = run(TOY, rules(ignore_eos=True, stop_token_ids=frozenset({EOS})), toy("a", END))
    assert out.reason is FinishReason.STOP_TOKEN


def test_eos_and_stop_ids_before_min_tokens_do_not_end() -> None:
    stop = rules(min_tokens=2, stop_token_ids=frozenset(toy("x")))
    out = run(TOY, stop, toy(END, "x", "x", "a"))
    assert (out.token_ids, out.reason) == (toy(END, "x", "x"), FinishReason.STOP_TOKEN)


def test_eos_at_the_last_token_allowed_is_told_as_eos() -> None:
    assert run(TOY, rules(max_tokens=2), toy("a", END)).reason is FinishReason.EOS


def test_a_full_context_ends_the_generation() -> None:
    out = run(TOY, rules(context_length=8), toy("a", "b", "c", "a"), [4], prompt_len=5)
    assert (out.token_ids, out.reason) == (toy("a", "b", "c"), FinishReason.CONTEXT_FULL)
    out = run(TOY, rules(context_length=8, max_tokens=3), toy("a", "b", "c"), prompt_len=5)
    assert out.reason is FinishReason.MAX_TOKENS


@pytest.mark.parametrize("prompt_len", range(1, 12))
def test_every_prompt_length_up_to_the_context_ends_in_place(prompt_len: int) -> None:
    """A round of 4 guesses and a bonus that crosses the limit (faults.md row 10)."""
    ids = toy(*"abcab" * 4)
    out = run(TOY, rules(context_length=12), ids, [1, 5, 5, 5], prompt_len=prompt_len)
    assert len(out.token_ids) == 12 - prompt_len
    assert out.reason is FinishReason.CONTEXT_FULL


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    for prompt_len in (12, 13):
        with pytest.raises(InvalidArgument, match="no room in a context of 12"):
            OutputStream(TOY, rules(context_length=12), prompt_len=prompt_len)


@pytest.mark.parametrize("stop_strings", [(), ("cab!",), ("abc", "ca")])
@pytest.mark.parametrize("k", [1, 4, 8])
def test_usage_is_exact_for_every_max_tokens(k: int, stop_strings: tuple[str, ...]) -> None:
    """A first token, then full rounds of k guesses and a bonus; 3k and more of max_tokens."""
    ids = toy(*"xxabxcxxxcxxabaxxbxxccxxabxxx")
    for max_tokens in range(1, 3 * k + 3):
        stop = rules(max_tokens=max_tokens, stop_strings=stop_strings)
        out = run(TOY, stop, ids, [1, *[k + 1] * 4])
        assert out.token_ids == ids[:max_tokens]
        assert len(out.text) == max_tokens
        assert out.reason is FinishReason.MAX_TOKENS


def test_remaining_counts_held_tokens_too() -> None:
    stream = OutputStream(TOY, rules(max_tokens=9, stop_strings=("bc",)), prompt_len=5)
    assert stream.remaining == 9
    released = stream.push(toy("a", "b"), SOURCES[:2])
    assert (released.token_ids, stream.held_ids, stream.remaining) == (tuple(toy("a")), 1, 7)
    stream = OutputStream(TOY, rules(context_length=9), prompt_len=5)
    stream.push(toy("a"), SOURCES[:1])
    assert stream.remaining == 3


# ------------------------------------------------------------------------ stop strings


def test_text_and_ids_end_before_a_stop_string() -> None:
    out = run(TOY, rules(stop_strings=("bc",)), toy("a", "x", "b", "c", "a"), [5])
    assert (out.token_ids, out.text, out.cut_text) == (toy("a", "x"), "ax", "")
    assert (out.reason, out.matched_stop) == (FinishReason.STOP_STRING, "bc")


def test_a_token_that_straddles_the_start_stays_and_its_rest_is_cut_text() -> None:
    out = run(TOY, rules(stop_strings=("bc",)), toy("x", "ab", "c", "a"))
    assert (out.token_ids, out.text, out.cut_text) == (toy("x", "ab"), "xa", "b")


def test_a_stop_string_inside_one_token_cuts_the_rest_of_it() -> None:
    out = run(TOY, rules(stop_strings=("a",)), toy("x", "cab", "c"))
    assert (out.token_ids, out.text, out.cut_text) == (toy("x", "cab"), "xc", "ab")


def test_a_stop_string_at_the_very_start_leaves_nothing() -> None:
    out = run(TOY, rules(stop_strings=("abc",)), toy("ab", "c"))
    assert (out.token_ids, out.text, out.cut_text) == ([], "", "")
    assert out.reason is FinishReason.STOP_STRING


def test_ids_are_held_with_their_text_and_released_when_it_is_no_stop() -> None:
    stream = OutputStream(TOY, rules(stop_strings=("abca",)), prompt_len=5)
    assert stream.push(toy("x", "xa"), SOURCES[:2]) == Released(
        tuple(toy("x")), SOURCES[:1], (), "x", ((1, SOURCES[0]),)
    )
    assert stream.push(toy("bc"), SOURCES[:1]) == Released()
    assert stream.held_ids == 2
    released = stream.push(toy("x"), SOURCES[:1])
    assert (released.token_ids, released.text) == (tuple(toy("xa", "bc", "x")), "xabcx")
    assert stream.held_ids == 0


def test_segments_cut_the_text_by_where_its_tokens_came_from() -> None:
    stream = OutputStream(TOY, rules(), prompt_len=5)
    released = stream.push(toy("x", "xa", "bc"), (SOURCES[0], SOURCES[1], SOURCES[1]))
    assert released.segments == ((1, SOURCES[0]), (2, SOURCES[1]), (2, SOURCES[1]))
    assert sum(length for length, _ in released.segments) == len(released.text)


def test_held_ids_are_cut_with_the_stop_string() -> None:
    stream = OutputStream(TOY, rules(stop_strings=("abca",)), prompt_len=5)
    stream.push(toy("x", "ab"), SOURCES[:2])
    released = stream.push(toy("ca", "x"), SOURCES[:2])
    assert (released.token_ids, released.text) == ((), "")
    assert stream.num_released == 1


def test_a_held_prefix_is_released_at_another_end() -> None:
    stop = rules(stop_strings=("abc",))
    out = run(TOY, stop, toy("x", "a", "b", END))
    assert (out.text, out.token_ids) == ("xab", toy("x", "a", "b", END))
    assert out.reason is FinishReason.EOS
    out = run(TOY, dataclasses.replace(stop, max_tokens=3), toy("x", "a", "b", "c"))
    assert (out.text, out.reason) == ("xab", FinishReason.MAX_TOKENS)


def test_the_earlier_stop_in_token_order_wins() -> None:
    """In one push: the string before max_tokens or EOS, and the other way round."""
    ids = toy("x", "b", "c", END)
    stop = rules(stop_strings=("bc",), max_tokens=4)
    assert run(TOY, stop, ids, [4]).reason is FinishReason.STOP_STRING
    assert run(TOY, dataclasses.replace(stop, max_tokens=2), ids, [4]).reason is (
        FinishReason.MAX_TOKENS
    )
    ids = toy("x", "b", END, "c")
    assert run(TOY, stop, ids, [4]).reason is FinishReason.EOS


def test_a_stop_string_that_ends_with_the_last_token_allowed_wins() -> None:
    stop = rules(stop_strings=("bc",), max_tokens=3, stop_token_ids=frozenset(toy("c")))
    out = run(TOY, stop, toy("x", "b", "c"))
    assert (out.text, out.reason) == ("x", FinishReason.STOP_STRING)


def test_of_stop_strings_in_one_token_the_earliest_start_wins_then_the_longest() -> None:
    out = run(TOY, rules(stop_strings=("b", "a", "ab")), toy("x", "cab"))
    assert (out.text, out.matched_stop) == ("xc", "ab")


def test_a_stop_string_ends_with_the_token_that_completes_it() -> None:
    """ "b" is complete while "abc" could still come: tokens after it were never asked for."""
    out = run(TOY, rules(stop_strings=("abc", "b")), toy("a", "b", "c"), [3])
    assert (out.text, out.matched_stop) == ("a", "b")


def test_a_stop_string_that_overlaps_its_own_start_is_found() -> None:
    out = run(TOY, rules(stop_strings=("abab",)), toy(*"xaabab"))
    assert (out.text, out.token_ids) == ("xa", toy("x", "a"))


def test_stop_strings_are_looked_for_only_after_min_tokens() -> None:
    ids = toy("a", "b", "a", "b", "a", "b")
    for min_tokens, text in ((0, ""), (1, "ab"), (2, "ab"), (3, "abab")):
        out = run(TOY, rules(stop_strings=("ab",), min_tokens=min_tokens), ids)
        assert (out.text, out.reason) == (text, FinishReason.STOP_STRING)


def test_a_character_begun_before_min_tokens_begins_no_stop_string() -> None:
    ids = toy(b"\xc3", b"\xa9", "x", "é")
    out = run(TOY, rules(stop_strings=("é",), min_tokens=1), ids)
    assert (out.text, out.token_ids) == ("éx", ids[:3])


def test_a_stop_string_found_through_split_characters() -> None:
    out = run(TOY, rules(stop_strings=("éb",)), toy("x", b"a\xc3", b"\xa9b"))
    assert (out.text, out.cut_text) == ("xa", "\ufffd")
    assert out.token_ids == toy("x", b"a\xc3")


def test_cut_text_has_the_incomplete_character_at_the_end_of_its_token() -> None:
    out = run(TOY, rules(stop_strings=("b",)), toy("a", b"xb\xc3", b"\xa9"), [3])
    assert (out.text, out.cut_text) == ("ax", "b\ufffd")


def test_tokens_without_text_before_a_stop_string_stay() -> None:
    stop = rules(stop_strings=("bc",), ignore_eos=True)
    out = run(TOY, stop, toy("a", END, "b", END, "c"))
    assert (out.text, out.token_ids) == ("a", toy("a", END))


def test_without_stop_strings_ids_go_out_at_once_and_text_lags() -> None:
    stream = OutputStream(TOY, rules(), prompt_len=5)
    released = stream.push(toy("a", b"\xe4"), SOURCES[:2])
    assert (released.token_ids, released.text) == (tuple(toy("a", b"\xe4")), "a")
    assert stream.held_ids == 0
    released = stream.push(toy(b"\xbd\xa0"), SOURCES[:1])
    assert (released.token_ids, released.text) == (tuple(toy(b"\xbd\xa0")), "你")


def test_an_incomplete_character_is_flushed_at_the_end() -> None:
    for strings in ((), ("zz",)):
        out = run(TOY, rules(max_tokens=2, stop_strings=strings), toy("a", b"\xe4"))
        assert (out.text, len(out.token_ids)) == ("a\ufffd", 2)


def test_a_stop_string_in_text_that_waited_for_the_end_is_found() -> None:
    """Bytes that the tokenizer fell back to are certain only when their run ends."""
    pieces = [FALLBACK._tokenizer.token_to_id(p) for p in ("a", "<0xC3>", "<0xA9>", "<0xE4>")]
    out = run(FALLBACK, rules(stop_strings=("é",), max_tokens=3), pieces[:3])
    assert (out.text, out.token_ids, out.reason) == ("a", pieces[:1], FinishReason.STOP_STRING)
    out = run(FALLBACK, rules(stop_strings=("é",), max_tokens=4), pieces)
    assert (out.text, out.reason) == ("a\ufffd\ufffd\ufffd", FinishReason.MAX_TOKENS)


def test_a_long_stop_string_that_never_comes_costs_no_more_text_than_itself() -> None:
    stop = rules(stop_strings=("a" * 255 + "b",), max_tokens=1000)
    stream = OutputStream(TOY, stop, prompt_len=5)
    for _ in range(600):
        stream.push(toy("a"), SOURCES[:1])
        assert stream.held_ids <= 255
    assert stream.num_released == 600 - 255


# ----------------------------------------------------------------- against brute force


def naive(stop: StopRules, ids: Sequence[int], prompt_len: int) -> Outcome:
    """The rules on the complete sequence of a byte-level tokenizer, without any state."""
    for count in range(1, len(ids) + 1):
        token, enough = ids[count - 1], count > stop.min_tokens
        reason = None
        if enough and token in stop.eos_token_ids and not stop.ignore_eos:
            reason = FinishReason.EOS
        elif enough and token in stop.stop_token_ids:
            reason = FinishReason.STOP_TOKEN
        elif count == stop.max_tokens:
            reason = FinishReason.MAX_TOKENS
        elif prompt_len + count == stop.context_length:
            reason = FinishReason.CONTEXT_FULL
        chars = naive_chars(ids[:count], final=reason is not None)
        text = "".join(char for char, _, _ in chars)
        found = [
            (start, -len(string), string)
            for string in stop.stop_strings
            for start in range(len(text))
            if text.startswith(string, start) and chars[start][1] >= stop.min_tokens
        ]
        if found:
            start, _, string = min(found)
            kept = max([chars[start][1], *(last + 1 for _, _, last in chars[:start])])
            cut_text = TOY.decode(ids[:kept])[start:]
            kept_ids = list(ids[:kept])
            return Outcome(
                kept_ids, [], [], text[:start], FinishReason.STOP_STRING, cut_text, string
            )
        if reason:
            return Outcome(list(ids[:count]), [], [], text, reason, "", "")
    return Outcome(list(ids), [], [], TOY.decode(ids), None, "", "")


def naive_chars(ids: Sequence[int], *, final: bool) -> list[tuple[str, int, int]]:
    """Certain characters, each with its first and last token, found from the end of the text."""
    data = [(byte, index) for index, i in enumerate(ids) if i != EOS for byte in BYTES[i]]
    raw = bytes(byte for byte, _ in data)
    chars, start = [], 0
    while start < len(raw):
        whole = raw[start:].decode(errors="replace")
        # The bytes of the first character are those without which the rest reads the same.
        size = next(
            n
            for n in range(1, 5)
            if raw[start + n :].decode(errors="replace") == whole[1:]
            and (
                n == len(raw) - start or raw[start : start + n].decode(errors="replace") == whole[0]
            )
        )
        chars.append((whole[0], data[start][1], data[start + size - 1][1]))
        start += size
        if start == len(raw) and not final and raw[start - size :] in INCOMPLETE:
            chars.pop()
    return chars


INCOMPLETE = (b"\xc3", b"\xe4", b"\xe4\xbd")


def random_stop(rng: random.Random) -> StopRules:
    parts = ["a", "b", "c", "ab", "x", "é", "你", "\ufffd"]
    strings = {"".join(rng.choices(parts, k=rng.randint(1, 3))) for _ in range(rng.randint(0, 4))}
    return rules(
        stop_strings=tuple(sorted(strings)),
        stop_token_ids=frozenset(rng.sample(range(EOS), rng.choice((0, 0, 1)))),
        max_tokens=(max_tokens := rng.choice((3, 8, 14, 100))),
        min_tokens=rng.choice((0, 0, 1, min(5, max_tokens))),
        context_length=rng.choice((9, 16, 200)),
        ignore_eos=rng.random() < 0.3,
    )


def random_ids(rng: random.Random, size: int) -> list[int]:
    few = [rng.randrange(size) for _ in range(rng.randint(2, 8))]
    ids = [rng.choice(few) for _ in range(rng.randint(1, 24))]
    if rng.random() < 0.5:
        ids[rng.randrange(len(ids))] = size
    return ids


def random_cuts(rng: random.Random, length: int) -> list[int]:
    cuts = []
    while length:
        cuts.append(min(length, rng.choice((0, 1, 1, 2, 3, 9))))
        length -= cuts[-1]
    return cuts


def test_equals_the_rules_on_the_complete_sequence_for_every_cut() -> None:
    rng = random.Random(7)
    reasons: dict[FinishReason | None, int] = {}
    cut_inside = 0
    for _ in range(4000):
        stop, ids = random_stop(rng), random_ids(rng, EOS)
        expected = naive(stop, ids, 5)
        for cuts in ([1] * len(ids), [len(ids)], random_cuts(rng, len(ids))):
            out = run(TOY, stop, ids, cuts)
            assert out.reason is expected.reason, (stop, ids)
            if out.reason is None:
                continue
            assert out.token_ids == expected.token_ids, (stop, ids)
            assert (out.text, out.cut_text) == (expected.text, expected.cut_text), (stop, ids)
            assert out.matched_stop == expected.matched_stop
        reasons[expected.reason] = reasons.get(expected.reason, 0) + 1
        cut_inside += bool(expected.cut_text)
    assert set(reasons) == {None, *FinishReason}
    assert min(reasons.values()) > 50 and cut_inside > 50


def test_byte_fallback_keeps_ids_and_text_together_for_every_cut() -> None:
    rng = random.Random(8)
    size = FALLBACK.vocab_size - 1
    strings = 0
    for _ in range(2000):
        stop, ids = random_stop(rng), random_ids(rng, size)
        stop = dataclasses.replace(stop, eos_token_ids=frozenset({size}))
        first = run(FALLBACK, stop, ids)
        assert run(FALLBACK, stop, ids, [len(ids)]) == first
        assert run(FALLBACK, stop, ids, random_cuts(rng, len(ids))) == first
        if first.reason is FinishReason.STOP_STRING:
            strings += 1
            assert not any(string in first.text for string in stop.stop_strings) or stop.min_tokens
    assert strings > 200


def test_no_released_text_ever_holds_a_stop_string() -> None:
    rng = random.Random(9)
    for _ in range(1500):
        stop, ids = random_stop(rng), random_ids(rng, EOS)
        stop = dataclasses.replace(stop, min_tokens=0)
        text = run(TOY, stop, ids, random_cuts(rng, len(ids))).text
        assert not any(string in text for string in stop.stop_strings)


# ------------------------------------------------------------------------- wrong input


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": 1 << 31}),
        ("min_tokens", {"min_tokens": -1}),
        ("min_tokens", {"min_tokens": 6, "max_tokens": 5}),
        ("stop_token_ids", {"stop_token_ids": frozenset(range(33))}),
        ("stop_strings", {"stop_strings": ("",)}),
        ("stop_strings", {"stop_strings": ("é" * 129,)}),
        ("stop_strings", {"stop_strings": tuple(map(str, range(17)))}),
    ],
)
def test_rules_out_of_range_are_refused_by_name(field: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        rules(**options)
    assert caught.value.field == f"stop.{field}"


def test_tokens_after_the_end_are_a_fault() -> None:
    stream = OutputStream(TOY, rules(max_tokens=1), prompt_len=5)
    stream.push(toy("a"), SOURCES[:1])
    with pytest.raises(InternalError, match="after the end"):
        stream.push(toy("a"), SOURCES[:1])


def test_lists_of_different_lengths_are_a_fault() -> None:
    stream = OutputStream(TOY, rules(), prompt_len=5)
    with pytest.raises(InternalError, match="2 sources for 1 tokens"):
        stream.push(toy("a"), SOURCES[:2])
    with pytest.raises(InternalError, match="0 logprobs for 1 tokens"):
        stream.push(toy("a"), SOURCES[:1], [])


def test_logprobs_for_some_tokens_only_are_a_fault() -> None:
    stream = OutputStream(TOY, rules(), prompt_len=5)
    stream.push(toy("a"), SOURCES[:1], logprobs_of(toy("a")))
    stream.push((), ())
    with pytest.raises(InternalError, match="some tokens"):
        stream.push(toy("a"), SOURCES[:1])
