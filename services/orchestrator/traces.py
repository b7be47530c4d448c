"""The spans of a request: itself, its prefill, some of its rounds with what the controller made of
them, and the commits after these."""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from outrider.telemetry.gen_ai import finish_attributes, usage_attributes
from outrider.telemetry.spans import Attribute, Spans, context_of
from outrider.types import FinishReason, SpeculationStats
from services.orchestrator.decoder import RoundRecord

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_FAULTS = ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")
"""Statuses that say something of the server, by OpenTelemetry's conventions for RPC."""


class RequestTrace:
    """The trace of one request. `every` says which of its rounds are told, as in worker.proto."""

    def __init__(self, spans: Spans, span: "Span", every: int) -> None:
        self.context = context_of(span)
        self._spans = spans
        self._span = span
        self._every = every
        self._prompt_len = 0

    def begins(self, attributes: Mapping[str, Attribute], prompt_len: int) -> None:
        """Its generation is known, and so is the length of its log with the prompt."""
        self._prompt_len = prompt_len
        self._span.set_attributes(attributes)

    def first_token(self) -> None:
        self._span.add_event("first token")

    def rounds(self, records: Sequence[RoundRecord]) -> None:
        """Rounds have ended."""
        for record in records:
            last = record.seen.context_len - record.seen.num_tokens
            for back in range(record.count):
                if self._tells(last - back):
                    ended = record.ended - back * record.seen.total_s
                    self._spans.later.do(partial(self._round, record, last - back, ended))

    def committed(self, from_len: int, count: int, started: float) -> None:
        """The store has taken tokens that follow `from_len`."""
        if self._tells(from_len):
            attributes = {"outrider.base_len": from_len, "outrider.tokens": count}
            write, ended = self._spans.write, time.monotonic()
            self._spans.later.do(partial(write, "commit", self.context, started, ended, attributes))

    def ended(
        self,
        *,
        status: str,
        stats: SpeculationStats,
        tokens: tuple[int, int, int],
        finish_reason: FinishReason | None,
    ) -> None:
        """`tokens`: of the input, those cached of them, of the output."""
        from opentelemetry.trace import Status, StatusCode

        span = self._span
        span.set_attribute("rpc.response.status_code", status)
        if status != "OK":
            span.set_attribute("error.type", status)
        if status in _FAULTS:
            span.set_status(Status(StatusCode.ERROR))
        if finish_reason is not None:
            span.set_attributes(finish_attributes(finish_reason.value))
        span.set_attributes(usage_attributes(*tokens))
        for name in ("rounds", "proposed", "accepted", "fallback_rounds", "dropped_proposals"):
            span.set_attribute(f"outrider.{name}", getattr(stats, name))
        span.end()

    def _tells(self, base_len: int) -> bool:
        return self.context.tells(base_len, self._prompt_len, self._every)

    def _round(self, record: RoundRecord, base_len: int, ended: float) -> None:
        prefill = base_len == self._prompt_len
        self._spans.write(
            "prefill" if prefill else "round",
            self.context,
            ended - record.seen.total_s,
            ended,
            {"outrider.base_len": base_len, **_seen(record), **_decided(record)},
            span_id=self.context.round_id(base_len),
        )


def _seen(record: RoundRecord) -> dict[str, Attribute]:
    seen = record.seen
    found: dict[str, Attribute] = {
        "outrider.asked": seen.num_asked,
        "outrider.proposed": seen.num_proposed,
        "outrider.accepted": seen.num_accepted,
        "outrider.batch_rows": seen.batch_rows,
        "outrider.draft_us": int(seen.draft_s * 1e6),
        "outrider.verify_us": int(seen.verify_s * 1e6),
    }
    if seen.hit is not None:
        found["outrider.buffer.hit"] = seen.hit
    return found


def _decided(record: RoundRecord) -> dict[str, Attribute]:
    """What the controller wants from then on, and the numbers behind it."""
    found: dict[str, Attribute] = {
        "outrider.next.k": record.next_length,
        "outrider.next.fan_out": record.next_fan_out,
    }
    decision = record.decision
    if decision is not None:
        found["outrider.next.proposer"] = decision.proposer
        found["outrider.next.tokens_per_s"] = decision.tokens_per_s
        found["outrider.next.plain_tokens_per_s"] = decision.plain_tokens_per_s
        found |= {f"outrider.inputs.{name}": value for name, value in decision.inputs.items()}
    return found
