"""Text to tokens and back: prompts, chat templates, and text that grows with the tokens.

The orchestrator has no `transformers`; the target worker sends its tokenizer and chat template as
one JSON document (`ChatTokenizer.from_json`), which is not trusted: its size is bounded, its
template runs in a sandbox in a process of its own, and what cannot be reproduced exactly is refused
when it is loaded. Encoding and rendering take a second for a megabyte: they belong on a thread.
"""

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from outrider.errors import FailedPrecondition, InvalidArgument, Unsupported
from services.orchestrator.chat_template import ChatTemplate, Messages
from services.orchestrator.detokenize import Stage, decoder_spec, stage_factories

MAX_DOCUMENT_BYTES = 64 << 20


class ChatTokenizer:
    """The target's tokenizer and chat template. Immutable to its users; safe to share."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None = None) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = template
        self._stages = stage_factories(decoder_spec(tokenizer))
        special = tokenizer.get_added_tokens_decoder().values()
        self._special = frozenset(token.content for token in special if token.special)
        self._pieces: dict[int, str | None] = {}

    @classmethod
    def from_json(cls, data: bytes) -> "ChatTokenizer":
        """Load what a target sent: UTF-8 JSON of an object with

        `tokenizer` (content of tokenizer.json, as an object or a string), `chat_template`,
        `bos_token`, `eos_token` (strings or null).

        Raises FailedPrecondition where the document is malformed, Unsupported where its decoder
        cannot be streamed exactly.
        """
        if len(data) > MAX_DOCUMENT_BYTES:
            raise FailedPrecondition(
                f"the target's tokenizer has {len(data)} bytes; at most {MAX_DOCUMENT_BYTES}"
            )
        try:
            document = json.loads(data.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise FailedPrecondition(f"the target's tokenizer is no UTF-8 JSON: {error}") from error
        if not isinstance(document, dict):
            raise FailedPrecondition("the target's tokenizer is no JSON object")
        template = _optional_string(document, "chat_template")
        specials = {
            name: token
            for name in ("bos_token", "eos_token")
            if (token := _optional_string(document, name)) is not None
        }
        return cls(
            _load_tokenizer(document.get("tokenizer")),
            None if template is None else ChatTemplate(template, specials),
        )

    @property
    def vocab_size(self) -> int:
        """Entries of the vocabulary, added tokens included; the target may pad beyond it."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of text; `add_special_tokens=False` for text that is not a log's start.

        Special tokens written out in the text become these tokens, as in `transformers`.
        """
        try:
            # Unlike `encode` it lets other threads run, and it keeps no offsets.
            (encoding,) = self._tokenizer.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
            return list(encoding.ids)
        except (TypeError, UnicodeError) as error:
            raise InvalidArgument(f"the text is not valid Unicode: {error}") from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids: special and unknown ones left out, nothing tidied."""
        try:
            return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))
        except OverflowError as error:
            raise InvalidArgument("a token id is outside [0, 2^32)") from error

    def render_chat(self, messages: Messages) -> list[int]:
        """Token ids of a conversation up to where the assistant speaks.

        Raises Unsupported without a template, InvalidArgument where the template refuses the
        messages.
        """
        if not messages:
            raise InvalidArgument("a conversation needs at least one message", field="messages")
        return self.encode(self._chat_template.render(messages), add_special_tokens=False)

    def render_continuation(self, messages: Messages, last_token: int | None) -> list[int]:
        """Token ids that append messages to a log whose earlier messages are known as tokens only.

        They are what follows the assistant's words in a dummy conversation, so that no default
        system prompt comes again. `last_token` is the log's last id: a log that already ends
        with the template's end of turn does not get a second one.

        Raises Unsupported where what a template renders for new messages depends on older ones.
        """
        if not messages:
            raise InvalidArgument("a continuation needs at least one message", field="messages")
        before, after = self._chat_template.render_after_reply(messages)
        token_ids = self._encode_after(before, after)
        if last_token is None or not self._is_special(last_token):
            return token_ids
        for index, token_id in enumerate(token_ids):
            if token_id == last_token:
                return token_ids[index + 1 :]
            if self._is_special(token_id) or self.decode([token_id]).strip():
                break
        return token_ids

    def piece(self, token_id: int) -> str | None:
        """A token before decoding; None for special tokens and ids without a token."""
        try:
            return self._pieces[token_id]
        except KeyError:
            token = self._token(token_id)
            if token is None:
                return None  # not kept: a worker may send any number
            piece = None if token in self._special else token
            self._pieces[token_id] = piece
            return piece

    def stages(self) -> list[Stage]:
        """A fresh chain of decoder stages, for one stream."""
        return [make() for make in self._stages]

    @property
    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            raise Unsupported("the model has no chat template; send text or token ids instead")
        return self._template

    def _token(self, token_id: int) -> str | None:
        try:
            token: str | None = self._tokenizer.id_to_token(token_id)
        except OverflowError as error:
            raise InvalidArgument(f"token id {token_id} is outside [0, 2^32)") from error
        return token

    def _is_special(self, token_id: int) -> bool:
        return self._token(token_id) in self._special

    def _encode_after(self, before: str, after: str) -> list[int]:
        """Ids of `after` as they follow `before`, or of `after` alone where the two merge."""
        head = self.encode(before, add_special_tokens=False)
        both = self.encode(before + after, add_special_tokens=False)
        if both[: len(head)] == head:
            return both[len(head) :]
        return self.encode(after, add_special_tokens=False)


def _optional_string(document: dict[str, Any], name: str) -> str | None:
    value = document.get(name)
    if value is not None and not isinstance(value, str):
        raise FailedPrecondition(f"{name} in the target's tokenizer is neither a string nor null")
    return value


def _load_tokenizer(content: object) -> Tokenizer:
    if isinstance(content, dict):
        content = json.dumps(content)
    if not isinstance(content, str):
        raise FailedPrecondition("tokenizer in the target's tokenizer is no object or string")
    try:
        return Tokenizer.from_str(content)
    except Exception as error:
        raise FailedPrecondition(f"the target's tokenizer cannot be loaded: {error}") from error
    except BaseException as error:
        # A panic in the Rust library is no Exception; an untrusted document must not end us.
        if type(error).__name__ != "PanicException":
            raise
        raise FailedPrecondition(f"the target's tokenizer cannot be loaded: {error}") from error
