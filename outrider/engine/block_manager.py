"""Which KV blocks are whose: allocation in runs, so that a sequence's KV tends to lie in one piece.

Attention finds blocks by their table, wherever they lie; runs only help caches and prefetching.
"""

import numpy as np


class BlockManager:
    """Owns the numbers 0 … num_blocks - 1 of KV blocks of `block_tokens` tokens each."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._free = np.ones(num_blocks, dtype=bool)
        self.num_free = num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_tokens)

    def extend(self, blocks: list[int], num_tokens: int) -> bool:
        """Grow `blocks` until they hold `num_tokens`; False, and nothing changed, if they can't."""
        missing = self.blocks_for(num_tokens) - len(blocks)
        if missing <= 0:
            return True
        if missing > self.num_free:
            return False
        blocks.extend(self._take(missing, after=blocks[-1] if blocks else None))
        return True

    def truncate(self, blocks: list[int], num_tokens: int) -> None:
        """Give back what `blocks` hold beyond `num_tokens` tokens."""
        keep = self.blocks_for(num_tokens)
        for block in blocks[keep:]:
            if self._free[block]:
                raise RuntimeError(f"block {block} was freed twice")
            self._free[block] = True
            self.num_free += 1
        del blocks[keep:]

    def _take(self, count: int, after: int | None) -> list[int]:
        start = self._run_start(count) if after is None else after + 1
        stop = start + count
        if stop <= self.num_blocks and self._free[start:stop].all():
            taken = list(range(start, stop))
        else:
            taken = [int(block) for block in np.flatnonzero(self._free)[:count]]
        self._free[taken] = False
        self.num_free -= count
        return taken

    def _run_start(self, count: int) -> int:
        """Where a new sequence should start: room behind it to grow, and before it for others."""
        edges = np.flatnonzero(np.diff(np.concatenate(([False], self._free, [False]))))
        starts, stops = edges[::2], edges[1::2]
        longest = int(np.argmax(stops - starts))
        start, stop = int(starts[longest]), int(stops[longest])
        room_to_share = (stop - start) // 2
        if start > 0 and room_to_share >= count:
            return start + room_to_share
        return start
