"""Judgement on a report, as checks. Pure but for the time of day."""

from collections.abc import Iterator, Sequence

from outrider.cli import doctor_stores, doctor_workers
from outrider.cli import doctor_ways as ways
from outrider.cli.doctor_look import Front, Report
from outrider.cli.doctor_values import Check, fail, ok, unknown, warn
from outrider.v1 import diagnosis_pb2

_SLOW_MS = 250.0
_FULL_WARN = 0.8
_FILES_WARN = 4096


def judge(report: Report) -> list[Check]:
    """What each part is like, in the order in which it is best read; nothing twice."""
    found: dict[Check, None] = {}
    for front in report.fronts:
        found |= dict.fromkeys(_front(front, report.version))
    found |= dict.fromkeys(_agreement(report.fronts))
    if report.session_store is not None:
        found |= dict.fromkeys(doctor_stores.session_store("redis_url", report.session_store))
    elif not any(front.found for front in report.fronts):
        fix = "give --redis-url to look at it from here"
        found[unknown("store", "session store", "not looked at", fix)] = None
    if report.kv_store is not None:
        sessions = {front.found.store.address for front in report.fronts if front.found}
        if report.session_store is not None:
            sessions.add(report.session_store.address)
        checks = doctor_stores.kv_store("kv_store_url", report.kv_store, frozenset(sessions))
        found |= dict.fromkeys(checks)
    return list(found)


def _front(front: Front, version: str) -> Iterator[Check]:
    subject = f"orchestrator {front.address}"
    if front.certificate is not None:
        yield from ways.certificate(subject, front.certificate)
    if front.error:
        fix = "is it running, and is that its address? with TLS: --ca-file"
        yield fail("orchestrators", subject, front.error, fix)
        return
    if front.serving:
        yield ok("orchestrators", subject, "serving")
    else:
        fix = "it starts or drains; see its log if that does not pass"
        yield fail("orchestrators", subject, "not serving", fix)
    yield from _doors(front, subject)
    fix = "call it from nearer, or put one there"
    yield from ways.trips(f"here to {subject}", front.round_trips, slow_ms=_SLOW_MS, fix=fix)
    if front.found is None:
        fix = "name the caller in its setting admin_callers, or upgrade it"
        what = f"its store and workers are out of sight: {front.why_not}"
        yield unknown("orchestrators", subject, what, fix)
        return
    yield from _inside(front, front.found, subject, version)


def _doors(front: Front, subject: str) -> Iterator[Check]:
    """TLS, and whether callers are asked who they are."""
    near = _is_near(front)
    if front.takes_plaintext:
        yield fail("tls", subject, "it answers without TLS too", "give it tls_cert and tls_key")
    elif front.takes_plaintext is False:
        yield ok("tls", subject, "plaintext is refused")
    elif near:
        yield ok("tls", subject, "off; nobody but its machine reaches it")
    else:
        fix = "give it tls_cert and tls_key (the chart's tls.mode)"
        yield warn("tls", subject, "off: prompts, answers and tokens are in the clear", fix)
    if not front.takes_anyone:
        yield ok("callers", subject, "calls without a token are refused")
    elif near:
        yield ok("callers", subject, "not asked who they are; nobody but its machine reaches it")
    else:
        fix = "set auth_token_file or jwt_keys"
        yield warn("callers", subject, "whoever reaches it may do everything", fix)


def _is_near(front: Front) -> bool:
    """Whether it listens to its own machine only, as far as is known."""
    if front.found is not None:
        return ways.is_local(front.found.listens)
    return front.address.startswith("unix:")


def _inside(
    front: Front, found: diagnosis_pb2.DiagnoseResponse, subject: str, version: str
) -> Iterator[Check]:
    """What the orchestrator itself has found."""
    if found.version == version:
        yield ok("versions", subject, found.version)
    else:
        detail = f"{found.version}; this command is {version}"
        yield warn("versions", subject, detail, "use the command of the same release")
    yield from ways.clock(subject, front.clock, fail_s=found.jwt_leeway_s or ways.CLOCK_FAIL_S)
    yield from _load(found, subject)
    if found.machine.max_open_files < _FILES_WARN:
        detail = f"{found.machine.max_open_files} open files at most: one a connection"
        yield warn("machines", subject, detail, f"raise its limit (ulimit -n) to {_FILES_WARN}")
    else:
        yield ok("machines", subject, f"{found.machine.kernel}, {found.machine.cores} cores")
    yield from doctor_stores.session_store("session store", found.store)
    yield from doctor_workers.checks(found)


def _load(found: diagnosis_pb2.DiagnoseResponse, subject: str) -> Iterator[Check]:
    detail = (
        f"{found.running} of {found.max_running} generations, {found.waiting} requests waiting "
        f"where {found.max_waiting} may"
    )
    if found.max_waiting and found.waiting >= _FULL_WARN * found.max_waiting:
        yield warn("load", subject, detail, "more targets, or more KV for them")
    elif found.running >= _FULL_WARN * found.max_running:
        yield warn("load", subject, detail, "more orchestrators, or a higher max_generations")
    else:
        yield ok("load", subject, detail)


def _agreement(fronts: Sequence[Front]) -> Iterator[Check]:
    """Orchestrators of equal rights share a store, or a session is known to one of them only."""
    stores = {front.found.store.address for front in fronts if front.found}
    if len(stores) > 1:
        detail = f"they use several session stores: {', '.join(sorted(stores))}"
        fix = "give all of them the same store_url, else none can take over another's sessions"
        yield fail("orchestrators", "all", detail, fix)
