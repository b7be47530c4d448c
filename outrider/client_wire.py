"""The client's values to and from the messages of generation.proto."""

import dataclasses
import secrets
from typing import Any, TypeVar

from google.protobuf.message import Message as ProtoMessage

from outrider import wire
from outrider.client_values import (
    GenerationChunk,
    GenerationOptions,
    GenerationRecord,
    Message,
    Prompt,
    RoundReport,
    Session,
    SessionPage,
    SessionSummary,
    StopOptions,
    TimeStats,
    Usage,
)
from outrider.errors import InvalidArgument
from outrider.types import Durability
from outrider.v1 import generation_pb2

T = TypeVar("T")


def fill(message: ProtoMessage, **values: Any) -> None:
    """Set fields, leaving out None; InvalidArgument names a field whose value does not fit."""
    for name, value in values.items():
        try:
            if isinstance(value, tuple):
                getattr(message, name).extend(value)
            elif value is not None:
                setattr(message, name, value)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"{value!r} does not fit: {error}", field=name) from error


def generate_request(
    prompt: Prompt, options: GenerationOptions, *, resumable: bool = False
) -> generation_pb2.GenerateRequest:
    """The request, named so that it may be sent again."""
    request = generation_pb2.GenerateRequest(
        prompt=prompt_parts(prompt), resumable=resumable, idempotency_key=secrets.token_urlsafe(16)
    )
    chosen = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    if options.mode is not None:
        chosen["mode"] = wire.mode_to_proto(options.mode)
    if options.durability is not None:
        chosen["durability"] = wire.durability_to_proto(options.durability)
    if options.priority is not None:
        chosen["priority"] = wire.priority_to_proto(options.priority)
    chosen["request_id"] = chosen["request_id"] or secrets.token_urlsafe(16)
    for part in (request.sampling, request.stop, request.speculation, request):
        fields = {
            name: chosen.pop(name) for name in part.DESCRIPTOR.fields_by_name if name in chosen
        }
        fill(part, **fields)
    assert not chosen, chosen
    return request


def prompt_parts(prompt: Prompt) -> list[generation_pb2.PromptPart]:
    part = generation_pb2.PromptPart()
    if isinstance(prompt, str):
        fill(part, text=prompt)
        return [part]
    if not prompt:
        return []
    messages = [item for item in prompt if isinstance(item, Message)]
    if len(messages) not in (0, len(prompt)):
        raise InvalidArgument("messages and token ids cannot be mixed", field="prompt")
    for message in messages:
        fill(part.chat.messages.add(), role=message.role, content=message.content)
    if not messages:
        fill(part.tokens, ids=tuple(prompt))
    return [part]


def chunk_from(
    response: generation_pb2.GenerateResponse,
    elapsed_s: float,
    *,
    resumes: int = 0,
    interrupted_s: float = 0.0,
) -> GenerationChunk:
    return values_from(
        GenerationChunk,
        response,
        sources=tuple(wire.source_from_proto(s) for s in response.token_sources),
        text_segments=tuple(
            (segment.length, wire.source_from_proto(segment.source))
            for segment in response.text_segments
        ),
        logprobs=wire.logprobs_from_proto(response.logprobs),
        speculation=wire.stats_from_proto(response.speculation),
        finish_reason=wire.reason_from_proto(response.finish_reason),
        usage=_usage(response.usage) if response.HasField("usage") else None,
        rounds=tuple(map(_round, response.rounds)),
        elapsed_s=elapsed_s,
        resumes=resumes,
        interrupted_s=interrupted_s,
    )


def session_from(response: generation_pb2.GetSessionResponse) -> Session:
    return values_from(
        Session,
        response,
        generations=tuple(map(_generation, response.generations)),
        state=wire.state_from_proto(response.state),
    )


def page_from(response: generation_pb2.ListSessionsResponse) -> SessionPage:
    sessions = (
        values_from(SessionSummary, summary, state=wire.state_from_proto(summary.state))
        for summary in response.sessions
    )
    return SessionPage(tuple(sessions), response.next_page_token, response.total)


def _generation(message: generation_pb2.Generation) -> GenerationRecord:
    return values_from(
        GenerationRecord,
        message,
        mode=wire.mode_from_proto(message.mode),
        sampling=wire.sampling_from_proto(message.sampling),
        stop=values_from(StopOptions, message.stop),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        durability=wire.durability_from_proto(message.durability, Durability.REQUIRE),
        finish_reason=wire.reason_from_proto(message.finish_reason),
        engine_versions=dict(message.engine_versions),
    )


def _round(report: generation_pb2.RoundReport) -> RoundReport:
    return values_from(
        RoundReport,
        report,
        hit=report.hit if report.HasField("hit") else None,
        run_ahead=report.run_ahead if report.HasField("run_ahead") else None,
        inputs=dict(report.inputs),
    )


def _usage(usage: generation_pb2.Usage) -> Usage:
    return values_from(
        Usage,
        usage,
        speculation=wire.stats_from_proto(usage.speculation),
        time=values_from(TimeStats, usage.time),
    )


def values_from(cls: type[T], message: ProtoMessage, **special: Any) -> T:
    """A frozen dataclass from the message's fields of the same names; repeated ones as tuples."""
    values: dict[str, Any] = {}
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        if f.name not in special:
            value = getattr(message, f.name)
            values[f.name] = value if isinstance(value, str | int | float) else tuple(value)
    return cls(**values, **special)
