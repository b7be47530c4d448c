"""EndpointSlices of Kubernetes (discovery.k8s.io/v1) as endpoints. Pure.

A service has one or more slices, each with addresses of one family and the ports that they share.
While an endpoint moves from one slice to another it may stand in both; on a dual-stack cluster a
pod stands in a slice of each family.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.orchestrator.discovery.dns import join
from services.orchestrator.discovery.endpoints import Endpoint, Endpoints, Standing

if TYPE_CHECKING:
    from kubernetes.client import V1Endpoint, V1EndpointConditions, V1EndpointSlice

_FAMILIES = ("IPv4", "IPv6")
"""Slices of names (FQDN) are not for pods. A pod with both is reached by the first."""


class Malformed(Exception):
    """An EndpointSlice lacks what it must have."""


@dataclass(frozen=True, slots=True)
class Slice:
    """What matters of an EndpointSlice."""

    family: str
    ports: tuple[tuple[str, int], ...]
    """Name and number of each."""
    places: tuple["Place", ...]


@dataclass(frozen=True, slots=True)
class Place:
    """One of its endpoints; `pod` is the same for the same pod in other slices, "" if unknown."""

    ip: str
    pod: str
    zone: str
    standing: Standing


def name_of(item: "V1EndpointSlice") -> str:
    """The object's own name. Raises Malformed."""
    name = item.metadata and item.metadata.name
    if not isinstance(name, str) or not name:
        raise Malformed("an object without a name")
    return name


def parse(item: "V1EndpointSlice") -> Slice:
    """What matters of it. Raises Malformed."""
    return Slice(
        family=item.address_type,
        ports=tuple(
            (port.name or "", port.port)
            for port in item.ports or ()
            if port.port is not None and (port.protocol or "TCP") == "TCP"
        ),
        places=tuple(map(_place, item.endpoints or ())),
    )


def endpoints_of(slices: Iterable[Slice], port: str) -> Endpoints:
    """The endpoints of a service's slices, each once, by address. `port` is a name, a number, or ""
    where there is but one; of a slice without such a port none are taken."""
    found: dict[str, Endpoint] = {}
    pods: set[str] = set()
    for family in _FAMILIES:
        seen = set()
        for item in slices:
            number = _port_of(item, port)
            if item.family != family or number is None:
                continue
            for place in item.places:
                if place.pod in pods:
                    continue
                if place.pod:
                    seen.add(place.pod)
                address = join(place.ip, number)
                endpoint = Endpoint(address, place.zone, place.standing)
                found[address] = _fresher(found.get(address), endpoint)
        pods |= seen
    return tuple(found[address] for address in sorted(found))


def _place(endpoint: "V1Endpoint") -> Place:
    if not endpoint.addresses:
        raise Malformed("an endpoint without an address")
    # All addresses of an endpoint are the same pod's: the first one will do.
    return Place(
        ip=endpoint.addresses[0],
        pod=(endpoint.target_ref and endpoint.target_ref.uid) or "",
        zone=endpoint.zone or "",
        standing=_standing(endpoint.conditions),
    )


def _standing(conditions: "V1EndpointConditions | None") -> Standing:
    """`ready` unset means yes, `terminating` unset means no."""
    if conditions is not None and conditions.terminating:
        return Standing.LEAVING
    is_resting = conditions is not None and conditions.ready is False
    return Standing.RESTING if is_resting else Standing.READY


def _port_of(item: Slice, wanted: str) -> int | None:
    if wanted.isdigit():
        return int(wanted)  # As it is: a headless service need not name its ports.
    fitting = [number for name, number in item.ports if not wanted or name == wanted]
    return fitting[0] if len(fitting) == 1 else None


def _fresher(known: Endpoint | None, other: Endpoint) -> Endpoint:
    """Of two mentions of an address the one that is further in a pod's life: the other one lags."""
    order = (Standing.LEAVING, Standing.READY, Standing.RESTING)
    if known is None or order.index(other.standing) < order.index(known.standing):
        return other
    return known
