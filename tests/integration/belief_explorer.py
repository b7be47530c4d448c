"""Every order in which the entries of a generation's owners can reach a worker.

What an owner sends does not depend on what a worker answers: any entry may be lost, late or
doubled, and the sequence of each owner holds all that it may be led to send. So whatever happens
between owners, store and worker is one of these orders, of one of the courses of ownership.
Left out are entries that bring no tokens to a base (cancel, tune), and restarts of the worker: one
that has lost its memory is as it was at the start, where each order begins.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from explored_store import PROMPT, Broken
from explored_worker import EVICT, PASS, TAKE_KV, Event, ExploredWorker, Sent, Step
from owner_lives import Life


class Newest(NamedTuple):
    """The newest owner in whose name something was carried out, and the last entry that was."""

    epoch: int
    owner_nonce: int
    number: int


def entries_of(life: Life, tokens: int) -> list[Sent]:
    """What an owner may send, by number: of each base the entry that a worker thought to have it
    all gets, and those that it gets when it lacks tokens."""
    found: list[Sent] = []

    def send(op: str, base_len: int, start: int = 0) -> None:
        found.append(Sent(life, len(found) + 1, op, base_len, start))

    known = len(PROMPT) + len(life.found)
    send("open", known)
    for base_len in range(known, known + tokens + 1):
        send("verify", base_len, base_len)
        if base_len > 1:
            send("verify", base_len, base_len - 1)
        if base_len == known + tokens:
            send("bulk", base_len)
        send("verify", base_len)
    send("close", known + tokens)
    return found


class BeliefExplorer:
    """Explores one course after the other; what a worker does in a state is asked of it once."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.asked = 0
        """Events that a worker was asked about."""
        self.carried_out: set[str] = set()
        """Kinds of entries that were carried out."""
        self._histories: dict[Any, tuple[Event, ...]] = {}
        self._known: dict[Any, dict[Event, Step]] = {}
        self._workers: dict[Any, ExploredWorker] = {}
        """One in each state that was come to and not left yet."""
        self._start = ExploredWorker().key
        self._histories[self._start] = ()

    def explore(self, course: Sequence[Life]) -> int:
        """Visit every state; how many there are. Raises Broken."""
        events: list[Event] = [PASS, TAKE_KV, EVICT]
        for life in course:
            events += entries_of(life, self.tokens)
        start = _State(self._start, None)
        came: dict[_State, tuple[_State, Event] | None] = {start: None}
        layer = [start]
        while layer:  # Breadth first: what led to a fault is short.
            below = []
            for state in layer:
                try:
                    for event, after in self._steps(state, events):
                        if after not in came:
                            came[after] = state, event
                            below.append(after)
                except Broken as broken:
                    raise Broken(f"{broken}\nafter {_trail(came, state)}") from None
            layer = below
        return len(came)

    def _steps(self, state: "_State", events: list[Event]) -> Iterator[tuple[Event, "_State"]]:
        key = state.key
        known = self._known.setdefault(key, {})
        first = self._workers.pop(key, None)
        worker: ExploredWorker | None = None
        for event in events:
            try:
                if event not in known:
                    first = first or ExploredWorker(self._histories[key])
                    worker = worker or first.copy()
                    known[event] = self._apply(worker, key, event)
                    if known[event].key != key:
                        if known[event].key not in self._known:
                            self._workers[known[event].key] = worker
                        worker = None
                step = known[event]
                yield event, _State(step.key, _newest(state.newest, step))
            except Broken as broken:
                raise Broken(f"{broken}\nby {event}") from None

    def _apply(self, worker: ExploredWorker, key: Any, event: Event) -> Step:
        self.asked += 1
        step = worker.apply(event)
        self._histories.setdefault(step.key, (*self._histories[key], event))
        if step.carried_out and isinstance(event, Sent):
            self.carried_out.add(event.op)
        return step


class _State(NamedTuple):
    key: Any
    """The worker's."""
    newest: Newest | None


def _newest(newest: Newest | None, step: Step) -> Newest | None:
    for life in step.carried_out:
        number = step.number or 0
        now = Newest(life.epoch, life.owner_nonce, number)
        if newest is not None and now.epoch < newest.epoch:
            raise Broken(f"{life} was heard after {newest}")
        if newest is not None and now.epoch == newest.epoch:
            if now.owner_nonce != newest.owner_nonce:
                raise Broken(f"{life} was heard beside {newest}")
            if number and number <= newest.number:
                raise Broken(f"number {number} was carried out after {newest}")
            now = now._replace(number=max(number, newest.number))
        newest = now
    session = step.key[0]
    # A session that is forgotten may be opened anew by the same entries.
    return newest._replace(number=0) if newest and session is None else newest


def _trail(came: dict[_State, tuple[_State, Event] | None], state: _State) -> str:
    """The events that led to a state."""
    events: list[Event] = []
    while (step := came[state]) is not None:
        state, event = step
        events.append(event)
    return "\n".join(map(str, reversed(events)))
