"""Removing a caller's blocks, and the index of them, before they expire.

Blocks belong to a caller, not to a session: others of the caller's sessions may begin with the same
tokens. So the end of a session leaves them; they expire, or are removed here, all of a caller's.
"""

from collections.abc import Iterable, Iterator

from redis import Redis

from outrider.kv_store.index import index_salt
from outrider.kv_store.names import caller_digest

_AT_ONCE = 512


def purge_tenant(client: Redis, tenant: str, models: Iterable[tuple[str, str]] = ()) -> int:
    """Remove all blocks of `tenant`, of every model; how many there were. With them goes what the
    index has of these models, each a fingerprint and an adapter.

    Goes through all keys of the store in small steps: for the few times when it must be now.
    Workers that write at the same time may leave some. Raises what the client raises.
    """
    removed = 0
    for batch in _batches(client, f"outrider:kv:block:*:{caller_digest(tenant)}:*"):
        removed += int(client.unlink(*batch))
    for fingerprint, adapter in models:
        salt = index_salt(fingerprint, adapter, tenant)
        for batch in _batches(client, f"outrider:kv:index:{salt}:*"):
            client.unlink(*batch)
    return removed


def _batches(client: Redis, pattern: str) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    for key in client.scan_iter(match=pattern, count=_AT_ONCE):
        batch.append(key)
        if len(batch) == _AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch
