"""Proposals through real workers: they change the speed and never the tokens.

Claims of identity are of the table's fp32 column (docs/design.md §2); each counts what it saw.
"""

import contextlib
import dataclasses
import random
from collections import Counter

import pytest
import torch
from worker_harness import (
    GREEDY,
    Owner,
    Tally,
    by_draft,
    coupled,
    generate,
    kv_tensors,
    load,
    plain_greedy,
    plain_logits,
    proposal_of,
    random_tokens,
    refusal,
    rejection,
    serving,
    verdict_of,
)

from outrider.types import (
    GenerationSpec,
    PositionLogprobs,
    Proposal,
    SamplingParams,
    SparseDistribution,
    Verdict,
)

torch.set_num_threads(1)
PROMPT = random_tokens(24, seed=11)


@pytest.fixture(scope="module")
def folder(tiny_models):
    return tiny_models["target"]


@pytest.fixture(scope="module")
def target(folder):
    with serving(folder) as bench:
        yield bench


@pytest.fixture(scope="module")
def draft(tiny_models):
    with serving(tiny_models["draft"], "draft") as bench:
        yield bench


@pytest.fixture(scope="module")
def self_draft(folder):
    """A draft worker that runs the target's own weights."""
    with serving(folder, "draft") as bench:
        yield bench


@contextlib.contextmanager
def session(bench, spec, tokens=PROMPT):
    owner = Owner(bench, list(tokens), spec=spec).opened()
    try:
        yield owner
    finally:
        owner.close()


def plain(target, spec, count, tokens=PROMPT):
    """Plain decoding: rounds without proposals."""
    with session(target, spec, tokens) as owner:
        return generate(owner, count)


# --- faults.md row 2: the target's own tokens are never rejected ------------------------------


def scripted(own):
    """A proposer that guesses the text `own`."""
    return lambda tokens, k: Proposal(tuple(own[len(tokens) - len(PROMPT) :][:k]))


@pytest.mark.parametrize("spec", [GREEDY, coupled(5)], ids=["greedy", "coupled"])
def test_the_targets_own_tokens_are_never_rejected(target, folder, spec):
    own = plain(target, spec, 128)
    if spec is GREEDY:
        assert own[:40] == plain_greedy(folder, PROMPT, 40)
    assert len(set(own)) > 20
    for k in (1, 3, 8, 16):
        tally = Tally()
        with session(target, spec) as owner:
            script = scripted(own)
            assert generate(owner, 128, k, script, tally) == own
        assert tally.accepted == tally.proposed > 60
        assert tally.recovered_inside == tally.recovered_first == 0


# --- faults.md row 8: draft = target ----------------------------------------------------------


def self_drafted(target, bench, spec, count, k, disturb=None):
    """(accepted, proposed, tokens), the draft's KV checked after every round."""
    tally = Tally()
    with session(target, spec) as owner, session(bench, spec) as drafter:
        ask = by_draft(drafter)

        def propose(tokens, k):
            if disturb:
                disturb()
            proposal = ask(tokens, k)
            guesses = list(proposal.token_ids)
            # All but the last guess were computed; its KV belongs to the next round.
            assert drafter.cached == [*tokens, *guesses[:-1]]
            return proposal

        prompt = list(owner.tokens)
        while len(owner.tokens) < len(prompt) + count:
            base = list(owner.tokens)
            proposal = propose(base, k)
            verdict = verdict_of(owner.verify(proposal=proposal))
            tally.add(verdict)
            assert owner.cached == [*base, *proposal.token_ids]
            owner.tokens.extend(verdict.token_ids)
            if not disturb:
                # The draft's KV is a prefix of what is committed, short of what is new to it.
                assert drafter.cached == owner.tokens[: len(drafter.cached)]
                assert len(owner.tokens) - len(drafter.cached) == 2
        return tally, owner.tokens[len(prompt) : len(prompt) + count]


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("spec", [GREEDY, coupled(3)], ids=["greedy", "coupled"])
def test_a_draft_that_is_the_target_is_always_accepted(target, self_draft, spec, k):
    """16 of these make 2,000 tokens."""
    tally, tokens = self_drafted(target, self_draft, spec, 126, k)
    assert tally.accepted == tally.proposed and tally.proposed >= 126 * k // (k + 1) - k
    assert tally.bonus == tally.rounds
    assert tokens == plain(target, spec, 126)


def misplace(runner):
    for tensor in kv_tensors(runner):
        tensor.copy_(tensor.roll(1, dims=1))


def poison(runner):
    kv_tensors(runner)[1].neg_()


@pytest.mark.parametrize("fault", [misplace, poison])
def test_misplaced_or_poisoned_draft_kv_would_be_noticed(target, folder, fault):
    with serving(folder, "draft") as bench:
        tally, tokens = self_drafted(
            target, bench, coupled(3), 60, 4, disturb=lambda: fault(bench.runner)
        )
    assert tally.accepted < 0.8 * tally.proposed
    # And the text is what it always was.
    assert tokens == plain(target, coupled(3), 60)


# --- same tokens whatever is proposed ---------------------------------------------------------


def adversary(own, seed):
    """Right guesses up to a random place, then anything: no place is spared."""
    rng = random.Random(seed)

    def propose(tokens, k):
        start = len(tokens) - len(PROMPT)
        right = own[start : start + k]
        keep = rng.choice([0, rng.randrange(k + 1), k])
        noise = [rng.randrange(258) for _ in range(k)]
        return Proposal((*right[:keep], *noise[len(right[:keep]) :]), proposer="adversary")

    return propose


SPECS = {"greedy": GREEDY, "coupled": coupled(17), "hot": coupled(18, temperature=1.7, top_p=1.0)}
CASES = [(name, k) for k in (1, 4, 8) for name in SPECS if name != "hot" or k == 8]


@pytest.mark.parametrize(("name", "k"), CASES)
def test_output_is_the_same_with_a_noisy_draft_for_every_k(target, draft, name, k):
    spec, tally = SPECS[name], Tally()
    with session(target, spec) as owner, session(draft, spec) as drafter:
        tokens = generate(owner, 100, k, by_draft(drafter), tally)
    assert tokens == plain(target, spec, 100)
    assert tally.accepted > 20 and tally.bonus > 1
    assert tally.recovered_first + tally.recovered_inside > 2
    assert k == 1 or tally.recovered_inside > 1


@pytest.mark.parametrize(("name", "k"), CASES)
def test_output_is_the_same_with_adversarial_proposals_for_every_k(target, name, k):
    spec, tally = SPECS[name], Tally()
    own = plain(target, spec, 120)
    with session(target, spec) as owner:
        assert generate(owner, 100, k, adversary(own, seed=k), tally) == own[:100]
    assert tally.accepted > 10 and tally.bonus > 3 and tally.recovered_first > 3
    assert k == 1 or tally.recovered_inside > 3


def test_greedy_output_is_that_of_transformers(target, folder):
    assert plain(target, GREEDY, 60) == plain_greedy(folder, PROMPT, 60)


def test_seed_and_mode_change_the_output(target):
    outputs = [plain(target, spec, 20) for spec in (GREEDY, coupled(1), coupled(2), rejection(1))]
    assert len({tuple(output) for output in outputs}) == 4


# --- faults.md row 4: neighbours in the batch -------------------------------------------------


def lockstep(target, draft, specs, rounds, k):
    """Sessions by the number of their prompt, all in the same passes: {number: generated ids},
    and the rows of each verification's pass."""
    owners = {
        n: Owner(target, random_tokens(10 + 3 * n, seed=20 + n), spec=spec)
        for n, spec in specs.items()
    }
    prompts = {n: len(owner.tokens) for n, owner in owners.items()}
    drafters = {n: Owner(draft, list(o.tokens), spec=o.spec) for n, o in owners.items()}
    rows = []

    def together(bench, entries):
        replies = []
        for entry in entries:
            bench.worker.submit([entry], replies.append)
        while len(replies) < len(entries):
            bench.pump()
        return {reply.header.session_id: reply for reply in replies}

    for bench, members in ((target, owners), (draft, drafters)):
        together(bench, [member.open_entry() for member in members.values()])
    for _ in range(rounds):
        proposed = together(draft, [d.propose_entry(k) for d in drafters.values()])
        proposals = {n: proposal_of(proposed[d.session_id]) for n, d in drafters.items()}
        entries = [o.verify_entry(proposal=proposals[n]) for n, o in owners.items()]
        verified = together(target, entries)
        for n, owner in owners.items():
            reply = verified[owner.session_id]
            rows.append(reply.verified.timing.batch_rows)
            owner.tokens.extend(verdict_of(reply).token_ids)
            drafters[n].tokens = list(owner.tokens)
    return {n: owner.tokens[prompts[n] :] for n, owner in owners.items()}, rows


@pytest.mark.parametrize("make", [coupled, rejection])
def test_a_seed_gives_the_same_tokens_alone_and_beside_eight_neighbours(tiny_models, make):
    """Also where neighbours share the seed or have other parameters; whatever its place."""
    specs = [make(8, temperature=0.5), make(9, top_k=3), GREEDY, make(10, min_p=0.1), make(7)]
    specs += [make(7), coupled(7), rejection(12), make(13, top_p=0.5)]
    with (
        serving(tiny_models["target"], threaded=False) as target,
        serving(tiny_models["draft"], "draft", threaded=False) as draft,
    ):
        together, rows = lockstep(target, draft, dict(enumerate(specs)), rounds=12, k=4)
        assert min(rows[9:]) >= 45
        for place in (0, 4, 8):
            alone, own_rows = lockstep(target, draft, {place: specs[place]}, rounds=12, k=4)
            assert together[place] == alone[place] and len(alone[place]) > 16
            assert max(own_rows[1:]) == 5
    assert len({tuple(tokens) for tokens in together.values()}) == 9


# --- min_tokens, logprobs, statistics ---------------------------------------------------------


def masked_greedy(folder, prompt, count, stop, banned_first):
    tokens = list(prompt)
    for index in range(count):
        logits = plain_logits(folder, tokens)[-1].clone()
        if index < banned_first:
            logits[list(stop)] = -torch.inf
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def always_tempting(folder, count):
    """Stop ids that hold the likeliest token at each of the first `count` positions."""
    stop = set()
    while True:
        text = masked_greedy(folder, PROMPT, count, stop, count)
        logits = plain_logits(folder, PROMPT + text)[len(PROMPT) - 1 : -1]
        picks = set(logits.argmax(-1).tolist())
        if picks <= stop:
            return tuple(sorted(stop))
        stop |= picks


def test_min_tokens_bans_stop_ids_at_every_position_inside_a_proposal(target, draft, folder):
    k = 8
    stop = always_tempting(folder, k + 1)
    assert len(stop) <= 64
    for min_tokens in range(k + 2):
        expected = masked_greedy(folder, PROMPT, k + 1, stop, min_tokens)
        stops = [index for index, token in enumerate(expected) if token in stop]
        assert stops[:1] == ([min_tokens] if min_tokens <= k else [])
        spec = GenerationSpec(
            SamplingParams(), prompt_len=len(PROMPT), min_tokens=min_tokens, stop_ids=stop
        )
        with session(target, spec) as owner:
            verdict = verdict_of(owner.verify(expected[:k]))
            assert (list(verdict.token_ids), verdict.num_accepted) == (expected, k)
            # A banned guess is rejected where it stands.
            for place in range(min(min_tokens, k)):
                guesses = [*expected[:place], stop[0], *expected[place + 1 : k]]
                assert verdict_of(owner.verify(guesses)).num_accepted == place
        with session(draft, spec) as drafter:
            guesses = proposal_of(drafter.propose(k)).token_ids
            assert not set(guesses[:min_tokens]) & set(stop)


@pytest.mark.parametrize("make", [coupled, rejection])
def test_min_tokens_holds_in_sampling_modes(target, make):
    common = sorted(set(plain(target, make(1), 60)))[:64]
    spec = dataclasses.replace(
        make(1), prompt_len=len(PROMPT), min_tokens=30, stop_ids=tuple(common)
    )
    with session(target, spec) as owner:
        tokens = generate(owner, 80, 4, adversary(common, seed=1))
    assert not set(tokens[:30]) & set(common) and set(tokens[30:]) & set(common)


@pytest.mark.parametrize(
    "spec", [GREEDY, coupled(5, temperature=0.6), rejection(5, top_k=9)], ids=["t0", "c", "r"]
)
@pytest.mark.parametrize("top", [0, 3, 20])
def test_logprobs_equal_a_teacher_forced_rescoring(target, draft, folder, spec, top):
    spec = dataclasses.replace(spec, logprobs=top)
    reported: list[PositionLogprobs] = []
    tally = Tally()
    with session(target, spec) as owner, session(draft, spec) as drafter:
        ask = by_draft(drafter)
        while len(reported) < 40:
            verdict = verdict_of(owner.verify(proposal=ask(owner.tokens, 4)))
            assert len(verdict.logprobs) == len(verdict.token_ids)
            tally.add(verdict)
            reported += verdict.logprobs
            owner.tokens.extend(verdict.token_ids)
        tokens = owner.tokens
    assert tally.accepted > 10 and tally.recovered_inside + tally.recovered_first > 1
    scores = plain_logits(folder, tokens).log_softmax(-1)[len(PROMPT) - 1 : -1]
    assert [entry.token_id for entry in reported] == tokens[len(PROMPT) :]
    for entry, row in zip(reported, scores, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-3)
        assert len(entry.top) == top
        best = row.topk(top).values.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best, abs=1e-3)
        assert [float(row[i]) for i, _ in entry.top] == pytest.approx(best, abs=1e-3)


def test_no_logprobs_unless_asked_for(target):
    with session(target, GREEDY) as owner:
        assert verdict_of(owner.verify([1])).logprobs == ()


def test_replies_tell_where_the_time_went(target):
    with session(target, GREEDY) as owner:
        timing = owner.verify([1, 2]).verified.timing
    # Earlier sessions may have left the start of the prompt.
    assert timing.cached_tokens + timing.batch_rows == len(PROMPT) + 2
    assert timing.compute_us > 0


# --- the context's end ------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 4, 8])
def test_proposals_are_cut_at_the_contexts_end(folder, k):
    """Every base length from max - k - 2 to max."""
    end = 48
    with serving(folder, context_length=end) as bench:
        for base in range(end - k - 2, end + 1):
            prompt = random_tokens(base, seed=base)
            own = plain_greedy(folder, prompt, k + 1)
            with session(bench, GREEDY, prompt) as owner:
                reply = owner.verify(own[:k])
                if base == end:
                    assert refusal(reply) == ("context_exceeded", "base_len")
                    continue
                verdict = verdict_of(reply)
                assert verdict.num_proposed == verdict.num_accepted == min(k, end - base - 1)
                assert list(verdict.token_ids) == own[: verdict.num_proposed + 1]
                wrong = [own[0] ^ 1, *own[1:k]]
                verdict = verdict_of(owner.verify(wrong))
                assert list(verdict.token_ids) == own[:1]
                assert base + verdict.num_proposed + 1 <= end


def test_rejection_proposals_are_cut_with_their_distributions(folder):
    with serving(folder, context_length=32) as bench, session(bench, rejection(3)) as owner:
        owner.tokens = random_tokens(29)
        ids = (5, 6, 7, 8)
        masses = tuple(SparseDistribution((i, i + 20), (3, 1)) for i in ids)
        verdict = verdict_of(owner.verify(proposal=Proposal(ids, distributions=masses)))
        assert verdict.num_proposed == 2


@pytest.mark.parametrize("k", [1, 4, 8])
def test_a_draft_stops_guessing_where_its_own_context_ends(folder, k):
    end = 48
    with serving(folder, "draft", context_length=end) as bench:
        for base in range(end - k - 2, end + 1):
            prompt = random_tokens(base, seed=base)
            with session(bench, GREEDY, prompt) as owner:
                reply = owner.propose(k)
                if base == end:
                    assert refusal(reply) == ("context_exceeded", "base_len")
                    continue
                guesses = list(proposal_of(reply).token_ids)
                assert guesses == plain_greedy(folder, prompt, min(k, end - base + 1))


# --- proposals that no honest proposer sends --------------------------------------------------


def masses(*pairs):
    return tuple(SparseDistribution(ids, weights) for ids, weights in pairs)


ONE = ((1,), (1,))
MALFORMED = {
    "too long": (Proposal((1,) * 65), "proposal.token_ids"),
    "id too large": (Proposal((258,)), "proposal.token_ids"),
    "too few distributions": (Proposal((1, 1), distributions=masses(ONE)), ...),
    "too many distributions": (Proposal((1,), distributions=masses(ONE, ONE)), ...),
    "empty distribution": (Proposal((1,), distributions=masses(((), ()))), ...),
    "guess outside": (Proposal((2,), distributions=masses(ONE)), ...),
    "ids fall": (Proposal((1,), distributions=masses(((2, 1), (1, 1)))), ...),
    "ids repeat": (Proposal((1,), distributions=masses(((1, 1), (1, 1)))), ...),
    "ids too large": (Proposal((1,), distributions=masses(((1, 258), (1, 1)))), ...),
    "weight 0": (Proposal((1,), distributions=masses(((1, 2), (1, 0)))), ...),
    "weight too large": (Proposal((1,), distributions=masses(((1, 2), (1, 65536)))), ...),
    "fewer weights": (Proposal((1,), distributions=masses(((1, 2), (1,)))), ...),
    "too many entries": (
        Proposal((1,), distributions=masses((tuple(range(65)), (1,) * 65))),
        ...,
    ),
    "too few parents": (Proposal((1, 2), parents=(-1,)), "proposal.parents"),
    "its own parent": (Proposal((1, 2), parents=(-1, 1)), "proposal.parents"),
    "a parent behind its child": (Proposal((1, 2, 3), parents=(-1, 2, -1)), "proposal.parents"),
    "too large a tree": (Proposal((1,) * 65, parents=(-1,) * 65), "proposal.token_ids"),
    "long name": (Proposal((1,), proposer="x" * 65), "proposal.proposer"),
}


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.parametrize("spec", [GREEDY, rejection(4)], ids=["greedy", "rejection"])
def test_malformed_proposals_are_refused_with_their_field(target, name, spec):
    proposal, field = MALFORMED[name]
    with session(target, spec) as owner:
        reply = owner.verify(proposal=proposal)
        expected = "proposal.distributions" if field is ... else field
        assert refusal(reply) == ("invalid_argument", expected)
        verdict_of(owner.verify())


def test_trees_are_refused_where_distributions_decide(target):
    tree = Proposal((1, 2, 3), parents=(-1, -1, 0))
    with session(target, rejection(4)) as owner:
        assert refusal(owner.verify(proposal=tree)) == ("unsupported", "proposal.parents")
        chain = Proposal((1, 2, 3), parents=(-1, 0, 1))
        assert verdict_of(owner.verify(proposal=chain)).num_proposed == 3
    with session(target, rejection(4, temperature=0.0)) as owner:
        assert verdict_of(owner.verify(proposal=tree)).num_proposed == 2


# --- trees ------------------------------------------------------------------------------------


def grove(own, seed, seen):
    """Trees of every shape in which the right text goes on for a while, on the spine or off it."""
    rng = random.Random(seed)

    def propose(tokens, k):
        start = len(tokens) - len(PROMPT)
        guesses, parents, right = [], [], [-1]
        for i in range(rng.randrange(2, 2 * k + 2)):
            goes_on = rng.random() < 0.5 and len(right) <= k and start + len(right) <= len(own)
            if goes_on:
                parents.append(right[-1])
                guesses.append(own[start + len(right) - 1])
                right.append(i)
            else:
                parents.append(rng.randrange(-1, i))
                guesses.append(rng.randrange(258))
        seen["off the spine"] += right[1:] != list(range(len(right) - 1))
        return Proposal(tuple(guesses), parents=tuple(parents))

    return propose


@pytest.mark.parametrize(("name", "k"), CASES)
def test_output_is_the_same_with_trees_of_every_shape(target, name, k):
    spec, tally, seen = SPECS[name], Tally(), Counter()
    own = plain(target, spec, 120)
    with session(target, spec) as owner:
        assert generate(owner, 100, k, grove(own, k, seen), tally) == own[:100]
    assert tally.accepted > 30 and seen["off the spine"] > 10
    assert tally.recovered_first + tally.recovered_inside > 3 and tally.rounds < 75


def test_a_leaf_beside_the_chain_is_accepted_and_computed_again(target, folder):
    """KV is kept of the base and the accepted part of the chain, not of the leaf."""
    own = plain_greedy(folder, PROMPT, 12)
    with session(target, GREEDY) as owner:
        guesses = (own[0], own[1], own[2] ^ 1, own[1] ^ 1, own[2])
        tree = Proposal(guesses, parents=(-1, 0, 1, 0, 1))
        verdict = verdict_of(owner.verify(proposal=tree))
        assert verdict == Verdict(tuple(own[:4]), num_accepted=3, num_proposed=3, num_beside=2)
        assert owner.cached == [*PROMPT, *guesses[:3]]
        owner.tokens.extend(verdict.token_ids)
        again = owner.verify(own[4:6])
        assert again.verified.timing.cached_tokens == len(PROMPT) + 2
        assert verdict_of(again).token_ids == tuple(own[4:7])


def test_num_proposed_of_a_tree_is_its_longest_path(target):
    with session(target, GREEDY) as owner:
        for parents, longest in (((-1,) * 4, 1), ((-1, 0, -1, 2, 3), 3), ((-1, -1, 0), 2)):
            tree = Proposal(tuple(range(len(parents))), parents=parents)
            assert verdict_of(owner.verify(proposal=tree)).num_proposed == longest


def test_logprobs_of_a_tree_are_those_of_its_accepted_path(target, folder):
    spec = dataclasses.replace(coupled(5, temperature=0.6), logprobs=3)
    own = plain(target, spec, 60)
    reported, seen = [], Counter()
    with session(target, spec) as owner:
        propose = grove(own, 9, seen)
        while len(reported) < 50:
            verdict = verdict_of(owner.verify(proposal=propose(owner.tokens, 4)))
            reported += verdict.logprobs
            owner.tokens.extend(verdict.token_ids)
        tokens = owner.tokens
    assert seen["off the spine"] > 5
    assert [entry.token_id for entry in reported] == tokens[len(PROMPT) :]
    scores = plain_logits(folder, tokens).log_softmax(-1)[len(PROMPT) - 1 : -1]
    for entry, row in zip(reported, scores, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-3)
        best = row.topk(3).values.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best, abs=1e-3)


def test_a_tree_too_large_for_the_context_is_cut_to_its_spine(folder):
    end = 48
    with serving(folder, context_length=end) as bench:
        for base in range(end - 8, end):
            prompt = random_tokens(base, seed=base)
            own = plain_greedy(folder, prompt, 4)
            # The third guess is right beside the chain alone.
            guesses = (*own[:2], own[2] ^ 1, own[2])
            tree = Proposal(guesses, parents=(-1, 0, 1, 1))
            with session(bench, GREEDY, prompt) as owner:
                verdict = verdict_of(owner.verify(proposal=tree))
            room = end - base - 1
            assert verdict.num_proposed == min(3, room)
            accepted = 3 if room >= 4 else min(2, room)
            assert verdict.token_ids == tuple(own[: accepted + 1])


@pytest.mark.parametrize("spec", [GREEDY, coupled(6)], ids=["greedy", "coupled"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_draft_sends_its_runners_up_as_leaves(draft, spec, count):
    with session(draft, spec) as owner:
        chain = proposal_of(owner.propose(4))
    with session(draft, spec) as owner:
        entry = owner.propose_entry(4)
        entry.propose.alternatives = count
        tree = proposal_of(owner.bench.ask(entry))
        assert owner.cached == [*PROMPT, *chain.token_ids[:3]]
    assert tree.spine == chain and len(tree) == 4 * (1 + count) and tree.proposer == "draft"
    assert tree.parents[4:] == tuple(place - 1 for place in range(4) for _ in range(count))
    for place in range(4):
        siblings = [
            t for t, parent in zip(tree.token_ids, tree.parents, strict=True) if parent == place - 1
        ]
        assert len(set(siblings)) == 1 + count and siblings[0] == chain.token_ids[place]


def test_alternatives_are_the_likeliest_other_tokens(draft, tiny_models):
    with session(draft, GREEDY) as owner:
        entry = owner.propose_entry(3)
        entry.propose.alternatives = 3
        tree = proposal_of(owner.bench.ask(entry))
    for place in range(3):
        text = [*PROMPT, *tree.token_ids[:place]]
        ranked = plain_logits(tiny_models["draft"], text)[-1].topk(4).indices.tolist()
        siblings = [tree.token_ids[place], *tree.token_ids[3 + 3 * place : 6 + 3 * place]]
        assert siblings == ranked


@pytest.mark.parametrize(
    ("spec", "change", "reason"),
    [
        (GREEDY, {"alternatives": 4}, "invalid_argument"),
        (rejection(3), {"alternatives": 1}, "unsupported"),
        (GREEDY, {"alternatives": 1, "ahead": [1]}, "invalid_argument"),
    ],
)
def test_alternatives_are_refused_where_there_are_none(draft, spec, change, reason):
    with session(draft, spec) as owner:
        entry = owner.propose_entry(3)
        entry.propose.alternatives = change["alternatives"]
        entry.propose.ahead.fan_out.extend(change.get("ahead", ()))
        if "ahead" not in change:
            entry.propose.ClearField("ahead")
        assert refusal(owner.bench.ask(entry)) == (reason, "alternatives")
        proposal_of(owner.propose(3))


@pytest.mark.parametrize(
    ("pending", "fan_out", "field"),
    [
        ([], [], "ahead.fan_out"),
        ([], [0], "ahead.fan_out"),
        ([], [65], "ahead.fan_out"),
        ([1], [1], "ahead.fan_out"),
        ([1], [64, 1], "ahead.fan_out"),
        ([1] * 65, [1] * 66, "proposal.token_ids"),
        ([258], [1, 1], "proposal.token_ids"),
    ],
)
def test_what_is_to_be_prepared_has_its_range(draft, pending, fan_out, field):
    with session(draft, GREEDY) as owner:
        entry = owner.propose_entry(3)
        entry.propose.ahead.pending.token_ids.extend(pending)
        entry.propose.ahead.fan_out.extend(fan_out)
        entry.propose.ahead.SetInParent()
        assert refusal(owner.bench.ask(entry)) == ("invalid_argument", field)
        proposal_of(owner.propose(3))


def test_the_longest_proposal_is_taken(target, folder):
    own = plain_greedy(folder, PROMPT, 65)
    with session(target, GREEDY) as owner:
        verdict = verdict_of(owner.verify(own[:64]))
    assert verdict.num_accepted == 64 and list(verdict.token_ids) == own


def test_a_rejection_draft_sends_what_it_sampled_from(draft):
    with session(draft, rejection(6)) as owner:
        proposal = proposal_of(owner.propose(8))
    assert len(proposal.distributions) == 8 and proposal.proposer == "draft"
    assert all(len(d.ids) == 64 and max(d.weights) == 65535 for d in proposal.distributions)
    with session(draft, coupled(6)) as owner:
        assert proposal_of(owner.propose(8)).distributions == ()


# --- a target whose vocabulary is padded beyond the draft's -----------------------------------


@pytest.mark.parametrize("spec", [GREEDY, coupled(2), rejection(2)], ids=["t0", "c", "r"])
def test_a_padded_target_works_with_a_draft_that_is_not(tiny_models, draft, spec):
    assert load(tiny_models["padded-target"]).vocab_size == 320
    tally = Tally()
    with (
        serving(tiny_models["padded-target"]) as bench,
        session(bench, spec) as owner,
        session(draft, spec) as drafter,
    ):
        tokens = generate(owner, 60, 4, by_draft(drafter), tally)
        if spec is GREEDY:
            assert tokens == plain_greedy(tiny_models["padded-target"], PROMPT, 60)
        elif spec == coupled(2):
            assert tokens == plain(bench, spec, 60)
    assert tally.rounds > 10


def test_ids_beyond_the_drafts_vocabulary_are_refused_by_the_draft(draft):
    with session(draft, GREEDY, [1, 2, 300]) as owner:
        assert refusal(owner.propose(3)) == ("invalid_argument", "delta.token_ids")
