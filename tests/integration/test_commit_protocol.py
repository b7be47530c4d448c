"""The commit protocol, exhaustively in small scopes: no double commit, no gap, no stale write."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

import services.orchestrator.store
from commit_explorer import Explorer, Scope
from explored_store import Broken
from store_servers import running_server

SCRIPT = Path(services.orchestrator.store.__file__).with_name("session.lua").read_text()


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    with running_server("valkey", tmp_path_factory.mktemp("redis")) as server:
        with Redis.from_url(server.url) as client:
            yield client


SCOPES = [Scope(sends=3, takes=2), Scope(sends=2, takes=2, failover=True, strangers=True)]
LARGE = [
    Scope(sends=4, takes=2),
    Scope(sends=3, takes=3),
    Scope(sends=3, takes=2, failover=True),
    Scope(sends=3, takes=2, strangers=True),
]


@pytest.mark.parametrize(
    "scope", [*SCOPES, *(pytest.param(s, marks=pytest.mark.exactness) for s in LARGE)], ids=str
)
def test_no_interleaving_loses_doubles_or_alters_a_token(redis: Redis, scope: Scope) -> None:
    explorer = Explorer(redis, SCRIPT, scope)
    states = explorer.explore()
    calls = explorer.store.calls
    print(f"{states} states, {calls} of the store, refusals: {sorted(explorer.refused)}")
    assert states > 1000
    assert "fenced/owner" in explorer.refused
    if scope.failover:  # A store that forgets is noticed, by its owner and by its reader.
        assert {"fenced/gap", "lost"} <= explorer.refused
    if scope.failover and scope.strangers:
        assert "other tokens" in explorer.refused


FAULTS = {
    "any epoch may write": (
        "field[1] ~= ARGV[2] or field[2] ~= ARGV[3]",
        "field[2] == ARGV[3] .. 'x'",
        SCOPES[0],
    ),
    "an equal epoch is enough": (
        "field[1] ~= ARGV[2] or field[2] ~= ARGV[3]",
        "field[1] ~= ARGV[2]",
        SCOPES[1],
    ),
    "a takeover leaves the epoch and nonce": (
        "    own(nonce, owner)\n    redis.call('HSET', meta, 'lease_until', whole(now + lease_ms), "
        "'running',",
        "    redis.call('HSET', meta, 'lease_until', whole(now + lease_ms), 'running',",
        SCOPES[0],
    ),
    "a gap is filled": ("if from > session.len then", "if false then", SCOPES[1]),
    "known tokens are appended again": (
        "string.sub(bytes, 4 * (session.len - from) + 1)",
        "bytes",
        SCOPES[0],
    ),
    "known notes are appended again": (
        "string.sub(noted, session.width * (session.len - from) + 1)",
        "noted",
        SCOPES[0],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_protocol_is_found(redis: Redis, fault: str) -> None:
    right, wrong, scope = FAULTS[fault]
    assert SCRIPT.count(right) == 1
    with pytest.raises(Broken) as found:
        Explorer(redis, SCRIPT.replace(right, wrong), scope).explore()
    print(found.value)


def test_a_client_that_is_not_asked_for_its_tokens_is_misled(redis: Redis) -> None:
    """After a failover as many tokens may be there as it has, and other ones."""
    with pytest.raises(Broken, match="was taken to"):
        Explorer(redis, SCRIPT, SCOPES[1], compares_tokens=False).explore()
