"""What to do when an outcome came that no proposal was prepared for."""

import time
from dataclasses import dataclass

_KEEP = 0.9
"""How much of what was seen still counts a round later."""


def pays_to_wait(tokens: float, tokens_per_s: float, draft_s: float) -> bool:
    """Whether a session waits `draft_s` seconds for a proposal with which its round should bring so
    many `tokens`, instead of decoding one plainly at once.

    It makes `tokens_per_s` in the long run, so that is what waiting costs (renewal-reward: of two
    ways to spend a round the one with more tokens less rate times seconds). The pass itself costs
    about the same either way. So the larger the target is against the draft, the sooner it pays.
    """
    return tokens - 1.0 > tokens_per_s * draft_s


@dataclass(slots=True)
class Pace:
    """Tokens a second of one session, from round to round."""

    _tokens: float = 0.0
    _seconds: float = 0.0
    _last: float | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """None: nothing was seen yet."""
        return self._tokens / self._seconds if self._seconds > 0.0 else None

    def emitted(self, tokens: int, now: float | None = None) -> None:
        """A round ended so, `now` on the monotonic clock."""
        now = time.monotonic() if now is None else now
        if self._last is not None:
            self._tokens = _KEEP * self._tokens + tokens
            self._seconds = _KEEP * self._seconds + now - self._last
        self._last = now


@dataclass(slots=True)
class AnswerTime:
    """How long a draft takes to answer: asked after a verdict, or, while that is not known, for
    outcomes of one, which takes somewhat longer."""

    _after: float | None = None
    _ahead: float | None = None

    @property
    def seconds(self) -> float | None:
        return self._ahead if self._after is None else self._after

    def took(self, seconds: float, *, ahead: bool) -> None:
        if ahead:
            self._ahead = _smooth(self._ahead, seconds)
        else:
            self._after = _smooth(self._after, seconds)


def _smooth(before: float | None, seconds: float) -> float:
    return seconds if before is None else _KEEP * before + (1.0 - _KEEP) * seconds
