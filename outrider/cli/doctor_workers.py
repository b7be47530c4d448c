"""Checks of the workers of one orchestrator: there, alike, fitting together, near, with room."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from outrider.cli import doctor_stores
from outrider.cli import doctor_ways as ways
from outrider.cli.doctor_values import Check, fail, ok, unknown, warn
from outrider.remote.protocol import devices_of
from outrider.v1 import diagnosis_pb2, worker_pb2

Worker = diagnosis_pb2.WorkerFacts

_SLOW_MS = 20.0
_SLOW_DRAFT_MS = 10.0
_KV_WARN = 0.1
_QUEUE_WARN_S = 1.0
_FILES_WARN = 1024
_GROUP_SHM = 1 << 30


def checks(found: diagnosis_pb2.DiagnoseResponse) -> Iterator[Check]:
    """All of them, those of whole tiers first."""
    workers = tuple(found.workers)
    yield from _tiers(workers)
    yield from _fingerprints(workers)
    yield from _devices(workers)
    yield from _drivers(workers)
    for worker in workers:
        yield from _worker(worker, found)


def name_of(worker: Worker) -> str:
    return f"{worker.tier} {worker.address}"


def _usable(workers: Iterable[Worker], tier: str) -> list[Worker]:
    return [w for w in workers if w.tier == tier and w.up and not w.trouble]


def _tiers(workers: tuple[Worker, ...]) -> Iterator[Check]:
    if not _usable(workers, "target"):
        fix = "start one, or see the checks of each; `targets` says where they are looked for"
        yield fail("workers", "targets", "no target can be used: nothing is served", fix)
    if not any(worker.tier == "draft" for worker in workers):
        fix = "start drafts, and name them in `drafts`, unless n-gram guesses are all you want"
        yield warn("workers", "drafts", "none is known: answers are right, and slower", fix)
    elif not _usable(workers, "draft"):
        fix = "see the checks of each"
        yield fail("workers", "drafts", "none can be used: answers are right, and slower", fix)


def _fingerprints(workers: tuple[Worker, ...]) -> Iterator[Check]:
    """Targets of a model are the same; each draft has the tokenizer of a target."""
    targets = [w for w in workers if w.tier == "target" and w.up]
    models: dict[str, Counter[str]] = defaultdict(Counter)
    for target in targets:
        models[target.info.model][target.info.model_fingerprint] += 1
    for model, prints in models.items():
        if len(prints) > 1:
            counts = ", ".join(f"{n} have {_short(found)}" for found, n in prints.items())
            fix = "serve the same files everywhere; during an upgrade it passes by itself"
            yield fail("fingerprints", f"targets of {model}", f"they differ: {counts}", fix)
        else:
            (found,) = prints
            detail = f"{prints[found]} of {_short(found)}"
            yield ok("fingerprints", f"targets of {model}", detail)
    tokenizers = {target.info.tokenizer_fingerprint for target in targets}
    for draft in (w for w in workers if w.tier == "draft" and w.up):
        subject, own = name_of(draft), draft.info.tokenizer_fingerprint
        if not tokenizers:
            yield unknown("fingerprints", subject, "no target to compare with", "start a target")
        elif own not in tokenizers:
            others = ", ".join(map(_short, sorted(tokenizers)))
            detail = f"the tokenizer of {draft.info.model} is {_short(own)}, of targets {others}"
            fix = "serve a draft that shares the target's tokenizer (`outrider plan` compares)"
            yield fail("fingerprints", subject, detail, fix)
        else:
            yield ok("fingerprints", subject, f"{draft.info.model} shares the target's tokenizer")


def _devices(workers: tuple[Worker, ...]) -> Iterator[Check]:
    """Who computes at whose cost."""
    sharing: dict[str, list[Worker]] = defaultdict(list)
    for worker in workers:
        for device in devices_of(worker.info) if worker.up else ():
            sharing[device].append(worker)
    for device, those in sharing.items():
        if len(those) < 2:
            continue
        names, kind = ", ".join(map(name_of, those)), those[0].info.device
        if kind.startswith("cpu"):
            yield ok("devices", device, f"{names} share the cores of a machine: for trials")
        else:
            fix = "give each a device of its own, or see that both fit (docs/performance.md)"
            yield warn("devices", device, f"{names} compute on one {kind}", fix)


def _drivers(workers: tuple[Worker, ...]) -> Iterator[Check]:
    """Bits of a session's tokens may depend on them, where it moves."""
    for tier in ("target", "draft"):
        machines = [w.probe.machine for w in workers if w.tier == tier and w.HasField("probe")]
        for what, values in (
            ("accelerators", {m.accelerator for m in machines}),
            ("drivers", {m.driver for m in machines if m.driver}),
            ("versions of torch", {m.torch for m in machines}),
        ):
            if len(values) > 1:
                detail = f"{what} differ: {', '.join(sorted(v or 'none' for v in values))}"
                fix = "make them alike; else a session that moves may differ at near-ties"
                yield warn("machines", f"{tier}s", detail, fix)


def _worker(worker: Worker, found: diagnosis_pb2.DiagnoseResponse) -> Iterator[Check]:
    subject = name_of(worker)
    if worker.HasField("certificate"):
        yield from ways.certificate(subject, worker.certificate)
    elif not ways.is_local(worker.address):
        fix = "give workers certificates (tls_cert) and the orchestrator their CA (worker_ca)"
        yield warn("tls", subject, "tokens travel in the clear", fix)
    if worker.trouble or not worker.up:
        yield fail("workers", subject, worker.trouble or "it is away", _cure(worker.trouble))
    if not worker.up:
        return
    yield from _versions(subject, worker.info, found)
    yield from _doors(subject, worker)
    fix = "every round pays for it: same zone, no proxy between"
    yield from ways.trips(
        f"orchestrator to {subject}", worker.round_trips, slow_ms=_SLOW_MS, fix=fix
    )
    yield from ways.clock(
        subject,
        worker.clock if worker.HasField("clock") else None,
        fail_s=ways.CLOCK_FAIL_S,
    )
    yield from _room(subject, worker)
    if worker.probe_error:
        detail = f"it tells nothing of itself ({worker.probe_error})"
        yield unknown("machines", subject, detail, "upgrade it; see its log")
        return
    yield from _machine(subject, worker)
    yield from _ways_to_drafts(subject, worker, found)
    if worker.probe.HasField("kv_store"):
        sessions = frozenset({found.store.address})
        name = f"KV store of {subject}"
        yield from doctor_stores.kv_store(name, worker.probe.kv_store, sessions)


def _versions(
    subject: str, info: worker_pb2.InfoResponse, found: diagnosis_pb2.DiagnoseResponse
) -> Iterator[Check]:
    detail = f"{info.version or 'unknown'}, protocol {info.protocol_min} to {info.protocol_max}"
    unheard = set(info.capabilities) - set(found.known_capabilities)
    if info.protocol_min > found.protocol_max or info.protocol_max < found.protocol_min:
        detail += f"; the orchestrator speaks {found.protocol_min} to {found.protocol_max}"
        yield fail("versions", subject, detail, "upgrade the older one of the two")
    elif info.version != found.version:
        detail += f"; the orchestrator is {found.version}"
        yield warn("versions", subject, detail, "finish the upgrade; they work together meanwhile")
    elif unheard:
        names = ", ".join(sorted(unheard))
        detail += f"; it offers what the orchestrator does not know: {names}"
        yield warn("versions", subject, detail, "upgrade the orchestrator")
    else:
        yield ok("versions", subject, detail)


def _doors(subject: str, worker: Worker) -> Iterator[Check]:
    """Whom it lets in."""
    if worker.HasField("takes_plaintext") and worker.takes_plaintext:
        yield fail("tls", subject, "it answers without TLS too", "give it tls_cert and tls_key")
    if not worker.HasField("takes_anyone"):
        return
    if worker.takes_anyone:
        fix = "set tls_client_ca or auth_token_file there"
        yield fail("callers", subject, "it answers callers without certificate and token", fix)
    else:
        yield ok("callers", subject, "strangers are refused")


def _room(subject: str, worker: Worker) -> Iterator[Check]:
    """Whether KV or a queue is near its end."""
    if not worker.HasField("vitals"):
        fix = "see its log; a release before Watch cannot tell"
        yield unknown("load", subject, "it does not tell how it is doing", fix)
        return
    vitals, info = worker.vitals, worker.info
    if vitals.draining or worker.standing != "ready":
        state = "draining" if vitals.draining else worker.standing
        fix = "nothing, if that is meant; else see its readiness"
        yield warn("load", subject, f"it takes no new sessions ({state})", fix)
        return
    free = vitals.kv_blocks_free / info.kv_blocks_total if info.kv_blocks_total else 1.0
    detail = f"{vitals.sessions} sessions, {vitals.running} under way, {free:.0%} of KV free"
    fix = "more replicas, more kv_memory, or a shorter context_length"
    if vitals.queue_us > _QUEUE_WARN_S * 1e6:
        detail += f"; work has waited {vitals.queue_us / 1e6:.1f} s for KV"
        yield warn("load", subject, detail, fix)
    elif free < _KV_WARN:
        yield warn("load", subject, detail, fix)
    else:
        yield ok("load", subject, detail)


def _machine(subject: str, worker: Worker) -> Iterator[Check]:
    machine = worker.probe.machine
    parts = [machine.kernel, f"{machine.cores} cores"]
    if machine.accelerator:
        parts.append(f"{machine.accelerator}, driver {machine.driver or 'unknown'}")
    detail = ", ".join(parts)
    small = 0 < machine.shared_memory_bytes < _GROUP_SHM
    if worker.info.tensor_parallel > 1 and small:
        detail += f"; /dev/shm has {machine.shared_memory_bytes >> 20} MiB"
        yield warn("machines", subject, detail, "mount 1 GiB or more: ranks meet there")
    elif machine.max_open_files < _FILES_WARN:
        detail += f"; {machine.max_open_files} open files at most"
        yield warn("machines", subject, detail, f"raise its limit (ulimit -n) to {_FILES_WARN}")
    else:
        yield ok("machines", subject, detail)


def _ways_to_drafts(
    subject: str, worker: Worker, found: diagnosis_pb2.DiagnoseResponse
) -> Iterator[Check]:
    if "drafts" not in worker.info.capabilities or found.drafting != "direct":
        return
    told = {draft.address for draft in worker.probe.drafts}
    for draft in _usable(found.workers, "draft"):
        if draft.address not in told:
            detail = "it has not said how far that draft is"
            yield unknown("round trips", f"{subject} to {name_of(draft)}", detail, "upgrade it")
    for way in worker.probe.drafts:
        between = f"{subject} to draft {way.address}"
        if way.error:
            fix = (
                "let targets reach drafts (network policy, draft_ca, draft_token_file), or set "
                "drafting=relayed"
            )
            yield fail("round trips", between, way.error, fix)
        else:
            fix = "each round that nothing hides pays for it: same zone, or the same host"
            yield from ways.trips(between, way.round_trips, slow_ms=_SLOW_DRAFT_MS, fix=fix)


def _short(fingerprint: str) -> str:
    """Enough of it to tell it from others; the end says how weights are quantised."""
    head, plus, scheme = fingerprint.partition("+")
    return head[:12] + plus + scheme


def _cure(trouble: str) -> str:
    if "does not answer" in trouble:
        return "is it running, and reachable from the orchestrator (network policy, TLS)? its log"
    if "tokenizer" in trouble:
        return "serve a draft that shares the target's tokenizer"
    if "fingerprint" in trouble:
        return "serve the same files at every target of that name"
    if "protocol" in trouble or "capabilities" in trouble:
        return "upgrade the older one of the two"
    return "see the orchestrator's log; check worker_ca, worker_cert and worker_token_file"
