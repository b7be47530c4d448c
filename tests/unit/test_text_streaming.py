"""Streamed text equals decoded text, whatever the tokenizer, the tokens and the cuts."""

import random
from collections.abc import Callable, Iterator

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from outrider.errors import InvalidArgument, Unsupported
from services.orchestrator.detokenize import IncrementalDetokenizer, Span
from services.orchestrator.text import ChatTokenizer

TEXT = (
    "The quick brown fox jumps over the lazy dog. Cafe\u0301 näïve — “quotes” 你好世界 こんにちは "
    "สวัสดี 👩\u200d👩\u200d👧 🇨🇭 👍🏽 é́ नमस्ते\n\n  def f(x):\n\treturn x  # ▁ and \ufffd itself\n"
)
SPECIALS = [AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)]
ADDED = [AddedToken("<tool>", special=False), AddedToken("né Ġ", special=False)]


def byte_letters() -> list[str]:
    """GPT-2's letter of each byte; the library's own alphabet, in its order."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = [letter for letter in letters if ord(letter) < 0x100]
    other = iter(letter for letter in letters if ord(letter) >= 0x100)
    return [chr(byte) if chr(byte) in own else next(other) for byte in range(0x100)]


def word_level(pieces: list[str], decoder: decoders.Decoder | None) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({p: i for i, p in enumerate(pieces)}, unk_token="?"))
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


def trained_byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return tokenizer


def odd_byte_level() -> Tokenizer:
    """Pieces that begin and end inside characters, and that no text contains."""
    letters, rng = byte_letters(), random.Random(1)
    data = "aé你👍\ufffd".encode() + bytes([0xFF, 0xC0, 0xED, 0xA0, 0x80, 0xF4, 0x90, 0xE0])
    pieces = {bytes([byte]) for byte in data}
    for _ in range(60):
        start = rng.randrange(len(data))
        pieces.add(data[start : start + rng.randint(1, 5)])
    return word_level(
        ["".join(letters[byte] for byte in piece) for piece in sorted(pieces)],
        decoders.ByteLevel(),
    )


def trained_metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, show_progress=False, unk_token="<unk>", special_tokens=["<unk>"]
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return tokenizer


FALLBACK_PIECES = [
    *(f"<0x{byte:02X}>" for byte in sorted({*"é你👍a".encode(), 0xFF, 0xC0})),
    *("<0xe4>", "<0x+5>", "<0xZZ>", "▁", "▁▁", "▁the", "cat", "▁é", "你", " x", "", "▁a▁b▁"),
]


def llama_like() -> Tokenizer:
    chain = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    return word_level(FALLBACK_PIECES, decoders.Sequence(chain))


def gemma_like() -> Tokenizer:
    chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return word_level(FALLBACK_PIECES, decoders.Sequence(chain))


def other_order() -> Tokenizer:
    chain = [
        decoders.ByteFallback(),
        decoders.Replace("▁", "  "),
        decoders.Fuse(),
        decoders.Strip(" ", 3, 0),
    ]
    return word_level(FALLBACK_PIECES, decoders.Sequence(chain))


def strip_each_token() -> Tokenizer:
    chain = [decoders.Strip("▁", 1, 0), decoders.Replace("at", "og"), decoders.Fuse()]
    return word_level(FALLBACK_PIECES, decoders.Sequence(chain))


def metaspace_never() -> Tokenizer:
    return word_level(FALLBACK_PIECES, decoders.Metaspace(prepend_scheme="never"))


def no_decoder() -> Tokenizer:
    return word_level(["the", "cat", "", " ", "é"], None)


BUILDERS: list[Callable[[], Tokenizer]] = [
    trained_byte_level,
    odd_byte_level,
    trained_metaspace,
    llama_like,
    gemma_like,
    other_order,
    strip_each_token,
    metaspace_never,
    no_decoder,
]


@pytest.fixture(scope="module", params=BUILDERS, ids=lambda build: build.__name__)
def tokenizer(request: pytest.FixtureRequest) -> ChatTokenizer:
    built: Tokenizer = request.param()
    built.add_special_tokens(SPECIALS)
    built.add_tokens(ADDED)
    return ChatTokenizer(built)


def random_cuts(rng: random.Random, ids: list[int]) -> Iterator[list[int]]:
    start = 0
    while start < len(ids):
        size = rng.choice((0, 1, 1, 2, 5))
        yield ids[start : start + size]
        start += size


def random_ids(rng: random.Random, tokenizer: ChatTokenizer) -> list[int]:
    """Any tokens, also the special ones, and ids of a padded vocabulary that have no token."""
    few = [rng.randrange(tokenizer.vocab_size + 2) for _ in range(rng.randint(1, 12))]
    return [rng.choice(few) for _ in range(rng.randint(0, 25))]


def test_pushes_and_flush_join_to_decode_for_every_cut(tokenizer: ChatTokenizer) -> None:
    rng = random.Random(2)
    for _ in range(1500):
        ids = random_ids(rng, tokenizer)
        stream = IncrementalDetokenizer(tokenizer)
        text = "".join(stream.push(cut) for cut in random_cuts(rng, ids)) + stream.flush()
        assert text == tokenizer.decode(ids), ids
        assert stream.num_tokens == len(ids)
        assert stream.pending_token is None


@pytest.mark.parametrize("build", [trained_byte_level, trained_metaspace])
def test_real_text_streams_one_token_at_a_time(build: Callable[[], Tokenizer]) -> None:
    built = build()
    built.add_special_tokens(SPECIALS)
    tokenizer = ChatTokenizer(built)
    ids = tokenizer.encode(f"{TEXT}<|im_end|>{TEXT}", add_special_tokens=False)
    stream = IncrementalDetokenizer(tokenizer)
    text = "".join(stream.push([token_id]) for token_id in ids) + stream.flush()
    assert text == tokenizer.decode(ids)
    assert "🇨🇭" in text or build is trained_metaspace


def test_flush_after_any_prefix_equals_decode_of_it(tokenizer: ChatTokenizer) -> None:
    rng = random.Random(3)
    for _ in range(100):
        ids = random_ids(rng, tokenizer)
        for length in range(len(ids) + 1):
            stream = IncrementalDetokenizer(tokenizer)
            text = stream.push(ids[:length])
            assert text + stream.flush() == tokenizer.decode(ids[:length])


def test_spans_are_in_order_and_a_stream_of_their_tokens_alone_ends_with_them(
    tokenizer: ChatTokenizer,
) -> None:
    rng = random.Random(4)
    for _ in range(300):
        ids = random_ids(rng, tokenizer)
        stream = IncrementalDetokenizer(tokenizer)
        spans = stream.push_spans(ids) + stream.flush_spans()
        text = ""
        for index, span in enumerate(spans):
            assert span.text
            assert 0 <= span.first <= span.last < len(ids)
            text += span.text
            if index:
                before = spans[index - 1]
                assert before.first <= span.first and before.last <= span.last
            if not index or spans[index - 1].last < span.first:
                assert tokenizer.decode(ids[: span.first]) == text[: -len(span.text)]
            if index + 1 == len(spans) or spans[index + 1].first > span.last:
                assert tokenizer.decode(ids[: span.last + 1]) == text


@pytest.fixture(scope="module")
def byte_level() -> ChatTokenizer:
    tokenizer = trained_byte_level()
    tokenizer.add_special_tokens(SPECIALS)
    return ChatTokenizer(tokenizer)


def byte_ids(tokenizer: ChatTokenizer, data: bytes) -> list[int]:
    """One token for each byte."""
    letters = byte_letters()
    return [tokenizer._tokenizer.token_to_id(letters[byte]) for byte in data]


def test_no_character_is_ever_split(byte_level: ChatTokenizer) -> None:
    text = "é你👍🏽e\u0301"
    stream = IncrementalDetokenizer(byte_level)
    pushed = [stream.push([token_id]) for token_id in byte_ids(byte_level, text.encode())]
    assert [piece for piece in pushed if piece] == list(text)
    assert stream.flush() == ""


def test_text_is_out_with_the_token_that_makes_it_certain(byte_level: ChatTokenizer) -> None:
    """Byte-level text waits for nothing but an incomplete character."""
    rng = random.Random(5)
    for _ in range(300):
        data = bytes(rng.choice("aé你👍".encode() + b"\xff\xed\xa0") for _ in range(12))
        stream = IncrementalDetokenizer(byte_level)
        text = stream.push(byte_ids(byte_level, data))
        waiting = stream.flush()
        assert waiting in ("", "\ufffd")
        assert text + waiting == data.decode(errors="replace")
        # Only bytes that a next byte could still complete may wait.
        completions = (b"\x80\x80\x80", b"\xa0\xa0", b"\x90\x80\x80", b"\x80\x80", b"\x80")
        completed = [(data + end).decode(errors="replace") for end in completions]
        assert bool(waiting) == any(
            len(whole) == len(text) + 1 and whole[-1] != "\ufffd" for whole in completed
        )


def test_an_invalid_byte_is_certain_at_once(byte_level: ChatTokenizer) -> None:
    stream = IncrementalDetokenizer(byte_level)
    for byte in (b"\xff", b"\xf5", b"\xc1", b"\xc0", b"\xbf", b"\x80"):
        assert stream.push(byte_ids(byte_level, byte)) == "\ufffd"
    assert stream.push(byte_ids(byte_level, b"\xe4\xbd")) == ""
    assert stream.push(byte_ids(byte_level, b"A")) == "\ufffdA"


def test_special_tokens_inside_a_character_do_not_break_it(byte_level: ChatTokenizer) -> None:
    first, *rest = byte_ids(byte_level, "你".encode())
    special = byte_level._tokenizer.token_to_id("<|im_end|>")
    stream = IncrementalDetokenizer(byte_level)
    assert stream.push([first, special]) == ""
    assert stream.pending_token == 0
    assert stream.push(rest) == "你"


def test_a_span_tells_the_tokens_of_each_character(byte_level: ChatTokenizer) -> None:
    ids = byte_ids(byte_level, "a你é".encode() + b"\xff" + b"\xe4")
    stream = IncrementalDetokenizer(byte_level)
    assert stream.push_spans(ids) == [
        Span("a", 0, 0),
        Span("你", 1, 3),
        Span("é", 4, 5),
        Span("\ufffd", 6, 6),
    ]
    assert stream.pending_token == 7
    assert stream.flush_spans() == [Span("\ufffd", 7, 7)]


def test_a_run_of_byte_tokens_is_one_span_when_it_is_invalid() -> None:
    tokenizer = ChatTokenizer(llama_like())
    pieces = {piece: index for index, piece in enumerate(FALLBACK_PIECES)}
    valid = [pieces["<0xC3>"], pieces["<0xA9>"]]
    stream = IncrementalDetokenizer(tokenizer)
    assert stream.push_spans(valid) == []
    assert stream.pending_token == 0
    assert stream.push_spans([pieces["cat"]]) == [Span("é", 0, 1), Span("cat", 2, 2)]
    assert stream.push_spans([*valid, pieces["<0xFF>"]]) == []
    assert stream.flush_spans() == [Span("\ufffd\ufffd\ufffd", 3, 5)]


def test_a_leading_space_is_stripped_from_the_first_text_only() -> None:
    tokenizer = ChatTokenizer(llama_like())
    the, cat = FALLBACK_PIECES.index("▁the"), FALLBACK_PIECES.index("cat")
    stream = IncrementalDetokenizer(tokenizer)
    assert [stream.push([i]) for i in (the, the, cat)] == ["the", " the", "cat"]


def test_streaming_never_decodes_earlier_tokens_again(
    byte_level: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = byte_level.encode(TEXT * 3, add_special_tokens=False)
    asked: list[int] = []
    piece = ChatTokenizer.piece
    monkeypatch.setattr(ChatTokenizer, "decode", None)
    monkeypatch.setattr(
        ChatTokenizer,
        "piece",
        lambda self, token_id: asked.append(token_id) or piece(self, token_id),
    )
    stream = IncrementalDetokenizer(byte_level)
    text = "".join(stream.push([token_id]) for token_id in ids) + stream.flush()
    assert text == TEXT * 3
    assert asked == ids


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.CTC(),
        decoders.Replace(Regex("a+"), "b"),
        decoders.Strip(" ", 0, 1),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.Fuse(), decoders.Metaspace()]),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Strip(" ", 1, 0)]),
    ],
    ids=repr,
)
def test_a_decoder_that_cannot_be_streamed_exactly_is_refused(decoder: decoders.Decoder) -> None:
    with pytest.raises(Unsupported, match="cannot be streamed"):
        ChatTokenizer(word_level(["a"], decoder))


def test_an_id_that_is_no_u32_is_an_invalid_argument(byte_level: ChatTokenizer) -> None:
    for token_id in (-1, 1 << 32):
        with pytest.raises(InvalidArgument, match="outside"):
            IncrementalDetokenizer(byte_level).push([token_id])
        with pytest.raises(InvalidArgument, match="outside"):
            byte_level.decode([token_id])


def test_normalizers_do_not_matter_to_decoding() -> None:
    tokenizer = trained_byte_level()
    tokenizer.normalizer = normalizers.NFC()
    chat = ChatTokenizer(tokenizer)
    ids = chat.encode("Cafe\u0301")
    assert IncrementalDetokenizer(chat).push(ids) == "Café"
