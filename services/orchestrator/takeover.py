"""What a generation is taken up with, by another orchestrator or by the same one anew."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from outrider.errors import DataLoss
from outrider.types import (
    EMPTY_PREFIX_HASH,
    PositionLogprobs,
    SpeculationStats,
    TokenSource,
    chain_hash,
)
from outrider.v1 import generation_pb2
from services.orchestrator.decoder import Piece, RoundTimes
from services.orchestrator.detokenize import IncrementalDetokenizer
from services.orchestrator.notes import NoteFormat
from services.orchestrator.requests import GenerationPlan
from services.orchestrator.responses import in_parts, response_of, usage_of
from services.orchestrator.stopping import Released
from services.orchestrator.store_values import GenerationRecord, Outcome, StoredSession
from services.orchestrator.text import ChatTokenizer
from services.orchestrator.totals import Totals


@dataclass(frozen=True, slots=True)
class Told:
    """What the client has: generated tokens, characters of their text, and a hash of the tokens."""

    offset: int = 0
    text_chars: int = 0
    tokens_hash: int | None = None


@dataclass(frozen=True, slots=True)
class Taken:
    """The durable part of a generation, and what of it the client has.

    `token_ids` are those that it generated; the other lists are as long, `logprobs` unless none
    were asked for. `takeovers` counts the owners since the one that began it.
    """

    token_ids: tuple[int, ...]
    sources: tuple[TokenSource, ...]
    logprobs: tuple[PositionLogprobs, ...]
    totals: Totals
    told: Told
    takeovers: int
    elapsed_s: float

    @classmethod
    def of(cls, session: StoredSession, record: GenerationRecord, told: Told) -> "Taken":
        """Raises DataLoss where the client has more than the store, or other tokens."""
        token_ids = session.token_ids[record.prompt_end :]
        check_told(token_ids, told)
        sources, logprobs = NoteFormat(record.logprobs).unpack(session.notes, token_ids)
        return cls(
            token_ids=token_ids,
            sources=sources,
            logprobs=logprobs,
            totals=Totals.from_json(session.progress),
            told=told,
            takeovers=session.fence.epoch - record.epoch,
            elapsed_s=session.elapsed_s,
        )

    def untold(self, text: Released) -> Released:
        """What the client lacks: the tokens, with what came of `OutputStream.restore`."""
        start = self.told.offset
        return Released(self.token_ids[start:], self.sources[start:], self.logprobs[start:]) + text


def check_told(token_ids: tuple[int, ...], told: Told) -> None:
    if told.offset > len(token_ids):
        raise DataLoss(
            f"{told.offset} tokens were told, the session store has {len(token_ids)} of them",
            field="offset",
        )
    if told.tokens_hash is None:
        return
    if chain_hash(EMPTY_PREFIX_HASH, token_ids[: told.offset]) != told.tokens_hash:
        raise DataLoss(
            f"the first {told.offset} tokens in the session store are not those that were told",
            field="tokens_hash",
        )


class EndedGeneration:
    """A generation that had ended before its client came back: told again, from the store alone."""

    def __init__(
        self, plan: GenerationPlan, outcome: Outcome, taken: Taken, tokenizer: ChatTokenizer
    ) -> None:
        self.plan = plan
        self._outcome = outcome
        self._taken = taken
        self._tokenizer = tokenizer

    async def responses(self) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        taken = self._taken
        offset = taken.told.offset
        for part in in_parts(taken.untold(self._text())):
            piece = Piece(part, SpeculationStats(), RoundTimes())
            response = response_of(self.plan, piece, offset=offset, durable=True)
            offset += len(part.token_ids)
            if part.finish_reason is not None:
                usage = usage_of(
                    self.plan,
                    taken.totals,
                    completion_tokens=len(taken.token_ids),
                    takeovers=taken.takeovers,
                )
                response.usage.CopyFrom(usage)
            yield response

    async def end(self) -> None:
        """Nothing is held."""

    def _text(self) -> Released:
        """The text that the client lacks: that of all tokens, without what was cut off."""
        spans = text_spans(self._tokenizer, self._taken.token_ids)
        left = sum(len(text) for text, _ in spans) - len(self._outcome.cut_text)
        known = self._taken.told.text_chars
        texts, segments = [], []
        for text, first in spans:
            part = text[known:left]
            known, left = max(known - len(text), 0), max(left - len(text), 0)
            if part:
                texts.append(part)
                segments.append((len(part), self._taken.sources[first]))
        return Released(
            text="".join(texts),
            segments=tuple(segments),
            finish_reason=self._outcome.finish_reason,
            cut_text=self._outcome.cut_text,
            matched_stop=self._outcome.matched_stop,
        )


def text_spans(tokenizer: ChatTokenizer, token_ids: tuple[int, ...]) -> list[tuple[str, int]]:
    """All text of these tokens, each part with the index of its first token."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    spans = [*detokenizer.push_spans(token_ids), *detokenizer.flush_spans()]
    return [(span.text, span.first) for span in spans]
