"""`python -m tests.chaos`: seeded schedules of faults against a whole Outrider.

python -m tests.chaos --schedules 500        the long run (`make chaos`)
python -m tests.chaos --seed 123             one schedule, and its time line
python -m tests.chaos --kinds kill,cut       faults of these kinds only
python -m tests.chaos --rolling              each part restarted under load, as the chart does
python -m tests.chaos --stalls 40            time without a token when targets and orchestrators
                                             die, with the demo pair and default settings
python -m tests.chaos --stalls 40 --pause    the same when targets are stopped, not killed
"""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "tests")) if path not in sys.path]

from . import rolling, stalls  # noqa: E402
from .faults import Kind, schedule  # noqa: E402
from .link import why_not  # noqa: E402
from .long_run import LongRun, load_references, make_settings  # noqa: E402
from .stack import Stack, StackSettings  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--schedules", type=int, default=20, help="how many (default: 20)")
    parser.add_argument("--start", type=int, default=0, help="first seed (default: 0)")
    parser.add_argument("--seed", type=int, help="this schedule alone")
    parser.add_argument("--kinds", default="", help=f"of {', '.join(Kind)}; default: all")
    parser.add_argument("--rolling", action="store_true", help="restart every part under load")
    parser.add_argument("--stalls", type=int, metavar="KILLS", help="kills of each tier")
    parser.add_argument("--pause", action="store_true", help="stop targets instead of killing")
    parser.add_argument("--logs", type=Path, help="folder for logs (default: a new one)")
    parser.add_argument("--show", action="store_true", help="print schedules, run nothing")
    args = parser.parse_args()
    kinds = tuple(Kind(name) for name in args.kinds.split(",") if name)
    seeds = range(args.start, args.start + args.schedules)
    if args.seed is not None:
        seeds = range(args.seed, args.seed + 1)
    if args.show:
        for seed in seeds:
            print(f"schedule {seed}")
            for fault in schedule(seed, kinds):
                print(f"  {fault.describe()}")
        return
    reason = why_not()
    if reason:
        sys.exit(f"no networks can be made here: {reason}")
    folder = args.logs or Path(tempfile.mkdtemp(prefix="outrider-chaos-"))
    cache = Path(os.environ.get("OUTRIDER_CACHE", tempfile.gettempdir())) / "chaos"
    if args.rolling:
        sys.exit(asyncio.run(_rolling(folder, cache)))
    if args.stalls:
        sys.exit(asyncio.run(_stalls(folder, args.stalls, pause=args.pause)))
    run = LongRun(seeds, kinds, folder=folder, cache=cache, verbose=args.seed is not None)
    sys.exit(asyncio.run(run.run()))


async def _rolling(folder: Path, cache: Path) -> int:
    models = make_settings(folder)
    async with Stack(rolling.settings(models.target, models.draft), folder) as stack:
        references = await load_references(stack, cache)
        return rolling.tell(await rolling.roll(stack, references), folder)


async def _stalls(folder: Path, times: int, *, pause: bool) -> int:
    settings = StackSettings(
        target="demo", draft="demo", orchestrator_settings={}, worker_settings={}
    )
    kinds = [("target", signal.SIGKILL), ("orchestrator", signal.SIGKILL)]
    if pause:
        kinds = [("target", signal.SIGSTOP)]
    async with Stack(settings, folder) as stack:
        lines, errors = [], []
        for tier, number in kinds:
            found = await stalls.measure(stack, tier, times, number=number)
            what = "stopped" if pause else "killed"
            lines.append(found.line(f"time without a token, a {tier} {what}"))
            errors += found.errors
        print("\n".join([*lines, *errors]))
        return 1 if errors else 0


if __name__ == "__main__":
    main()
