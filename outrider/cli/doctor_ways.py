"""Checks that hold for any way from one part to another: trips, clocks, certificates."""

import time
from collections.abc import Iterator

from outrider.cli.doctor_values import Check, fail, ok, unknown, warn
from outrider.v1 import facts_pb2

_CLOCK_WARN_S = 1.0
CLOCK_FAIL_S = 30.0
_DAY_S = 86_400.0
_CERT_WARN_S = 14 * _DAY_S
_CERT_WARN_SHARE = 0.25
"""Renewal is due when a third of its life is left (cert-manager's default); much less means that
nobody renews it."""
_LOCAL = ("127.", "localhost", "[::1]")


def is_local(address: str) -> bool:
    """Whether nobody but this machine can be there."""
    return address.startswith(("unix:", *_LOCAL))


def trips(area_of: str, way: facts_pb2.RoundTrips, *, slow_ms: float, fix: str) -> Iterator[Check]:
    """`area_of` is what the way is from and to."""
    if not way.samples:
        yield unknown("round trips", area_of, "not measured", "see why it does not answer")
        return
    detail = f"p50 {way.p50_us / 1e3:.1f} ms, p99 {way.p99_us / 1e3:.1f} ms of {way.samples}"
    if way.p50_us > slow_ms * 1e3:
        yield warn("round trips", area_of, detail, fix)
    else:
        yield ok("round trips", area_of, detail)


def clock(subject: str, found: facts_pb2.Clock | None, *, fail_s: float) -> Iterator[Check]:
    """Deadlines and leases need no common clock; tokens, certificates, logs and traces do."""
    if found is None:
        yield unknown("clocks", subject, "not told", "see why it tells nothing of itself")
        return
    error_s, ahead_s = found.error_us / 1e6, found.ahead_us / 1e6
    off_s = max(abs(ahead_s) - error_s, 0.0)
    direction = "ahead" if ahead_s > 0 else "behind"
    detail = f"{abs(ahead_s):.3f} s {direction}, give or take {error_s:.3f} s"
    fix = "run NTP (chrony, systemd-timesyncd) on its machine, and on the one it is compared with"
    if off_s > fail_s:
        consequence = "; tokens and certificates are taken for expired, or not yet valid"
        yield fail("clocks", subject, detail + consequence, fix)
    elif off_s > _CLOCK_WARN_S:
        yield warn("clocks", subject, detail + "; logs and traces are out of order", fix)
    elif error_s > _CLOCK_WARN_S:
        yield unknown("clocks", subject, detail, "try again from nearer, or with less load")
    else:
        yield ok("clocks", subject, detail)


def certificate(subject: str, found: facts_pb2.CertificateFacts) -> Iterator[Check]:
    """The one that a server showed, and the client's own."""
    now = time.time()
    if found.error:
        yield fail("tls", subject, f"handshake: {found.error}", _cure(found.error))
    else:
        left_s = found.expires_unix_s - now
        life_s = found.expires_unix_s - found.begins_unix_s
        detail = (
            f"signed by {found.issuer or 'an unnamed CA'} for {', '.join(found.names) or '?'}, "
            f"ends in {_span(left_s)}"
        )
        if left_s < min(_CERT_WARN_S, _CERT_WARN_SHARE * life_s):
            yield warn("tls", subject, detail, "renew it, and see why nobody has (cert-manager?)")
        else:
            yield ok("tls", subject, detail)
    if found.client_expires_unix_s:
        left_s = found.client_expires_unix_s - now
        if left_s <= 0:
            detail = f"the certificate shown to it ended {_span(-left_s)} ago"
            yield fail("tls", subject, detail, "renew the client's certificate")


def _cure(error: str) -> str:
    """What to do about a failed handshake, by OpenSSL's words for it."""
    text = error.lower()
    if "expired" in text:
        return "renew its certificate; running services take up new files by themselves"
    if "not yet valid" in text:
        return "its certificate begins later: compare the clocks"
    if "mismatch" in text or "not valid for" in text:
        return "its certificate needs this name; or set the name to expect (worker_tls_name)"
    if "issuer" in text or "self" in text:
        return "another CA has signed it: give that CA, or renew the certificate"
    return "does it speak TLS at this port? see its log"


def _span(seconds: float) -> str:
    if seconds >= 2 * _DAY_S:
        return f"{seconds / _DAY_S:.0f} days"
    return f"{seconds / 3600:.1f} hours"
