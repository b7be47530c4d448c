"""What each caller may have: limits and weights, from settings of the form

    NAME:running=8:waiting=32:weight=2:priority=normal

`*` stands for all callers that are not named. What is left out is unlimited, of weight 1, and of
any priority.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.errors import InvalidArgument
from outrider.types import Priority

_FIELD = "caller_limits"
_ANYONE = "*"
_MAX_WEIGHT = 1000.0


@dataclass(frozen=True, slots=True)
class CallerLimits:
    """Generations that run and requests that wait at most, None: no limit; the part of the whole
    beside other callers who wait; the highest class that requests may name."""

    running: int | None = None
    waiting: int | None = None
    weight: float = 1.0
    priority: Priority = Priority.HIGH


class Callers:
    """The limits of each caller."""

    def __init__(self, limits: dict[str, CallerLimits]) -> None:
        self._limits = limits
        self._anyone = limits.get(_ANYONE, CallerLimits())

    @classmethod
    def parse(cls, settings: Sequence[str]) -> "Callers":
        """Raises InvalidArgument."""
        limits: dict[str, CallerLimits] = {}
        for setting in settings:
            name, *parts = setting.split(":")
            if not name or name in limits:
                raise InvalidArgument(
                    f"{setting!r} must begin with a caller's name that is not there yet",
                    field=_FIELD,
                )
            limits[name] = _limits(parts, setting)
        return cls(limits)

    def of(self, caller: str) -> CallerLimits:
        return self._limits.get(caller, self._anyone)


def _limits(parts: Sequence[str], setting: str) -> CallerLimits:
    limits = CallerLimits()
    for part in parts:
        key, _, value = part.partition("=")
        try:
            if key == "running":
                limits = replace(limits, running=_at_least(int(value), 1))
            elif key == "waiting":
                limits = replace(limits, waiting=_at_least(int(value), 0))
            elif key == "weight":
                if not 0 < float(value) <= _MAX_WEIGHT:
                    raise ValueError
                limits = replace(limits, weight=float(value))
            elif key == "priority":
                limits = replace(limits, priority=Priority(value))
            else:
                raise ValueError
        except ValueError:
            raise InvalidArgument(
                f"{part!r} of {setting!r} is none of running=1…, waiting=0…, weight up to "
                f"{_MAX_WEIGHT:g}, priority=high|normal|low",
                field=_FIELD,
            ) from None
    return limits


def _at_least(value: int, least: int) -> int:
    if value < least:
        raise ValueError
    return value
