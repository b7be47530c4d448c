"""Whose tokens and whose KV a worker believes, exhaustively in small scopes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from redis import Redis

import services.orchestrator.store
from belief_explorer import BeliefExplorer
from explored_store import Broken, ExploredStore
from outrider.engine.block_manager import BlockManager
from outrider.engine.sequence import Sequence
from outrider.token_log import TokenLog
from outrider.worker import sessions
from outrider.worker.sessions import SessionTable
from outrider.worker.worker import Worker
from owner_lives import Courses, Life, all_courses
from store_servers import running_server

SCRIPT = Path(services.orchestrator.store.__file__).with_name("session.lua").read_text()
SUCCESSORS = Courses(takes=1, tokens=2)
TWINS = Courses(takes=2, tokens=1)
"""Enough for a replica that lags to give an epoch away again."""
LARGE = [pytest.mark.exactness, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExploredStore]:
    with running_server("valkey", tmp_path_factory.mktemp("redis")) as server:
        with Redis.from_url(server.url) as client:
            yield ExploredStore(client, SCRIPT)


def courses_of(store: ExploredStore, courses: Courses) -> list[tuple[Life, ...]]:
    """Those in which two owners hold the same epoch come first."""
    found = all_courses(store, courses)
    return sorted(found, key=lambda lives: len({life.epoch for life in lives}))


@pytest.mark.parametrize(
    ("courses", "most"),
    [
        (SUCCESSORS, 1),
        (TWINS, 1),
        pytest.param(SUCCESSORS, 3, marks=LARGE),
        pytest.param(TWINS, 7, marks=LARGE),
        pytest.param(Courses(takes=2, tokens=2), 3, marks=LARGE),
    ],
    ids=str,
)
def test_no_order_of_entries_makes_a_worker_believe_another_prefix(
    store: ExploredStore, courses: Courses, most: int
) -> None:
    found = courses_of(store, courses)[:most]
    assert len(found) == most
    assert len({life.epoch for life in found[0]}) == 2
    explorer = BeliefExplorer(courses.tokens)
    states = [explorer.explore(course) for course in found]
    print(f"{states} states, {explorer.asked} events asked of the worker")
    assert min(states) > 500
    assert explorer.carried_out == {"open", "verify", "bulk", "close"}


def no_check(*args: Any) -> None:
    pass


def compares_lengths(log: TokenLog, length: int, prefix_hash: int) -> bool:
    return length <= len(log)


def takes_any_tail(
    log: TokenLog, start: int, token_ids: list[int], base_len: int, base_hash: int
) -> bool:
    if start > len(log) or start + len(token_ids) != base_len:
        return False
    log.cut(start)
    log.append(token_ids)
    return True


check_owner = sessions._check_owner


def ignores_nonces(header: Any, epoch: int, owner_nonce: int) -> None:
    check_owner(header, epoch, header.owner_nonce)


def takes_any_number(table: SessionTable, session: Any, header: Any) -> None:
    session.last_number = header.number


def keeps_by_length(sequence: Sequence, tokens: list[int], num_logits: int) -> int:
    return min(len(sequence.cached), len(tokens) - num_logits)


def keeps_offering(manager: BlockManager, blocks: list[int], start: int) -> int:
    if start // manager.block_tokens < len(blocks):
        manager.truncate(blocks, (start // manager.block_tokens + 1) * manager.block_tokens)
    return start


class Fault(NamedTuple):
    """A worker in which something is done wrongly, and what is found then."""

    where: object
    name: str
    wrong: Callable[..., Any]
    found: str
    courses: Courses = SUCCESSORS


FAULTS = {
    "a base is known by its length": Fault(TokenLog, "matches", compares_lengths, "was taken for"),
    "tokens are not checked": Fault(TokenLog, "replace_tail", takes_any_tail, "was taken for"),
    "any nonce is heard": Fault(sessions, "_check_owner", ignores_nonces, "heard beside", TWINS),
    "any epoch is heard": Fault(sessions, "_check_owner", no_check, "heard after"),
    "any number is heard": Fault(SessionTable, "_number", takes_any_number, "carried out after"),
    "closed epochs are forgotten": Fault(SessionTable, "_remember", no_check, "heard after"),
    "work outlives its owner": Fault(Worker, "_drop_work", no_check, "heard after"),
    "KV stays behind a changed token": Fault(Sequence, "usable_kv", keeps_by_length, " saw "),
    "a cut log is thought to stand": Fault(TokenLog, "stood", TokenLog.__len__, " saw "),
    "offered blocks are written": Fault(BlockManager, "own", keeps_offering, "is offered as"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_worker_that_believes_too_much_is_found(
    store: ExploredStore, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, name, wrong, what, courses = FAULTS[fault]
    monkeypatch.setattr(where, name, wrong)
    with pytest.raises(Broken, match=what) as found:
        BeliefExplorer(courses.tokens).explore(courses_of(store, courses)[0])
    print(found.value)
