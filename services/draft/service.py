"""The draft service: a worker that proposes."""

import os

from outrider.engine.loaded_model import LoadedModel
from outrider.rpc.server import Server, run_service
from outrider.telemetry.catalog import DRAFT
from outrider.telemetry.service import Telemetry, start_telemetry
from outrider.v1 import draft_pb2, draft_pb2_grpc
from outrider.worker.service import WorkerConfig, serve_worker
from outrider.worker.servicer import WorkerServicer
from services.draft.drafter import Drafter
from services.draft.metrics import watch_drafter

CAPABILITIES = (
    "chain",
    "bulk",
    "greedy",
    "coupled",
    "rejection",
    "min_tokens",
    "ahead",
    "alternatives",
    "run_ahead",
)


def _make_tier(loaded: LoadedModel, context_length: int, telemetry: Telemetry) -> Drafter:
    drafter = Drafter(vocab_size=loaded.vocab_size, context_length=context_length)
    if telemetry.metrics is not None:
        watch_drafter(telemetry.metrics, drafter.made, model=loaded.name)
    return drafter


def _add_servicer(server: Server, servicer: WorkerServicer) -> None:
    draft_pb2_grpc.add_DraftServiceServicer_to_server(  # type: ignore[no-untyped-call]
        servicer, server.grpc
    )


async def serve(config: WorkerConfig) -> None:
    telemetry = start_telemetry(config.telemetry, tier=DRAFT, env=os.environ)
    try:
        await serve_worker(
            config,
            tier_name=DRAFT,
            service_name=draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name,
            make_tier=lambda loaded, context: _make_tier(loaded, context, telemetry),
            make_servicer=WorkerServicer,
            add_servicer=_add_servicer,
            capabilities=lambda loaded: CAPABILITIES,
            telemetry=telemetry,
        )
    finally:
        telemetry.close()


def main() -> None:
    run_service(WorkerConfig, serve, name="draft")
