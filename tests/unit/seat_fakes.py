"""Workers without connections, and a registry of them, for tests of seats and admission."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from outrider.v1 import worker_pb2
from services.orchestrator.discovery.endpoints import Endpoint, Standing
from services.orchestrator.seats import Demand
from services.orchestrator.workers import Worker

MODEL: Any = SimpleNamespace(name="m")


@dataclass
class FakeLink:
    """What a worker's link tells."""

    address: str
    info: worker_pb2.InfoResponse | None
    draining: bool = False
    vitals: worker_pb2.WatchResponse | None = None
    vitals_at: float = 0.0


@dataclass
class FakeTier:
    workers: list[Worker] = field(default_factory=list)
    let_go_of: int = 0
    pass_s: float = 0.0

    def usual_pass_s(self, now: float) -> float:
        return self.pass_s

    def let_go(self) -> None:
        self.let_go_of += 1


@dataclass
class FakeRegistry:
    """Two tiers; every worker fits every model."""

    targets: FakeTier = field(default_factory=FakeTier)
    drafts: FakeTier = field(default_factory=FakeTier)

    def targets_of(self, model: Any) -> list[Worker]:
        return [worker for worker in self.targets.workers if worker.usable]

    def drafts_of(self, model: Any) -> list[Worker]:
        return [worker for worker in self.drafts.workers if worker.usable]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def worker(name: str, incarnation: int, *, zone: str = "", **info: Any) -> Worker:
    """A worker that is up and fits."""
    said = worker_pb2.InfoResponse(
        incarnation=incarnation,
        model_fingerprint=info.pop("model_fingerprint", "f"),
        capabilities=info.pop("capabilities", ("chain",)),
        **{"max_rows": 512, "kv_blocks_total": 100, "kv_block_tokens": 10, **info},
    )
    link: Any = FakeLink(name, said)
    found = Worker(link, Endpoint(name, zone, Standing.READY))
    found.fits = incarnation
    return found


def restart(one: Worker, incarnation: int) -> None:
    """The same address, another life."""
    assert one.link.info is not None
    one.link.info.incarnation = one.fits = incarnation


def demand(
    tokens: int = 100,
    session_id: str = "s",
    blocks: tuple[int, ...] = (),
    holders: Mapping[int, int] | None = None,
) -> Demand:
    return Demand(MODEL, session_id, tokens, blocks, holders or {})
