"""What goes into a pass and what comes out of it."""

import array
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from outrider import trees
from outrider.types import GenerationSpec, SparseDistribution


class Branch(NamedTuple):
    """One way on from tokens that are being verified: `num_accepted` of them stand, then comes the
    token of this `rank` (0: the likeliest) among all but those that stand there.

    With `run_ahead` it is what a chain's next guess would be instead, drawn as one: it stands there
    for the other branches.
    """

    num_accepted: int
    rank: int = 0
    run_ahead: bool = False


@dataclass(frozen=True, slots=True)
class Draw:
    """How tokens are drawn at a work's rows that give logits.

    The first of them decides about position `base_len` of the log. With `steps` above 1 the last
    token drawn is fed to a pass of its own, and so on, until `steps` passes have drawn.

    With `branches`, row i of the logits is what follows i of the tokens after the base. Nothing is
    drawn for the sequence itself; each branch takes its token and goes on from it for `steps`
    further passes, in blocks of its own (`Rows.scratch`). It is a round of its own for what its
    noise is keyed by; the token of a branch that runs ahead still belongs to the round at the base.

    With `alternatives` (not where guesses travel with distributions) each pick comes with so many
    that nearly were picked in its place. Branches with them can be kept (outrider.engine.kept), so
    they have room for the KV of their last token too.
    """

    spec: GenerationSpec
    base_len: int
    steps: int = 1
    branches: tuple[Branch, ...] = ()
    alternatives: int = 0

    def scratch_blocks(self, block_tokens: int) -> int:
        """Blocks that the branches write."""
        return sum([len(places) for places in self.places(block_tokens)])

    def places(self, block_tokens: int) -> Iterator[range]:
        """Of each branch, the block numbers within the sequence that it writes."""
        for branch in self.branches:
            first = self.base_len + branch.num_accepted
            last = first + self.steps - (not self.alternatives)
            yield range(first // block_tokens, last // block_tokens + 1)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one sequence: `token_ids` at places start, start+1, …, whose KV is written.

    `num_logits` of them, the last ones, give logits; `draw` says what to draw there. `scratch` are
    the blocks of the draw's branches.

    The last tokens are a tree where there are `parents` (outrider.trees). A row's place is where
    its KV lies; its position, which siblings share, is where it stands in the log.

    Where an earlier pass has told what branches start with, there are no rows: `known[i]` are the
    tokens that branches at i begin with, by their rank.
    """

    token_ids: Tokens[int]
    start: int
    blocks: Tokens[int]
    num_logits: int
    draw: Draw | None = None
    scratch: Tokens[int] = ()
    parents: Tokens[int] = ()
    known: Tokens[Tokens[int]] = ()

    @property
    def stop(self) -> int:
        """The place behind the last row."""
        return self.start + len(self.token_ids)

    @property
    def positions(self) -> Tokens[int]:
        """Position of each row."""
        first_node = self.stop - len(self.parents)
        if not self.parents:
            return range(self.start, self.stop)
        nodes = (first_node + depth for depth in trees.depths(self.parents))
        return [*range(self.start, first_node), *nodes]

    @property
    def sights(self) -> "list[Sight]":
        """What each row sees."""
        first_node = self.stop - len(self.parents)
        found = [Sight(place + 1, 0) for place in range(self.start, first_node)]
        paths: list[int] = []  # Of each node a bit for every node on its path, its own included.
        for node, parent in enumerate(self.parents):
            path = (paths[parent] if parent >= 0 else 0) | 1 << node
            paths.append(path)
            in_line = (~path & path + 1).bit_length() - 1
            found.append(Sight(first_node + in_line, path >> in_line))
        return found

    def drawn_positions(self, draw: Draw) -> Tokens[int]:
        """The position of the log that each row of logits decides about."""
        if not self.parents:
            return range(draw.base_len, draw.base_len + self.num_logits)
        return [draw.base_len, *(draw.base_len + depth + 1 for depth in trees.depths(self.parents))]


class Sight(NamedTuple):
    """What a row sees: all places before `full`, and place full + i for each bit i of `mask`, which
    has 64."""

    full: int
    mask: int


@dataclass(frozen=True, slots=True)
class BranchPlace:
    """Where a branch lies: its token at position `start`, its block table, and the block of the
    sequence's that its own first block starts as a copy of (from, to), if it begins inside one."""

    start: int
    blocks: Tokens[int]
    copied: tuple[int, int] | None


def branch_places(rows: Rows, block_tokens: int) -> list[BranchPlace]:
    """The places of the branches of `rows`, in the order of the draw's."""
    draw = rows.draw
    if draw is None:
        return []
    found, taken = [], 0
    for branch, places in zip(draw.branches, draw.places(block_tokens), strict=True):
        own = rows.scratch[taken : taken + len(places)]
        taken += len(places)
        start = draw.base_len + branch.num_accepted
        inside = start % block_tokens > 0
        copied = (rows.blocks[places.start], own[0]) if inside else None
        found.append(BranchPlace(start, table_of(rows.blocks[: places.start], own), copied))
    return found


def table_of(first: Tokens[int], then: Tokens[int]) -> "array.array[int]":
    """A table of blocks: some, which may be many, and those that follow."""
    table = array.array("i", first)
    table.extend(then)
    return table


@dataclass(slots=True)
class Drawn:
    """The tokens, and in `rejection` mode the distribution of each; or what each branch drew, its
    own token first, which has no alternatives, and a distribution only if it runs ahead. Of each
    token drawn the alternatives, where they were asked for, the best first."""

    token_ids: list[int] = field(default_factory=list)
    distributions: list[SparseDistribution] = field(default_factory=list)
    branches: list["Drawn"] = field(default_factory=list)
    alternatives: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Output:
    """What a pass gave: its logits, valid until the next pass, and what was drawn for each entry
    of the batch (None where nothing was to be)."""

    logits: Tensor  # [logits rows of all, vocab] float32
    drawn: list[Drawn | None]
    after_branches: Callable[[], list[Drawn]] | None = None
    """Where the device works on with the branches of an only entry: waits for what may follow the
    last token of each (one pick, and the alternatives). Must be called before the next pass."""
