"""Block verification on a CUDA device, so that a CUDA graph can hold it: what `block.py` says, in
three launches with no host sync.

A program goes along each chain and finds how many guesses stand. Then the vocabulary is cut at
fixed places: each part finds the first to arrive of the residual, and of the target, which the
last kernel joins.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice
from triton.language.random import philox_impl

from outrider.sampling.cuda_noise import _exponentials_of, _long, _uniform
from outrider.sampling.noise import Stream
from outrider.types import MAX_SPARSE_ENTRIES

KEY_WORDS = 6
"""int32 words of a chain's noise keys: seed, base length, round start; each two, low first."""

_BLOCKS = 128  # Of the noise: 8 tokens each.
_KEYS = tl.constexpr(KEY_WORDS)
_EMPTY = tl.constexpr(1e-30)  # As in `block.py`.


class DeviceChains(NamedTuple):
    """Chains of several sequences on a device. Guess i of a chain, and the distribution that it was
    sampled from, stand at the number of the row that decides about it."""

    first_rows: Tensor  # [chains] int32
    lengths: Tensor  # [chains] int32: guesses; below 0: no chain
    bonuses: Tensor  # [chains] int32: whether there is a row after the last guess
    keys: Tensor  # [chains, KEY_WORDS] int32
    guesses: Tensor  # [rows] int32
    ids: Tensor  # [rows, MAX_SPARSE_ENTRIES] int32
    weights: Tensor  # [rows, MAX_SPARSE_ENTRIES] int32


def decide_chains(
    log_probs: Tensor,  # [rows, vocab] float32 processed, contiguous
    chains: DeviceChains,
) -> Tensor:  # [chains, 2] int64
    """How many guesses of each chain are accepted, and the token drawn then; below 0 where all are
    and there is no bonus, or where there is no chain.

    The chains are such as `usable_guesses` has nothing against.
    """
    vocab = log_probs.shape[1]
    count = len(chains.lengths)
    parts = triton.cdiv(vocab, _BLOCKS * 8)
    device = log_probs.device
    found = torch.empty(count, 2, dtype=torch.int64, device=device)
    scales = torch.empty(count, dtype=torch.float64, device=device)
    # Of the residual, then of the target.
    arrivals = torch.empty(count, parts, 2, dtype=torch.float32, device=device)
    tokens = torch.empty(count, parts, 2, dtype=torch.int64, device=device)
    highest = torch.empty(count, parts, dtype=torch.float32, device=device)
    _accept[(count,)](
        log_probs,
        vocab,
        *chains,
        found,
        scales,
        STREAM=int(Stream.ACCEPT),
        ENTRIES=MAX_SPARSE_ENTRIES,
        num_warps=2,
    )
    _race_finals[(count, parts)](
        log_probs,
        vocab,
        *chains,
        found,
        scales,
        arrivals,
        tokens,
        highest,
        STREAM=int(Stream.RESIDUAL),
        ENTRIES=MAX_SPARSE_ENTRIES,
        BLOCKS=_BLOCKS,
    )
    _join_finals[(count,)](
        chains.lengths,
        chains.bonuses,
        found,
        arrivals,
        tokens,
        highest,
        parts,
        PADDED=triton.next_power_of_2(parts),
    )
    return found


@triton.jit  # type: ignore[untyped-decorator]
def _accept(  # type: ignore[no-untyped-def]
    log_probs,
    vocab,
    first_rows,
    lengths,
    bonuses,
    keys,
    guesses,
    all_ids,
    all_weights,
    found,
    scales,
    STREAM: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """The largest i with uniform_i <= h_i, and p there."""
    chain = tl.program_id(0)
    length = tl.load(lengths + chain)
    first = tl.load(first_rows + chain)
    entry = tl.arange(0, ENTRIES)
    scale = tl.full([], 1.0, tl.float64)
    accepted = length * 0
    scale_there = tl.full([], 1.0, tl.float64)
    for index in range(length):
        row = (first + index).to(tl.int64)
        ids = tl.load(all_ids + row * ENTRIES + entry)
        weights = tl.load(all_weights + row * ENTRIES + entry)
        draft = weights.to(tl.float64) / tl.maximum(tl.sum(weights), 1).to(tl.float64)
        target = libdevice.exp(tl.load(log_probs + row * vocab + ids).to(tl.float64))
        target = tl.where(weights > 0, target, 0.0)
        outside = tl.maximum(1.0 - tl.sum(target), 0.0)
        mass = scale * outside + tl.sum(tl.maximum(scale * target - draft, 0.0))
        whole = mass + 1.0 - scale
        limit = tl.where(whole > 0.0, mass / whole, 1.0)
        uniform = _accept_uniform(keys, chain, index - 1, STREAM)  # Of the guess before.
        passed = (index > 0) & (uniform <= limit)
        accepted = tl.where(passed, index, accepted)
        scale_there = tl.where(passed, scale, scale_there)
        guess = tl.load(guesses + row)
        at_guess = (ids == guess) & (weights > 0)
        ratio = tl.sum(tl.where(at_guess, target, 0.0)) / tl.sum(tl.where(at_guess, draft, 0.0))
        scale = tl.minimum(scale * ratio, 1.0)
    passed = (length > 0) & (_accept_uniform(keys, chain, length - 1, STREAM) <= scale)
    accepted = tl.where(passed, length, accepted)
    scale_there = tl.where(passed, scale, scale_there)
    tl.store(found + 2 * chain, accepted.to(tl.int64))
    tl.store(scales + chain, scale_there)


@triton.jit  # type: ignore[untyped-decorator]
def _race_finals(  # type: ignore[no-untyped-def]
    log_probs,
    vocab,
    first_rows,
    lengths,
    bonuses,
    keys,
    guesses,
    all_ids,
    all_weights,
    found,
    scales,
    arrivals,
    tokens,
    highest,
    STREAM: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Who arrives first in one part of the vocabulary: in the residual, and in the target."""
    chain, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    length = tl.load(lengths + chain)
    accepted = tl.load(found + 2 * chain)
    if length < accepted + 1 - (tl.load(bonuses + chain) > 0):
        return
    row = tl.load(first_rows + chain) + accepted
    first = part * BLOCKS * 8
    ids = first + tl.arange(0, BLOCKS * 8)
    inside = ids < vocab
    value = tl.load(log_probs + row * vocab + ids, mask=inside, other=-float("inf"))
    target = libdevice.exp(value)
    seed = _long(keys + chain * _KEYS)
    position = _long(keys + chain * _KEYS + 2) + accepted
    start = _long(keys + chain * _KEYS + 4)
    noise = _exponentials_of(seed, position, start, part * BLOCKS, STREAM, BLOCKS)
    at = (chain * parts + part) * 2
    _store_first(arrivals + at + 1, tokens + at + 1, noise, target, ids, vocab)
    if accepted == length:
        return
    scaled = target * tl.load(scales + chain).to(tl.float32)
    residual = scaled
    entry = tl.arange(0, ENTRIES)
    weights = tl.load(all_weights + row * ENTRIES + entry)
    total = tl.maximum(tl.sum(weights), 1).to(tl.float64)
    for each in range(ENTRIES):
        token = tl.load(all_ids + row * ENTRIES + each)
        weight = tl.load(all_weights + row * ENTRIES + each)
        if (weight > 0) & (token >= first) & (token < first + BLOCKS * 8):
            draft = weight.to(tl.float64) / total
            covered = tl.minimum(draft, scaled.to(tl.float64)).to(tl.float32)
            residual = tl.where(ids == token, scaled - covered, residual)
    tl.store(highest + chain * parts + part, tl.max(residual))
    _store_first(arrivals + at, tokens + at, noise, residual, ids, vocab)


@triton.jit  # type: ignore[untyped-decorator]
def _join_finals(  # type: ignore[no-untyped-def]
    lengths,
    bonuses,
    found,
    arrivals,
    tokens,
    highest,
    parts,
    PADDED: tl.constexpr,
):
    chain = tl.program_id(0)
    length = tl.load(lengths + chain)
    accepted = tl.load(found + 2 * chain)
    if length < accepted + 1 - (tl.load(bonuses + chain) > 0):
        tl.store(found + 2 * chain + 1, -1)
        return
    there = tl.arange(0, PADDED)
    exists = there < parts
    of_target = (accepted == length).to(tl.int32)
    if accepted < length:
        most = tl.load(highest + chain * parts + there, mask=exists, other=0.0)
        of_target = (tl.max(most) <= _EMPTY).to(tl.int32)
    at = (chain * parts + there) * 2 + of_target
    arrival = tl.load(arrivals + at, mask=exists, other=float("inf"))
    token = tl.load(tokens + at, mask=exists, other=2**31 - 1)
    winner = tl.min(tl.where(arrival == tl.min(arrival), token, 2**31 - 1))
    tl.store(found + 2 * chain + 1, winner)


@triton.jit
def _store_first(arrival, token, noise, weights, ids, vocab):  # type: ignore[no-untyped-def]
    """The first to arrive at noise / weight, the lowest id among equals."""
    arrives = tl.where(weights > 0.0, tl.div_rn(noise, weights), float("inf"))
    best = tl.min(arrives)
    tl.store(arrival, best)
    winner = tl.min(tl.where(arrives == best, ids, 2**31 - 1))
    tl.store(token, tl.minimum(winner, vocab - 1).to(tl.int64))


@triton.jit  # type: ignore[untyped-decorator]
def _accept_uniform(keys, chain, guess, STREAM: tl.constexpr):  # type: ignore[no-untyped-def]
    """uniform of a guess, counted from 0."""
    seed = _long(keys + chain * _KEYS).to(tl.uint64)
    position = (_long(keys + chain * _KEYS + 2) + guess).to(tl.uint64)
    zero = position * 0
    start = _long(keys + chain * _KEYS + 4).to(tl.uint64)
    a, _, _, _ = philox_impl(zero + 1, position, start, zero, seed, zero + STREAM, 10)
    return _uniform(a & 0xFFFFFFFF).to(tl.float64)
