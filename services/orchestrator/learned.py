"""What this orchestrator has learned of targets and proposers: all generations share it."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TypeVar

from outrider.remote.outcomes import BufferUse
from outrider.speculation.forecast import Shared
from outrider.speculation.load import ProposerPool, TargetLoad

_MAX_KNOWN = 1024

K = TypeVar("K")
V = TypeVar("V")


class Learned:
    """Costs and load of each target, and how the guesses of each proposer fare there."""

    def __init__(self) -> None:
        self._loads: OrderedDict[str, TargetLoad] = OrderedDict()
        self._pools: OrderedDict[tuple[str, str, str], ProposerPool] = OrderedDict()
        self._outcomes: OrderedDict[str, Shared] = OrderedDict()
        self._buffers: dict[str, BufferUse] = {}

    def load(self, address: str) -> TargetLoad:
        """The target at an address."""
        return _recall(self._loads, address, TargetLoad)

    def pool(self, model: str, proposer: str, fingerprint: str = "") -> ProposerPool:
        """A proposer for a target model; `fingerprint` is that of a draft model."""
        return _recall(self._pools, (model, proposer, fingerprint), lambda: ProposerPool(proposer))

    def outcomes(self, address: str) -> Shared:
        """Which outcomes of verifications come about, with the draft at an address."""
        return _recall(self._outcomes, address, Shared)

    def buffer_use(self, model: str) -> BufferUse:
        """What becomes of outcomes prepared for a served model, selected from here."""
        return self._buffers.setdefault(model, BufferUse())

    def buffer_uses(self) -> Mapping[str, BufferUse]:
        """By model; from any thread."""
        return dict(self._buffers)


def _recall(known: "OrderedDict[K, V]", key: K, make: Callable[[], V]) -> V:
    if key not in known:
        known[key] = make()
    known.move_to_end(key)
    while len(known) > _MAX_KNOWN:
        known.popitem(last=False)
    return known[key]
