"""Every interleaving of a few owners' commits, run against the real script on a real server.

Two orchestrators own one generation in turn. Commits are lost, late or doubled, replies are lost,
any of the two takes the generation over at any moment, and the store may fall back to what a
replica that lags had. The states that this leads to are all visited; what the script makes of each
is asked of the server once.

A token tells who made it: owners never happen to write the same, so whatever is lost, doubled or
written by somebody who may not shows in the log.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from redis import Redis

from explored_store import PROMPT, Broken, ExploredStore, Stored
from outrider.errors import DataLoss
from outrider.types import chain_hash
from services.orchestrator.takeover import Told, check_told


class Message(NamedTuple):
    """A commit that was sent: the tokens of `log` from `start` on. The network delivers it at any
    time, any number of times, or never."""

    sender: int
    serial: int
    fence: tuple[int, str]
    start: int
    log: tuple[int, ...]


@dataclass(frozen=True)
class Owner:
    """An orchestrator as a commit queue has it."""

    fence: tuple[int, str] | None = None
    log: tuple[int, ...] = ()
    """What it has generated, or found."""
    durable: int = 0
    waits_for: int = 0
    """Serial of the commit whose answer it waits for; 0: none."""
    number: int = 0
    """Of all who have owned it; its tokens bear it."""
    asked_to_take: str = ""
    """Nonce of a takeover whose answer was lost."""


@dataclass(frozen=True)
class World:
    stored: Stored
    before: Stored | None
    """What a replica that lags by one write would have; None: there is none to fall back to."""
    owners: tuple[Owner, Owner] = (Owner(), Owner())
    net: tuple[Message, ...] = ()
    told: tuple[int, ...] = ()
    reads: str = "n0"
    """Nonce of the owner whose stream the client reads."""
    sends: int = 0
    takes: int = 0
    owned: int = 0
    """Times that it has changed hands."""

    def with_owner(self, who: int, owner: Owner, **changes: Any) -> "World":
        owners = list(self.owners)
        owners[who] = owner
        return replace(self, owners=(owners[0], owners[1]), **changes)


@dataclass(frozen=True)
class Scope:
    """How much may happen."""

    sends: int = 4
    takes: int = 2
    failover: bool = False
    """The store may fall back to a replica."""
    strangers: bool = False
    """Another client may resume the generation too, from its start."""


class Explorer:
    def __init__(
        self, redis: Redis, script: str, scope: Scope, *, compares_tokens: bool = True
    ) -> None:
        self.store = ExploredStore(redis, script)
        self.scope = scope
        self.compares_tokens = compares_tokens
        self.refused: set[str] = set()

    def explore(self) -> int:
        """Visit every state; how many there are. Raises Broken."""
        start = self._start()
        seen, todo = {start}, [start]
        while todo:
            world = todo.pop()
            for after in self._steps(world):
                if after not in seen:
                    seen.add(after)
                    todo.append(after)
        return len(seen)

    def _start(self) -> World:
        stored = self.store.begun()
        return World(stored, None).with_owner(0, Owner(stored.owner))

    def _steps(self, world: World) -> Iterator[World]:
        for who in (0, 1):
            yield from self._send(world, who)
            yield from self._take(world, who)
            if self.scope.strangers:
                yield from self._take(world, who, stranger=True)
        for message in world.net:
            yield from self._deliver(world, message)
        if self.scope.failover and world.before is not None:
            yield replace(world, stored=world.before, before=None)

    def _send(self, world: World, who: int) -> Iterator[World]:
        """Generate a token, and commit what is not durable; an answer that is late is given up."""
        owner = world.owners[who]
        if owner.waits_for:
            yield world.with_owner(who, replace(owner, waits_for=0))
            return
        if owner.fence is None or world.sends == self.scope.sends:
            return
        log = (*owner.log, 1000 * (owner.number + 1) + len(owner.log))
        serial = world.sends + 1
        message = Message(who, serial, owner.fence, owner.durable, log)
        owner = replace(owner, log=log, waits_for=serial)
        yield world.with_owner(who, owner, net=(*world.net, message), sends=serial)

    def _take(self, world: World, who: int, *, stranger: bool = False) -> Iterator[World]:
        """Resume the generation at the client's offset; the answer may be lost, and asked for
        again."""
        owner = world.owners[who]
        repeats = bool(owner.asked_to_take) and not stranger
        if not repeats and world.takes == self.scope.takes:
            return
        told = () if stranger else world.told
        nonce = owner.asked_to_take if repeats else f"n{world.takes + 1}"
        reply, stored = self.store.resume(world.stored, nonce, len(told))
        if reply[0] != b"ok":
            self._may_be_refused(reply[0].decode(), f"{told} was told, the log is shorter")
            return
        if stored.owner[1] != nonce:
            raise Broken(f"{nonce} has taken it, its owner is {stored.owner}")
        number = owner.number if stored == world.stored else world.owned + 1
        takes = world.takes + (not repeats)
        world = self._wrote(world, stored, takes=takes, owned=max(number, world.owned))
        if not repeats and not stranger:
            waiting = replace(owner, asked_to_take=nonce, fence=None, waits_for=0, number=number)
            yield world.with_owner(who, waiting)
        try:
            tokens_hash = chain_hash(0, told) if self.compares_tokens else None
            check_told(stored.tokens, Told(len(told), 0, tokens_hash))
        except DataLoss as error:
            self._may_be_refused("other tokens", str(error))
            yield world.with_owner(who, Owner())
            return
        if stored.tokens[: len(told)] != told:
            raise Broken(f"a client of {told} was taken to {stored.tokens}")
        taken = Owner(stored.owner, stored.tokens, len(stored.tokens), number=number)
        if stranger:
            yield world.with_owner(who, taken)
        else:
            yield world.with_owner(who, taken, reads=nonce, told=stored.tokens)

    def _may_be_refused(self, why: str, what: str) -> None:
        """A client may be refused only where the store has forgotten something."""
        self.refused.add(why)
        if not self.scope.failover:
            raise Broken(f"a takeover was refused: {what}")

    def _deliver(self, world: World, message: Message) -> Iterator[World]:
        """The commit arrives; its answer arrives or is lost."""
        reply, stored = self.store.commit(world.stored, message.fence, message.start, message.log)
        if stored != world.stored and message.fence != world.stored.owner:
            raise Broken(f"stale write: {message} changed what {world.stored.owner} owns")
        if not stored.tokens[: len(world.stored.tokens)] == world.stored.tokens:
            raise Broken(f"{message} altered {world.stored.tokens} to {stored.tokens}")
        world = self._wrote(world, stored)
        yield world
        if world.owners[message.sender].waits_for == message.serial:
            yield self._answered(world, message, reply)

    def _answered(self, world: World, message: Message, reply: list[Any]) -> World:
        owner = world.owners[message.sender]
        if reply[0] != b"ok":
            self.refused.add(b"/".join(reply[:2]).decode())
            # It ends, with all that it has not told; its client, if it reads there, comes back.
            return world.with_owner(message.sender, Owner())
        durable = len(message.log)
        if reply[1] < durable + len(PROMPT):
            raise Broken(f"{message} was acknowledged, and only {reply[1]} is durable")
        owner = replace(owner, waits_for=0, durable=max(owner.durable, durable))
        told = world.told
        if owner.fence == message.fence and message.fence[1] == world.reads:
            told = owner.log[: owner.durable]
            if told[: len(world.told)] != world.told:
                raise Broken(f"a client of {world.told} was told {told}")
            if not self.scope.failover and world.stored.tokens[: len(told)] != told:
                raise Broken(f"{told} was told, the log has {world.stored.tokens}")
        return world.with_owner(message.sender, owner, told=told)

    def _wrote(self, world: World, stored: Stored, **changes: Any) -> World:
        before = world.before
        if stored != world.stored:
            self._check(stored)
            before = world.stored if self.scope.failover else None
        return replace(world, stored=stored, before=before, **changes)

    def _check(self, stored: Stored) -> None:
        """What holds of every state of the store."""
        fields, tokens = stored.meta, stored.tokens
        whole = (*PROMPT, *tokens)
        if int(fields["len"]) != len(whole) or len(stored.notes) != len(tokens):
            raise Broken(f"{fields['len']} tokens by count, {whole} in the log")
        if fields["hash"] != str(chain_hash(0, whole)):
            raise Broken(f"{whole} has another hash")
        places = [token % 1000 for token in tokens]
        makers = [token // 1000 for token in tokens]
        if places != list(range(len(tokens))):
            raise Broken(f"a token is lost or doubled: {tokens}")
        if makers != sorted(makers):
            raise Broken(f"an owner went on after its successor: {tokens}")
