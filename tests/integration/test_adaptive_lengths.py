"""The controller in a running system: it changes lengths and proposers, never what is said."""

import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from scripted_workers import Parts, Rig, total

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

PROMPTS = [f"{number}: what comes next?" for number in range(4)]
COUPLED = {"temperature": 1.0, "top_p": 0.95}


@pytest_asyncio.fixture(loop_scope="session", params=["direct", "relayed"])
async def adaptive(stack: Rig, parts: Parts, request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    """The shared workers behind an orchestrator whose controller chooses; it knows nothing yet."""
    async with parts.orchestrator(
        stack.store_url,
        targets=stack.targets,
        drafts=stack.drafts,
        num_speculative_tokens=-1,
        drafting=request.param,
    ) as rig:
        yield rig


@pytest.mark.parametrize("proposer", ["draft", "ngram", "auto"])
@pytest.mark.parametrize("sampling", [{}, COUPLED], ids=["greedy", "coupled"])
async def test_whatever_it_chooses_the_output_is_that_of_plain_decoding(
    adaptive: Rig, sampling: dict[str, Any], proposer: str
) -> None:
    options = {"max_tokens": 100, "ignore_eos": True, "seeds": True, **sampling}
    plain = await adaptive.complete_all(PROMPTS, num_speculative_tokens=0, **options)
    chosen = await adaptive.complete_all(PROMPTS, proposer=proposer, **options)
    assert [d.token_ids for d in chosen] == [d.token_ids for d in plain]
    stats = total(chosen)
    print(f"{proposer}: {stats}")
    assert stats.plain > 0
    assert stats.proposed > 0 or proposer == "ngram"  # Nothing may have come again.


async def test_decisions_explain_themselves(adaptive: Rig) -> None:
    done = await adaptive.complete(PROMPTS[0], max_tokens=120, ignore_eos=True, report_rounds=True)
    assert len(done.rounds) == done.stats.rounds
    lengths = [report.next_num_speculative_tokens for report in done.rounds]
    assert all(abs(b - a) <= 2 for a, b in itertools.pairwise(lengths))
    last = done.rounds[-1]
    assert last.plain_tokens_per_s > 0 and last.expected_tokens_per_s > 0
    assert {"plain_s", "verify_s", "row_s"} <= set(last.inputs)
    assert all(report.round_us > 0 for report in done.rounds)


async def test_requests_may_pin_cap_and_switch_off(adaptive: Rig) -> None:
    options = {"max_tokens": 60, "ignore_eos": True}
    pinned = await adaptive.complete(PROMPTS[0], num_speculative_tokens=5, **options)
    assert len(pinned.stats.proposed_by_position) == 5
    for _ in range(3):
        capped = await adaptive.complete(PROMPTS[0], max_speculative_tokens=1, **options)
        assert len(capped.stats.proposed_by_position) <= 1
    off = await adaptive.complete(PROMPTS[0], num_speculative_tokens=0, **options)
    none = await adaptive.complete(PROMPTS[0], max_speculative_tokens=0, **options)
    assert off.stats.proposed == none.stats.proposed == 0
    assert pinned.token_ids == capped.token_ids == off.token_ids == none.token_ids
