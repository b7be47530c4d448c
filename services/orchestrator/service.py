"""The orchestrator service: GenerationService over the registry, the store and the decoder."""

import asyncio
import contextlib
import functools
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc.aio

from outrider.errors import InvalidArgument, OutriderError
from outrider.kv_store.index import IndexReader
from outrider.remote.metrics import watch_buffers, watch_links
from outrider.rpc.auth import current_caller
from outrider.rpc.server import Server, run_service
from outrider.rpc.status import abort_with
from outrider.telemetry.catalog import DRAFT, ORCHESTRATOR, TARGET
from outrider.telemetry.service import Telemetry, start_telemetry
from outrider.types import Durability, Priority, new_session_id
from outrider.v1 import (
    diagnosis_pb2,
    diagnosis_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
)
from outrider.wire import priority_from_proto
from services.orchestrator.admission import Admission
from services.orchestrator.board import SCRIPT, Board
from services.orchestrator.callers import Callers
from services.orchestrator.config import OrchestratorConfig
from services.orchestrator.diagnosis import DiagnosisServicer
from services.orchestrator.generation import Generation, Surroundings
from services.orchestrator.learned import Learned
from services.orchestrator.lifecycle import Lifecycle
from services.orchestrator.metrics import watch_placement, watch_store
from services.orchestrator.models import ModelRegistry, ServedModel
from services.orchestrator.observed import RequestWatch, Watch
from services.orchestrator.opening import Call, Opener, Seats
from services.orchestrator.prefix_holders import PrefixHolders
from services.orchestrator.prompt_threads import PromptThreads
from services.orchestrator.requests import Defaults, check_ids, tokenize_prompt
from services.orchestrator.running import Place, Running
from services.orchestrator.seating import Seating
from services.orchestrator.store import SessionStore
from services.orchestrator.store_start import await_store
from services.orchestrator.takeover import EndedGeneration

_INDEX_S = 1.0
"""After which the index of prefixes is taken to be away; requests wait far less for it."""
_FREE_S = 3.0
"""Seconds that generations cut off at the end of draining get to free what they hold."""

Context = grpc.aio.ServicerContext
if TYPE_CHECKING:
    StreamContext = Context[Any, generation_pb2.GenerateResponse]
    Responses = AsyncIterator[generation_pb2.GenerateResponse]


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """The public API. `owner` names this orchestrator in the store."""

    def __init__(
        self,
        config: OrchestratorConfig,
        store: SessionStore,
        registry: ModelRegistry,
        admission: Admission,
        seating: Seating,
        owner: str,
        watch: Watch,
        learned: Learned,
        holders: PrefixHolders | None = None,
    ) -> None:
        self._config = config
        self._watch = watch
        self._registry = registry
        self._admission = admission
        self._seating = seating
        self._threads = PromptThreads()
        self._holders = holders
        self._running = Running(config.max_concurrent_calls)
        self._lifecycle = Lifecycle(store, registry, owner, config.kv_store)
        self._opener = Opener(
            _surroundings(config, store, registry, learned),
            Defaults(config.pinned_length, config.proposer, Durability(config.durability)),
            self._threads,
            owner=owner,
            max_sessions=config.max_sessions_per_caller,
        )

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: "StreamContext"
    ) -> "Responses":
        with self._watch.request(request, context) as watch:
            try:
                check_ids(request)
                if not request.request_id:
                    request.request_id = new_session_id()
                async with contextlib.AsyncExitStack() as stack:
                    call = self._call(context, watch, priority_from_proto(request.priority), stack)
                    place = stack.enter_context(
                        self._running.admitted(
                            call.tenant, request.request_id, idempotency_key=request.idempotency_key
                        )
                    )
                    generation = await self._opener.start(request, call)
                    async with contextlib.aclosing(_stream(generation, place)) as responses:
                        async for response in responses:
                            yield response
            except OutriderError as error:
                watch.failed(error)
                await abort_with(context, error)

    async def Resume(
        self, request: generation_pb2.ResumeRequest, context: "StreamContext"
    ) -> "Responses":
        resumed = generation_pb2.GenerateRequest(
            session_id=request.session_id, request_id=request.request_id
        )
        with self._watch.request(resumed, context) as watch:
            try:
                if not request.request_id:
                    raise InvalidArgument("is empty", field="request_id")
                async with contextlib.AsyncExitStack() as stack:
                    # It has waited for its turn before.
                    call = self._call(context, watch, Priority.HIGH, stack)
                    place = stack.enter_context(
                        self._running.admitted(call.tenant, request.request_id, resumes=True)
                    )
                    generation = await self._opener.resume(request, call)
                    async with contextlib.aclosing(_stream(generation, place)) as responses:
                        async for response in responses:
                            yield response
            except OutriderError as error:
                watch.failed(error)
                await abort_with(context, error)

    async def Cancel(
        self,
        request: generation_pb2.CancelRequest,
        context: "Context[generation_pb2.CancelRequest, generation_pb2.CancelResponse]",
    ) -> generation_pb2.CancelResponse:
        try:
            await self._lifecycle.cancel(request, current_caller().tenant)
        except OutriderError as error:
            await abort_with(context, error)
        return generation_pb2.CancelResponse()

    async def GetSession(
        self,
        request: generation_pb2.GetSessionRequest,
        context: "Context[generation_pb2.GetSessionRequest, generation_pb2.GetSessionResponse]",
    ) -> generation_pb2.GetSessionResponse:
        try:
            return await self._lifecycle.show(request, current_caller().tenant)
        except OutriderError as error:
            await abort_with(context, error)

    async def ListSessions(
        self,
        request: generation_pb2.ListSessionsRequest,
        context: "Context[generation_pb2.ListSessionsRequest, generation_pb2.ListSessionsResponse]",
    ) -> generation_pb2.ListSessionsResponse:
        try:
            return await self._lifecycle.list_page(request, current_caller().tenant)
        except OutriderError as error:
            await abort_with(context, error)

    async def DeleteSession(
        self,
        request: generation_pb2.DeleteSessionRequest,
        context: "Context[Any, generation_pb2.DeleteSessionResponse]",
    ) -> generation_pb2.DeleteSessionResponse:
        try:
            await self._lifecycle.delete(request.session_id, current_caller().tenant)
        except OutriderError as error:
            await abort_with(context, error)
        return generation_pb2.DeleteSessionResponse()

    async def PurgeSessions(
        self,
        request: generation_pb2.PurgeSessionsRequest,
        context: "Context[Any, generation_pb2.PurgeSessionsResponse]",
    ) -> generation_pb2.PurgeSessionsResponse:
        try:
            return await self._lifecycle.purge(current_caller().tenant)
        except OutriderError as error:
            await abort_with(context, error)

    async def ListModels(
        self,
        request: generation_pb2.ListModelsRequest,
        context: "Context[generation_pb2.ListModelsRequest, generation_pb2.ListModelsResponse]",
    ) -> generation_pb2.ListModelsResponse:
        return generation_pb2.ListModelsResponse(
            models=[self._model_to_proto(model) for model in self._registry.models]
        )

    async def Tokenize(
        self,
        request: generation_pb2.TokenizeRequest,
        context: "Context[generation_pb2.TokenizeRequest, generation_pb2.TokenizeResponse]",
    ) -> generation_pb2.TokenizeResponse:
        try:
            model = self._registry.model(request.model)
            token_ids = await self._threads.run(
                tokenize_prompt, request.prompt, model, continues=False
            )
        except OutriderError as error:
            await abort_with(context, error)
        return generation_pb2.TokenizeResponse(token_ids=token_ids)

    async def drain(self, timeout_s: float) -> None:
        """Return when no generation runs, or the time is over. New ones are refused, and those
        that wait."""
        self._admission.close()
        await self._running.drain(timeout_s)

    def _call(
        self,
        context: "StreamContext",
        watch: RequestWatch,
        priority: Priority,
        stack: contextlib.AsyncExitStack,
    ) -> Call:
        """Who calls; its seat is given back with the stack."""
        arrived, tenant = time.monotonic(), current_caller().tenant
        remaining, limit = context.time_remaining(), self._config.max_request_s
        deadline = arrived + (limit if remaining is None else min(float(remaining), limit))
        seats = Seats(
            self._admission,
            self._seating,
            stack,
            tenant=tenant,
            priority=priority,
            deadline=deadline,
            holders=self._holders,
        )
        return Call(tenant, arrived, deadline, watch, seats)

    def _model_to_proto(self, model: ServedModel) -> generation_pb2.Model:
        return generation_pb2.Model(
            name=model.name,
            model_fingerprint=model.info.model_fingerprint,
            tokenizer_fingerprint=model.info.tokenizer_fingerprint,
            vocab_size=model.vocab_size,
            context_length=model.context_length,
            dtype=model.info.dtype,
            device=model.info.device,
            proposers=self._registry.proposers(model),
            default_num_speculative_tokens=self._config.pinned_length or 0,
            max_speculative_tokens=self._config.max_speculative_tokens,
            adaptive=self._config.pinned_length is None,
            eos_token_ids=model.info.eos_token_ids,
        )


async def _stream(
    generation: Generation | EndedGeneration, place: Place
) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
    """What a generation has to tell; it has ended then, however this ends."""
    try:
        if isinstance(generation, Generation):
            place.fill(generation)
        # Its decoding must have ended before `end`, or it would open sessions anew.
        async with contextlib.aclosing(generation.responses()) as responses:
            async for response in responses:
                yield response
    finally:
        # A cancelled call must free what it holds all the same.
        await asyncio.shield(generation.end())


def _surroundings(
    config: OrchestratorConfig, store: SessionStore, registry: ModelRegistry, learned: Learned
) -> Surroundings:
    return Surroundings(
        store=store,
        registry=registry,
        lease_s=config.lease_s,
        store_retry_s=config.store_retry_s,
        store_wait_s=config.store_wait_s,
        draft_timeout_s=config.draft_timeout_s,
        target_wait_s=config.target_wait_s,
        drafting=config.drafting,
        fan_out=config.fan_out,
        alternatives=config.alternatives,
        max_speculative_tokens=config.max_speculative_tokens,
        learned=learned,
    )


async def serve(config: OrchestratorConfig) -> None:
    """Connect to store and workers, serve until stopped."""
    telemetry = start_telemetry(config.telemetry, tier=ORCHESTRATOR, env=os.environ)
    try:
        await _serve(config, telemetry)
    finally:
        telemetry.close()


def _watch(
    config: OrchestratorConfig,
    telemetry: Telemetry,
    store: SessionStore,
    registry: ModelRegistry,
    admission: Admission,
    learned: Learned,
    seating: Seating,
    holders: PrefixHolders | None,
) -> Watch:
    """Tell of requests, the store and the workers."""
    if telemetry.metrics is not None:
        telemetry.metrics.observe(
            "outrider.requests.waiting",
            lambda: [(admission.num_waiting(m.name), {"model": m.name}) for m in registry.models],
        )
        watch_store(telemetry.metrics, store.tally)
        watch_links(
            telemetry.metrics,
            {tier: functools.partial(registry.links, tier) for tier in (TARGET, DRAFT)},
        )
        watch_buffers(telemetry.metrics, learned.buffer_uses)
        watch_placement(
            telemetry.metrics,
            admission.counters,
            seating.counters,
            holders.counters if holders is not None else {},
            {TARGET: registry.targets.counters, DRAFT: registry.drafts.counters},
        )
    return Watch(
        telemetry,
        trace_every=config.trace_every,
        model_names=lambda: [model.name for model in registry.models],
    )


def _holders(config: OrchestratorConfig) -> PrefixHolders | None:
    """Raises InvalidArgument."""
    address = config.kv_store
    if address is None:
        return None
    index = IndexReader.connect(address, ttl_s=config.kv_store_ttl_s, timeout_s=_INDEX_S)
    return PrefixHolders(index, PromptThreads(), wait_s=config.kv_index_wait_s)


async def _serve(config: OrchestratorConfig, telemetry: Telemetry) -> None:
    server = Server(
        config,
        [
            generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name,
            diagnosis_pb2.DESCRIPTOR.services_by_name["DiagnosisService"].full_name,
        ],
    )
    holders = _holders(config)
    store = await await_store(config)
    owner = f"{os.uname().nodename}-{new_session_id()}"
    registry = ModelRegistry(
        config.sources("targets"), config.sources("drafts"), config.worker_security
    )
    seating = Seating(registry, config.room)
    admission = Admission(config.admission_limits, Callers.parse(config.caller_limits), seating)
    registry.listen(admission.dispatch)
    seating.on_free(admission.dispatch)
    learned = Learned()
    board = Board(store.sibling(SCRIPT), registry, owner, admission.num_waiting)
    try:
        await registry.connect(
            target_timeout_s=config.start_timeout_s, draft_timeout_s=config.draft_start_timeout_s
        )
        servicer = GenerationServicer(
            config,
            store,
            registry,
            admission,
            seating,
            owner=owner,
            watch=_watch(config, telemetry, store, registry, admission, learned, seating, holders),
            learned=learned,
            holders=holders,
        )
        board.start()
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(  # type: ignore[no-untyped-call]
            servicer, server.grpc
        )
        diagnosis = DiagnosisServicer(config, store, registry, admission, owner)
        diagnosis_pb2_grpc.add_DiagnosisServiceServicer_to_server(  # type: ignore[no-untyped-call]
            diagnosis, server.grpc
        )
        await server.start()
        diagnosis.listens = server.address
        shown = {"metrics": telemetry.metrics_address} if telemetry.metrics_address else {}
        await server.serving({"models": [model.name for model in registry.models], **shown})
        await server.until_stopped(lambda: servicer.drain(config.drain_s), hang_up=True)
        await servicer.drain(_FREE_S)
    finally:
        await board.close()
        await registry.close()
        await store.close()
        if holders is not None:
            await holders.close()


def main() -> None:
    run_service(OrchestratorConfig, serve, name="orchestrator")
