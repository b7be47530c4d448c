"""Checks of the stores: that of sessions must keep all, that of KV blocks may drop all."""

from collections.abc import Iterator

from outrider.cli import doctor_ways as ways
from outrider.cli.doctor_values import Check, fail, ok, unknown, warn
from outrider.v1 import facts_pb2

AREA = "store"
_OLDEST = 7
_MEMORY_WARN, _MEMORY_FAIL = 0.8, 0.95
_SLOW_MS = 20.0


def session_store(subject: str, found: facts_pb2.StoreFacts) -> Iterator[Check]:
    """What loses sessions, or keeps them from being written."""
    yield from _common(subject, found, prefix="outrider:*")
    if found.error or not found.told:
        return
    yield from _persistence(subject, found)
    full = f"{found.used_memory / 2**20:.0f} MiB in use"
    if not found.max_memory:
        yield ok(AREA, subject, f"{full}, no limit (maxmemory), so nothing is evicted")
        return
    share = found.used_memory / found.max_memory
    full += f" of {found.max_memory / 2**20:.0f}"
    if found.eviction_policy != "noeviction":
        yield fail(
            AREA,
            subject,
            f"maxmemory-policy {found.eviction_policy}: sessions are lost when it is full",
            "CONFIG SET maxmemory-policy noeviction",
        )
    elif share >= _MEMORY_FAIL:
        yield fail(AREA, subject, f"{full}: writes are about to be refused", _MORE_MEMORY)
    elif share >= _MEMORY_WARN:
        yield warn(AREA, subject, full, _MORE_MEMORY)
    else:
        yield ok(AREA, subject, f"{full}, noeviction")
    if found.evicted_keys:
        yield warn(
            AREA,
            subject,
            f"it has evicted {found.evicted_keys} keys since it started",
            "sessions may have been among them: keep others out of it, policy noeviction",
        )


def kv_store(
    subject: str, found: facts_pb2.StoreFacts, session_addresses: frozenset[str]
) -> Iterator[Check]:
    """What keeps blocks from being kept, or crowds out others."""
    yield from _common(subject, found, prefix="outrider:kv:*")
    if found.error:
        return
    if found.address in session_addresses:
        yield warn(
            AREA,
            subject,
            "KV blocks and sessions are in one Redis",
            "give KV blocks a Redis of their own: full of blocks it must not lose sessions",
        )
    if not found.told:
        return
    if not found.max_memory:
        fix = "set maxmemory, and maxmemory-policy allkeys-lru"
        yield warn(AREA, subject, "no limit (maxmemory): blocks fill its machine", fix)
    elif found.eviction_policy == "noeviction":
        yield warn(
            AREA,
            subject,
            "maxmemory-policy noeviction: full, it takes no new blocks",
            "CONFIG SET maxmemory-policy allkeys-lru",
        )
    else:
        yield ok(AREA, subject, f"maxmemory-policy {found.eviction_policy}")
    if found.read_bytes_per_s:
        yield ok("round trips", subject, f"{found.read_bytes_per_s / 1e6:.0f} MB/s read by a probe")


_MORE_MEMORY = "raise its maxmemory, or shorten session_ttl_s"


def _common(subject: str, found: facts_pb2.StoreFacts, *, prefix: str) -> Iterator[Check]:
    """Reached, allowed, written to, near, and by TLS."""
    if found.HasField("certificate"):
        yield from ways.certificate(subject, found.certificate)
    elif found.address.startswith("redis://") and not _is_near(found.address):
        yield warn(
            "tls",
            subject,
            f"{found.address}: prompts and answers cross the network in the clear",
            "use rediss:// with store_ca",
        )
    if found.error:
        fix = "start it, or correct URL and credentials (store_url, kv_store_url)"
        yield fail(AREA, subject, found.error, fix)
        return
    yield from _rights(subject, found, prefix)
    if found.writes_fail:
        fix = "see its log: disk full, or no right to fork (vm.overcommit_memory=1)"
        yield fail(AREA, subject, "it cannot write to its disk", fix)
    if found.role not in ("master", ""):
        fix = "point the URL at the primary"
        yield fail(AREA, subject, f"it is a {found.role}, which takes no writes", fix)
    if found.version:
        yield from _version(subject, found.version)
    fix = "every chunk waits for a commit: move it nearer, or look at its load (SLOWLOG, LATENCY)"
    yield from ways.trips(f"to the {subject}", found.round_trips, slow_ms=_SLOW_MS, fix=fix)
    if found.HasField("clock"):
        yield from ways.clock(subject, found.clock, fail_s=ways.CLOCK_FAIL_S)


def _rights(subject: str, found: facts_pb2.StoreFacts, prefix: str) -> Iterator[Check]:
    if found.keys_denied:
        yield fail(AREA, subject, f"its user may not use keys {prefix}", f"ACL SETUSER … ~{prefix}")
    if found.missing_commands:
        missing = ", ".join(found.missing_commands)
        grant = " ".join(f"+{name}" for name in found.missing_commands)
        yield fail(AREA, subject, f"its user may not run {missing}", f"ACL SETUSER … {grant}")
    if not found.keys_denied and not found.missing_commands:
        yield ok(AREA, subject, "its user may do all that is needed")
    if not found.told:
        yield unknown(
            AREA,
            subject,
            "its user may not run INFO: memory, eviction and persistence are not known",
            "ACL SETUSER … +info, or give --redis-url with a user who may",
        )


def _persistence(subject: str, found: facts_pb2.StoreFacts) -> Iterator[Check]:
    if found.append_only:
        if found.append_fsync == "no":
            fix = "CONFIG SET appendfsync everysec, or always"
            yield warn(AREA, subject, "appendfsync no: half a minute may be lost", fix)
            return
        how = {
            "always": "each commit is on disk before it is acknowledged",
            "everysec": "its last second may be lost with its machine",
        }.get(found.append_fsync, "how often it is on disk is not told (CONFIG GET appendfsync)")
        yield ok(AREA, subject, f"append-only: {how}")
        return
    if found.snapshots:
        detail = "snapshots only: what came after the last one is lost with it"
    else:
        detail = "no persistence: all sessions are lost when it restarts"
    yield warn(AREA, subject, detail, "appendonly yes, appendfsync always or everysec")


def _version(subject: str, version: str) -> Iterator[Check]:
    number = version.rpartition(" ")[2].partition(".")[0]
    if number.isdigit() and int(number) < _OLDEST:
        yield warn("versions", subject, version, f"Redis {_OLDEST} or newer, or Valkey")
    else:
        yield ok("versions", subject, version)


def _is_near(address: str) -> bool:
    return ways.is_local(address.partition("://")[2])
