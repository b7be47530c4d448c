"""The sessions that a worker knows: who owns them, and the tokens and KV it has of them."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from outrider.engine.sequence import Sequence
from outrider.token_log import TokenLog
from outrider.types import is_session_id
from outrider.v1 import worker_pb2
from outrider.wire import require

Key = tuple[str, int]
"""Session id and completion index."""

_MAX_NAME_BYTES = {"request_id": 128, "tenant": 128, "model": 256, "traceparent": 64}
_MAX_CLOSED = 8192
"""Epochs of closed sessions that are remembered, so that a former owner cannot revive them."""


class Refusal(Exception):
    """An entry is not carried out; nothing of it was applied."""

    def __init__(
        self, reason: "worker_pb2.RefusalReason", message: str, *, field: str = ""
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.field = field


class TokensMissing(Exception):
    """The worker's prefix does not reach the entry's base; it needs tokens from `start`."""

    def __init__(self, start: int) -> None:
        super().__init__(f"tokens from {start} are missing")
        self.start = start


@dataclass(slots=True)
class Session:
    """One completion of a session: its owner's fence, and its sequence."""

    epoch: int
    owner_nonce: int
    last_number: int = 0
    sequence: Sequence = field(default_factory=Sequence)
    works: int = 0
    """Queued and running work; a session without any is idle."""


@dataclass(frozen=True, slots=True)
class _Closed:
    """What is remembered of a session that is gone."""

    epoch: int
    owner_nonce: int
    for_good: bool
    """Its owner closed it, and will not open it again in that epoch."""


class SessionTable:
    """Sessions by key, least recently used first."""

    def __init__(self, max_sessions: int) -> None:
        self.max_sessions = max_sessions
        self._sessions: OrderedDict[Key, Session] = OrderedDict()
        self._closed: OrderedDict[Key, _Closed] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, key: Key) -> bool:
        return key in self._sessions

    def idle(self) -> Iterator[tuple[Key, Session]]:
        """Sessions without work, least recently used first."""
        return (item for item in list(self._sessions.items()) if item[1].works == 0)

    def open(self, header: worker_pb2.EntryHeader) -> Session:
        """The session that an Open entry names, made or taken over by the entry's owner."""
        key = key_of(header)
        if key in self._closed:
            closed = self._closed[key]
            _check_owner(header, closed.epoch, closed.owner_nonce)
            if closed.for_good and header.epoch == closed.epoch:
                raise Refusal(
                    worker_pb2.REFUSAL_REASON_STALE_EPOCH,
                    f"its owner has closed the session in epoch {header.epoch}",
                    field="epoch",
                )
        session = self.take_over(header)
        if session is None:
            session = Session(header.epoch, header.owner_nonce)
            self._number(session, header)
            self._sessions[key] = session
            self._closed.pop(key, None)
        self._sessions.move_to_end(key)
        return session

    def take_over(self, header: worker_pb2.EntryHeader) -> Session | None:
        """The session that an entry of its owner, or of a new owner, names; None if unknown."""
        session = self._sessions.get(key_of(header))
        if session is None:
            return None
        _check_owner(header, session.epoch, session.owner_nonce)
        if header.epoch > session.epoch:
            session.epoch, session.owner_nonce = header.epoch, header.owner_nonce
            session.last_number = 0
        self._number(session, header)
        return session

    def get(self, header: worker_pb2.EntryHeader) -> Session:
        """The open session that an entry names, if the entry's fence holds and it is the next."""
        session = self.find(header)
        self._number(session, header)
        self._sessions.move_to_end(key_of(header))
        return session

    def find(self, header: worker_pb2.EntryHeader) -> Session:
        """The same for an entry that others may overtake."""
        session = self._sessions.get(key_of(header))
        if session is None:
            raise Refusal(
                worker_pb2.REFUSAL_REASON_UNKNOWN_SESSION, "no such session here; open it again"
            )
        _check_owner(header, session.epoch, session.owner_nonce)
        if header.epoch > session.epoch:
            raise Refusal(
                worker_pb2.REFUSAL_REASON_UNKNOWN_SESSION, "a new owner must open the session"
            )
        return session

    def close(self, key: Key) -> Session | None:
        """Forget a session but for its epoch."""
        session = self._sessions.pop(key, None)
        if session:
            self._remember(key, _Closed(session.epoch, session.owner_nonce, for_good=False))
        return session

    def end_epoch(self, header: worker_pb2.EntryHeader) -> None:
        """The owner has closed the session: an entry that it sent before, by another way say, does
        not bring it back."""
        check_header(header)
        closed = self._closed.get(key_of(header))
        if closed is not None:
            _check_owner(header, closed.epoch, closed.owner_nonce)
        self._remember(key_of(header), _Closed(header.epoch, header.owner_nonce, for_good=True))

    def _remember(self, key: Key, closed: "_Closed") -> None:
        self._closed[key] = closed
        self._closed.move_to_end(key)
        while len(self._closed) > _MAX_CLOSED:
            self._closed.popitem(last=False)

    def _number(self, session: Session, header: worker_pb2.EntryHeader) -> None:
        number = header.number
        if number <= session.last_number:
            raise Refusal(
                worker_pb2.REFUSAL_REASON_STALE_NUMBER,
                f"number {number} is not above {session.last_number}",
                field="number",
            )
        session.last_number = number


def check_header(header: worker_pb2.EntryHeader) -> None:
    """Refuse to open what no owner can mean; later entries must match an open session."""
    require(is_session_id(header.session_id), "must be 22 of [A-Za-z0-9_-]", "session_id")
    require(header.completion <= 255, f"{header.completion} is not in [0, 255]", "completion")
    require(header.epoch >= 1, "must be at least 1", "epoch")
    if header.adapter:
        raise Refusal(
            worker_pb2.REFUSAL_REASON_UNSUPPORTED, "this worker has no adapters", field="adapter"
        )


def check_names(header: worker_pb2.EntryHeader) -> None:
    """Refuse names that are longer than any that is meant; they end up in tables and logs."""
    for what, limit in _MAX_NAME_BYTES.items():
        name: str = getattr(header, what)
        if len(name) * 4 > limit:  # Four bytes a character at most: short ones need no encoding.
            size = len(name.encode())
            require(size <= limit, f"{size} bytes; at most {limit} are allowed", what)


def key_of(header: worker_pb2.EntryHeader) -> Key:
    return header.session_id, header.completion


def _check_owner(header: worker_pb2.EntryHeader, epoch: int, owner_nonce: int) -> None:
    named = header.epoch
    if named < epoch:
        raise Refusal(
            worker_pb2.REFUSAL_REASON_STALE_EPOCH,
            f"epoch {named} is over; the session is at {epoch}",
            field="epoch",
        )
    if named == epoch and header.owner_nonce != owner_nonce:
        raise Refusal(
            worker_pb2.REFUSAL_REASON_NONCE_MISMATCH,
            f"another owner holds epoch {epoch}",
            field="owner_nonce",
        )


def advance_base(
    log: TokenLog, header: worker_pb2.EntryHeader, delta: worker_pb2.TokenDelta
) -> None:
    """Bring the committed tokens to the entry's base, or raise TokensMissing and change nothing.

    Only a prefix with the base's length and hash is ever taken for it.
    """
    base_len, base_hash = header.base_len, header.base_hash
    if log.matches(base_len, base_hash):
        log.cut(base_len)
        return
    given, start = delta.token_ids[:], delta.start
    if not given:
        raise TokensMissing(len(log) if base_len > len(log) else 0)
    if log.replace_tail(start, given, base_len, base_hash):
        return
    if start == 0:
        raise Refusal(
            worker_pb2.REFUSAL_REASON_INVALID_ARGUMENT,
            "length and hash of the base are not those of the tokens given",
            field="base_hash",
        )
    # Tokens that start behind ours leave a gap; any other mismatch means another prefix.
    raise TokensMissing(len(log) if start > len(log) else 0)
