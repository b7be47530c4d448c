"""Rounds that a target runs by itself, seen from the decoder: no token more, less or other.

The link is real; the target at its other end is scripted and lives in the test's event loop.
"""

import asyncio
import contextlib
import gc
import itertools
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    ResourceExhausted,
    Unavailable,
)
from outrider.remote.link import WorkerLink
from outrider.remote.outcomes import Chosen
from outrider.remote.session import RemoteSession, Routing
from outrider.rpc.channel import ChannelSecurity
from outrider.token_log import TokenLog
from outrider.types import (
    DraftReport,
    Fence,
    FinishReason,
    GenerationSpec,
    PositionLogprobs,
    Proposal,
    SamplingParams,
    SpeculationStats,
    TokenSource,
    Verdict,
    WorkTiming,
    new_nonce,
    new_session_id,
)
from outrider.v1 import worker_pb2
from outrider.wire import verified_to_proto
from outrider.worker.sessions import Refusal, SessionTable, TokensMissing, advance_base
from services.orchestrator.controller import ALWAYS, FixedLength
from services.orchestrator.decoder import Decoder, Piece, stats_of
from services.orchestrator.proposers import Wanted
from services.orchestrator.stopping import OutputStream, StopRules
from services.orchestrator.text import ChatTokenizer
from tiny import make_tokenizer

TOKENIZER = ChatTokenizer(make_tokenizer())
EOS = 257
PROMPT = TOKENIZER.encode("Say on: ")
TRUTH = random.Random(1).choices(range(256), k=700)
AT_MOST = 64
"""More rounds that a decoder asks for at once."""

R = worker_pb2
AWAY = grpc.aio.AioRpcError(
    grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "away"
)


class Stream:
    """A Run call: batches of entries come in, batches of replies go out."""

    def __init__(self, target: "ScriptedTarget", batches: AsyncIterator[Any]) -> None:
        self._target = target
        self._outbox: asyncio.Queue[Any] = asyncio.Queue()
        self._reader = asyncio.create_task(self._read(batches))

    async def _read(self, batches: AsyncIterator[Any]) -> None:
        async for request in batches:
            for entry in request.entries:
                self._target.handle(entry)
        self._outbox.put_nowait(None)

    def say(self, *replies: worker_pb2.Reply) -> None:
        self._outbox.put_nowait(worker_pb2.RunResponse(replies=replies))

    def fail(self) -> None:
        self._outbox.put_nowait(AWAY)

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> worker_pb2.RunResponse:
        item = await self._outbox.get()
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, Exception):
            raise item
        return item

    def cancel(self) -> None:
        self._reader.cancel()


@dataclass
class ScriptedTarget:
    """Says `truth` after the prompt; where it pauses, breaks off or gives up is up to the test.

    `groups` gives how many replies of a run travel together. `turns` holds runs up: each round
    takes one. Of the run of a verification (by number) `give_up` says after how many replies it
    ends: by a refusal, with a reply that says so (None), or with the link ("break", and "cut" when
    the sessions stay).
    """

    truth: Sequence[int] = tuple(TRUTH)
    offers: bool = True
    extends: bool = False
    with_logprobs: bool = False
    groups: Any = field(default_factory=lambda: itertools.repeat(1))
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1 << 30))
    give_up: dict[int, tuple[int, Any]] = field(default_factory=dict)
    up: bool = True
    events: list[tuple[str, int]] = field(default_factory=list)
    asked: list[tuple[int, int, int]] = field(default_factory=list)
    """Of each verification: tokens generated before it, guesses, further rounds."""
    cancels: list[int] = field(default_factory=list)
    told: int = 0
    """Tokens in replies."""
    extended: int = 0

    def __post_init__(self) -> None:
        self.incarnation = new_nonce()
        self._table = SessionTable(8)
        self._run: tuple[worker_pb2.EntryHeader, asyncio.Task[None]] | None = None
        self._stream: Stream | None = None
        self._rounds = self._done = 0
        """Of the run: all that it is to make, and has made."""

    # --- what a link calls --------------------------------------------------------------------

    async def Info(self, request: Any, timeout: float) -> worker_pb2.InfoResponse:
        if not self.up:
            raise AWAY
        return worker_pb2.InfoResponse(
            incarnation=self.incarnation,
            protocol_min=1,
            protocol_max=1,
            capabilities=[
                "coupled",
                *(["more_rounds"] if self.offers else []),
                *(["extend"] if self.extends else []),
            ],
        )

    def Run(self, batches: AsyncIterator[Any]) -> Stream:
        self._stream = Stream(self, batches)
        return self._stream

    # --- what it does -------------------------------------------------------------------------

    def break_off(self, *, with_sessions: bool = True) -> None:
        """Be gone, sessions and all; or without them, when only the connection broke."""
        self.up = False
        if with_sessions:
            self.incarnation = new_nonce()
            self._table = SessionTable(8)
        self._end_run()
        assert self._stream
        self._stream.fail()

    def handle(self, entry: worker_pb2.Entry) -> None:
        op = entry.WhichOneof("op")
        self.events.append((op, entry.header.base_len - len(PROMPT)))
        try:
            if op == "open":
                have_len = len(self._table.open(entry.header).sequence.log)
                self._say(entry.header, R.Reply(opened=R.Opened(have_len=have_len)))
            elif op == "verify":
                self._verify(entry)
            elif op == "cancel":
                self._cancel(entry)
            elif op == "extend":
                self._extend(entry)
            else:
                self._end_run()
                self._table.close((entry.header.session_id, 0))
        except TokensMissing as missing:
            need = R.NeedTokens(**{"from": missing.start})
            self._say(entry.header, R.Reply(need_tokens=need))
        except Refusal as refusal:
            refused = R.Refused(reason=refusal.reason, message=refusal.message)
            self._say(entry.header, R.Reply(refused=refused))

    def _verify(self, entry: worker_pb2.Entry) -> None:
        assert self._run is None, "a run is under way: it must be cancelled first"
        log = self._table.get(entry.header).sequence.log
        advance_base(log, entry.header, entry.verify.delta)
        done = len(log) - len(PROMPT)
        assert log.tokens == [*PROMPT, *self.truth[:done]]
        guesses = tuple(entry.verify.proposal.token_ids)
        self.asked.append((done, len(guesses), entry.verify.more_rounds))
        number = len(self.asked) - 1
        task = asyncio.create_task(self._go_on(entry, log, guesses, number))
        self._run = entry.header, task

    async def _go_on(
        self, entry: worker_pb2.Entry, log: TokenLog, guesses: tuple[int, ...], number: int
    ) -> None:
        self._rounds = entry.verify.more_rounds + 1
        limit, ending = self.give_up.get(number, (1 << 30, None))
        waiting: list[worker_pb2.Reply] = []
        for index in itertools.count():
            if index >= min(self._rounds, limit):
                break
            await self.turns.acquire()
            self._done, rounds = index + 1, self._rounds
            is_last = index + 1 == rounds or (index + 1 == limit and ending is None)
            waiting.append(self._verdict(entry, log, guesses, more=not is_last))
            guesses = ()
            if is_last or index + 1 == limit or len(waiting) >= next(self.groups):
                if is_last:
                    self._run = None
                elif index + 1 == limit and ending not in ("break", "cut"):
                    self._run = None
                    waiting.append(self._refused(entry.header, ending))
                self._say_all(waiting)
                waiting = []
                await asyncio.sleep(0)
        if ending in ("break", "cut") and limit <= self._rounds:
            self._run = None
            self.break_off(with_sessions=ending == "break")
        elif not limit:
            self._run = None
            self._say_all([self._refused(entry.header, ending)])

    def _verdict(
        self, entry: worker_pb2.Entry, log: TokenLog, guesses: tuple[int, ...], *, more: bool
    ) -> worker_pb2.Reply:
        right = self.truth[len(log) - len(PROMPT) :]
        accepted = next((i for i, g in enumerate(guesses) if g != right[i]), len(guesses))
        tokens = tuple(right[: accepted + 1])
        logprobs = [PositionLogprobs(token, -float(len(log) + i)) for i, token in enumerate(tokens)]
        log.append(tokens)
        self.told += len(tokens)
        verdict = Verdict(
            tokens, accepted, len(guesses), tuple(logprobs) if self.with_logprobs else ()
        )
        reply = R.Reply(verified=verified_to_proto(verdict, WorkTiming(compute_us=10)))
        reply.header.more = more
        reply.header.elapsed_us = 30
        return _addressed(entry.header, reply)

    def _extend(self, entry: worker_pb2.Entry) -> None:
        log = self._table.get(entry.header).sequence.log
        further = entry.extend.until_len - len(log)
        assert further <= AT_MOST
        self.extended += 1
        self._rounds = max(self._rounds, self._done + further)

    def _cancel(self, entry: worker_pb2.Entry) -> None:
        self._table.get(entry.header)
        self.cancels.append(entry.cancel.through_number)
        if self._run and self._run[0].number <= entry.cancel.through_number:
            header = self._run[0]
            self._end_run()
            self._say_all([self._refused(header, R.REFUSAL_REASON_CANCELLED)])

    def _end_run(self) -> None:
        if self._run:
            self._run[1].cancel()
            self._run = None

    @property
    def is_running(self) -> bool:
        return self._run is not None

    def _refused(self, header: worker_pb2.EntryHeader, reason: int) -> worker_pb2.Reply:
        return _addressed(header, R.Reply(refused=R.Refused(reason=reason, message="enough")))

    def _say(self, header: worker_pb2.EntryHeader, reply: worker_pb2.Reply) -> None:
        self._say_all([_addressed(header, reply)])

    def _say_all(self, replies: Sequence[worker_pb2.Reply]) -> None:
        assert self._stream
        self._stream.say(*replies)


def _addressed(header: worker_pb2.EntryHeader, reply: worker_pb2.Reply) -> worker_pb2.Reply:
    for name in ("session_id", "completion", "epoch", "number", "owner_nonce"):
        setattr(reply.header, name, getattr(header, name))
    return reply


@dataclass
class Generation:
    """A decoder before scripted targets, and what came out of it."""

    targets: list[ScriptedTarget]
    links: list[WorkerLink]
    decoder: Decoder
    remotes: list[RemoteSession]
    pieces: list[Piece] = field(default_factory=list)

    async def finish(self) -> "Generation":
        """Read to the end and do what a generation's end does on its workers."""
        async for piece in self.decoder.pieces():
            self.pieces.append(piece)
        await self.end()
        return self

    async def end(self) -> None:
        for remote in self.remotes:
            remote.settle()
            remote.close()
        await settled()

    @property
    def tokens(self) -> list[int]:
        return [token for piece in self.pieces for token in piece.released.token_ids]

    @property
    def text(self) -> str:
        return "".join(piece.released.text for piece in self.pieces)

    @property
    def stats(self) -> SpeculationStats:
        return sum((piece.stats for piece in self.pieces), SpeculationStats())


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def generating(
    *targets: ScriptedTarget,
    max_tokens: int = 40,
    context_length: int = 4096,
    controller: Any = None,
    proposer: Any = None,
    logprobs: bool = False,
    timeout_s: float = 10,
    **rules: Any,
) -> AsyncIterator[Generation]:
    """Nothing is left behind: no task, and nobody who waits for replies."""
    links = [WorkerLink(f"target-{n}", "target", ChannelSecurity()) for n in range(len(targets))]
    for link, target in zip(links, targets, strict=True):
        link._stub = target  # type: ignore[assignment]
        link.start()
    before = asyncio.all_tasks()
    for link, target in zip(links, targets, strict=True):
        if target.up:
            await link.wait_up(5)
    log, remotes, numbers = TokenLog(PROMPT), [], itertools.count(1)
    fence = Fence(new_session_id(), 1, new_nonce())
    spec = GenerationSpec(SamplingParams(), prompt_len=len(PROMPT))

    def find_target() -> RemoteSession:
        for link in links:
            if link.up:
                routing = Routing("r", "t", "m")
                remotes.append(RemoteSession(link, fence, spec, routing, log, numbers))
                return remotes[-1]
        raise Unavailable("no target is there")

    async def wait_for_target() -> None:
        stop = time.monotonic() + 0.5
        while not any(link.up for link in links):
            if time.monotonic() > stop:
                raise Unavailable("no target came back in time")
            await asyncio.sleep(0.01)

    stop = StopRules(max_tokens=max_tokens, context_length=context_length, **rules)
    decoder = Decoder(
        log=log,
        output=OutputStream(TOKENIZER, stop, prompt_len=len(PROMPT)),
        controller=controller or FixedLength(0),
        proposers={"scripted": proposer} if proposer else {},
        find_target=find_target,
        wait_for_target=wait_for_target,
        deadline=time.monotonic() + timeout_s,
        context_length=context_length,
        with_logprobs=logprobs,
    )
    try:
        yield Generation(list(targets), links, decoder, remotes)
        await settled()
        runs = {target._run[1] for target in targets if target._run}
        streams = {target._stream._reader for target in targets if target._stream}
        assert asyncio.all_tasks() - before - runs - streams == set()
        assert [link._waiting for link in links] == [{} for _ in links]
    finally:
        for link, target in zip(links, targets, strict=True):
            target._end_run()
            await link.close()


def random_groups(seed: int) -> Any:
    chance = random.Random(seed)
    return (chance.choice((1, 1, 2, 5, 100)) for _ in itertools.count())


# --- the same, with fewer entries -------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2, 3, 1000, "random"])
async def test_a_target_that_goes_on_is_asked_once(groups: Any) -> None:
    """However its replies travel, the pieces add up to those of asking round by round."""

    async def outcome(**options: Any) -> tuple[Generation, ScriptedTarget]:
        target = ScriptedTarget(with_logprobs=True, **options)
        async with generating(target, logprobs=True, min_tokens=3) as one:
            return await one.finish(), target

    each = random_groups(4) if groups == "random" else itertools.repeat(groups)
    started = time.monotonic()
    alone, slow = await outcome(offers=False)
    found, target = await outcome(groups=each)
    assert [entry[2] for entry in slow.asked] == [0] * 40
    assert target.asked == [(0, 0, 39)] and not target.cancels
    assert found.tokens == alone.tokens == TRUTH[:40]
    assert found.text == alone.text == TOKENIZER.decode(TRUTH[:40])
    for one in (found, alone):
        released = [piece.released for piece in one.pieces]
        assert [p for r in released for p in r.logprobs] == [
            PositionLogprobs(token, -float(len(PROMPT) + i)) for i, token in enumerate(TRUTH[:40])
        ]
        assert {source for r in released for source in r.sources} == {TokenSource.PLAIN}
        assert released[-1].finish_reason is FinishReason.MAX_TOKENS
        times = sum((piece.times for piece in one.pieces[1:]), one.pieces[0].times)
        assert (times.verify_compute_us, times.verify_worker_us) == (400, 1200)
        # Each round is in one record, by its place and the time that it ended.
        records = [record for piece in one.pieces for record in piece.rounds]
        lasts = [r.seen.context_len - r.seen.num_tokens for r in records]
        counts = [record.count for record in records]
        places = [last - i for last, n in zip(lasts, counts, strict=True) for i in range(n)]
        assert sorted(places) == list(range(len(PROMPT), len(PROMPT) + 40))
        ends = [record.ended for record in records]
        assert ends == sorted(ends) and started < ends[0] and ends[-1] <= time.monotonic()
    assert found.stats == alone.stats and found.stats.rounds == found.stats.plain == 40
    if groups == 1000:
        assert len(found.pieces) == 2, "the first reply, and all that were there after it"
    assert len(alone.pieces) == 40


@pytest.mark.parametrize("limit", ["max_tokens", "context_length"])
@pytest.mark.parametrize("count", [1, 2, 5, 64, 65, 66, 67, 130, 131, 200])
@pytest.mark.parametrize("group", [1, 7, 1000])
async def test_no_round_is_asked_for_that_could_not_be_told(
    limit: str, count: int, group: int
) -> None:
    target = ScriptedTarget(groups=itertools.repeat(group))
    options = {"max_tokens": 1000, limit: count + (limit != "max_tokens") * len(PROMPT)}
    async with generating(target, **options) as one:
        await one.finish()
    assert one.tokens == TRUTH[:count] and target.told == count and not target.cancels
    for done, guesses, more in target.asked:
        assert (guesses, more) == (0, min(count - done - 1, AT_MOST))
    assert len(target.asked) == -(-count // (AT_MOST + 1))


@pytest.mark.parametrize("count", [1, 33, 64, 65, 66, 97, 200, 400])
@pytest.mark.parametrize("group", [1, 7])
async def test_a_target_is_let_go_on_before_it_is_through(count: int, group: int) -> None:
    """As long as it keeps pace it is asked once, and makes no round too many."""
    target = ScriptedTarget(
        extends=True, groups=itertools.repeat(group), turns=asyncio.Semaphore(0)
    )

    async def pace() -> None:
        while True:
            target.turns.release()
            await asyncio.sleep(0.001)

    pacing = asyncio.create_task(pace())
    async with generating(target, max_tokens=count) as one:
        await one.finish()
        pacing.cancel()
        await asyncio.wait([pacing])
    assert one.tokens == TRUTH[:count] and target.told == count and not target.cancels
    assert target.asked == [(0, 0, min(count - 1, AT_MOST))]
    assert (target.extended > 0) == (count > AT_MOST + 1)


@pytest.mark.parametrize("offers", [True, False])
@pytest.mark.parametrize("k", [1, 4])
async def test_where_guesses_are_to_come_no_more_rounds_are_asked_for(offers: bool, k: int) -> None:
    target = ScriptedTarget(offers=offers)
    proposer = Guesses(random.Random(k))
    async with generating(target, controller=FixedLength(k, "scripted"), proposer=proposer) as one:
        proposer.log = one.decoder.log
        await one.finish()
    assert one.tokens == TRUTH[:40] and one.stats.accepted > 5
    assert {more for _, _, more in target.asked} == {0}


@dataclass
class Guesses:
    """A proposer that is right for some guesses, then wrong."""

    chance: random.Random
    log: TokenLog = field(default_factory=TokenLog)

    async def propose(self, wanted: Wanted, deadline: float) -> Chosen:
        await asyncio.sleep(0)
        num_tokens = wanted.num_tokens
        done = len(self.log) - len(PROMPT)
        right = TRUTH[done : done + self.chance.randrange(num_tokens + 1)]
        wrong = [0, 1, 2, 3, 4, 5, 6, 7][: num_tokens - len(right)]
        return Chosen(Proposal((*right, *wrong)), DraftReport(asked=num_tokens))


@dataclass
class Moody:
    """A controller that promises plain rounds and now and then does not keep it."""

    chance: random.Random
    proposer: str = "scripted"
    fan_out: int = 0
    decision: None = None

    def next_length(self) -> int:
        return self.chance.choice((0, 0, 0, 0, 4))

    def plain_rounds(self) -> int:
        return self.chance.choice((0, 3, ALWAYS))

    def observe(self, outcome: Any) -> None:
        pass


@pytest.mark.parametrize("seed", range(6))
async def test_guesses_in_mid_run_end_it(seed: int) -> None:
    """The run is cancelled before they are verified; the target asserts that."""
    target = ScriptedTarget(groups=random_groups(seed))
    chance = random.Random(seed)
    proposer = Guesses(chance)
    async with generating(
        target, controller=Moody(chance), proposer=proposer, max_tokens=150
    ) as one:
        proposer.log = one.decoder.log
        await one.finish()
    assert one.tokens == TRUTH[:150] and one.stats.accepted > 3
    assert target.cancels and any(guesses and more for _, guesses, more in target.asked)
    for done, guesses, more in target.asked:
        assert done + guesses + 1 + more <= 150


# --- the next round starts first --------------------------------------------------------------


def watch_pushes(monkeypatch: pytest.MonkeyPatch, target: ScriptedTarget) -> None:
    push = OutputStream.push

    def watched(output: OutputStream, *args: Any) -> Any:
        target.events.append(("told", output.num_released))
        return push(output, *args)

    monkeypatch.setattr(OutputStream, "push", watched)


async def test_the_next_round_is_on_its_way_before_text_is_made(monkeypatch: Any) -> None:
    target = ScriptedTarget(offers=False)
    async with generating(target, max_tokens=4) as one:
        watch_pushes(monkeypatch, target)
        await one.finish()
    rounds = [event for event in target.events if event[0] in ("verify", "told")]
    assert rounds == [
        ("verify", 0),
        ("verify", 1),
        ("told", 0),
        ("verify", 2),
        ("told", 1),
        ("verify", 3),
        ("told", 2),
        ("told", 3),
    ]


async def test_where_text_may_end_it_the_next_round_waits_for_it(monkeypatch: Any) -> None:
    target = ScriptedTarget(offers=False)
    async with generating(target, max_tokens=3, stop_strings=("never",)) as one:
        watch_pushes(monkeypatch, target)
        await one.finish()
    rounds = [event[0] for event in target.events if event[0] in ("verify", "told")]
    assert rounds == ["verify", "told"] * 3


def test_a_run_ahead_guess_is_counted_as_one_more_guess() -> None:
    rounds = [
        Verdict((1, 2, 3), 2, 2, run_ahead=True),
        Verdict((1, 2, 3), 2, 2, run_ahead=False),
        Verdict((1,), 0, 0, run_ahead=True),
        Verdict((1, 2, 3), 2, 2),
        Verdict((1,), 0, 0),
    ]
    stats = stats_of(rounds)
    assert (stats.rounds, stats.proposed, stats.accepted) == (5, 9, 8)
    assert (stats.recovered, stats.bonus, stats.plain) == (1, 1, 1)
    assert stats.proposed_by_position == (4, 3, 2)
    assert stats.accepted_by_position == (4, 3, 1)
    tokens = sum(len(verdict.token_ids) for verdict in rounds)
    assert stats.mean_acceptance_length == tokens / 5


@pytest.mark.parametrize("seed", range(300))
def test_goes_on_after_agrees_with_what_push_does(seed: int) -> None:
    chance = random.Random(seed)
    max_tokens = chance.choice((1, 3, 10, 200))
    prompt_len = chance.randrange(20)
    rules = StopRules(
        max_tokens=max_tokens,
        context_length=prompt_len + chance.choice((1, 4, 15, 300)),
        eos_token_ids=frozenset({EOS}),
        stop_token_ids=frozenset(chance.sample(range(256), chance.choice((0, 0, 3)))),
        stop_strings=chance.choice(((), (), (), ("ab",))),
        min_tokens=chance.randrange(max_tokens + 1) if chance.random() < 0.5 else 0,
        ignore_eos=chance.random() < 0.2,
    )
    stream = OutputStream(TOKENIZER, rules, prompt_len=prompt_len)
    while stream.finish_reason is None:
        ids = [chance.choice((EOS, *range(60, 256))) for _ in range(chance.choice((1, 1, 2, 6)))]
        goes_on = stream.goes_on_after(ids)
        assert stream.goes_on_after(ids) == goes_on, "a look changes nothing"
        stream.push(ids, [TokenSource.PLAIN] * len(ids))
        if rules.stop_strings:
            assert not goes_on
        else:
            assert goes_on == (stream.finish_reason is None)


# --- runs that break off ----------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 4, 1000])
@pytest.mark.parametrize("after", [1, 2, 9, 10])
async def test_when_the_link_breaks_another_target_goes_on(after: int, groups: int) -> None:
    first = ScriptedTarget(groups=itertools.repeat(groups), give_up={0: (after, "break")})
    second = ScriptedTarget(groups=itertools.repeat(groups))
    async with generating(first, second) as one:
        await one.finish()
    assert one.tokens == TRUTH[:40] and one.stats.rounds == 40
    # What had been told by then is not computed again.
    assert first.asked == [(0, 0, 39)] and first.told == after
    assert second.asked == [(after, 0, 39 - after)] and second.told == 40 - after


async def test_when_all_targets_go_away_what_was_told_is_there_and_the_error_comes() -> None:
    target = ScriptedTarget(give_up={0: (7, "break")})
    async with generating(target) as one:
        with pytest.raises(Unavailable, match="came back in time"):
            await one.finish()
        await one.end()
    assert one.tokens == TRUTH[:7]


@pytest.mark.parametrize("how", ["break", "cut"])
async def test_a_target_that_comes_back_goes_on(how: str) -> None:
    """As another, without the sessions; or the same one, behind a connection that broke."""
    target = ScriptedTarget(give_up={0: (7, how), 1: (1, how)})
    async with generating(target) as one, asyncio.timeout(20):
        task = asyncio.create_task(one.finish())
        for asked in (1, 2):
            while target.up or len(target.asked) < asked:
                await asyncio.sleep(0.005)
            target.up = True
        await task
    assert one.tokens == TRUTH[:40]
    assert target.asked == [(0, 0, 39), (7, 0, 32), (8, 0, 31)]


ENDINGS = [
    None,
    R.REFUSAL_REASON_CANCELLED,
    R.REFUSAL_REASON_INTERNAL,
    R.REFUSAL_REASON_RESOURCE_EXHAUSTED,
]


@pytest.mark.parametrize("groups", [1, 3, 1000])
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("after", [1, 2, 10])
async def test_a_run_that_ends_early_is_asked_for_anew(
    after: int, ending: Any, groups: int
) -> None:
    target = ScriptedTarget(
        groups=itertools.repeat(groups), give_up={0: (after, ending), 1: (2, ending)}
    )
    async with generating(target) as one:
        await one.finish()
    assert one.tokens == TRUTH[:40] and one.stats.rounds == 40
    assert one.stats.dropped_proposals == one.stats.fallback_rounds == 0
    assert [(done, more) for done, _, more in target.asked] == [
        (0, 39),
        (after, 39 - after),
        (after + 2, 37 - after),
    ]
    assert not target.cancels and len(one.remotes) == 1


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (R.REFUSAL_REASON_RESOURCE_EXHAUSTED, ResourceExhausted),
        (R.REFUSAL_REASON_CANCELLED, Cancelled),
        (R.REFUSAL_REASON_INTERNAL, InternalError),
    ],
)
async def test_a_refusal_of_the_entry_asked_anew_is_the_generations_end(
    reason: int, error: type[Exception]
) -> None:
    target = ScriptedTarget(give_up={0: (5, reason), 1: (0, reason)})
    async with generating(target) as one:
        with pytest.raises(error):
            await one.finish()
        await one.end()
    assert one.tokens == TRUTH[:5]


async def test_a_target_that_falls_silent_in_mid_run_ends_it_at_the_deadline() -> None:
    target = ScriptedTarget(turns=asyncio.Semaphore(4))
    async with generating(target, timeout_s=0.5) as one:
        with pytest.raises(DeadlineExceeded):
            await one.finish()
        await settled()
        assert target.cancels and not target.is_running
        await one.end()
    assert one.tokens == TRUTH[:4]


# --- generations that end while the target runs ahead -----------------------------------------


@pytest.mark.parametrize("groups", [1, 2, 7, 30])
async def test_at_a_stop_string_the_output_is_cut_and_the_run_cancelled(groups: int) -> None:
    said = "one two three STOP four five six seven eight nine ten eleven twelve thirteen"
    ids = TOKENIZER.encode(said)
    target = ScriptedTarget(truth=ids, groups=itertools.repeat(groups))
    target.turns = asyncio.Semaphore(30)
    async with generating(target, max_tokens=len(ids), stop_strings=("STOP", "zzz")) as one:
        async for piece in one.decoder.pieces():
            one.pieces.append(piece)
        assert one.remotes[0].has_more and target.is_running
        await one.end()
        assert not target.is_running and target.cancels == [2]
    assert one.text == "one two three "
    assert one.tokens == ids[: len("one two three ")]
    last = one.pieces[-1].released
    assert (last.finish_reason, last.matched_stop) == (FinishReason.STOP_STRING, "STOP")
    assert target.asked == [(0, 0, min(len(ids) - 1, AT_MOST))]


@pytest.mark.parametrize("groups", [1, 6, 25])
@pytest.mark.parametrize("kind", ["eos", "stop id"])
async def test_at_a_stop_id_the_output_ends_though_the_target_goes_on(
    kind: str, groups: int
) -> None:
    truth = [*TRUTH[:19], EOS, *TRUTH[20:]]
    target = ScriptedTarget(truth=truth, groups=itertools.repeat(groups))
    target.turns = asyncio.Semaphore(30)
    ids = {"eos": {"eos_token_ids"}, "stop id": {"stop_token_ids"}}[kind]
    async with generating(target, **{name: frozenset({EOS}) for name in ids}) as one:
        await one.finish()
        assert not target.is_running and target.cancels == [2]
        counters = one.links[0].counters
        assert counters.late_replies >= 1, "the refusal at least"
    reason = {"eos": FinishReason.EOS, "stop id": FinishReason.STOP_TOKEN}[kind]
    assert one.tokens == truth[:20]
    assert one.pieces[-1].released.finish_reason is reason


@pytest.mark.parametrize("after", [1, 2, 5])
async def test_leaving_in_mid_run_leaves_nothing(after: int) -> None:
    target = ScriptedTarget(turns=asyncio.Semaphore(after))
    async with generating(target) as one:
        pieces = one.decoder.pieces()
        while len(one.tokens) < after:
            one.pieces.append(await anext(pieces))
        before = asyncio.all_tasks()
        await pieces.aclose()
        assert not asyncio.all_tasks() - before
        await one.end()
        assert not target.is_running and target.cancels
        # Only those of the link and of the target live on; `generating` looks at that.
    assert one.tokens == TRUTH[:after]


async def test_leaving_before_the_first_reply_leaves_nothing() -> None:
    target = ScriptedTarget(turns=asyncio.Semaphore(0))
    async with generating(target) as one:
        reading = asyncio.create_task(one.finish())
        while not target.is_running:
            await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await settled()
        assert target.cancels and not target.is_running


async def test_leaving_when_the_next_round_has_failed_already_is_no_ones_error() -> None:
    unseen: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unseen.append(context))
    target = ScriptedTarget(give_up={0: (2, R.REFUSAL_REASON_INTERNAL), 1: (0, 1)})
    async with generating(target) as one:
        pieces = one.decoder.pieces()
        await anext(pieces)
        await anext(pieces)
        await settled()
        assert len(target.asked) == 2
        await pieces.aclose()
        del pieces
        await one.end()
    gc.collect()
    assert unseen == []


# --- a remote session -------------------------------------------------------------------------


def plain_round(more: int) -> Any:
    def set_op(entry: worker_pb2.Entry, delta: worker_pb2.TokenDelta) -> None:
        entry.verify.delta.CopyFrom(delta)
        entry.verify.more_rounds = more

    return set_op


async def test_replies_come_as_they_arrive_and_asking_anew_ends_them() -> None:
    target = ScriptedTarget(turns=asyncio.Semaphore(1))
    async with generating(target) as one:
        remote, log = one.decoder.find_target(), one.decoder.log
        deadline = time.monotonic() + 5
        assert not remote.has_more
        with pytest.raises(InternalError):
            await remote.next_replies(deadline)

        def take(*replies: worker_pb2.Reply) -> int:
            for reply in replies:
                log.append(reply.verified.token_ids)
            return len(replies)

        take(await remote.call(plain_round(20), deadline))
        assert remote.has_more
        for count in (1, 4, 2):
            for _ in range(count):
                target.turns.release()
            await settled()
            assert take(*await remote.next_replies(deadline)) == count and remote.has_more
        target.turns.release()
        await settled()
        # One has arrived and is not read: it is as good as never told.
        target.turns = asyncio.Semaphore(1)
        take(await remote.call(plain_round(0), deadline))
        assert not remote.has_more
        assert target.cancels == [2] and target.asked == [(0, 0, 20), (8, 0, 0)]
        assert log.tokens == [*PROMPT, *TRUTH[:9]]
        assert one.links[0].counters.late_replies == 1
        await one.end()


async def test_what_arrived_before_the_link_broke_is_read_first() -> None:
    target = ScriptedTarget(turns=asyncio.Semaphore(4))
    async with generating(target) as one:
        remote, deadline = one.decoder.find_target(), time.monotonic() + 5
        await remote.call(plain_round(20), deadline)
        await settled()
        target.break_off()
        await settled()
        assert len(await remote.next_replies(deadline)) == 3 and remote.has_more
        with pytest.raises(Unavailable, match="target-0 went away"):
            await remote.next_replies(deadline)
        assert not remote.has_more
        await one.end()
