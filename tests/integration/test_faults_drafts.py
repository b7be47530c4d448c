"""A draft that misbehaves costs speed only: same output as plain decoding, no failed request.

Every fault is put in by a scripted draft that mixes it with right guesses, so that a guess that
is taken where it must not be would change the output or a counter.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from outrider.client import Completion
from outrider.types import Proposal, SparseDistribution, VerificationMode
from outrider.v1 import common_pb2, worker_pb2
from scripted_workers import (
    Ask,
    Guessing,
    Say,
    Script,
    Truth,
    total,
    until,
)

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(60),
    pytest.mark.parametrize("guessing", ["direct", "relayed", "ahead"], indirect=True),
]

K = 4
LENGTH = 32
PROMPTS = [f"faulty {number}" for number in range(4)]

Fault = Callable[[Ask, Say, Truth], Any]


def right(ask: Ask, truth: Truth) -> worker_pb2.Reply:
    return ask.reply(Proposal(tuple(truth.after(ask)), proposer="scripted"))


def wrong(ask: Ask, truth: Truth) -> worker_pb2.Reply:
    """Guesses that the target will not say, to be noticed where they are taken for others."""
    guesses = tuple((guess + 1) % 250 for guess in truth.after(ask))
    return ask.reply(Proposal(guesses, proposer="scripted"))


def changed(reply: worker_pb2.Reply, **header: Any) -> worker_pb2.Reply:
    copy = worker_pb2.Reply()
    copy.CopyFrom(reply)
    for name, value in header.items():
        setattr(copy.header, name, value)
    return copy


async def run(
    guessing: Guessing, script: Script, *, length: int = LENGTH, **options: Any
) -> list[Completion]:
    """The prompts with this draft; checked against plain decoding."""
    rig, draft, truth = guessing.rig, guessing.draft, guessing.truth
    common = {"max_tokens": length, "ignore_eos": True, "seeds": True, **options}
    before = await rig.held()
    plain = await truth.learn(rig, PROMPTS, **common)
    draft.script = script
    draft.asks.clear()
    guessed = await rig.complete_all(PROMPTS, num_speculative_tokens=K, **common)
    assert [d.token_ids for d in guessed] == [d.token_ids for d in plain]
    assert [d.text for d in guessed] == [d.text for d in plain]
    assert draft.asks
    print(total(guessed))
    await rig.returns_to(before)
    return guessed


async def run_by_distributions(guessing: Guessing) -> list[Completion]:
    """The prompts in rejection mode, whose output cannot be compared; all of it comes."""
    done = await guessing.rig.complete_all(
        PROMPTS,
        max_tokens=LENGTH,
        ignore_eos=True,
        temperature=1.0,
        mode=VerificationMode.REJECTION,
        num_speculative_tokens=K,
        fan_out=0,  # What is to come cannot be known.
    )
    assert all(len(d.token_ids) == LENGTH for d in done)
    return done


async def test_right_guesses_are_all_accepted(guessing: Guessing) -> None:
    """The control: without a fault everything is accepted and nothing falls back."""

    async def script(ask: Ask, say: Say) -> None:
        say(right(ask, guessing.truth))

    stats = total(await run(guessing, script))
    assert stats.accepted == stats.proposed > 60 and stats.fallback_rounds == 0
    assert stats.buffer_misses == 0 and (stats.buffer_hits > 15) is guessing.ahead


async def test_late_answers_are_dropped(guessing: Guessing) -> None:
    """Answers come after the draft's timeout, some of them while the next ask is under way."""

    async def script(ask: Ask, say: Say) -> None:
        await asyncio.sleep(1.1 if ask.position < 3 else 0)
        say(wrong(ask, guessing.truth) if ask.position < 3 else right(ask, guessing.truth))

    done = await run(guessing, script, length=400)
    stats = total(done)
    assert all(d.stats.fallback_rounds > 0 for d in done)
    assert guessing.draft.cancelled >= len(PROMPTS)
    assert stats.recovered == 0, "a late guess was verified"


async def test_repeated_answers_count_once(guessing: Guessing) -> None:
    async def script(ask: Ask, say: Say) -> None:
        for _ in range(3):
            say(right(ask, guessing.truth))
        say(wrong(ask, guessing.truth))

    stats = total(await run(guessing, script))
    assert stats.accepted == stats.proposed and stats.recovered == stats.fallback_rounds == 0


async def test_answers_out_of_order_find_their_sessions(guessing: Guessing) -> None:
    """Answers of several sessions are held back and sent in reverse."""
    held: list[tuple[Ask, Say]] = []

    async def script(ask: Ask, say: Say) -> None:
        held.append((ask, say))
        await asyncio.sleep(0.05)
        while held:
            late_ask, late_say = held.pop()
            late_say(right(late_ask, guessing.truth))

    stats = total(await run(guessing, script))
    assert stats.accepted == stats.proposed > 60 and stats.fallback_rounds == 0


HEADERS: dict[str, Callable[[Ask], dict[str, Any]]] = {
    "number": lambda ask: {"number": ask.header.number + 1},
    "old number": lambda ask: {"number": ask.header.number - 1},
    "epoch": lambda ask: {"epoch": ask.header.epoch + 1},
    "completion": lambda ask: {"completion": 7},
    "session": lambda ask: {"session_id": "A" * 22},
}


@pytest.mark.parametrize("name", HEADERS)
async def test_answers_with_another_header_are_not_taken(guessing: Guessing, name: str) -> None:
    async def script(ask: Ask, say: Say) -> None:
        say(changed(wrong(ask, guessing.truth), **HEADERS[name](ask)))
        say(right(ask, guessing.truth))

    stats = total(await run(guessing, script))
    assert stats.accepted == stats.proposed > 60
    assert stats.recovered == stats.fallback_rounds == 0


async def test_an_answer_that_never_fits_is_not_waited_for(guessing: Guessing) -> None:
    async def script(ask: Ask, say: Say) -> None:
        say(changed(right(ask, guessing.truth), number=ask.header.number + 100))

    started = time.monotonic()
    done = await run(guessing, script)
    assert time.monotonic() - started < 15
    assert all(d.stats.proposed == 0 and d.stats.fallback_rounds > 0 for d in done)


async def test_guesses_for_another_session_are_only_wrong(guessing: Guessing) -> None:
    """The right header with the guesses of a neighbour: refused by the target, not by luck."""
    latest: list[list[int]] = [[1, 2, 3, 4]]

    async def script(ask: Ask, say: Say) -> None:
        say(ask.reply(Proposal(tuple(latest[0]))))
        latest[0] = guessing.truth.after(ask)

    stats = total(await run(guessing, script))
    assert stats.recovered > 30


def _tree(ask: Ask, truth: Truth, parents: Sequence[int]) -> worker_pb2.Reply:
    """As many nodes as parents; the first of them are right if they are a chain."""
    ids = (*truth.after(ask), *range(80))[: len(parents)]
    return ask.reply(Proposal(ids, parents=tuple(parents)))


def _raw(ask: Ask, proposal: common_pb2.Proposal) -> worker_pb2.Reply:
    return ask.raw(proposal)


def _with_distributions(
    ask: Ask, truth: Truth, distributions: Sequence[common_pb2.SparseDistribution]
) -> worker_pb2.Reply:
    ids = truth.after(ask)
    return _raw(ask, common_pb2.Proposal(token_ids=ids, distributions=distributions))


def _sparse(ids: Sequence[int], weights: Sequence[int]) -> common_pb2.SparseDistribution:
    return common_pb2.SparseDistribution(ids=ids, weights=weights)


MALFORMED: dict[str, Callable[[Ask, Truth], worker_pb2.Reply]] = {
    "id out of vocabulary": lambda a, t: a.reply(Proposal((258,))),
    "huge id": lambda a, t: a.reply(Proposal((*t.after(a)[:1], (1 << 32) - 1))),
    "65 guesses": lambda a, t: a.reply(Proposal((1,) * 65)),
    "too few distributions": lambda a, t: _with_distributions(a, t, [_sparse([1], [1])] * 7),
    "empty distributions": lambda a, t: _with_distributions(
        a, t, [_sparse([], [])] * len(t.after(a))
    ),
    "unsorted distributions": lambda a, t: _with_distributions(
        a, t, [_sparse([i, i - 1], [1, 1]) for i in t.after(a)]
    ),
    "zero weights": lambda a, t: _with_distributions(a, t, [_sparse([i], [0]) for i in t.after(a)]),
    "guess outside its distribution": lambda a, t: _with_distributions(
        a, t, [_sparse([(i + 1) % 250], [1]) for i in t.after(a)]
    ),
    "its own parent": lambda a, t: _tree(a, t, (-1, 1)),
    "a parent behind its child": lambda a, t: _tree(a, t, (-1, 2, 1)),
    "a parent that is nowhere": lambda a, t: _tree(a, t, (-1, 0, -2)),
    "a parent behind the end": lambda a, t: _tree(a, t, (-1, 0, 1 << 30)),
    "65 nodes": lambda a, t: _tree(a, t, (-1, 0, *[1] * 63)),
    "parents of another length": lambda a, t: a.reply(
        replace(Proposal(tuple(t.after(a))), parents=(-1,) * 9)
    ),
    "another kind of answer": lambda a, t: changed_kind(a),
    "no answer in it": lambda a, t: no_kind(a),
}


def changed_kind(ask: Ask) -> worker_pb2.Reply:
    reply = no_kind(ask)
    reply.verified.token_ids.append(1)
    return reply


def no_kind(ask: Ask) -> worker_pb2.Reply:
    reply = ask.reply(Proposal())
    reply.ClearField("proposed")
    return reply


@pytest.mark.parametrize("name", MALFORMED)
async def test_malformed_proposals_are_dropped_and_counted(guessing: Guessing, name: str) -> None:
    """They come from the second ask on, so that speculation had begun."""

    async def script(ask: Ask, say: Say) -> None:
        is_first = ask.position == 1
        say(right(ask, guessing.truth) if is_first else MALFORMED[name](ask, guessing.truth))

    done = await run(guessing, script)
    for completion in done:
        stats = completion.stats
        assert stats.fallback_rounds + stats.dropped_proposals > 0
        assert stats.accepted == stats.proposed == K, "what is malformed must not be verified"


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}], ids=["greedy", "coupled"])
async def test_right_leaves_beside_wrong_guesses_are_accepted(
    guessing: Guessing, sampling: dict[str, Any]
) -> None:
    """The chain goes wrong at one position; an alternative there is right."""
    forks: list[int] = []

    async def script(ask: Ask, say: Say) -> None:
        assert ask.alternatives == 1
        right = guessing.truth.after(ask)
        fork = len(forks) % len(right)
        chain = (*right[:fork], *((token + 1) % 250 for token in right[fork:]))
        parents = (*range(-1, len(chain) - 1), fork - 1)
        forks.append(fork)
        say(ask.reply(Proposal((*chain, right[fork]), parents=parents)))

    stats = total(await run(guessing, script, alternatives=1, fan_out=0, **sampling))
    assert stats.accepted == sum(fork + 1 for fork in forks) and len(forks) > 20
    assert len(set(forks)) == K and stats.fallback_rounds == stats.dropped_proposals == 0


async def test_trees_of_any_shape_change_no_token(guessing: Guessing) -> None:
    """Nobody asked for them: as wide as a chain may be long they are verified, else their spine."""
    shapes = [(-1, -1, 0, 1), (-1, 0, 0, 0), (-1,) * 4, (-1, 0, 1, *[0] * 20), (-1, 0, 1, 2, 3, 3)]
    coming = itertools.cycle(shapes)

    async def script(ask: Ask, say: Say) -> None:
        assert ask.alternatives == 0
        say(_tree(ask, guessing.truth, next(coming)))

    # Twice as long: where drafts come late, which some do on a busy machine, few are rejected.
    stats = total(await run(guessing, script, length=2 * LENGTH))
    assert stats.accepted > 40 and stats.recovered > 5
    assert stats.fallback_rounds == stats.dropped_proposals == 0


async def test_trees_are_dropped_where_distributions_decide(guessing: Guessing) -> None:
    async def script(ask: Ask, say: Say) -> None:
        say(ask.reply(Proposal((1, 2, 3), parents=(-1, -1, 0))))

    guessing.draft.script = script
    done = await run_by_distributions(guessing)
    # At the end there is room for less than the tree, and what is left of it may be a chain.
    assert all(d.stats.dropped_proposals > 5 and d.stats.proposed <= 2 for d in done)


async def test_alternatives_are_asked_for_where_they_can_be_given(guessing: Guessing) -> None:
    """Asked for they are asked for; on a CPU by nobody else, and of no draft that lacks them."""
    rig, draft = guessing.rig, guessing.draft

    async def script(ask: Ask, say: Say) -> None:
        say(ask.reply(Proposal((1,))))

    async def asked(**options: Any) -> set[int]:
        draft.script = script
        draft.asks.clear()
        common = {"max_tokens": 8, "num_speculative_tokens": 2, "fan_out": 0}
        await rig.complete("how many", **common, **options)
        return {ask.alternatives for ask in draft.asks}

    assert await asked() == {0}
    assert await asked(alternatives=3) == {3}
    assert await asked(alternatives=2, mode=VerificationMode.REJECTION) == {2}  # Greedy.
    await draft.stop()
    draft.capabilities.remove("alternatives")
    await draft.start()

    async def asks_for(count: int) -> bool:
        """Orchestrator and target have found the draft again, each by a link of its own."""
        return await asked(alternatives=3) == {count}

    try:
        await until(lambda: asks_for(0), "a draft that lacks them is asked for none", 15)
        assert await asked(alternatives=3) == {0}
    finally:
        await draft.stop()
        draft.capabilities.append("alternatives")
        await draft.start()
        await until(lambda: asks_for(3), "a draft that has them again is asked for them", 15)


OUTCOMES: dict[str, Callable[[worker_pb2.Proposed], Any]] = {
    "none": lambda found: found.ClearField("outcomes"),
    "behind the end": lambda found: found.outcomes.add(num_accepted=K + 1, token_id=1),
    "far behind the end": lambda found: found.outcomes.add(num_accepted=(1 << 32) - 1),
    "no token": lambda found: found.outcomes.add(token_id=(1 << 32) - 1),
    "the same again": lambda found: found.outcomes.add().CopyFrom(found.outcomes[0]),
    "sixty more": lambda found: [found.outcomes.add(token_id=t) for t in range(60)],
}


@pytest.mark.parametrize("name", OUTCOMES)
async def test_strange_outcomes_change_nothing(guessing: Guessing, name: str) -> None:
    """Sent beside the right one, and not asked for; a base of its own has none."""

    async def script(ask: Ask, say: Say) -> None:
        reply = right(ask, guessing.truth)
        if ask.outcome is not None:
            OUTCOMES[name](reply.proposed)
        say(reply)

    stats = total(await run(guessing, script))
    assert stats.recovered == stats.fallback_rounds == stats.dropped_proposals == 0
    assert stats.proposed > 60 or (guessing.ahead and name == "none" and stats.buffer_misses > 60)


async def test_more_guesses_than_asked_for_change_nothing(guessing: Guessing) -> None:
    """Near the end of the output and of the context too."""

    async def script(ask: Ask, say: Say) -> None:
        wide = replace(ask, wanted=40)
        guesses = (*guessing.truth.after(wide), *range(60))[:60]
        say(ask.reply(Proposal(guesses)))

    stats = total(await run(guessing, script))
    assert stats.accepted > 30
    prompt = [(3 * i) % 250 for i in range(500)]
    common = {"max_tokens": 64, "ignore_eos": True}
    plain = await guessing.rig.complete(prompt, num_speculative_tokens=0, **common)

    async def wide_script(ask: Ask, say: Say) -> None:
        say(ask.reply(Proposal((*plain.token_ids[ask.position :], *range(60))[:60])))

    guessing.draft.script = wide_script
    guessed = await guessing.rig.complete(prompt, num_speculative_tokens=K, **common)
    assert guessed.token_ids == plain.token_ids
    assert guessed.finish_reason is plain.finish_reason


async def test_wrong_distributions_fail_nothing_in_rejection_mode(guessing: Guessing) -> None:
    """Their output cannot be compared; their requests must end as they should."""

    async def script(ask: Ask, say: Say) -> None:
        ids = tuple((ask.position * 7 + i) % 250 for i in range(ask.wanted))
        kinds = (
            tuple(SparseDistribution((i,), (1,)) for i in ids),
            tuple(SparseDistribution((i, i + 1), (65535, 1)) for i in ids),
            (),
        )
        say(ask.reply(Proposal(ids, distributions=kinds[ask.position % 3])))

    guessing.draft.script = script
    before = await guessing.rig.held()
    done = await run_by_distributions(guessing)
    assert total(done).proposed > 0 and total(done).fallback_rounds == 0
    await guessing.rig.returns_to(before)


REFUSALS = [
    reason
    for reason in worker_pb2.RefusalReason.values()
    if reason != worker_pb2.REFUSAL_REASON_UNSPECIFIED
]


@pytest.mark.parametrize("reason", REFUSALS, ids=worker_pb2.RefusalReason.Name)
async def test_every_refusal_falls_back_to_plain_decoding(guessing: Guessing, reason: int) -> None:
    async def script(ask: Ask, say: Say) -> None:
        reply = no_kind(ask)
        reply.refused.reason = reason  # type: ignore[assignment]
        reply.refused.message = "scripted"
        say(reply)

    done = await run(guessing, script)
    assert all(d.stats.fallback_rounds > 0 and d.stats.proposed == 0 for d in done)


async def test_a_draft_that_always_needs_tokens_is_given_up(guessing: Guessing) -> None:
    async def script(ask: Ask, say: Say) -> None:
        reply = no_kind(ask)
        setattr(reply.need_tokens, "from", 1 << 30 if ask.header.number % 2 else 0)
        say(reply)

    done = await run(guessing, script)
    assert all(d.stats.fallback_rounds > 0 for d in done)


@pytest.mark.parametrize("coupled", [False, True], ids=["greedy", "coupled"])
async def test_a_draft_that_never_answers(guessing: Guessing, coupled: bool) -> None:
    async def script(ask: Ask, say: Say) -> None:
        pass

    sampling = {"temperature": 1.0, "top_p": 0.95} if coupled else {}
    started = time.monotonic()
    done = await run(guessing, script, **sampling)
    assert time.monotonic() - started < 15
    assert all(d.stats.fallback_rounds > 0 and d.stats.proposed == 0 for d in done)


async def test_a_draft_that_dies_and_comes_back_is_used_again(guessing: Guessing) -> None:
    """Streams break mid-stream, then there is another incarnation without any session."""
    rig, draft, truth = guessing.rig, guessing.draft, guessing.truth
    common = {"max_tokens": 200, "ignore_eos": True, "seeds": True}
    plain = await truth.learn(rig, PROMPTS, **common)

    async def script(ask: Ask, say: Say) -> None:
        await asyncio.sleep(0.01)
        say(right(ask, truth))

    draft.script = script

    async def interrupt() -> None:
        while not any(ask.position > 30 for ask in draft.asks):
            await asyncio.sleep(0.01)
        await draft.stop()
        await asyncio.sleep(0.2)
        await draft.start()

    draft.asks.clear()
    done, _ = await asyncio.gather(
        rig.complete_all(PROMPTS, num_speculative_tokens=K, **common), interrupt()
    )
    assert [d.token_ids for d in done] == [d.token_ids for d in plain]
    assert all(d.stats.fallback_rounds > 0 and d.stats.accepted > 0 for d in done)

    async def known() -> bool:
        return "draft" in (await rig.client.list_models())[0].proposers

    await until(known, "the draft is found again", 15)
    again = await rig.complete_all(PROMPTS, num_speculative_tokens=K, **common)
    assert [d.token_ids for d in again] == [d.token_ids for d in plain]
    assert total(again).accepted == total(again).proposed > 0
    assert total(again).fallback_rounds == 0


async def test_one_faulty_session_leaves_the_others_alone(guessing: Guessing) -> None:
    """Only the first session's proposals are malformed or missing."""

    async def script(ask: Ask, say: Say) -> None:
        if guessing.truth.number(ask) == 0:
            say(ask.reply(Proposal((999,))))
        elif guessing.truth.number(ask) == 1:
            await asyncio.sleep(10)
        else:
            say(right(ask, guessing.truth))

    done = await run(guessing, script)
    for completion in done[2:]:
        assert completion.stats.fallback_rounds == completion.stats.dropped_proposals == 0
        assert completion.stats.accepted == completion.stats.proposed > 0
        assert completion.total_s < done[1].total_s
