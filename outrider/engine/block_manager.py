"""Which KV blocks are whose, and which prefixes are there to be shared.

A full block of committed tokens is registered under the chained hash of all tokens up to its end.
Another sequence that starts with the same tokens takes a reference instead of computing them
again. Blocks that nobody refers to any more stay registered until their place is needed, the one
unused for longest first. A hash only finds a block: its tokens, and that it follows the block
before it, are compared too, so that no prefix is ever taken for another.
"""

from collections import OrderedDict
from collections.abc import Hashable, MutableSequence, Sequence
from dataclasses import dataclass, field

from outrider.token_log import TokenLog

_Key = tuple[Hashable, int]
"""Salt, and hash of the prefix."""

_ROOT = 0
"""Serial of what the first block of a sequence follows."""


@dataclass(frozen=True, slots=True)
class _Content:
    """What a registered block holds."""

    key: _Key
    tokens: tuple[int, ...]
    serial: int
    after: int
    """Serial of the block before it."""


@dataclass(slots=True)
class Chain:
    """What is known of the first blocks of a sequence, so that they need not be looked up again."""

    serials: list[int] = field(default_factory=list)
    """Of each the serial by which it is registered, or another one that holds the same."""
    borrowed: int = 0
    """Blocks up to the last one in whose place another one is registered: that may go."""

    def __len__(self) -> int:
        return len(self.serials)

    def cut(self, num_blocks: int) -> None:
        """Know the first `num_blocks` at most."""
        del self.serials[num_blocks:]
        self.borrowed = min(self.borrowed, num_blocks)

    def start(self, num_blocks: int) -> "Chain":
        """The same of the first `num_blocks` at most, as a value of its own."""
        return Chain(self.serials[:num_blocks], min(self.borrowed, num_blocks))


class BlockManager:
    """Owns the numbers 0 … num_blocks - 1 of KV blocks of `block_tokens` tokens each."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._contents: dict[int, _Content] = {}
        self._registered: dict[_Key, int] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()
        self._last_serial = _ROOT

    @property
    def num_free(self) -> int:
        """Blocks that no sequence refers to."""
        return len(self._free) + len(self._unused)

    @property
    def num_kept(self) -> int:
        """Of the free ones, those that hold a prefix somebody may come back to."""
        return len(self._unused)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_tokens)

    def extend(self, blocks: MutableSequence[int], num_tokens: int) -> bool:
        """Grow `blocks` until they hold `num_tokens`; False, and nothing changed, if they can't."""
        missing = self.blocks_for(num_tokens) - len(blocks)
        if missing <= 0:
            return True
        if missing > self.num_free:
            return False
        blocks.extend([self._take() for _ in range(missing)])
        return True

    def truncate(self, blocks: MutableSequence[int], num_tokens: int) -> None:
        """Give back what `blocks` hold beyond `num_tokens` tokens."""
        keep = self.blocks_for(num_tokens)
        if keep >= len(blocks):
            return
        for block in reversed(blocks[keep:]):  # So that a prefix outlives what follows it.
            self._give_back(block)
        del blocks[keep:]

    def own(self, blocks: MutableSequence[int], start: int) -> int | None:
        """Make the KV from position `start` on the sequence's alone, so that it can be written.

        Where `start` lies in a block that others use, that block is replaced. Returns the position
        from which KV must be computed, at most `start`; None, and nothing changed, where there is
        no block to replace it with.
        """
        index = start // self.block_tokens
        if index >= len(blocks):
            return start
        if self._references[blocks[index]] > 1 and not self.num_free:
            return None
        self.truncate(blocks, (index + 1) * self.block_tokens)
        if self._references[blocks[index]] == 1:
            self._forget(blocks[index])
            return start
        self._give_back(blocks[index])
        blocks[index] = self._take()
        return index * self.block_tokens

    def find(
        self, salt: Hashable, log: TokenLog, num_blocks: int, chain: Chain | None = None
    ) -> list[int]:
        """Blocks that hold the log's first tokens, `num_blocks` at most.

        Not looked for are those that `chain` knows of this log, if they are still there; what is
        found is added to it.
        """
        found: list[int] = []
        chain = Chain() if chain is None else chain
        serial = self._last_known(salt, log, chain)
        for index in range(len(chain), num_blocks):
            block = self._registered.get(self._key(salt, log, index))
            content = self._contents.get(block) if block is not None else None
            if block is None or content is None or content.after != serial:
                break
            if content.tokens != self._tokens(log, index):
                break
            found.append(block)
            serial = content.serial
            chain.serials.append(serial)
        return found

    def share(self, blocks: Sequence[int]) -> list[int]:
        """The same blocks, with a reference more each."""
        for block in blocks:
            self._references[block] += 1
            self._unused.pop(block, None)
        return list(blocks)

    def register(
        self,
        salt: Hashable,
        log: TokenLog,
        blocks: Sequence[int],
        num_blocks: int,
        chain: Chain | None = None,
    ) -> None:
        """Offer the first `num_blocks` blocks, which hold KV of the log's first tokens.

        `chain` is what is known of them, and is brought up to date.
        """
        chain = Chain() if chain is None else chain
        serial = self._last_known(salt, log, chain)
        for index in range(len(chain), num_blocks):
            block = blocks[index]
            content = self._contents.get(block)
            if content is not None and content.after != serial:
                self._forget(block)  # What it followed was another's, and is gone.
                content = None
            if content is None:
                key = self._key(salt, log, index)
                if key in self._registered:  # Another sequence has computed the same.
                    content = self._contents[self._registered[key]]
                    if content.after != serial or content.tokens != self._tokens(log, index):
                        return
                    chain.borrowed = index + 1
                else:
                    content = self._remember(block, key, self._tokens(log, index), serial)
            serial = content.serial
            chain.serials.append(serial)

    def places(
        self, salt: Hashable, log: TokenLog, blocks: Sequence[int], first: int, stop: int
    ) -> list[tuple[int, int]]:
        """Where blocks first … stop - 1 of a log are, of which `register` was told, up to one that
        is gone: number, and what `holds` knows it by."""
        found: list[tuple[int, int]] = []
        before = max(first - 1, 0)
        for index, block in enumerate(blocks[before:stop], before):
            content = self._contents.get(block)
            if content is None:  # Another sequence's, which holds the same, is registered.
                block = self._registered.get(self._key(salt, log, index), block)
                content = self._contents.get(block)
                if content is None or content.tokens != self._tokens(log, index):
                    break
            if found and content.after != found[-1][1]:
                break
            found.append((block, content.serial))
        return found[first - before :]

    def holds(self, block: int, serial: int) -> bool:
        """Whether a block has held the same all the time since `places` told of it. On any thread:
        what was read from its memory before is then what it held."""
        content = self._contents.get(block)
        return content is not None and content.serial == serial

    def _last_known(self, salt: Hashable, log: TokenLog, chain: Chain) -> int:
        """The last serial of a log's chain; where it is not there any more, all is forgotten.

        Of blocks that one sequence had the later ones go first, so that looking at the last
        borrowed one is enough.
        """
        chain.cut(len(log) // self.block_tokens)
        if not chain.serials:
            return _ROOT
        for index in {chain.borrowed - 1, len(chain) - 1} - {-1}:
            block = self._registered.get(self._key(salt, log, index))
            if block is None or self._contents[block].serial != chain.serials[index]:
                chain.cut(0)
                return _ROOT
        return chain.serials[-1]

    def _key(self, salt: Hashable, log: TokenLog, index: int) -> _Key:
        return salt, log.prefix_hash((index + 1) * self.block_tokens)

    def _tokens(self, log: TokenLog, index: int) -> tuple[int, ...]:
        start = index * self.block_tokens
        return tuple(log.tokens[start : start + self.block_tokens])

    def _remember(self, block: int, key: _Key, tokens: tuple[int, ...], after: int) -> _Content:
        self._last_serial += 1
        content = _Content(key, tokens, self._last_serial, after)
        self._contents[block] = content
        self._registered[key] = block
        return content

    def _forget(self, block: int) -> None:
        content = self._contents.pop(block, None)
        if content is not None:
            del self._registered[content.key]

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._unused.popitem(last=False)
            self._forget(block)
        self._references[block] = 1
        return block

    def _give_back(self, block: int) -> None:
        if self._references[block] == 0:
            raise RuntimeError(f"block {block} was freed twice")
        self._references[block] -= 1
        if self._references[block] == 0:
            if block in self._contents:
                self._unused[block] = None
            else:
                self._free.append(block)
