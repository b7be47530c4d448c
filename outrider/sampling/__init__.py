"""Pure tensor maths of probabilities, noise and verification: no IO, no state, any device.

philox, noise     randomness as a function of (seed, stream, position, round start, token id)
ranking, logits   sampling parameters: raw logits -> normalised log-probabilities
verify            greedy and coupled picks, and acceptance by equality
block, chains     block verification against sparse draft distributions
sparse, draft     a draft's picks and truncated distributions
shards            picks of rows whose vocabulary is spread over several ranks
logprobs          log-probabilities to report
row_params        parameters as cpu_sampler and cuda_sampler read them, the same in fused kernels
"""

from outrider.sampling.block import (
    Acceptance,
    ChainBatch,
    accept_chains,
    draw_finals,
    race,
)
from outrider.sampling.chains import (
    BlockOutcome,
    Chain,
    pack_chains,
    usable_guesses,
    verify_block,
    verify_blocks,
)
from outrider.sampling.draft import (
    pick_coupled,
    sample_sparse,
    sample_sparse_many,
    sample_sparse_rows,
    truncate,
)
from outrider.sampling.logits import RowParams, mask_tokens, processed_log_probs
from outrider.sampling.logprobs import position_logprobs
from outrider.sampling.noise import (
    NoiseKeys,
    Stream,
    exponentials,
    noise_bits,
    noise_bits_torch,
    uniforms,
    uniforms_at,
)
from outrider.sampling.philox import philox_torch
from outrider.sampling.shards import join_candidates, shard_candidates
from outrider.sampling.sparse import SparseRows, is_well_formed, point_mass, truncate_rows
from outrider.sampling.verify import (
    coupled_picks,
    coupled_scores,
    greedy_picks,
    verify_tokens,
    verify_tokens_batch,
    verify_tree,
)

__all__ = [
    "Acceptance",
    "BlockOutcome",
    "Chain",
    "ChainBatch",
    "NoiseKeys",
    "RowParams",
    "SparseRows",
    "Stream",
    "accept_chains",
    "coupled_picks",
    "coupled_scores",
    "draw_finals",
    "exponentials",
    "greedy_picks",
    "is_well_formed",
    "join_candidates",
    "mask_tokens",
    "noise_bits",
    "noise_bits_torch",
    "pack_chains",
    "philox_torch",
    "pick_coupled",
    "point_mass",
    "position_logprobs",
    "processed_log_probs",
    "race",
    "sample_sparse",
    "sample_sparse_many",
    "sample_sparse_rows",
    "shard_candidates",
    "truncate",
    "truncate_rows",
    "uniforms",
    "uniforms_at",
    "usable_guesses",
    "verify_block",
    "verify_blocks",
    "verify_tokens",
    "verify_tokens_batch",
    "verify_tree",
]
