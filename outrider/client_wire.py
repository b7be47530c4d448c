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
    TimeStats,
    Usage,
)
from outrider.errors import InvalidArgument
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


def generate_request(prompt: Prompt, options: GenerationOptions) -> generation_pb2.GenerateRequest:
    request = generation_pb2.GenerateRequest(prompt=prompt_parts(prompt))
    chosen = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    if options.mode is not None:
        chosen["mode"] = wire.mode_to_proto(options.mode)
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


def chunk_from(response: generation_pb2.GenerateResponse, elapsed_s: float) -> GenerationChunk:
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
    )


def session_from(response: generation_pb2.GetSessionResponse) -> Session:
    records = tuple(
        values_from(GenerationRecord, g, finish_reason=wire.reason_from_proto(g.finish_reason))
        for g in response.generations
    )
    return values_from(Session, response, generations=records)


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
