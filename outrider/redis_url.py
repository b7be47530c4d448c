"""URLs of Redis: what they may be, and what of them may be shown."""

from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from outrider.errors import InvalidArgument

_SCHEMES = ("redis", "rediss", "unix")


def parse_redis_url(url: str, *, field: str) -> tuple[str, tuple[str, ...]]:
    """The URL without credentials, and the credentials in every spelling they have in it, the
    longest first. Raises InvalidArgument for `field`, without showing the URL."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise url_error("cannot be read", field=field) from None
    if parts.scheme not in _SCHEMES:
        raise url_error("has another scheme", field=field)
    if port == 0:
        raise url_error("has no port", field=field)
    if ":" in host:
        host = f"[{host}]"
    if parts.scheme != "unix":
        host = f"{host or 'localhost'}:{port or 6379}"
    found = [parts.password or "", *parse_qs(parts.query).get("password", ())]
    secrets = {spelling for word in found if word for spelling in (word, unquote(word))}
    address = f"{parts.scheme}://{host if parts.scheme != 'unix' else ''}{parts.path}"
    return address, tuple(sorted(secrets, key=len, reverse=True))


def url_error(fault: str, *, field: str) -> InvalidArgument:
    """What is wrong with a URL, which may hold a password and is not shown."""
    return InvalidArgument(
        f"the Redis URL {fault}; allowed are redis://, rediss:// (TLS) and unix://, as in "
        "redis://user:password@host:6379/0; percent-encode special characters of the password",
        field=field,
    )


def password_in(path: str, *, url: str, field: str) -> str:
    """The password that a file holds for a URL without one; "" where no file is named. Raises
    InvalidArgument for `field`."""
    if not path:
        return ""
    if parse_redis_url(url, field=field)[1]:
        raise InvalidArgument("the Redis URL holds a password already", field=field)
    try:
        password = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise InvalidArgument(f"cannot read {path}: {reason}", field=field) from None
    if not password:
        raise InvalidArgument(f"{path} is empty", field=field)
    return password
