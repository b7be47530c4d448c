"""Verification by picks: temperature 0, and `coupled` at any temperature.

The target picks one token per row by a rule that does not look at the proposal, and its pick is
always what is emitted. A guess is accepted when it equals the pick, so the output is that of
plain decoding whatever was guessed. In `coupled` mode the pick is argmax(log prob + Gumbel
noise), the noise a function of seed, position in the log and token id alone; a draft that picks
by its own log probs with the same noise often picks the same token: for one position with
probability sum_x 1 / sum_y max(target(y)/target(x), draft(y)/draft(x)), which is at least
(1 - TV) / (1 + TV) (Daliri, Musco, Suresh 2024, "Coupling without Communication and Drafter-
Invariant Speculative Decoding").
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.sampling.noise import Ints, NoiseKeys, Stream, exponentials


def greedy_picks(
    logits: Tensor,  # [rows, vocab]
) -> Tensor:
    """argmax, the lowest id among equals: int64 [rows]."""
    return logits.argmax(-1)


def coupled_scores(
    log_probs: Tensor,  # [rows, vocab] or a shard of the vocabulary
    seeds: Ints,  # [rows]
    positions: Ints,  # [rows]
    first: int = 0,
) -> Tensor:
    """log prob - log(exponential), fp32 [rows, vocab]; column 0 is global token id `first`."""
    keys = NoiseKeys.coupled(seeds, positions)
    noise = exponentials(Stream.COUPLED, keys, log_probs.shape[-1], first, log_probs.device)
    return log_probs - noise.log_()


def coupled_picks(
    log_probs: Tensor,  # [rows, vocab] processed log-probabilities
    seeds: Ints,  # [rows]
    positions: Ints,  # [rows] where in the log the token will stand
) -> Tensor:
    """The Gumbel-max pick of each row, the lowest id among equals: int64 [rows].

    Distributed as exp(log_probs): exponential races (Gumbel 1954; Maddison et al. 2014).
    """
    return coupled_scores(log_probs, seeds, positions).argmax(-1)


def verify_tokens(target_picks: Sequence[int], proposal_ids: Sequence[int]) -> int:
    """How many guesses are accepted: those before the first that is not the target's pick.

    With n accepted, proposal_ids[:n] and then target_picks[n] are emitted. Needs a pick for
    each guess and one more.
    """
    for index, guess in enumerate(proposal_ids):
        if guess != target_picks[index]:
            return index
    return len(proposal_ids)


def verify_tree(
    target_picks: Sequence[int],  # the base's, then one at each node
    proposal_ids: Sequence[int],
    parents: Sequence[int],  # as in outrider.trees
) -> list[int]:
    """The nodes that are accepted, from a child of the base downwards.

    From each node on, the child that holds the target's pick there is accepted; where there is none
    the walk ends, and the pick there is the last token emitted (Miao et al. 2024, "SpecInfer:
    Accelerating Large Language Model Serving with Tree-based Speculative Inference and
    Verification", VerifyGreedy). So the tokens emitted are the picks at the base and at the nodes
    returned, whatever the tree. Of equal siblings the first counts.
    """
    nodes = zip(parents, proposal_ids, strict=True)
    child = {key: node for node, key in reversed(list(enumerate(nodes)))}
    path: list[int] = []
    pick = target_picks[0]
    while (node := child.get((path[-1] if path else -1, pick))) is not None:
        path.append(node)
        pick = target_picks[node + 1]
    return path


def verify_tokens_batch(
    target_picks: Tensor,  # [batch, width + 1]
    proposal_ids: Tensor,  # [batch, width], anything beyond num_guesses
    num_guesses: Tensor,  # [batch]
) -> Tensor:
    """`verify_tokens` of a padded batch on its device: int64 [batch]."""
    width = proposal_ids.shape[-1]
    is_guess = torch.arange(width, device=proposal_ids.device) < num_guesses[:, None]
    return ((proposal_ids == target_picks[:, :width]) & is_guess).long().cumprod(-1).sum(-1)
