"""EndpointSlices of Kubernetes (discovery.k8s.io/v1) as endpoints. Pure.

A service has one or more slices, each with addresses of one family and the ports that they share.
While an endpoint moves from one slice to another it may stand in both; on a dual-stack cluster a
pod stands in a slice of each family.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from services.orchestrator.discovery.dns import join
from services.orchestrator.discovery.endpoints import Endpoint, Endpoints, Standing

_FAMILIES = ("IPv4", "IPv6")
"""Slices of names (FQDN) are not for pods. A pod with both is reached by the first."""


class Malformed(Exception):
    """What the API server sent is no EndpointSlice."""


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


def name_of(item: Any) -> str:
    """The object's own name. Raises Malformed."""
    try:
        name = item["metadata"]["name"]
    except (KeyError, TypeError):
        raise Malformed("an object without a name") from None
    if not isinstance(name, str):
        raise Malformed("a name that is no text")
    return name


def parse(item: Any) -> Slice:
    """An EndpointSlice as JSON has it. Raises Malformed."""
    try:
        return Slice(
            family=str(item["addressType"]),
            ports=tuple(
                (str(port.get("name") or ""), int(port["port"]))
                for port in item.get("ports") or ()
                if port.get("port") is not None and port.get("protocol", "TCP") == "TCP"
            ),
            places=tuple(_place(endpoint) for endpoint in item.get("endpoints") or ()),
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise Malformed(f"an EndpointSlice with a fault: {error!r}") from None


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


def _place(endpoint: Mapping[str, Any]) -> Place:
    conditions = endpoint.get("conditions") or {}
    # All addresses of an endpoint are the same pod's: the first one will do.
    return Place(
        ip=str(endpoint["addresses"][0]),
        pod=str((endpoint.get("targetRef") or {}).get("uid") or ""),
        zone=str(endpoint.get("zone") or ""),
        standing=_standing(conditions),
    )


def _standing(conditions: Mapping[str, Any]) -> Standing:
    """`ready` unset means yes, `terminating` unset means no."""
    if conditions.get("terminating"):
        return Standing.LEAVING
    return Standing.RESTING if conditions.get("ready") is False else Standing.READY


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
