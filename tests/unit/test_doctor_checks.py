"""What `outrider doctor` makes of what it finds: workers with a fault each, stores, ways."""

import contextlib
import time
from types import SimpleNamespace
from typing import Any

import pytest
from test_discovery_sources import until
from worker_fakes import FakeWorker

import outrider
from outrider.cli import doctor_stores, doctor_ways
from outrider.cli.doctor_checks import judge
from outrider.cli.doctor_look import Front, Report
from outrider.cli.doctor_values import Check, Status, exit_status, ok, unknown, warn
from outrider.cli.doctor_view import as_json
from outrider.errors import PermissionDenied
from outrider.kv_store.connection import READER_RIGHTS
from outrider.kv_store.connection import RIGHTS as KV_RIGHTS
from outrider.rpc.auth import Caller, set_caller
from outrider.store_probe import _TRIES, SESSION_RIGHTS, commands_of
from outrider.trips import Reading, clock_of, summary
from outrider.v1 import diagnosis_pb2, facts_pb2
from services.orchestrator.config import OrchestratorConfig
from services.orchestrator.diagnosis import DiagnosisServicer
from services.orchestrator.discovery.endpoints import StaticSource
from services.orchestrator.models import ModelRegistry

GIB = 1 << 30


def good_store(**changes: Any) -> facts_pb2.StoreFacts:
    facts = facts_pb2.StoreFacts(
        address="redis://127.0.0.1:6379",
        version="valkey 9.0.1",
        role="master",
        told=True,
        max_memory=GIB,
        used_memory=GIB // 10,
        eviction_policy="noeviction",
        append_only=True,
        append_fsync="always",
        round_trips=facts_pb2.RoundTrips(samples=5, p50_us=200, p99_us=400),
        clock=facts_pb2.Clock(),
    )
    for name, value in changes.items():
        if isinstance(value, list):
            getattr(facts, name).extend(value)
        else:
            setattr(facts, name, value)
    return facts


def worker(tier: str = "target", **info: Any) -> FakeWorker:
    """One that is well: of this release, with room."""
    capabilities = ["chain", "drafts"] if tier == "target" else ["chain"]
    told = {"version": outrider.__version__, "capabilities": capabilities, "device": "cpu"}
    made = FakeWorker(tier, **told | info)
    made.tell(kv_blocks_free=90, pass_us=1000)
    return made


@contextlib.asynccontextmanager
async def servicer_of(*workers: FakeWorker, config: OrchestratorConfig | None = None):
    """Of an orchestrator that knows these workers, each of which it has heard of."""
    async with contextlib.AsyncExitStack() as stack:
        for one in workers:
            await stack.enter_async_context(one)
        sources: dict[str, list[Any]] = {"target": [], "draft": []}
        for one in workers:
            sources[one.tier].append(Found(one.address))
        config = config or OrchestratorConfig(targets=("127.0.0.1:1",))
        registry = ModelRegistry(sources["target"], sources["draft"], config.worker_security)
        stack.push_async_callback(registry.close)
        await registry.connect(target_timeout_s=5, draft_timeout_s=5)
        known = [*registry.targets.workers, *registry.drafts.workers]
        await until(
            lambda: all(w.link.refused or ((w.usable or w.misfit) and w.link.vitals) for w in known)
        )
        store: Any = SimpleNamespace(look=_look)
        admission: Any = SimpleNamespace(num_waiting=lambda model: 0, num_running=0)
        made = DiagnosisServicer(config, store, registry, admission, "me")
        made.listens = "127.0.0.1:50051"
        yield made


class Found(StaticSource):
    """Discovered rather than written down: what does not fit keeps nobody from starting."""

    is_static = False


async def _look(samples: int, timeout_s: float) -> facts_pb2.StoreFacts:
    return good_store()


async def diagnose(servicer: DiagnosisServicer, tenant: str = "default") -> Any:
    set_caller(Caller(tenant))
    return await servicer.Diagnose(diagnosis_pb2.DiagnoseRequest(samples=3), Refusing())


class Refusing:
    """A context that raises what a call is refused with."""

    async def abort(self, code: Any, message: str, metadata: Any) -> None:
        raise PermissionDenied(message)


def judged(found: diagnosis_pb2.DiagnoseResponse, **front: Any) -> list[Check]:
    """What is not ok of a front that is well itself."""
    trips = facts_pb2.RoundTrips(samples=3, p50_us=500, p99_us=700)
    values = {"serving": True, "round_trips": trips, "clock": facts_pb2.Clock(error_us=9)} | front
    report = Report([Front("127.0.0.1:50051", False, takes_anyone=True, found=found, **values)])
    busy = ("round trips", Status.WARN)  # This machine, which calls itself.
    return [c for c in judge(report) if c.status is not Status.OK and (c.area, c.status) != busy]


# --- workers ------------------------------------------------------------------------------------


async def test_workers_that_are_well_are_found_to_be():
    async with servicer_of(worker(), worker(), worker("draft")) as servicer:
        found = await diagnose(servicer)
    assert judged(found) == []
    assert [(w.tier, w.up, w.round_trips.samples) for w in found.workers] == [
        ("target", True, 3),
        ("target", True, 3),
        ("draft", True, 3),
    ]
    assert found.workers[0].probe.drafts[0].address == found.workers[2].address


@pytest.mark.parametrize(
    ("ahead_s", "status"),
    [(0.2, None), (-5.0, Status.WARN), (40.0, Status.FAIL), (-3600.0, Status.FAIL)],
)
async def test_a_clock_that_is_off_is_told_by_how_much(ahead_s: float, status: Status | None):
    draft = worker("draft")
    draft.ahead_us = int(ahead_s * 1e6)
    async with servicer_of(worker(), draft) as servicer:
        found = await diagnose(servicer)
    told = judged(found)
    assert [check.status for check in told] == ([status] if status else [])
    for check in told:
        assert (check.area, check.subject) == ("clocks", f"draft {draft.address}")
        assert abs(float(check.detail.split()[0]) - abs(ahead_s)) < 0.5 and "NTP" in check.fix
        assert ("ahead" if ahead_s > 0 else "behind") in check.detail


@pytest.mark.parametrize(
    ("info", "area", "status", "words"),
    [
        ({"version": "0.0.1"}, "versions", Status.WARN, "0.0.1"),
        ({"capabilities": ["chain", "later"]}, "versions", Status.WARN, "later"),
        ({"tokenizer_fingerprint": "t2"}, "fingerprints", Status.FAIL, "tokenizer"),
    ],
)
async def test_a_draft_unlike_the_others_is_named(info, area, status, words):
    other = worker("draft", **info)
    async with servicer_of(worker(), worker("draft"), other) as servicer:
        found = await diagnose(servicer)
    told = {(c.area, c.subject): c for c in judged(found)}
    check = told[area, f"draft {other.address}"]
    assert check.status is status and words in check.detail


async def test_targets_of_other_weights_or_another_protocol_are_named():
    first, other = worker(), worker(model_fingerprint="f2")
    newer = worker(protocol_min=7, protocol_max=8)
    async with servicer_of(first, worker("draft"), other, newer) as servicer:
        found = await diagnose(servicer)
    told = {(c.area, c.subject): c for c in judged(found)}
    assert "1 have f1, 1 have f2" in told["fingerprints", "targets of m"].detail
    # Which of the two was first is the one that is served.
    (misfit,) = told.keys() & {("workers", f"target {w.address}") for w in (first, other)}
    assert "same files" in told[misfit].fix
    assert "speaks protocol 7 to 8" in told["workers", f"target {newer.address}"].detail


async def test_a_worker_that_is_gone_and_an_older_one_are_told_of():
    older, gone = worker("draft"), worker("draft")
    older.probes = False
    async with servicer_of(worker(), older, gone) as servicer:
        await gone.stop()
        await until(lambda: not all(w.link.up for w in servicer._registry.drafts.workers))
        found = await diagnose(servicer)
        await gone.start()  # For its end.
    told = {(c.area, c.subject): c for c in judged(found)}
    assert told["workers", f"draft {gone.address}"].status is Status.FAIL
    assert "does not answer" in told["workers", f"draft {gone.address}"].detail
    assert told["machines", f"draft {older.address}"].status is Status.UNKNOWN
    assert told["clocks", f"draft {older.address}"].status is Status.UNKNOWN
    assert exit_status(judged(found)) == 2


@pytest.mark.parametrize(
    ("vitals", "words"),
    [
        ({"kv_blocks_free": 3}, "3% of KV free"),
        ({"kv_blocks_free": 90, "queue_us": 2_500_000}, "waited 2.5 s"),
        ({"kv_blocks_free": 90, "draining": True}, "draining"),
    ],
)
async def test_kv_and_queues_near_their_end_are_told_of(vitals: dict[str, Any], words: str):
    target = worker()
    target.tell(**vitals)
    async with servicer_of(target, worker(), worker("draft")) as servicer:
        found = await diagnose(servicer)
    (check,) = judged(found)
    assert (check.area, check.status) == ("load", Status.WARN) and words in check.detail


async def test_workers_on_one_gpu_and_drafts_that_are_missing_are_told_of():
    gpu = {"device": "cuda:0", "device_id": "GPU-1"}
    async with servicer_of(worker(**gpu), worker("draft", **gpu)) as servicer:
        (check,) = judged(await diagnose(servicer))
    assert check.area == "devices" and "compute on one cuda:0" in check.detail
    group = {"device": "cuda:0", "device_id": "GPU-0", "other_device_ids": ["GPU-1"]}
    async with servicer_of(worker(**group), worker("draft", **gpu)) as servicer:
        (check,) = judged(await diagnose(servicer))
    assert (check.area, check.subject) == ("devices", "GPU-1")
    async with servicer_of(worker()) as servicer:
        (check,) = judged(await diagnose(servicer))
    assert (check.subject, check.status) == ("drafts", Status.WARN)


async def test_only_those_who_are_named_may_ask_where_callers_are_known(tmp_path):
    (tmp_path / "tokens").write_text("ops:a\napp:b\n")
    config = OrchestratorConfig(
        targets=("127.0.0.1:1",),
        auth_token_file=str(tmp_path / "tokens"),
        admin_callers=("ops",),
    )
    async with servicer_of(worker(), config=config) as servicer:
        assert (await diagnose(servicer, "ops")).workers
        with pytest.raises(PermissionDenied, match="caller app may not"):
            await diagnose(servicer, "app")


# --- what is seen from here ---------------------------------------------------------------------


async def test_what_is_out_of_sight_is_not_counted_as_good():
    front = Front(
        "db.example:1", False, serving=True, takes_anyone=False, why_not="caller x may not"
    )
    checks = judge(Report([front]))
    statuses = {(c.area, c.subject): c.status for c in checks}
    assert statuses["store", "session store"] is Status.UNKNOWN
    assert statuses["round trips", "here to orchestrator db.example:1"] is Status.UNKNOWN
    assert statuses["tls", "orchestrator db.example:1"] is Status.WARN
    assert exit_status(checks) == 1


def test_orchestrators_of_one_deployment_share_a_store():
    stores = [
        diagnosis_pb2.DiagnoseResponse(store=good_store(address=f"redis://{n}:6379"))
        for n in ("127.0.0.1", "127.0.0.2")
    ]
    checks = judge(Report([Front(f"{n}", False, found=found) for n, found in enumerate(stores)]))
    assert any("several session stores" in check.detail for check in checks)


def test_open_doors_are_told_of():
    checks = judged(diagnosis_pb2.DiagnoseResponse(listens="0.0.0.0:50051"), takes_plaintext=True)
    told = {(c.area, c.status): c.detail for c in checks if c.subject.startswith("orchestrator ")}
    assert told["tls", Status.FAIL] == "it answers without TLS too"
    assert "whoever reaches it" in told["callers", Status.WARN]


def test_the_status_of_the_command_is_that_of_its_worst_check():
    fine = ok("a", "b", "c")
    assert exit_status([fine]) == 0
    assert exit_status([fine, unknown("a", "b", "c", "d")]) == 1
    assert exit_status([fine, warn("a", "b", "c", "d")]) == 1
    assert '"exit_status": 1' in as_json([warn("a", "b", "c", "d")])


# --- stores, certificates, ways -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"error": "refuses the credentials"}, Status.FAIL, "credentials"),
        ({"missing_commands": ["evalsha"]}, Status.FAIL, "may not run evalsha"),
        ({"keys_denied": True}, Status.FAIL, "outrider:*"),
        ({"told": False}, Status.UNKNOWN, "INFO"),
        ({"role": "slave"}, Status.FAIL, "takes no writes"),
        ({"version": "redis 6.2.1"}, Status.WARN, "6.2.1"),
        ({"eviction_policy": "allkeys-lru"}, Status.FAIL, "sessions are lost"),
        ({"evicted_keys": 3}, Status.WARN, "evicted 3 keys"),
        ({"used_memory": int(0.85 * GIB)}, Status.WARN, "870 MiB in use of 1024"),
        ({"used_memory": int(0.97 * GIB)}, Status.FAIL, "about to be refused"),
        ({"append_only": False}, Status.WARN, "no persistence"),
        ({"append_only": False, "snapshots": True}, Status.WARN, "snapshots only"),
        ({"append_fsync": "no"}, Status.WARN, "half a minute"),
        ({"writes_fail": True}, Status.FAIL, "cannot write to its disk"),
        ({"address": "redis://db.example:6379"}, Status.WARN, "in the clear"),
    ],
)
def test_a_store_that_loses_or_refuses_something_is_told_of(changes, status, words):
    (check,) = [
        check
        for check in doctor_stores.session_store("store", good_store(**changes))
        if check.status is not Status.OK
    ]
    assert check.status is status and words in check.detail and check.fix


def test_a_good_store_is_good():
    checks = list(doctor_stores.session_store("store", good_store()))
    assert {check.status for check in checks} == {Status.OK}
    assert not any(check.fix for check in checks)


def test_every_right_that_is_needed_is_tried():
    rights = (SESSION_RIGHTS, KV_RIGHTS, READER_RIGHTS)
    assert {command for each in rights for command in commands_of(each)} == set(_TRIES)
    for name, command in _TRIES.items():
        assert command[0] == name.upper()


@pytest.mark.parametrize(
    ("begins_h", "ends_h", "error", "status"),
    [
        (-24 * 60, 24 * 30, "", Status.OK),
        (-24 * 80, 24 * 10, "", Status.WARN),
        (-1, 23, "", Status.OK),
        (-20, 4, "", Status.WARN),
        (-24, -1, "certificate has expired", Status.FAIL),
    ],
)
def test_a_certificate_that_ends_soon_for_its_life_is_told_of(begins_h, ends_h, error, status):
    now = int(time.time())
    facts = facts_pb2.CertificateFacts(
        begins_unix_s=now + 3600 * begins_h,
        expires_unix_s=now + 3600 * ends_h,
        error=error,
        issuer="ca",
        names=["a"],
    )
    (check,) = doctor_ways.certificate("x", facts)
    assert check.status is status


def test_clocks_are_read_by_the_shortest_trip():
    slow, quick = Reading(0, 900, 900, 1000), Reading(5000, 5060, 5070, 5110)
    clock = clock_of([slow, quick])
    assert (clock.ahead_us, clock.error_us) == (10, 50)


def test_a_clock_that_is_too_far_to_be_read_is_not_called_good():
    far = facts_pb2.Clock(ahead_us=1_500_000, error_us=2_000_000)
    (check,) = doctor_ways.clock("x", far, fail_s=30)
    assert check.status is Status.UNKNOWN


def test_trips_are_told_by_their_quantiles():
    trips = summary([n / 1000 for n in range(1, 101)])
    assert (trips.samples, trips.least_us, trips.p50_us, trips.p99_us) == (100, 1000, 51000, 100000)
    slow = list(doctor_ways.trips("a to b", trips, slow_ms=20, fix="move it"))
    assert slow[0].status is Status.WARN
