"""The planner foretells what a running stack of the same pair counts."""

import json
from argparse import Namespace
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from outrider.cli import plan
from outrider.cli.__main__ import build_parser
from outrider.planner.predict import Setting, forecast
from outrider.planner.values import COUPLED, GREEDY, Measurement, PairCosts
from outrider.speculation.costs import Line
from outrider.types import SpeculationStats
from scripted_workers import Rig, total

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

PROMPTS = [f"def task_{number}(" for number in range(8)]
TOKENS, SEED, K = 160, 11, 4
COSTS = PairCosts(Line(0.02, 0.001), Line(0.0, 0.002))


@pytest.fixture(scope="module")
def asked(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Namespace:
    text = tmp_path_factory.mktemp("plan") / "prompts.jsonl"
    lines = [{"task_id": str(i), "prompt": prompt} for i, prompt in enumerate(PROMPTS)]
    text.write_text("".join(json.dumps(line) + "\n" for line in lines))
    costs = text.with_name("costs.json")
    costs.write_text('{"verify": {"base": 0.02, "slope": 0.001}, "draft": {"base": 0, "slope": 1}}')
    flags = ["--target", str(tiny_models["target"]), "--draft", str(tiny_models["draft"])]
    flags += ["--dtype", "float32", "--threads", "1", "--text", str(text), "--costs", str(costs)]
    flags += ["--max-tokens", str(TOKENS), "--ignore-eos", "--seed", str(SEED)]
    return build_parser().parse_args(["plan", *flags])


async def counted(stack: Rig, **options: Any) -> SpeculationStats:
    """Acceptance in the running system, a seed a prompt as `outrider bench` gives them."""
    done = [
        await stack.complete(
            prompt,
            max_tokens=TOKENS,
            ignore_eos=True,
            num_speculative_tokens=K,
            seed=SEED + number,
            **options,
        )
        for number, prompt in enumerate(PROMPTS)
    ]
    return total(done)


async def test_predicted_acceptance_is_what_a_stack_counts(stack: Rig, asked: Namespace) -> None:
    found: Measurement = await plan.measured(plan.request(asked), Console(stderr=True))
    assert found.own_text and not found.skipped
    for mode, options in ((GREEDY, {"temperature": 0.0}), (COUPLED, {"temperature": 1.0})):
        predicted = forecast(found.samples, mode, Setting(COSTS), k_max=K).lengths[-1]
        stats = await counted(stack, **options)
        pairs = zip(stats.accepted_by_position, stats.proposed_by_position, strict=True)
        measured = [accepted / proposed for accepted, proposed in pairs]
        survival = list(accumulate(predicted.acceptance, mul))
        print(mode, [f"{p:.3f} / {m:.3f}" for p, m in zip(survival, measured, strict=True)])
        assert survival == pytest.approx(measured, abs=0.05)
        assert stats.mean_acceptance_length is not None
        assert predicted.mean_acceptance_length == pytest.approx(
            stats.mean_acceptance_length, rel=0.05
        )
        # Neither hopeless nor certain, or the comparison would say little.
        assert stats.rounds > 200 and 0.2 < measured[0] < 0.98
