"""One generation from its request, or from where another has left it, to its last response.

Three things run side by side. `_decode` goes through the rounds and never waits for the store;
`responses` has what came out committed and yields it then; `_keep_lease` renews the lease.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from outrider.errors import Fenced, InternalError, OutriderError
from outrider.remote.link import WorkerLink
from outrider.remote.protocol import devices_of
from outrider.remote.session import RemoteSession, Routing
from outrider.speculation.controller import AdaptiveController, Limits
from outrider.speculation.forecast import Forecast
from outrider.speculation.length import Mode
from outrider.speculation.load import Kind, ProposerPool
from outrider.token_log import TokenLog
from outrider.types import Fence, FinishReason, GenerationSpec, SpeculationStats
from outrider.v1 import generation_pb2, worker_pb2
from services.orchestrator.closing import close_everywhere
from services.orchestrator.config import DIRECT
from services.orchestrator.controller import Controller, FixedLength
from services.orchestrator.decoder import (
    Decoder,
    DirectDraft,
    Piece,
    RoundTimes,
)
from services.orchestrator.drafting import Drafting, SessionDraft, Whereabouts
from services.orchestrator.durable import DurableGeneration
from services.orchestrator.learned import Learned
from services.orchestrator.metrics import Progress
from services.orchestrator.models import ModelRegistry, ServedModel
from services.orchestrator.notes import NoteFormat
from services.orchestrator.observed import RequestWatch
from services.orchestrator.pieces import Pieces
from services.orchestrator.proposers import (
    DRAFT,
    NGRAM,
    DraftModel,
    NgramLookup,
    Proposer,
    draft_session,
)
from services.orchestrator.records import record_of
from services.orchestrator.requests import GenerationPlan
from services.orchestrator.responses import in_parts, response_of, usage_of
from services.orchestrator.seats import Seat
from services.orchestrator.stopping import OutputStream, Released
from services.orchestrator.store import SessionStore
from services.orchestrator.takeover import Taken
from services.orchestrator.totals import Totals

logger = logging.getLogger(__name__)

_MAX_PIECES_AHEAD = 64
"""Rounds that decoding may be ahead of a client that reads slowly."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a generation needs of its orchestrator."""

    store: SessionStore
    registry: ModelRegistry
    lease_s: float
    store_retry_s: float
    store_wait_s: float
    draft_timeout_s: float
    target_wait_s: float
    drafting: str
    fan_out: int
    alternatives: int
    max_speculative_tokens: int
    learned: Learned


class Generation:
    """Iterate `responses` once, then call `end`, whatever happened."""

    def __init__(
        self,
        plan: GenerationPlan,
        model: ServedModel,
        fence: Fence,
        log: TokenLog,
        routing: Routing,
        surroundings: Surroundings,
        watch: RequestWatch,
        seat: Seat,
        *,
        arrived: float,
        deadline: float,
        taken: Taken | None = None,
    ) -> None:
        """`log` is the session's before the prompt, which is appended; with `taken` it has all."""
        self.plan = plan
        self.finish_reason: FinishReason | None = None
        """Why it ended; None while it runs, and where it was cut off."""
        self._watch = watch
        self._model = model
        self._fence = fence
        self._log = log
        self._routing = routing
        self._around = surroundings
        self._seat = seat
        self._arrived = arrived
        self._deadline = deadline
        self._taken = taken
        log.append(plan.prompt_ids)
        self._notes = NoteFormat(plan.logprobs)
        self._durable = DurableGeneration(
            plan,
            surroundings.store,
            fence,
            tenant=routing.tenant,
            deadline=deadline,
            lease_s=surroundings.lease_s,
            retry_s=surroundings.store_retry_s,
            wait_s=surroundings.store_wait_s,
            on_commit=watch.on_commit,
        )
        self._remotes: list[RemoteSession] = []
        self._numbers = itertools.count(1)
        self._output = OutputStream(model.tokenizer, plan.rules, prompt_len=plan.prompt_len)
        self._fan_out = 0
        self._pools: list[ProposerPool] = []
        self._draft = self._make_draft()
        self._proposers = self._make_proposers()
        self._controller = self._make_controller()
        self._decoder = Decoder(
            log=log,
            output=self._output,
            controller=self._controller,
            proposers=self._proposers,
            find_target=self._find_target,
            wait_for_target=self._wait_for_target,
            deadline=deadline,
            context_length=model.context_length,
            with_logprobs=plan.logprobs is not None,
            report_rounds=plan.report_rounds,
            direct=self._draft.direct() if self._draft is not None else None,
            whereabouts=Whereabouts(seat, self._draft),
        )
        self._pieces = Pieces()
        self._superseded: OutriderError | None = None
        self._ended_by: OutriderError | None = None
        self._offset = taken.told.offset if taken else 0
        self._stats = SpeculationStats()
        self._times = RoundTimes()
        self._first_token_us = taken.totals.first_token_us if taken else 0
        self._sent_undurable = taken.totals.sent_undurable if taken else 0

    @property
    def epoch(self) -> int:
        """In which it owns its session."""
        return self._fence.epoch

    @property
    def progress(self) -> Progress:
        """What has been counted here so far; what a former owner did is counted there."""
        released, taken = self._output.num_released, self._taken
        reused = self._decoder.target.reused if self._decoder.target else 0
        if taken:
            told = len(taken.token_ids)
            return Progress(self._stats, self._times, max(released - told, 0), 0, 0)
        return Progress(self._stats, self._times, released, self.plan.prompt_len, reused)

    async def responses(self) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """What the client gets, each response once its tokens are in the store."""
        tasks: list[asyncio.Task[None]] = []
        try:
            again = self._restore(self._taken) if self._taken else Released()
            if again.finish_reason is None:
                tasks.append(asyncio.create_task(self._decode(), name="decode"))
            tasks.append(asyncio.create_task(self._keep_lease(), name="keep-lease"))
            if self._taken is None:
                await self._begin()
            if again != Released():
                for part in in_parts(again):
                    yield await self._response(_nothing_but(part), durable=True)
            while self.finish_reason is None:
                piece = await self._pieces.take()
                yield await self._response(piece, durable=await self._commit(piece))
        except OutriderError as error:
            self._ended_by = await self._explained(error)
            raise self._ended_by from error
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    def supersede(self, error: OutriderError) -> None:
        """End the stream by this error: somebody else goes on with the generation."""
        self._superseded = error
        self._pieces.break_off(error)

    async def end(self) -> None:
        """Free everything: on the workers, and in the store what is not to be kept."""
        self._controller.close()
        for proposer in self._proposers.values():
            proposer.close()
        ended_well = self.finish_reason is not None
        for remote in self._remotes:
            remote.settle()
            if not ended_well:
                remote.cancel()
            if not ended_well or not self.plan.keep:
                is_draft = remote.link.tier == "draft"
                remote.close(opened_by_others=is_draft and self._around.drafting == DIRECT)
        if self._taken and not (ended_well and self.plan.keep):
            # Its former owners may have had it elsewhere.
            used = [remote.link for remote in self._remotes]
            close_everywhere(self._around.registry, self._fence, self._routing.tenant, but=used)
        await self._durable.let_go(self._ended_by)
        self._seat.leave(keep=self.plan.keep and not isinstance(self._ended_by, Fenced))
        self._log_end()

    async def _decode(self) -> None:
        try:
            async for piece in self._decoder.pieces():
                self._pieces.put(piece)
                # Rounds that the target makes by itself are best looked at several at a time, when
                # those before are on their way.
                await self._pieces.room(1 if self._decoder.follows else _MAX_PIECES_AHEAD)
        except OutriderError as error:
            self._pieces.end(error)
        except Exception as error:
            logger.exception("decoding failed")
            self._pieces.end(InternalError(f"decoding failed: {type(error).__name__}"))

    async def _begin(self) -> None:
        record = record_of(self.plan, self._model, epoch=self._fence.epoch)
        await self._durable.begin(record, self._log, self._notes.width)

    def _restore(self, taken: Taken) -> Released:
        """Take up what a former owner has left; what the client lacks of it."""
        self._durable.take_up(len(self._log), self._log.prefix_hash(len(self._log)))
        text = self._output.restore(
            taken.token_ids, taken.sources, told_chars=taken.told.text_chars
        )
        return taken.untold(text)

    async def _keep_lease(self) -> None:
        self.supersede(await self._durable.keep_lease(at_once=self._taken is not None))

    async def _explained(self, error: OutriderError) -> OutriderError:
        if error is not self._superseded:
            error = await self._durable.explained(error)
        if isinstance(error, Fenced):
            return Fenced(f"the session was taken over, this stream ends here: {error.message}")
        return error

    async def _commit(self, piece: Piece) -> bool:
        """Have a piece stored, and the totals with it; whether it is."""
        released = piece.released
        self._stats += piece.stats
        self._times += piece.times
        self._watch.rounds(piece.rounds)
        notes = self._notes.pack(released.sources, released.logprobs)
        durable = await self._durable.commit(released.token_ids, notes, self._totals())
        if not durable:
            self._sent_undurable += len(released.token_ids)
        if not self._first_token_us:
            self._first_token_us = self._elapsed_us()
            self._watch.first_token()
        return durable

    async def _response(self, piece: Piece, *, durable: bool) -> generation_pb2.GenerateResponse:
        """The response that tells of a piece; with the last one the generation has finished."""
        released = piece.released
        if released.finish_reason is not None:
            totals = self._totals()
            durable = await self._durable.finish(released, totals, durable=durable)
            self.finish_reason = released.finish_reason
        response = response_of(self.plan, piece, offset=self._offset, durable=durable)
        self._offset += len(released.token_ids)
        if released.finish_reason is not None:
            usage = usage_of(
                self.plan,
                totals,
                completion_tokens=self._output.num_released,
                takeovers=self._taken.takeovers if self._taken else 0,
            )
            response.usage.CopyFrom(usage)
        return response

    def _make_proposers(self) -> dict[str, Proposer]:
        """Those that the request may use, the first one preferred."""
        plan, found = self.plan, dict[str, Proposer]()
        if plan.num_speculative_tokens == 0:
            return found
        if self._draft is not None:
            found[DRAFT] = self._draft
        if plan.proposer != DRAFT:
            found[NGRAM] = NgramLookup(self._log)
            self._pools.append(self._around.learned.pool(self._model.name, NGRAM))
        return found

    def _make_draft(self) -> SessionDraft | None:
        plan, around = self.plan, self._around
        if plan.num_speculative_tokens == 0 or plan.proposer == NGRAM:
            return None
        worker = self._seat.take_draft()
        info = worker.link.info if worker is not None else None
        if worker is None or info is None:
            return None
        self._pools.append(around.learned.pool(self._model.name, DRAFT, info.model_fingerprint))
        self._fan_out = self._outcomes_ahead(info)
        return SessionDraft(self._seat, worker, lambda draft: self._ready(draft.link))

    def _ready(self, link: WorkerLink) -> Drafting:
        """A draft for this session, as long as it lasts."""
        plan, around = self.plan, self._around
        info = link.info or worker_pb2.InfoResponse()
        log = TokenLog()  # What is asked ahead is asked of a base that the session's log outgrows.
        remote = self._remote(link, plan.spec.for_draft(info.vocab_size), log)
        alternatives = num_alternatives(plan, around.alternatives, self._model.info, info)
        model = DraftModel(
            self._log,
            draft_session(log, link, remote, asyncio.get_running_loop()),
            plan.spec,
            Forecast(around.learned.outcomes(link.address)),
            vocab_size=self._model.vocab_size,
            timeout_s=around.draft_timeout_s,
            num_alternatives=alternatives,
            use=around.learned.buffer_use(self._model.name),
        )
        direct = DirectDraft(link.address, around.draft_timeout_s, alternatives)
        return Drafting(model, direct if around.drafting == DIRECT else None)

    def _make_controller(self) -> Controller:
        plan, around = self.plan, self._around
        if plan.num_speculative_tokens is not None or not self._proposers:
            length = plan.num_speculative_tokens if self._proposers else 0
            return FixedLength(length or 0, next(iter(self._proposers), ""), self._fan_out)
        cap = plan.max_speculative_tokens
        target = self._seat.target
        controller = AdaptiveController(
            around.learned.load(target.address if target is not None else ""),
            self._pools,
            mode=Mode.PIPELINED if self._fan_out else Mode.SEQUENTIAL,
            limits=Limits(cap=around.max_speculative_tokens if cap is None else cap),
            kind=Kind.of(plan.sampling.temperature, plan.prompt_len),
        )
        if self._taken:
            controller.recall(self._taken.totals.stats)
        return controller

    def _outcomes_ahead(self, draft: worker_pb2.InfoResponse) -> int:
        """Outcomes to prepare for: none where drafting takes the target's device from it."""
        if "ahead" not in draft.capabilities:
            return 0
        if self.plan.fan_out is not None:
            return self.plan.fan_out
        target = self._model.info
        if draft.device_id == target.device_id or devices_of(draft) & devices_of(target):
            return 0
        return self._around.fan_out

    def _find_target(self) -> RemoteSession:
        worker = self._seat.find_target()
        self._controller.moves_to(self._around.learned.load(worker.address))
        return self._remote(worker.link, self.plan.spec, self._log)

    async def _wait_for_target(self) -> None:
        loop = asyncio.get_running_loop()
        wait_s = min(self._around.target_wait_s, self._deadline - time.monotonic())
        await self._around.registry.wait_for_target(self._model, loop.time() + wait_s)

    def _remote(self, link: WorkerLink, spec: GenerationSpec, log: TokenLog) -> RemoteSession:
        remote = RemoteSession(link, self._fence, spec, self._routing, log, self._numbers)
        self._remotes.append(remote)
        return remote

    def _totals(self) -> Totals:
        """Those of all owners, up to now."""
        stats, times, target = self._stats, self._times, self._decoder.target
        drafts = [remote.link.address for remote in self._remotes if remote.link.tier == "draft"]
        cached = target.reused if target else 0
        if self._taken:
            before = self._taken.totals
            stats, times, cached = before.stats + stats, before.times + times, before.cached
        return Totals(
            stats=stats,
            times=times,
            first_token_us=self._first_token_us or self._elapsed_us(),
            total_us=self._elapsed_us(),
            cached=cached,
            sent_undurable=self._sent_undurable,
            target=target.link.address if target else "",
            draft=drafts[-1] if drafts else "",
        )

    def _elapsed_us(self) -> int:
        return int((time.monotonic() - self._arrived) * 1e6)

    def _log_end(self) -> None:
        stats, reason = self._totals().stats, self.finish_reason
        logger.info(
            "generation ended",
            extra={
                "request_id": self.plan.request_id,
                "session_id": self.plan.session_id,
                "tenant": self._routing.tenant,
                "traceparent": self._routing.traceparent,
                "prompt_tokens": self.plan.prompt_len,
                "completion_tokens": self._output.num_released,
                "finish_reason": reason.value if reason else "cut off",
                "takeovers": self._taken.takeovers if self._taken else 0,
                "sent_undurable": self._sent_undurable,
                "rounds": stats.rounds,
                "proposed": stats.proposed,
                "accepted": stats.accepted,
                "fallback_rounds": stats.fallback_rounds,
                "seconds": round(time.monotonic() - self._arrived, 3),
            },
        )


def num_alternatives(
    plan: GenerationPlan,
    default: int,
    target: worker_pb2.InfoResponse,
    draft: worker_pb2.InfoResponse,
) -> int:
    """Next-best guesses to verify beside each guess, none where only chains can be: what the
    request says, else the server's default. That may be -1: whether rows cost the target little."""
    offered = "tree" in target.capabilities and "alternatives" in draft.capabilities
    if not offered or plan.spec.uses_distributions:
        return 0
    if plan.alternatives is not None:
        return plan.alternatives
    return default if default >= 0 else int(target.device.startswith("cuda"))


def _nothing_but(released: Released) -> Piece:
    """A piece that no round has brought."""
    return Piece(released, SpeculationStats(), RoundTimes())
