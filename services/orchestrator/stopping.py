"""When a generation ends, and which of its tokens and text may be told already.

`OutputStream` takes tokens in any cuts and releases them with their text. The earliest token that
ends the generation wins, whatever the reason. What it releases is never taken back, so it is what
the orchestrator commits and the client sees: a token whose text may turn out to belong to a stop
string is held until that is known. Nothing that it releases depends on how the pushes were cut.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from outrider.errors import InternalError, InvalidArgument
from outrider.types import FinishReason, PositionLogprobs, TokenSource
from services.orchestrator.detokenize import IncrementalDetokenizer, Span
from services.orchestrator.text import ChatTokenizer

T = TypeVar("T")

MAX_STOP_TOKEN_IDS = 32
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 256


@dataclass(frozen=True, slots=True)
class StopRules:
    """When a generation ends; ranges as in StopCriteria of generation.proto.

    `context_length` counts the prompt too. Before `min_tokens` tokens neither an EOS nor a stop
    id ends anything, and stop strings are looked for only in text that begins after them.
    """

    max_tokens: int
    context_length: int
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.max_tokens < 1 << 31:
            raise InvalidArgument(f"{self.max_tokens} is not in [1, 2^31)", field="stop.max_tokens")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InvalidArgument(
                f"{self.min_tokens} is not in [0, max_tokens = {self.max_tokens}]",
                field="stop.min_tokens",
            )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidArgument(
                f"{len(self.stop_token_ids)} ids; at most {MAX_STOP_TOKEN_IDS}",
                field="stop.stop_token_ids",
            )
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            raise InvalidArgument(
                f"{len(self.stop_strings)} strings; at most {MAX_STOP_STRINGS}",
                field="stop.stop_strings",
            )
        for string in self.stop_strings:
            if not 1 <= len(string.encode("utf-8", "surrogatepass")) <= MAX_STOP_STRING_BYTES:
                raise InvalidArgument(
                    f"each has 1 to {MAX_STOP_STRING_BYTES} bytes", field="stop.stop_strings"
                )

    def reason_at(self, token_id: int, index: int, prompt_len: int) -> FinishReason | None:
        """Why generated token `index` (from 0) is the last one; None where it is not."""
        if index >= self.min_tokens:
            if token_id in self.eos_token_ids and not self.ignore_eos:
                return FinishReason.EOS
            if token_id in self.stop_token_ids:
                return FinishReason.STOP_TOKEN
        if index + 1 >= self.max_tokens:
            return FinishReason.MAX_TOKENS
        if prompt_len + index + 1 >= self.context_length:
            return FinishReason.CONTEXT_FULL
        return None


@dataclass(frozen=True, slots=True)
class Released:
    """What became final with a push.

    Over a whole generation `decode(all token_ids) == all text + cut_text`. `sources` has as many
    entries as `token_ids`, and so has `logprobs` unless none were given. Text may lag behind the
    ids, never run ahead; with the finish reason it has caught up. `segments` cuts the text by
    where its tokens came from: (characters, source), in order, together as long as the text.
    """

    token_ids: tuple[int, ...] = ()
    sources: tuple[TokenSource, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    text: str = ""
    segments: tuple[tuple[int, TokenSource], ...] = ()
    finish_reason: FinishReason | None = None
    cut_text: str = ""
    matched_stop: str = ""

    def __add__(self, later: "Released") -> "Released":
        """Both, told as one."""
        return Released.joined((self, later))

    @classmethod
    def joined(cls, parts: "Sequence[Released]") -> "Released":
        """All of them, told as one; the last one may be the end."""
        return replace(
            parts[-1],
            token_ids=_chained([part.token_ids for part in parts]),
            sources=_chained([part.sources for part in parts]),
            logprobs=_chained([part.logprobs for part in parts]),
            text="".join([part.text for part in parts]),
            segments=_chained([part.segments for part in parts]),
        )


def _chained(parts: Sequence[tuple[T, ...]]) -> tuple[T, ...]:
    return tuple(itertools.chain.from_iterable(parts))


class OutputStream:
    """The generated tokens of one generation on their way out. One owner; not thread-safe."""

    def __init__(self, tokenizer: ChatTokenizer, rules: StopRules, *, prompt_len: int) -> None:
        """Raises InvalidArgument where the context has no place for one token."""
        if prompt_len >= rules.context_length:
            raise InvalidArgument(
                f"{prompt_len} tokens leave no room in a context of {rules.context_length}",
                field="prompt",
            )
        self._rules = rules
        self._prompt_len = prompt_len
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._matcher = _StopMatcher(rules.stop_strings)
        self._held: list[_Token] = []
        self._sources: list[TokenSource] = []  # of all tokens taken
        self._spans: list[tuple[int, Span]] = []  # text not yet released, with its position
        self._text_len = 0
        self._told_chars = 0  # of the text, which is not to be released again
        self._num_released = 0
        self._with_logprobs: bool | None = None
        self._finish_reason: FinishReason | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._finish_reason

    @property
    def num_released(self) -> int:
        """Tokens released: the completion tokens of usage."""
        return self._num_released

    @property
    def num_taken(self) -> int:
        """Tokens taken by `push`, released or not: all up to the one that ends the generation."""
        return self._detokenizer.num_tokens

    @property
    def held_ids(self) -> int:
        """Tokens taken but not released, and so not durable; 0 after the finish."""
        return len(self._held)

    @property
    def remaining(self) -> int:
        """Tokens that may still come at most; 0 after the finish."""
        if self._finish_reason is not None:
            return 0
        limit = min(self._rules.max_tokens, self._rules.context_length - self._prompt_len)
        return limit - self._num_released - len(self._held)

    def goes_on_after(self, token_ids: Sequence[int]) -> bool:
        """Whether the generation is known to go on after these tokens, pushed next.

        A look at the ids alone: where stop strings may end it, the answer is False.
        """
        first = self._detokenizer.num_tokens
        return not self._rules.stop_strings and not any(
            self._rules.reason_at(token_id, first + index, self._prompt_len)
            for index, token_id in enumerate(token_ids)
        )

    def restore(
        self, token_ids: Sequence[int], sources: Sequence[TokenSource], *, told_chars: int
    ) -> Released:
        """Take up a generation where another has left it: before any push, what it had released.

        `told_chars` characters of its text are known where it is told, and do not come again, nor
        does a stop string begin in them. Returns the rest of the text that is certain, and whether
        the generation had ended by its last token; no tokens.
        """
        if self._detokenizer.num_tokens:
            raise InternalError("a generation is restored before anything is pushed")
        self._told_chars = self._matcher.first = told_chars
        reason = None
        for token_id, source in zip(token_ids, sources, strict=True):
            if reason is not None or self._matcher.found():
                raise InternalError("the log goes on behind the end of its generation")
            reason = self._take(_Token(token_id, source, None))
        self._held.clear()
        self._num_released = len(token_ids)
        if match := self._matcher.found():
            return self._finish_at_string(match)
        self._finish_reason = reason
        return self._release()

    def push(
        self,
        token_ids: Sequence[int],
        sources: Sequence[TokenSource],
        logprobs: Sequence[PositionLogprobs] | None = None,
    ) -> Released:
        """Take the next verified tokens; those after the one that ends the generation are dropped.

        Raises InternalError where the lists differ in length, or after the finish.
        """
        self._check(token_ids, sources, logprobs)
        notes = itertools.repeat(None) if logprobs is None else logprobs
        for token in map(_Token, token_ids, sources, notes):
            reason = self._take(token)
            if match := self._matcher.found():
                return self._finish_at_string(match)
            if reason is not None:
                self._finish_reason = reason
                break
        return self._release()

    def _check(
        self,
        token_ids: Sequence[int],
        sources: Sequence[TokenSource],
        logprobs: Sequence[PositionLogprobs] | None,
    ) -> None:
        if self._finish_reason is not None:
            raise InternalError("tokens were pushed after the end of a generation")
        if len(sources) != len(token_ids):
            raise InternalError(f"{len(sources)} sources for {len(token_ids)} tokens")
        if logprobs is not None and len(logprobs) != len(token_ids):
            raise InternalError(f"{len(logprobs)} logprobs for {len(token_ids)} tokens")
        if not token_ids:
            return
        if self._with_logprobs is None:
            self._with_logprobs = logprobs is not None
        elif self._with_logprobs != (logprobs is not None):
            raise InternalError("logprobs for some tokens of a generation only")

    def _take(self, token: "_Token") -> FinishReason | None:
        """Add a token and its text; all its text where it is the last one."""
        index = self._detokenizer.num_tokens
        self._held.append(token)
        self._sources.append(token.source)
        spans = self._detokenizer.push_span(token.token_id)
        reason = self._rules.reason_at(token.token_id, index, self._prompt_len)
        if reason is not None:
            spans += self._detokenizer.flush_spans()
        self._add(spans)
        return reason

    def _add(self, spans: list[Span]) -> None:
        for span in spans:
            self._spans.append((self._text_len, span))
            if span.first >= self._rules.min_tokens:
                self._matcher.feed(span.text, self._text_len)
            self._text_len += len(span.text)

    def _release(self) -> Released:
        """Release each token whose text is out of reach of every stop string."""
        end = self._detokenizer.num_tokens
        if self._finish_reason is None and self._rules.stop_strings:
            end = self._first_token(self._text_len - self._matcher.reach)
        texts = []
        for _, (text, first, last) in self._spans:
            if last >= end:
                break
            texts.append((text, first))
        del self._spans[: len(texts)]
        return self._emit(end, texts)

    def _first_token(self, position: int) -> int:
        """First token that has a part in the text from a position on."""
        for start, span in self._spans:
            if position < start + len(span.text):
                return span.first
        pending = self._detokenizer.pending_token
        return self._detokenizer.num_tokens if pending is None else pending

    def _finish_at_string(self, match: "_Match") -> Released:
        """End before a stop string; of its tokens only one that began before it stays."""
        self._finish_reason = FinishReason.STOP_STRING
        self._add(self._detokenizer.flush_spans())
        end = max(self._first_token(match.start), self._num_released)
        for start, span in self._spans:
            if start < match.start:
                end = max(end, span.last + 1)
        texts, cut_text = [], ""
        for start, span in self._spans:
            before = max(0, match.start - start)
            texts.append((span.text[:before], span.first))
            if span.last < end:
                cut_text += span.text[before:]
            elif span.first < end:
                # A character whose other bytes are in tokens that were cut.
                cut_text += "\ufffd"
        self._spans.clear()
        return self._emit(end, texts, cut_text, match.string)

    def _emit(
        self, end: int, texts: list[tuple[str, int]], cut_text: str = "", matched_stop: str = ""
    ) -> Released:
        """Release held tokens before index `end`; after the finish nothing stays held.

        `texts` is the text to release, each part with the index of its first token.
        """
        # What an earlier owner has released stays so, though less were known to be certain now.
        end = max(end, self._num_released)
        count = end - self._num_released
        tokens = self._held[:count]
        if self._told_chars:
            texts = self._untold(texts)
        self._held = [] if self._finish_reason is not None else self._held[count:]
        self._num_released = end
        # Tuples of lists: generators take longer, and this is done each round.
        return Released(
            token_ids=tuple([token.token_id for token in tokens]),
            sources=tuple([token.source for token in tokens]),
            logprobs=tuple([token.logprob for token in tokens if token.logprob is not None]),
            text="".join([text for text, _ in texts]),
            segments=tuple([(len(text), self._sources[first]) for text, first in texts if text]),
            finish_reason=self._finish_reason,
            cut_text=cut_text,
            matched_stop=matched_stop,
        )

    def _untold(self, texts: list[tuple[str, int]]) -> list[tuple[str, int]]:
        """Without the characters that were told before."""
        untold = []
        for text, first in texts:
            known = min(self._told_chars, len(text))
            self._told_chars -= known
            untold.append((text[known:], first))
        return untold


class _Token(NamedTuple):
    token_id: int
    source: TokenSource
    logprob: PositionLogprobs | None


class _Match(NamedTuple):
    start: int
    string: str


class _StopMatcher:
    """Looks for all stop strings in growing text (Knuth, Morris and Pratt 1977, one state each).

    Within the text of one token the match that starts first wins, then the longest.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._borders = [_borders(string) for string in strings]
        self._states = [0] * len(strings)
        self._matches: list[_Match] = []
        self.first = 0
        """Where the first match may start."""

    @property
    def reach(self) -> int:
        """Characters at the end of the text that may be the start of a stop string."""
        return max(self._states, default=0)

    def feed(self, text: str, position: int) -> None:
        """Take the text at a position, which follows the text before it."""
        for number, string in enumerate(self._strings):
            borders, state = self._borders[number], self._states[number]
            for offset, char in enumerate(text, position + 1):
                while state and (state == len(string) or string[state] != char):
                    state = borders[state - 1]
                if string[state] == char:
                    state += 1
                if state == len(string) and offset - len(string) >= self.first:
                    self._matches.append(_Match(offset - len(string), string))
            self._states[number] = state

    def found(self) -> _Match | None:
        """The match that counts, if any."""
        if not self._matches:
            return None
        return min(self._matches, key=lambda match: (match.start, -len(match.string)))


def _borders(string: str) -> list[int]:
    """Of each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(string)
    length = 0
    for index in range(1, len(string)):
        while length and string[index] != string[length]:
            length = borders[length - 1]
        if string[index] == string[length]:
            length += 1
        borders[index] = length
    return borders
