"""KV blocks in a real store: written behind by one worker, brought back by another.

Workers are in this process, their models tiny: what a session says must be what plain decoding
says, whatever is done to the store.
"""

import contextlib
import json
import os
import signal
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from redis import Redis

from outrider.errors import FailedPrecondition, InvalidArgument, Unsupported
from outrider.kv_store import reader
from outrider.kv_store.blocks import BlockCodec, blocks_of
from outrider.kv_store.connection import READER_RIGHTS, RIGHTS
from outrider.kv_store.estimate import PrefillCost
from outrider.kv_store.index import index_key, index_salt
from outrider.kv_store.purge import purge_tenant
from outrider.telemetry.catalog import METRICS
from outrider.token_log import TokenLog
from outrider.types import new_nonce
from outrider.worker import kv_blocks, kv_opening
from outrider.worker.kv_blocks import KvBlocks
from outrider.worker.kv_opening import KvStoreConfig, layout_of, open_store
from outrider.worker.metrics import watch_kv_store
from scripted_workers import Parts, Stream, until
from store_servers import Server, free_port, running_server
from test_store_trouble import write_certificates
from unit.telemetry_harness import Kept
from unit.worker_harness import (
    Bench,
    Owner,
    kv_tensors,
    load,
    plain_greedy,
    proposal_of,
    random_tokens,
    serving,
    verdict_of,
)

BLOCK = 8
PROMPT = random_tokens(200, seed=21)
FULL = 24
"""Blocks of the prompt that are brought back: its last row is computed for its logits."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server("valkey", tmp_path_factory.mktemp("kv")) as running:
        yield running


@pytest.fixture
def redis(server: Server) -> Iterator[Redis]:
    with Redis.from_url(server.url) as client:
        client.flushall()
        yield client


@pytest.fixture(autouse=True)
def known_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill that need not be measured: 100 tokens a second."""
    monkeypatch.setattr(kv_opening, "measure_prefill", lambda *_, **__: (0.01, 0.0))


@pytest.fixture(scope="module")
def folder(tiny_models: dict[str, Path]) -> Path:
    return tiny_models["target"]


@dataclass
class Rig:
    """A worker with a store."""

    bench: Bench
    store: KvBlocks
    incarnation: int

    @property
    def counts(self) -> dict[str, int]:
        return {k: n for k, n in self.bench.worker.counters.items() if k.startswith("kv_")}

    def says(self, tokens: list[int] = PROMPT, *, tenant: str = "") -> tuple[list[int], int]:
        """What comes after `tokens` in a session of its own, and how much KV was there."""
        owner = Owner(self.bench, list(tokens))
        owner.open(tenant=tenant)
        reply = owner.verify(tenant=tenant)
        return list(verdict_of(reply).token_ids), reply.verified.timing.cached_tokens

    def blocks_of(self, owner: Owner, count: int) -> list[torch.Tensor]:
        """Keys and values of a session's first blocks."""
        session = self.bench.session(owner)
        assert session is not None
        places = session.sequence.blocks[:count]
        return [part[:, places].clone() for part in kv_tensors(self.bench.runner)]

    def wrote(self, num_blocks: int, timeout_s: float = 5.0) -> None:
        """Wait until so many blocks have been written."""
        deadline = time.monotonic() + timeout_s
        while self.counts.get("kv_blocks_written", 0) < num_blocks:
            assert time.monotonic() < deadline, self.counts
            time.sleep(0.005)


@contextlib.contextmanager
def rig(
    folder: Path, url: str, *, tier: str = "target", num_blocks: int = 64, **settings: Any
) -> Iterator[Rig]:
    config = KvStoreConfig(**{"kv_store_url": url, "kv_restore": "always", **settings})
    with serving(folder, tier, threaded=False, num_blocks=num_blocks) as bench:
        incarnation = new_nonce()
        store = open_store(config, bench.worker, load(folder), incarnation)
        assert store is not None
        bench.threaded = True
        bench.worker.start()
        try:
            yield Rig(bench, store, incarnation)
        finally:
            bench.worker.stop()
            store.close()


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    return plain_greedy(folder, PROMPT, 1)


def written(folder: Path, url: str, *, tenant: str = "") -> None:
    """Have a worker write the prompt's blocks, and end."""
    with rig(folder, url) as first:
        first.says(tenant=tenant)
        first.wrote(PROMPT_BLOCKS)


PROMPT_BLOCKS = len(PROMPT) // BLOCK


def codec_of(folder: Path) -> BlockCodec:
    with serving(folder, threaded=False, num_blocks=64) as bench:
        return BlockCodec(layout_of(load(folder), bench.runner.block_copies, BLOCK))


def key_of(codec: BlockCodec, index: int, *, tenant: str = "") -> str:
    hashes = TokenLog(PROMPT).block_hashes(BLOCK)
    return codec.key(tenant, blocks_of(tenant, PROMPT, hashes, BLOCK)[index])


def test_another_worker_goes_on_with_the_same_bits(
    folder: Path, redis: Redis, server: Server, expected: list[int]
) -> None:
    with rig(folder, server.url) as first:
        owner = Owner(first.bench, list(PROMPT)).opened()
        assert list(verdict_of(owner.verify()).token_ids) == expected
        first.wrote(PROMPT_BLOCKS)
        held = first.blocks_of(owner, FULL)
    with rig(folder, server.url) as second:
        owner = Owner(second.bench, list(PROMPT)).opened()
        reply = owner.verify()
        assert list(verdict_of(reply).token_ids) == expected
        assert reply.verified.timing.cached_tokens == FULL * BLOCK
        for now, then in zip(second.blocks_of(owner, FULL), held, strict=True):
            assert torch.equal(now, then)
        # It goes on from there, and others share what was brought.
        owner.tokens += expected
        assert list(verdict_of(owner.verify(start=200)).token_ids) == plain_greedy(
            folder, owner.tokens, 1
        )
        assert second.says() == (expected, FULL * BLOCK)
        assert second.counts["kv_blocks_restored"] == FULL
        assert second.counts["kv_tokens_restored"] == FULL * BLOCK
        assert "kv_blocks_written" not in second.counts  # It is all there.
    # Placement may ask who holds what.
    salt = index_salt(load(folder).fingerprint, "", "")
    holders = redis.zrange(index_key(salt, TokenLog(PROMPT).prefix_hash(FULL * BLOCK)), 0, -1)
    assert {int(holder) for holder in holders} == {first.incarnation, second.incarnation}


def told_by(rig: Rig) -> Kept:
    """The metrics of a worker's store, from now on."""
    kept = Kept()
    assert kept.telemetry.metrics is not None
    watch_kv_store(
        kept.telemetry.metrics,
        rig.bench.worker.counters,
        lambda: rig.store.health.up,
        tier="target",
        model="m",
    )
    return kept


def test_what_metrics_and_info_say_is_what_happened(
    folder: Path, redis: Redis, server: Server, expected: list[int]
) -> None:
    name = "outrider.kv_store."
    with rig(folder, server.url) as first:
        kept = told_by(first)
        first.says()
        first.wrote(PROMPT_BLOCKS)
        assert kept.value(name + "up") == 1
        assert kept.value(name + "blocks", result="written") == PROMPT_BLOCKS
        sizes = [redis.strlen(key) for key in redis.keys("outrider:kv:block:*")]
        assert kept.value(name + "io", result="written") == sum(sizes) > 0
        info = first.store.info()
        assert (info.up, info.blocks_written, info.bytes_written) == (
            True, PROMPT_BLOCKS, sum(sizes)
        )  # fmt: skip
    codec = codec_of(folder)
    redis.setrange(key_of(codec, 9), 70, b"x")
    with rig(folder, server.url) as second:
        kept = told_by(second)
        assert second.says() == (expected, 9 * BLOCK)
        block_bytes = codec.layout.block_bytes
        assert kept.value(name + "blocks", result="restored") == 9
        assert kept.value(name + "io", result="restored") == 9 * block_bytes
        assert kept.value(name + "tokens") == 9 * BLOCK
        assert kept.value(name + "restores", result="done") == 1
        assert kept.value(name + "refusals", reason="damaged") == 1
        assert kept.value(name + "refusals") == 1 and kept.value(name + "errors") == 0
        info = second.store.info()
        assert (info.blocks_restored, info.tokens_restored) == (9, 9 * BLOCK)
        assert (info.bytes_restored, info.blocks_refused, info.errors) == (9 * block_bytes, 1, 0)
    for metric in METRICS:
        if metric.name.startswith(name):
            assert kept.points(metric.name), metric.name


def test_a_session_that_is_decoding_is_written_block_by_block(
    folder: Path, redis: Redis, server: Server
) -> None:
    with rig(folder, server.url) as first:
        owner = Owner(first.bench, PROMPT[:20]).opened()
        entry = owner.verify_entry()
        entry.verify.more_rounds = 30
        replies = first.bench.post(entry)
        while True:
            reply = replies.get(timeout=20)
            owner.tokens.extend(verdict_of(reply).token_ids)
            if not reply.header.more:
                break
        assert len(owner.tokens) == 51
        first.wrote(6)
    with rig(folder, server.url) as second:
        said, cached = second.says(owner.tokens)
        assert cached == 48 and said == plain_greedy(folder, owner.tokens, 1)


@pytest.mark.parametrize(
    ("harm", "count"),
    [
        ("a flipped bit", "kv_blocks_damaged"),
        ("a lost end", "kv_blocks_damaged"),
        ("nothing left", "kv_blocks_missed"),
        ("another layout", "kv_blocks_foreign"),
        ("another caller's", "kv_blocks_other_tokens"),
        ("other tokens of the same hash", "kv_blocks_other_tokens"),
    ],
)
def test_a_bad_block_is_refused_with_all_behind_it_and_written_again(
    folder: Path, redis: Redis, server: Server, expected: list[int], harm: str, count: str
) -> None:
    written(folder, server.url)
    codec = codec_of(folder)
    key = key_of(codec, 5)
    value = redis.get(key)
    assert isinstance(value, bytes)
    redis.set(key, _harmed(codec, value, harm)) if harm != "nothing left" else redis.delete(key)
    with rig(folder, server.url) as second:
        assert second.says() == (expected, 5 * BLOCK)
        assert second.counts[count] == 1 and second.counts["kv_blocks_restored"] == 5
        second.wrote(1)
        assert redis.get(key) == value
    with rig(folder, server.url) as third:
        assert third.says() == (expected, FULL * BLOCK)


def _harmed(codec: BlockCodec, value: bytes, harm: str) -> bytes:
    """Poison in a form that nothing but the check would stop."""
    hashes = TokenLog(PROMPT).block_hashes(BLOCK)
    block = blocks_of("", PROMPT, hashes, BLOCK)[5]

    def poison(into: np.ndarray) -> None:
        into.view(np.float32)[:] = 30.0

    if harm == "a flipped bit":
        return value[:600] + bytes([value[600] ^ 64]) + value[601:]
    if harm == "a lost end":
        return value[:-100]
    if harm == "another layout":
        other = BlockCodec(replace(codec.layout, model="another fine-tune"))
        return bytes(other.encode(block, poison))
    tenant, tokens = ("b", PROMPT) if harm == "another caller's" else ("", [1] * 200)
    return bytes(codec.encode(blocks_of(tenant, tokens, hashes, BLOCK)[5], poison))


def test_callers_share_nothing(
    folder: Path, redis: Redis, server: Server, expected: list[int]
) -> None:
    written(folder, server.url, tenant="a")
    with rig(folder, server.url) as second:
        assert second.says(tenant="b") == (expected, 0)
        assert second.says(tenant="a") == (expected, FULL * BLOCK)


def test_a_draft_brings_its_kv_back_too(folder: Path, redis: Redis, server: Server) -> None:
    guesses = []
    for cached in (0, FULL * BLOCK):
        with rig(folder, server.url, tier="draft") as one:
            reply = Owner(one.bench, list(PROMPT)).opened().propose(5)
            guesses.append(list(proposal_of(reply).token_ids))
            assert reply.proposed.timing.cached_tokens == cached
            if not cached:
                one.wrote(PROMPT_BLOCKS)
    assert guesses[0] == guesses[1] == plain_greedy(folder, PROMPT, 5)


def test_a_runner_whose_blocks_are_spread_over_ranks_is_refused(
    folder: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(folder, threaded=False) as bench:
        monkeypatch.delattr(bench.runner, "block_copies")
        with pytest.raises(Unsupported) as refused:
            open_store(KvStoreConfig(server.url), bench.worker, load(folder), 1)
        assert refused.value.field == "kv_store_url"
        assert open_store(KvStoreConfig(), bench.worker, load(folder), 1) is None


def test_another_model_finds_nothing(
    folder: Path, redis: Redis, server: Server, tiny_models: dict[str, Path]
) -> None:
    written(folder, server.url)
    with rig(tiny_models["draft"], server.url) as other:
        said, cached = other.says()
        assert cached == 0 and said == plain_greedy(tiny_models["draft"], PROMPT, 1)


def test_others_go_on_while_one_waits_for_the_store(
    folder: Path, redis: Redis, server: Server, expected: list[int]
) -> None:
    written(folder, server.url)
    with rig(folder, server.url) as second:
        waits = Owner(second.bench, list(PROMPT)).opened()
        with stopped(server):
            reply = second.bench.post(waits.verify_entry())
            for _ in range(3):
                said, cached = second.says(PROMPT[:12])
                assert said and cached <= BLOCK
            assert reply.empty()
        done = reply.get(timeout=10)
        assert list(verdict_of(done).token_ids) == expected
        assert done.verified.timing.cached_tokens == FULL * BLOCK


@contextlib.contextmanager
def stopped(server: Server) -> Iterator[None]:
    """The store hangs: connections stay, nothing is answered."""
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.process.pid, signal.SIGCONT)


def test_a_store_that_hangs_costs_the_deadline_and_no_more(
    folder: Path,
    redis: Redis,
    server: Server,
    expected: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pieces that come after it are for nobody, and do no harm to who has their place."""
    monkeypatch.setattr(kv_blocks, "_LONGEST_S", 0.1)
    written(folder, server.url)
    with rig(folder, server.url, kv_store_timeout_s=5.0) as second:
        with stopped(server):
            started = time.monotonic()
            late = Owner(second.bench, list(PROMPT)).opened()
            reply = late.verify()
            assert time.monotonic() - started < 2
            assert list(verdict_of(reply).token_ids) == expected
            assert reply.verified.timing.cached_tokens == 0
            late.close()
            others = random_tokens(480, seed=5)  # Takes the blocks that were waited for.
            other = Owner(second.bench, others).opened()
            said = second.bench.post(other.verify_entry())
        assert list(verdict_of(said.get(timeout=10)).token_ids) == plain_greedy(folder, others, 1)
        wait_for(second, "kv_restores_late", 1)
        assert "kv_blocks_restored" not in second.counts


def wait_for(of: Rig, name: str, least: int) -> None:
    deadline = time.monotonic() + 10
    while of.counts.get(name, 0) < least:
        assert time.monotonic() < deadline, of.counts
        time.sleep(0.005)


def test_a_store_that_dies_is_left_alone_and_taken_up_again(
    folder: Path, redis: Redis, server: Server, expected: list[int]
) -> None:
    with rig(folder, server.url, kv_store_timeout_s=0.3) as first:
        server.stop()
        started = time.monotonic()
        assert first.says() == (expected, 0)
        assert first.says(random_tokens(100, seed=6))[1] == 0
        assert time.monotonic() - started < 3
        wait_for(first, "kv_store_errors", 1)
        server.restart()
        deadline = time.monotonic() + 10
        while not first.store.health.up:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        fresh = random_tokens(90, seed=7)
        first.says(fresh)
        first.wrote(11)
    with rig(folder, server.url) as second:
        assert second.says(fresh)[1] == 88


def test_a_worker_starts_without_its_store(folder: Path, expected: list[int]) -> None:
    with rig(folder, f"redis://:hidden@127.0.0.1:{free_port()}", kv_store_timeout_s=0.3) as alone:
        assert alone.says() == (expected, 0)
        assert alone.counts["kv_store_errors"] >= 1


def test_a_store_that_refuses_the_worker_is_told_at_start(folder: Path, tmp_path: Path) -> None:
    with (
        running_server("valkey", tmp_path, "--requirepass", "right") as locked,
        pytest.raises(FailedPrecondition, match="refuses the credentials") as refused,
    ):
        with rig(folder, f"redis://:wrong-secret@127.0.0.1:{locked.port}"):
            pass
    assert "wrong-secret" not in str(refused.value)


def test_the_store_is_reached_by_a_socket(
    folder: Path, tmp_path: Path, expected: list[int]
) -> None:
    path = tmp_path / "kv.sock"
    with running_server("valkey", tmp_path, "--unixsocket", str(path)):
        written(folder, f"unix://{path}")
        with rig(folder, f"unix://{path}") as second:
            assert second.says() == (expected, FULL * BLOCK)


def test_the_store_is_reached_by_tls(
    folder: Path, redis: Redis, server: Server, tmp_path: Path, expected: list[int]
) -> None:
    write_certificates(tmp_path)
    ca, cert, key = (str(tmp_path / f"{name}.pem") for name in ("ca", "cert", "key"))
    files = {"kv_store_ca": ca, "kv_store_cert": cert, "kv_store_key": key}
    with tls_proxy(server.port, ca=ca, cert=cert, key=key) as port:
        url = f"rediss://127.0.0.1:{port}/0"
        for cached in (0, FULL * BLOCK):
            with rig(folder, url, **files) as one:
                assert one.says() == (expected, cached)
                if not cached:
                    one.wrote(PROMPT_BLOCKS)
        with rig(folder, url, kv_store_ca=ca) as unknown:  # Without a certificate of its own.
            assert unknown.says() == (expected, 0)
            assert unknown.counts["kv_store_errors"] > 0


@contextlib.contextmanager
def tls_proxy(store_port: int, *, ca: str, cert: str, key: str) -> Iterator[int]:
    """TLS before a store, which asks for certificates; the port."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=ca)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(cert, key)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", store_port)) as store,
                context.wrap_socket(self.request, server_side=True) as client,
            ):
                back = threading.Thread(target=pump, args=(store, client), daemon=True)
                back.start()
                pump(client, store)
                back.join(5)

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as proxy:
        proxy.daemon_threads = True
        thread = threading.Thread(target=proxy.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield int(proxy.server_address[1])
        finally:
            proxy.shutdown()
            thread.join()


def with_rights(redis: Redis, server: Server, rights: Sequence[str] = RIGHTS.split()) -> str:
    """A URL of a user who may do what is asked for, and nothing else."""
    rules = ("reset", "on", ">open-sesame", "~outrider:kv:*", *rights)
    redis.execute_command("ACL", "SETUSER", "kv", *rules)
    return f"redis://kv:open-sesame@127.0.0.1:{server.port}/0"


def test_the_rights_that_are_named_suffice(
    folder: Path, redis: Redis, server: Server, expected: list[int]
) -> None:
    url = with_rights(redis, server)
    written(folder, url)
    with rig(folder, url) as second:
        assert second.says() == (expected, FULL * BLOCK)
        assert "kv_store_errors" not in second.counts
    url = with_rights(redis, server, READER_RIGHTS.split())
    with Redis.from_url(url) as client:
        assert purge_tenant(client, "") == PROMPT_BLOCKS


@pytest.mark.parametrize("dropped", RIGHTS.split())
def test_none_of_the_rights_is_one_too_many(
    folder: Path, redis: Redis, server: Server, dropped: str
) -> None:
    """What a worker does meets each: a probe, writing anew and again, the index, a bad block."""
    url = with_rights(redis, server, [right for right in RIGHTS.split() if right != dropped])
    with contextlib.suppress(FailedPrecondition, AssertionError):
        written(folder, url)
        with rig(folder, url) as other:
            other.says()
    denied = {str(entry["object"]).casefold() for entry in redis.acl_log()}
    assert dropped[1:] in denied


@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lru"])
def test_a_full_store_costs_blocks_only(
    folder: Path, tmp_path: Path, expected: list[int], policy: str
) -> None:
    with (
        running_server("valkey", tmp_path, "--maxmemory-policy", policy) as small,
        Redis.from_url(small.url) as client,
    ):
        limit = int(client.info("memory")["used_memory"]) + (3 << 20)
        client.config_set("maxmemory", limit)
        with rig(folder, small.url, num_blocks=1024) as first:
            for seed in range(13):
                first.says(random_tokens(500, seed=100 + seed))
            assert first.says()[0] == expected
            if policy == "noeviction":
                wait_for(first, "kv_store_full", 1)
            else:
                first.wrote(13 * 62 + PROMPT_BLOCKS)
            assert int(client.info("memory")["used_memory"]) < limit + (1 << 20)
        with rig(folder, small.url) as second:
            assert second.says()[0] == expected
            # The last ones first: what is computed anew drives out what is left of the first ones.
            for seed in reversed(range(13)):
                tokens = random_tokens(500, seed=100 + seed)
                assert second.says(tokens)[0] == plain_greedy(folder, tokens, 1)
            assert second.counts["kv_blocks_restored"] > 0


def test_writing_keeps_to_its_rate(folder: Path, redis: Redis, server: Server) -> None:
    with rig(folder, server.url, kv_store_write_mib_s=0.02) as first:
        started = time.monotonic()
        first.says()
        time.sleep(0.5)
        bytes_written = first.counts.get("kv_bytes_written", 0)
        took = time.monotonic() - started
        block = codec_of(folder).value_bytes
        assert block <= bytes_written <= 0.02 * (1 << 20) * took + 2 * block
        # What the pool needs for others meanwhile is not written.
        for seed in range(4):
            first.says(random_tokens(480, seed=seed))
        wait_for(first, "kv_blocks_gone", 1)


def test_what_pays_is_chosen_by_what_was_measured(
    folder: Path, redis: Redis, server: Server, expected: list[int]
) -> None:
    written(folder, server.url)
    fresh = random_tokens(100, seed=8)
    with rig(folder, server.url, kv_restore="auto") as second:
        second.store.estimate.prefill = PrefillCost(1e-9)
        assert second.says() == (expected, 0)
        assert second.counts["kv_restores_declined"] == 1
        second.says(fresh)
        second.store.estimate.prefill = PrefillCost(0.01)
        second.says(random_tokens(80, seed=9))
        second.wrote(10)  # The others were not: nobody would bring them back.
        assert second.counts["kv_blocks_written"] == 10
    with rig(folder, server.url, kv_restore="auto") as third:
        assert third.says() == (expected, FULL * BLOCK)
        assert third.says(fresh)[1] == 0


def test_cancelled_work_leaves_nothing_behind(
    folder: Path, redis: Redis, server: Server, expected: list[int]
) -> None:
    written(folder, server.url)
    with rig(folder, server.url) as second:
        before = second.bench.blocks_used
        owner = Owner(second.bench, list(PROMPT)).opened()
        with stopped(server):
            entry = owner.verify_entry()
            reply = second.bench.post(entry)
            second.bench.settle()
            assert second.bench.blocks_used > before
            owner.cancel(entry.header.number)
            assert reply.get(timeout=5).HasField("refused")
            owner.close()
            assert second.bench.blocks_used == before
        assert second.says() == (expected, FULL * BLOCK)


def test_a_piece_that_comes_too_late_is_for_nobody(
    folder: Path, redis: Redis, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session, whose blocks it knows, has gone on with other tokens."""
    written(folder, server.url)
    held: list[tuple[Any, ...]] = []
    monkeypatch.setattr(KvBlocks, "_take", lambda store, *piece: held.append(piece))
    with rig(folder, server.url) as second:
        owner = Owner(second.bench, list(PROMPT)).opened()
        assert owner.verify().verified.timing.cached_tokens == 0
        assert len(held) > 1
        owner.tokens = random_tokens(120, seed=31)
        owner.tokens += verdict_of(owner.verify()).token_ids
        before = second.blocks_of(owner, 15)
        for piece in held:
            second.bench.worker.post(partial(second.store._arrived, *piece))
        second.bench.settle()
        for now, then in zip(second.blocks_of(owner, 15), before, strict=True):
            assert torch.equal(now, then)
        said = verdict_of(owner.verify(start=120)).token_ids
        assert list(said) == plain_greedy(folder, owner.tokens, 1)


def test_a_copy_that_fails_costs_what_is_behind_it(
    folder: Path,
    redis: Redis,
    server: Server,
    expected: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reader, "_PIECE_BYTES", 1 << 14)  # A few blocks.
    written(folder, server.url)
    with rig(folder, server.url) as second:
        write = second.store._copies.write
        copied: list[int] = []

        def failing(block: int, staged: np.ndarray) -> None:
            copied.append(block)
            if len(copied) == 3:
                raise RuntimeError("no")
            write(block, staged)

        monkeypatch.setattr(second.store._copies, "write", failing)
        assert second.says() == (expected, BLOCK)
        monkeypatch.undo()
        assert second.says(random_tokens(100, seed=3))[1] == 0  # The worker is well.


def test_blocks_expire_and_live_on_while_they_are_used(
    folder: Path, redis: Redis, server: Server
) -> None:
    codec = codec_of(folder)
    with rig(folder, server.url, kv_store_ttl_s=1.0) as first:
        owner = Owner(first.bench, list(PROMPT)).opened()
        verdict_of(owner.verify())
        first.wrote(PROMPT_BLOCKS)
        assert 0 < redis.pttl(key_of(codec, 0)) <= 1000
        for number in range(5):
            time.sleep(0.3)
            owner.tokens += random_tokens(BLOCK, seed=number)
            verdict_of(owner.verify(start=len(owner.tokens) - BLOCK))
        assert redis.pttl(key_of(codec, 0)) > 0
        time.sleep(1.2)
        assert not redis.keys("outrider:kv:block:*")


def test_a_callers_blocks_can_be_removed_at_once(
    folder: Path, redis: Redis, server: Server
) -> None:
    written(folder, server.url, tenant="a")
    written(folder, server.url, tenant="b")
    assert purge_tenant(redis, "a") == PROMPT_BLOCKS
    assert len(redis.keys("outrider:kv:block:*")) == PROMPT_BLOCKS
    with rig(folder, server.url) as second:
        assert second.says(tenant="a")[1] == 0
        assert second.says(tenant="b")[1] == FULL * BLOCK


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"kv_store_url": "http://x"}, "kv_store_url"),
        ({"kv_store_url": "redis://h:99999"}, "kv_store_url"),
        ({"kv_store_ca": "/etc/hostname"}, "kv_store_ca"),
        ({"kv_store_url": "rediss://h", "kv_store_ca": "/nowhere"}, "kv_store_ca"),
        ({"kv_store_timeout_s": 0.0}, "kv_store_timeout_s"),
        ({"kv_store_ttl_s": 0.0}, "kv_store_ttl_s"),
        ({"kv_store_write_mib_s": 0.0}, "kv_store_write_mib_s"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], field: str) -> None:
    config = KvStoreConfig(**{"kv_store_url": "redis://localhost", **settings})
    with pytest.raises(InvalidArgument) as refused:
        _ = config.kv_store
    assert refused.value.field == field


@pytest.mark.asyncio(loop_scope="session")
async def test_a_target_that_is_killed_leaves_its_kv_to_the_next(
    stack: Any, parts: Parts, tiny_models: dict[str, Path], server: Server, redis: Redis
) -> None:
    """Real processes: the stream goes on at the other target, which computes little of it."""
    options: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True, "seed": 5, "temperature": 1.0}
    prompt = "a long prompt that nobody wants to compute twice. " * 4
    plain = await stack.complete(prompt, num_speculative_tokens=0, **options)
    settings = {"kv_store_url": with_rights(redis, server), "kv_restore": "always"}
    async with (
        parts.worker("target", tiny_models["target"], **settings) as (first, one),
        parts.worker("target", tiny_models["target"], **settings) as (second, other),
        parts.orchestrator(stack.store_url, targets=[one, other]) as rig,
    ):
        stream = await Stream(rig, prompt, **options).reaches(60)

        async def written() -> bool:
            return len(redis.keys("outrider:kv:block:*")) >= 7

        await until(written, "the blocks are in the store")
        # Which of them has it is for placement to say.
        victim, heir = (first, second) if (await rig.info(one)).sessions else (second, first)
        os.kill(victim.pid, signal.SIGKILL)
        done = await stream.end()
        assert done.token_ids == plain.token_ids
        log = heir.log.read_text()
    [line] = [json.loads(line) for line in log.splitlines() if "restored KV" in line]
    assert line["tokens"] >= 7 * 32
    assert "open-sesame" not in log and "***" in log
