"""Policies for the simulator: every fixed length, an oracle, and the controller that serves."""

from collections.abc import Callable

from outrider.speculation.controller import AdaptiveController, Limits
from outrider.speculation.fan_out import FanOut, RankCounts, allocate
from outrider.speculation.length import Mode, Offer, RoundCosts, choose
from outrider.speculation.load import Kind, ProposerPool, TargetLoad
from outrider.speculation.observation import Observation
from outrider.speculation.world import MakePolicy, Policy, Surroundings, World


class Oracle:
    """Knows the chances of guesses and what rounds cost, but not what comes.

    Its sessions are one at a time: it does not foresee what others ask for.
    """

    def __init__(self, world: World, look: Callable[[], Surroundings], k_max: int) -> None:
        self._world, self._look, self._k_max = world, look, k_max
        self._ranks = RankCounts()
        self._outcomes = FanOut((), 0.0)

    def next_length(self) -> int:
        world, seen = self._world, self._look()
        rates = [seen.rates[min(i, len(seen.rates) - 1)] for i in range(self._k_max + 1)]
        context_s = world.context_s * seen.context_len
        pass_s = world.verify.predict(seen.other_rows + 1) + context_s
        costs = RoundCosts(
            pass_s + world.plain_trip_s,
            pass_s + world.guess_trip_s,
            world.verify.slope + context_s,
            1.0,
            seen.other_rows / pass_s,
        )
        draft_s = world.draft.predict(0.0) + 2.0 * world.delay_s
        slope, outcome_s = world.draft.slope, world.draft.other_slope
        offer = Offer("draft", rates, draft_s, slope, outcome_s, ranks=self._ranks)
        decision = choose([offer], costs, world.mode)
        k = decision.num_speculative_tokens
        self._outcomes = allocate(rates[: k + 1], self._ranks, decision.fan_out)
        return k

    def plain_rounds(self) -> int:
        return 0

    def outcomes(self) -> FanOut:
        return self._outcomes

    def observe(self, seen: Observation) -> None:
        pass

    def close(self) -> None:
        pass


def oracle(world: World, k_max: int) -> MakePolicy:
    return lambda look: Oracle(world, look, k_max)


def adaptive(mode: Mode, limits: Limits) -> MakePolicy:
    """Controllers that share what sessions of one target share; a pinned one is a fixed length."""
    load, pool = TargetLoad(), ProposerPool("draft")

    def make(look: Callable[[], Surroundings]) -> Policy:
        kind = Kind.of(0.0, look().context_len)
        return AdaptiveController(load, [pool], mode=mode, limits=limits, kind=kind)

    return make
