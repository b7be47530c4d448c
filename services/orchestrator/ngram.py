"""Prompt lookup: guess that what followed the last few tokens before follows them again.

Saxena, "Prompt Lookup Decoding" (2023). Nothing is computed by a model, so a guess costs one row
of a verification; the index makes it cost the same at any context length.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class NgramProposer:
    """An index of the n-grams of one session's committed tokens.

    A proposal is a function of the committed tokens alone, however they were handed over
    (docs/design.md, invariant 5). Longer matches are tried first, because a longer context
    predicts better; four tokens, because texts that agree in four mostly agree further, and each
    length costs an index entry per token. Two are the fewest: a single token (a comma, "the")
    has followed by chance too often to be worth rows of the target's batch.
    """

    max_ngram: int = 4
    min_ngram: int = 2
    _tokens: list[int] = field(default_factory=list, init=False)
    # n-gram -> where its latest occurrence ends. An occurrence enters once a token follows it, so
    # that the end of the text never finds itself.
    _ends: dict[tuple[int, ...], int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(f"no n-grams from {self.min_ngram} to {self.max_ngram}")

    def __len__(self) -> int:
        """Committed tokens."""
        return len(self._tokens)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append committed tokens."""
        for token_id in token_ids:
            end = len(self._tokens)
            for n in range(self.min_ngram, min(self.max_ngram, end) + 1):
                self._ends[tuple(self._tokens[end - n :])] = end
            self._tokens.append(token_id)

    def propose(self, k: int) -> tuple[int, ...]:
        """Guess k tokens, or none where the last tokens never came before.

        The latest earlier occurrence of the longest suffix is copied on; a copy that reaches the
        end of the text goes on with its own guesses, so that a repeating tail repeats.
        """
        start = self._match()
        if start is None:
            return ()
        period = len(self._tokens) - start
        return tuple(self._tokens[start + index % period] for index in range(k))

    def _match(self) -> int | None:
        """Where the latest earlier occurrence of the longest known suffix ends."""
        for n in range(min(self.max_ngram, len(self._tokens)), self.min_ngram - 1, -1):
            end = self._ends.get(tuple(self._tokens[-n:]))
            if end is not None:
                return end
        return None
