"""One generation from its request to its last response: decoding, committing, sending.

Two things run side by side. `_decode` goes through the rounds and never waits for the store;
`responses` commits what came out and yields it once it is durable.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import outrider
from outrider.errors import InternalError, OutriderError, Unavailable
from outrider.remote.link import WorkerLink
from outrider.remote.session import RemoteSession, Routing
from outrider.speculation.controller import AdaptiveController, Limits
from outrider.speculation.length import Mode
from outrider.speculation.load import ProposerPool
from outrider.token_log import TokenLog
from outrider.types import Fence, FinishReason, GenerationSpec, SpeculationStats
from outrider.v1 import generation_pb2, worker_pb2
from outrider.wire import (
    logprobs_to_proto,
    reason_to_proto,
    sources_to_proto,
    stats_to_proto,
)
from services.orchestrator.config import DIRECT
from services.orchestrator.controller import Controller, FixedLength
from services.orchestrator.decoder import (
    Decoder,
    DirectDraft,
    Piece,
    RoundRecord,
    RoundTimes,
)
from services.orchestrator.learned import Learned
from services.orchestrator.models import ModelRegistry, ServedModel
from services.orchestrator.proposers import (
    DRAFT,
    NGRAM,
    DraftModel,
    NgramLookup,
    Proposer,
)
from services.orchestrator.requests import GenerationPlan
from services.orchestrator.stopping import OutputStream
from services.orchestrator.store import SessionStore
from services.orchestrator.store_commit import CommitQueue
from services.orchestrator.store_values import GenerationRecord

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
        *,
        arrived: float,
        deadline: float,
    ) -> None:
        self._plan = plan
        self._model = model
        self._fence = fence
        self._log = log
        self._routing = routing
        self._around = surroundings
        self._arrived = arrived
        self._deadline = deadline
        self._start_len = len(log)
        self._start_hash = log.prefix_hash(len(log))
        log.append(plan.prompt_ids)
        self._remotes: list[RemoteSession] = []
        self._numbers = itertools.count(1)
        self._output = OutputStream(model.tokenizer, plan.rules, prompt_len=plan.prompt_len)
        self._direct: DirectDraft | None = None
        self._fan_out = 0
        self._pools: list[ProposerPool] = []
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
            direct=self._direct,
        )
        self._commits: CommitQueue | None = None
        self._finished: FinishReason | None = None
        self._failure: OutriderError | None = None
        self._first_token_us = 0
        self._stats = SpeculationStats()
        self._times = RoundTimes()

    async def responses(self) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """What the client gets, each response once its tokens are in the store."""
        pieces: asyncio.Queue[Piece | OutriderError] = asyncio.Queue(_MAX_PIECES_AHEAD)
        tasks = [
            asyncio.create_task(self._decode(pieces), name="decode"),
            asyncio.create_task(self._renew(), name="renew-lease"),
        ]
        try:
            commits = await self._begin()
            offset = 0
            while self._finished is None:
                piece = await self._next_piece(pieces)
                commits.append(piece.released.token_ids)
                await commits.wait_durable(commits.verified_len)
                self._account(piece)
                if piece.released.finish_reason is not None:
                    await self._finish(piece.released.finish_reason)
                yield self._response(piece, offset)
                offset += len(piece.released.token_ids)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _next_piece(self, pieces: "asyncio.Queue[Piece | OutriderError]") -> Piece:
        """All that is there, as one: whoever lags behind the decoding catches up."""
        piece = self._failure or await pieces.get()
        if isinstance(piece, OutriderError):
            raise piece
        while not pieces.empty():
            later = pieces.get_nowait()
            if isinstance(later, OutriderError):
                self._failure = later  # What came before it is told first.
                break
            piece += later
        return piece

    async def end(self) -> None:
        """Free everything: on the workers, and in the store what is not to be kept."""
        self._controller.close()
        for remote in self._remotes:
            remote.settle()
            if self._finished is None:
                remote.cancel()
            if self._finished is None or not self._plan.keep:
                is_draft = remote.link.tier == "draft"
                remote.close(opened_by_others=is_draft and self._direct is not None)
            remote.link.active -= 1
        if self._commits:
            await self._commits.close()
        if self._finished is None:
            with contextlib.suppress(OutriderError):
                await self._abandon()
        if not self._plan.keep:
            self._around.registry.forget(self._plan.session_id)
        self._log_end()

    async def _decode(self, pieces: "asyncio.Queue[Piece | OutriderError]") -> None:
        try:
            async for piece in self._decoder.pieces():
                await pieces.put(piece)
        except OutriderError as error:
            await pieces.put(error)
        except Exception as error:
            logger.exception("decoding failed")
            await pieces.put(InternalError(f"decoding failed: {type(error).__name__}"))

    async def _begin(self) -> CommitQueue:
        plan, log = self._plan, self._log
        prefix_hash = log.prefix_hash(plan.prompt_len)
        await self._around.store.begin(
            self._fence,
            from_len=self._start_len,
            from_hash=self._start_hash,
            token_ids=plan.prompt_ids,
            new_hash=prefix_hash,
            generation=GenerationRecord(
                request_id=plan.request_id,
                start=self._start_len,
                prompt_end=plan.prompt_len,
                sampling=plan.sampling,
                mode=plan.mode,
                max_tokens=plan.rules.max_tokens,
                min_tokens=plan.rules.min_tokens,
                stop_ids=tuple(sorted(plan.rules.stop_token_ids)),
                stop_strings=plan.rules.stop_strings,
                ignore_eos=plan.rules.ignore_eos,
                logprobs=plan.logprobs,
                engine_versions={
                    "outrider": outrider.__version__,
                    "target": self._model.info.version,
                    "model": self._model.info.model_fingerprint,
                },
            ),
        )
        self._commits = CommitQueue(
            self._around.store,
            self._fence,
            durable_len=plan.prompt_len,
            prefix_hash=prefix_hash,
            retry_for_s=self._around.store_retry_s,
        )
        return self._commits

    async def _renew(self) -> None:
        """Keep the lease while no commit does, during a long prefill say."""
        while True:
            await asyncio.sleep(self._around.lease_s / 3)
            with contextlib.suppress(OutriderError):
                await self._around.store.renew(self._fence)

    async def _finish(self, reason: FinishReason) -> None:
        await self._around.store.finish(self._fence, finish_reason=reason, keep=self._plan.keep)
        self._finished = reason

    async def _abandon(self) -> None:
        """The generation was cut off: a session that is kept stays as far as it is durable."""
        if self._plan.keep or self._plan.continues:
            await self._around.store.finish(self._fence, finish_reason=None, keep=True)
        else:
            await self._around.store.delete(self._fence)

    def _make_proposers(self) -> dict[str, Proposer]:
        """Those that the request may use, the first one preferred."""
        plan, found = self._plan, dict[str, Proposer]()
        if plan.num_speculative_tokens == 0:
            return found
        if plan.proposer != NGRAM:
            draft = self._make_draft()
            if draft is not None:
                found[DRAFT] = draft
        if plan.proposer != DRAFT:
            found[NGRAM] = NgramLookup(self._log)
            self._pools.append(self._around.learned.pool(self._model.name, NGRAM))
        return found

    def _make_draft(self) -> DraftModel | None:
        plan, around = self._plan, self._around
        link = around.registry.pick_draft(self._model, plan.session_id)
        if link is None or link.info is None:
            return None
        remote = self._remote(link, plan.spec.for_draft(link.info.vocab_size))
        fingerprint = link.info.model_fingerprint
        self._pools.append(around.learned.pool(self._model.name, DRAFT, fingerprint))
        alternatives = num_alternatives(plan, around.alternatives, self._model.info, link.info)
        if around.drafting == DIRECT:
            self._direct = DirectDraft(link.address, around.draft_timeout_s, alternatives)
            self._fan_out = self._outcomes_ahead(link.info)
        return DraftModel(
            remote,
            vocab_size=self._model.vocab_size,
            timeout_s=around.draft_timeout_s,
            num_alternatives=alternatives,
        )

    def _make_controller(self) -> Controller:
        plan, around = self._plan, self._around
        if plan.num_speculative_tokens is not None or not self._proposers:
            length = plan.num_speculative_tokens if self._proposers else 0
            return FixedLength(length or 0, next(iter(self._proposers), ""), self._fan_out)
        cap = plan.max_speculative_tokens
        try:
            target = around.registry.pick_target(self._model, plan.session_id).address
        except Unavailable:
            target = ""  # One will come; what it costs is learned anew.
        return AdaptiveController(
            around.learned.load(target),
            self._pools,
            mode=Mode.PIPELINED if self._fan_out else Mode.SEQUENTIAL,
            limits=Limits(cap=around.max_speculative_tokens if cap is None else cap),
        )

    def _outcomes_ahead(self, draft: worker_pb2.InfoResponse) -> int:
        """Outcomes to prepare for: none where drafting takes the target's device from it."""
        if "ahead" not in draft.capabilities:
            return 0
        if self._plan.fan_out is not None:
            return self._plan.fan_out
        if draft.device_id == self._model.info.device_id:
            return 0
        return self._around.fan_out

    def _find_target(self) -> RemoteSession:
        link = self._around.registry.pick_target(self._model, self._plan.session_id)
        return self._remote(link, self._plan.spec)

    async def _wait_for_target(self) -> None:
        loop = asyncio.get_running_loop()
        wait_s = min(self._around.target_wait_s, self._deadline - time.monotonic())
        await self._around.registry.wait_for_target(
            self._model, self._plan.session_id, loop.time() + wait_s
        )

    def _remote(self, link: WorkerLink, spec: GenerationSpec) -> RemoteSession:
        remote = RemoteSession(link, self._fence, spec, self._routing, self._log, self._numbers)
        link.active += 1
        self._remotes.append(remote)
        return remote

    def _account(self, piece: Piece) -> None:
        if not self._first_token_us:
            self._first_token_us = self._elapsed_us()
        self._stats += piece.stats
        self._times += piece.times

    def _response(self, piece: Piece, offset: int) -> generation_pb2.GenerateResponse:
        released = piece.released
        response = generation_pb2.GenerateResponse(
            session_id=self._plan.session_id,
            offset=offset,
            token_ids=released.token_ids,
            token_sources=sources_to_proto(released.sources),
            text=released.text,
            text_segments=[
                generation_pb2.TextSegment(length=length, source=source)
                for (length, _), source in zip(
                    released.segments,
                    sources_to_proto(source for _, source in released.segments),
                    strict=True,
                )
            ],
            logprobs=logprobs_to_proto(released.logprobs),
            durable=True,
            seed=self._plan.sampling.seed,
            speculation=stats_to_proto(piece.stats),
            cut_text=released.cut_text,
            matched_stop=released.matched_stop,
        )
        if self._plan.report_rounds:
            response.rounds.extend(map(_round_to_proto, piece.rounds))
        if released.finish_reason is not None:
            response.finish_reason = reason_to_proto(released.finish_reason)
            response.usage.CopyFrom(self._usage())
        return response

    def _usage(self) -> generation_pb2.Usage:
        target = self._decoder.target
        return generation_pb2.Usage(
            prompt_tokens=self._plan.prompt_len,
            cached_prompt_tokens=target.reused if target else 0,
            completion_tokens=self._output.num_released,
            speculation=stats_to_proto(self._stats),
            time=generation_pb2.TimeStats(
                draft_us=self._times.draft_us,
                verify_us=self._times.verify_us,
                draft_compute_us=self._times.draft_compute_us,
                verify_compute_us=self._times.verify_compute_us,
                draft_worker_us=self._times.draft_worker_us,
                verify_worker_us=self._times.verify_worker_us,
                rounds_us=self._times.rounds_us,
                first_token_us=self._first_token_us,
                total_us=self._elapsed_us(),
            ),
        )

    def _elapsed_us(self) -> int:
        return int((time.monotonic() - self._arrived) * 1e6)

    def _log_end(self) -> None:
        logger.info(
            "generation ended",
            extra={
                "request_id": self._plan.request_id,
                "session_id": self._plan.session_id,
                "tenant": self._routing.tenant,
                "traceparent": self._routing.traceparent,
                "prompt_tokens": self._plan.prompt_len,
                "completion_tokens": self._output.num_released,
                "finish_reason": self._finished.value if self._finished else "cut off",
                "rounds": self._stats.rounds,
                "proposed": self._stats.proposed,
                "accepted": self._stats.accepted,
                "fallback_rounds": self._stats.fallback_rounds,
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
