"""Speculation is counted exactly, per session and per position: a draft with planned mistakes."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from outrider.client import GenerationChunk, collect
from outrider.types import Proposal, SpeculationStats, TokenSource
from scripted_workers import Ask, Guessing, Rig, Say, Script, Truth

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(60)]

LENGTH = 40
PROMPTS = [f"planned {number}" for number in range(6)]


def first_mistake(session: int, position: int) -> int:
    """Index of the first wrong guess of the proposal at this place of this session's output."""
    return (3 * session + 5 * position + position * position) % 11


def num_guesses(session: int, position: int, wanted: int) -> int:
    """Some proposals are shorter than what was asked for, and some are empty."""
    return (wanted, wanted, max(wanted - 2, 0), wanted, 0)[(session + position) % 5]


def planned(truth: Truth) -> Script:
    async def script(ask: Ask, say: Say) -> None:
        session = truth.number(ask)
        guesses = truth.after(ask)[: num_guesses(session, ask.position, ask.wanted)]
        for index in range(first_mistake(session, ask.position), len(guesses)):
            guesses[index] = (guesses[index] + 1) % 250
        say(ask.reply(Proposal(tuple(guesses), proposer="scripted")))

    return script


def expected_rounds(session: int, k: int) -> list[SpeculationStats]:
    """What the plan brings, round by round, as proto and design.md define the counts."""
    rounds = [SpeculationStats(rounds=1, plain=1)]
    emitted = 1
    while emitted < LENGTH:
        wanted = min(k, LENGTH - emitted - 1)
        count = num_guesses(session, emitted, wanted) if wanted else 0
        accepted = min(first_mistake(session, emitted), count)
        rounds.append(
            SpeculationStats(
                rounds=1,
                proposed=count,
                accepted=accepted,
                recovered=int(accepted < count),
                bonus=int(accepted == count > 0),
                plain=int(count == 0),
                proposed_by_position=(1,) * count,
                accepted_by_position=(1,) * accepted + (0,) * (count - accepted),
            )
        )
        emitted += accepted + 1
    return rounds


def sources_of(stats: SpeculationStats) -> list[TokenSource]:
    own = (
        TokenSource.RECOVERED
        if stats.recovered
        else TokenSource.BONUS
        if stats.bonus
        else TokenSource.PLAIN
    )
    return [TokenSource.ACCEPTED] * stats.accepted + [own]


def by_position(rounds: Sequence[SpeculationStats]) -> tuple[list[int], list[int]]:
    """Proposed and accepted guesses at each position, counted without `+` of the stats."""
    width = max(stats.proposed for stats in rounds)
    return (
        [sum(stats.proposed > i for stats in rounds) for i in range(width)],
        [sum(stats.accepted > i for stats in rounds) for i in range(width)],
    )


@pytest.mark.parametrize("k", [1, 2, 5, 8, 16])
async def test_counts_are_those_of_the_plan(guessing: Guessing, k: int) -> None:
    rig, truth = guessing.rig, guessing.truth
    plain = await truth.learn(rig, PROMPTS, max_tokens=LENGTH, ignore_eos=True)
    guessing.draft.script = planned(truth)
    guessing.draft.asks.clear()
    streams = await rig.streams(
        PROMPTS, max_tokens=LENGTH, num_speculative_tokens=k, ignore_eos=True
    )
    tally = SpeculationStats()
    for session, (chunks, before) in enumerate(zip(streams, plain, strict=True)):
        done = collect(chunks)
        assert done.token_ids == before.token_ids
        rounds = expected_rounds(session, k)
        check_rounds(chunks, rounds)
        stats = done.stats
        proposed, accepted = by_position(rounds)
        assert list(stats.proposed_by_position) == proposed
        assert list(stats.accepted_by_position) == accepted
        flat = replace(stats, proposed_by_position=(), accepted_by_position=())
        assert flat == SpeculationStats(
            rounds=len(rounds),
            proposed=sum(stats.proposed for stats in rounds),
            accepted=sum(stats.accepted for stats in rounds),
            recovered=sum(stats.recovered for stats in rounds),
            bonus=sum(stats.bonus for stats in rounds),
            plain=sum(stats.plain for stats in rounds),
        )
        assert stats.accepted + stats.recovered + stats.bonus + stats.plain == LENGTH
        assert stats.mean_acceptance_length is not None
        tally += stats
    print(f"k={k}: {tally}")
    assert 0 < tally.accepted < tally.proposed and tally.bonus > 0 and tally.plain > 6
    asked = [ask.wanted for ask in guessing.draft.asks]
    assert max(asked) == k and all(1 <= wanted <= k for wanted in asked)


def check_rounds(chunks: Sequence[GenerationChunk], rounds: Sequence[SpeculationStats]) -> None:
    """Each chunk tells of the next rounds, mostly one: their counts, and their tokens' sources."""
    left = list(rounds)
    for chunk in chunks:
        count = chunk.speculation.rounds
        told, left = left[:count], left[count:]
        assert chunk.speculation == sum(told, SpeculationStats())
        assert list(chunk.sources) == [source for stats in told for source in sources_of(stats)]
    assert not left


async def test_tokens_cut_off_at_the_end_are_not_emitted_but_were_verified(
    guessing: Guessing,
) -> None:
    """A stop id inside an accepted block: the block counts as verified, the rest is not sent."""
    rig, truth = guessing.rig, guessing.truth
    [plain] = await truth.learn(rig, PROMPTS[:1], max_tokens=LENGTH, ignore_eos=True)

    async def right(ask: Ask, say: Say) -> None:
        say(ask.reply(Proposal(tuple(truth.after(ask)))))

    guessing.draft.script = right
    for place in range(2, 10):
        if plain.token_ids.index(plain.token_ids[place]) != place:
            continue
        done = await rig.complete(
            PROMPTS[0],
            max_tokens=LENGTH,
            num_speculative_tokens=8,
            stop_token_ids=(plain.token_ids[place],),
            ignore_eos=True,
        )
        assert done.token_ids == plain.token_ids[: place + 1]
        assert (done.stats.rounds, done.stats.plain) == (2 if place < 10 else 3, 1)
        assert done.stats.proposed == done.stats.accepted == 8 and done.stats.bonus == 1
        assert len(done.sources) == place + 1


@pytest.mark.parametrize("fan_out", [0, 8])
async def test_rounds_are_reported_one_by_one(stack: Rig, fan_out: int) -> None:
    options = {"max_tokens": 30, "num_speculative_tokens": 4, "fan_out": fan_out}
    silent = await stack.complete("tell me", **options)
    assert silent.rounds == ()
    done = await stack.complete("tell me", report_rounds=True, **options)
    stats = done.stats
    assert len(done.rounds) == stats.rounds > 3
    assert sum(r.proposed for r in done.rounds) == stats.proposed > 0
    assert sum(r.accepted for r in done.rounds) == stats.accepted > 0
    assert sum(r.hit is True for r in done.rounds) == stats.buffer_hits
    assert sum(r.hit is False for r in done.rounds) == stats.buffer_misses
    assert (stats.buffer_hits + stats.buffer_misses > 0) is (fan_out > 0)
    assert all(r.round_us > 0 and r.batch_rows > r.proposed for r in done.rounds)
    lengths = [r.context_len for r in done.rounds]
    assert lengths == sorted(lengths) and {r.next_num_speculative_tokens for r in done.rounds} == {
        4
    }
