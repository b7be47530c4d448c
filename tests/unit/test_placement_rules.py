"""Where prompts go: affinity, bounded load, and how little moves when targets come and go."""

import random
from collections import Counter

from services.orchestrator.placement import (
    BLOCK_TOKENS,
    LOAD_FACTOR,
    MAX_BLOCKS_A_PROMPT,
    Candidate,
    PrefixIndex,
    block_hashes,
    choose,
    first_unseen,
)

TARGETS = [0x1111, 0x2222, 0x3333, 0x4444]


def prompt(*parts: int, blocks: int = 2) -> list[int]:
    """Tokens of parts of a few blocks each; equal parts are equal tokens."""
    tokens: list[int] = []
    for part in parts:
        chance = random.Random(part)
        tokens += [chance.randrange(1000) for _ in range(blocks * BLOCK_TOKENS)]
    return tokens


class Fleet:
    """Targets as a simulated orchestrator sees them; sessions come and end."""

    def __init__(self, targets: list[int], index: PrefixIndex | None = None) -> None:
        self.load = Counter(dict.fromkeys(targets, 0))
        self.index = index or PrefixIndex(10_000)
        self.hits = self.placed = 0
        self.worst = 0.0

    def place(self, tokens: list[int], salt: str = "t") -> int:
        blocks = block_hashes(salt, tokens)
        cached = self.index.cached(blocks)
        candidates = [Candidate(t, n, cached.get(t, 0)) for t, n in self.load.items()]
        most = max(c.cached for c in candidates)
        chosen = choose(candidates, first_unseen(blocks, most))
        self.index.add(blocks, chosen.key)
        self.load[chosen.key] += 1
        self.placed += 1
        self.hits += chosen.cached > 0
        bound = LOAD_FACTOR * self.load.total() / len(self.load) + 1
        self.worst = max(self.worst, self.load[chosen.key] / bound)
        return chosen.key

    def end(self, target: int) -> None:
        self.load[target] -= 1


def test_hashes_are_chained_salted_and_of_full_blocks_only():
    tokens = prompt(1, 2)
    hashes = block_hashes("a", tokens)
    assert len(hashes) == 4 and len(set(hashes)) == 4
    assert block_hashes("a", tokens[:-1]) == hashes[:3]
    assert block_hashes("a", tokens[: BLOCK_TOKENS - 1]) == ()
    assert not set(block_hashes("b", tokens)) & set(hashes)
    changed = [tokens[0] + 1, *tokens[1:]]
    assert not set(block_hashes("a", changed)) & set(hashes), "all that follows a change differs"
    assert len(block_hashes("a", [1] * BLOCK_TOKENS * 1000)) == MAX_BLOCKS_A_PROMPT


def test_the_longest_cached_prefix_wins():
    fleet = Fleet(TARGETS)
    home = fleet.place(prompt(1, 2, 3))
    fleet.end(home)
    other = next(t for t in TARGETS if t != home)
    fleet.index.add(block_hashes("t", prompt(1)), other)
    assert fleet.index.cached(block_hashes("t", prompt(1, 2, 9))) == {home: 4, other: 2}
    assert fleet.place(prompt(1, 2, 9)) == home
    assert fleet.hits == 1


def test_a_block_counts_only_behind_all_before_it():
    index = PrefixIndex(100)
    index.add(block_hashes("t", prompt(1)), 7)
    index.add(block_hashes("t", prompt(1, 2)), 8)
    index.add(block_hashes("t", prompt(2)), 9)
    assert index.cached(block_hashes("t", prompt(1, 2))) == {7: 2, 8: 4}
    index.add(block_hashes("t", prompt(1, 2))[2:], 7)
    index.add(block_hashes("t", prompt(1, 2))[1:], 9)
    assert index.cached(block_hashes("t", prompt(1, 2))) == {7: 4, 8: 4}


def test_orchestrators_that_know_nothing_of_each_other_agree():
    fleets = [Fleet(TARGETS), Fleet(TARGETS)]
    fleets[0].place(prompt(0))  # One knows a prefix more: that changes nothing for other prompts.
    fleets[0].load.update(dict.fromkeys(TARGETS, 3))
    fleets[1].load.update(dict.fromkeys(TARGETS, 3))
    for number in range(1, 200):
        first, second = (fleet.place(prompt(number)) for fleet in fleets)
        assert first == second
        for fleet, target in zip(fleets, (first, second), strict=True):
            fleet.end(target)


def test_unknown_prefixes_spread_evenly_and_few_move_when_a_target_comes_or_goes():
    def homes(targets: list[int]) -> dict[int, int]:
        """Where each of many prefixes goes while nobody has any load."""
        found = {}
        for number in range(600):
            fleet = Fleet(targets)
            found[number] = fleet.place(prompt(number, blocks=1))
        return found

    before, fewer = homes(TARGETS), homes(TARGETS[:-1])
    more = homes([*TARGETS, 0x5555])
    counts = Counter(before.values())
    assert min(counts.values()) > 600 / 4 * 0.75
    for number, target in before.items():
        if target != TARGETS[-1]:
            assert fewer[number] == target, "only those of the target that went move"
        if more[number] != target:
            assert more[number] == 0x5555, "and to the one that came, nowhere else"
    moved = sum(more[number] != target for number, target in before.items())
    assert 600 / 5 * 0.7 < moved < 600 / 5 * 1.3


def test_a_prefix_that_all_ask_for_overloads_no_target():
    """Hundreds of sessions with one system prompt, coming and ending at random."""
    chance = random.Random(5)
    fleet, running = Fleet(TARGETS), []
    for number in range(800):
        if len(running) > 60 or (running and chance.random() < 0.3):
            fleet.end(running.pop(chance.randrange(len(running))))
        running.append(fleet.place(prompt(1, 100 + number)))
    assert fleet.worst <= 1.0
    assert fleet.hits / fleet.placed > 0.97, "each target learns the prefix once"
    assert max(fleet.load.values()) <= LOAD_FACTOR * fleet.load.total() / 4 + 1


def test_shared_prefixes_stay_together_under_load():
    """40 documents behind one system prompt, questions to them in any order, 48 at a time."""
    chance = random.Random(6)
    fleet, running = Fleet(TARGETS), []
    seen: dict[int, Counter[int]] = {}
    for number in range(1000):
        if len(running) == 48:
            fleet.end(running.pop(chance.randrange(48)))
        document = chance.randrange(40)
        target = fleet.place(prompt(1, 1000 + document, 5000 + number, blocks=1))
        seen.setdefault(document, Counter())[target] += 1
        running.append(target)
    assert fleet.worst <= 1.0
    at_home = sum(max(counts.values()) for counts in seen.values())
    assert at_home > 700, "most questions go where their document is"
    control = Fleet(TARGETS)
    for number in range(400):  # Without an index nothing but chance brings them together.
        control.place(prompt(10_000 + number))
    assert control.hits == 0


def test_prompts_without_a_full_block_go_where_the_load_is_least():
    assert choose([Candidate(1, 2.0), Candidate(2, 0.5), Candidate(3, 1.0)]).key == 2
    assert choose([Candidate(1, 1.0), Candidate(2, 1.0)]).key == 1, "the first of equals"
    assert first_unseen((), 0) is None


def test_the_zone_breaks_ties_within_the_bound():
    far, near = Candidate(1, 1.0, near=False), Candidate(2, 1.5, near=True)
    assert choose([far, near]).key == 2
    cached_far = Candidate(1, 1.0, cached=3, near=False)
    assert choose([cached_far, near]).key == 1
    crowded = Candidate(2, 9.0, near=True)
    assert choose([far, crowded]).key == 1


def test_the_index_is_bounded_and_forgets_what_is_unused_for_longest():
    index = PrefixIndex(8)
    for number in range(10):
        index.add(block_hashes("t", prompt(number)), 1)
        index.add(block_hashes("t", prompt(0)), 1)  # used all the time
    assert len(index) == 8
    assert index.cached(block_hashes("t", prompt(0))) == {1: 2}
    assert index.cached(block_hashes("t", prompt(1))) == {}
    long = block_hashes("t", prompt(77, blocks=20))
    index.add(long, 2)
    assert len(index) == 8 and index.cached(long) == {2: 8}, "the start outlives the end"


def test_targets_that_are_gone_are_forgotten():
    index = PrefixIndex(100)
    blocks = block_hashes("t", prompt(1))
    for target in range(1, 30):
        index.add(blocks, target)
    assert len(index.cached(blocks)) == 8, "the last ones only"
    index.retain([29, 28])
    assert index.cached(blocks) == {29: 2, 28: 2}
    index.retain([])
    assert len(index) == 0
