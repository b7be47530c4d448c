"""When a peer that is known to talk has said nothing for so long that it is taken as lost.

A host that is cut off, or a process that is stopped, ends no connection: without this only gRPC's
keepalive would notice, after half a minute.
"""

import asyncio

SILENT_S = 2.0
"""Eight words of a worker that tells how it is doing four times a second."""
_TURN_S = 0.25


class Silence:
    """Say `heard` at each word of the peer; `lasts` returns once none has come for too long.

    Time counts in turns of one's own event loop. One that stood still, because its process was
    stopped say, has heard nothing either and accuses nobody: after it has read what is there.
    """

    def __init__(self, limit_s: float = SILENT_S, *, turn_s: float = _TURN_S) -> None:
        self.limit_s = limit_s
        self._turn_s = turn_s
        self._heard = False

    def heard(self) -> None:
        self._heard = True

    async def lasts(self) -> None:
        """Return when the peer has been silent for `limit_s` from now on."""
        silent_s = 0.0
        while silent_s < self.limit_s:
            self._heard = False
            await asyncio.sleep(self._turn_s)
            silent_s = 0.0 if self._heard else silent_s + self._turn_s
