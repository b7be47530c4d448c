"""What the client is told: pieces of a generation as messages."""

from collections.abc import Iterator
from dataclasses import replace

from outrider.types import TokenSource
from outrider.v1 import generation_pb2
from outrider.wire import (
    logprobs_to_proto,
    reason_to_proto,
    source_to_proto,
    sources_to_proto,
    stats_to_proto,
)
from services.orchestrator.decoder import Piece, RoundRecord
from services.orchestrator.requests import GenerationPlan
from services.orchestrator.stopping import Released
from services.orchestrator.totals import Totals

_MAX_TOKENS = 512
_MAX_CHARS = 32_768
"""Of one response that tells again what was told before: far below the size of a message."""


def response_of(
    plan: GenerationPlan, piece: Piece, *, offset: int, durable: bool
) -> generation_pb2.GenerateResponse:
    """All but the usage."""
    released = piece.released
    response = generation_pb2.GenerateResponse(
        session_id=plan.session_id,
        offset=offset,
        token_ids=released.token_ids,
        token_sources=sources_to_proto(released.sources),
        text=released.text,
        text_segments=[
            generation_pb2.TextSegment(length=length, source=source_to_proto(source))
            for length, source in released.segments
        ],
        durable=durable,
        seed=plan.sampling.seed,
        speculation=stats_to_proto(piece.stats),
    )
    if released.logprobs:
        response.logprobs.extend(logprobs_to_proto(released.logprobs))
    if plan.report_rounds:
        response.rounds.extend(map(_round_to_proto, piece.rounds))
    if released.finish_reason is not None:
        response.finish_reason = reason_to_proto(released.finish_reason)
        response.cut_text, response.matched_stop = released.cut_text, released.matched_stop
    return response


def usage_of(
    plan: GenerationPlan,
    totals: Totals,
    *,
    completion_tokens: int,
    takeovers: int,
) -> generation_pb2.Usage:
    times = totals.times
    return generation_pb2.Usage(
        prompt_tokens=plan.prompt_len,
        cached_prompt_tokens=totals.cached,
        completion_tokens=completion_tokens,
        speculation=stats_to_proto(totals.stats),
        time=generation_pb2.TimeStats(
            draft_us=times.draft_us,
            verify_us=times.verify_us,
            draft_compute_us=times.draft_compute_us,
            verify_compute_us=times.verify_compute_us,
            draft_worker_us=times.draft_worker_us,
            verify_worker_us=times.verify_worker_us,
            rounds_us=times.rounds_us,
            first_token_us=totals.first_token_us,
            total_us=totals.total_us,
        ),
        takeovers=takeovers,
        tokens_sent_undurable=totals.sent_undurable,
    )


def in_parts(released: Released) -> Iterator[Released]:
    """The same, in parts that fit into a message each: tokens first, then their text."""
    tokens = [
        Released(
            released.token_ids[i : i + _MAX_TOKENS],
            released.sources[i : i + _MAX_TOKENS],
            released.logprobs[i : i + _MAX_TOKENS],
        )
        for i in range(0, max(len(released.token_ids), 1), _MAX_TOKENS)
    ]
    texts = []
    segments = list(released.segments)
    for i in range(0, max(len(released.text), 1), _MAX_CHARS):
        text = released.text[i : i + _MAX_CHARS]
        texts.append(Released(text=text, segments=_cut_segments(segments, len(text))))
    parts = [*tokens[:-1], tokens[-1] + texts[0], *texts[1:]]
    yield from parts[:-1]
    yield replace(
        parts[-1],
        finish_reason=released.finish_reason,
        cut_text=released.cut_text,
        matched_stop=released.matched_stop,
    )


def _cut_segments(
    segments: list[tuple[int, TokenSource]], length: int
) -> tuple[tuple[int, TokenSource], ...]:
    """Take so many characters off the front of the list."""
    taken = []
    while length > 0:
        count, source = segments[0]
        part = min(count, length)
        taken.append((part, source))
        length -= part
        if part == count:
            del segments[0]
        else:
            segments[0] = count - part, source
    return tuple(taken)


def _round_to_proto(record: RoundRecord) -> generation_pb2.RoundReport:
    seen, decision = record.seen, record.decision
    report = generation_pb2.RoundReport(
        proposed=seen.num_proposed,
        accepted=seen.num_accepted,
        draft_us=int(seen.draft_s * 1e6),
        verify_us=int(seen.verify_s * 1e6),
        round_us=int(seen.total_s * 1e6),
        batch_rows=seen.batch_rows,
        context_len=seen.context_len,
        proposal_us=int(seen.proposal_s * 1e6),
        next_num_speculative_tokens=record.next_length,
        next_fan_out=record.next_fan_out,
    )
    if seen.hit is not None:
        report.hit = seen.hit
    if seen.run_ahead is not None:
        report.run_ahead = seen.run_ahead
    if decision is not None:
        report.next_proposer = decision.proposer
        report.expected_tokens_per_s = decision.tokens_per_s
        report.plain_tokens_per_s = decision.plain_tokens_per_s
        report.inputs.update(decision.inputs)
    return report
