"""Many schedules on one stack: each result as it is known, then a summary by kind of fault."""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from outrider.client import OutriderClient

from .baseline import session_keys
from .faults import Kind, schedule
from .run import Result, Runner
from .stack import ORCHESTRATORS, RANKS, Stack, StackSettings
from .streams import References
from .verdicts import MAX_SHARE, MAX_SHARE_OF_ONE

_KEYS_GO_S = 60.0


class LongRun:
    """The schedules of some seeds."""

    def __init__(
        self,
        seeds: Iterable[int],
        kinds: Sequence[Kind],
        *,
        folder: Path,
        cache: Path,
        verbose: bool = False,
    ) -> None:
        self.results: list[Result] = []
        self._seeds = list(seeds)
        self._kinds = kinds
        self._folder = folder
        self._cache = cache
        self._verbose = verbose

    async def run(self) -> int:
        """The exit status: 0 where every schedule has passed."""
        started = time.monotonic()
        settings = make_settings(self._folder)
        async with Stack(settings, self._folder, seed=self._seeds[0]) as stack:
            references = await load_references(stack, self._cache)
            print(f"logs in {self._folder}; up in {time.monotonic() - started:.1f} s", flush=True)
            runner = Runner(stack, references)
            await runner.settle()
            for seed in self._seeds:
                result = await runner.run(seed, schedule(seed, self._kinds))
                self.results.append(result)
                print(self._line(result), flush=True)
            left = await self._keys_left(stack)
        return self._conclude(left, time.monotonic() - started)

    async def _keys_left(self, stack: Stack) -> list[str]:
        """Keys of sessions that are still there when the last of them should be gone."""
        deadline = time.monotonic() + _KEYS_GO_S
        while (left := await session_keys(stack)) and time.monotonic() < deadline:
            await asyncio.sleep(0.5)
        return left

    def _line(self, result: Result) -> str:
        hit = sum(verdict.hit for verdict in result.verdicts)
        resumes = sum(verdict.ended.resumes for verdict in result.verdicts)
        labels = ", ".join(_labels(result)) or "nothing came to pass"
        line = (
            f"{'ok  ' if result.passed else 'FAIL'} {result.seed:5d} {result.seconds:5.1f} s  "
            f"{hit:2d} hit, {resumes:2d} resumes, {len(result.errors)} errors: {labels}"
        )
        if result.passed and not self._verbose:
            return line
        return "\n".join([line, *self._details(result)])

    def _details(self, result: Result) -> list[str]:
        kinds = f" --kinds {','.join(self._kinds)}" if self._kinds else ""
        return [
            *(f"    problem: {problem}" for problem in result.problems),
            *(f"    error: {v.ended.error} ({v.allowed})" for v in result.errors),
            *(f"    planned: {fault.describe()}" for fault in result.faults),
            *(f"    {line}" for line in result.timeline),
            f"    logs: {self._folder}; again: python -m tests.chaos --seed {result.seed}{kinds}",
        ]

    def _conclude(self, keys_left: list[str], seconds: float) -> int:
        results = self.results
        streams = sum(len(result.verdicts) for result in results)
        errors = Counter(v.allowed for result in results for v in result.errors)
        failed = [result.seed for result in results if not result.passed]
        print(_table(results))
        print(
            f"\n{len(results)} schedules, {streams} streams in {seconds:.0f} s; "
            f"{sum(v.hit for r in results for v in r.verdicts)} hit, "
            f"{sum(v.ended.resumes for r in results for v in r.verdicts)} resumes"
        )
        for policy, count in errors.items():
            print(f"{count} errors as the policy says: {policy}")
        wrong = _shares(results, streams, sum(errors.values()))
        if keys_left:
            wrong.append(f"keys of sessions were left in the store: {', '.join(keys_left)}")
        if failed:
            wrong.append(f"failed: {', '.join(map(str, failed))}")
        for text in wrong:
            print(text)
        return 1 if wrong else 0


async def load_references(stack: Stack, cache: Path) -> References:
    """What undisturbed streams say, from the cache or from this stack."""
    addresses = [stack.address(name) for name in ORCHESTRATORS]
    async with await OutriderClient.connect(address=addresses) as client:
        return await References.load(client, cache)


def make_settings(folder: Path) -> StackSettings:
    """The tiny pair: a target, one of them a group of ranks, and a draft that is it with noise."""
    from tiny import make_model

    models = folder / "models"
    return StackSettings(
        target=str(make_model(models / "target")),
        draft=str(make_model(models / "draft", noise=0.02)),
        ranks=RANKS,
    )


def _shares(results: Sequence[Result], streams: int, errors: int) -> list[str]:
    """Errors must stay exceptions, or a system that fails at everything would pass."""
    wrong = []
    if streams >= 400 and errors > MAX_SHARE * streams:
        wrong.append(f"{errors} of {streams} streams ended by an error, over {MAX_SHARE:.0%}")
    for result in results:
        if len(result.errors) > MAX_SHARE_OF_ONE * max(len(result.verdicts), 1):
            wrong.append(f"most streams of {result.seed} ended by an error")
    return wrong


def _labels(result: Result) -> list[str]:
    """What came to pass: points only where a process came by."""
    return [
        fault.label
        for fault in result.faults
        if fault.kind is not Kind.POINT or fault in result.fired
    ]


def _table(results: Sequence[Result]) -> str:
    """By kind of fault: a schedule of several faults counts for each."""
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        for label in dict.fromkeys(_labels(result)):
            row = rows[label]
            row["schedules"] += 1
            row["hit"] += sum(verdict.hit for verdict in result.verdicts)
            row["resumes"] += sum(verdict.ended.resumes for verdict in result.verdicts)
            row["errors"] += len(result.errors)
            row["failed"] += not result.passed
    columns = ("schedules", "hit", "resumes", "errors", "failed")
    width = max((len(label) for label in rows), default=10)
    lines = ["", " " * width + "".join(f"{column:>11}" for column in columns)]
    for label in sorted(rows):
        counts = "".join(f"{rows[label][column]:>11}" for column in columns)
        lines.append(f"{label:<{width}}{counts}")
    return "\n".join(lines)
