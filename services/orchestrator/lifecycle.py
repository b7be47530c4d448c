"""Sessions beside their generations: looked at, listed, given up, removed from every tier."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    OutriderError,
    Unavailable,
)
from outrider.kv_store.connection import STORE_ERRORS, StoreAddress
from outrider.kv_store.purge import purge_tenant
from outrider.types import Fence, is_session_id
from outrider.v1 import generation_pb2
from outrider.wire import (
    durability_to_proto,
    mode_to_proto,
    reason_to_proto,
    require,
    sampling_to_proto,
    state_to_proto,
)
from services.orchestrator.closing import close_everywhere
from services.orchestrator.models import ModelRegistry
from services.orchestrator.requests import check_length, session_id_for
from services.orchestrator.store import SessionStore
from services.orchestrator.store_values import GenerationRecord, StoredSession
from services.orchestrator.takeover import text_spans

DEFAULT_PAGE = 100
MAX_PAGE = 1000
_LOOKS_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """What callers can do to their sessions; `owner` names this orchestrator in the store."""

    store: SessionStore
    registry: ModelRegistry
    owner: str
    kv_store: StoreAddress | None = None
    """Where workers keep KV blocks of callers."""

    async def show(
        self, request: generation_pb2.GetSessionRequest, tenant: str
    ) -> generation_pb2.GetSessionResponse:
        session = await self.store.get(
            request.session_id,
            tenant=tenant,
            include_tokens=request.include_tokens or request.include_text,
        )
        generations = [_generation_to_proto(record) for record in session.generations]
        if request.include_text:
            tokenizer = self.registry.model(session.model).tokenizer
            for message, token_ids in zip(generations, _generated(session), strict=True):
                # A long log takes a while, and others are being served.
                spans = await asyncio.to_thread(text_spans, tokenizer, token_ids)
                text = "".join(part for part, _ in spans)
                message.text = text[: len(text) - len(message.cut_text)]
        return generation_pb2.GetSessionResponse(
            session_id=request.session_id,
            model=session.model,
            length=session.durable_len,
            epoch=session.fence.epoch,
            generations=generations,
            token_ids=session.token_ids if request.include_tokens else (),
            ttl_seconds=int(session.ttl_s),
            state=state_to_proto(session.state),
            owner=session.owner,
            age_seconds=int(session.age_s),
            tokenizer_fingerprint=session.tokenizer_fingerprint,
        )

    async def list_page(
        self, request: generation_pb2.ListSessionsRequest, tenant: str
    ) -> generation_pb2.ListSessionsResponse:
        require(
            request.page_size <= MAX_PAGE, f"{request.page_size} is above {MAX_PAGE}", "page_size"
        )
        after = request.page_token
        require(not after or is_session_id(after), "is none that a page has given", "page_token")
        ids = await self.store.index.members(tenant)
        wanted = request.page_size or DEFAULT_PAGE
        later = [session_id for session_id in ids if session_id > after]
        page = later[:wanted]
        return generation_pb2.ListSessionsResponse(
            sessions=await self._summaries(page, tenant),
            next_page_token=page[-1] if len(later) > wanted else "",
            total=len(ids),
        )

    async def _summaries(
        self, ids: Sequence[str], tenant: str
    ) -> list[generation_pb2.SessionSummary]:
        gate = asyncio.Semaphore(_LOOKS_AT_ONCE)

        async def look(session_id: str) -> generation_pb2.SessionSummary | None:
            async with gate:
                try:
                    return _summary(await self.store.get(session_id, tenant=tenant))
                except NotFound:
                    return None  # It ended a moment ago, or was evicted.
                except FailedPrecondition:
                    # Of another release: there it is, and more is not known.
                    return generation_pb2.SessionSummary(session_id=session_id)

        found = await asyncio.gather(*(look(session_id) for session_id in ids))
        gone = [session_id for session_id, one in zip(ids, found, strict=True) if one is None]
        await self.store.index.remove(tenant, *gone)
        return [summary for summary in found if summary is not None]

    async def delete(self, session_id: str, tenant: str) -> None:
        """Every key, and the KV on both tiers. Raises NotFound, PermissionDenied."""
        fence = await self.store.remove(session_id, tenant=tenant)
        await self._forget(fence, tenant)

    async def purge(self, tenant: str) -> generation_pb2.PurgeSessionsResponse:
        """All live sessions of a caller, and its KV blocks in the store. Raises Unavailable where
        the blocks cannot be reached; the sessions are gone then."""
        gate = asyncio.Semaphore(_LOOKS_AT_ONCE)

        async def drop(session_id: str) -> bool:
            async with gate:
                try:
                    await self.delete(session_id, tenant)
                except NotFound:
                    await self.store.index.remove(tenant, session_id)
                    return False  # It ended a moment ago.
                return True

        ids = await self.store.index.members(tenant)
        gone = await asyncio.gather(*(drop(session_id) for session_id in ids))
        num_blocks = 0
        if self.kv_store is not None:
            num_blocks = await asyncio.to_thread(self._purge_blocks, self.kv_store, tenant)
        return generation_pb2.PurgeSessionsResponse(sessions=sum(gone), kv_blocks=num_blocks)

    def _purge_blocks(self, address: StoreAddress, tenant: str) -> int:
        models = [(model.info.model_fingerprint, "") for model in self.registry.models]
        try:
            with address.connect() as client:
                return purge_tenant(client, tenant, models)
        except STORE_ERRORS as error:
            raise Unavailable(f"KV blocks are left: {address.explain(error)}") from None

    async def cancel(self, request: generation_pb2.CancelRequest, tenant: str) -> None:
        """Give up a generation: as a call that is cancelled would be without `resumable`.

        Raises NotFound, PermissionDenied, FailedPrecondition (another request's).
        """
        check_length(request.idempotency_key, "idempotency_key")
        session_id = request.session_id
        if not session_id:
            require(bool(request.idempotency_key), "is needed without a session_id", "session_id")
            session_id = session_id_for(tenant, request.idempotency_key)
        if not request.request_id:
            raise InvalidArgument("is empty", field="request_id")
        try:
            session = await self.store.resume(
                session_id, tenant=tenant, owner=self.owner, request_id=request.request_id
            )
        except FailedPrecondition:
            session = await self.store.get(session_id, tenant=tenant)
            if request.session_id or session.generations:
                raise
            await self.delete(session_id, tenant)  # Created, and never begun.
            return
        record = session.last
        assert record is not None
        if session.running is None:
            return
        if record.keep or record.start > 0:
            await self.store.finish(session.fence, finish_reason=None, keep=True)
            await self.store.index.touch(tenant, session_id, ttl_s=self.store.kept_s)
            close_everywhere(self.registry, session.fence, tenant)
        else:
            await self.store.delete(session.fence)
            await self._forget(session.fence, tenant)

    async def _forget(self, fence: Fence, tenant: str) -> None:
        close_everywhere(self.registry, fence, tenant)
        with contextlib.suppress(OutriderError):
            await self.store.index.remove(tenant, fence.session_id)


def _generated(session: StoredSession) -> list[tuple[int, ...]]:
    """Token ids that each generation has made."""
    ends = [record.start for record in session.generations[1:]] + [session.durable_len]
    return [
        session.token_ids[record.prompt_end : end]
        for record, end in zip(session.generations, ends, strict=True)
    ]


def _summary(session: StoredSession) -> generation_pb2.SessionSummary:
    return generation_pb2.SessionSummary(
        session_id=session.fence.session_id,
        model=session.model,
        length=session.durable_len,
        num_generations=len(session.generations),
        state=state_to_proto(session.state),
        ttl_seconds=int(session.ttl_s),
        age_seconds=int(session.age_s),
        request_id=session.last.request_id if session.last else "",
    )


def _generation_to_proto(record: GenerationRecord) -> generation_pb2.Generation:
    message = generation_pb2.Generation(
        request_id=record.request_id,
        start=record.start,
        prompt_end=record.prompt_end,
        seed=record.sampling.seed,
        mode=mode_to_proto(record.mode),
        sampling=sampling_to_proto(record.sampling),
        stop=generation_pb2.StopCriteria(
            max_tokens=record.max_tokens,
            min_tokens=record.min_tokens,
            stop_token_ids=record.stop_ids,
            stop_strings=record.stop_strings,
            ignore_eos=record.ignore_eos,
        ),
        logprobs=record.logprobs,
        durability=durability_to_proto(record.durability),
        engine_versions=record.engine_versions,
    )
    if record.outcome is not None:
        message.finish_reason = reason_to_proto(record.outcome.finish_reason)
        message.matched_stop = record.outcome.matched_stop
        message.cut_text = record.outcome.cut_text
    return message
