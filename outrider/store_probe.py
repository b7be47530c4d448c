"""A Redis looked at by one of its users: what it may do there, and whether the store can be trusted
with what it is told.

Rights are found out by trying each command, on a key of the probe's own that is gone afterwards: a
user may not ask for its rights, as a rule. Redis looks at rights before it looks at types, so that
most of the tries end with WRONGTYPE and write nothing.
"""

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import Any

import redis.exceptions as redis_errors
from redis.asyncio import Redis

from outrider.trips import Reading, clock_of, measure, unix_us
from outrider.v1 import facts_pb2

SESSION_RIGHTS = (
    "+ping +eval +evalsha +time +exists +pexpireat +pttl +unlink "
    "+hget +hmget +hgetall +hexists +hset +hdel +hincrby +strlen +getrange +append "
    "+zadd +zrem +zcard +zscore +zrange +zrevrange +zremrangebyscore +info"
)
"""What a user of the session store needs, on keys ~outrider:*; +info is for `outrider doctor`."""

_KEY_MS = 10_000
_CLOCK_READINGS = 5
_TRIPS_S = 2.0

_TRIES: dict[str, tuple[str | int, ...]] = {
    # These two make the key; what follows meets another type than its own.
    "hset": ("HSET", "KEY", "field", 1),
    "set": ("SET", "KEY", "", "PX", _KEY_MS),
    "pexpire": ("PEXPIRE", "KEY", _KEY_MS),
    "pexpireat": ("PEXPIREAT", "KEY", "UNTIL"),
    "ping": ("PING",),
    "info": ("INFO", "server"),
    "time": ("TIME",),
    "eval": ("EVAL", "return 1", 0),
    "evalsha": ("EVALSHA", "0" * 40, 0),
    "scan": ("SCAN", 0, "MATCH", "KEY", "COUNT", 1),
    "exists": ("EXISTS", "KEY"),
    "pttl": ("PTTL", "KEY"),
    "mget": ("MGET", "KEY"),
    "strlen": ("STRLEN", "KEY"),
    "getrange": ("GETRANGE", "KEY", 0, 0),
    "append": ("APPEND", "KEY", ""),
    "hget": ("HGET", "KEY", "field"),
    "hmget": ("HMGET", "KEY", "field"),
    "hgetall": ("HGETALL", "KEY"),
    "hexists": ("HEXISTS", "KEY", "field"),
    "hincrby": ("HINCRBY", "KEY", "field", 1),
    "hdel": ("HDEL", "KEY", "other"),
    "zadd": ("ZADD", "KEY", 1, "member"),
    "zrem": ("ZREM", "KEY", "member"),
    "zcard": ("ZCARD", "KEY"),
    "zscore": ("ZSCORE", "KEY", "member"),
    "zrange": ("ZRANGE", "KEY", 0, 0),
    "zrevrange": ("ZREVRANGE", "KEY", 0, 0),
    "zrangebyscore": ("ZRANGEBYSCORE", "KEY", 0, 0),
    "zremrangebyscore": ("ZREMRANGEBYSCORE", "KEY", 0, 0),
    "zremrangebyrank": ("ZREMRANGEBYRANK", "KEY", 0, 0),
    "unlink": ("UNLINK", "KEY"),
}


async def probe_store(
    redis: "Redis",
    *,
    address: str,
    rights: str,
    prefix: str,
    samples: int,
    timeout_s: float,
    explain: Callable[[Exception], str],
) -> facts_pb2.StoreFacts:
    """What a store's user finds. `rights` are "+command …", `prefix` that of its keys; `explain`
    makes of an error what may be told, without secrets. Raises nothing that Redis may cause."""
    facts = facts_pb2.StoreFacts(address=address)
    try:
        async with asyncio.timeout(timeout_s):
            await redis.execute_command("PING")  # type: ignore[no-untyped-call]
            await _try_rights(redis, rights, prefix, facts)
            await _read_info(redis, facts)
            await _read_config(redis, facts)
            await _measure(redis, samples, facts)
    except (redis_errors.RedisError, OSError) as error:  # OSError: TimeoutError too
        facts.error = explain(error)
    return facts


def probe_key(prefix: str) -> str:
    """A key of the probe's own, in a cluster always in the same slot."""
    return f"{prefix}{{doctor}}:{secrets.token_hex(8)}"


def commands_of(rights: str) -> tuple[str, ...]:
    """The commands that a text of rights names."""
    return tuple(word.removeprefix("+") for word in rights.split() if word.startswith("+"))


async def _try_rights(
    redis: "Redis", rights: str, prefix: str, facts: facts_pb2.StoreFacts
) -> None:
    wanted = set(commands_of(rights))
    key = probe_key(prefix)
    values: dict[str | int, str | int] = {
        "KEY": key,
        "UNTIL": int(time.time() * 1000) + _KEY_MS,
    }
    for name, command in _TRIES.items():
        if name not in wanted:
            continue
        try:
            await _run(redis, *(values.get(part, part) for part in command))
        except redis_errors.NoPermissionError as error:
            if name == "info":
                continue  # `told` says so.
            if "key" in str(error).lower():
                facts.keys_denied = True
            else:
                facts.missing_commands.append(name)
        except redis_errors.ReadOnlyError:
            facts.role = "replica"
        except redis_errors.ResponseError as error:
            facts.writes_fail |= str(error).startswith("MISCONF")


async def _read_info(redis: "Redis", facts: facts_pb2.StoreFacts) -> None:
    try:
        info: dict[str, Any] = await _run(redis, "INFO")
    except redis_errors.NoPermissionError:
        return
    facts.told = True
    kind = "valkey" if "valkey_version" in info else "redis"
    facts.version = f"{kind} {info.get(f'{kind}_version', '')}".strip()
    facts.role = str(info.get("role", ""))
    facts.max_memory = _count(info, "maxmemory")
    facts.used_memory = _count(info, "used_memory")
    facts.eviction_policy = str(info.get("maxmemory_policy", ""))
    facts.evicted_keys = _count(info, "evicted_keys")
    facts.append_only = bool(_count(info, "aof_enabled"))
    statuses = ("rdb_last_bgsave_status", "aof_last_write_status", "aof_last_bgrewrite_status")
    facts.writes_fail |= any(info.get(name, "ok") != "ok" for name in statuses)


async def _read_config(redis: "Redis", facts: facts_pb2.StoreFacts) -> None:
    """What INFO leaves out, where the user may ask for it. Two settings, none of them a secret."""
    try:
        config: dict[str, str] = {}
        for name in ("appendfsync", "save"):
            config |= await _run(redis, "CONFIG GET", name)
    except redis_errors.ResponseError:  # May not, or a service of a cloud has none.
        return
    if facts.append_only:
        facts.append_fsync = config.get("appendfsync", "")
    if "save" in config:
        facts.snapshots = bool(config["save"])


async def _measure(redis: "Redis", samples: int, facts: facts_pb2.StoreFacts) -> None:
    trips = await measure(lambda: _run(redis, "PING"), samples, within_s=_TRIPS_S)
    facts.round_trips.CopyFrom(trips)
    if "time" in facts.missing_commands:
        return
    readings = []
    try:
        for _ in range(_CLOCK_READINGS):
            sent = unix_us()
            seconds, micros = await _run(redis, "TIME")
            there = int(seconds) * 1_000_000 + int(micros)
            readings.append(Reading(sent, there, there, unix_us()))
    except redis_errors.NoPermissionError:
        return  # A KV store's user needs no clock.
    facts.clock.CopyFrom(clock_of(readings))


async def _run(redis: "Redis", *command: str | int) -> Any:
    return await redis.execute_command(*command)  # type: ignore[no-untyped-call]


def _count(info: dict[str, Any], name: str) -> int:
    value = info.get(name, 0)
    return value if isinstance(value, int) and value >= 0 else 0
