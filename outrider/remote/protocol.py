"""Which workers can be talked to: versions of the protocol, and what a worker may ask for."""

from outrider.errors import FailedPrecondition
from outrider.v1 import worker_pb2

PROTOCOL_VERSION = 1
KNOWN_CAPABILITIES = frozenset(
    {
        "chain",
        "tree",
        "bulk",
        "greedy",
        "coupled",
        "rejection",
        "logprobs",
        "min_tokens",
        "more_rounds",
        "drafts",
        "ahead",
        "alternatives",
        "run_ahead",
        "extend",
    }
)


def check_protocol(info: worker_pb2.InfoResponse, address: str) -> None:
    """Refuse a worker that speaks another protocol or asks for what is not known here."""
    if not info.protocol_min <= PROTOCOL_VERSION <= info.protocol_max:
        raise FailedPrecondition(
            f"{address} speaks protocol {info.protocol_min} to {info.protocol_max}, this "
            f"orchestrator {PROTOCOL_VERSION}"
        )
    unknown = set(info.required_capabilities) - KNOWN_CAPABILITIES
    if unknown:
        raise FailedPrecondition(
            f"{address} requires capabilities unknown here: {', '.join(sorted(unknown))}"
        )


def devices_of(info: worker_pb2.InfoResponse) -> set[str]:
    """The devices that a worker is known to compute on; workers that share one compute at each
    other's cost."""
    return {device for device in (info.device_id, *info.other_device_ids) if device}
