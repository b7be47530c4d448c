"""Which target a prompt goes to: where its prefix is cached, unless too many are there already.

Pure. Three rules, in this order:

* No target gets more than 1.25 times the average load and one session (bounded loads: Mirrokni,
  Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads", SODA 2018). A prefix that
  everybody asks for spreads over as many targets as its load needs.
* Of those within the bound the one with the longest cached prefix, then one in the same zone.
* Among equals by rendezvous hashing of the first block that nobody has seen (Thaler and
  Ravishankar, 1998): orchestrators that know nothing of each other send the same prefix to the same
  target, and when a target comes or goes only its share moves. Prompts without such a block go
  where the load is least.
"""

import array
import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

BLOCK_TOKENS = 32
LOAD_FACTOR = 1.25
MAX_BLOCKS_A_PROMPT = 512
"""Beyond that a prompt's prefix is long enough to tell where it belongs."""
_MAX_TARGETS_A_BLOCK = 8


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that could take a session; `key` is its incarnation.

    `load` is in sessions of a worker of usual speed, `cached` in blocks of the prompt.
    """

    key: int
    load: float
    cached: int = 0
    near: bool = True


def choose(candidates: Sequence[Candidate], affinity: int | None = None) -> Candidate:
    """The worker for one more session. `affinity` is the hash to rank equals by; None: by load.

    There must be at least one candidate; of equals the first one is taken.
    """
    bound = LOAD_FACTOR * (sum(c.load for c in candidates) + 1) / len(candidates) + 1
    within = [c for c in candidates if c.load + 1 <= bound]

    def rank(candidate: Candidate) -> tuple[int, bool, float]:
        equal = -candidate.load if affinity is None else rendezvous(affinity, candidate.key)
        return candidate.cached, candidate.near, equal

    # The least loaded one is always within: it is at most average.
    return max(within, key=rank)


def rendezvous(affinity: int, key: int) -> int:
    """How much something belongs to a worker; the highest one has it."""
    return _hash(affinity.to_bytes(8, "little") + key.to_bytes(8, "little"))


def block_hashes(salt: str, token_ids: Sequence[int]) -> tuple[int, ...]:
    """Chained hashes of a prompt's full blocks, the same at every orchestrator. `salt` keeps those
    apart who share no cache."""
    last = _hash(salt.encode())
    hashes = []
    most = min(len(token_ids) // BLOCK_TOKENS, MAX_BLOCKS_A_PROMPT)
    packed = array.array("I", token_ids[: most * BLOCK_TOKENS]).tobytes()
    size = 4 * BLOCK_TOKENS
    for start in range(0, most * size, size):
        last = _hash(last.to_bytes(8, "little") + packed[start : start + size])
        hashes.append(last)
    return tuple(hashes)


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


class PrefixIndex:
    """Which targets prompts were sent to, by block. Bounded: what is unused for longest goes first.

    It holds what should be cached, not what is: targets forget too, and do not say so.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._targets: OrderedDict[int, tuple[int, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._targets)

    def cached(self, blocks: Sequence[int]) -> dict[int, int]:
        """For each target that has any, how many of a prompt's blocks it has, from the first on."""
        found: dict[int, int] = {}
        alive: set[int] | None = None
        for depth, block in enumerate(blocks, 1):
            here = self._targets.get(block)
            if here is None:
                break
            alive = set(here) if alive is None else alive & set(here)
            if not alive:
                break
            found |= dict.fromkeys(alive, depth)
        return found

    def add(self, blocks: Sequence[int], target: int) -> None:
        """A prompt was sent there."""
        for block in reversed(blocks):  # So that a prefix outlives what follows it.
            others = tuple(t for t in self._targets.get(block, ()) if t != target)
            self._targets[block] = (target, *others)[:_MAX_TARGETS_A_BLOCK]
            self._targets.move_to_end(block)
        while len(self._targets) > self._max_blocks:
            self._targets.popitem(last=False)

    def retain(self, targets: Iterable[int]) -> None:
        """Forget all targets but these."""
        known = frozenset(targets)
        for block in list(self._targets):
            left = tuple(t for t in self._targets[block] if t in known)
            if left:
                self._targets[block] = left
            else:
                del self._targets[block]


def first_unseen(blocks: Sequence[int], num_cached: int) -> int | None:
    """The hash to rank targets by where `num_cached` blocks is the most that any of them has."""
    if not blocks:
        return None
    return blocks[min(num_cached, len(blocks) - 1)]
