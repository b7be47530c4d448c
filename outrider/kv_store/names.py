"""How a caller is named in keys. Without numpy, which orchestrators do not have."""

import hashlib


def caller_digest(tenant: str) -> str:
    """A tenant as keys of blocks name it."""
    return hashlib.blake2b(tenant.encode(), digest_size=8).hexdigest()
