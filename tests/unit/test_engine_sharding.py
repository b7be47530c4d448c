"""The parts of a model that ranks hold: their shapes, their values, and what they add up to."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_engine_forward import FAMILIES, SMALL, family, loaded
from transformers import AutoModelForCausalLM
from worker_harness import random_tokens

from outrider.engine import attention, cpu_kernels
from outrider.engine.cpu_pass import _Forward, inputs_of
from outrider.engine.group import Group, Seat
from outrider.engine.kv_pool import CpuPool, KvShape
from outrider.engine.loading import load_model
from outrider.engine.quantised import quantise
from outrider.engine.rows import Rows
from outrider.engine.shard_loading import load_part
from outrider.engine.sharding import check_sizes, connect, shard
from outrider.engine.surgery import optimise
from outrider.errors import InvalidArgument, Unsupported

torch.set_num_threads(1)
CPU = torch.device("cpu")
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
ROWS = ("o_proj", "down_proj")


class Threads:
    """What the ranks of a group on threads exchange."""

    def __init__(self, size):
        self.barrier = threading.Barrier(size, timeout=20)
        self.values = [None] * size

    def everyone(self, rank, value):
        self.values[rank] = value.clone()
        self.barrier.wait()
        values = [value.clone() for value in self.values]
        self.barrier.wait()
        return values


class ThreadGroup(Group):
    """A rank on a thread of its own."""

    def __init__(self, seat, threads=None):
        super().__init__(seat, CPU)
        self._threads = threads
        self.sums = 0

    def sum_in_place(self, rows):
        self.sums += 1
        rows.copy_(torch.stack(self._threads.everyone(self.seat.rank, rows)).sum(0))

    def largest(self, values):
        return torch.stack(self._threads.everyone(self.seat.rank, values)).amax(0)


def make_groups(size):
    threads = Threads(size)
    return [ThreadGroup(Seat(rank, size), threads) for rank in range(size)]


def on_all(groups, work):
    """Results of work(group) of each rank."""
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(work, groups))


def parts(reference, size):
    """What each rank holds, loaded one after the other."""
    return [
        load_model(
            str(reference),
            tier="target",
            dtype="float32",
            device="cpu",
            group=ThreadGroup(Seat(rank, size)),
        )
        for rank in range(size)
    ]


def weights(model):
    return {name.replace(".inner.", "."): weight for name, weight in model.named_parameters()}


@pytest.mark.parametrize("reference", ["tiny", "synthetic:tiny,eps=0.5"])
def test_each_rank_holds_its_part_and_all_parts_are_the_whole(tiny_models, reference):
    reference = tiny_models["target"] if reference == "tiny" else reference
    whole = load_model(str(reference), tier="target", dtype="float32", device="cpu")
    full = weights(whole.model)
    ranks = parts(reference, 2)
    own = [weights(part.model) for part in ranks]
    seen = set()
    for name, weight in full.items():
        kind = name.split(".")[-2]
        shapes = [tuple(part[name].shape) for part in own]
        out, *rest = weight.shape
        if kind in COLUMNS:
            assert shapes == [(out // 2, *rest)] * 2
            assert torch.equal(torch.cat([part[name] for part in own]), weight)
            seen.add(kind)
        elif kind in ROWS:
            assert shapes == [(out, rest[0] // 2)] * 2
            assert torch.equal(torch.cat([part[name] for part in own], 1), weight)
            seen.add(kind)
        else:
            assert all(torch.equal(part[name], weight) for part in own)
    assert seen == {*COLUMNS, *ROWS}
    for part in ranks:
        shape = KvShape.of(part.config, part.dtype, part.ranks)
        assert shape.kv_heads == 1 and part.ranks == 2
        assert shape.token_bytes * 2 == KvShape.of(whole.config, whole.dtype).token_bytes
        # All parameters are memory of their own size, not views of the whole.
        for weight in part.model.parameters():
            assert weight.untyped_storage().nbytes() == weight.numel() * 4
        assert (part.fingerprint, part.vocab_size) == (whole.fingerprint, whole.vocab_size)
        assert part.eos_token_ids == whole.eos_token_ids


def small(name):
    """A family whose heads can be split, as `transformers` runs it."""
    with pytest.MonkeyPatch.context() as patch:
        if name in ("Llama", "Gemma"):
            patch.setitem(FAMILIES[name], "num_key_value_heads", 2)
        return family.__wrapped__(name)


def part_of(folder, group):
    """A rank's part, connected, and the configuration."""
    attention.register()
    config = transformers.AutoConfig.from_pretrained(folder)
    model = load_part(
        folder,
        config,
        dtype=torch.float32,
        device=CPU,
        attention=attention.IMPLEMENTATION,
        seat=group.seat,
    )
    connect(model, group)
    return model


def logits_of(model, tokens, ranks=1):
    pool = CpuPool(KvShape.of(model.config, torch.float32, ranks), 4, 8)
    with torch.inference_mode():
        return _Forward(model, pool)(*inputs_of([Rows(tokens, 0, range(4), len(tokens))], pool))


SPLIT = ("Llama", "Qwen2", "Qwen3", "Gemma", "Granite", "Starcoder2", "GPTNeoX")
TOKENS = [token % 300 for token in random_tokens(20, seed=4)]


@pytest.mark.parametrize("name", SPLIT)
def test_families_split_over_ranks_equal_their_own_plain_forward(tmp_path, name):
    """Biases, tied heads, norms of heads: whatever a family has, once."""
    plain = small(name)
    plain.save_pretrained(tmp_path)
    cpu_kernels.load()
    groups = make_groups(2)
    models = [part_of(tmp_path, group) for group in groups]
    for model in models:
        optimise(model)
    found = on_all(groups, lambda group: logits_of(models[group.seat.rank], TOKENS, 2))
    with torch.inference_mode():
        expected = plain(input_ids=torch.tensor([TOKENS])).logits[0]
    assert torch.allclose(torch.cat(found, 1), expected, atol=1e-4, rtol=1e-4)
    assert [group.sums for group in groups] == [2 * SMALL["num_hidden_layers"]] * 2


def test_int8_weights_of_ranks_are_those_of_the_whole(tmp_path):
    """Row-parallel ones too, whose scales are those of all ranks' features."""
    plain = small("Llama")
    plain.save_pretrained(tmp_path)
    cpu_kernels.load()
    groups = make_groups(2)
    models = [part_of(tmp_path, group) for group in groups]

    def run(group):
        model = models[group.seat.rank]
        optimise(model, pack=False)
        quantise(loaded(model), "int8")
        return logits_of(model, TOKENS, 2)

    found = torch.cat(on_all(groups, run), 1)
    whole = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation=attention.IMPLEMENTATION
    )
    optimise(whole.requires_grad_(False).eval(), pack=False)
    quantise(loaded(whole), "int8")
    expected = logits_of(whole, TOKENS)
    # Activations have 16 bits of their own on each rank.
    assert (found - expected).norm() < 5e-4 * expected.norm()
    assert (found - logits_of(part_alone(tmp_path), TOKENS)).norm() > 5e-3 * expected.norm()


def part_alone(folder):
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation=attention.IMPLEMENTATION
    )
    optimise(model.requires_grad_(False).eval())
    return model


@pytest.mark.parametrize("one_shot_bytes", [0, 1 << 20])
def test_compiled_layers_hold_the_sums_and_are_compiled_once(tmp_path, one_shot_bytes):
    """As on a GPU: nothing of the group breaks a layer's graph or tells layers apart."""
    small("Llama").save_pretrained(tmp_path)
    attention.register()
    cpu_kernels.load()
    group = Doubling(Seat(0, 2), CPU)
    group.one_shot_bytes = one_shot_bytes
    model = part_of(tmp_path, group)
    optimise(model)
    expected, plain_sums = logits_of(model, TOKENS, 2), group.sums
    compiled = []

    def backend(graph, example):
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    for layer in model.model.layers:
        mlp = layer.mlp
        mlp.forward = torch.compile(mlp.forward, dynamic=False, fullgraph=True, backend=backend)
    group.sums = 0
    assert torch.equal(logits_of(model, TOKENS, 2), expected)
    assert group.sums == plain_sums == 2 * SMALL["num_hidden_layers"]
    assert len(compiled) == 1
    torch._dynamo.reset()


class Doubling(Group):
    """The other rank always has the same."""

    sums = 0

    def sum_in_place(self, rows):
        self.sums += 1
        rows.mul_(2)

    def one_shot_sum(self, rows):
        self.sums += 1
        return rows * 2


def test_a_tied_head_is_a_view_of_the_embeddings(tmp_path):
    small("Gemma").save_pretrained(tmp_path)
    for rank in range(2):
        model = part_of(tmp_path, ThreadGroup(Seat(rank, 2)))
        table, head = model.get_input_embeddings().weight, model.lm_head.weight
        assert torch.equal(head, table[150 * rank : 150 * rank + 150])
        assert head.untyped_storage().data_ptr() == table.untyped_storage().data_ptr()


def test_a_bias_after_a_sum_is_rank_0s_alone(tmp_path):
    small("Starcoder2").save_pretrained(tmp_path)
    first, second = (part_of(tmp_path, ThreadGroup(Seat(rank, 2))) for rank in range(2))
    for name in ("self_attn.o_proj", "mlp.c_proj"):
        own = [model.model.layers[0].get_submodule(name).inner.bias for model in (first, second)]
        assert own[0].shape == (64,) and own[1] is None
    widths = [model.model.layers[0].mlp.c_fc.bias.shape for model in (first, second)]
    assert widths == [(48,), (48,)]


def test_weights_under_other_names_are_read_as_a_whole(tmp_path, caplog):
    """As `transformers` reads them: without the prefix of the base model here."""
    plain = small("Llama")
    plain.save_pretrained(tmp_path)
    expected = weights(part_of(tmp_path, ThreadGroup(Seat(1, 2))))
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    renamed = {name.removeprefix("model."): weight for name, weight in stored.items()}
    save_file(renamed, path, metadata={"format": "pt"})
    with caplog.at_level("INFO"):
        found = weights(part_of(tmp_path, ThreadGroup(Seat(1, 2))))
    assert "named otherwise" in caplog.text
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("change", "ranks", "told"),
    [
        ({}, 4, ["4 attention heads, 2 key-value heads", "over 4 ranks; allowed: 1, 2"]),
        (
            {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3},
            2,
            ["9 attention heads, 3 key-value heads, 96", "allowed: 1, 3"],
        ),
        ({"intermediate_size": 97}, 2, ["97 intermediate features", "allowed: 1"]),
        ({"vocab_size": 301}, 2, ["301 tokens of vocabulary", "allowed: 1"]),
    ],
)
def test_uneven_sizes_are_refused_with_those_that_go(change, ranks, told):
    sizes = SMALL | {"num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 300} | change
    with pytest.raises(InvalidArgument) as refused:
        check_sizes(transformers.LlamaConfig(**sizes), ranks)
    assert refused.value.field == "tensor_parallel"
    assert all(part in refused.value.message for part in told)


@pytest.mark.parametrize("size", [1, 2])
def test_even_sizes_are_taken(size):
    check_sizes(transformers.LlamaConfig(**SMALL, num_key_value_heads=2), size)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Phi3", "asks for colwise_gather_output, rowwise_split_input"),
        ("Olmo2", "asks for colwise_gather_output, rowwise_split_input"),
        ("Mixtral", "asks for moe_tp_experts, packed_colwise"),
        ("GPT2", "does not exist"),
    ],
)
def test_architectures_that_need_more_than_columns_and_rows_are_refused(name, told):
    sizes = {"n_embd": 64, "n_layer": 1, "n_head": 4} if name == "GPT2" else SMALL
    config = getattr(transformers, f"{name}Config")(**sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(Unsupported, match=told) as refused:
        shard(model, Seat(0, 2))
    assert refused.value.field == "tensor_parallel"
