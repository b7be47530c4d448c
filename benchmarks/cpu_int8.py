"""Int8 weights beside bf16 on a CPU: passes of the demo's models, and how often they agree.

    python benchmarks/cpu_int8.py

Passes are medians of turns, in ms. Agreement: bf16 continues a few prompts greedily, and the others
are asked at each of its tokens. float32 is the yardstick: what rounding to bf16 costs by itself.
"""

import sys
from functools import partial

import torch
from cpu_pass import medians
from torch import Tensor

from outrider.bench.prompts import default_prompts, read_prompts, select_evenly
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.loading import load_model
from outrider.engine.model_runner import ModelRunner
from outrider.engine.quantised import quantise, weight_bytes
from outrider.engine.rows import Rows
from outrider.engine.surgery import optimise

CASES = (("bfloat16", "none"), ("bfloat16", "int8"), ("float32", "none"), ("float32", "int8"))
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 12, 64, 48
BLOCKS = list(range(8))


@torch.inference_mode()
def main() -> None:
    for tier in ("target", "draft"):
        models = {case: load(tier, *case) for case in CASES}
        runners = {
            case: ModelRunner(model, num_blocks=16, block_tokens=32)
            for case, model in models.items()
        }
        for rows in (1, 2, 4, 8, 32):
            batch = [Rows(list(range(rows)), 200, BLOCKS, 1)]
            passes = [partial(runner.forward, batch) for runner in runners.values()]
            took = medians(*passes, turns=20)
            print(
                f"{tier}, {rows} rows:",
                *(f"{name(case)} {ms:.2f}" for case, ms in zip(CASES, took, strict=True)),
                flush=True,
            )
        texts = [greedy(runners[CASES[0]], ids) for ids in prompts(models[CASES[0]])]
        expected = [logits(runners[CASES[0]], text) for text in texts]
        for case in CASES[1:]:
            same = [
                (logits(runners[case], text).argmax(1) == other.argmax(1)).float().mean()
                for text, other in zip(texts, expected, strict=True)
            ]
            print(f"{tier}: {name(case)} picks bfloat16's token {sum(same) / len(same):.1%}")


def load(tier: str, dtype: str, scheme: str) -> LoadedModel:
    loaded = load_model("demo", tier=tier, dtype=dtype, device="cpu")
    before = weight_bytes(loaded.model)
    optimise(loaded.model, pack=scheme == "none")
    loaded = quantise(loaded, scheme)
    if scheme != "none":
        after = weight_bytes(loaded.model)
        print(f"{tier}, {dtype}: {before / 1e6:.0f} MB, int8 {after / 1e6:.0f} MB")
    return loaded


def name(case: tuple[str, str]) -> str:
    return case[0] if case[1] == "none" else f"{case[0]}+{case[1]}"


def prompts(loaded: LoadedModel) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(loaded.tokenizer.tokenizer_json)
    chosen = select_evenly(read_prompts(default_prompts()), PROMPTS)
    return [tokenizer.encode(prompt.text).ids[:PROMPT_TOKENS] for prompt in chosen]


def greedy(runner: ModelRunner, prompt: list[int]) -> list[int]:
    """The prompt and its continuation."""
    text = list(prompt)
    rows = Rows(text[:], 0, BLOCKS, 1)
    for _ in range(NEW_TOKENS):
        text.append(int(runner.forward([rows])[-1].argmax()))
        rows = Rows(text[-1:], len(text) - 1, BLOCKS, 1)
    return text


def logits(runner: ModelRunner, text: list[int]) -> Tensor:  # [NEW_TOKENS, vocab]
    """At every token of the continuation."""
    return runner.forward([Rows(text[:-1], 0, BLOCKS, NEW_TOKENS)])


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
    main()
