"""Branches that are kept: a draft's head start into its next question.

A draft that has guessed on from each likely outcome of a verification is asked next about one of
these outcomes, with the guesses it made there as the pending ones. The branch then becomes the
sequence: KV of all its tokens is there, and what may follow each of them is known, so that new
branches start without a pass. Keeping is a cache like all KV: what does not fit is dropped, and the
question is worked out from the start.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from outrider.engine.rows import Draw, Drawn, Rows, table_of


@dataclass(slots=True)
class KeptBranch:
    """A branch: its tokens from position `start` on, and the blocks of its own that hold their KV,
    from the block on in which `start` lies. `ranked[i]` is what may follow token i, the likeliest
    first; of the last token it is only known after a pass over it (`Kept.last_rows`)."""

    start: int
    token_ids: list[int]
    blocks: list[int]
    ranked: list[list[int]]

    def known_for(self, tokens: Tokens[int], draw: Draw) -> list[list[int]] | None:
        """`Rows.known` for work on `tokens` that draws this, if it is about this branch."""
        pending = tokens[self.start + 1 :]
        fits = (
            draw.base_len == self.start + 1
            and not any(branch.run_ahead for branch in draw.branches)
            and len(pending) < len(self.ranked)
            and tokens[self.start :] == self.token_ids[: len(pending) + 1]
        )
        if not fits:
            return None
        # The token that stands is what was drawn, so the first.
        known = [ranked[1:] for ranked in self.ranked[: len(pending)]]
        known.append(self.ranked[len(pending)])
        enough = all(branch.rank < len(known[branch.num_accepted]) for branch in draw.branches)
        return known if enough else None


@dataclass(slots=True)
class Kept:
    """The branches of a sequence's last work."""

    draw: Draw
    branches: list[KeptBranch] = field(default_factory=list)

    @classmethod
    def of(cls, draw: Draw, drawn: Drawn, scratch: Tokens[int], block_tokens: int) -> "Kept":
        """From what a work's branches drew into the blocks `scratch`."""
        kept, taken = cls(draw), 0
        places = draw.places(block_tokens)
        for branch, result, own in zip(draw.branches, drawn.branches, places, strict=True):
            kept.branches.append(
                KeptBranch(
                    start=draw.base_len + branch.num_accepted,
                    token_ids=result.token_ids,
                    blocks=list(scratch[taken : taken + len(own)]),
                    ranked=[
                        [token, *others]
                        for token, others in zip(
                            result.token_ids[1:], result.alternatives, strict=True
                        )
                    ],
                )
            )
            taken += len(own)
        return kept

    def last_rows(self, blocks: Tokens[int], block_tokens: int) -> Iterator[Rows]:
        """For each branch of the sequence with these blocks the row that is still to be computed:
        its last token, with as many alternatives as the others have."""
        for branch in self.branches:
            place = branch.start + len(branch.token_ids) - 1
            table = table_of(blocks[: branch.start // block_tokens], branch.blocks)
            draw = Draw(self.draw.spec, place + 1, alternatives=self.draw.alternatives)
            yield Rows(branch.token_ids[-1:], place, table, 1, draw)

    def complete(self, drawn: Tokens[Drawn | None]) -> None:
        """What came of `last_rows`."""
        for branch, result in zip(self.branches, drawn, strict=True):
            if result is not None:
                branch.ranked.append([*result.token_ids, *result.alternatives[0]])
