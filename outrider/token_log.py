"""Committed token ids with the chained hash of every prefix: the one truth about a session."""

import array
import sys
from collections.abc import Sequence
from typing import NamedTuple

from outrider.types import EMPTY_PREFIX_HASH, chain_states


class Tail(NamedTuple):
    """Tokens of a log from `start` on, with the hash of the prefix that each one ends."""

    start: int
    token_ids: list[int]
    hashes: "array.array[int]"


class TokenLog:
    """Token ids and the hash of each prefix; both ends of the worker protocol keep one."""

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self.tokens: list[int] = []
        self._hashes = array.array("Q", [EMPTY_PREFIX_HASH])
        self._stood = 0
        self.append(token_ids)

    def __len__(self) -> int:
        return len(self.tokens)

    def prefix_hash(self, length: int) -> int:
        """Chained hash (outrider.types.chain_hash) of the first `length` tokens."""
        return self._hashes[length]

    def block_hashes(self, block_tokens: int) -> "array.array[int]":
        """The hashes of the prefixes of 1, 2, … blocks."""
        return self._hashes[block_tokens::block_tokens]

    def append(self, token_ids: Sequence[int]) -> None:
        self.tokens.extend(token_ids)
        self._hashes.extend(self._hashes_after(len(self._hashes) - 1, token_ids))

    def tail(self, start: int) -> "Tail":
        """A copy of what stands from `start` on, to give to another log of the same session."""
        return Tail(start, self.tokens[start:], self._hashes[start + 1 :])

    def take(self, tail: "Tail") -> None:
        """Become the log that the tail is of; what stands before it must be the same."""
        self.cut(tail.start)
        self.tokens.extend(tail.token_ids)
        self._hashes.extend(tail.hashes)

    def stood(self) -> int:
        """How many of the first tokens have been there ever since this was last asked, for the one
        who compares the log with something else: those need not be looked at again."""
        stood, self._stood = self._stood, len(self.tokens)
        return stood

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens."""
        self._stood = min(self._stood, length)
        del self.tokens[length:]
        del self._hashes[length + 1 :]

    def matches(self, length: int, prefix_hash: int) -> bool:
        """Whether the first `length` tokens are those with this hash."""
        return length <= len(self.tokens) and self._hashes[length] == prefix_hash

    def replace_tail(
        self, start: int, token_ids: Sequence[int], base_len: int, base_hash: int
    ) -> bool:
        """Cut to `start` and append `token_ids`, only if that gives the base described.

        False, and nothing changed, if the result would not have its length and hash.
        """
        if start > len(self.tokens) or start + len(token_ids) != base_len:
            return False
        hashes = self._hashes_after(start, token_ids)
        if (hashes[-1] if hashes else self._hashes[start]) != base_hash:
            return False
        self.cut(start)
        self.tokens.extend(token_ids)
        self._hashes.extend(hashes)
        return True

    def _hashes_after(self, start: int, token_ids: Sequence[int]) -> "array.array[int]":
        states = b"".join(chain_states(self._hashes[start], token_ids))
        hashes = array.array("Q", states)
        if sys.byteorder == "big":
            hashes.byteswap()
        return hashes
