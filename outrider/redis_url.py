"""URLs of Redis: what they may be, and what of them may be shown.

One server is redis://, rediss:// (TLS) or unix://, as everywhere. Where a primary may move,
redis+sentinel://HOST,HOST/SERVICE[/DATABASE] names the sentinels that know it, and
redis+cluster://HOST,HOST some nodes of a Redis Cluster; rediss+… is the same over TLS.
"""

from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from outrider.errors import InvalidArgument

SENTINEL, CLUSTER = "sentinel", "cluster"
_ONE_SERVER = ("redis", "rediss", "unix")
_DEFAULT_PORT = {SENTINEL: 26379, CLUSTER: 6379}
_MAX_DATABASE = 1 << 16
_SENTINEL_USER, _SENTINEL_PASSWORD = "sentinel_user", "sentinel_password"


@dataclass(frozen=True, slots=True)
class RedisServers:
    """The servers of a redis+sentinel:// or redis+cluster:// URL.

    `hosts` are sentinels or nodes of a cluster, `service` what sentinels call the primary. Of a
    cluster there is no database but 0. Sentinels have credentials of their own, "" without.
    """

    kind: str
    tls: bool
    hosts: tuple[tuple[str, int], ...]
    service: str = ""
    database: int = 0
    username: str = ""
    password: str = field(default="", repr=False)
    sentinel_username: str = ""
    sentinel_password: str = field(default="", repr=False)


def is_tls(url: str) -> bool:
    """Whether TLS files have a use there."""
    return url.startswith(("rediss://", "rediss+"))


def parse_redis_url(url: str, *, field: str) -> tuple[str, tuple[str, ...]]:
    """The URL of one server without credentials, and the credentials in every spelling they have in
    it, the longest first. Raises InvalidArgument for `field`, without showing the URL."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise url_error("cannot be read", field=field) from None
    if parts.scheme not in _ONE_SERVER:
        raise url_error("has another scheme", field=field)
    if port == 0:
        raise url_error("has no port", field=field)
    if parts.scheme != "unix":
        host = _join(host or "localhost", port or 6379)
    address = f"{parts.scheme}://{host if parts.scheme != 'unix' else ''}{parts.path}"
    return address, _secrets(parts.password, *parse_qs(parts.query).get("password", ()))


def parse_store_url(url: str, *, field: str) -> tuple[str, tuple[str, ...], RedisServers | None]:
    """Likewise for any URL, and the servers where it names several; None: it is one server's."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise url_error("cannot be read", field=field, several=True) from None
    base, _, kind = parts.scheme.partition("+")
    if base not in ("redis", "rediss") or kind not in (SENTINEL, CLUSTER):
        if kind or parts.scheme not in _ONE_SERVER:
            raise url_error("has another scheme", field=field, several=True)
        return *parse_redis_url(url, field=field), None
    servers = _servers(parts, kind, tls=base == "rediss", field=field)
    query = parse_qs(parts.query)
    named = ",".join(_join(*host) for host in servers.hosts)
    path = f"/{servers.service}/{servers.database}" if kind == SENTINEL else ""
    password = parts.netloc.rpartition("@")[0].partition(":")[2]
    secrets = _secrets(password, servers.password, *query.get(_SENTINEL_PASSWORD, ()))
    return f"{parts.scheme}://{named}{path}", secrets, servers


def url_error(fault: str, *, field: str, several: bool = False) -> InvalidArgument:
    """What is wrong with a URL, which may hold a password and is not shown. `several`: those of
    sentinels and clusters are allowed too."""
    more = (
        "; redis+sentinel://user:password@sentinel:26379,other:26379/SERVICE/0 or "
        "redis+cluster://user:password@node:6379,other:6379 for several servers, rediss+… with TLS"
    )
    return InvalidArgument(
        f"the Redis URL {fault}; allowed are redis://, rediss:// (TLS) and unix://, as in "
        f"redis://user:password@host:6379/0{more if several else ''}; percent-encode special "
        "characters of the password",
        field=field,
    )


def password_in(path: str | None, *, held: bool, field: str) -> str:
    """The password that a file holds, for a URL without one (`held`: with one); "" where no file is
    named. Raises InvalidArgument for `field`."""
    if not path:
        return ""
    if held:
        raise InvalidArgument("the Redis URL holds a password already", field=field)
    try:
        password = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise InvalidArgument(f"cannot read {path}: {reason}", field=field) from None
    if not password:
        raise InvalidArgument(f"{path} is empty", field=field)
    return password


def _servers(parts: SplitResult, kind: str, *, tls: bool, field: str) -> RedisServers:
    def refuse(fault: str) -> InvalidArgument:
        return url_error(fault, field=field, several=True)

    credentials, _, names = parts.netloc.rpartition("@")
    username, _, password = credentials.partition(":")
    hosts = tuple(_host(name, _DEFAULT_PORT[kind], refuse("cannot be read")) for name in
                  names.split(","))  # fmt: skip
    service, _, database = parts.path.strip("/").partition("/")
    if kind == CLUSTER:
        service, database = "", service
        if database not in ("", "0"):
            raise refuse("names a database, of which a cluster has none but 0")
    elif not service:
        raise refuse("names no service, as the sentinels call the primary")
    if database and not (database.isdecimal() and int(database) <= _MAX_DATABASE):
        raise refuse("names no number of a database")
    query = parse_qs(parts.query, keep_blank_values=True)
    known = (_SENTINEL_USER, _SENTINEL_PASSWORD) if kind == SENTINEL else ()
    if any(name not in known or len(values) > 1 for name, values in query.items()):
        raise refuse(f"has other options than {', '.join(known) or 'none'}")
    return RedisServers(
        kind=kind,
        tls=tls,
        hosts=hosts,
        service=unquote(service),
        database=int(database or 0),
        username=unquote(username),
        password=unquote(password),
        sentinel_username=query.get(_SENTINEL_USER, [""])[0],
        sentinel_password=query.get(_SENTINEL_PASSWORD, [""])[0],
    )


def _host(name: str, default_port: int, fault: InvalidArgument) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{name}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise fault from None
    if not host or port == 0 or parts.path or parts.username is not None:
        raise fault
    return host, port or default_port


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _secrets(*words: str | None) -> tuple[str, ...]:
    found = {spelling for word in words if word for spelling in (word, unquote(word))}
    return tuple(sorted(found, key=len, reverse=True))
