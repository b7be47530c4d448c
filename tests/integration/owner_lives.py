"""Who may own a generation in turn, and on which tokens: every course that the real script allows.

Owners commit what they like of what they have generated, at any time, fenced or not; anybody may
take the generation over at any moment; the store may fall back to what a replica that lags had,
and give an epoch away again.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from explored_store import PROMPT, ExploredStore, Stored


class Life(NamedTuple):
    """An orchestrator as the owner of the generation. A token tells who made it."""

    maker: int
    """Of all owners of a course; its store nonce, too."""
    epoch: int
    """The first owner's is 1."""
    found: tuple[int, ...]
    """What was generated when it came."""

    @property
    def owner_nonce(self) -> int:
        return self.maker + 1

    def own(self, position: int) -> int:
        """The token that it generates at this position of the log."""
        return 1000 * (self.maker + 1) + position

    def tokens(self, length: int) -> tuple[int, ...]:
        """The first so many of the log as it has it: what it found, then what it generates."""
        known = (*PROMPT, *self.found)
        return (*known, *(self.own(place) for place in range(len(known), length)))[:length]


@dataclass(frozen=True)
class Courses:
    """How much may happen."""

    takes: int = 2
    tokens: int = 1
    """That each owner generates."""
    failover: bool = True
    """The store may fall back to a replica that lags by one write."""


class _World(NamedTuple):
    stored: Stored
    before: Stored | None
    lives: tuple[Life, ...]


def all_courses(store: ExploredStore, courses: Courses) -> list[tuple[Life, ...]]:
    """The owners of each course, first to last; every shorter one is the beginning of another."""
    stored = store.begun()
    first_epoch = stored.owner[0]
    start = _World(stored, None, (Life(0, 1, ()),))
    seen, todo = {start}, [start]
    while todo:
        for after in _steps(store, courses, todo.pop(), first_epoch):
            if after not in seen:
                seen.add(after)
                todo.append(after)
    whole = {world.lives for world in seen if len(world.lives) == courses.takes + 1}
    return sorted(whole)


def _steps(
    store: ExploredStore, courses: Courses, world: _World, first_epoch: int
) -> Iterator[_World]:
    for life in world.lives:
        known, fence = len(life.found), (first_epoch + life.epoch - 1, f"n{life.maker}")
        for stop in range(known + 1, known + courses.tokens + 1):
            log = life.tokens(len(PROMPT) + stop)[len(PROMPT) :]
            for start in range(known, stop):
                yield _wrote(courses, world, store.commit(world.stored, fence, start, log)[1])
    if len(world.lives) <= courses.takes:
        maker = len(world.lives)
        reply, stored = store.resume(world.stored, f"n{maker}", 0)
        assert reply[0] == b"ok", reply
        life = Life(maker, stored.owner[0] - first_epoch + 1, stored.tokens)
        yield _wrote(courses, world, stored)._replace(lives=(*world.lives, life))
    if world.before is not None:
        yield world._replace(stored=world.before, before=None)


def _wrote(courses: Courses, world: _World, stored: Stored) -> _World:
    if stored == world.stored:
        return world
    return world._replace(stored=stored, before=world.stored if courses.failover else None)
