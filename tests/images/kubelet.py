"""Runs the pods of rendered manifests with podman, as a kubelet would run them: image, command,
environment, volumes, security, limits, probes and the way a pod ends are those of the manifest. A
Service is a line in each pod's hosts file.
"""

import base64
import json
import os
import resource
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from charts import NOT_YET

Manifest = dict[str, Any]
NETWORK = "outrider-images-test"
SUBNET = "10.203.17"
MOST_RESTARTS = 3
# Podman would set its own, and raising them takes a right that a sandboxed root has not.
OPEN_FILES = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 1 << 16)
LIMITS = ("--ulimit", f"nofile={OPEN_FILES}:{OPEN_FILES}", "--ulimit", "nproc=4096:4096")
_UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


class Failed(AssertionError):
    """A pod did not do what it should; the end of its log is in the message."""


def podman(*arguments: str, check: bool = True, timeout: float = 120) -> str:
    result = subprocess.run(["podman", *arguments], capture_output=True, text=True, timeout=timeout)
    if check and result.returncode != 0:
        raise Failed(f"podman {' '.join(arguments[:3])}: {result.stderr.strip()}")
    return result.stdout.strip()


@dataclass
class Pod:
    """A pod with one container, at an address of its own."""

    name: str
    manifest: Manifest
    address: str
    folders: dict[str, Path] = field(default_factory=dict)
    """Of its volumes, on this machine."""
    restarts: int = 0

    @property
    def container(self) -> Manifest:
        found: Manifest = self.manifest["spec"]["containers"][0]
        return found

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.manifest["metadata"]["labels"])

    def process_id(self) -> int:
        return int(podman("inspect", "--format", "{{.State.Pid}}", self.name))

    def exit_code(self) -> int:
        return int(podman("inspect", "--format", "{{.State.ExitCode}}", self.name))

    def running(self) -> bool:
        return podman("inspect", "--format", "{{.State.Running}}", self.name) == "true"

    def log(self) -> str:
        result = subprocess.run(
            ["podman", "logs", self.name],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return result.stdout

    def exec(self, *command: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            ["podman", "exec", "--interactive", self.name, *command],
            input=stdin, capture_output=True, text=True, timeout=120,
        )  # fmt: skip


class Kubelet:
    """Starts pods in order, so that each finds the Services of those before it."""

    def __init__(self, manifests: list[Manifest], folder: Path) -> None:
        self._manifests = manifests
        self._folder = folder
        self.pods: dict[str, Pod] = {}
        podman("network", "rm", "--force", NETWORK, check=False)
        podman("network", "create", "--subnet", f"{SUBNET}.0/24", NETWORK)

    def close(self) -> None:
        for pod in reversed(self.pods.values()):
            podman("rm", "--force", "--time", "0", pod.name, check=False)
        podman("network", "rm", "--force", NETWORK, check=False)

    def find(self, kind: str, name: str) -> Manifest:
        (found,) = (
            m for m in self._manifests if m["kind"] == kind and m["metadata"]["name"] == name
        )
        return found

    def start(self, kind: str, name: str) -> Pod:
        """Start the pod of a workload, or a bare pod, without waiting for it."""
        workload = self.find(kind, name)
        manifest = workload if kind == "Pod" else workload["spec"]["template"]
        pod = Pod(f"{NETWORK}-{name}", manifest, f"{SUBNET}.{10 + len(self.pods)}")
        podman("rm", "--force", "--time", "0", pod.name, check=False)
        self.pods[name] = pod
        claims = workload["spec"].get("volumeClaimTemplates", [])
        volumes = manifest["spec"]["volumes"] + [
            {"name": claim["metadata"]["name"], "emptyDir": {}} for claim in claims
        ]
        for volume in volumes:
            pod.folders[volume["name"]] = self._make_volume(pod, volume)
        podman("run", "--detach", *LIMITS, *self._flags(pod), *self._command(pod))
        return pod

    def wait_ready(self, pod: Pod) -> None:
        """By its startup and readiness probes. A container that ends meanwhile is started again, as
        a kubelet does."""
        startup = pod.container["startupProbe"]
        deadline = time.monotonic() + startup["failureThreshold"] * startup["periodSeconds"]
        while not self.probe(pod, startup):
            if not pod.running() and pod.restarts < MOST_RESTARTS:
                pod.restarts += 1
                podman("start", pod.name)
            elif not pod.running() or time.monotonic() > deadline:
                raise Failed(f"{pod.name} did not start:\n{pod.log()[-3000:]}")
            time.sleep(1)
        assert self.probe(pod, pod.container["readinessProbe"])
        assert self.probe(pod, pod.container["livenessProbe"])

    def probe(self, pod: Pod, probe: Manifest) -> bool:
        if "exec" in probe:
            return pod.exec(*probe["exec"]["command"]).returncode == 0
        return grpc_healthy(f"{pod.address}:{probe['grpc']['port']}")

    def stop(self, pod: Pod) -> None:
        """As a pod is deleted: its preStop hook, SIGTERM, and SIGKILL when the grace is over."""
        grace = pod.manifest["spec"]["terminationGracePeriodSeconds"]
        asleep = pod.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {})
        time.sleep(asleep.get("seconds", 0))
        left = grace - asleep.get("seconds", 0)
        podman("stop", "--time", str(left), pod.name, timeout=left + 30)

    def _flags(self, pod: Pod) -> list[str]:
        spec, container = pod.manifest["spec"], pod.container
        whole, own = spec["securityContext"], container["securityContext"]
        flags = ["--name", pod.name, "--network", NETWORK, "--ip", pod.address]
        flags += ["--user", f"{whole['runAsUser']}:{whole['runAsGroup']}"]
        if own["readOnlyRootFilesystem"]:
            flags += ["--read-only", "--read-only-tmpfs=false"]
        if not own["allowPrivilegeEscalation"]:
            flags += ["--security-opt", "no-new-privileges"]
        for capability in own["capabilities"]["drop"]:
            flags += ["--cap-drop", capability.lower()]
        limits = container["resources"]["limits"]
        flags += ["--memory", str(_bytes(limits["memory"])), "--cpus", str(_cpus(limits["cpu"]))]
        for name, value in self._environment(container).items():
            flags += ["--env", f"{name}={value}"]
        for mount in container["volumeMounts"]:
            mode = "ro" if mount.get("readOnly") else "rw"
            flags += ["--volume", f"{pod.folders[mount['name']]}:{mount['mountPath']}:{mode}"]
        for host, address in self._hosts().items():
            flags += ["--add-host", f"{host}:{address}"]
        return flags

    @staticmethod
    def _command(pod: Pod) -> list[str]:
        command = pod.container.get("command")
        entry = ["--entrypoint", json.dumps(command)] if command else []
        return [*entry, pod.container["image"], *pod.container.get("args", [])]

    def _environment(self, container: Manifest) -> dict[str, str]:
        found = {}
        for source in container.get("envFrom", ()):
            found.update(self.find("ConfigMap", source["configMapRef"]["name"])["data"])
        found = {name: value for name, value in found.items() if name not in NOT_YET}
        return found | {entry["name"]: entry["value"] for entry in container.get("env", ())}

    def _hosts(self) -> dict[str, str]:
        """Names of Services, by the pods that they select."""
        found = {}
        for service in (m for m in self._manifests if m["kind"] == "Service"):
            name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
            for pod in self.pods.values():
                if service["spec"]["selector"].items() <= pod.labels.items():
                    found[f"{name}.{namespace}.svc.cluster.local"] = pod.address
        return found

    def _make_volume(self, pod: Pod, volume: Manifest) -> Path:
        group = pod.manifest["spec"]["securityContext"]["fsGroup"]
        path = self._folder / pod.name / volume["name"]
        path.mkdir(parents=True)
        if "emptyDir" in volume:
            os.chown(path, 0, group)
            path.chmod(0o2777)
            return path
        os.chown(path, 0, group)
        if "secret" in volume:
            source, kind = volume["secret"], "Secret"
            data = self.find(kind, source["secretName"])["data"]
            files = {key: base64.b64decode(value) for key, value in data.items()}
        else:
            source = volume["configMap"]
            data = self.find("ConfigMap", source["name"])["data"]
            files = {key: value.encode() for key, value in data.items()}
        if "items" in source:
            files = {item["path"]: files[item["key"]] for item in source["items"]}
        write_projected(path, files, mode=source.get("defaultMode", 0o644), group=group)
        return path


def write_projected(folder: Path, files: dict[str, bytes], *, mode: int, group: int) -> None:
    """Files as a kubelet projects them: behind a link that moves from one version to the next."""
    version = folder / f"..{time.monotonic_ns()}"
    version.mkdir()
    os.chown(version, 0, group)
    for name, content in files.items():
        path = version / name
        path.write_bytes(content)
        os.chown(path, 0, group)
        path.chmod(mode)
        link = folder / name
        if not link.is_symlink():
            link.symlink_to(Path("..data") / name)
    new = folder / "..new"
    new.symlink_to(version.name)
    new.rename(folder / "..data")


def grpc_healthy(address: str) -> bool:
    """As the kubelet asks: no TLS, the server's health as a whole."""
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def load(text: str) -> list[Manifest]:
    return [manifest for manifest in yaml.safe_load_all(text) if manifest]


def _bytes(quantity: str) -> int:
    return int(quantity[:-2]) * _UNITS[quantity[-2:]]


def _cpus(quantity: str) -> float:
    return int(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity)
