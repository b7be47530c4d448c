"""The shared stack of tiny models, as real processes, and the parts for stacks of one's own.

`stack` is shared by all tests that break nothing: store, target, draft and orchestrator. Tests
that kill something start their own part with `parts` and put an orchestrator of their own
before the shared rest: an orchestrator has no torch and is there in a second.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from outrider.cli.stack import LocalStack, StackConfig
from outrider.client import OutriderClient
from scripted_workers import LINGER_S, Ask, Guessing, Parts, Rig, Say, ScriptedDraft, Truth
from store_servers import KINDS, Server, binary, running_server
from tiny import make_model


def make_looping_model(folder: Path) -> Path:
    """A tiny model that tends to go round in cycles of six bytes, so that n-grams come again.

    Its vocabulary is padded beyond the tokenizer's.

    Its layers are damped until embeddings count, and its head prefers the next byte of the cycle;
    what is left of attention and MLP breaks the cycles now and then.
    """
    make_model(folder, padded_vocab=320)
    path = folder / "model.safetensors"
    weights = load_file(path)
    for name in weights:
        if "o_proj" in name or "down_proj" in name:
            weights[name] *= 0.005
    successor = torch.tensor([t // 6 * 6 + (t % 6 + 1) % 6 if t < 252 else t for t in range(256)])
    weights["lm_head.weight"][successor] += 5.0 * weights["model.embed_tokens.weight"][:256]
    save_file(weights, path, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Parts:
    return Parts(tmp_path_factory.mktemp("parts"))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stack(tiny_models: dict[str, Path]) -> AsyncIterator[Rig]:
    """The shared stack: one target, one draft, float32, a context of 512 tokens."""
    config = StackConfig(
        target=str(tiny_models["target"]),
        draft=str(tiny_models["draft"]),
        dtype="float32",
        threads=1,
        num_speculative_tokens=3,
        drain_s=10,
        env={
            "OUTRIDER_ORCHESTRATOR_SESSION_LINGER_S": str(LINGER_S),
            "OUTRIDER_TARGET_KV_MEMORY": "64MiB",
            "OUTRIDER_DRAFT_KV_MEMORY": "64MiB",
        },
    )
    async with LocalStack(config) as running:
        by_role = {service.role: service for service in running.services}
        rig = Rig(
            running.address,
            await OutriderClient.connect(address=running.address),
            running.store_url,
            (by_role["target"].address,),
            (by_role["draft"].address,),
            tuple(by_role[role].pid for role in ("target", "draft", "orchestrator")),
            by_role["orchestrator"].log,
        )
        try:
            yield rig
            assert running.failure is None, running.failure
        finally:
            await rig.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def looping(
    stack: Rig, parts: Parts, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Rig]:
    """A target that repeats itself, without a draft, with KV for few sessions: 20 blocks of 32."""
    model = make_looping_model(tmp_path_factory.mktemp("models") / "looping")
    async with parts.worker("target", model, kv_memory="320KiB") as (_, target):
        # All at once, however short KV is: sessions are to lose it to each other.
        async with parts.orchestrator(stack.store_url, targets=[target], kv_overcommit=100) as rig:
            yield rig


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def twin_draft(parts: Parts, tiny_models: dict[str, Path]) -> AsyncIterator[str]:
    """Address of a draft that is the shared target itself, with a context of 96 tokens only."""
    async with parts.worker("draft", tiny_models["target"], context_length=96) as (_, address):
        yield address


@pytest.fixture(scope="session")
def reference(tiny_models: dict[str, Path]) -> Callable[[Sequence[int]], torch.Tensor]:
    """The shared target as `transformers` runs it: token ids to log-probabilities [ids, vocab]."""
    model = AutoModelForCausalLM.from_pretrained(tiny_models["target"], dtype=torch.float32)
    model.eval()

    @torch.inference_mode()
    def log_probs(token_ids: Sequence[int]) -> torch.Tensor:
        result: torch.Tensor = model(torch.tensor([list(token_ids)])).logits[0].log_softmax(-1)
        return result

    return log_probs


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=["direct", "relayed"])
async def guessing(
    stack: Rig, parts: Parts, request: pytest.FixtureRequest
) -> AsyncIterator[Guessing]:
    """The shared target behind an orchestrator whose draft does what a test tells it, asked by the
    target or by the orchestrator; with "ahead" for a parameter by that while verifications run."""

    async def silent(ask: Ask, say: Say) -> None:
        pass

    truth, ahead = Truth(), request.param == "ahead"
    info = await stack.info(stack.targets[0])
    async with ScriptedDraft(info, silent, truth if ahead else None) as draft:
        async with parts.orchestrator(
            stack.store_url,
            targets=stack.targets,
            drafts=[draft.address],
            draft_timeout_s=0.8,
            drafting="relayed" if ahead else request.param,
            fan_out=4,
        ) as rig:
            rig.drafts = ()  # `held` asks real workers only
            yield Guessing(rig, draft, truth, ahead)


@pytest.fixture(scope="module", params=KINDS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A store of each kind that is here, for a module; modules that break theirs have their own."""
    if binary(request.param) is None:
        pytest.skip("Debian's redis-server is not installed (apt-get install redis-server)")
    with running_server(request.param, tmp_path_factory.mktemp("redis")) as running:
        yield running
