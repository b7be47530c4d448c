"""From a setting to a source of endpoints.

host:port, [ipv6]:port, unix:/path                one worker
dns:///NAME:PORT                                  all addresses of a name
kubernetes:///SERVICE[.NAMESPACE][:PORT]          the endpoints of a service; PORT is a number or
                                                  a name, and may be left out where there is one
"""

import re
from dataclasses import dataclass

from outrider.errors import InvalidArgument
from services.orchestrator.discovery.dns import DEFAULT_REFRESH_S, DnsSource
from services.orchestrator.discovery.endpoints import Source, StaticSource
from services.orchestrator.discovery.kube_api import KubeAccess, check_client
from services.orchestrator.discovery.kubernetes import KubernetesSource

FORMS = "HOST:PORT, unix:/PATH, dns:///NAME:PORT or kubernetes:///SERVICE[.NAMESPACE][:PORT]"
_DNS = re.compile(r"dns:///(?P<host>[A-Za-z0-9._-]{1,253}):(?P<port>\d{1,5})\Z")
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_KUBERNETES = re.compile(
    rf"kubernetes:///(?P<service>{_LABEL})(?:\.(?P<namespace>{_LABEL}))?"
    r"(?::(?P<port>\d{1,5}|[a-z0-9-]{1,15}))?\Z"
)
_STATIC = re.compile(r"(?:[^\[\]/:\s]+|\[[0-9A-Fa-f:.%\w]+\]):\d{1,5}\Z|unix:\S+\Z")


@dataclass(frozen=True, slots=True)
class DiscoveryOptions:
    """How sources that need more than their address are made."""

    dns_refresh_s: float = DEFAULT_REFRESH_S
    kubernetes: KubeAccess | None = None
    """None: there is no cluster to ask."""


def needs_kubernetes(text: str) -> bool:
    return text.startswith("kubernetes:")


def source_of(text: str, options: DiscoveryOptions, *, field: str) -> Source:
    """The source that a setting names. Raises InvalidArgument with the field's name."""
    if found := _DNS.match(text):
        return DnsSource(found["host"], int(found["port"]), refresh_s=options.dns_refresh_s)
    if found := _KUBERNETES.match(text):
        if options.kubernetes is None:
            raise InvalidArgument(f"{text!r}, but no API server is known", field=field)
        check_client(field=field)
        return KubernetesSource(
            options.kubernetes, found["service"], found["namespace"] or "", found["port"] or ""
        )
    if _STATIC.match(text):
        return StaticSource(text)
    raise InvalidArgument(f"{text!r} is none of {FORMS}", field=field)
