"""What goes into a pass and what comes out of it."""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from torch import Tensor

from outrider.types import GenerationSpec, SparseDistribution


@dataclass(frozen=True, slots=True)
class Draw:
    """How tokens are drawn at a work's rows that give logits.

    The first of them decides about position `base_len` of the log. With `steps` above 1 the last
    token drawn is fed to a pass of its own, and so on, until `steps` passes have drawn.
    """

    spec: GenerationSpec
    base_len: int
    steps: int = 1


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one sequence: `token_ids` at positions start, start+1, …, whose KV is written.

    `num_logits` of them, the last ones, give logits; `draw` says what to draw there.
    """

    token_ids: Tokens[int]
    start: int
    blocks: Tokens[int]
    num_logits: int
    draw: Draw | None = None


@dataclass(slots=True)
class Drawn:
    """The tokens, and in `rejection` mode the distribution of each."""

    token_ids: list[int] = field(default_factory=list)
    distributions: list[SparseDistribution] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Output:
    """What a pass gave: its logits, valid until the next pass, and what was drawn for each entry
    of the batch (None where nothing was to be)."""

    logits: Tensor  # [logits rows of all, vocab] float32
    drawn: list[Drawn | None]
