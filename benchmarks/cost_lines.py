"""What a pass costs, as fitted lines: the controller's maths needs them, and so does a planner.

    python benchmarks/cost_lines.py demo                        # CPU: target and draft of the demo
    python benchmarks/cost_lines.py synthetic:8b,eps=0.01 synthetic:1b

outrider/planner/costs.py says what is measured and how.
"""

import argparse

import torch

from outrider.engine.engine import Runner
from outrider.engine.loading import load_model
from outrider.engine.surgery import optimise
from outrider.planner.costs import (
    Fit,
    Proposal,
    Verification,
    blocks_for,
    fit_costs,
    make_runner,
)

SHAPES = ((1, 1), (1, 2), (1, 3), (1, 5), (1, 9), (2, 1), (2, 5), (4, 1), (4, 5), (8, 1), (8, 5))
CONTEXTS = (64, 512, 1536)
STEPS = (1, 2, 3, 4, 6, 8)


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads or torch.get_num_threads())
    for reference in args.models:
        tiers = ("target", "draft") if reference == "demo" else ("target",)
        for tier in tiers:
            loaded = load_model(reference, tier=tier, dtype="bfloat16")
            optimise(loaded.model)
            num_blocks = 8 * blocks_for(max(CONTEXTS) + 64) + 8
            runner = make_runner(loaded, num_blocks=num_blocks, max_rows=64, max_context=2048)
            print(f"{reference} ({tier}), {loaded.device}, bfloat16", flush=True)
            print_lines(runner, args.repeats)


def print_lines(runner: Runner, repeats: int) -> None:
    passes = [Verification(n, rows, context) for context in CONTEXTS for n, rows in SHAPES]
    proposals = [Proposal(n, steps, 200) for steps in STEPS for n in (1, 4, 8)]
    verify, draft = fit_costs((runner, passes), (runner, proposals), repeats)
    terms = {"pass": 1e3, "a row": 1e3, "1000 tokens of context a row": 1e6}
    print_fit("  verify", verify, terms)
    print_fit("  draft", draft, dict.fromkeys(("proposal", "a step", _FURTHER), 1e3))


_FURTHER = "a step of a further sequence"


def print_fit(name: str, found: Fit, scales: dict[str, float]) -> None:
    line = found.line
    values = zip((line.base, line.slope, line.other_slope), scales.items(), strict=True)
    terms = " + ".join(f"{value * scale:.3f} {what}" for value, (what, scale) in values)
    errors = f"{found.largest_error:.0%} at most, {found.mean_error:.0%} on average"
    print(f"{name} ms = {terms}; off by {errors}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
