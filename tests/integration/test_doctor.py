"""`outrider doctor` before real stacks: a good one, and ones with a fault each."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from certificates import Issued, cert_pem, certificate, pem
from outrider.cli.doctor_checks import judge
from outrider.cli.doctor_look import look
from outrider.cli.doctor_values import Check, Status, exit_status
from outrider.rpc.channel import ChannelSecurity
from outrider.rpc.files import LOOK_EVERY_S
from outrider.store_probe import SESSION_RIGHTS
from scripted_workers import Parts, Rig
from store_servers import Server, running_server

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

PASSWORD = "open-sesame"
NOBODY = "orchestrator 127.0.0.1:1"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A store as it should be: it keeps what it is told."""
    folder = tmp_path_factory.mktemp("store")
    options = ("--appendonly", "yes", "--appendfsync", "always")
    with running_server("valkey", folder, *options) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def good(stack: Rig, parts: Parts, store: Server) -> AsyncIterator[Rig]:
    async with parts.orchestrator(store.url, targets=stack.targets, drafts=stack.drafts) as running:
        yield running


async def diagnose(
    rig: Rig, security: ChannelSecurity | None = None, **options: Any
) -> list[Check]:
    report = await look([rig.address], security or ChannelSecurity(), samples=5, **options)
    return judge(report)


def bad(checks: list[Check]) -> dict[tuple[str, str], Check]:
    """What is not ok, by area and subject, but for ways that this machine is too busy for."""
    return {
        (c.area, c.subject): c
        for c in checks
        if c.status is not Status.OK and (c.area, c.status) != ("round trips", Status.WARN)
    }


async def run_command(*arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "outrider.cli", "doctor", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ,
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


async def test_of_a_good_stack_everything_is_ok(good: Rig, stack: Rig) -> None:
    status, output = await run_command(good.address, "--json", "--redis-url", good.store_url)
    told = json.loads(output)
    statuses = [(c["area"], c["status"]) for c in told["checks"]]
    num_slow = statuses.count(("round trips", "warn"))  # None, unless this machine is too busy.
    assert [status for _, status in statuses].count("ok") == len(statuses) - num_slow, output
    assert status == told["exit_status"] == (1 if num_slow else 0)
    seen = {(check["area"], check["subject"]) for check in told["checks"]}
    target, draft = f"target {stack.targets[0]}", f"draft {stack.drafts[0]}"
    for area, subject in (
        ("versions", target),
        ("fingerprints", draft),
        ("clocks", target),
        ("clocks", "session store"),
        ("round trips", f"orchestrator to {draft}"),
        ("round trips", f"{target} to {draft}"),
        ("round trips", f"here to orchestrator {good.address}"),
        ("store", "session store"),
        ("store", "redis_url"),
        ("load", target),
        ("machines", draft),
    ):
        assert (area, subject) in seen, f"{area} of {subject} was not looked at"
    async with Redis.from_url(good.store_url) as redis:
        assert await redis.keys("*doctor*") == [], "what was tried is gone"


@pytest.mark.slow
async def test_a_draft_with_another_tokenizer_and_one_that_dies_are_named(
    stack: Rig, parts: Parts, store: Server, tiny_models: dict[str, Path]
) -> None:
    """That one also keeps KV where the sessions are."""
    other = tiny_models["other-tokenizer"]
    async with parts.worker("draft", other, kv_store_url=store.url) as (child, address):
        drafts = [f"dns:///{address}", *stack.drafts]
        async with parts.orchestrator(store.url, targets=stack.targets, drafts=drafts) as rig:
            checks = await diagnose(rig)
            found, subject = bad(checks), f"draft {address}"
            assert found["fingerprints", subject].status is Status.FAIL
            assert "shares the target's tokenizer" in found["fingerprints", subject].fix
            assert "must share a tokenizer" in found["workers", subject].detail
            kv_store = found["store", f"KV store of {subject}"]
            assert kv_store.status is Status.WARN
            assert {c.detail for c in checks if c.subject == kv_store.subject} >= {
                "KV blocks and sessions are in one Redis",
                "no limit (maxmemory): blocks fill its machine",
                "its user may do all that is needed",
            }
            assert not {s for _, s in found} - {subject, kv_store.subject}, "others are well"
            assert exit_status(checks) == 2

            await child.stop(0)
            await wait_until_bad(rig, "workers", subject, "does not answer")


async def wait_until_bad(rig: Rig, area: str, subject: str, detail: str) -> None:
    async with asyncio.timeout(10):
        while True:
            check = bad(await diagnose(rig)).get((area, subject))
            if check and check.status is Status.FAIL and detail in check.detail:
                return
            await asyncio.sleep(0.1)


async def test_a_right_that_the_stores_user_lacks_is_named_and_no_password_is(
    stack: Rig, parts: Parts, tmp_path: Path
) -> None:
    rights = SESSION_RIGHTS.replace("+zscore ", "").replace(" +info", "")
    lines = f"user default off\nuser outrider on >{PASSWORD} ~outrider:* -@all {rights}\n"
    (tmp_path / "acl").write_text(lines)
    with running_server("valkey", tmp_path, "--aclfile", str(tmp_path / "acl")) as server:
        url = f"redis://outrider:{PASSWORD}@127.0.0.1:{server.port}/0"
        async with parts.orchestrator(url, targets=stack.targets, drafts=stack.drafts) as rig:
            status, output = await run_command(rig.address, "--redis-url", url)
        assert status == 2
        told = " ".join(output.split())
        assert told.count("its user may not run zscore → ACL SETUSER … +zscore") == 2
        assert "its user may not run INFO" in told
        assert PASSWORD not in output
        wrong = f"redis://outrider:wrong-{PASSWORD}@127.0.0.1:{server.port}/0"
        checks = judge(await look(["127.0.0.1:1"], ChannelSecurity(), samples=1, redis_url=wrong))
        assert bad(checks).keys() == {("store", "redis_url"), ("orchestrators", NOBODY)}
        assert PASSWORD not in str(checks)


async def test_a_store_that_loses_sessions_is_told_of(good: Rig, tmp_path: Path) -> None:
    options = ("--maxmemory", "64mb", "--maxmemory-policy", "volatile-lru")
    with running_server("valkey", tmp_path, *options) as server:
        checks = await diagnose(good, redis_url=server.url, kv_store_url=server.url)
    assert [c.detail for c in checks if c.subject == "redis_url" and c.status is Status.FAIL] == [
        "maxmemory-policy volatile-lru: sessions are lost when it is full"
    ]
    assert [c.detail for c in checks if c.subject == "redis_url" and c.status is Status.WARN] == [
        "no persistence: all sessions are lost when it restarts"
    ]
    assert [c.detail for c in checks if c.subject == "kv_store_url" and c.area == "store"] == [
        "its user may do all that is needed",
        "KV blocks and sessions are in one Redis",
        "maxmemory-policy volatile-lru",
    ]


# --- certificates and callers -------------------------------------------------------------------

CA, STRANGERS_CA = certificate("ca", ca=True), certificate("stranger", ca=True)


def write_identity(folder: Path, *, valid_s: float, issuer: Issued = CA) -> None:
    issued = certificate("orchestrator", issuer=issuer, valid_s=valid_s)
    (folder / "crt").write_bytes(cert_pem(issued))
    (folder / "key").write_bytes(pem(issued[1]))


@contextlib.asynccontextmanager
async def secured(stack: Rig, parts: Parts, store: Server, folder: Path) -> AsyncIterator[str]:
    """The address of an orchestrator with TLS that knows the callers ops and app."""
    write_identity(folder, valid_s=3600)
    (folder / "ca").write_bytes(cert_pem(CA))
    (folder / "strangers-ca").write_bytes(cert_pem(STRANGERS_CA))
    (folder / "tokens").write_text("ops:ops-secret\napp:app-secret\n")
    for tenant in ("ops", "app"):
        (folder / tenant).write_text(f"{tenant}-secret")
    flags = ("--targets", stack.targets[0], "--drafts", stack.drafts[0])
    async with parts.process(
        "orchestrator",
        *flags,
        store_url=store.url,
        tls_cert=folder / "crt",
        tls_key=folder / "key",
        auth_token_file=folder / "tokens",
        admin_callers="ops",
    ) as (_, address):
        yield address


@pytest.mark.slow
async def test_certificates_tokens_and_who_may_ask(
    stack: Rig, parts: Parts, store: Server, tmp_path: Path
) -> None:
    async with secured(stack, parts, store, tmp_path) as address:
        subject = f"orchestrator {address}"

        async def checks_of(tenant: str, ca: str = "ca") -> list[Check]:
            security = ChannelSecurity(str(tmp_path / ca), token_file=str(tmp_path / tenant))
            return judge(await look([address], security, samples=3))

        checks = await checks_of("ops")
        assert not bad(checks)
        told = {(c.area, c.detail) for c in checks if c.subject == subject}
        assert {
            ("tls", "plaintext is refused"),
            ("callers", "calls without a token are refused"),
        } <= told
        assert any("signed by ca for localhost, 127.0.0.1" in detail for _, detail in told)

        (denied,) = [c for c in await checks_of("app") if "out of sight" in c.detail]
        assert denied.status is Status.UNKNOWN and "admin_callers" in denied.fix
        strange = bad(await checks_of("ops", ca="strangers-ca"))
        assert "another CA" in strange["tls", subject].fix
        plain = bad(judge(await look([address], ChannelSecurity(), samples=3)))
        assert plain["orchestrators", subject].status is Status.FAIL

        write_identity(tmp_path, valid_s=1500)
        await asyncio.sleep(LOOK_EVERY_S + 0.5)
        soon = bad(await checks_of("ops"))
        assert soon.keys() == {("tls", subject)}
        assert soon["tls", subject].status is Status.WARN
        assert "ends in 0.4 hours" in soon["tls", subject].detail

        write_identity(tmp_path, valid_s=-60)
        await asyncio.sleep(LOOK_EVERY_S + 0.5)
        checks = await checks_of("ops")
        assert bad(checks)["tls", subject].detail == "handshake: certificate has expired"
        assert exit_status(checks) == 2
