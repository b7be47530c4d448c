"""Sessions that change their target or their draft between two rounds: nothing of it shows."""

import itertools
from typing import Any

import pytest
from test_decoder_more_rounds import (
    PROMPT,
    TRUTH,
    Generation,
    ScriptedTarget,
    generating,
    random_groups,
)

from outrider.errors import Unavailable
from outrider.v1 import worker_pb2
from services.orchestrator.controller import FixedLength
from services.orchestrator.decoder import DirectDraft
from services.orchestrator.proposers import DRAFT


class Planned(ScriptedTarget):
    """A target that asks drafts by itself; it notes which ones, and what it is tuned to."""

    def __init__(self, **kind: Any) -> None:
        super().__init__(**kind)
        self.drafts: list[tuple[int, str]] = []
        """Tokens generated before a verification, and the draft of its plan."""

    async def Info(self, request: Any, timeout: float) -> worker_pb2.InfoResponse:
        info = await super().Info(request, timeout)
        info.capabilities.append("drafts")
        return info

    def handle(self, entry: worker_pb2.Entry) -> None:
        if entry.HasField("tune"):
            return
        if entry.HasField("verify"):
            done = entry.header.base_len - len(PROMPT)
            self.drafts.append((done, entry.verify.draft.address))
        super().handle(entry)


class Moves:
    """Whereabouts that a test sets by the number of tokens in the log."""

    def __init__(self, one: Generation, drafts: dict[int, str] | None = None) -> None:
        self._one = one
        self._drafts = drafts or {}
        self.leave_at: list[int] = []
        self.at = 0
        """The target, by number."""

    def install(self) -> None:
        self._one.decoder.whereabouts = self
        pick = self._one.decoder.find_target
        links = self._one.links

        def find_target() -> Any:
            up = [link.info for link in links]
            for n, link in enumerate(links):
                if n != self.at:
                    link.info = None
            try:
                if links[self.at].info is None:
                    raise Unavailable("away")
                return pick()
            finally:
                for link, info in zip(links, up, strict=True):
                    link.info = info

        self._one.decoder.find_target = find_target

    @property
    def done(self) -> int:
        return len(self._one.decoder.log) - len(PROMPT)

    def target_should_change(self) -> bool:
        if self.leave_at and self.done >= self.leave_at[0]:
            self.leave_at.pop(0)
            self.at = (self.at + 1) % len(self._one.links)
            return True
        return False

    def direct_draft(self) -> DirectDraft | None:
        names = [name for least, name in sorted(self._drafts.items()) if self.done >= least]
        return DirectDraft(names[-1], timeout_s=1.0) if names else None

    def drafted(self, *, failed: bool) -> None:
        raise AssertionError("no round told of a draft")


@pytest.mark.parametrize("offers", [True, False], ids=["more rounds", "one by one"])
@pytest.mark.parametrize("leave_at", [[1], [5], [5, 9, 30], list(range(1, 40))], ids=len)
async def test_a_session_that_leaves_its_target_says_the_same(offers: bool, leave_at: list[int]):
    targets = [ScriptedTarget(offers=offers, groups=random_groups(n)) for n in range(2)]
    async with generating(*targets) as one:
        moves = Moves(one)
        moves.leave_at = list(leave_at)
        moves.install()
        await one.finish()
        assert one.tokens == TRUTH[:40]
        assert moves.leave_at == [] or len(leave_at) == 39
        for target in targets:
            assert target.asked and not target.is_running
            assert target.told >= sum(done < 40 for done, *_ in target.asked)
        # A target that went on by itself is told to stop.
        assert bool(targets[0].cancels) == offers
        starts = sorted(done for target in targets for done, *_ in target.asked)
        assert starts == sorted(set(starts)), "no round was asked for twice"


async def test_rounds_that_a_left_target_has_made_ahead_are_not_told():
    ahead, other = ScriptedTarget(groups=itertools.repeat(1)), ScriptedTarget()
    async with generating(ahead, other) as one:
        moves = Moves(one)
        moves.leave_at = [3]
        moves.install()
        await one.finish()
        assert one.tokens == TRUTH[:40]
        [first] = ahead.asked
        assert first == (0, 0, 39)
        assert other.asked[0][0] >= 3
        assert one.stats.rounds == 40


async def test_a_plan_with_another_draft_is_a_new_one():
    target = Planned()
    async with generating(target, controller=FixedLength(3, DRAFT)) as one:
        moves = Moves(one, {0: "first:1", 10: "second:1", 25: "first:1"})
        moves.install()
        await one.finish()
        assert one.tokens == TRUTH[:40]
        by_draft = [name for done, name in target.drafts if done]
        changes = [name for name, _ in itertools.groupby(by_draft)]
        assert changes[-2:] == ["second:1", "first:1"]
        assert len(target.cancels) == 2, "one for each change"
        seconds = [done for done, name in target.drafts if name == "second:1"]
        assert 10 <= seconds[0] < 25


async def test_a_draft_that_stays_costs_nothing():
    target = Planned()
    async with generating(target, controller=FixedLength(3, DRAFT)) as one:
        Moves(one, {0: "first:1"}).install()
        await one.finish()
        assert one.tokens == TRUTH[:40] and not target.cancels
        assert len(target.drafts) <= 3


async def test_a_draft_that_is_gone_leaves_plain_rounds():
    target = Planned()
    async with generating(target, controller=FixedLength(3, DRAFT)) as one:
        moves = Moves(one, {0: "first:1"})
        moves.install()
        pick = moves.direct_draft
        moves.direct_draft = lambda: pick() if moves.done < 10 else None  # type: ignore[method-assign]
        await one.finish()
        assert one.tokens == TRUTH[:40]
        assert [name for done, name in target.drafts if done > 10][-1] == ""
