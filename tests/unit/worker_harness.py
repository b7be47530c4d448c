"""Workers in the test's own process, and owners that speak the worker protocol with them."""

import contextlib
import functools
import queue
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from outrider.engine import cpu_kernels
from outrider.engine.loaded_model import LoadedModel
from outrider.engine.loading import load_model
from outrider.engine.model_files import default_cache_dir
from outrider.engine.model_runner import ModelRunner
from outrider.token_log import TokenLog
from outrider.types import (
    GenerationSpec,
    Proposal,
    SamplingParams,
    Verdict,
    VerificationMode,
    new_nonce,
    new_session_id,
)
from outrider.v1 import worker_pb2
from outrider.wire import (
    proposal_from_proto,
    proposal_to_proto,
    spec_to_proto,
    verdict_from_proto,
)
from outrider.worker.sessions import Session
from outrider.worker.worker import Worker, WorkerLimits
from services.draft.drafter import Drafter
from services.target.verifier import Verifier

torch.set_num_threads(1)

R = worker_pb2
TIMEOUT_S = 20.0
GREEDY = GenerationSpec(SamplingParams())


@functools.cache
def load(folder: Path, dtype: str = "float32") -> LoadedModel:
    cpu_kernels.load(default_cache_dir())
    return load_model(str(folder), tier="target", dtype=dtype, device="cpu")


_runners: dict[tuple[int, int, int], list[ModelRunner]] = {}


def make_runner(loaded: LoadedModel, num_blocks: int, block_tokens: int = 8) -> ModelRunner:
    """A runner whose KV pool is full of what no row may read.

    Tracing the pass is most of what a runner costs, so one that an earlier test has let go is used
    again: it holds no state but its pool.
    """
    made = _runners.setdefault((id(loaded.model), num_blocks, block_tokens), [])
    held_here = 3  # by the list, by the loop, by the call
    runner = next((runner for runner in made if sys.getrefcount(runner) <= held_here), None)
    if runner is None:
        runner = ModelRunner(loaded, num_blocks=num_blocks, block_tokens=block_tokens)
        made.append(runner)
    for tensor in kv_tensors(runner):
        tensor.fill_(1e4)
    return runner


def kv_tensors(runner: ModelRunner) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all layers, dimension 1 going along the pool."""
    return runner._pool.keys, runner._pool.values


@functools.cache
def plain_model(folder: Path) -> torch.nn.Module:
    """The model as `transformers` runs it, fp32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


@torch.inference_mode()
def plain_logits(folder: Path, token_ids: Sequence[int]) -> torch.Tensor:  # [tokens, vocab]
    return plain_model(folder)(input_ids=torch.tensor([list(token_ids)])).logits[0]


def plain_greedy(folder: Path, prompt: Sequence[int], count: int) -> list[int]:
    """The next `count` tokens of plain greedy decoding, the whole text recomputed each time."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(plain_logits(folder, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def coupled(seed: int, **params: float) -> GenerationSpec:
    sampling = SamplingParams(**{"temperature": 1.0, "top_p": 0.95, "seed": seed} | params)
    return GenerationSpec(sampling)


def rejection(seed: int, **params: float) -> GenerationSpec:
    sampling = SamplingParams(**{"temperature": 1.0, "seed": seed} | params)
    return GenerationSpec(sampling, mode=VerificationMode.REJECTION)


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(256), k=count)


@dataclass
class Bench:
    """A worker and what the tests look at in it. It is settled once a reply has come."""

    worker: Worker
    runner: ModelRunner
    threaded: bool = True

    def ask(self, entry: worker_pb2.Entry) -> worker_pb2.Reply:
        return self.post(entry).get(timeout=TIMEOUT_S)

    def post(self, entry: worker_pb2.Entry) -> "queue.SimpleQueue[worker_pb2.Reply]":
        replies: queue.SimpleQueue[worker_pb2.Reply] = queue.SimpleQueue()
        self.worker.submit([entry], replies.put)
        if not self.threaded:
            self.pump()
        return replies

    def ask_bulk(self, request: worker_pb2.BulkRequest) -> worker_pb2.BulkResponse:
        replies: queue.SimpleQueue[worker_pb2.BulkResponse] = queue.SimpleQueue()
        self.worker.submit_bulk(request, replies.put)
        return replies.get(timeout=TIMEOUT_S)

    def pump(self) -> None:
        """One turn of a worker that has no thread: what came in, then one pass."""
        self.worker._read_inbox(0.0)
        self.worker._step()

    def settle(self) -> None:
        """Return when everything handed in before has been handled (a pass excepted)."""
        done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.worker.post(lambda: done.put(None))
        done.get(timeout=TIMEOUT_S)

    def session(self, owner: "Owner") -> Session | None:
        return self.worker._sessions._sessions.get((owner.session_id, owner.completion))

    @property
    def blocks_used(self) -> int:
        blocks = self.worker._engine.blocks
        return blocks.num_blocks - blocks.num_free


@contextlib.contextmanager
def serving(
    folder: Path, tier: str = "target", *, block_tokens: int = 8, threaded: bool = True, **limits
) -> Iterator[Bench]:
    """A worker for the model in `folder`; `limits` are WorkerLimits."""
    loaded = load(folder)
    limits = {"num_blocks": 256, "context_length": loaded.context_length} | limits
    make = {
        "target": lambda: Verifier(
            vocab_size=loaded.vocab_size, context_length=limits["context_length"]
        ),
        "draft": lambda: Drafter(
            vocab_size=loaded.vocab_size, context_length=limits["context_length"]
        ),
    }
    runner = make_runner(loaded, limits["num_blocks"], block_tokens)
    worker = Worker(runner, make[tier](), WorkerLimits(**limits), vocab_size=loaded.vocab_size)
    if threaded:
        worker.start()
    try:
        yield Bench(worker, runner, threaded)
    finally:
        if threaded:
            worker.stop()


@dataclass
class Owner:
    """An orchestrator's side of one session on one worker."""

    bench: Bench
    tokens: list[int] = field(default_factory=list)
    spec: GenerationSpec = GREEDY
    session_id: str = field(default_factory=new_session_id)
    completion: int = 0
    epoch: int = 1
    nonce: int = field(default_factory=new_nonce)
    number: int = 0
    timeout_ms: int = 20_000
    held: int = 0
    """Tokens that `by_draft` has sent."""

    def entry(self, *, tokens: Sequence[int] | None = None, **header) -> worker_pb2.Entry:
        """An entry on `tokens` (by default the log); `header` overrides its fields."""
        self.number += 1
        log = TokenLog(self.tokens if tokens is None else tokens)
        fields = {
            "session_id": self.session_id,
            "completion": self.completion,
            "epoch": self.epoch,
            "owner_nonce": self.nonce,
            "number": self.number,
            "base_len": len(log),
            "base_hash": log.prefix_hash(len(log)),
            "timeout_ms": self.timeout_ms,
        }
        return worker_pb2.Entry(header=worker_pb2.EntryHeader(**fields | header))

    def open_entry(self, **header) -> worker_pb2.Entry:
        entry = self.entry(**header)
        entry.open.spec.CopyFrom(spec_to_proto(self.spec))
        return entry

    def verify_entry(
        self,
        guesses: Sequence[int] = (),
        *,
        start: int = 0,
        proposal: Proposal | None = None,
        tokens: Sequence[int] | None = None,
        delta: Sequence[int] | None = None,
        **header,
    ) -> worker_pb2.Entry:
        """A verification whose delta holds the log from `start` on, unless `delta` is given."""
        entry = self.entry(tokens=tokens, **header)
        own = list(self.tokens if tokens is None else tokens)
        entry.verify.delta.start = start
        entry.verify.delta.token_ids.extend(own[start:] if delta is None else delta)
        proposal = proposal or Proposal(tuple(guesses))
        entry.verify.proposal.CopyFrom(proposal_to_proto(proposal))
        return entry

    def propose_entry(self, count: int, *, start: int = 0, **header) -> worker_pb2.Entry:
        entry = self.entry(**header)
        entry.propose.num_speculative_tokens = count
        entry.propose.delta.start = start
        entry.propose.delta.token_ids.extend(self.tokens[start:])
        return entry

    def bulk_request(self, start: int, stop: int, **header) -> worker_pb2.BulkRequest:
        entry = self.entry(tokens=self.tokens[:stop], **header)
        delta = worker_pb2.TokenDelta(start=start, token_ids=self.tokens[start:stop])
        return worker_pb2.BulkRequest(header=entry.header, delta=delta)

    def open(self, **header) -> worker_pb2.Reply:
        return self.bench.ask(self.open_entry(**header))

    def opened(self) -> "Owner":
        assert self.open().HasField("opened")
        return self

    def verify(self, guesses: Sequence[int] = (), **kwargs) -> worker_pb2.Reply:
        return self.bench.ask(self.verify_entry(guesses, **kwargs))

    def propose(self, count: int, **kwargs) -> worker_pb2.Reply:
        return self.bench.ask(self.propose_entry(count, **kwargs))

    def close(self, **header) -> worker_pb2.Reply:
        entry = self.entry(**header)
        entry.close.SetInParent()
        return self.bench.ask(entry)

    def cancel(self, through_number: int) -> None:
        entry = self.entry()
        entry.cancel.through_number = through_number
        self.bench.worker.submit([entry], lambda reply: None)

    @property
    def cached(self) -> list[int]:
        """Token ids that the worker's KV of this session came from."""
        session = self.bench.session(self)
        assert session is not None
        return session.sequence.cached


def verdict_of(reply: worker_pb2.Reply) -> Verdict:
    assert reply.HasField("verified"), reply
    return verdict_from_proto(reply.verified)


def proposal_of(reply: worker_pb2.Reply, vocab_size: int = 1 << 20) -> Proposal:
    assert reply.HasField("proposed"), reply
    return proposal_from_proto(reply.proposed.proposal, vocab_size=vocab_size)


def refusal(reply: worker_pb2.Reply) -> tuple[str, str]:
    """Reason (without its prefix, small letters) and field."""
    assert reply.HasField("refused"), reply
    name = worker_pb2.RefusalReason.Name(reply.refused.reason)
    return name.removeprefix("REFUSAL_REASON_").lower(), reply.refused.field


@dataclass
class Tally:
    """What a generation saw, so that a test can refuse to pass for lack of it."""

    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    recovered_inside: int = 0
    recovered_first: int = 0
    bonus: int = 0

    def add(self, verdict: Verdict) -> None:
        self.rounds += 1
        self.proposed += verdict.num_proposed
        self.accepted += verdict.num_accepted
        if verdict.num_proposed and verdict.num_accepted == verdict.num_proposed:
            self.bonus += 1
        elif verdict.num_accepted:
            self.recovered_inside += 1
        elif verdict.num_proposed:
            self.recovered_first += 1


def generate(target: Owner, count: int, k: int = 0, proposer=None, tally: Tally | None = None):
    """Rounds until `count` tokens are there (the surplus cut off); the generated ids.

    `proposer(tokens, k)` gives a Proposal.
    """
    prompt_len = len(target.tokens)
    held = 0
    while len(target.tokens) < prompt_len + count:
        # The first token is decoded plainly, as the orchestrator does it.
        proposal = proposer(target.tokens, k) if held and k and proposer else Proposal()
        verdict = verdict_of(target.verify(start=held, proposal=proposal))
        held = len(target.tokens)
        target.tokens.extend(verdict.token_ids)
        if tally:
            tally.add(verdict)
    return target.tokens[prompt_len : prompt_len + count]


def by_draft(draft: Owner):
    """A proposer for `generate` that asks a draft worker."""

    def propose(tokens: Sequence[int], k: int) -> Proposal:
        start, draft.held = draft.held, len(tokens)
        draft.tokens = list(tokens)
        return proposal_of(draft.propose(k, start=start))

    return propose
