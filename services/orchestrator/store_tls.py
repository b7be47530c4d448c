"""TLS to the session store with certificates that may be renewed."""

import logging

from redis.asyncio import SSLConnection

logger = logging.getLogger(__name__)


class RenewedSslConnection(SSLConnection):
    """Reads its certificates again whenever it connects; one that stands keeps standing. Files that
    cannot be used leave what it read before in force."""

    async def connect(self) -> None:
        if not self.is_connected:
            self._read_again()
        await super().connect()  # type: ignore[no-untyped-call]

    def _read_again(self) -> None:
        known = self.ssl_context.context
        self.ssl_context.context = None
        try:
            self.ssl_context.get()
        except OSError as error:  # Missing files; of OpenSSL, too.
            if known is None:
                raise
            logger.error(
                "the store's certificates cannot be used; those from before stay in force",
                extra={"why": error.strerror or type(error).__name__},
            )
            self.ssl_context.context = known
