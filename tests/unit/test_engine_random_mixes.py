"""Random mixes of everything that can happen to sessions, in a KV pool that is far too small.

Whatever happens, each verdict is the one that plain `transformers` gives from the same prefix,
and no block is lost, shared or forgotten.
"""

import functools
import random
from collections import Counter

import pytest
import torch
from worker_harness import Owner, plain_logits, random_tokens, refusal, serving, verdict_of

from outrider.types import Proposal
from outrider.wire import verdict_from_proto

torch.set_num_threads(1)
STEPS = 800
POOL_BLOCKS = 8
BLOCK = 8


class Mix:
    """Sessions on a worker without a thread, driven one random step at a time."""

    def __init__(self, bench, folder, seed):
        self.bench, self.rng = bench, random.Random(seed)
        self.seen = Counter()
        self.pending = {}
        self.owners = []
        self.texts = [random_tokens(56, seed=100 + n) for n in range(6)]

        @functools.cache
        def picks(tokens):
            return plain_logits(folder, tokens).argmax(-1).tolist()

        self.picks = picks

    def step(self):
        idle = [owner for owner in self.owners if id(owner) not in self.pending]
        roll = self.rng.random()
        if len(self.owners) < 7 and roll < 0.1:
            self.open()
        elif idle and roll < 0.5:
            self.verify(self.rng.choice(idle))
        elif idle and roll < 0.56:
            self.roll_back(self.rng.choice(idle))
        elif self.owners and roll < 0.61:
            self.close(self.rng.choice(self.owners))
        elif self.pending and roll < 0.67:
            self.cancel(self.rng.choice([owner for owner, *_ in self.pending.values()]))
        self.bench.pump()
        self.collect()
        self.check_blocks()

    def open(self):
        text = self.rng.choice(self.texts)
        owner = Owner(self.bench, text[: self.rng.randrange(1, 50)])
        assert self.bench.post(owner.open_entry()).get_nowait().HasField("opened")
        self.owners.append(owner)

    def verify(self, owner):
        room = max(POOL_BLOCKS * BLOCK - len(owner.tokens), 0)
        guesses = self.guesses(owner.tokens, min(self.rng.randrange(7), room))
        leaves = min(self.rng.choice([0, 0, 1, 3]), room - len(guesses))
        proposal = self.with_leaves(owner.tokens, guesses, leaves)
        replies = self.bench.post(owner.verify_entry(proposal=proposal))
        self.pending[id(owner)] = (owner, list(owner.tokens), proposal, replies)

    def with_leaves(self, tokens, guesses, count):
        """Beside the guesses so many leaves, most of them the right token after their parent."""
        parents = list(range(-1, len(guesses) - 1))
        leaves = []
        for _ in range(count):
            parent = self.rng.randrange(-1, len(guesses))
            own = self.picks((*tokens, *guesses[: parent + 1]))[-1]
            parents.append(parent)
            leaves.append(own if self.rng.random() < 0.7 else (own + 9) % 258)
        return Proposal((*guesses, *leaves), tuple(parents) if count else ())

    def guesses(self, tokens, count):
        """Right up to a random place."""
        guesses = []
        right = self.rng.randrange(count + 1)
        for index in range(count):
            own = self.picks((*tokens, *guesses))[-1]
            guesses.append(own if index < right else (own + 1 + index) % 258)
        return guesses

    def roll_back(self, owner):
        """The log itself is another one now: shorter, and perhaps with another end."""
        keep = self.rng.randrange(1, len(owner.tokens) + 1)
        owner.tokens = owner.tokens[:keep]
        if self.rng.random() < 0.5:
            owner.tokens += [self.rng.randrange(256) for _ in range(self.rng.randrange(4))]
        self.seen["rolled back"] += 1

    def close(self, owner):
        entry = owner.entry()
        entry.close.SetInParent()
        assert self.bench.post(entry).get_nowait().HasField("closed")
        self.owners.remove(owner)
        if id(owner) in self.pending:
            *_, replies = self.pending.pop(id(owner))
            reply = replies.get_nowait()
            assert reply.HasField("verified") or refusal(reply)[0] == "cancelled"
            self.seen["closed while busy"] += reply.HasField("refused")

    def cancel(self, owner):
        entry = owner.entry()
        entry.cancel.through_number = owner.number - 1
        self.bench.post(entry)

    def collect(self):
        for key, (owner, base, proposal, replies) in list(self.pending.items()):
            if replies.empty():
                continue
            del self.pending[key]
            reply = replies.get_nowait()
            if reply.HasField("refused"):
                reason = refusal(reply)[0]
                assert reason == "cancelled" or len(base) + len(proposal) > POOL_BLOCKS * BLOCK
                self.seen[reason] += 1
                continue
            verdict = verdict_from_proto(reply.verified)
            self.check(base, proposal, verdict)
            assert owner.tokens == base
            owner.tokens.extend(verdict.token_ids)
            if len(owner.tokens) > POOL_BLOCKS * BLOCK - 8:
                owner.tokens = owner.tokens[: self.rng.randrange(1, 40)]

    def check(self, base, proposal, verdict):
        """Plain decoding, for as long as its tokens were guessed."""
        parents = proposal.parents or range(-1, len(proposal) - 1)
        nodes = list(zip(parents, proposal.token_ids, strict=True))
        emitted, path = [self.picks(tuple(base))[-1]], []
        while (step := (path[-1] if path else -1, emitted[-1])) in nodes:
            path.append(nodes.index(step))
            emitted.append(self.picks((*base, *emitted))[-1])
        assert verdict.num_accepted == len(path) == len(emitted) - 1
        assert list(verdict.token_ids) == emitted
        self.seen["verified"] += 1
        self.seen["accepted"] += len(path)
        self.seen["recovered inside"] += 0 < len(path) < verdict.num_proposed
        self.seen["bonus"] += 0 < len(path) == verdict.num_proposed
        self.seen["leaves"] += path != list(range(len(path)))

    def check_blocks(self):
        sessions = self.bench.worker._sessions._sessions.values()
        held = [block for session in sessions for block in session.sequence.blocks]
        assert len(set(held)) == self.bench.blocks_used
        for session in sessions:
            assert len(session.sequence.blocks) * BLOCK >= len(session.sequence.cached)
        self.seen["scattered"] += any(
            b != a + 1
            for session in sessions
            for a, b in zip(session.sequence.blocks, session.sequence.blocks[1:], strict=False)
        )

    def finish(self):
        for _ in range(500):
            if not self.pending:
                break
            self.bench.pump()
            self.collect()
        assert not self.pending
        for owner in list(self.owners):
            self.close(owner)


@pytest.mark.parametrize("max_rows", [7, 16])
def test_random_mixes_give_right_verdicts_and_return_every_block(tiny_models, max_rows):
    folder = tiny_models["target"]
    limits = {"num_blocks": POOL_BLOCKS, "max_rows": max_rows, "block_tokens": BLOCK}
    with serving(folder, threaded=False, **limits) as bench:
        mix = Mix(bench, folder, seed=max_rows + 1)
        for _ in range(STEPS):
            mix.step()
        mix.finish()
        scheduler = bench.worker._engine.scheduler
        assert bench.blocks_used == 0 and bench.worker.load.queued == 0
        assert bench.worker.load.sessions == 0 and not scheduler.works
        preemptions, shared = scheduler.preemptions, scheduler.prefix.found
        # And whoever gets those blocks next is served right.
        owner = Owner(bench, random_tokens(30, seed=1))
        bench.post(owner.open_entry())
        replies = bench.post(owner.verify_entry())
        while replies.empty():
            bench.pump()
        assert verdict_of(replies.get_nowait()).token_ids == (mix.picks(tuple(owner.tokens))[-1],)
    enough = {
        "verified": 60, "accepted": 30, "recovered inside": 10, "bonus": 10, "cancelled": 3,
        "closed while busy": 2, "rolled back": 10, "scattered": 40,
        "leaves": 5,
    }  # fmt: skip
    assert preemptions > 20 and shared > 100
    assert {name: mix.seen[name] for name, least in enough.items() if mix.seen[name] < least} == {}
