"""The drafts that a target asks by itself: links to them, and the sessions driven there.

Rounds run on the worker's thread, links on the event loop. A `DraftSession` stands between them
(outrider.remote.asking): it is asked on the worker's thread, its answer comes back there.
"""

import asyncio
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable

from outrider.errors import OutriderError, Unsupported
from outrider.remote.asking import DraftSession
from outrider.remote.link import WorkerLink
from outrider.remote.protocol import devices_of
from outrider.remote.session import RemoteSession, Routing
from outrider.rpc.channel import ChannelSecurity
from outrider.speculation.forecast import Shared
from outrider.telemetry.context import TraceContext
from outrider.token_log import TokenLog
from outrider.types import Fence, GenerationSpec
from outrider.v1 import worker_pb2
from outrider.worker.handover import Handover
from outrider.worker.sessions import Key, key_of
from outrider.worker.worker import Host

logger = logging.getLogger(__name__)

_MAX_LINKS = 64
_MAX_SESSIONS = 4096
_LOOK_S = 2.0
_NUMBERS_AN_ENTRY = 1 << 20
"""Numbers of entries that a verification's entry may use on the draft: those after its own number
times this. So numbers grow there too when a session moves from one target to another."""

Owner = tuple[int, int, str]
"""Epoch and nonce of a session's owner, and the draft's address."""


class DraftPool:
    """Links to drafts by address, and sessions on them. Make it on the event loop; `session` is
    called on the worker's thread."""

    def __init__(self, security: ChannelSecurity, *, traced: bool = False) -> None:
        """`traced`: this target has spans of its own, which those of drafts are below."""
        self._traced = traced
        self.tokenizer = ""
        self.vocab_size = 0
        self._devices: frozenset[str] = frozenset()
        self._beside: set[str] = set()
        """Addresses of drafts that compute on one of the target's devices."""
        self._security = security
        self._loop = asyncio.get_running_loop()
        self._host: Host | None = None
        self._links: OrderedDict[str, WorkerLink] = OrderedDict()
        self._sessions: OrderedDict[Key, tuple[Owner, DraftSession]] = OrderedDict()
        self._seen: dict[str, Shared] = {}
        self._for_loop = Handover(self._loop, _run_guarded)
        self._for_worker: list[Callable[[], None]] = []
        self._closing: set[asyncio.Task[None]] = set()

    def serve(
        self, *, tokenizer: str, vocab_size: int, devices: frozenset[str] = frozenset()
    ) -> None:
        """What drafts must fit: the target's tokenizer (fingerprint) and vocabulary; and the
        devices that it computes on itself."""
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self._devices = devices

    def attach(self, host: Host) -> None:
        """Whose thread asks."""
        self._host = host

    def session(
        self, header: worker_pb2.EntryHeader, spec: GenerationSpec, address: str
    ) -> DraftSession:
        """The session that an entry names, on the draft at an address."""
        key, owner = key_of(header), (header.epoch, header.owner_nonce, address)
        known, session = self._sessions.get(key, (None, None))
        if session is None or known != owner:
            session = self._new_session(header, spec, address)
        self._sessions[key] = owner, session
        self._sessions.move_to_end(key)
        while len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return session

    def is_beside(self, address: str) -> bool:
        """Whether a draft computes on a device of the target's, as far as is known."""
        return address in self._beside

    def forget(self, key: Key) -> None:
        """A session is gone; on the worker's thread."""
        self._sessions.pop(key, None)

    def _new_session(
        self, header: worker_pb2.EntryHeader, spec: GenerationSpec, address: str
    ) -> DraftSession:
        log = TokenLog()

        def open_on(link: WorkerLink) -> RemoteSession:
            info = link.info
            if info is None or info.tokenizer_fingerprint != self.tokenizer:
                raise Unsupported("draft and target must share a tokenizer")
            self._beside.discard(address)
            if self._devices & devices_of(info):
                self._beside.add(address)
            return RemoteSession(
                link,
                Fence(header.session_id, header.epoch, header.owner_nonce, header.completion),
                spec.for_draft(info.vocab_size),
                self.routing(header),
                log,
                itertools.count(header.number * _NUMBERS_AN_ENTRY),
            )

        return DraftSession(
            log,
            lambda: self.link(address),
            open_on,
            to_loop=self.on_loop,
            to_owner=self.on_worker,
        )

    def routing(self, header: worker_pb2.EntryHeader) -> Routing:
        """What entries for a draft say, of the session that an orchestrator's entry names."""
        trace = TraceContext.parse(header.traceparent) if self._traced else None
        return Routing(
            header.request_id,
            header.tenant,
            model="",
            traceparent=str(trace.below()) if trace is not None else header.traceparent,
            trace_every=header.trace_every,
        )

    @property
    def links(self) -> tuple[WorkerLink, ...]:
        return tuple(self._links.values())

    def seen(self, address: str) -> Shared:
        """What all sessions of a draft have seen; on the worker's thread."""
        if len(self._seen) > _MAX_LINKS:
            self._seen.clear()
        return self._seen.setdefault(address, Shared())

    def on_loop(self, action: Callable[[], None]) -> None:
        """From the worker's thread. Threads wake each other once for all that is there: the
        sessions of a batch ask, and are answered, together."""
        self._for_loop.put(action)

    def on_worker(self, action: Callable[[], None]) -> None:
        """From the event loop."""
        self._for_worker.append(action)
        if len(self._for_worker) == 1:
            self._loop.call_soon(self._run_on_worker)

    def _run_on_worker(self) -> None:
        actions, self._for_worker = self._for_worker, []
        if self._host is not None:
            self._host.post(lambda: _run_all(actions))

    def link(self, address: str) -> WorkerLink:
        """The link to an address; the one used least recently goes when there are too many."""
        if address not in self._links:
            self._links[address] = WorkerLink(address, "draft", self._security)
            self._links[address].start()
        self._links.move_to_end(address)
        if len(self._links) > _MAX_LINKS:
            oldest, unused = self._links.popitem(last=False)
            self._beside.discard(oldest)
            self._closing.add(asyncio.create_task(unused.close()))
        return self._links[address]

    async def look_at(self, address: str, samples: int) -> worker_pb2.DraftFacts:
        """The way to a draft, over the link that proposals use."""
        facts = worker_pb2.DraftFacts(address=address)
        try:
            link = self.link(address)
            await link.wait_up(_LOOK_S)
            facts.round_trips.CopyFrom(await link.measure(samples, within_s=_LOOK_S))
        except OutriderError as error:
            facts.error = str(error)
        return facts

    async def close(self) -> None:
        """Hang up."""
        await asyncio.gather(*self._closing, *(link.close() for link in self._links.values()))


def _run_all(actions: list[Callable[[], None]]) -> None:
    for action in actions:
        _run_guarded(action)


def _run_guarded(action: Callable[[], None]) -> None:
    """One session's fault stays its own."""
    try:
        action()
    except Exception:
        logger.exception("a draft session failed")
