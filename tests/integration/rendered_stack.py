"""The chart's own settings, run: what it renders as environment, files and start scripts, in
processes of this machine. What a cluster's network would do is done by addresses.
"""

import asyncio
import base64
import contextlib
import os
import stat
import subprocess
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from certificates import Issued, cert_pem, certificate, pem
from charts import Case, Manifest, named, render
from scripted_workers import Parts
from store_servers import binary, free_port
from test_store_tls import TlsFront

RELEASE = "demo-outrider"
DOMAIN = "outrider.svc.cluster.local"
NAMES = {
    "orchestrator": ("orchestrator",),
    "draft": ("workers", "drafts"),
    "target": ("workers", "targets"),
    "redis": ("redis",),
    "kvStore": ("kvstore",),
}
"""By tier, the names that helm/outrider/README.md asks for in supplied certificates."""
WORKLOADS = {"orchestrator": "Deployment", "draft": "Deployment", "target": "StatefulSet",
             "redis": "StatefulSet", "kvstore": "StatefulSet"}  # fmt: skip

Files = Mapping[str, bytes]


def identity(tier: str, ca: Issued, **options: Any) -> Files:
    """A supplied secret for a tier."""
    names = tuple(f"{RELEASE}-{name}.{DOMAIN}" for name in NAMES[tier])
    issued = certificate(tier, issuer=ca, names=names, **options)
    return {"ca.crt": cert_pem(ca), "tls.crt": cert_pem(issued), "tls.key": pem(issued[1])}


@dataclass
class Pods:
    """Rendered manifests, and the secrets that they name; each tier has a root of its own."""

    folder: Path
    case: Case
    secrets: dict[str, Files]
    addresses: dict[str, str] = field(default_factory=dict)
    children: dict[str, Any] = field(default_factory=dict)

    @property
    def manifests(self) -> list[Manifest]:
        return render(self.case)

    def root(self, tier: str) -> Path:
        return self.folder / tier

    def pod(self, tier: str) -> Manifest:
        found: Manifest = named(self.manifests, WORKLOADS[tier], f"{RELEASE}-{tier}")["spec"]
        return dict(found["template"]["spec"])

    def project(self, tier: str) -> None:
        """Write the volumes of a tier, anew where they are there."""
        pod = self.pod(tier)
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for mount in pod["containers"][0]["volumeMounts"]:
            place = self.root(tier) / mount["mountPath"].strip("/")
            place.mkdir(parents=True, exist_ok=True)
            for name, content in self._files(volumes[mount["name"]]).items():
                scratch = place / f".{name}"
                scratch.write_bytes(self._local(tier, content))
                scratch.rename(place / name)

    def _files(self, volume: Manifest) -> Files:
        if "configMap" in volume:
            data = named(self.manifests, "ConfigMap", volume["configMap"]["name"])["data"]
            return {name: text.encode() for name, text in data.items()}
        if "secret" not in volume:
            return {}
        secret = volume["secret"]
        files = self.secrets.get(secret["secretName"])
        if files is None:  # The chart's own.
            data = named(self.manifests, "Secret", secret["secretName"])["data"]
            files = {key: base64.b64decode(text) for key, text in data.items()}
        items = secret.get("items") or [{"key": key, "path": key} for key in files]
        return {item["path"]: files[item["key"]] for item in items}

    def _local(self, tier: str, content: bytes) -> bytes:
        for place in ("/etc/outrider", "/run/outrider", "/data", "/cache"):
            content = content.replace(place.encode(), f"{self.root(tier)}{place}".encode())
        return content

    def environment(self, tier: str) -> dict[str, str]:
        """Of the tier's container; files lie below its root, others are where they run."""
        container = self.pod(tier)["containers"][0]
        (source,) = container["envFrom"]
        env = dict(named(self.manifests, "ConfigMap", source["configMapRef"]["name"])["data"])
        env |= {
            entry["name"]: entry["value"] for entry in container.get("env", ()) if "value" in entry
        }
        env = {name: self._local(tier, text.encode()).decode() for name, text in env.items()}
        prefix = f"OUTRIDER_{tier.upper()}_"
        env |= {f"{prefix}HOST": "127.0.0.1", f"{prefix}PORT": "0"}
        env |= {f"{prefix}METRICS_ADDRESS": "127.0.0.1:0", f"{prefix}HEALTH_PORT": str(free_port())}
        for key, found in (("TARGETS", "target"), ("DRAFTS", "draft")):
            if prefix + key in env:
                assert f"{RELEASE}-{found}s.{DOMAIN}" in env[prefix + key]
                env[prefix + key] = self.addresses[found]
        for key, found in (("STORE_URL", "redis"), ("KV_STORE_URL", "kvstore")):
            if prefix + key in env:
                host = f"{RELEASE}-{found}.{DOMAIN}:6379"
                assert host in env[prefix + key]
                env[prefix + key] = env[prefix + key].replace(host, self.addresses[found])
        return env

    @contextlib.asynccontextmanager
    async def store(self, tier: str) -> AsyncIterator[None]:
        """A store by the chart's script. Its server here knows no TLS, which is put before it."""
        self.project(tier)
        root, port = self.root(tier), free_port()
        config = root / "etc/outrider/config/redis.conf"
        lines = [line for line in config.read_text().splitlines() if not line.startswith("tls-")]
        assert "port 0" in lines
        config.write_text("\n".join(lines).replace("port 0", f"bind 127.0.0.1\nport {port}") + "\n")
        programs = root / "bin"
        programs.mkdir()
        (programs / "valkey-server").symlink_to(str(binary("valkey")))
        (programs / "valkey-cli").write_text("#!/bin/sh\n")
        (programs / "valkey-cli").chmod(stat.S_IRWXU)
        with (root / "log").open("wb") as log:
            process = subprocess.Popen(
                ["/bin/sh", str(root / "etc/outrider/config/start.sh")],
                env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        front = TlsFront(port)
        try:
            await self._answers(process, port, root / "log")
            await front.serve(self._pems(root))
            self.addresses[tier] = f"127.0.0.1:{front.port}"
            self.addresses[f"{tier} in plain"] = f"127.0.0.1:{port}"
            yield
        finally:
            await front.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()

    @staticmethod
    async def _answers(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
        for _ in range(500):
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return
            assert process.poll() is None, log.read_text()
            await asyncio.sleep(0.02)
        raise AssertionError(log.read_text())

    @staticmethod
    def _pems(root: Path) -> Path:
        """As the front wants them to be named."""
        folder = root / "front"
        folder.mkdir()
        for name, source in (("crt", "tls.crt"), ("key", "tls.key"), ("ca", "ca.crt")):
            (folder / name).symlink_to(root / "etc/outrider/tls" / source)
        return folder

    @contextlib.asynccontextmanager
    async def service(self, parts: Parts, tier: str, **settings: Any) -> AsyncIterator[None]:
        """A service by its rendered environment; `settings` are what models here need."""
        self.project(tier)
        prefix = f"OUTRIDER_{tier.upper()}_"
        env = self.environment(tier)
        env |= {prefix + key.upper(): str(value) for key, value in settings.items()}
        async with parts.process(tier, environ=env) as (child, address):
            self.addresses[tier] = address
            self.children[tier] = child
            yield
