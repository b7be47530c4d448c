"""Prometheus endpoints read: what the metrics of some processes were at one moment."""

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from outrider.errors import InvalidArgument, Unavailable

TIMEOUT_S = 2.0
_MAX_BYTES = 8 << 20

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Sample:
    """A value and its labels."""

    labels: Labels
    value: float


@dataclass(frozen=True, slots=True)
class Scrape:
    """The metrics of one process by name, when they were read (monotonic), or why they were not."""

    address: str
    at: float
    samples: Mapping[str, Sequence[Sample]] = field(default_factory=dict)
    error: str = ""

    def total(self, name: str, **labels: str) -> float:
        """The sum of all samples of a metric that have these labels."""
        wanted = labels.items()
        return sum(
            sample.value for sample in self.samples.get(name, ()) if wanted <= sample.labels.items()
        )

    def label(self, name: str) -> str:
        """The first value of a label, "" where no metric has it."""
        for samples in self.samples.values():
            for sample in samples:
                if sample.labels.get(name):
                    return sample.labels[name]
        return ""


async def scrape_all(addresses: Sequence[str]) -> list[Scrape]:
    """All endpoints (host:port) at once; one that does not answer says so in its place."""
    return list(await asyncio.gather(*(asyncio.to_thread(scrape, a) for a in addresses)))


def scrape(address: str) -> Scrape:
    """One endpoint, within TIMEOUT_S."""
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=TIMEOUT_S) as response:
            body = response.read(_MAX_BYTES + 1)
        if len(body) > _MAX_BYTES:
            raise ValueError(f"more than {_MAX_BYTES} bytes")
        return Scrape(address, time.monotonic(), parse(body.decode()))
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        return Scrape(address, time.monotonic(), error=str(reason))


def parse(text: str) -> dict[str, list[Sample]]:
    """Samples by name, from Prometheus' text format. Raises ValueError."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        raise Unavailable("reading metrics needs Outrider's extra `telemetry`") from None
    found: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(Sample(sample.labels, sample.value))
    return found


def addresses_of(stack_file: Path) -> list[str]:
    """The endpoints of a stack, from the file that `outrider up --json` wrote.

    Raises InvalidArgument where none of its services has one.
    """
    try:
        services = json.loads(stack_file.read_text())["services"]
        found = [service["info"].get("metrics", "") for service in services]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgument(
            f"{stack_file} is no file of `outrider up --json`: {error}", field="stack"
        ) from error
    if not any(found):
        raise InvalidArgument(
            "no service of the stack tells metrics; start it with "
            "OUTRIDER_ORCHESTRATOR_METRICS_ADDRESS=127.0.0.1:0 and the like for TARGET and DRAFT",
            field="stack",
        )
    return [address for address in found if address]
