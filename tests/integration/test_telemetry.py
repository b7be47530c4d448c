"""Telemetry of real processes: counters that are exact, traces that reach both tiers."""

import asyncio
import contextlib
import json
import re
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from otlp_receiver import Receiver, Seen
from outrider.cli.process import Child
from outrider.cli.scrape import scrape_all
from outrider.cli.top_view import summary
from outrider.client import GenerationOptions
from outrider.errors import InvalidArgument, NotFound
from outrider.telemetry.catalog import (
    LABELS,
    METRICS,
    ORCHESTRATOR,
    Kind,
    prometheus_label,
    prometheus_names,
)
from outrider.types import new_session_id
from scripted_workers import Ask, Parts, Rig, Say, ScriptedDraft, Stream, Truth, total, until
from store_servers import running_server
from test_stack_counters import LENGTH, PROMPTS, by_position, expected_rounds, planned

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

REQUEST = "text_completion target"
"""The span of a request for a text of the tiny target."""
ON = {"metrics_address": "127.0.0.1:0"}
Labels = frozenset[tuple[str, str]]


def metrics_of(service: Child) -> str:
    info = json.loads(service.log.with_suffix(".ready").read_text())["info"]
    return str(info["metrics"])


async def scrape(service: Child) -> dict[str, dict[Labels, float]]:
    """Values by name and labels, as Prometheus gets them."""
    url = f"http://{metrics_of(service)}/metrics"

    def read() -> str:
        with urllib.request.urlopen(url, timeout=10) as answer:
            text: str = answer.read().decode()
            return text

    await asyncio.sleep(0.15)  # Sums over generations may be a tenth of a second old.
    found: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(await asyncio.to_thread(read)):
        for sample in family.samples:
            found.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return found


def summed(found: Mapping[str, Mapping[Labels, float]], name: str, **labels: str) -> float:
    wanted = set(labels.items())
    return sum(value for key, value in found.get(name, {}).items() if wanted <= key)


# --- off ---------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_off_no_process_imports_opentelemetry(
    stack: Rig, parts: Parts, tiny_models: dict[str, Path]
) -> None:
    """A worker and an orchestrator, from start over a request: Python tells what it imports."""
    told = {"environ": {"PYTHONPROFILEIMPORTTIME": "1"}}
    async with (
        parts.worker("target", tiny_models["target"], **told) as (target, address),
        parts.orchestrator(stack.store_url, targets=[address], **told) as rig,
    ):
        assert rig.process is not None
        done = await rig.client.complete("off", GenerationOptions(max_tokens=12, ignore_eos=True))
        assert len(done.token_ids) == 12
        logs = [child.log.read_text() for child in (target, rig.process)]
    for log in logs:
        imported = set(re.findall(r"^import time:.*\|\s+([\w.]+)$", log, re.MULTILINE))
        assert {"grpc.aio", "outrider.telemetry.service"} <= imported
        # The client of Redis imports the SDK's metrics by itself where they are installed.
        unwanted = ("opentelemetry.sdk.trace", "opentelemetry.exporter", "prometheus_client")
        assert not {name for name in imported if name.startswith(unwanted)}
        assert "outrider.telemetry.exporting" not in imported


# --- exact counters ----------------------------------------------------------------------------


@pytest.mark.parametrize("drafting", ["direct", "relayed"])
async def test_counters_are_those_of_the_plan(stack: Rig, parts: Parts, drafting: str) -> None:
    async def silent(ask: Ask, say: Say) -> None:
        pass

    truth, k = Truth(), 5
    async with (
        ScriptedDraft(await stack.info(stack.targets[0]), silent) as draft,
        parts.orchestrator(
            stack.store_url, targets=stack.targets, drafts=[draft.address], drafting=drafting, **ON
        ) as rig,
    ):
        assert rig.process is not None
        plain = await truth.learn(rig, PROMPTS, max_tokens=LENGTH, ignore_eos=True)
        before = await scrape(rig.process)
        draft.script = planned(truth)
        options = {"max_tokens": LENGTH, "ignore_eos": True}
        done = await rig.complete_all(PROMPTS, num_speculative_tokens=k, **options)
        after = await scrape(rig.process)
    assert [d.token_ids for d in done] == [p.token_ids for p in plain]

    def grown(name: str, **labels: str) -> float:
        return summed(after, name, **labels) - summed(before, name, **labels)

    rounds = [r for session in range(len(PROMPTS)) for r in expected_rounds(session, k)]
    of = {"model": "target", "proposer": "draft"}
    proposed, accepted = by_position(rounds)
    assert sum(accepted) > 50 and sum(proposed) > sum(accepted)
    for position in range(k):
        label = {"position": str(position), **of}
        assert grown("outrider_guesses_proposed_total", **label) == proposed[position]
        assert grown("outrider_guesses_accepted_total", **label) == accepted[position]
    assert grown("outrider_guesses_proposed_total") == sum(proposed), "and none elsewhere"
    assert grown("outrider_rounds_total", **of) == len(rounds)
    sources = ("plain", "accepted", "recovered", "bonus")
    for source in sources:
        expected = sum(getattr(r, source) for r in rounds)
        assert grown("outrider_round_tokens_total", source=source, **of) == expected
    assert grown("outrider_controller_decisions_total", k=str(k), **of) == len(rounds)
    assert grown("outrider_tokens_total", type="output", model="target") == len(PROMPTS) * LENGTH
    prompt_tokens = sum(d.usage.prompt_tokens for d in done if d.usage)
    assert grown("outrider_tokens_total", type="input", model="target") == prompt_tokens
    ended = {"status": "OK", "finish_reason": "max_tokens", "model": "target"}
    assert grown("outrider_requests_total", **ended) == len(PROMPTS)
    for name in ("request_duration", "time_to_first_token", "time_per_output_token"):
        assert grown(f"gen_ai_server_{name}_seconds_count") == len(PROMPTS)
    times = [d.usage.time for d in done if d.usage]
    for name, expected_us in (
        ("round_time", sum(t.rounds_us for t in times)),
        ("draft_exposed_time", sum(t.draft_us for t in times)),
        ("verify_wait_time", sum(t.verify_us for t in times)),
    ):
        seconds = grown(f"outrider_{name}_seconds_total")
        assert seconds == pytest.approx(expected_us / 1e6, abs=1e-4) and seconds > 0
    commits = grown("outrider_store_operations_total", operation="commit")
    assert len(PROMPTS) <= commits <= len(rounds)
    assert grown("outrider_store_operations_total", operation="finish") == len(PROMPTS)
    assert summed(after, "outrider_streams") == 0
    assert total(done).mean_acceptance_length == pytest.approx(
        grown("outrider_round_tokens_total") / grown("outrider_rounds_total")
    )


# --- a stack that tells everything -------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """A stack of its own, and the collector that it sends to."""

    rig: Rig
    receiver: Receiver
    services: dict[str, Child]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def told(
    stack: Rig,
    parts: Parts,
    tiny_models: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Told]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        patch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "500")
        async with Receiver() as receiver, contextlib.AsyncExitStack() as running:
            on = {"otlp_endpoint": receiver.endpoint, **ON}
            blocks = running.enter_context(
                running_server("valkey", tmp_path_factory.mktemp("blocks"))
            )
            workers = [
                running.enter_async_context(
                    parts.worker(tier, tiny_models[tier], kv_store_url=blocks.url, **on)
                )
                for tier in ("target", "draft")
            ]
            (target, target_address), (draft, draft_address) = await asyncio.gather(*workers)
            rig = await running.enter_async_context(
                parts.orchestrator(
                    stack.store_url,
                    targets=[target_address],
                    drafts=[draft_address],
                    trace_every=3,
                    **on,
                )
            )
            assert rig.process is not None
            services = {"target": target, "draft": draft, "orchestrator": rig.process}
            yield Told(rig, receiver, services)
            await asyncio.gather(*(service.stop(10) for service in services.values()))


@pytest.fixture
def application(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """The client's application has OpenTelemetry."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exporter


async def arrived(told: Told, trace_id: str) -> list[Seen]:
    """All spans of a request that has ended: those of the services come a moment later."""
    spans: list[Seen] = []

    async def settled() -> bool:
        nonlocal spans
        before, spans = spans, told.receiver.trace(trace_id)
        services = {span.service for span in spans}
        if len(services) < 3 or len(spans) > len(before):
            await asyncio.sleep(0.3)
            return False
        return any(span.name == REQUEST for span in spans)

    await until(settled, "the spans of all services are there", timeout_s=20)
    return spans


@pytest.mark.parametrize("fan_out", [0, 4], ids=["asked after", "prepared ahead"])
async def test_a_trace_shows_every_hop(
    told: Told, application: InMemorySpanExporter, fan_out: int
) -> None:
    done = await told.rig.complete(
        f"hops {fan_out}", max_tokens=60, fan_out=fan_out, ignore_eos=True
    )
    [client] = application.get_finished_spans()
    context = client.get_span_context()
    spans = await arrived(told, f"{context.trace_id:032x}")
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)

    [request] = [span for span in spans if span.parent_id == f"{context.span_id:016x}"]
    assert (request.service, request.name) == ("outrider-orchestrator", REQUEST)
    usage = {"gen_ai.usage.output_tokens": 60, "outrider.rounds": done.stats.rounds}
    assert usage.items() <= request.attributes.items()

    parents = {
        ("outrider-orchestrator", "prefill"): [request.name],
        ("outrider-orchestrator", "round"): [request.name],
        ("outrider-orchestrator", "commit"): [request.name],
        ("outrider-target", "verify"): ["prefill", "round"],
        ("outrider-target", "wait for draft"): ["verify"],
        ("outrider-target", "queue"): ["verify"],
        ("outrider-target", "pass"): ["verify"],
        ("outrider-draft", "propose"): ["verify"],
        ("outrider-draft", "queue"): ["propose"],
        ("outrider-draft", "pass"): ["propose"],
    }
    found = Counter((span.service, span.name) for span in spans if span is not request)
    assert set(found) == set(parents), found
    # What was under way when the generation ended has no parent that ended.
    lost = [span for span in spans if span.parent_id not in by_id and span is not request]
    assert len(lost) <= 2 and {span.name for span in lost} <= {"verify", "propose"}
    for span in set(spans) - {request, *lost}:
        parent = by_id[span.parent_id]
        assert parent.name in parents[span.service, span.name], (span, parent)
        assert span.base_len < 0 or parent.base_len in (-1, span.base_len), "of the same round"
        assert span.start_ns <= span.end_ns
    rounds = [span for span in spans if span.name in ("prefill", "round")]
    verified = {span.parent_id for span in spans if span.name == "verify"}
    assert {span.span_id for span in rounds} <= verified, "each round that is told was verified"
    assert 3 <= len(rounds) < done.stats.rounds, "not all of them"
    for span in rounds:
        verify = next(s for s in spans if s.parent_id == span.span_id)
        assert verify.attributes["outrider.accepted"] == span.attributes["outrider.accepted"]
        assert span.attributes["outrider.next.k"] == 3
    assert any("outrider.buffer.hit" in span.attributes for span in rounds) is (fan_out > 0)


async def test_relayed_drafting_is_traced_too(
    told: Told, parts: Parts, application: InMemorySpanExporter
) -> None:
    rig = told.rig
    async with parts.orchestrator(
        rig.store_url,
        targets=rig.targets,
        drafts=rig.drafts,
        drafting="relayed",
        trace_every=3,
        otlp_endpoint=told.receiver.endpoint,
    ) as relayed:
        await relayed.complete("relayed", max_tokens=20, ignore_eos=True)
        [client] = application.get_finished_spans()
        trace_id = f"{client.get_span_context().trace_id:032x}"
        spans = await arrived(told, trace_id)
    by_id = {span.span_id: span for span in spans}
    below = {(s.name, by_id[s.parent_id].name) for s in spans if s.parent_id in by_id}
    assert len(by_id) == len(spans)
    assert ("propose", "round") in below and ("verify", "round") in below


async def test_logs_name_the_trace(told: Told, application: InMemorySpanExporter) -> None:
    await told.rig.complete("logged", max_tokens=4)
    [client] = application.get_finished_spans()
    trace_id = f"{client.get_span_context().trace_id:032x}"
    lines = [json.loads(line) for line in told.rig.log.read_text().splitlines() if line[:1] == "{"]
    [ended] = [line for line in lines if line.get("trace_id") == trace_id]
    assert ended["message"] == "generation ended"
    [request] = [s for s in await arrived(told, trace_id) if s.name == REQUEST]
    assert ended["span_id"] == request.span_id


async def test_every_metric_is_served_with_few_labels(told: Told) -> None:
    rig, session_id = told.rig, new_session_id()
    await rig.complete_all([f"text {n}" for n in range(3)], max_tokens=40, fan_out=4)
    with pytest.raises(NotFound):
        await rig.complete("continued", session_id=session_id)
    with pytest.raises(InvalidArgument):
        await rig.complete("hot", temperature=99.0)
    with pytest.raises(NotFound):
        await rig.complete("other", model="a model that is not served")
    stream = await Stream(rig, "left", max_tokens=400, ignore_eos=True).reaches(5)
    stream._task.cancel()

    async def cancelled() -> bool:
        found = await scrape(told.services[ORCHESTRATOR])
        return summed(found, "outrider_cancellations_total", tier=ORCHESTRATOR) == 1

    await until(cancelled, "the cancellation is counted")
    names = set()
    for tier, service in told.services.items():
        found = await scrape(service)
        expected = {name for m in METRICS if tier in m.services for name in m.series}
        assert set(found) - {"target_info"} == expected, tier
        names |= set(found)
        for metric in METRICS:
            allowed = {prometheus_label(key): LABELS[key][1] for key in metric.labels}
            allowed |= {"le": None} if metric.kind is Kind.HISTOGRAM else {}
            for labels in (key for name in metric.series for key in found.get(name, ())):
                assert {key for key, _ in labels} <= set(allowed), metric.name
                for key, value in labels:
                    known = allowed[key]
                    # One that a sample lacks is empty beside others that have it.
                    assert known is None or value in known or value == "", (metric.name, labels)
                    if key.endswith("model"):
                        assert value in ("", "target", "draft")
    assert names == {*prometheus_names(), "target_info"}


async def test_workers_say_what_info_says(told: Told) -> None:
    rig = told.rig
    await rig.complete("kept", max_tokens=8, keep_session=True)
    for tier, address in (("target", rig.targets[0]), ("draft", rig.drafts[0])):
        info, found = await rig.info(address), await scrape(told.services[tier])
        assert info.sessions >= 1 and summed(found, "outrider_sessions") == info.sessions
        blocks = {s: summed(found, "outrider_kv_blocks", state=s) for s in ("used", "cached")}
        assert blocks["used"] == info.kv_blocks_total - info.kv_blocks_free > 0
        assert summed(found, "outrider_kv_blocks") == info.kv_blocks_total
        assert summed(found, "outrider_pass_rows_limit") == info.max_rows
        assert summed(found, "outrider_kv_preemptions_total") == info.preemptions
        busy = summed(found, "outrider_pass_duration_seconds_sum")
        rows = summed(found, "outrider_pass_rows_total")
        passes = summed(found, "outrider_pass_duration_seconds_count")
        assert 0 < busy < 60 and rows > passes > 0


async def test_what_drafts_make_is_used_or_counted_as_wasted(told: Told) -> None:
    """A draft's own count, and that of the target that asked it."""
    before = {tier: await scrape(service) for tier, service in told.services.items()}
    done = await told.rig.complete_all(
        [f"waste {n}" for n in range(3)], max_tokens=60, fan_out=4, ignore_eos=True
    )
    after = {tier: await scrape(service) for tier, service in told.services.items()}

    def grown(tier: str, name: str, **labels: str) -> float:
        return summed(after[tier], name, **labels) - summed(before[tier], name, **labels)

    stats = total(done)
    assert stats.buffer_hits > 0 and stats.buffer_misses > 0
    for result, count in (("hit", stats.buffer_hits), ("miss", stats.buffer_misses)):
        assert grown("orchestrator", "outrider_buffer_lookups_total", result=result) == count
    used = grown("target", "outrider_buffer_outcomes_total", result="used")
    unused = grown("target", "outrider_buffer_outcomes_total", result="unused")
    made = grown("draft", "outrider_draft_proposals_total", **{"for": "outcome"})
    assert used >= stats.buffer_hits and unused > 0
    assert used + unused <= made, "what came too late was made too"
    guesses = grown("draft", "outrider_draft_guesses_total")
    assert guesses > stats.proposed > stats.accepted


async def test_top_shows_what_the_requests_say(told: Told) -> None:
    tiers = ["orchestrator", "target", "draft"]
    addresses = [metrics_of(told.services[tier]) for tier in tiers]
    await asyncio.sleep(0.15)
    before = await scrape_all(addresses)
    done = await told.rig.complete_all(
        ["watched", "too"], max_tokens=40, ignore_eos=True, num_speculative_tokens=3
    )
    await asyncio.sleep(0.15)
    found = summary(before, await scrape_all(addresses))
    stats = total(done)
    assert found["speculation"]["mean_acceptance_length"] == stats.mean_acceptance_length
    assert found["speculation"]["acceptance"] == stats.accepted / stats.proposed
    assert found["requests"]["time_to_first_token_s"] > 0
    assert [process["tier"] for process in found["processes"]] == tiers
    assert all(process["busy"] > 0 for process in found["processes"][1:])


async def test_metrics_go_to_a_collector_too(told: Told) -> None:
    await told.rig.complete("sent", max_tokens=4)

    async def sent() -> bool:
        known = told.receiver.metrics
        expected = {m.name for m in METRICS if "draft" in m.services}
        return len(known) == 3 and expected <= known.get("outrider-draft", set())

    await until(sent, "all services have sent metrics", timeout_s=20)
    assert "outrider.rounds" in told.receiver.metrics["outrider-orchestrator"]
