"""Running ahead in `rejection` mode, through real processes: a draft that keeps ahead of its target
spares it the bonus, and the distribution is the target's."""

import json
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

from outrider.client import collect
from outrider.types import TokenSource, VerificationMode
from sampled import check_three_tokens
from scripted_workers import Parts, Rig, total

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(120),
    pytest.mark.slow,
]

PROMPTS = [f"{number}: say on" for number in range(6)]
IDLE_WIDTH = 1 << 16
OPTIONS = {
    "mode": VerificationMode.REJECTION,
    "temperature": 1.0,
    "top_k": 32,  # No more than travels with a guess: nothing is cut off that the target has.
    "seeds": True,
    "proposer": "draft",
    "max_tokens": 40,
}


def make_slow(model: Path, folder: Path) -> Path:
    """The same model with an MLP that is much wider: what is new adds nothing, and takes time."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    more = IDLE_WIDTH - config["intermediate_size"]
    config["intermediate_size"] = IDLE_WIDTH
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / "model.safetensors"
    weights = load_file(path)
    for name, weight in weights.items():
        if "gate_proj" in name or "up_proj" in name:
            weights[name] = torch.cat([weight, torch.ones(more, weight.shape[1])])
        elif "down_proj" in name:
            weights[name] = torch.cat([weight, torch.zeros(weight.shape[0], more)], dim=1)
    save_file(weights, path, metadata={"format": "pt"})
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def slow(
    stack: Rig,
    parts: Parts,
    tiny_models: dict[str, Path],
    twin_draft: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Rig]:
    """A slow target, and a draft that is as right and fast."""
    model = make_slow(tiny_models["target"], tmp_path_factory.mktemp("models") / "slow")
    async with parts.worker("target", model, kv_memory="64MiB") as (_, target):
        async with parts.orchestrator(
            stack.store_url, targets=[target], drafts=[twin_draft]
        ) as rig:
            yield rig


@pytest.mark.parametrize(("k", "fan_out"), [(1, 1), (3, 1), (3, 3)])
async def test_a_draft_that_keeps_ahead_is_verified_in_the_bonuss_place(
    slow: Rig, k: int, fan_out: int
) -> None:
    streams = await slow.streams(
        PROMPTS, num_speculative_tokens=k, fan_out=fan_out, report_rounds=True, **OPTIONS
    )
    done = [collect(chunks) for chunks in streams]
    stats = total(done)
    told = Counter(report.run_ahead for one in done for report in one.rounds)
    print(
        f"k={k}, {fan_out} ahead: {stats.rounds} rounds, accepted {stats.accepted} of "
        f"{stats.proposed}, bonus {stats.bonus}, run-ahead guesses {told}, "
        f"{stats.buffer_hits} hits, {stats.buffer_misses} misses"
    )
    assert all(len(one.token_ids) == 40 for one in done)
    assert stats.fallback_rounds == stats.dropped_proposals == 0
    # Some may be late on a busy machine, and of the rest all are right.
    assert told[True] > 20 and told[False] <= 2
    assert stats.accepted >= 0.98 * stats.proposed
    # Each of them is a hit, unless it was the last token of all.
    assert stats.buffer_hits >= told[True] - len(PROMPTS)
    assert stats.proposed == sum(report.proposed for one in done for report in one.rounds) + (
        told[True] + told[False]
    )
    sources = Counter(source for one in done for source in one.sources)
    assert sources[TokenSource.ACCEPTED] == stats.accepted
    assert sources[TokenSource.BONUS] == stats.bonus


async def test_the_distribution_is_the_targets(
    slow: Rig, stack: Rig, parts: Parts, reference: Callable[[Sequence[int]], torch.Tensor]
) -> None:
    """Of the second and third token, with a draft that is wrong now and then: some are guesses that
    ran ahead and some were recovered. The maths has tests of its own."""
    options = OPTIONS | {"top_k": 3, "max_tokens": 4, "num_speculative_tokens": 1, "fan_out": 2}
    async with parts.orchestrator(
        stack.store_url, targets=slow.targets, drafts=stack.drafts
    ) as rig:
        runs = await rig.complete_all([PROMPTS[0]] * 256, report_rounds=True, **options)
    told = Counter(report.run_ahead for one in runs for report in one.rounds)
    print(f"run-ahead guesses {told}")
    assert told[True] > 50 and told[False] > 5
    prompt = await slow.client.tokenize(PROMPTS[0])
    check_three_tokens(runs, reference, prompt, top_k=3)
