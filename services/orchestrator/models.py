"""The models that are served: which targets and drafts go together, and their tokenizer.

Workers come and go at run time. One that does not fit is refused, with a word in the log and a
counter; only where it was written down as an address does it keep the orchestrator from starting.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from outrider.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from outrider.remote.link import WorkerLink
from outrider.rpc.channel import ChannelSecurity
from outrider.v1 import worker_pb2
from services.orchestrator.discovery.endpoints import Source
from services.orchestrator.discovery.watcher import Discovery
from services.orchestrator.text import ChatTokenizer
from services.orchestrator.workers import Tier, Worker

logger = logging.getLogger(__name__)

_TOKENIZER_TIMEOUT_S = 30.0
_REPLACED_AFTER_S = 30.0
"""Other weights take a model's name over when no target has served it for so long: one that merely
restarts finds its place again."""


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
    """Knows all workers. `connect` first, in the end `close`."""

    def __init__(
        self, targets: Sequence[Source], drafts: Sequence[Source], security: ChannelSecurity
    ) -> None:
        if not targets:
            raise InvalidArgument("at least one target is needed", field="targets")
        self.targets = Tier(
            "target", security, examine=self._examine_target, tell=self._tell_listeners
        )
        self.drafts = Tier(
            "draft", security, examine=self._examine_draft, tell=self._tell_listeners
        )
        self._find_targets = Discovery(targets, self.targets.apply)
        self._find_drafts = Discovery(drafts, self.drafts.apply)
        self._models: dict[str, ServedModel] = {}
        self._lost_at: dict[str, float] = {}
        """When a model was first seen to have no target any more."""
        self._learning = asyncio.Lock()
        self._listeners: list[Callable[[], None]] = []
        self._changed = asyncio.Event()

    @property
    def models(self) -> list[ServedModel]:
        return list(self._models.values())

    def links(self, tier: str) -> Sequence[WorkerLink]:
        """All workers of a tier that are known, up or not."""
        workers = self.targets.workers if tier == "target" else self.drafts.workers
        return [worker.link for worker in workers]

    async def connect(self, *, target_timeout_s: float, draft_timeout_s: float) -> None:
        """Wait for the workers and learn what they serve.

        Of targets that were written down each must answer, of those that are discovered one. A
        draft may be away: sessions then go without it. Raises Unavailable, or FailedPrecondition
        for workers written down that do not fit together.
        """
        self._find_targets.start()
        self._find_drafts.start()
        deadline = asyncio.get_running_loop().time() + target_timeout_s
        if self._find_targets.is_static:
            await self._find_targets.first(target_timeout_s)
            for worker in self.targets.workers:
                left = deadline - asyncio.get_running_loop().time()
                await self.targets.wait_examined(worker, max(left, 0.01))
        await self._wait_for_a_model(deadline)
        await self._find_drafts.first(draft_timeout_s)
        await asyncio.gather(*(self._await_draft(w, draft_timeout_s) for w in self.drafts.workers))

    async def close(self) -> None:
        await asyncio.gather(self._find_targets.close(), self._find_drafts.close())
        await asyncio.gather(self.targets.close(), self.drafts.close())

    def listen(self, listener: Callable[[], None]) -> None:
        """Call this whenever a worker has come, gone, or said how it is doing."""
        self._listeners.append(listener)

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

    def targets_of(self, model: ServedModel) -> list[Worker]:
        """Targets that are there for the model, those that take no new sessions included."""
        return _each_once(w for w in self.targets.workers if w.usable and _serves(w, model))

    def drafts_of(self, model: ServedModel) -> list[Worker]:
        """Likewise drafts."""
        return _each_once(w for w in self.drafts.workers if w.usable and _fits(w, model))

    async def wait_for_target(self, model: ServedModel, deadline: float) -> None:
        """Until a target of the model is there to stay, or Unavailable at the deadline (loop
        clock)."""
        loop = asyncio.get_running_loop()
        while all(worker.leaving for worker in self.targets_of(model)):
            if loop.time() >= deadline:
                raise Unavailable(f"no target of {model.name} came back in time; retry later")
            await self._wait_change(min(deadline - loop.time(), 0.5))

    def proposers(self, model: ServedModel) -> list[str]:
        """Names of the proposers that a request of the model can have now."""
        drafts = any(worker.takes_sessions for worker in self.drafts_of(model))
        return ["draft", "ngram"] if drafts else ["ngram"]

    # --- learning -----------------------------------------------------------------------------

    async def _examine_target(self, worker: Worker) -> None:
        """Learn what a target serves, once for each incarnation."""
        info = worker.link.info
        if info is None:
            if worker.seen:
                worker.seen, worker.misfit = 0, None
                self._note_lost()
            return
        if worker.seen == info.incarnation:
            return
        async with self._learning:
            known = self._models.get(info.model)
            if known is None or self._is_replaced(known, info):
                await self._learn(worker, info)
                known = self._models[info.model]
            worker.seen = info.incarnation
            if known.info.model_fingerprint == info.model_fingerprint:
                worker.fits, worker.misfit = info.incarnation, None
                self._lost_at.pop(info.model, None)
                return
            self.targets.refuse(
                worker,
                FailedPrecondition(
                    f"the target at {worker.address} (Outrider {info.version}) serves another "
                    f"{info.model}: fingerprint {info.model_fingerprint}, the others (Outrider "
                    f"{known.info.version}) have {known.info.model_fingerprint}; it is taken when "
                    f"none of them has been there for {_REPLACED_AFTER_S:g} s"
                ),
            )

    async def _learn(self, worker: Worker, info: worker_pb2.InfoResponse) -> None:
        data = await worker.link.fetch_tokenizer(_TOKENIZER_TIMEOUT_S)
        # Parsing a tokenizer of a hundred thousand words takes a while.
        tokenizer = await asyncio.to_thread(ChatTokenizer.from_json, data)
        if info.model in self._models:
            logger.warning("a model was replaced", extra={"model": info.model})
        self._models[info.model] = ServedModel(info.model, info, tokenizer)
        self._look_again(self.drafts)

    def _is_replaced(self, known: ServedModel, info: worker_pb2.InfoResponse) -> bool:
        """Other weights under a name that no target serves any more: all were upgraded."""
        if known.info.model_fingerprint == info.model_fingerprint or self.targets_of(known):
            return False
        now = asyncio.get_running_loop().time()
        return now - self._lost_at.get(known.name, now) > _REPLACED_AFTER_S

    def _note_lost(self) -> None:
        """A target has gone away. Others may have been refused because of it: look again later."""
        loop = asyncio.get_running_loop()
        for model in self.models:
            if not self.targets_of(model):
                self._lost_at.setdefault(model.name, loop.time())
        loop.call_later(_REPLACED_AFTER_S + 0.1, self._look_again, self.targets)

    async def _examine_draft(self, worker: Worker) -> None:
        info = worker.link.info
        if info is None:
            worker.seen, worker.misfit = 0, None
            return
        if worker.seen == info.incarnation or not self._models:
            return
        worker.seen = info.incarnation
        if any(_same_tokenizer(info, model) for model in self.models):
            worker.fits, worker.misfit = info.incarnation, None
            return
        targets = ", ".join(
            f"{model.name} has {model.info.tokenizer_fingerprint}" for model in self.models
        )
        self.drafts.refuse(
            worker,
            FailedPrecondition(
                f"draft and target must share a tokenizer: {info.model} at {worker.address} has "
                f"{info.tokenizer_fingerprint}, {targets}"
            ),
        )

    def _look_again(self, tier: Tier) -> None:
        """Examine those that were looked at and do not fit, or could not be judged yet."""
        for worker in tier.workers:
            if not worker.usable and worker.link.up:
                worker.seen = 0
                worker.link.tell()

    async def _wait_for_a_model(self, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        while not self._models:
            if loop.time() >= deadline:
                raise Unavailable("no target was found in time; see what `targets` names")
            await self._wait_change(min(deadline - loop.time(), 0.5))

    async def _await_draft(self, worker: Worker, timeout_s: float) -> None:
        try:
            await self.drafts.wait_examined(worker, timeout_s)
        except Unavailable as error:
            logger.warning("going on without a draft", extra={"why": str(error)})
        except FailedPrecondition:
            if self._find_drafts.is_static:
                raise

    def _tell_listeners(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        for listener in self._listeners:
            listener()

    async def _wait_change(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()


def _same_tokenizer(info: worker_pb2.InfoResponse, model: ServedModel) -> bool:
    return info.tokenizer_fingerprint == model.info.tokenizer_fingerprint


def _serves(worker: Worker, model: ServedModel) -> bool:
    info = worker.link.info
    return info is not None and info.model_fingerprint == model.info.model_fingerprint


def _fits(worker: Worker, model: ServedModel) -> bool:
    info = worker.link.info
    return info is not None and _same_tokenizer(info, model)


def _each_once(workers: Iterable[Worker]) -> list[Worker]:
    """Each incarnation once: a worker may have an address of each family."""
    found: dict[int, Worker] = {}
    for worker in workers:
        found.setdefault(worker.incarnation, worker)
    return list(found.values())
