"""A client in an application that has OpenTelemetry, and in one that has not."""

import sys

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from test_client_fakes import FakeService, answer, playing, response, serving

from outrider import client_resume
from outrider.client import GenerationOptions, Message, OutriderClient
from outrider.errors import ResourceExhausted, Unavailable
from outrider.telemetry.context import TraceContext


@pytest.fixture
def exporter(monkeypatch):
    """The application's spans; it has set OpenTelemetry up."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    monkeypatch.setattr(client_resume, "FIRST_BACKOFF_S", 0.001)
    return exporter


class Listening(FakeService):
    """Keeps the traceparent of each call."""

    def __init__(self, *scripts):
        super().__init__(*scripts)
        self.traceparents = []

    async def Generate(self, request, context):
        metadata = dict(context.invocation_metadata())
        self.traceparents.append(metadata.get("traceparent"))
        async for item in super().Generate(request, context):
            yield item


async def complete(service, prompt="hello", **options):
    async with serving(service) as address:
        async with await OutriderClient.connect(address=address) as client:
            return await client.complete(prompt, GenerationOptions(**options))


async def test_a_call_is_a_span_whose_context_the_server_gets(exporter):
    service = Listening()
    with trace.get_tracer("application").start_as_current_span("its own") as own:
        await complete(service, [Message("user", "hello")], model="m", max_tokens=4)
        assert trace.get_current_span() is own, "the application's span stays the current one"
    call, _ = exporter.get_finished_spans()
    assert (call.name, call.kind.name) == ("chat m", "CLIENT")
    assert call.parent.span_id == own.get_span_context().span_id
    [given] = service.traceparents
    context = call.get_span_context()
    assert TraceContext.parse(given) == TraceContext(context.trace_id, context.span_id, True)
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.request.max_tokens": 4,
        "gen_ai.conversation.id": "s" * 22,
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.response.finish_reasons": ("eos",),
    }
    assert expected.items() <= call.attributes.items()
    assert [event.name for event in call.events] == ["first token"]
    assert call.status.is_ok


async def test_attempts_of_a_call_are_one_span(exporter):
    service = Listening(playing([Unavailable("not yet")]), playing(answer()))
    await complete(service)
    [call] = exporter.get_finished_spans()
    assert len(service.traceparents) == 2 and len(set(service.traceparents)) == 1
    assert call.status.is_ok


async def test_a_call_that_fails_says_so(exporter):
    with pytest.raises(ResourceExhausted):
        await complete(FakeService(playing([ResourceExhausted("no more")])))
    [call] = exporter.get_finished_spans()
    assert call.attributes["error.type"] == "RESOURCE_EXHAUSTED" and not call.status.is_ok


async def test_a_stream_that_is_left_ends_its_span(exporter):
    async with serving(FakeService(playing([response(n, [n]) for n in range(9)]))) as address:
        async with await OutriderClient.connect(address=address) as client:
            stream = client.generate("hello")
            await anext(stream)
            assert exporter.get_finished_spans() == ()
            await stream.aclose()
    [call] = exporter.get_finished_spans()
    assert call.status.is_ok and call.end_time is not None


async def test_without_opentelemetry_there_is_no_trace(monkeypatch):
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    service = Listening()
    done = await complete(service)
    assert done.text == "Hi there!" and service.traceparents == [None]
    assert "opentelemetry.trace" not in sys.modules
