"""The times that pods get to come and go fit the services, and are those by which tests/chaos
restarts every tier under load.
"""

import pytest

from cases import PROFILE_CASES
from chaos import rolling
from charts import Case
from services.orchestrator.discovery.dns import DEFAULT_REFRESH_S
from services.orchestrator.service import _FREE_S
from timings import TIERS, timings

pytestmark = pytest.mark.chart

every_profile = pytest.mark.parametrize("case", PROFILE_CASES, ids=lambda case: case.name)
DNS_TTL_S = 5
"""Of CoreDNS's answers about Services, where nobody has set another."""
LOOKED_UP_S = 1.2 * DEFAULT_REFRESH_S + DNS_TTL_S
"""How late an orchestrator that asks DNS notices something, at most."""


def test_restarts_under_load_have_the_times_of_the_chart() -> None:
    found = timings()
    assert set(found) == set(TIERS) == set(rolling.DRAIN_S)
    for tier, times in found.items():
        assert rolling.PRE_STOP_S * rolling.SCALE == times.pre_stop_s, tier
        assert rolling.DRAIN_S[tier] * rolling.SCALE == times.drain_s, tier
        assert rolling.MIN_READY_S[tier] * rolling.SCALE == times.min_ready_s, tier
        assert rolling.RESERVE_S == times.reserve_s, tier


def test_other_values_are_seen() -> None:
    changed = {"preStopSeconds": 7, "drainSeconds": 21, "minReadySeconds": 3}
    found = timings(Case("changed", {"target": changed}))
    target, draft = found["target"], found["draft"]
    assert (target.pre_stop_s, target.drain_s, target.min_ready_s) == (7, 21, 3)
    assert target.grace_s == 7 + 21 + 15 and draft == timings()["draft"]


@every_profile
def test_pods_have_the_time_to_be_found_and_to_be_left(case: Case) -> None:
    for tier, times in timings(case).items():
        assert times.reserve_s > _FREE_S + 5, tier
        # The demo has one of each, and EndpointSlices are known at once.
        if tier == "orchestrator" or case.profile:
            continue
        # Sessions stay until orchestrators know of another worker, and none is lost on the way.
        assert times.min_ready_s >= LOOKED_UP_S, (tier, times)
        assert times.pre_stop_s + times.drain_s >= LOOKED_UP_S, (tier, times)
