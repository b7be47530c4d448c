"""What an orchestrator finds out about itself, its store and its workers when it is asked to look.

Facts alone: `outrider doctor` judges them. Workers may be out of everybody else's reach, so the
ways to them are measured from here.
"""

import asyncio
import time
from typing import Any

import grpc.aio

import outrider
from outrider.errors import OutriderError, PermissionDenied
from outrider.remote.protocol import KNOWN_CAPABILITIES, PROTOCOL_VERSION
from outrider.rpc.auth import current_caller
from outrider.rpc.channel import ChannelSecurity
from outrider.rpc.machine_facts import machine_facts
from outrider.rpc.status import abort_with
from outrider.rpc.tls_probe import answers, look_at_certificate, look_at_store_certificate
from outrider.trips import DEFAULT_SAMPLES, MAX_SAMPLES, Reading, clock_of, unix_us
from outrider.v1 import diagnosis_pb2, diagnosis_pb2_grpc, facts_pb2, worker_pb2
from services.orchestrator.admission import Admission
from services.orchestrator.config import OrchestratorConfig
from services.orchestrator.models import ModelRegistry
from services.orchestrator.store import SessionStore
from services.orchestrator.workers import FRESH_S, Worker

_STORE_S = 6.0
_WORKER_S = 2.0
_PROBE_S = 12.0
_HANDSHAKE_S = 3.0
_READINGS = 5
_AT_ONCE = 4
"""Ways measured together; more would measure each other."""


class DiagnosisServicer(diagnosis_pb2_grpc.DiagnosisServiceServicer):
    """Looks when it is asked to; one look at a time."""

    def __init__(
        self,
        config: OrchestratorConfig,
        store: SessionStore,
        registry: ModelRegistry,
        admission: Admission,
        owner: str,
    ) -> None:
        self.listens = ""
        """Set once it is known."""
        self._config = config
        self._store = store
        self._registry = registry
        self._admission = admission
        self._owner = owner
        self._looking = asyncio.Lock()
        self._measuring = asyncio.Semaphore(_AT_ONCE)

    async def Diagnose(
        self,
        request: diagnosis_pb2.DiagnoseRequest,
        context: "grpc.aio.ServicerContext[Any, diagnosis_pb2.DiagnoseResponse]",
    ) -> diagnosis_pb2.DiagnoseResponse:
        received = unix_us()
        try:
            self._check_caller()
        except OutriderError as error:
            await abort_with(context, error)
        samples = min(request.samples or DEFAULT_SAMPLES, MAX_SAMPLES)
        async with self._looking:
            found = self._about_itself()
            store, workers = await asyncio.gather(
                self._look_at_store(samples), self._look_at_workers(samples)
            )
        found.store.CopyFrom(store)
        found.workers.extend(workers)
        found.received_unix_us, found.sent_unix_us = received, unix_us()
        return found

    def _check_caller(self) -> None:
        tenant = current_caller().tenant
        if self._config.authenticates and tenant not in self._config.admin_callers:
            raise PermissionDenied(
                f"caller {tenant} may not ask for a diagnosis: name it in the orchestrator's "
                "setting admin_callers"
            )

    def _about_itself(self) -> diagnosis_pb2.DiagnoseResponse:
        config, admission = self._config, self._admission
        return diagnosis_pb2.DiagnoseResponse(
            version=outrider.__version__,
            protocol_min=PROTOCOL_VERSION,
            protocol_max=PROTOCOL_VERSION,
            known_capabilities=sorted(KNOWN_CAPABILITIES),
            owner=self._owner,
            listens=self.listens,
            tls=bool(config.tls_cert),
            client_certificates=bool(config.tls_client_ca),
            callers_authenticated=config.authenticates,
            worker_tls=config.worker_security.tls,
            machine=machine_facts(),
            waiting=sum(admission.num_waiting(model.name) for model in self._registry.models),
            max_waiting=config.max_waiting,
            running=admission.num_running,
            max_running=config.max_generations,
            drafting=config.drafting,
            jwt_leeway_s=config.jwt_leeway_s if config.jwt_keys else 0.0,
            sources=[*config.targets, *config.drafts],
        )

    async def _look_at_store(self, samples: int) -> facts_pb2.StoreFacts:
        facts, config = await self._store.look(samples, _STORE_S), self._config
        security = ChannelSecurity(config.store_ca, config.store_cert, config.store_key)
        await look_at_store_certificate(facts, security, timeout_s=_HANDSHAKE_S)
        return facts

    # --- workers ------------------------------------------------------------------------------

    async def _look_at_workers(self, samples: int) -> list[diagnosis_pb2.WorkerFacts]:
        return await asyncio.gather(
            *(
                self._look_at_worker(tier.name, worker, samples)
                for tier in (self._registry.targets, self._registry.drafts)
                for worker in tier.workers
            )
        )

    async def _look_at_worker(
        self, tier: str, worker: Worker, samples: int
    ) -> diagnosis_pb2.WorkerFacts:
        facts = _known(tier, worker)
        await asyncio.gather(
            self._measure(worker, samples, facts),
            self._try_doors(tier, worker.address, facts),
        )
        return facts

    async def _measure(
        self, worker: Worker, samples: int, facts: diagnosis_pb2.WorkerFacts
    ) -> None:
        """The way there, its clock, and what it says of itself."""
        if not facts.up:
            return
        link = worker.link
        try:
            async with self._measuring:
                facts.round_trips.CopyFrom(await link.measure(samples, within_s=_WORKER_S))
            readings = []
            for _ in range(_READINGS):
                sent = unix_us()
                told = await link.probe(worker_pb2.ProbeRequest(), _WORKER_S)
                reading = Reading(sent, told.received_unix_us, told.sent_unix_us, unix_us())
                readings.append(reading)
            facts.clock.CopyFrom(clock_of(readings))
            request = worker_pb2.ProbeRequest(samples=samples)
            if facts.tier == "target":
                drafts = (draft.address for draft in self._registry.drafts.workers if draft.usable)
                request.draft_addresses.extend(drafts)
            facts.probe.CopyFrom(await link.probe(request, _PROBE_S))
        except OutriderError as error:
            facts.probe_error = f"{error.grpc_name}: {error}"

    async def _try_doors(self, tier: str, address: str, facts: diagnosis_pb2.WorkerFacts) -> None:
        """Its certificate, and whether it lets in who should not be."""
        own = self._config.worker_security
        certificate = await look_at_certificate(address, own, timeout_s=_HANDSHAKE_S)
        if certificate is not None:
            facts.certificate.CopyFrom(certificate)
        if not facts.up:
            return
        method = f"/outrider.v1.{tier.capitalize()}Service/Info"
        if own.tls:
            facts.takes_plaintext = await answers(
                address, ChannelSecurity(), method, timeout_s=_WORKER_S
            )
        if own.token_file or own.cert_file:
            bare = ChannelSecurity(ca_file=own.ca_file, server_name=own.server_name)
            facts.takes_anyone = await answers(address, bare, method, timeout_s=_WORKER_S)


def _known(tier: str, worker: Worker) -> diagnosis_pb2.WorkerFacts:
    """What the orchestrator knows without asking."""
    link = worker.link
    facts = diagnosis_pb2.WorkerFacts(
        tier=tier, address=worker.address, standing=worker.standing.value, up=link.up
    )
    if link.info is not None:
        facts.info.CopyFrom(link.info)
    if link.vitals is not None and time.monotonic() - link.vitals_at <= FRESH_S:
        facts.vitals.CopyFrom(link.vitals)
    if (trouble := worker.misfit or link.refused) is not None:
        facts.trouble = str(trouble)
    elif not link.up:
        facts.trouble = f"the {tier} at {worker.address} does not answer"
    return facts
