"""What a round brought."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Observation:
    """A round in tokens and seconds.

    `num_asked` are the guesses that the proposer was asked for: it may have fewer, or none.
    `draft_s` is the time that the round waited for its proposal, `round_s` that from verdict to
    verdict (0: the sum of the two waits). `batch_rows` are the rows of all sessions in the
    verifying pass (0: unknown). `hit` tells of rounds that an outcome buffer was asked for (None:
    there was none). `compute_s` is the pass alone, without waiting for it or for its reply (0:
    unknown). `proposal_s` is the time from asking for the proposal to having it, hidden or
    not (0: unknown). Where the buffer was asked, it held `prepared` tokens for the place where the
    verdict before had stopped (`after_bonus`: behind all its guesses), and on a hit that verdict's
    own token was of this `rank` among them. `run_ahead` tells of one more guess, verified in place
    of the bonus, whether it survived (None: there was none). `num_beside` guesses, alternatives
    say, had rows of the pass and no position of their own. `prompt_rows` of the rows were of
    prompts, whoever's: such a round says little of what the next one costs.
    """

    num_proposed: int
    num_accepted: int
    draft_s: float
    verify_s: float
    batch_rows: int = 0
    context_len: int = 0
    hit: bool | None = None
    round_s: float = 0.0
    compute_s: float = 0.0
    proposal_s: float = 0.0
    num_asked: int = 0
    prepared: int = 0
    rank: int = 0
    after_bonus: bool = False
    run_ahead: bool | None = None
    num_beside: int = 0
    prompt_rows: int = 0

    @property
    def target_s(self) -> float:
        """All of the round but the wait for the proposal."""
        return max(self.round_s - self.draft_s, 0.0) or self.verify_s

    @property
    def total_s(self) -> float:
        return self.round_s or self.draft_s + self.verify_s

    @property
    def num_rows(self) -> int:
        """Rows of the pass that were this session's."""
        return self.num_proposed + self.num_beside + 1

    @property
    def num_tokens(self) -> int:
        """With an own one, or a run-ahead guess in its place."""
        return self.num_accepted + 1

    @property
    def verified(self) -> tuple[int, int]:
        """Guesses that were verified, and those that survived."""
        ahead = self.run_ahead
        return self.num_proposed + (ahead is not None), self.num_accepted + (ahead is True)
