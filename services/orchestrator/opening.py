"""From a call to its generation: begun, begun already by the same request, or resumed.

A request with an idempotency key always gets the same session id. So where its fate is unknown it
may come again, to any orchestrator: the session is there already, and what runs in it is gone on
with, from its first token.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from outrider.errors import (
    AlreadyRunning,
    DeadlineExceeded,
    FailedPrecondition,
    NotFound,
    OutriderError,
)
from outrider.remote.session import Routing
from outrider.token_log import TokenLog
from outrider.types import Fence, Priority
from outrider.v1 import generation_pb2
from services.orchestrator.admission import Admission
from services.orchestrator.generation import Generation, Surroundings
from services.orchestrator.models import ServedModel
from services.orchestrator.observed import RequestWatch
from services.orchestrator.placement import block_hashes
from services.orchestrator.prefix_holders import NOBODY, PrefixHolders
from services.orchestrator.prompt_threads import PromptThreads
from services.orchestrator.records import asks_the_same, plan_of, record_of
from services.orchestrator.requests import (
    Defaults,
    GenerationPlan,
    plan_generation,
    session_id_for,
)
from services.orchestrator.seating import Seating
from services.orchestrator.seats import Demand, Seat
from services.orchestrator.store_values import GenerationRecord, StoredSession
from services.orchestrator.takeover import EndedGeneration, Taken, Told

NOTHING_TOLD = Told()


class Seats:
    """The seat of one call: waited for once, given back when `stack` ends."""

    def __init__(
        self,
        admission: Admission,
        seating: Seating,
        stack: contextlib.AsyncExitStack,
        *,
        tenant: str,
        priority: Priority,
        deadline: float,
        holders: PrefixHolders | None = None,
    ) -> None:
        """`holders`: whom else to ask where a prompt's prefix is."""
        self._admission = admission
        self._seating = seating
        self._holders = holders
        self._stack = stack
        self._tenant = tenant
        self._priority = priority
        self._deadline = deadline
        self._seat: Seat | None = None

    def check(self) -> None:
        """Raises PermissionDenied, or ResourceExhausted where waiting is of no use."""
        self._admission.check(self._tenant, self._priority, self._deadline)

    async def take(
        self, plan: GenerationPlan, model: ServedModel, log: TokenLog, *, been_at: str = ""
    ) -> Seat:
        """A place at a target, that at `been_at` if it can be; `log` is the session's before the
        prompt. Raises ResourceExhausted, Unavailable."""
        if self._seat is None:
            if been_at:
                self._seating.been_at(plan.session_id, been_at)
            held = NOBODY
            if self._holders is not None and self._seating.may_choose(model, plan.session_id):
                held = await self._holders.of(model, self._tenant, log, plan.prompt_ids)
            demand = Demand(
                model=model,
                session_id=plan.session_id,
                tokens=min(plan.prompt_len + plan.rules.max_tokens, model.context_length),
                blocks=block_hashes(
                    f"{self._tenant}/{model.name}", (*log.tokens, *plan.prompt_ids)
                ),
                holders=held,
            )
            waiting = self._admission.seat(self._tenant, self._priority, demand, self._deadline)
            self._seat = await self._stack.enter_async_context(waiting)
        return self._seat


@dataclass(frozen=True, slots=True)
class Call:
    """Who calls, until when (times on the monotonic clock), who watches, and where it sits."""

    tenant: str
    arrived: float
    deadline: float
    watch: RequestWatch
    seats: Seats


class Opener:
    """Makes the generations of one orchestrator, which `owner` names in the store."""

    def __init__(
        self,
        around: Surroundings,
        defaults: Defaults,
        threads: PromptThreads,
        *,
        owner: str,
        max_sessions: int,
    ) -> None:
        self._around = around
        self._store = around.store
        self._registry = around.registry
        self._defaults = defaults
        self._threads = threads
        self._owner = owner
        self._max_sessions = max_sessions

    async def start(
        self, request: generation_pb2.GenerateRequest, call: Call
    ) -> Generation | EndedGeneration:
        """Check the request, own its session, wait for a seat, and make its generation."""
        call.seats.check()
        if request.session_id:
            return await self._continue(request, call)
        model = self._registry.model(request.model)
        session_id = session_id_for(call.tenant, request.idempotency_key)
        log = TokenLog()
        plan = await self._plan(request, session_id, model, log, first=call.seats.check)
        await call.seats.take(plan, model, log)
        try:
            fence = await self._create(plan, model, call.tenant)
        except AlreadyRunning:
            try:
                return await self._again(request, session_id, call)
            except NotFound:
                # Its former owner has noticed just now that its client is gone, and removed it.
                fence = await self._create(plan, model, call.tenant)
        return await self._generation(plan, model, fence, log, call)

    async def resume(
        self, request: generation_pb2.ResumeRequest, call: Call
    ) -> Generation | EndedGeneration:
        """Go on at the client's offset."""
        told = Told(
            request.offset,
            request.text_chars,
            request.tokens_hash if request.HasField("tokens_hash") else None,
        )
        session = await self._store.resume(
            request.session_id,
            tenant=call.tenant,
            owner=self._owner,
            request_id=request.request_id,
            offset=request.offset,
        )
        return await self._go_on(session, told, call)

    async def _continue(
        self, request: generation_pb2.GenerateRequest, call: Call
    ) -> Generation | EndedGeneration:
        if request.model:
            self._registry.model(request.model)  # Is there such a one at all?
        try:
            session = await self._store.take(
                request.session_id,
                tenant=call.tenant,
                owner=self._owner,
                request_id=request.request_id,
            )
        except AlreadyRunning as running:
            try:
                return await self._again(request, request.session_id, call)
            except FailedPrecondition:
                raise running from None
        if _is_of(session.last, request):
            return await self._again(request, request.session_id, call)
        model = self._model_of(session, request.model)
        log = TokenLog(session.token_ids)
        plan = await self._plan(request, request.session_id, model, log)
        return await self._generation(plan, model, session.fence, log, call)

    async def _again(
        self, request: generation_pb2.GenerateRequest, session_id: str, call: Call
    ) -> Generation | EndedGeneration:
        """The request has come before: go on with what it began, if it is the same one."""
        if not request.idempotency_key:
            raise FailedPrecondition("only a request with an idempotency key may come again")
        try:
            session = await self._store.resume(
                session_id,
                tenant=call.tenant,
                owner=self._owner,
                request_id=request.request_id,
                idempotency_key=request.idempotency_key,
            )
        except FailedPrecondition as other:
            return await self._begin_created(request, session_id, call, other)
        record = session.last
        assert record is not None
        if not await self._is_repeated(request, session, record):
            if session.running is not None:
                stays = record.keep or record.start > 0
                await self._store.detach(session.fence, keep=stays)
            raise AlreadyRunning(
                "another request has come with this key; draw a new one", field="idempotency_key"
            )
        return await self._go_on(session, NOTHING_TOLD, call)

    async def _begin_created(
        self,
        request: generation_pb2.GenerateRequest,
        session_id: str,
        call: Call,
        why_not: FailedPrecondition,
    ) -> Generation:
        """Its session was created, and then nothing: the owner died, or is about to begin."""
        if request.session_id:
            raise why_not
        session = await self._store.take(session_id, tenant=call.tenant, owner=self._owner)
        if session.generations:
            raise why_not
        model = self._model_of(session, request.model)
        log = TokenLog()
        plan = await self._plan(request, session_id, model, log)
        return await self._generation(plan, model, session.fence, log, call)

    async def _go_on(
        self, session: StoredSession, told: Told, call: Call
    ) -> Generation | EndedGeneration:
        record = session.last
        assert record is not None
        try:
            model = self._model_of(session, "")
            plan = plan_of(record, session.fence.session_id, model)
            taken = Taken.of(session, record, told)
            if record.outcome is not None and session.running is None:
                return EndedGeneration(plan, record.outcome, taken, model.tokenizer)
            if session.time_left_s <= 0:
                raise DeadlineExceeded("the time of the request that is resumed is over")
            log = TokenLog(session.token_ids)
            await call.seats.take(plan, model, log, been_at=taken.totals.target)
        except OutriderError:
            # Nobody here can go on with it; perhaps somebody elsewhere can.
            if session.running is not None:
                with contextlib.suppress(OutriderError):
                    stays = record.keep or record.start > 0
                    await self._store.detach(session.fence, keep=stays)
            raise
        deadline = min(call.deadline, time.monotonic() + session.time_left_s)
        call = replace(call, arrived=call.arrived - session.elapsed_s, deadline=deadline)
        self._store.tally.takeovers += 1
        return await self._generation(plan, model, session.fence, log, call, taken)

    async def _is_repeated(
        self,
        request: generation_pb2.GenerateRequest,
        session: StoredSession,
        record: GenerationRecord,
    ) -> bool:
        model = self._model_of(session, request.model)
        log = TokenLog(session.token_ids[: record.start])
        plan = await self._plan(request, session.fence.session_id, model, log)
        asked = record_of(plan, model, epoch=record.epoch)
        prompt_ids = session.token_ids[record.start : record.prompt_end]
        seed_given = request.sampling.HasField("seed")
        return plan.prompt_ids == prompt_ids and asks_the_same(asked, record, seed_given=seed_given)

    async def _generation(
        self,
        plan: GenerationPlan,
        model: ServedModel,
        fence: Fence,
        log: TokenLog,
        call: Call,
        taken: Taken | None = None,
    ) -> Generation:
        seat = await call.seats.take(plan, model, log)
        generation = Generation(
            plan,
            model,
            fence,
            log,
            Routing(
                request_id=plan.request_id,
                tenant=call.tenant,
                model=model.name,
                traceparent=call.watch.traceparent,
                trace_every=call.watch.trace_every,
            ),
            self._around,
            call.watch,
            seat,
            arrived=call.arrived,
            deadline=call.deadline,
            taken=taken,
        )
        call.watch.begins(generation, plan, model.name)
        return generation

    async def _create(self, plan: GenerationPlan, model: ServedModel, tenant: str) -> Fence:
        """A new session, counted; gone again when the call is cancelled before its generation
        exists."""
        index = self._store.index
        creating = asyncio.create_task(self._create_counted(plan, model, tenant))
        try:
            return await asyncio.shield(creating)
        except asyncio.CancelledError:
            with contextlib.suppress(OutriderError):
                await self._store.delete(await creating)
                await index.remove(tenant, plan.session_id)
            raise

    async def _create_counted(self, plan: GenerationPlan, model: ServedModel, tenant: str) -> Fence:
        index = self._store.index
        lives_s = self._store.life_s(kept=plan.stays)
        is_new = await index.reserve(
            tenant, plan.session_id, ttl_s=lives_s, limit=self._max_sessions
        )
        try:
            return await self._store.create(
                plan.session_id,
                tenant=tenant,
                model=model.name,
                adapter="",
                tokenizer_fingerprint=model.info.tokenizer_fingerprint,
                owner=self._owner,
            )
        except OutriderError:
            if is_new:
                with contextlib.suppress(OutriderError):
                    await index.remove(tenant, plan.session_id)
            raise

    async def _plan(
        self,
        request: generation_pb2.GenerateRequest,
        session_id: str,
        model: ServedModel,
        log: TokenLog,
        first: Callable[[], None] = lambda: None,
    ) -> GenerationPlan:
        return await self._threads.run(
            plan_generation,
            request,
            model,
            self._defaults,
            first=first,
            session_id=session_id,
            log_len=len(log),
            last_token=log.tokens[-1] if log.tokens else None,
        )

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


def _is_of(record: GenerationRecord | None, request: generation_pb2.GenerateRequest) -> bool:
    """Whether a session's last generation was begun by this request, with its key."""
    key = request.idempotency_key
    same_key = record is not None and bool(key) and record.idempotency_key == key
    return same_key and record is not None and record.request_id == request.request_id
