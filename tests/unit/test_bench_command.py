"""`outrider bench` against a scripted server, and the process that runs `transformers`."""

import asyncio
import json
import sys

import pytest
from test_client_fakes import FakeService, last, response, serving

from outrider.bench.prompts import BenchPrompt
from outrider.bench.systems import TransformersSystem
from outrider.cli.__main__ import build_parser
from outrider.client import GenerationOptions, OutriderClient
from outrider.errors import InternalError, InvalidArgument, Unavailable


async def bench(*argv: str) -> int:
    args = build_parser().parse_args(["bench", *argv])
    return await args.run(args)


async def echo(request, context):
    """Two tokens after the first; k = 0 says so; seed 11 (prompt 1) goes another way with k."""
    k = request.speculation.num_speculative_tokens
    off = request.speculation.HasField("num_speculative_tokens") and k == 0
    other = not off and request.sampling.seed == 11
    yield response(0, [1], seed=request.sampling.seed)
    await asyncio.sleep(0.01)
    stats = {"rounds": 3, "plain": 3} if off else {"rounds": 2, "proposed": 1, "accepted": 1}
    yield last(1, [2, 9 if other else 3], stats=stats)


async def test_bench_compares_and_writes_its_report(tmp_path, capsys):
    service = FakeService(echo)
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    async with serving(service) as address:
        flags = ("--limit", "4", "--max-tokens", "3", "--seed", "10", "--temperature", "0.5")
        files = ("--json", str(out), "--plot", str(plot))
        assert await bench("--address", address, *flags, *files, "--ignore-eos") == 0
    report = json.loads(out.read_text())
    plain, speculative = report["runs"]
    assert (plain["system"], speculative["system"]) == ("plain", "speculative")
    assert plain["acceptance_rate"] is None and speculative["acceptance_rate"] == 1.0
    assert speculative["identical_to_plain"] == {"equal": 3, "of": 4}
    assert plain["identical_to_plain"] == {"equal": 4, "of": 4}
    assert speculative["tokens"] == 12 and len(speculative["requests"]) == 4
    assert report["settings"]["temperature"] == 0.5 and report["models"]["dtype"] == "float32"
    assert plot.read_bytes().startswith(b"\x89PNG")
    table = capsys.readouterr().out
    for word in ("plain", "speculative", "3/4", "mean acceptance length", "by category"):
        assert word in table
    assert len(service.requests) == 2 + 8
    assert all(r.stop.ignore_eos and r.stop.max_tokens == 3 for r in service.requests)
    ks = [r.speculation.HasField("num_speculative_tokens") for r in service.requests]
    assert ks == [True, False, True, False, False, True, True, False, False, True]
    assert service.most_running == 1


async def test_concurrency_runs_batches_of_one_system(tmp_path):
    service = FakeService(echo)
    async with serving(service) as address:
        await bench("--address", address, "--limit", "6", "--concurrency", "3", "--k", "2")
    assert service.most_running == 3
    ks = [r.speculation.num_speculative_tokens for r in service.requests[2:]]
    assert ks == [0, 0, 0, 2, 2, 2, 2, 2, 2, 0, 0, 0]


async def test_mistakes_are_found_before_the_run(tmp_path):
    with pytest.raises(InvalidArgument, match="k: 0 is plain"):
        await bench("--k", "0")
    with pytest.raises(InvalidArgument, match="does not exist"):
        await bench("--json", str(tmp_path / "no" / "out.json"))
    with pytest.raises(InvalidArgument, match="cannot read"):
        await bench("--prompts", str(tmp_path / "none.jsonl"))


async def test_a_failed_request_ends_the_run():
    service = FakeService(echo)

    async def broken(request, context):
        yield response(0, [1])
        yield last(2, [3])

    service.scripts = [echo, echo, broken]
    async with serving(service) as address:
        with pytest.raises(InternalError, match="token 1 was due"):
            await bench("--address", address, "--limit", "2")


PEER = """
import json, sys
print(json.dumps({"dtype": "float32", "device": "cpu"}), flush=True)
for line in sys.stdin:
    r = json.loads(line)
    if r["seed"] == 99:
        sys.exit("out of memory")
    if r["seed"] == 98:
        print(json.dumps({"error": "too long"}), flush=True)
        continue
    print(json.dumps({"token_ids": r["prompt_ids"][:r["max_tokens"]] + r["eos_token_ids"],
                      "ttft_s": 0.1, "last_token_s": 0.2, "total_s": 0.25}), flush=True)
"""


def peer(client, tmp_path, **options):
    return TransformersSystem(
        "transformers",
        client,
        GenerationOptions(max_tokens=2, **options),
        [sys.executable, "-c", PEER],
        tmp_path / "log",
        eos_token_ids=(2,),
    )


async def test_the_peer_gets_the_servers_token_ids_and_takes_turns(tmp_path):
    prompt = BenchPrompt("1", "c", "abc", chat=True)
    async with (
        serving(FakeService()) as address,
        await OutriderClient.connect(address=address) as client,
    ):
        async with peer(client, tmp_path) as system:
            assert system.info["dtype"] == "float32"
            first, second = await asyncio.gather(system.run(prompt, 1), system.run(prompt, 2))
            assert first.token_ids == second.token_ids == (97, 98, 2)
            assert first.tpot_s == pytest.approx(0.05)
            with pytest.raises(InternalError, match="too long"):
                await system.run(prompt, 98)
            with pytest.raises(Unavailable, match="out of memory"):
                await system.run(prompt, 99)
        async with peer(client, tmp_path, ignore_eos=True) as system:
            assert (await system.run(prompt, 1)).token_ids == (97, 98)


async def test_a_peer_that_cannot_load_says_why(tmp_path):
    system = TransformersSystem(
        "transformers",
        OutriderClient.__new__(OutriderClient),
        GenerationOptions(),
        [sys.executable, "-c", "import sys; sys.exit('no such model')"],
        tmp_path / "log",
    )
    with pytest.raises(Unavailable, match="no such model"):
        await system.__aenter__()


def test_transformers_generates_greedily_with_nothing_of_its_own():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from outrider.bench import transformers_peer

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.generation_config = transformers.GenerationConfig()
    request = {"prompt_ids": [3, 4, 5], "max_tokens": 8, "temperature": 0.0, "top_k": 0}
    request |= {"top_p": 1.0, "min_p": 0.0, "seed": 1, "eos_token_ids": []}
    answer = transformers_peer.answer(model, None, request)
    ids = [3, 4, 5]
    for _ in range(8):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert answer["token_ids"] == ids[3:]
    assert 0 < answer["ttft_s"] < answer["last_token_s"] <= answer["total_s"]
    stopped = transformers_peer.answer(model, None, request | {"eos_token_ids": [ids[4], ids[3]]})
    assert stopped["token_ids"] == ids[3:4]
    drawn = request | {"temperature": 1.0, "top_p": 0.9, "top_k": 5, "min_p": 0.05}
    assert transformers_peer.answer(model, None, drawn) | {"ttft_s": 0} != answer
    assert (
        transformers_peer.answer(model, None, drawn)["token_ids"]
        == transformers_peer.answer(model, None, drawn)["token_ids"]
    )
