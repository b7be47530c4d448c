"""A draft of two ranks behind a real orchestrator: guesses as those of one rank, and a rank that
dies costs speed alone."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import pytest_asyncio

from outrider.cli.process import Child
from outrider.types import VerificationMode
from scripted_workers import Parts, Rig, Stream, only_child_of

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(120),
    pytest.mark.slow,
]

PROMPTS = [f"guessed by two ranks {number}" for number in range(3)]
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": {"temperature": 1.0, "seed": 3},
    "top-p": {"temperature": 1.0, "top_p": 0.9, "seed": 4},
    "rejection": {"temperature": 1.0, "seed": 5, "mode": VerificationMode.REJECTION},
}
WAYS: dict[str, dict[str, Any]] = {
    "after each verdict": {"fan_out": 0},
    "with alternatives": {"fan_out": 0, "alternatives": 2},
    "ahead": {"fan_out": 6},
}

# Trees of guesses are for the other modes.
CASES = [
    (mode, way)
    for mode in MODES
    for way in WAYS
    if (mode, way) != ("rejection", "with alternatives")
]


class DraftGroup(NamedTuple):
    """A draft of two ranks, which are processes of one host."""

    child: Child
    address: str

    @property
    def follower(self) -> psutil.Process:
        """Rank 1."""
        return only_child_of(self.child)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def group(parts: Parts, tiny_models: dict[str, Path]) -> AsyncIterator[DraftGroup]:
    """The last test of this file breaks it."""
    settings = {"tensor_parallel": 2, "group_timeout_s": 3.0}
    async with parts.worker("draft", tiny_models["draft"], **settings) as started:
        yield DraftGroup(*started)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def rig(stack: Rig, parts: Parts, group: DraftGroup) -> AsyncIterator[Rig]:
    """It alone guesses for the stack's targets."""
    async with parts.orchestrator(
        stack.store_url, targets=stack.targets, drafts=[group.address]
    ) as made:
        yield made


@pytest.mark.parametrize(("mode", "way"), CASES)
async def test_whatever_a_group_guesses_the_tokens_are_those_of_plain_decoding(
    rig: Rig, mode: str, way: str
) -> None:
    options = {"max_tokens": 32, "ignore_eos": True, **MODES[mode]}
    ours = await rig.complete_all(PROMPTS, num_speculative_tokens=4, **WAYS[way], **options)
    assert [len(done.token_ids) for done in ours] == [32] * len(PROMPTS)
    if mode != "rejection":  # There other guesses give other tokens, of the same distribution.
        plain = await rig.complete_all(PROMPTS, num_speculative_tokens=0, **options)
        assert [done.token_ids for done in ours] == [done.token_ids for done in plain]
    # One that guesses wrong, as with KV or weights of another rank, has hardly any accepted.
    accepted = sum(done.stats.accepted for done in ours)
    proposed = sum(done.stats.proposed for done in ours)
    assert accepted > 20 and accepted > 0.3 * proposed


async def test_a_group_guesses_as_well_as_one_rank(stack: Rig, rig: Rig) -> None:
    """The same guesses for the same bases: all but those that came too late."""
    options = {"max_tokens": 40, "ignore_eos": True, "num_speculative_tokens": 4, "fan_out": 0}
    for mode in ("greedy", "coupled"):
        one, two = [
            [await each.complete(prompt, **options, **MODES[mode]) for prompt in PROMPTS]
            for each in (stack, rig)
        ]
        assert [done.token_ids for done in one] == [done.token_ids for done in two]
        rates = [
            sum(done.stats.accepted for done in runs) / sum(done.stats.proposed for done in runs)
            for runs in (one, two)
        ]
        assert rates[0] == pytest.approx(rates[1], abs=0.03) and rates[0] > 0.3


async def test_a_rank_that_dies_costs_its_sessions_their_guesses_for_a_moment(
    stack: Rig, parts: Parts, group: DraftGroup
) -> None:
    """The streams go on, with another draft, and say what they would have said."""
    options = {"max_tokens": 300, "ignore_eos": True, "temperature": 1.0, "seed": 8}
    expected = await stack.complete_all(PROMPTS, num_speculative_tokens=0, **options)
    async with parts.orchestrator(
        stack.store_url, targets=stack.targets, drafts=[group.address, *stack.drafts]
    ) as rig:
        streams = [Stream(rig, prompt, **options) for prompt in PROMPTS]
        for stream in streams:
            await stream.reaches(20)
        assert (await rig.info(group.address)).sessions > 0
        group.follower.send_signal(signal.SIGKILL)
        done = [await stream.end() for stream in streams]
        later = await rig.complete(PROMPTS[0], **options)
    assert [one.token_ids for one in done] == [one.token_ids for one in expected]
    assert all(one.stats.accepted > 60 for one in [*done, later])
    assert later.token_ids == expected[0].token_ids
    assert await asyncio.wait_for(group.child.wait(), 10) == 1
    last = group.child.log_tail().splitlines()[-1]
    assert last == "error: rank 1 is gone: it was killed by SIGKILL"
