"""Callers as keys name them; for who has no use of blocks, and no numpy."""

import hashlib


def caller_digest(tenant: str) -> str:
    """A tenant's part of the keys of its blocks."""
    return hashlib.blake2b(tenant.encode(), digest_size=8).hexdigest()
