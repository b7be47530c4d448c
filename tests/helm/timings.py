"""How long the chart gives pods to come and go: whoever restarts parts as Kubernetes does takes the
times from here.
"""

from dataclasses import dataclass

from charts import Case, Manifest, named, of_kind, pods, render

TIERS = ("orchestrator", "draft", "target")


@dataclass(frozen=True)
class Timings:
    """Of one tier's pods, in seconds."""

    pre_stop_s: float
    """From the pod's leaving the endpoints to SIGTERM."""
    drain_s: float
    """What the service is told that it has after that."""
    grace_s: float
    """From the beginning of all that to SIGKILL."""
    ready_s: float
    """How late a pod that serves is found to, by its probes at most."""
    unready_s: float
    """How late one that does not serve any more is found not to."""
    min_ready_s: float
    """How long it then has to stay so, before the next one goes."""

    @property
    def reserve_s(self) -> float:
        """What is left of the grace period after preStop and draining."""
        return self.grace_s - self.pre_stop_s - self.drain_s


def timings(case: Case | None = None) -> dict[str, Timings]:
    """By tier, of what is rendered; by default of the chart's own values."""
    manifests = render(case or Case("defaults"))
    found = {}
    for name, pod in pods(manifests):
        tier = pod["metadata"]["labels"].get("app.kubernetes.io/component")
        if tier in TIERS and not name.endswith(" worker"):
            found[tier] = _of(manifests, tier, name, pod["spec"])
    return found


def _of(manifests: list[Manifest], tier: str, name: str, spec: Manifest) -> Timings:
    (container,) = spec["containers"]
    kind, _, workload = name.removesuffix(" leader").partition("/")
    (settings,) = (
        m["data"] for m in of_kind(manifests, "ConfigMap")
        if f"OUTRIDER_{tier.upper()}_DRAIN_S" in m["data"]
    )  # fmt: skip
    startup, ready = container["startupProbe"], container["readinessProbe"]
    return Timings(
        pre_stop_s=container["lifecycle"]["preStop"]["sleep"]["seconds"],
        drain_s=float(settings[f"OUTRIDER_{tier.upper()}_DRAIN_S"]),
        grace_s=spec["terminationGracePeriodSeconds"],
        ready_s=startup["periodSeconds"] + ready["periodSeconds"] + ready["timeoutSeconds"],
        unready_s=ready["failureThreshold"] * ready["periodSeconds"] + ready["timeoutSeconds"],
        min_ready_s=named(manifests, kind, workload)["spec"].get("minReadySeconds", 0),
    )
