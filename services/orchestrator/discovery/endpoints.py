"""Where workers can be reached, as discovery sees it."""

import asyncio
import enum
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol


class Standing(enum.Enum):
    """What may be asked of a worker at an endpoint."""

    READY = "ready"
    """It takes new sessions."""
    RESTING = "resting"
    """It takes none; those that it has may stay: it is not ready, or nobody names it any more."""
    LEAVING = "leaving"
    """It is about to go, and its sessions had better."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A worker's address ("host:port" or "unix:/path") and zone ("": unknown)."""

    address: str
    zone: str = ""
    standing: Standing = Standing.READY


Endpoints = tuple[Endpoint, ...]


class Source(Protocol):
    """Tells the endpoints of a tier, or of a part of it."""

    name: str
    """For logs: what it was made from."""
    is_static: bool
    """What it tells is all that there is, and never changes."""

    def watch(self) -> AsyncGenerator[Endpoints, None]:
        """All endpoints, again whenever they change, for as long as it is iterated.

        What goes wrong meanwhile is its own matter: the last known endpoints hold until it knows
        better.
        """


class StaticSource:
    """One address that somebody wrote down."""

    is_static = True

    def __init__(self, address: str) -> None:
        self.name = address

    async def watch(self) -> AsyncGenerator[Endpoints, None]:
        yield (Endpoint(self.name),)
        await asyncio.Event().wait()
