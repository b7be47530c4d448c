"""Models of other shapes on a CUDA device: heads and sizes that are not powers of two, against
`transformers`' own attention."""

from pathlib import Path

import pytest
import torch
import transformers

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from transformers import AutoModelForCausalLM

from outrider.engine import attention
from outrider.engine.cuda_runner import CudaRunner
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.loading import check_supported
from outrider.engine.rows import Rows
from outrider.engine.surgery import optimise

VOCABULARY = 512
BLOCKS_EACH = 16
SHAPES = {
    "SmolLM2-135M": ("Llama", 9, 3, 64),
    "Llama-3.2-3B": ("Llama", 6, 2, 128),
    "Qwen2.5-0.5B": ("Qwen2", 14, 2, 64),
    "Qwen2.5-1.5B": ("Qwen2", 12, 2, 128),
    "Qwen3": ("Qwen3", 16, 8, 128),
    "Mistral": ("Mistral", 8, 2, 128),
    "Gemma-2B": ("Gemma", 8, 1, 256),
    "heads of 96": ("Llama", 8, 8, 96),
    "one group of 16": ("Llama", 16, 1, 64),
}


def model_of(family: str, heads: int, kv_heads: int, head_dim: int, implementation: str):
    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": heads * head_dim,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 1024,
        "sliding_window": None,
        "initializer_range": 0.05,
    }
    config = getattr(transformers, f"{family}Config")(**values)
    check_supported(config)
    torch.manual_seed(1)
    made = AutoModelForCausalLM.from_config(
        config, attn_implementation=implementation, dtype=torch.bfloat16
    )
    return made.to("cuda").eval()


def runner_of(model) -> CudaRunner:
    loaded = LoadedModel(
        name="shapes", folder=Path(), model=model, config=model.config, tokenizer=None,
        fingerprint="", eos_token_ids=(0,), vocab_size=VOCABULARY, context_length=1024,
        dtype=torch.bfloat16, device=torch.device("cuda"),
    )  # fmt: skip
    optimise(model)
    made = CudaRunner(loaded, num_blocks=4 * BLOCKS_EACH, max_rows=16, max_context=512)
    made.warm_up()
    return made


@pytest.mark.parametrize("name", SHAPES)
@torch.inference_mode()
def test_logits_are_those_of_the_model_itself(name):
    attention.register()
    torch._dynamo.reset()
    reference = model_of(*SHAPES[name], "sdpa")
    runner = runner_of(model_of(*SHAPES[name], attention.IMPLEMENTATION))
    generator = torch.Generator().manual_seed(2)
    texts = [
        torch.randint(VOCABULARY, (length,), generator=generator).tolist()
        for length in (40, 139, 300)
    ]
    blocks = [list(range(BLOCKS_EACH * i, BLOCKS_EACH * (i + 1))) for i in range(len(texts))]
    # Prompts in pieces; then the last tokens of all together, some of them several rows.
    for text, own in zip(texts, blocks, strict=True):
        for start in range(0, len(text) - 5, 16):
            stop = min(start + 16, len(text) - 5)
            runner.forward([Rows(text[start:stop], start, own, 1)])
    batch = [
        Rows(text[-5:], len(text) - 5, own, count)
        for text, own, count in zip(texts, blocks, (5, 1, 3), strict=True)
    ]
    logits = runner.forward(batch).clone()
    wanted = torch.cat(
        [
            reference(torch.tensor([text], device="cuda")).logits[0, -count:].float()
            for text, count in zip(texts, (5, 1, 3), strict=True)
        ]
    )
    spread = wanted.std().item()
    assert spread > 0.1
    assert (logits - wanted).abs().max().item() < 0.15 * spread
    # What another text says is further away: the comparison can fail.
    assert (logits[:1] - wanted[5:6]).abs().max().item() > spread
