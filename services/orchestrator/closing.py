"""Sessions closed on workers that nobody here has had them on: former owners had, perhaps."""

from collections.abc import Sequence

from outrider.remote.link import WorkerLink
from outrider.remote.session import RemoteSession, Routing
from outrider.token_log import TokenLog
from outrider.types import Fence, GenerationSpec, SamplingParams
from services.orchestrator.models import ModelRegistry

_NO_SPEC = GenerationSpec(SamplingParams())


def close_everywhere(
    registry: ModelRegistry, fence: Fence, tenant: str, *, but: Sequence[WorkerLink] = ()
) -> None:
    """Have whichever worker has the session free its KV, `but` those. Raises nothing and waits for
    nothing; a worker that is away now frees it when it is back."""
    routing = Routing(request_id="", tenant=tenant, model="")
    for link in (*registry.links("target"), *registry.links("draft")):
        if link in but:
            continue
        remote = RemoteSession(link, fence, _NO_SPEC, routing, TokenLog())
        remote.close(opened_by_others=True)
