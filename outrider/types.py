"""Values that every part of Outrider shares. Torch-free; frozen; the words of docs/design.md.

The protobuf messages of `outrider.v1` carry them between processes; `outrider.wire` converts.
"""

import enum
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from outrider import trees

MAX_SPECULATIVE_TOKENS = 16
MAX_PROPOSAL_TOKENS = 64
MAX_SPARSE_ENTRIES = 64
MAX_LOGPROBS = 20
MAX_FAN_OUT = 64
MAX_ALTERNATIVES = 3

EMPTY_PREFIX_HASH = 0
"""Chained hash of the empty prefix."""

_SESSION_ID = re.compile(r"[A-Za-z0-9_-]{22}\Z")


class VerificationMode(enum.Enum):
    """How a proposal is verified (docs/design.md §3)."""

    COUPLED = "coupled"
    REJECTION = "rejection"


class Priority(enum.Enum):
    """What goes first when requests wait for room, from first to last."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


class TokenSource(enum.Enum):
    """Where an emitted token came from."""

    PLAIN = "plain"
    ACCEPTED = "accepted"
    RECOVERED = "recovered"
    BONUS = "bonus"


class FinishReason(enum.Enum):
    """Why a generation ended."""

    EOS = "eos"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    MAX_TOKENS = "max_tokens"
    CONTEXT_FULL = "context_full"


class Durability(enum.Enum):
    """What a stream does while the session store is away (docs/design.md §6)."""

    REQUIRE = "require"
    BEST_EFFORT = "best-effort"


class SessionState(enum.Enum):
    """What a session is doing."""

    RUNNING = "running"
    INTERRUPTED = "interrupted"
    IDLE = "idle"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn from the target's logits; ranges as in common.proto."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class GenerationSpec:
    """What a worker needs to know of a generation; fields as in worker.proto."""

    sampling: SamplingParams
    mode: VerificationMode = VerificationMode.COUPLED
    prompt_len: int = 1
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    logprobs: int | None = None

    @property
    def uses_distributions(self) -> bool:
        """Guesses travel with what they were sampled from (`rejection`, unless greedy)."""
        return self.mode is VerificationMode.REJECTION and not self.sampling.greedy

    def for_draft(self, vocab_size: int) -> "GenerationSpec":
        """What a draft with this vocabulary needs to know: it may end before the target's padding
        does, and nobody asks it for log probabilities."""
        fitting = tuple(i for i in self.stop_ids if i < vocab_size)
        return replace(self, stop_ids=fitting, logprobs=None)


@dataclass(frozen=True, slots=True)
class SparseDistribution:
    """Probability of ids[i] is weights[i] / sum(weights); ids increase, weights in [1, 65535]."""

    ids: tuple[int, ...]
    weights: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Proposal:
    """Guessed tokens after a base: a chain, or with `parents` a tree (outrider.trees)."""

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    distributions: tuple[SparseDistribution, ...] = ()
    proposer: str = ""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def length(self) -> int:
        """Positions that are guessed for: guesses of the longest path."""
        return max(trees.depths(self.parents), default=-1) + 1 if self.parents else len(self)

    @property
    def spine(self) -> "Proposal":
        """The chain that a tree starts with; a chain is its own."""
        if not self.parents:
            return self
        return self._with(range(trees.spine_length(self.parents)))

    def cut(self, length: int) -> "Proposal":
        """The guesses for the first `length` positions."""
        if not self.parents:
            return self if length >= len(self) else self._with(range(max(length, 0)))
        depths = trees.depths(self.parents)
        return self._with([node for node, depth in enumerate(depths) if depth < length])

    def within(self, length: int, alternatives: int) -> "Proposal":
        """The same, and no more guesses than a chain with so many alternatives each has: of a tree
        that is wider its spine."""
        cut = self.cut(length)
        return cut if len(cut) <= length * (1 + alternatives) else cut.spine

    def _with(self, nodes: Sequence[int]) -> "Proposal":
        """These guesses alone, in increasing order; the parents of each are among them."""
        place = {-1: -1} | {node: index for index, node in enumerate(nodes)}
        parents = tuple(place[self.parents[node]] for node in nodes) if self.parents else ()
        return Proposal(
            tuple(self.token_ids[node] for node in nodes),
            parents=() if trees.is_chain(parents) else parents,
            distributions=(
                tuple(self.distributions[node] for node in nodes) if self.distributions else ()
            ),
            proposer=self.proposer,
        )


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Natural-log probabilities under the unprocessed target logits; `top` is (id, logprob)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one verification: accepted guesses, then one token of the target's own.

    `num_proposed` counts positions that were guessed for: of a tree, those of its longest path.
    `run_ahead` tells of a guess for the place behind them, which was verified there in place of a
    bonus (None: there was none). If it was accepted it is the last token. It is counted by
    `num_guesses` and `num_survived` alone. `num_beside` guesses of a tree were verified beside
    those of its longest path.
    """

    token_ids: tuple[int, ...]
    num_accepted: int
    num_proposed: int
    logprobs: tuple[PositionLogprobs, ...] = ()
    run_ahead: bool | None = None
    num_beside: int = 0

    @property
    def num_guesses(self) -> int:
        """Guesses that were verified."""
        return self.num_proposed + (self.run_ahead is not None)

    @property
    def num_survived(self) -> int:
        """Guesses that were accepted."""
        return self.num_accepted + (self.run_ahead is True)

    @property
    def sources(self) -> tuple[TokenSource, ...]:
        if self.run_ahead:
            last = TokenSource.ACCEPTED
        elif not self.num_guesses:
            last = TokenSource.PLAIN
        elif self.num_accepted == self.num_guesses:
            last = TokenSource.BONUS
        else:
            last = TokenSource.RECOVERED
        return (TokenSource.ACCEPTED,) * self.num_accepted + (last,)


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """Where a target gets proposals by itself; fields as in worker.proto."""

    address: str
    num_speculative_tokens: int
    fan_out: int
    timeout_s: float
    end_len: int
    alternatives: int = 0


@dataclass(frozen=True, slots=True)
class DraftReport:
    """How a target came by a proposal; fields as in worker.proto."""

    wait_us: int = 0
    worker_us: int = 0
    compute_us: int = 0
    failed: bool = False
    dropped: int = 0
    hit: bool | None = None
    asked: int = 0
    prepared: int = 0
    rank: int = 0
    trip_us: int = 0
    took_us: int = 0


NOTHING_TO_REPORT = DraftReport()
"""Of a round that no draft had a part in."""


@dataclass(frozen=True, slots=True)
class Fence:
    """Who may speak for a session: the epoch and the nonce of its owner."""

    session_id: str
    epoch: int
    owner_nonce: int
    completion: int = 0


@dataclass(frozen=True, slots=True)
class WorkTiming:
    """Microseconds an entry spent queued and computing, the rows of its last pass, the tokens
    whose KV was there, and the rows in its passes that brought no logits."""

    queue_us: int = 0
    compute_us: int = 0
    batch_rows: int = 0
    cached_tokens: int = 0
    prompt_rows: int = 0


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Speculation, counted; values are added with `+`."""

    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    recovered: int = 0
    bonus: int = 0
    plain: int = 0
    dropped_proposals: int = 0
    fallback_rounds: int = 0
    buffer_hits: int = 0
    buffer_misses: int = 0
    proposed_by_position: tuple[int, ...] = field(default=())
    accepted_by_position: tuple[int, ...] = field(default=())

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over proposed; None where nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else None

    @property
    def buffer_hit_rate(self) -> float | None:
        """Verdicts prepared for over verdicts looked up; None where nothing was prepared."""
        looked_up = self.buffer_hits + self.buffer_misses
        return self.buffer_hits / looked_up if looked_up else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens per round, the recovered, bonus or plain one included."""
        tokens = self.accepted + self.recovered + self.bonus + self.plain
        return tokens / self.rounds if self.rounds else None

    def __add__(self, other: "SpeculationStats") -> "SpeculationStats":
        return SpeculationStats(
            rounds=self.rounds + other.rounds,
            proposed=self.proposed + other.proposed,
            accepted=self.accepted + other.accepted,
            recovered=self.recovered + other.recovered,
            bonus=self.bonus + other.bonus,
            plain=self.plain + other.plain,
            dropped_proposals=self.dropped_proposals + other.dropped_proposals,
            fallback_rounds=self.fallback_rounds + other.fallback_rounds,
            buffer_hits=self.buffer_hits + other.buffer_hits,
            buffer_misses=self.buffer_misses + other.buffer_misses,
            proposed_by_position=_add(self.proposed_by_position, other.proposed_by_position),
            accepted_by_position=_add(self.accepted_by_position, other.accepted_by_position),
        )


def _add(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    if not left or not right:
        return left or right
    short, long = sorted((left, right), key=len)
    return tuple(a + b for a, b in zip(short, long, strict=False)) + long[len(short) :]


def chain_hash(previous: int, token_ids: Iterable[int]) -> int:
    """Extend the 64-bit hash of a prefix by token ids, one at a time.

    The hash after token t is BLAKE2b-64 of (hash before, t as 4 bytes), little-endian, so that
    chain_hash(chain_hash(h, a), b) == chain_hash(h, a + b).
    """
    states = chain_states(previous, token_ids)
    return int.from_bytes(states[-1], "little") if states else previous


def chain_states(previous: int, token_ids: Iterable[int]) -> list[bytes]:
    """`chain_hash` after each of the token ids: 8 bytes each, little-endian."""
    state, states = previous.to_bytes(8, "little"), []
    for token_id in token_ids:
        state = blake2b(state + token_id.to_bytes(4, "little"), digest_size=8).digest()
        states.append(state)
    return states


def new_session_id() -> str:
    """22 characters of [A-Za-z0-9_-], 128 random bits; no dash first, which command lines would
    take for a flag."""
    session_id = secrets.token_urlsafe(16)
    return new_session_id() if session_id.startswith("-") else session_id


def is_session_id(text: str) -> bool:
    return _SESSION_ID.match(text) is not None


def new_nonce() -> int:
    """A non-zero random 63-bit number: owner nonces, incarnations, seeds."""
    return secrets.randbits(63) | 1
