"""The models that are served: which targets and drafts go together, and their tokenizer."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from outrider.remote.link import WorkerLink
from outrider.v1 import worker_pb2
from services.orchestrator.text import ChatTokenizer

logger = logging.getLogger(__name__)

_TOKENIZER_TIMEOUT_S = 30.0
_MAX_PLACES = 65_536


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A target model as it was when it was first seen; its workers come and go."""

    name: str
    info: worker_pb2.InfoResponse
    tokenizer: ChatTokenizer

    @property
    def context_length(self) -> int:
        return self.info.context_length

    @property
    def vocab_size(self) -> int:
        return self.info.vocab_size


class ModelRegistry:
    """Knows all links. `connect` first; then `model`, `pick_target` and `pick_draft`."""

    def __init__(self, targets: Sequence[WorkerLink], drafts: Sequence[WorkerLink]) -> None:
        self._targets = targets
        self._drafts = drafts
        self._models: dict[str, ServedModel] = {}
        self._places: OrderedDict[tuple[str, str], WorkerLink] = OrderedDict()

    @property
    def models(self) -> list[ServedModel]:
        return list(self._models.values())

    def links(self, tier: str) -> Sequence[WorkerLink]:
        """All workers of a tier that are known, up or not."""
        return self._targets if tier == "target" else self._drafts

    async def connect(self, *, target_timeout_s: float, draft_timeout_s: float) -> None:
        """Wait for the workers and learn what they serve.

        Every target must answer. A draft may be away: sessions then go without it. Raises
        Unavailable, or FailedPrecondition for workers that do not fit together.
        """
        if not self._targets:
            raise InvalidArgument("at least one target is needed", field="targets")
        for link in (*self._targets, *self._drafts):
            link.start()
        await asyncio.gather(*(link.wait_up(target_timeout_s) for link in self._targets))
        for link in self._targets:
            await self._learn(link)
        await asyncio.gather(*(self._await_draft(link, draft_timeout_s) for link in self._drafts))

    async def close(self) -> None:
        await asyncio.gather(*(link.close() for link in (*self._targets, *self._drafts)))

    def model(self, name: str) -> ServedModel:
        """The model that a request names; an empty name means the only one."""
        if not name:
            if len(self._models) == 1:
                return next(iter(self._models.values()))
            raise InvalidArgument(
                f"several models are served; name one of {', '.join(self._models)}", field="model"
            )
        if name not in self._models:
            raise NotFound(
                f"model {name!r} is not served; there is {', '.join(self._models)}", field="model"
            )
        return self._models[name]

    def pick_target(self, model: ServedModel, session_id: str) -> WorkerLink:
        """The target that had the session last, else the one with the fewest generations."""
        links = [link for link in self._targets if _serves(link, model)]
        if not links:
            raise Unavailable(f"no target of {model.name} is there; retry later")
        return self._place(links, "target", session_id)

    def pick_draft(self, model: ServedModel, session_id: str) -> WorkerLink | None:
        """Likewise for drafts, None where none fits."""
        links = [link for link in self._drafts if _fits(link, model)]
        return self._place(links, "draft", session_id) if links else None

    async def wait_for_target(self, model: ServedModel, session_id: str, deadline: float) -> None:
        """Until a target of the model is up, or Unavailable at the deadline (loop clock)."""
        loop = asyncio.get_running_loop()
        while not any(_serves(link, model) for link in self._targets):
            if loop.time() >= deadline:
                raise Unavailable(f"no target of {model.name} came back in time; retry later")
            await asyncio.sleep(0.02)

    def proposers(self, model: ServedModel) -> list[str]:
        """Names of the proposers that a request of the model can have now."""
        drafts = any(_fits(link, model) for link in self._drafts)
        return ["draft", "ngram"] if drafts else ["ngram"]

    def remember(self, session_id: str, tier: str, address: str) -> None:
        """Where another orchestrator had the session: its KV is there."""
        for link in self.links(tier):
            if link.address == address:
                self._places[tier, session_id] = link

    def forget(self, session_id: str) -> None:
        """The session has ended; where it was does not matter any more."""
        for tier in ("target", "draft"):
            self._places.pop((tier, session_id), None)

    def _place(self, links: list[WorkerLink], tier: str, session_id: str) -> WorkerLink:
        link = self._places.get((tier, session_id))
        if link not in links:
            link = min(links, key=lambda candidate: candidate.active)
        assert link is not None
        self._places[tier, session_id] = link
        self._places.move_to_end((tier, session_id))
        while len(self._places) > _MAX_PLACES:
            self._places.popitem(last=False)
        return link

    async def _learn(self, link: WorkerLink) -> None:
        info = link.info
        if info is None:
            raise Unavailable(f"the target at {link.address} went away during the start")
        known = self._models.get(info.model)
        if known is None:
            data = await link.fetch_tokenizer(_TOKENIZER_TIMEOUT_S)
            # Parsing a tokenizer of a hundred thousand words takes a while.
            tokenizer = await asyncio.to_thread(ChatTokenizer.from_json, data)
            self._models[info.model] = ServedModel(info.model, info, tokenizer)
        elif known.info.model_fingerprint != info.model_fingerprint:
            raise FailedPrecondition(
                f"the target at {link.address} serves another {info.model}: fingerprint "
                f"{info.model_fingerprint}, the others have {known.info.model_fingerprint}"
            )

    async def _await_draft(self, link: WorkerLink, timeout_s: float) -> None:
        try:
            await link.wait_up(timeout_s)
        except Unavailable as error:
            logger.warning("going on without a draft", extra={"why": str(error)})
            return
        info = link.info
        fits = [model for model in self.models if info and _same_tokenizer(info, model)]
        if info and not fits:
            targets = ", ".join(
                f"{model.name} has {model.info.tokenizer_fingerprint}" for model in self.models
            )
            raise FailedPrecondition(
                f"draft and target must share a tokenizer: {info.model} at {link.address} has "
                f"{info.tokenizer_fingerprint}, {targets}"
            )


def _same_tokenizer(info: worker_pb2.InfoResponse, model: ServedModel) -> bool:
    return info.tokenizer_fingerprint == model.info.tokenizer_fingerprint


def _serves(link: WorkerLink, model: ServedModel) -> bool:
    info = link.info
    if info is None or link.draining:
        return False
    return info.model_fingerprint == model.info.model_fingerprint


def _fits(link: WorkerLink, model: ServedModel) -> bool:
    info = link.info
    return info is not None and not link.draining and _same_tokenizer(info, model)
