"""The demo profile, rendered and run: its containers as they would be in a cluster, on podman,
asked through the orchestrator's Service port. `make images-test` builds what it needs.
"""

import asyncio
import base64
import contextlib
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from charts import CHART, ROOT, Case, helm
from kubelet import LIMITS, Kubelet, Pod, grpc_healthy, load, podman, write_projected
from outrider.client import GenerationOptions, Message, OutriderClient
from outrider.errors import Unauthenticated, Unavailable
from outrider.rpc.channel import ChannelSecurity
from timings import timings

pytestmark = [pytest.mark.images, pytest.mark.timeout(900)]

TAG = os.environ.get("OUTRIDER_IMAGE_TAG", "0.1.0")
IMAGES = {
    "orchestrator": f"localhost/outrider-orchestrator:{TAG}",
    "draft": f"localhost/outrider-draft:{TAG}-cpu",
    "target": f"localhost/outrider-target:{TAG}-cpu",
}
SERVICE = "10.203.17.13"
"""The fourth pod's address: what a caller outside of the pods knows the orchestrator by."""

OVERRIDES = {
    "tls": {"extraNames": ["localhost", SERVICE]},
    "auth": {"adminCallers": ["default"]},
    "redis": {"image": {"registry": "localhost", "repository": "outrider-test-redis", "tag": "1"}},
}


class Stack:
    """The demo's pods, and the secrets that a caller has."""

    def __init__(self, kubelet: Kubelet, pods: dict[str, Pod], folder: Path) -> None:
        self.kubelet = kubelet
        self.pods = pods
        tls = kubelet.find("Secret", "demo-outrider-orchestrator-tls")["data"]
        token = kubelet.find("Secret", "demo-outrider-callers")["data"]["token"]
        self.ca_file, self.token_file = folder / "ca.crt", folder / "token"
        self.ca_file.write_bytes(base64.b64decode(tls["ca.crt"]))
        self.token_file.write_bytes(base64.b64decode(token))

    @property
    def security(self) -> ChannelSecurity:
        return ChannelSecurity(ca_file=str(self.ca_file), token_file=str(self.token_file))

    async def client(self, security: ChannelSecurity | None = None) -> OutriderClient:
        return await OutriderClient.connect(
            address=f"{SERVICE}:50051", security=security or self.security, timeout_s=120
        )


def render(folder: Path) -> str:
    values = folder / "overrides.json"
    values.write_text(json.dumps(OVERRIDES))
    profile = str(CHART / "values-demo.yaml")
    result = helm(
        "template", "demo", str(CHART), "--namespace", "outrider",
        "--values", profile, "--values", str(values),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    # Users of containers must get to it, which they would not below pytest's own folder.
    folder = Path(tempfile.mkdtemp(prefix="outrider-pods-"))
    folder.chmod(0o755)
    kubelet = Kubelet(load(render(folder)), folder)
    try:
        pods = {}
        for tier, kind in (
            ("redis", "StatefulSet"),
            ("draft", "Deployment"),
            ("target", "StatefulSet"),
            ("orchestrator", "Deployment"),
        ):
            pods[tier] = kubelet.start(kind, f"demo-outrider-{tier}")
        assert pods["orchestrator"].address == SERVICE
        for pod in pods.values():
            kubelet.wait_ready(pod)
        yield Stack(kubelet, pods, folder)
    finally:
        kubelet.close()
        shutil.rmtree(folder)


def test_the_pod_of_helm_test_gets_text_through_the_service(stack: Stack) -> None:
    pod = stack.kubelet.start("Pod", "demo-outrider-test")
    assert podman("wait", pod.name, timeout=180) == "0", pod.log()
    answer = json.loads(pod.log().strip().splitlines()[-1])
    assert answer["text"].strip() and len(answer["token_ids"]) > 3, answer


async def test_the_target_asks_the_draft_and_its_guesses_are_accepted(stack: Stack) -> None:
    options = GenerationOptions(max_tokens=64, ignore_eos=True, num_speculative_tokens=3)
    async with await stack.client() as client:
        done = await client.complete([Message("user", "Count from one to thirty.")], options)
        plain = await client.complete(
            [Message("user", "Count from one to thirty.")],
            GenerationOptions(max_tokens=64, ignore_eos=True, num_speculative_tokens=0),
        )
    assert done.token_ids == plain.token_ids and len(done.token_ids) == 64
    assert done.stats.accepted > 10 and plain.stats.proposed == 0


def test_containers_may_nothing(stack: Stack) -> None:
    for tier, pod in stack.pods.items():
        lines = Path(f"/proc/{pod.process_id()}/status").read_text().splitlines()
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        assert status["Uid"].split() == ["10001"] * 4, tier
        assert status["Gid"].split() == ["10001"] * 4, tier
        assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0, tier
        assert status["NoNewPrivs"] == "1" and status["Seccomp"] == "2", tier
        for place in ("/x", "/opt/x", "/etc/x", "/usr/lib/x"):
            tried = pod.exec("sh", "-c", f"echo >{place}")
            assert tried.returncode != 0 and "Read-only file system" in tried.stderr, (tier, place)


def test_the_runbooks_look_at_a_deployment_works_in_the_orchestrators_pod(stack: Stack) -> None:
    runbook = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    found = re.search(r"kubectl exec -i deploy/llm-\S+ .*?-- (.*?)\n(?! )", runbook, re.DOTALL)
    assert found, "the runbook shows how"
    command = found[1].replace("\\\n", " ").replace("llm-", "demo-").split()
    assert command[0] == "outrider"
    told = stack.pods["orchestrator"].exec(*command, "--json", stdin=stack.token_file.read_text())
    assert told.returncode in (0, 1), told.stdout + told.stderr
    checks = json.loads(told.stdout)["checks"]
    bad = [check for check in checks if check["status"] == "fail"]
    assert not bad, bad
    assert not [c for c in checks if c["area"] == "store" and c["status"] == "unknown"], checks


async def test_nobody_gets_in_without_what_it_takes(stack: Stack) -> None:
    with pytest.raises(Unavailable):  # No TLS.
        await stack.client(ChannelSecurity())
    async with await stack.client(ChannelSecurity(ca_file=str(stack.ca_file))) as client:
        with pytest.raises(Unauthenticated):  # No token.
            await client.list_models()
    # A worker asks for a certificate, which a caller has not; its other port has health alone.
    target = stack.pods["target"].address
    credentials = grpc.ssl_channel_credentials(stack.ca_file.read_bytes())
    name = "demo-outrider-targets.outrider.svc.cluster.local"
    options = (("grpc.ssl_target_name_override", name),)
    with grpc.secure_channel(f"{target}:50053", credentials, options) as channel:
        assert _info_code(channel) is grpc.StatusCode.UNAVAILABLE
    with grpc.insecure_channel(f"{target}:50060") as channel:
        assert _info_code(channel) is grpc.StatusCode.UNIMPLEMENTED
    stranger = stack.pods["redis"].exec("redis-cli", "-s", "/run/outrider/redis.sock", "ping")
    assert stranger.stdout.startswith("NOAUTH")


@pytest.mark.parametrize("with_tls", [False, True], ids=["plaintext", "without a certificate"])
def test_the_store_answers_nobody_who_cannot_show_a_certificate(
    stack: Stack, with_tls: bool
) -> None:
    context = ssl.create_default_context(cafile=str(stack.ca_file))
    name = "demo-outrider-redis.outrider.svc.cluster.local"
    answer = b""
    talk = socket.create_connection((stack.pods["redis"].address, 6379), 10)
    with contextlib.suppress(OSError):  # A reset, or an alert of TLS.
        if with_tls:
            talk = context.wrap_socket(talk, server_hostname=name)
        talk.sendall(b"PING\r\n")
        answer = talk.recv(99)
    talk.close()
    assert answer == b""


def _info_code(channel: grpc.Channel) -> grpc.StatusCode:
    method = channel.unary_unary("/outrider.v1.TargetService/Info")
    with pytest.raises(grpc.RpcError) as refused:
        method(b"", timeout=10)
    code: grpc.StatusCode = refused.value.code()
    return code


async def test_a_stream_outlives_the_end_of_its_orchestrator(stack: Stack) -> None:
    """preStop, SIGTERM, draining; then a new pod takes over the Service."""
    orchestrator = stack.pods["orchestrator"]
    times = timings(Case("demo", profile="demo"))["orchestrator"]
    async with await stack.client() as client:
        # Long enough, at this machine's pace, to be in its midst at SIGTERM, and to end in time.
        lasts_s = times.pre_stop_s + times.drain_s / 3
        started = time.monotonic()
        pace = GenerationOptions(max_tokens=40, ignore_eos=True)
        await client.complete([Message("user", "Tell me a tale.")], pace)
        num_tokens = min(int(40 * lasts_s / (time.monotonic() - started)), 1800)
        options = GenerationOptions(max_tokens=num_tokens, ignore_eos=True)
        chunks = []
        ending = None
        async for chunk in client.generate([Message("user", "Tell me a story.")], options):
            chunks.append(chunk)
            if ending is None:
                started = time.monotonic()
                ending = asyncio.create_task(asyncio.to_thread(stack.kubelet.stop, orchestrator))
        assert sum(len(chunk.token_ids) for chunk in chunks) == num_tokens
        assert time.monotonic() > started + times.pre_stop_s, "it ended before SIGTERM came"
        assert ending is not None
        await ending
    assert orchestrator.exit_code() == 0, orchestrator.log()[-2000:]
    assert not grpc_healthy(f"{orchestrator.address}:50060")
    podman("start", orchestrator.name)
    await asyncio.to_thread(stack.kubelet.wait_ready, orchestrator)
    async with await stack.client() as client:
        assert (await client.complete("Once", GenerationOptions(max_tokens=4))).token_ids


async def test_a_renewed_certificate_of_the_store_is_taken_up(stack: Stack) -> None:
    redis = stack.pods["redis"]
    before = served_certificate(redis.address, stack.ca_file)
    renewed = load(render(stack.ca_file.parent))
    (secret,) = (
        m for m in renewed
        if m["kind"] == "Secret" and m["metadata"]["name"] == "demo-outrider-redis-tls"
    )  # fmt: skip
    files = {key: base64.b64decode(value) for key, value in secret["data"].items()}
    write_projected(redis.folders["tls"], files, mode=0o440, group=10001)
    deadline = time.monotonic() + 60
    while served_certificate(redis.address, stack.ca_file) == before:
        assert time.monotonic() < deadline, redis.log()[-2000:]
        await asyncio.sleep(1)


def served_certificate(address: str, ca_file: Path) -> bytes:
    """Read without being let in: the store wants a certificate of its caller."""
    result = subprocess.run(
        ["openssl", "s_client", "-connect", f"{address}:6379", "-showcerts"],
        stdin=subprocess.DEVNULL, capture_output=True, timeout=20,
    )  # fmt: skip
    pem = result.stdout.decode(errors="replace")
    start = pem.index("-----BEGIN CERTIFICATE-----")
    return ssl.PEM_cert_to_DER_cert(pem[start : pem.index("-----END CERTIFICATE-----") + 25])


def test_workers_end_when_they_are_told(stack: Stack) -> None:
    for tier in ("draft", "target", "redis"):
        started = time.monotonic()
        stack.kubelet.stop(stack.pods[tier])
        assert stack.pods[tier].exit_code() == 0, stack.pods[tier].log()[-2000:]
        assert time.monotonic() - started < 40


def test_images_say_what_they_are() -> None:
    for tier, image in IMAGES.items():
        config = json.loads(podman("image", "inspect", image))[0]
        assert config["Config"]["User"] == "10001:10001"
        labels = config["Config"]["Labels"]
        assert labels["org.opencontainers.image.title"] == f"outrider-{tier}"
        assert labels["org.opencontainers.image.version"] == TAG
        run = ("run", "--rm", *LIMITS, "--network=none", "--entrypoint", "cat", image)
        bill = json.loads(podman(*run, "/opt/outrider/sbom.cdx.json"))
        names = {component["name"] for component in bill["components"]}
        assert bill["bomFormat"] == "CycloneDX" and {"grpcio", "outrider", "libc6"} <= names
        assert ("torch" in names) == (tier != "orchestrator")


def test_the_orchestrator_is_small_and_has_no_torch() -> None:
    config = json.loads(podman("image", "inspect", IMAGES["orchestrator"]))[0]
    assert config["Size"] < 250e6, config["Size"]
    run = ("run", "--rm", *LIMITS, "--network=none", "--entrypoint", "python3")
    found = podman(
        *run,
        IMAGES["orchestrator"],
        "-c",
        "import importlib.util as u; print(u.find_spec('torch'))",
    )
    assert found == "None"
