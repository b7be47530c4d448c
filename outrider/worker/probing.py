"""What a worker finds when it looks at itself: its machine and its KV store."""

import torch

from outrider.engine.loaded_model import LoadedModel
from outrider.kv_store.connection import RIGHTS
from outrider.rpc.channel import ChannelSecurity
from outrider.rpc.machine_facts import machine_facts
from outrider.rpc.tls_probe import look_at_store_certificate
from outrider.store_probe import probe_store
from outrider.v1 import facts_pb2
from outrider.worker.kv_blocks import KvBlocks

_STORE_S = 5.0
_HANDSHAKE_S = 3.0


def look_at_machine(loaded: LoadedModel) -> facts_pb2.MachineFacts:
    """Blocks for a moment: NVIDIA's driver tells its version through a file."""
    on_gpu = loaded.device.type == "cuda"
    name = torch.cuda.get_device_name(loaded.device) if on_gpu else ""
    return machine_facts(torch=str(torch.__version__), accelerator=name)


async def look_at_kv_store(store: KvBlocks, samples: int) -> facts_pb2.StoreFacts:
    """Over a connection of its own, by the worker's user. Raises nothing that Redis may cause."""
    address = store.address
    redis = address.connect_async()
    try:
        facts = await probe_store(
            redis,
            address=address.name,
            rights=RIGHTS,
            prefix="outrider:kv:",
            samples=samples,
            timeout_s=_STORE_S,
            explain=address.explain,
        )
    finally:
        await redis.aclose()
    security = ChannelSecurity(address.ca_file, address.cert_file, address.key_file)
    await look_at_store_certificate(facts, security, timeout_s=_HANDSHAKE_S)
    fetch = store.estimate.fetch
    if fetch is not None and fetch.byte_s > 0:
        facts.read_bytes_per_s = int(1 / fetch.byte_s)
    return facts
