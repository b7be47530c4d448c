"""The target service: a worker that verifies, and the tokenizer for orchestrators."""

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.config import setting
from outrider.engine.deciding import Decider, EagerDecider
from outrider.engine.loaded_model import LoadedModel
from outrider.remote.metrics import watch_buffers, watch_links
from outrider.rpc.channel import ChannelSecurity
from outrider.rpc.server import Server, run_service
from outrider.telemetry.catalog import DRAFT, TARGET
from outrider.telemetry.service import OFF, Telemetry, start_telemetry
from outrider.v1 import target_pb2, target_pb2_grpc, worker_pb2
from outrider.worker.service import WorkerConfig, serve_worker
from outrider.worker.servicer import Context, WorkerServicer, chunks
from services.target.drafts import DraftPool
from services.target.verifier import Verifier

CAPABILITIES = (
    "chain",
    "tree",
    "bulk",
    "greedy",
    "coupled",
    "rejection",
    "logprobs",
    "min_tokens",
    "extend",
)


class TargetServicer(WorkerServicer):
    """The worker protocol, and GetTokenizer; `drafts` are those that it asks by itself."""

    def __init__(self, *args: Any, drafts: DraftPool | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._drafts = drafts

    async def look_at_drafts(
        self, addresses: Sequence[str], samples: int
    ) -> list[worker_pb2.DraftFacts]:
        if self._drafts is None:
            return []
        drafts = self._drafts
        return list(
            await asyncio.gather(*(drafts.look_at(address, samples) for address in addresses))
        )

    async def GetTokenizer(
        self,
        request: target_pb2.GetTokenizerRequest,
        context: "Context[target_pb2.GetTokenizerRequest, target_pb2.GetTokenizerResponse]",
    ) -> AsyncIterator[target_pb2.GetTokenizerResponse]:
        for data in chunks(self.loaded.tokenizer.to_json()):
            yield target_pb2.GetTokenizerResponse(data=data)


def _add_servicer(server: Server, servicer: WorkerServicer) -> None:
    target_pb2_grpc.add_TargetServiceServicer_to_server(  # type: ignore[no-untyped-call]
        servicer, server.grpc
    )


@dataclass(frozen=True)
class TargetConfig(WorkerConfig):
    """What a target can be told."""

    more_rounds: str = setting(
        "auto",
        help="offer to go on with plain rounds unasked; auto does on a GPU. On a CPU the rounds "
        "would compete with those who tell the client of them",
        choices=("auto", "on", "off"),
    )
    tree_rows: int = setting(
        64,
        help="on a GPU: alternatives to guesses are asked for while all sessions together stay "
        "within so many rows of a pass, which cost little more than one; 0: as planned",
    )
    ask_drafts: bool = setting(True, help="ask drafts by itself when an orchestrator plans so")
    draft_ca: str = setting("", help="PEM CA of the drafts' certificates; switches TLS on")
    draft_cert: str = setting("", help="PEM client certificate for the drafts (mTLS)")
    draft_key: str = setting("", help="PEM key of that certificate")
    draft_token_file: str = setting("", help="file with the bearer token for the drafts")
    draft_tls_name: str = setting(
        "", help="name that the drafts' certificates have, where drafts are found by IP address"
    )

    @property
    def draft_security(self) -> ChannelSecurity:
        return ChannelSecurity(
            ca_file=self.draft_ca,
            cert_file=self.draft_cert,
            key_file=self.draft_key,
            token_file=self.draft_token_file,
            server_name=self.draft_tls_name,
        )


def _offers_plain_rounds(config: TargetConfig, loaded: LoadedModel) -> bool:
    return config.more_rounds == "on" or (
        config.more_rounds == "auto" and loaded.device.type == "cuda"
    )


def _capabilities(config: TargetConfig, loaded: LoadedModel) -> tuple[str, ...]:
    optional = {
        "more_rounds": _offers_plain_rounds(config, loaded),
        "drafts": config.ask_drafts,
    }
    return (*CAPABILITIES, *(name for name, on in optional.items() if on))


async def serve(config: TargetConfig) -> None:
    telemetry = start_telemetry(config.telemetry, tier=TARGET, env=os.environ)
    traced = telemetry.spans is not None
    drafts = DraftPool(config.draft_security, traced=traced) if config.ask_drafts else None
    if telemetry.metrics and drafts is not None:
        watch_links(telemetry.metrics, {DRAFT: lambda: drafts.links})
    try:
        await serve_worker(
            config,
            tier_name=TARGET,
            service_name=target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name,
            make_tier=lambda loaded, context: _make_tier(
                loaded, context, config, drafts, telemetry
            ),
            make_servicer=functools.partial(TargetServicer, drafts=drafts),
            add_servicer=_add_servicer,
            capabilities=lambda loaded: _capabilities(config, loaded),
            telemetry=telemetry,
        )
    finally:
        if drafts is not None:
            await drafts.close()
        telemetry.close()


def _make_tier(
    loaded: LoadedModel,
    context_length: int,
    config: TargetConfig,
    drafts: DraftPool | None = None,
    telemetry: Telemetry = OFF,
) -> Verifier:
    if drafts is not None:
        drafts.serve(
            tokenizer=loaded.tokenizer.fingerprint,
            vocab_size=loaded.vocab_size,
            devices=frozenset({loaded.device_id, *loaded.other_device_ids}),
        )
    verifier = Verifier(
        vocab_size=loaded.vocab_size,
        context_length=context_length,
        drafts=drafts,
        plain_by_plan=_offers_plain_rounds(config, loaded),
        tree_rows=config.tree_rows if loaded.device.type == "cuda" else 0,
        decider=_make_decider(loaded),
    )
    if telemetry.metrics:
        watch_buffers(telemetry.metrics, lambda: {loaded.name: verifier.buffer_use})
    return verifier


def _make_decider(loaded: LoadedModel) -> Decider:
    if loaded.device.type == "cuda":
        from outrider.engine.cuda_decider import CapturedDecider

        return CapturedDecider(loaded.vocab_size, loaded.device)
    return EagerDecider()


def main() -> None:
    run_service(TargetConfig, serve, name="target")
