"""Prompt lookup proposes what followed the last tokens before."""

import random
from typing import Any

import pytest

from services.orchestrator.ngram import NgramProposer


def proposer(tokens: list[int], **options: int) -> NgramProposer:
    made = NgramProposer(**options)
    made.extend(tokens)
    return made


def naive(tokens: list[int], k: int, max_ngram: int, min_ngram: int) -> tuple[int, ...]:
    """Search the whole text, longest n-gram first, latest occurrence first."""
    for n in range(max_ngram, min_ngram - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if len(tokens) >= n and tokens[end - n : end] == tokens[len(tokens) - n :]:
                grown = list(tokens)
                for index in range(k):
                    grown.append(grown[end + index])
                return tuple(grown[len(tokens) :])
    return ()


def test_equals_a_search_of_the_whole_text_after_every_token() -> None:
    rng = random.Random(1)
    found = 0
    for _ in range(60):
        low = rng.randint(1, 3)
        sizes: dict[str, Any] = {"min_ngram": low, "max_ngram": rng.randint(low, 5)}
        tokens: list[int] = []
        made = NgramProposer(**sizes)
        for _ in range(60):
            tokens.append(rng.randrange(4))
            made.extend(tokens[-1:])
            guess = made.propose(7)
            assert guess == naive(tokens, 7, **sizes)
            found += bool(guess)
    assert found > 1000


def test_depends_on_the_tokens_alone_not_on_how_they_came() -> None:
    rng = random.Random(2)
    tokens = [rng.randrange(5) for _ in range(200)]
    whole = proposer(tokens)
    piecewise = NgramProposer()
    while len(piecewise) < len(tokens):
        piecewise.extend(tokens[len(piecewise) : len(piecewise) + rng.randint(0, 9)])
        piecewise.propose(rng.randint(0, 8))
    assert piecewise.propose(8) == whole.propose(8) != ()


def test_asking_changes_nothing() -> None:
    made = proposer([1, 2, 3, 9, 1, 2, 3])
    assert [made.propose(4) for _ in range(3)] == [(9, 1, 2, 3)] * 3
    assert len(made) == 7


def test_fewer_guesses_are_the_start_of_more() -> None:
    made = proposer([1, 2, 3, 4, 5, 1, 2])
    assert [made.propose(k) for k in range(5)] == [(), (3,), (3, 4), (3, 4, 5), (3, 4, 5, 1)]


def test_the_latest_occurrence_wins() -> None:
    assert proposer([1, 2, 7, 1, 2, 8, 1, 2]).propose(1) == (8,)


def test_a_longer_match_wins_over_a_later_one() -> None:
    assert proposer([5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2]).propose(1) == (7,)


def test_a_repeating_tail_repeats() -> None:
    for period in (1, 2, 3, 5):
        words = list(range(period))
        made = proposer(words * 48)
        assert made.propose(16) == tuple((words * 16)[:16])


def test_a_single_token_is_no_match_by_default() -> None:
    assert proposer([1, 2, 3, 1]).propose(4) == ()
    assert proposer([1, 2, 3, 1], min_ngram=1).propose(4) == (2, 3, 1, 2)


def test_new_text_proposes_nothing() -> None:
    assert NgramProposer().propose(4) == ()
    assert proposer([1]).propose(4) == ()
    assert proposer(list(range(50))).propose(4) == ()


def test_a_round_does_not_search_the_text() -> None:
    """Lookups of a round: at most one an n-gram length, whatever the context."""

    class CountingDict(dict[tuple[int, ...], int]):
        lookups = 0

        def get(self, *args: Any) -> Any:
            self.lookups += 1
            return super().get(*args)

    made = proposer(list(range(20_000)))
    made._ends = CountingDict(made._ends)
    entries = len(made._ends)
    assert made.propose(8) == ()
    assert made._ends.lookups == 3
    made.extend([1])
    assert len(made._ends) <= entries + 3


def test_ngram_sizes_out_of_order_are_refused() -> None:
    for sizes in ({"min_ngram": 0}, {"min_ngram": 5}, {"max_ngram": 1}):
        with pytest.raises(ValueError, match="no n-grams"):
            NgramProposer(**sizes)
