"""How gRPC's asyncio server and channels wait for the network; to be said before grpc is imported.

By default a thread of its event engine reads from the socket, hands to the completion queue's
thread, and that one wakes the event loop. Where the completion queue's thread reads by itself a
message and its answer take 0.1 to 0.2 ms less, of which a round has two; CPU time is a tenth less.
The switch is an experiment of gRPC's, which it says it will remove: versions that were not tried
are left as they are.
"""

import os
import re
from importlib import metadata

_VARIABLE = "GRPC_EXPERIMENTS"
_DIRECTLY = "-event_engine_client,-event_engine_listener"
_FIRST, _LAST = (1, 80), (1, 85)


def poll_directly() -> None:
    """Have one thread fewer between network and event loop, unless the environment says how."""
    version = re.match(r"(\d+)\.(\d+)", metadata.version("grpcio"))
    if version and _FIRST <= (int(version[1]), int(version[2])) <= _LAST:
        os.environ.setdefault(_VARIABLE, _DIRECTLY)
