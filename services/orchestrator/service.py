"""The orchestrator service: GenerationService over the registry, the store and the decoder."""

import asyncio
import contextlib
import functools
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import grpc.aio

from outrider.errors import (
    AlreadyRunning,
    FailedPrecondition,
    OutriderError,
    Unavailable,
)
from outrider.remote.metrics import watch_links
from outrider.remote.session import Routing
from outrider.rpc.auth import current_caller
from outrider.rpc.server import Server, run_service
from outrider.rpc.status import abort_with
from outrider.telemetry.catalog import DRAFT, ORCHESTRATOR, TARGET
from outrider.telemetry.service import Telemetry, start_telemetry
from outrider.token_log import TokenLog
from outrider.types import Fence, Priority, new_session_id
from outrider.v1 import generation_pb2, generation_pb2_grpc
from outrider.wire import (
    mode_to_proto,
    priority_from_proto,
    reason_to_proto,
    sampling_to_proto,
)
from services.orchestrator.admission import Admission
from services.orchestrator.board import SCRIPT, Board
from services.orchestrator.callers import Callers
from services.orchestrator.config import OrchestratorConfig
from services.orchestrator.generation import Generation, Surroundings
from services.orchestrator.learned import Learned
from services.orchestrator.metrics import watch_store
from services.orchestrator.models import ModelRegistry, ServedModel
from services.orchestrator.observed import RequestWatch, Watch
from services.orchestrator.placement import block_hashes
from services.orchestrator.requests import (
    Defaults,
    GenerationPlan,
    check_ids,
    plan_generation,
    tokenize_prompt,
)
from services.orchestrator.seating import Seating
from services.orchestrator.seats import Demand, Seat
from services.orchestrator.store import SessionStore
from services.orchestrator.store_values import GenerationRecord, StoredSession

_FREE_S = 3.0
"""Seconds that generations cut off at the end of draining get to free what they hold."""

_PROMPT_THREADS = 4
"""Prompts tokenised at once; further ones wait."""

T = TypeVar("T")
Context = grpc.aio.ServicerContext
if TYPE_CHECKING:
    GenerateContext = Context[generation_pb2.GenerateRequest, generation_pb2.GenerateResponse]


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """The public API. `owner` names this orchestrator in the store."""

    def __init__(
        self,
        config: OrchestratorConfig,
        store: SessionStore,
        registry: ModelRegistry,
        admission: Admission,
        owner: str,
        watch: Watch,
    ) -> None:
        self._config = config
        self._watch = watch
        self._store = store
        self._registry = registry
        self._admission = admission
        self._owner = owner
        self._defaults = Defaults(config.pinned_length, config.proposer)
        self._learned = Learned()
        self._running: set[tuple[str, str]] = set()
        self._draining = False
        self._threads = ThreadPoolExecutor(_PROMPT_THREADS, thread_name_prefix="outrider-prompt")

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: "GenerateContext"
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        with self._watch.request(request, context) as watch:
            try:
                tenant = current_caller().tenant
                check_ids(request)
                if not request.request_id:
                    request.request_id = new_session_id()
                async with contextlib.AsyncExitStack() as stack:
                    stack.enter_context(self._admitted(tenant, request.request_id))
                    generation = await self._start(request, tenant, context, watch, stack)
                    try:
                        # Its decoding must have ended before `end`, or it would open sessions anew.
                        async with contextlib.aclosing(generation.responses()) as responses:
                            async for response in responses:
                                yield response
                    finally:
                        # A cancelled call must free what it holds all the same.
                        await asyncio.shield(generation.end())
            except OutriderError as error:
                watch.failed(error)
                await abort_with(context, error)

    async def GetSession(
        self,
        request: generation_pb2.GetSessionRequest,
        context: "Context[generation_pb2.GetSessionRequest, generation_pb2.GetSessionResponse]",
    ) -> generation_pb2.GetSessionResponse:
        try:
            session = await self._store.get(
                request.session_id,
                tenant=current_caller().tenant,
                include_tokens=request.include_tokens,
            )
        except OutriderError as error:
            await abort_with(context, error)
        return generation_pb2.GetSessionResponse(
            session_id=request.session_id,
            model=session.model,
            length=session.durable_len,
            epoch=session.fence.epoch,
            generations=[_generation_to_proto(record) for record in session.generations],
            token_ids=session.token_ids if request.include_tokens else (),
            ttl_seconds=int(session.ttl_s),
        )

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
            token_ids = await self._on_thread(
                tokenize_prompt, request.prompt, model, continues=False
            )
        except OutriderError as error:
            await abort_with(context, error)
        return generation_pb2.TokenizeResponse(token_ids=token_ids)

    async def drain(self, timeout_s: float) -> None:
        """Return when no generation runs, or the time is over. New ones are refused, and those
        that wait."""
        self._draining = True
        self._admission.close()
        deadline = time.monotonic() + timeout_s
        while self._running and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    @contextlib.contextmanager
    def _admitted(self, tenant: str, request_id: str) -> Iterator[None]:
        key = (tenant, request_id)
        if self._draining:
            raise Unavailable("this orchestrator is shutting down; retry at another")
        if key in self._running:
            raise AlreadyRunning("a request with this id is running", field="request_id")
        self._running.add(key)
        try:
            yield
        finally:
            self._running.discard(key)

    async def _start(
        self,
        request: generation_pb2.GenerateRequest,
        tenant: str,
        context: "GenerateContext",
        watch: RequestWatch,
        stack: contextlib.AsyncExitStack,
    ) -> Generation:
        """Check the request, own its session, wait for a seat, and make its generation. What it
        holds is freed with the stack."""
        arrived = time.monotonic()
        deadline = arrived + self._time_left(context)
        priority = priority_from_proto(request.priority)
        self._admission.check(tenant, priority)
        model = self._registry.model(request.model)
        if request.session_id:
            session = await self._store.take(request.session_id, tenant=tenant, owner=self._owner)
            model = self._model_of(session, request.model)
            fence, log = session.fence, TokenLog(session.token_ids)
            plan = await self._plan(request, model, log)
            seat = await self._seat(plan, model, log, tenant, priority, deadline, stack)
        else:
            log = TokenLog()
            plan = await self._plan(request, model, log)
            seat = await self._seat(plan, model, log, tenant, priority, deadline, stack)
            fence = await self._create(plan.session_id, model, tenant)
        generation = Generation(
            plan,
            model,
            fence,
            log,
            Routing(
                request_id=plan.request_id,
                tenant=tenant,
                model=model.name,
                traceparent=watch.traceparent,
                trace_every=watch.trace_every,
            ),
            Surroundings(
                store=self._store,
                registry=self._registry,
                lease_s=self._config.lease_s,
                store_retry_s=self._config.store_retry_s,
                draft_timeout_s=self._config.draft_timeout_s,
                target_wait_s=self._config.target_wait_s,
                drafting=self._config.drafting,
                fan_out=self._config.fan_out,
                alternatives=self._config.alternatives,
                max_speculative_tokens=self._config.max_speculative_tokens,
                learned=self._learned,
            ),
            watch,
            seat,
            arrived=arrived,
            deadline=deadline,
        )
        watch.begins(generation, plan, model.name)
        return generation

    async def _seat(
        self,
        plan: GenerationPlan,
        model: ServedModel,
        log: TokenLog,
        tenant: str,
        priority: Priority,
        deadline: float,
        stack: contextlib.AsyncExitStack,
    ) -> Seat:
        longest = min(plan.prompt_len + plan.rules.max_tokens, model.context_length)
        demand = Demand(
            model=model,
            session_id=plan.session_id,
            tokens=longest,
            blocks=block_hashes(f"{tenant}/{model.name}", (*log.tokens, *plan.prompt_ids)),
        )
        waiting = self._admission.seat(tenant, priority, demand, deadline)
        return await stack.enter_async_context(waiting)

    async def _create(self, session_id: str, model: ServedModel, tenant: str) -> Fence:
        """A new session; gone again when the call is cancelled before its generation exists."""
        creating = asyncio.create_task(
            self._store.create(
                session_id,
                tenant=tenant,
                model=model.name,
                adapter="",
                tokenizer_fingerprint=model.info.tokenizer_fingerprint,
                owner=self._owner,
            )
        )
        try:
            return await asyncio.shield(creating)
        except asyncio.CancelledError:
            with contextlib.suppress(OutriderError):
                await self._store.delete(await creating)
            raise

    async def _plan(
        self, request: generation_pb2.GenerateRequest, model: ServedModel, log: TokenLog
    ) -> GenerationPlan:
        last_token = log.tokens[-1] if log.tokens else None
        return await self._on_thread(
            plan_generation,
            request,
            model,
            self._defaults,
            log_len=len(log),
            last_token=last_token,
        )

    async def _on_thread(self, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Prompts are tokenised on a thread: a long one, or a template that takes its time, must
        not hold up the streams of others."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, functools.partial(work, *args, **kwargs))

    def _model_of(self, session: StoredSession, asked: str) -> ServedModel:
        if asked and asked != session.model:
            raise FailedPrecondition(
                f"the session belongs to model {session.model!r}, not {asked!r}", field="model"
            )
        model = self._registry.model(session.model)
        if session.tokenizer_fingerprint != model.info.tokenizer_fingerprint:
            raise FailedPrecondition(
                f"the session's tokenizer is {session.tokenizer_fingerprint}, that of "
                f"{model.name} is {model.info.tokenizer_fingerprint} now"
            )
        return model

    def _time_left(self, context: "GenerateContext") -> float:
        remaining = context.time_remaining()
        limit = self._config.max_request_s
        return limit if remaining is None else min(float(remaining), limit)

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


def _generation_to_proto(record: GenerationRecord) -> generation_pb2.Generation:
    message = generation_pb2.Generation(
        request_id=record.request_id,
        start=record.start,
        prompt_end=record.prompt_end,
        seed=record.sampling.seed,
        mode=mode_to_proto(record.mode),
        sampling=sampling_to_proto(record.sampling),
    )
    if record.finish_reason is not None:
        message.finish_reason = reason_to_proto(record.finish_reason)
    return message


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
    return Watch(
        telemetry,
        trace_every=config.trace_every,
        model_names=lambda: [model.name for model in registry.models],
    )


async def _serve(config: OrchestratorConfig, telemetry: Telemetry) -> None:
    name = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
    server = Server(config, [name])
    store = await SessionStore.connect(
        config.store_url,
        session_ttl_s=config.session_ttl_s,
        linger_s=config.session_linger_s,
        lease_s=config.lease_s,
        command_timeout_s=config.store_timeout_s,
        password_file=config.store_password_file or None,
        ca_file=config.store_ca or None,
        cert_file=config.store_cert or None,
        key_file=config.store_key or None,
    )
    owner = f"{os.uname().nodename}-{new_session_id()}"
    registry = ModelRegistry(
        config.sources("targets"), config.sources("drafts"), config.worker_security
    )
    seating = Seating(registry, config.room)
    admission = Admission(config.admission_limits, Callers.parse(config.caller_limits), seating)
    registry.listen(admission.dispatch)
    seating.on_free(admission.dispatch)
    board = Board(store.running(SCRIPT), registry, owner, admission.num_waiting)
    try:
        await registry.connect(
            target_timeout_s=config.start_timeout_s, draft_timeout_s=config.draft_start_timeout_s
        )
        servicer = GenerationServicer(
            config,
            store,
            registry,
            admission,
            owner=owner,
            watch=_watch(config, telemetry, store, registry, admission),
        )
        board.start()
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(  # type: ignore[no-untyped-call]
            servicer, server.grpc
        )
        await server.start()
        shown = {"metrics": telemetry.metrics_address} if telemetry.metrics_address else {}
        await server.serving({"models": [model.name for model in registry.models], **shown})
        await server.until_stopped(lambda: servicer.drain(config.drain_s), hang_up=True)
        await servicer.drain(_FREE_S)
    finally:
        await board.close()
        await registry.close()
        await store.close()


def main() -> None:
    run_service(OrchestratorConfig, serve, name="orchestrator")
