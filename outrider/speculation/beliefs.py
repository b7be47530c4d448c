"""What a session believes: how its guesses fare, and what its next round would cost."""

from collections.abc import Sequence
from dataclasses import replace

from outrider.speculation.acceptance import AcceptanceModel, expected_tokens
from outrider.speculation.costs import CostLine
from outrider.speculation.length import Offer, RoundCosts
from outrider.speculation.load import MOST_SCOUTS, Kind, ProposerPool, TargetLoad
from outrider.speculation.observation import Observation

_ROWS_PACE = 0.3
"""How fast the rows of the other sessions are followed."""

_SHARE_PACE = 0.05
"""How fast shares of rounds (with a proposal, with a hit) are followed."""

_BESIDE_PACE = 0.3
"""How fast the rows beside those of a chain are followed: they are as many as somebody has set."""

_WORST_ROUND = 4.0
"""A round that takes longer than so many plain ones has met something else than speculation."""


class Guesser:
    """One proposer as one session knows it."""

    def __init__(self, pool: ProposerPool, load: TargetLoad, kind: Kind) -> None:
        self.pool = pool
        self._load = load
        self.acceptance = AcceptanceModel(pool.of_kind(kind))
        self.coverage = self.rows_a_guess = 1.0
        self.scouts = False
        self._has_session = False
        self._hits = self._expected_hits = 10.0

    @property
    def draft(self) -> CostLine:
        """What a proposal takes with as many sessions as there are."""
        return self.pool.draft(self._load.num_sessions)

    @property
    def hit_scale(self) -> float:
        """Hits seen over hits expected."""
        return self._hits / self._expected_hits

    def may_scout(self) -> bool:
        """Whether the session is one of those who try it for all, as long as it is not known."""
        if not self.scouts and self.pool.num_scouts < MOST_SCOUTS:
            self.scouts = True
            self.pool.num_scouts += 1
        return self.scouts

    def stop_scouting(self) -> None:
        if self.scouts:
            self.scouts = False
            self.pool.num_scouts -= 1

    def without_opening(self, seen: Observation) -> Observation:
        """A round as it would have been with the session there already: the first proposal of a
        generation waits for that, and for the prompt."""
        if self._has_session:
            return seen
        known = self.draft.num_observations > 0
        steps = seen.num_proposed or seen.num_asked
        usual_s = self.draft.predict(steps) if known else seen.target_s
        opening_s = max(seen.draft_s - usual_s, 0.0)
        return replace(
            seen, draft_s=seen.draft_s - opening_s, round_s=max(seen.round_s - opening_s, 0.0)
        )

    def observe(self, seen: Observation, fan_out: int) -> None:
        """Learn from a round that was to carry guesses of this one; its first one tells nothing
        of what a proposal costs."""
        if not self._has_session:
            self._has_session = True
        elif seen.hit is None:
            self.coverage += _SHARE_PACE * ((seen.num_proposed > 0) - self.coverage)
            self.draft.observe(seen.draft_s, seen.num_proposed or seen.num_asked)
            if seen.num_proposed:
                rows = (seen.num_rows - 1) / seen.num_proposed
                self.rows_a_guess += _BESIDE_PACE * (rows - self.rows_a_guess)
        elif seen.hit:
            self._observe_hidden(seen, fan_out)
        self.acceptance.observe(*seen.verified)

    def plain_rounds(self, count: int) -> None:
        """So many rounds had no guesses."""
        self.acceptance.plain_rounds(count)
        self.draft.passed_over(count / max(self._load.num_sessions, 1))

    def move(self, load: TargetLoad) -> None:
        """The session goes on beside those of another target."""
        self._load = load

    def observe_hit(self, hit: bool, expected: float) -> None:
        """A prepared outcome came or not, where it was to come with this probability."""
        keep = 1.0 - _SHARE_PACE
        self._hits = keep * self._hits + _SHARE_PACE * 10.0 * hit
        self._expected_hits = keep * self._expected_hits + _SHARE_PACE * 10.0 * expected

    def offer(self, k_max: int) -> Offer:
        draft = self.draft
        return Offer(
            self.pool.name,
            self.acceptance.survival(k_max + 1),
            draft.predict(0.0),
            draft.slope,
            draft.other_slope,
            self.coverage,
            self.pool.ranks,
            self.hit_scale,
            self.rows_a_guess,
        )

    def _observe_hidden(self, seen: Observation, fan_out: int) -> None:
        """Drafting while the target works shows only where it takes longer; else it is a bound."""
        steps, outcomes = seen.num_proposed, max(fan_out - 1, 0)
        draft = self.draft
        if seen.proposal_s > 0.0:
            draft.observe(seen.proposal_s, steps, outcomes)
        elif seen.draft_s > 0.02 * seen.target_s:
            draft.observe(seen.target_s + seen.draft_s, steps, outcomes)
        elif draft.predict(steps, outcomes) > seen.target_s:
            draft.observe(seen.target_s, steps, outcomes)


class Beliefs:
    """Acceptance and costs of one session, on top of what its target's sessions share."""

    def __init__(
        self, load: TargetLoad, pools: Sequence[ProposerPool], kind: Kind, *, decides: bool
    ) -> None:
        self.load, self._decides = load, decides
        self.guessers = {pool.name: Guesser(pool, load, kind) for pool in pools}
        self._share = load.join(decides=decides)
        self._other_rows: float | None = None
        self._own_context = load.context
        self._has_begun = False
        self._costs = RoundCosts(0.0, 0.0, 0.0)

    @property
    def _context(self) -> float:
        """Of rows in a pass: of the session's own where it is alone."""
        load = self.load
        return self._own_context if load.num_sessions <= 1 else load.context

    def leave(self) -> None:
        self._share.leave()
        for guesser in self.guessers.values():
            guesser.stop_scouting()

    def move(self, load: TargetLoad) -> None:
        """Another target: its costs, its load."""
        self.leave()
        self.load, self._other_rows = load, None
        self._share = load.join(decides=self._decides)
        for guesser in self.guessers.values():
            guesser.move(load)

    def begin_round(self, asked: int) -> None:
        self._share.begin_round(guesses=asked > 0)

    def costs(self) -> RoundCosts:
        """What the target's part of the next round costs."""
        load, others = self.load, self._other_rows or 0.0
        rows, context = load.plain_rows(others), self._context
        plain_s = load.plain_s(others, context)
        self._costs = RoundCosts(
            plain_s,
            load.round_s(rows, 1.0, context),
            load.row_s(context),
            self._share.sessions_alike,
            load.remote_tokens_per_s(others, plain_s),
            max(load.overlap_s, 0.0),
        )
        return self._costs

    def offers(self, k_max: int) -> list[Offer]:
        return [guesser.offer(k_max) for guesser in self.guessers.values()]

    def observe_plain(self, seen: Observation, rounds: int, seconds: float) -> None:
        """Learn from rounds that were not to carry guesses; `seen` is the last of them."""
        self._observe_target(seen, ahead=False)
        if self._has_begun or not seen.prompt_rows:
            self._share.end_rounds(seen, float(rounds), seconds, rounds)
        self._has_begun = True
        for guesser in self.guessers.values():
            guesser.plain_rounds(rounds)

    def observe(self, seen: Observation, guesser: Guesser, fan_out: int) -> float:
        """Learn from a round that was to carry guesses.

        Returns what the round should have brought over plain decoding, in plain rounds: with the
        tokens that its guesses stand for, not those that luck gave.
        """
        self._observe_target(seen, ahead=fan_out > 0 and seen.hit is not None)
        # Before it learns: a forecast is not moved by the luck of what it forecasts.
        tokens = expected_tokens(guesser.acceptance.last_survival(seen.num_proposed))
        self._share.end_rounds(seen, tokens, seen.total_s, 1)
        guesser.observe(seen, fan_out)
        return self._gain(tokens, seen)

    def _observe_target(self, seen: Observation, *, ahead: bool) -> None:
        """But for passes with prompts: neither their rows nor their time come again."""
        self._own_context = seen.context_len / 1000.0
        if seen.prompt_rows:
            return
        others = max(seen.batch_rows - seen.num_rows, 0)
        if self._other_rows is None:
            self._other_rows = float(others)
        else:
            self._other_rows += _ROWS_PACE * (others - self._other_rows)
        own = seen.num_rows, seen.context_len / 1000.0
        self.load.observe(seen.target_s, seen.compute_s, others + seen.num_rows, own, ahead=ahead)

    def _gain(self, tokens: float, seen: Observation) -> float:
        """The round costs what it took, or more if it would take more were all alike."""
        if seen.prompt_rows:
            return 0.0
        load, guesses, sessions = self.load, seen.num_rows - 1, self._costs.sessions
        other_rows = max(seen.batch_rows - seen.num_rows, 0)
        rows = load.plain_rows(other_rows)
        context = self._context
        plain_s = load.plain_s(other_rows, context)
        if plain_s <= 0.0:
            return 0.0
        round_s, rows_s = seen.total_s, guesses * load.row_s(context)
        if sessions > 1.0:
            alike_s = seen.draft_s + load.round_s(rows, 1.0, context) + sessions * rows_s
            round_s = max(round_s, alike_s)
        lost = self._costs.others_tokens_per_s * rows_s
        return tokens - lost - min(round_s / plain_s, _WORST_ROUND)
