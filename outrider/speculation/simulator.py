"""Policies against recorded acceptance and costs, without a model or a network.

Sessions share a target that batches whoever is ready, and proposers that take their time. Time
and luck are drawn from a seed; the policies are the controllers that serve.
"""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.speculation.acceptance import expected_tokens
from outrider.speculation.fan_out import FanOut, RankCounts
from outrider.speculation.length import Mode
from outrider.speculation.misses import Pace, pays_to_wait
from outrider.speculation.observation import Observation
from outrider.speculation.processes import AcceptanceProcess
from outrider.speculation.world import Load, MakePolicy, Policy, Result, Surroundings, World


def simulate(
    world: World,
    processes: Sequence[AcceptanceProcess],
    make_policy: MakePolicy,
    *,
    load: Load | None = None,
    seed: int = 0,
    start_s: float = 0.0,
) -> Result:
    """All processes at once, as sessions of one target, until the first has its tokens out."""
    return _Simulation(world, processes, make_policy, load or Load(), seed, start_s).run()


@dataclass(slots=True)
class _Session:
    """A session between two of its passes."""

    process: AcceptanceProcess
    policy: Policy
    rng: random.Random
    tokens: int = 0
    length: int = 0
    round_began: float = 0.0
    waited_s: float = 0.0
    proposal_s: float = 0.0
    asked: int = 0
    hit: bool | None = None
    prepared: FanOut | None = None
    prepared_at: float = 0.0
    prepared_length: int = 0
    drafting_until: float = 0.0
    queued_at: float = 0.0
    compute_s: float = 0.0
    prompt_rows: int = 0
    pace: Pace = field(default_factory=Pace)
    is_open: bool = False
    """The draft has the session and its prompt."""

    @property
    def context_len(self) -> int:
        return self.process.prompt_len + self.tokens

    @property
    def prompt_left(self) -> int:
        """Tokens of the prompt that the next pass computes, beside the round's own row."""
        return 0 if self.tokens else max(self.process.prompt_len - 1, 0)


class _Simulation:
    """Events in the order of time: a session is ready for a pass, a pass ends."""

    def __init__(
        self,
        world: World,
        processes: Sequence[AcceptanceProcess],
        make_policy: MakePolicy,
        load: Load,
        seed: int,
        start_s: float,
    ) -> None:
        self._world, self._load = world, load
        self._rng = random.Random(f"{seed}/time")
        self._now = self._start = start_s
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._queue: list[_Session] = []
        self._busy_until = self._last_pass_s = 0.0
        self._host_until = self._opening_until = 0.0
        self._is_over = False
        self._result = Result()
        self._ranks = RankCounts()
        self._sessions: list[_Session] = []
        for number, process in enumerate(processes):
            # Luck is a session's own: it does not change with what other policies ask for.
            session = _Session(process, _NO_POLICY, random.Random(f"{seed}/{number}"))
            session.policy = make_policy(self._view(session))
            self._sessions.append(session)

    def run(self) -> Result:
        for session in self._sessions:
            session.round_began = self._now
            self._begin_round(session)
        while not self._is_over:
            self._now, _, event = heapq.heappop(self._events)
            event()
        for session in self._sessions:
            session.policy.close()
        self._result.seconds = self._now - self._start
        return self._result

    def _view(self, session: _Session) -> Callable[[], Surroundings]:
        def look() -> Surroundings:
            rates = session.process.rates_at(session.tokens)
            others = self._load.rows_at(self._now)
            return Surroundings(rates, others, session.context_len)

        return look

    def _at(self, seconds: float, event: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (seconds, self._num_events, event))

    def _noisy(self, seconds: float) -> float:
        return seconds * max(1.0 + self._world.noise * self._rng.gauss(0.0, 1.0), 0.1)

    def _begin_round(self, session: _Session) -> None:
        """Ask the policy, get the proposal, queue for a pass."""
        session.asked = session.policy.next_length()
        self._result.lengths.append(session.asked)
        session.length, session.hit, session.proposal_s = session.asked, None, 0.0
        ready = self._now
        if not session.asked:
            session.policy.plain_rounds()
            session.prepared = None
        elif session.prepared is None:
            session.proposal_s = self._open_s(session) + self._draft_s(session, session.asked, 1)
            ready += session.proposal_s
            session.drafting_until = ready
        else:
            session.hit = self._hit(session)
            if session.hit:
                session.length = min(session.asked, session.prepared_length)
                ready = max(ready, session.prepared_at)
            elif self._waits(session):
                ready = max(ready, session.prepared_at) + self._draft_s(session, session.asked, 1)
                session.drafting_until = ready
            else:
                session.length = 0
        session.waited_s = ready - self._now
        self._at(ready, lambda: self._enqueue(session))

    def _hit(self, session: _Session) -> bool:
        """Whether what came was prepared; a miss is prepared for anew, from what came."""
        assert session.prepared is not None
        return session.rng.random() < session.prepared.hit_probability

    def _waits(self, session: _Session) -> bool:
        """Whether a session that met none of its outcomes waits for the draft, as a real one whose
        forecast is right."""
        rate = session.pace.tokens_per_s
        if rate is None:
            return False
        rates = _at_least(session.process.rates_at(session.tokens), session.asked)
        draft_s = self._world.draft.predict(session.asked) + 2.0 * self._world.delay_s
        return pays_to_wait(expected_tokens(rates), rate, draft_s)

    def _enqueue(self, session: _Session) -> None:
        session.queued_at = self._now
        self._queue.append(session)
        self._offer_pass()

    def _offer_pass(self) -> None:
        """Start a pass, at once or when sessions that are about to come back have."""
        if self._now < self._busy_until or not self._queue:
            return
        idle_since = max(self._busy_until, self._queue[0].queued_at)
        waits_until = idle_since + self._world.gather * self._last_pass_s
        if len(self._queue) < len(self._sessions) and self._now < waits_until:
            self._at(waits_until, self._offer_pass)
            return
        self._start_pass()

    def _start_pass(self) -> None:
        batch, self._queue = self._queue, []
        others = self._load.rows_at(self._now)
        guesses = sum(session.length for session in batch)
        prompts = sum(session.prompt_left for session in batch)
        plain_rows = others + len(batch)
        slow = self._slowdown(any(s.drafting_until > self._now for s in self._sessions))
        for session in batch:
            self._prepare(session)
        seconds = self._noisy(self._pass_s(batch, plain_rows + guesses)) * slow
        plain_s = self._world.verify.predict(plain_rows)
        added_s = self._world.verify.predict(plain_rows + guesses) - plain_s
        self._result.prompt_s += self._world.prompt_s * prompts
        self._result.lost_tokens += others * added_s / plain_s
        self._busy_until, self._last_pass_s = self._now + seconds, seconds
        for session in batch:
            session.compute_s, session.prompt_rows = seconds, prompts
        rows = plain_rows + guesses + prompts
        self._at(self._busy_until, lambda: self._end_pass(batch, rows))

    def _pass_s(self, batch: Sequence[_Session], rows: int) -> float:
        """Of so many rows with logits, and what their contexts and the prompts in it add."""
        world = self._world
        seconds = world.verify.predict(rows)
        for session in batch:
            seconds += world.context_s * (session.length + 1) * session.context_len
            seconds += world.prompt_s * session.prompt_left
        return seconds

    def _end_pass(self, batch: Sequence[_Session], rows: int) -> None:
        for session in batch:
            trip_s = self._world.guess_trip_s if session.asked else self._world.plain_trip_s
            host_s = self._world.host_s + self._world.guess_host_s * (session.asked > 0)
            self._host_until = max(self._host_until, self._now) + host_s
            self._at(self._host_until + trip_s, self._end_round(session, rows))
        self._offer_pass()

    def _end_round(self, session: _Session, rows: int) -> Callable[[], None]:
        def end() -> None:
            accepted = session.process.draw(session.tokens, session.length, session.rng)
            emitted = min(accepted + 1, session.process.num_tokens - session.tokens)
            session.policy.observe(self._observation(session, accepted, rows))
            session.tokens += emitted
            session.pace.emitted(emitted, self._now)
            self._result.tokens += emitted
            session.round_began = self._now
            if session.tokens < session.process.num_tokens:
                self._begin_round(session)
            else:
                self._is_over = True

        return end

    def _observation(self, session: _Session, accepted: int, rows: int) -> Observation:
        round_s = self._now - session.round_began
        return Observation(
            num_proposed=session.length,
            num_accepted=accepted,
            draft_s=session.waited_s,
            verify_s=round_s - session.waited_s,
            batch_rows=rows,
            context_len=session.context_len,
            hit=session.hit,
            round_s=round_s,
            compute_s=session.compute_s,
            proposal_s=session.proposal_s,
            num_asked=session.asked,
            prompt_rows=session.prompt_rows,
        )

    def _prepare(self, session: _Session) -> None:
        """The draft goes on while this session's guesses are verified."""
        if self._world.mode is Mode.SEQUENTIAL or not session.asked:
            session.prepared = None
            return
        outcomes = session.policy.outcomes()
        if not outcomes.outcomes:
            session.prepared = None
            return
        rates = _at_least(session.process.rates_at(session.tokens), session.length + 1)
        session.prepared = outcomes_that_come(outcomes, rates, session.length, self._ranks)
        draft_s = self._draft_s(session, session.asked, len(outcomes.outcomes))
        session.proposal_s = draft_s
        session.prepared_length = session.asked
        session.prepared_at = session.drafting_until = self._now + draft_s

    def _open_s(self, session: _Session) -> float:
        """Until the draft has what it needs for a session's first proposal."""
        if session.is_open or not self._world.opening_s:
            return 0.0
        session.is_open = True
        begins = max(self._opening_until, self._now)
        self._opening_until = begins + self._world.opening_s * session.context_len
        return self._opening_until - self._now

    def _draft_s(self, session: _Session, steps: int, outcomes: int) -> float:
        busy = sum(s.drafting_until > self._now for s in self._sessions if s is not session)
        seconds = self._world.draft.predict(steps, outcomes - 1) * (1.0 + self._world.crowd * busy)
        slow = self._slowdown(self._busy_until > self._now)
        return self._noisy(seconds) * slow + 2.0 * self._world.delay_s

    def _slowdown(self, other_works: bool) -> float:
        return 1.0 + self._world.shared * other_works


def outcomes_that_come(
    asked: FanOut, rates: Sequence[float], length: int, ranks: RankCounts
) -> FanOut:
    """The prepared outcomes with their true chance, where the policy had its own idea of it.

    After a miss (length 0) the draft prepares as many next tokens as it was asked for outcomes.
    """
    outcomes = asked.outcomes
    if length == 0:
        outcomes = tuple((0, rank) for rank in range(len(outcomes)))
    reached, hit = 1.0, 0.0
    for accepted in range(length + 1):
        bonus = accepted == length
        stop = reached if bonus else reached * (1.0 - rates[accepted])
        chances = ranks.bonus(rates[accepted]) if bonus else ranks.rejected()
        wanted = [rank for n, rank in outcomes if n == accepted and rank < len(chances)]
        hit += stop * sum(chances[rank] for rank in wanted)
        reached *= rates[accepted]
    return FanOut(outcomes, hit)


def _at_least(rates: Sequence[float], count: int) -> list[float]:
    """The last rate goes on."""
    return [*rates[:count], *([rates[-1]] * (count - len(rates)))]


class _NoPolicy:
    """Stands in until the session has its policy."""

    def next_length(self) -> int:
        return 0

    def plain_rounds(self) -> int:
        return 0

    def outcomes(self) -> FanOut:
        return FanOut((), 0.0)

    def observe(self, seen: Observation) -> None: ...

    def close(self) -> None: ...


_NO_POLICY = _NoPolicy()
