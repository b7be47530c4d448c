"""How many next-best guesses a generation asks its draft for."""

from dataclasses import dataclass

import pytest

from outrider.types import GenerationSpec, SamplingParams, VerificationMode
from outrider.v1 import worker_pb2
from services.orchestrator.generation import num_alternatives

GREEDY = SamplingParams()
WARM = SamplingParams(temperature=1.0)


@dataclass
class Plan:
    """What is looked at of a GenerationPlan."""

    alternatives: int | None
    spec: GenerationSpec


def count(
    asked=None,
    default=-1,
    device="cuda:0",
    target=("chain", "tree"),
    draft=("chain", "alternatives"),
    sampling=WARM,
    mode=VerificationMode.COUPLED,
):
    return num_alternatives(
        Plan(asked, GenerationSpec(sampling, mode)),
        default,
        worker_pb2.InfoResponse(device=device, capabilities=target),
        worker_pb2.InfoResponse(capabilities=draft),
    )


@pytest.mark.parametrize(("device", "expected"), [("cuda", 1), ("cuda:3", 1), ("cpu", 0)])
def test_left_to_itself_a_server_asks_for_one_on_a_gpu(device, expected):
    assert count(device=device) == expected


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_a_request_counts_before_the_servers_default(device):
    assert count(asked=0, default=2, device=device) == 0
    assert count(asked=3, default=2, device=device) == 3
    assert count(default=2, device=device) == 2
    assert count(default=0, device=device) == 0


def test_nothing_is_asked_for_that_the_workers_do_not_offer():
    assert count(asked=2, target=("chain",)) == 0
    assert count(asked=2, draft=("chain",)) == 0


def test_nothing_is_asked_for_where_distributions_decide():
    assert count(default=2, mode=VerificationMode.REJECTION) == 0
    assert count(default=2, mode=VerificationMode.REJECTION, sampling=GREEDY) == 2
