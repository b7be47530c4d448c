"""Logits of ragged passes over paged KV against a plain forward of `transformers`."""

import functools
from dataclasses import dataclass

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from worker_harness import load, make_runner, plain_logits, random_tokens

from outrider.engine import attention
from outrider.engine.engine import Engine
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.model_runner import Rows
from outrider.engine.scheduler import Work
from outrider.engine.sequence import Sequence

torch.set_num_threads(1)
TOLERANCE = 1e-4

SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 1,
}
FAMILIES = {
    "Llama": {"num_key_value_heads": 1},
    "Qwen2": {"num_key_value_heads": 2},
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 24},
    "Gemma": {"num_key_value_heads": 1, "head_dim": 24},
    "Phi3": {"num_key_value_heads": 2},
    "Granite": {"num_key_value_heads": 4, "attention_multiplier": 0.3},
    "Olmo2": {"num_key_value_heads": 2},
    "Starcoder2": {"num_key_value_heads": 2, "sliding_window": None},
    "GPTNeoX": {},
}


def close(logits, expected):
    return torch.allclose(logits, expected, atol=TOLERANCE, rtol=TOLERANCE)


@functools.cache
def family(name, dtype=torch.float32, implementation="sdpa"):
    """A small random model of a family, biases and norms included, so that nothing is trivial."""
    attention.register()
    config = getattr(transformers, f"{name}Config")(**SMALL | FAMILIES[name])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(noise + (1.0 if parameter.ndim == 1 else 0.0))
    return model.requires_grad_(False).eval().to(dtype)


def loaded(model):
    """A LoadedModel as far as ModelRunner looks at it."""
    config = model.config
    return LoadedModel(
        "small", None, model, config, None, "", (), 300, 256, model.dtype, torch.device("cpu")
    )


def test_one_sequence_equals_plain_forward(tiny_models):
    tokens = random_tokens(30)
    runner = make_runner(load(tiny_models["target"]), 64)
    logits = runner.forward([Rows(tokens, 0, list(range(8)), 30)])
    assert close(logits, plain_logits(tiny_models["target"], tokens))


@pytest.mark.parametrize(
    "blocks", [list(range(3, 15)), [9, 2, 40, 41, 7, 0, 63, 20, 5, 11, 12, 33]]
)
def test_later_rows_see_exactly_their_own_prefix(tiny_models, blocks):
    """Whole, in chunks and token by token; KV in one piece and scattered."""
    tokens = random_tokens(45, seed=1)
    expected = plain_logits(tiny_models["target"], tokens)
    for chunks in ([20, 25], [1] * 45, [3, 1, 7, 30, 4]):
        runner = make_runner(load(tiny_models["target"]), 64)
        start = 0
        for count in chunks:
            rows = Rows(tokens[start : start + count], start, blocks, count)
            assert close(runner.forward([rows]), expected[start : start + count])
            start += count


def test_ragged_batches_of_several_sequences_do_not_mix(tiny_models):
    texts = [random_tokens(count, seed=count) for count in (1, 7, 18, 33, 12)]
    blocks = [[0], [1, 2], [9, 3, 30, 4, 31], list(range(40, 49)), [20, 5, 22]]
    expected = [plain_logits(tiny_models["target"], text) for text in texts]
    runner = make_runner(load(tiny_models["target"]), 64)
    cuts = [0, 3, 10, 32, 7]
    runner.forward([Rows(t[:c], 0, b, 0) for t, b, c in zip(texts, blocks, cuts, strict=True) if c])
    wanted = [1, 4, 2, 1, 5]
    logits = runner.forward(
        [Rows(t[c:], c, b, w) for t, b, c, w in zip(texts, blocks, cuts, wanted, strict=True)]
    )
    assert close(logits, torch.cat([e[-w:] for e, w in zip(expected, wanted, strict=True)]))


def test_rewritten_kv_replaces_what_was_there(tiny_models):
    """Rollback is a change of length: rows over old ones must leave no trace of them."""
    tokens, other = random_tokens(24, seed=2), random_tokens(24, seed=3)
    runner = make_runner(load(tiny_models["target"]), 64)
    blocks = [4, 5, 6, 1, 2, 3]
    runner.forward([Rows(tokens[:10] + other[10:], 0, blocks, 0)])
    logits = runner.forward([Rows(tokens[10:], 10, blocks, 14)])
    assert close(logits, plain_logits(tiny_models["target"], tokens)[10:])


def test_wrong_kv_shows_in_the_logits(tiny_models):
    """The comparisons above would notice: one wrong token of the prefix is far off."""
    tokens = random_tokens(24, seed=2)
    wrong = [*tokens[:5], tokens[5] ^ 1, *tokens[6:]]
    runner = make_runner(load(tiny_models["target"]), 64)
    runner.forward([Rows(wrong[:20], 0, list(range(6)), 0)])
    logits = runner.forward([Rows(tokens[20:], 20, list(range(6)), 4)])
    expected = plain_logits(tiny_models["target"], tokens)[20:]
    assert (logits - expected).abs().max() > 1000 * TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_model_families_equal_their_own_plain_forward(name):
    tokens = [token % 300 for token in random_tokens(40, seed=4)]
    with torch.inference_mode():
        expected = family(name)(input_ids=torch.tensor([tokens])).logits[0]
    runner = make_runner(loaded(family(name, implementation=attention.IMPLEMENTATION)), 32)
    blocks = [7, 8, 2, 3, 30, 31, 11, 12, 13, 14]
    first = runner.forward([Rows(tokens[:21], 0, blocks, 21), Rows(tokens[:9], 0, [20, 21, 22], 1)])
    rest = runner.forward([Rows(tokens[21:], 21, blocks, 19)])
    assert close(torch.cat([first[:21], rest]), expected)
    assert close(first[21], expected[8])


@dataclass
class Engines:
    folder: object

    def make(self, *, num_blocks=64, max_rows=512):
        self.idle = []
        return Engine(
            make_runner(load(self.folder), num_blocks),
            num_blocks=num_blocks,
            max_rows=max_rows,
            find_idle=lambda: self.idle,
        )


def work(tokens, num_logits=1, sequence=None):
    return Work(sequence or Sequence(), list(tokens), num_logits, len(tokens), float("inf"))


def run(engine):
    """Steps until nothing is left; the logits by work."""
    logits = {}
    for _ in range(1000):
        if not engine.scheduler.works:
            return logits
        result = next(engine.steps(stop=lambda: True))
        assert not result.failed
        for done, rows in result.ready:
            logits[id(done)] = rows
            engine.scheduler.finish(done)
    raise AssertionError("work is left over")


@pytest.mark.parametrize("max_rows", [512, 7, 3])
def test_logits_do_not_depend_on_how_rows_are_cut_into_passes(tiny_models, max_rows):
    """Also where the budget would cut through the rows of a verification."""
    engine = Engines(tiny_models["target"]).make(max_rows=max_rows)
    works = [
        work(random_tokens(n, seed=n), logits)
        for n, logits in ((9, 9), (20, 5), (1, 1), (31, 6), (6, 2), (13, 5))
    ]
    for item in works:
        engine.scheduler.submit(item)
    logits = run(engine)
    for item in works:
        expected = plain_logits(tiny_models["target"], item.tokens)[-item.num_logits :]
        assert close(logits[id(item)], expected)


def test_cached_tokens_are_not_computed_again_and_rejected_ones_are(tiny_models):
    engine = Engines(tiny_models["target"]).make()
    tokens = random_tokens(20, seed=5)
    sequence = Sequence()
    seen = []
    forward = engine.runner.forward

    def counted(batch):
        seen.append(sum(len(rows.token_ids) for rows in batch))
        return forward(batch)

    engine.runner.forward = counted
    for accepted, k in ((10, 3), (12, 5), (17, 2)):
        guesses = [(token + 1) % 256 for token in tokens[accepted : accepted + k]]
        item = work(tokens[:accepted] + guesses, k + 1, sequence)
        engine.scheduler.submit(item)
        logits = run(engine)[id(item)]
        expected = plain_logits(tiny_models["target"], item.tokens)[-k - 1 :]
        assert close(logits, expected)
        assert sequence.cached == item.tokens
    # The first time everything; then the committed tokens that are new, and the guesses.
    assert seen == [13, 2 + 5, 5 + 2]
