"""How to get into the store of KV blocks: settings of whoever is told of it."""

from dataclasses import dataclass

from outrider.config import setting
from outrider.kv_store.connection import StoreAddress
from outrider.redis_url import parse_redis_url, password_in


@dataclass(frozen=True)
class KvStoreAccess:
    """Where the store is, and what opens it."""

    kv_store_url: str = setting(
        "",
        help="where KV blocks are kept for other workers: redis://, rediss:// or unix://; best a "
        "Redis of their own with maxmemory and allkeys-lru. Empty: nowhere",
        secret=True,
    )
    kv_store_password_file: str = setting(
        "", help="file with that store's password, where its URL holds none"
    )
    kv_store_ca: str = setting("", help="PEM CA of that store's certificate")
    kv_store_cert: str = setting("", help="PEM client certificate for it")
    kv_store_key: str = setting("", help="PEM key of that certificate")

    def kv_store_at(self, timeout_s: float = 2.0) -> StoreAddress | None:
        """The store; None where none is named. Raises InvalidArgument."""
        if not self.kv_store_url:
            return None
        _, secrets = parse_redis_url(self.kv_store_url, field="kv_store_url")
        return StoreAddress(
            self.kv_store_url,
            self.kv_store_ca,
            self.kv_store_cert,
            self.kv_store_key,
            timeout_s,
            password_in(
                self.kv_store_password_file, held=bool(secrets), field="kv_store_password_file"
            ),
        )
