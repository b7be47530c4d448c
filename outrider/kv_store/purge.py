"""Removing a caller's blocks before they expire.

Blocks belong to a caller, not to a session: others of the caller's sessions may begin with the same
tokens. So the end of a session leaves them; they expire, or are removed here, all of a caller's.
"""

from redis import Redis

from outrider.kv_store.blocks import caller_digest

_AT_ONCE = 512


def purge_tenant(client: Redis, tenant: str) -> int:
    """Remove all blocks of `tenant`, of every model; how many there were.

    Goes through all keys of the store in small steps: for the few times when it must be now.
    Workers that write at the same time may leave some. Raises what the client raises.
    """
    pattern = f"outrider:kv:block:*:{caller_digest(tenant)}:*"
    removed = 0
    batch: list[bytes] = []
    for key in client.scan_iter(match=pattern, count=_AT_ONCE):
        batch.append(key)
        if len(batch) == _AT_ONCE:
            removed += int(client.unlink(*batch))
            batch.clear()
    return removed + (int(client.unlink(*batch)) if batch else 0)
