"""Where the KV store is: what may be said of it, and what of its errors."""

import pytest
from redis import exceptions

from outrider.errors import InvalidArgument
from outrider.kv_store.connection import StoreAddress, is_full, is_refusal
from outrider.worker.kv_opening import KvStoreConfig
from services.orchestrator.config import OrchestratorConfig

SECRET = "p%40ss-word"
ADDRESS = StoreAddress(f"redis://kv:{SECRET}@store.example:6380/2")


@pytest.mark.parametrize(
    ("url", "name"),
    [
        (ADDRESS.url, "redis://store.example:6380/2"),
        ("redis://h", "redis://h:6379"),
        ("rediss://:pw@[::1]:1/0", "rediss://[::1]:1/0"),
        ("unix://:pw@/run/kv.sock?db=1", "unix:///run/kv.sock"),
    ],
)
def test_its_name_is_the_url_without_credentials(url, name):
    assert StoreAddress(url).name == name
    assert name in repr(StoreAddress(url)) and "pw@" not in repr(StoreAddress(url))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (exceptions.AuthenticationError("WRONGPASS p@ss-word"), "refuses the credentials"),
        (exceptions.NoPermissionError("no 'set' for p@ss-word"), "grant .*pexpire"),
        (exceptions.MovedError("1 h:1"), "Cluster"),
        (exceptions.ConnectionError(f"cannot reach kv:{SECRET}@store.example"), "cannot reach"),
        (OSError(), "OSError"),
    ],
)
def test_errors_say_what_to_do_and_no_secret(error, said):
    text = ADDRESS.explain(error)
    assert said.split(" .*")[0] in text and said.rsplit(".*")[-1] in text
    assert SECRET not in text and "p@ss-word" not in text


def test_what_passes_by_itself_and_what_does_not():
    assert is_refusal(exceptions.AuthenticationError()) and is_refusal(
        exceptions.NoPermissionError()
    )
    assert not is_refusal(exceptions.ConnectionError()) and not is_refusal(TimeoutError())
    assert is_full(exceptions.OutOfMemoryError()) and not is_full(exceptions.ReadOnlyError())


@pytest.mark.parametrize("of", [KvStoreConfig, OrchestratorConfig])
def test_a_password_may_stand_in_a_file_and_is_never_told(tmp_path, of):
    path = tmp_path / "password"
    path.write_text("hush-hush\n")
    config = of(kv_store_url="redis://kv@h:1", kv_store_password_file=str(path))
    address = config.kv_store
    assert address.connect().connection_pool.connection_kwargs["password"] == "hush-hush"
    assert address.connect().connection_pool.connection_kwargs["username"] == "kv"
    assert "hush" not in repr(address)
    assert "hush" not in address.explain(exceptions.ConnectionError("sent hush-hush to h"))


@pytest.mark.parametrize("of", [KvStoreConfig, OrchestratorConfig])
@pytest.mark.parametrize(
    ("url", "content", "said"),
    [
        ("redis://kv:pw@h", "x", "holds a password already"),
        ("redis://kv@h", "", "is empty"),
        ("redis://kv@h", None, "cannot read"),
    ],
)
def test_a_password_file_that_cannot_be_meant_is_refused_by_name(tmp_path, of, url, content, said):
    path = tmp_path / "password"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InvalidArgument, match=said) as refused:
        _ = of(kv_store_url=url, kv_store_password_file=str(path)).kv_store
    assert refused.value.field == "kv_store_password_file"
