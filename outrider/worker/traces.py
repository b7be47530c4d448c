"""What a worker has to do with the rounds of a traced request: queue, pass, waiting for a draft."""

import time
from dataclasses import dataclass
from functools import partial

from outrider.engine.scheduler import Work
from outrider.telemetry.catalog import refusal_name
from outrider.telemetry.context import TraceContext
from outrider.telemetry.spans import Attribute, Spans
from outrider.v1 import worker_pb2


@dataclass(frozen=True, slots=True)
class _Told:
    """A round as it was, with the context that its spans are below."""

    context: TraceContext
    base_len: int
    name: str
    arrived: float
    started: float | None
    ended: float
    batch_rows: int
    cached_tokens: int
    reply: worker_pb2.Reply


class WorkTraces:
    """Writes the spans of a worker's part in rounds; told on the worker's thread."""

    def __init__(self, spans: Spans, *, tier: str, model: str) -> None:
        self._spans = spans
        self._own: dict[str, Attribute] = {"outrider.tier": tier, "gen_ai.request.model": model}

    def context_of(self, header: worker_pb2.EntryHeader) -> TraceContext | None:
        """The trace that an entry belongs to, if any of its rounds may be told of."""
        if not header.trace_every:
            return None
        context = TraceContext.parse(header.traceparent)
        return context if context is not None and context.sampled else None

    def tell(self, context: TraceContext, work: Work, reply: worker_pb2.Reply) -> None:
        """A round of a work is over, and this is its reply; its verdict is not in the log yet."""
        entry: worker_pb2.Entry = work.owner.entry
        base_len, spec = len(work.sequence.log), work.sequence.spec
        prompt_len = spec.prompt_len if spec else 0
        if context.tells(base_len, prompt_len, entry.header.trace_every):
            told = _Told(
                context,
                base_len,
                "verify" if entry.HasField("verify") else "propose",
                work.arrived,
                work.started,
                time.monotonic(),
                work.batch_rows,
                work.reused,
                reply,
            )
            self._spans.later.do(partial(self._write, told))

    def _write(self, told: _Told) -> None:
        reply, context = told.reply, told.context
        verified, refused = reply.HasField("verified"), reply.HasField("refused")
        own = self._spans.write(
            told.name,
            TraceContext(context.trace_id, context.round_id(told.base_len), sampled=True),
            told.arrived,
            told.ended,
            {
                **self._own,
                "outrider.base_len": told.base_len,
                "outrider.batch_rows": told.batch_rows,
                "outrider.cached_tokens": told.cached_tokens,
                **_result(reply),
            },
            # What a draft does for this round is below it.
            span_id=context.below().round_id(told.base_len) if verified else 0,
            served=True,
            error=refusal_name(reply.refused.reason) if refused else "",
        )
        self._parts(own, told)

    def _parts(self, own: TraceContext, told: _Told) -> None:
        started = told.started or told.ended
        asked = min(told.arrived + told.reply.verified.draft.wait_us / 1e6, started)
        if asked > told.arrived:
            self._spans.write("wait for draft", own, told.arrived, asked, {})
        self._spans.write("queue", own, asked, started, {})
        if told.started:
            self._spans.write("pass", own, started, told.ended, {})


def _result(reply: worker_pb2.Reply) -> dict[str, Attribute]:
    """What a reply says, as attributes."""
    found: dict[str, Attribute] = {}
    if reply.HasField("proposed"):
        found["outrider.outcomes"] = len(reply.proposed.outcomes)
        found["outrider.guesses"] = len(reply.proposed.proposal.token_ids) + sum(
            len(outcome.proposal.token_ids) for outcome in reply.proposed.outcomes
        )
    elif reply.HasField("verified"):
        verified = reply.verified
        found["outrider.proposed"] = verified.num_proposed
        found["outrider.accepted"] = verified.num_accepted
        if verified.HasField("draft"):
            found |= _draft(verified.draft)
    return found


def _draft(report: worker_pb2.DraftReport) -> dict[str, Attribute]:
    """How a target came by the proposal."""
    found: dict[str, Attribute] = {
        "outrider.draft.asked": report.asked,
        "outrider.draft.failed": report.failed,
        "outrider.draft.wait_us": report.wait_us,
        "outrider.draft.trip_us": report.trip_us,
    }
    if report.HasField("hit"):
        found["outrider.buffer.hit"] = report.hit
        found["outrider.buffer.prepared"] = report.prepared
        if report.hit:
            found["outrider.buffer.rank"] = report.rank
    return found
