"""The session store at start: it may come after who needs it."""

import asyncio
import logging

from outrider.errors import Unavailable
from services.orchestrator.config import OrchestratorConfig
from services.orchestrator.store import SessionStore

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_TELL_EVERY_S = 10.0

logger = logging.getLogger(__name__)


async def await_store(config: OrchestratorConfig) -> SessionStore:
    """The store, once it answers. Raises Unavailable where it has not in `store_start_timeout_s`,
    and at once what waiting does not mend: credentials, rights, a wrong setting."""
    clock = asyncio.get_running_loop().time
    started = clock()
    pause_s, told = _FIRST_PAUSE_S, -_TELL_EVERY_S
    while True:
        try:
            return await _connect(config)
        except Unavailable as error:
            waited_s = clock() - started
            left_s = config.store_start_timeout_s - waited_s
            if left_s <= 0:
                raise
            if waited_s - told >= _TELL_EVERY_S:
                told = waited_s
                logger.warning(
                    "waiting for the session store",
                    extra={"why": str(error), "left_s": round(left_s, 1)},
                )
        await asyncio.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


async def _connect(config: OrchestratorConfig) -> SessionStore:
    return await SessionStore.connect(
        config.store_url,
        session_ttl_s=config.session_ttl_s,
        linger_s=config.session_linger_s,
        lease_s=config.lease_s,
        resume_s=config.session_resume_s,
        command_timeout_s=config.store_timeout_s,
        password_file=config.store_password_file or None,
        sentinel_password_file=config.store_sentinel_password_file or None,
        ca_file=config.store_ca or None,
        cert_file=config.store_cert or None,
        key_file=config.store_key or None,
    )
