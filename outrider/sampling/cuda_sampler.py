"""Sampling parameters and the coupled race on a CUDA device: what `logits.py` and `verify.py` say,
in a few launches with no sort and no host sync, so that a CUDA graph can hold it.

A row is cut into blocks at fixed places, which a few programs share; the last program of a row to
finish (by a ticket) joins what all have found. Tokens are ranked by one integer, `_order`: log
prob, then id. The order of the last token that top_k or top_p keeps is found digit by digit, in one
histogram of counts or of probabilities a digit (radix select). Probabilities are added as integers
in units of 2^-60, so that a sum is exact in any order; what is left is the rounding of fp32 log
probs and `exp`, below 1e-6. Other sums are of blocks, joined in order. So no bit of a row depends
on other rows.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from outrider.sampling.cuda_noise import _exponentials_of, _long
from outrider.sampling.row_params import ROW_WORDS as ROW_WORDS
from outrider.sampling.row_params import fill_rows as fill_rows
from outrider.types import SamplingParams

MAX_VOCAB = 2**21
CANDIDATES = 8
"""How many tokens of a row `sample_candidates` finds."""

_BLOCK = 2048
_PROGRAMS = 528  # About four a multiprocessor.
_RACE_BLOCKS = 128
_WORDS_PER_BLOCK = 8

_WORDS = tl.constexpr(ROW_WORDS)
_ID_BITS = tl.constexpr(21)
_LEVELS = tl.constexpr(4)  # Digits of 12 bits: 27 of log prob and 21 of id.
_GROUP = tl.constexpr(64)
_BINS = tl.constexpr(4096)
_HALF = tl.constexpr(0x3F000000)  # The bits of 0.5.
_LOWEST = tl.constexpr(2**27 - 1)
_UNIT = tl.constexpr(2.0**60)
_NO_BORDER = tl.constexpr(2**62)
_ID = tl.constexpr(2**31 - 1)  # The bits of an id in a place in the race.
_TAKEN = tl.constexpr(-(2**63))  # Below any place.
_STATE = tl.constexpr(4)  # int64: order of the last token of top_k, of top_p; what is left; is cut
_STATS = tl.constexpr(4)  # float32: highest logit, log of the sum, of the kept sum; see _peaks
_TICKETS = tl.constexpr(16)


class SamplerInputs:
    """The parameters of up to `rows` rows, for who has no staging buffer of its own."""

    def __init__(self, rows: int, device: torch.device | str = "cuda") -> None:
        self._staging = torch.zeros(rows, ROW_WORDS, dtype=torch.int32).pin_memory()
        self.params = torch.zeros(rows, ROW_WORDS, dtype=torch.int32, device=device)

    def fill(self, specs: Sequence[tuple[SamplingParams, Sequence[int]]]) -> None:
        """Each sequence's parameters and the positions of its rows, in order; one copy.

        Whoever fills again must have seen a result of the pass before: the copy is asynchronous.
        """
        row = 0
        for sampling, positions in specs:
            fill_rows(self._staging.numpy(), row, sampling, positions)
            row += len(positions)
        self.params.copy_(self._staging, non_blocking=True)


def sample_rows(
    logits: Tensor,  # [rows, vocab] float32 or bfloat16, rows contiguous
    params: Tensor,  # [rows, ROW_WORDS] int32
    *,
    cuts: bool = True,
) -> Tensor:  # [rows] int64
    """`coupled_picks` of `processed_log_probs`; greedy rows: argmax, the lowest id among equals.

    `cuts=False` promises that no row has top_k, top_p or min_p, and leaves their launches out.
    """
    found = _find_cuts(logits, params, cuts)
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, _RACE_BLOCKS * _WORDS_PER_BLOCK)
    scores = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    _race[(rows, parts)](
        logits,
        logits.stride(0),
        params,
        vocab,
        found.state,
        found.stats,
        scores,
        ids,
        found.tickets,
        found.picks,
        CUTS=cuts,
        BLOCKS=_RACE_BLOCKS,
        PADDED=triton.next_power_of_2(parts),
    )
    return found.picks


def sample_candidates(
    logits: Tensor,  # [rows, vocab] float32 or bfloat16, rows contiguous
    params: Tensor,  # [rows, ROW_WORDS] int32
    *,
    cuts: bool = True,
) -> Tensor:  # [rows, CANDIDATES] int64
    """The first of each row in the race of `sample_rows`, in order, the lowest id among equals."""
    found = _find_cuts(logits, params, cuts)
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, _RACE_BLOCKS * _WORDS_PER_BLOCK)
    places = torch.empty(rows, parts, CANDIDATES, dtype=torch.int64, device=logits.device)
    candidates = torch.empty(rows, CANDIDATES, dtype=torch.int64, device=logits.device)
    _race_places[(rows, parts)](
        logits,
        logits.stride(0),
        params,
        vocab,
        found.state,
        found.stats,
        places,
        found.tickets,
        candidates,
        CUTS=cuts,
        BLOCKS=_RACE_BLOCKS,
        COUNT=CANDIDATES,
        PADDED=triton.next_power_of_2(parts * CANDIDATES),
    )
    return candidates


def processed_rows(
    logits: Tensor,  # [rows, vocab] float32 or bfloat16, rows contiguous
    params: Tensor,  # [rows, ROW_WORDS] int32
    *,
    cuts: bool = True,
    out: Tensor | None = None,  # [rows, vocab] float32, contiguous
) -> Tensor:  # [rows, vocab] float32
    """`processed_log_probs`: normalised, -inf where cut; a greedy row is a point mass."""
    found = _find_cuts(logits, params, cuts)
    rows, vocab = logits.shape
    output = out
    if output is None:
        output = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
    _write[(rows, triton.cdiv(vocab, _BLOCK))](
        logits,
        logits.stride(0),
        params,
        vocab,
        found.state,
        found.stats,
        found.picks,
        output,
        CUTS=cuts,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    return output


class _Found(NamedTuple):
    """What is known of each row before its tokens are looked at for the last time."""

    state: Tensor  # [rows, _STATE] int64
    stats: Tensor  # [rows, _STATS] float32
    picks: Tensor  # [rows] int64: of the highest logit, the lowest id among equals
    tickets: Tensor  # [rows, _TICKETS] int64


def _find_cuts(logits: Tensor, params: Tensor, cuts: bool) -> _Found:
    rows, vocab = logits.shape
    if vocab > MAX_VOCAB or logits.stride(1) != 1 or not params.is_contiguous():
        raise ValueError(f"logits {tuple(logits.shape)} or their parameters are not as declared")
    blocks = triton.cdiv(vocab, _BLOCK)
    span = triton.cdiv(blocks, min(blocks, max(1, _PROGRAMS // max(1, rows))))
    grid = (rows, triton.cdiv(blocks, span))

    def empty(columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, columns, dtype=dtype, device=logits.device)

    found = _Found(
        empty(_STATE.value, torch.int64),
        empty(_STATS.value, torch.float32),
        empty(1, torch.int64)[:, 0],
        torch.zeros(rows, _TICKETS.value, dtype=torch.int64, device=logits.device),
    )
    source = (logits, logits.stride(0), params, vocab, span, found.state, found.stats)
    sums = empty(blocks, torch.float64)
    padded = triton.next_power_of_2(blocks)
    _peaks[grid](
        *source,
        empty(blocks, torch.float32),
        empty(blocks, torch.int32),
        sums,
        found.tickets,
        found.picks,
        BLOCK=_BLOCK,
        PADDED=padded,
        num_warps=8,
    )
    if not cuts:
        return found
    bins = torch.zeros(rows, _BINS.value, dtype=torch.int64, device=logits.device)
    for by_mass in (0, 1):
        for level in range(_LEVELS.value):
            _narrow[grid](
                *source,
                bins,
                found.tickets,
                LEVEL=level,
                BY_MASS=by_mass,
                BLOCK=_BLOCK,
                num_warps=8,
            )
    _weigh[grid](*source, sums, found.tickets, BLOCK=_BLOCK, PADDED=padded, num_warps=8)
    return found


@triton.jit(do_not_specialize=["span"])  # type: ignore[untyped-decorator]
def _peaks(  # type: ignore[no-untyped-def]
    logits,
    stride,
    words,
    vocab,
    span,
    state,
    stats,
    tops,
    firsts,
    sums,
    tickets,
    picks,
    BLOCK: tl.constexpr,
    PADDED: tl.constexpr,
):
    """The highest logit of each row, where it stands, the log of the sum; which cuts there are."""
    row, part, blocks = tl.program_id(0), tl.program_id(1), tl.cdiv(vocab, BLOCK)
    temperature = _temperature(words, row)
    greedy = temperature == 0.0
    divisor = tl.where(greedy, 1.0, temperature)
    for block in range(part * span, tl.minimum((part + 1) * span, blocks)):
        ids = block * BLOCK + tl.arange(0, BLOCK)
        logit = _load(logits, stride, row, ids, vocab)
        top = tl.max(logit)
        # A block of nothing but -inf has no peak to subtract.
        gap = tl.where(logit == -float("inf"), logit, logit - top)
        tl.store(tops + row * blocks + block, top)
        tl.store(firsts + row * blocks + block, tl.min(tl.where(logit == top, ids, vocab - 1)))
        weight = libdevice.exp(tl.div_rn(gap, divisor)).to(tl.float64)
        tl.store(sums + row * blocks + block, tl.sum(weight))
    if _is_last(tickets, row, 0):
        there = tl.arange(0, PADDED)
        exists = there < blocks
        there += row * blocks
        peaks = tl.load(tops + there, mask=exists, other=-float("inf"))
        first = tl.load(firsts + there, mask=exists, other=vocab)
        total = tl.load(sums + there, mask=exists, other=0.0)
        peak = tl.max(peaks)
        total *= libdevice.exp(tl.div_rn(peaks - peak, divisor)).to(tl.float64)
        tl.store(picks + row, tl.min(tl.where(exists & (peaks == peak), first, vocab - 1)))
        log_sum = libdevice.log(tl.sum(total)).to(tl.float32)
        tl.store(stats + row * _STATS, peak)
        tl.store(stats + row * _STATS + 1, log_sum)
        top_k = tl.load(words + row * _WORDS + 1).to(tl.int64)
        # At least top_k tokens are not below the peak of the block of that rank, if there is one.
        rank = tl.sum((peaks[None, :] >= peaks[:, None]).to(tl.int32), 1)
        bound = tl.max(tl.where(exists & (rank >= top_k), peaks, -float("inf")))
        tl.store(stats + row * _STATS + 3, tl.div_rn(bound - peak, divisor) - log_sum)
        by_count = (top_k > 0) & (top_k < vocab) & (greedy == 0)
        by_mass = (_top_p(words, row) < 1.0) & (greedy == 0)
        by_peak = (_log_min_p(words, row) > -float("inf")) & (greedy == 0)
        tl.store(state + row * _STATE, tl.where(by_count, 0, _NO_BORDER))
        tl.store(state + row * _STATE + 1, tl.where(by_mass, 0, _NO_BORDER))
        tl.store(state + row * _STATE + 2, top_k)
        tl.store(state + row * _STATE + 3, (by_count | by_mass | by_peak).to(tl.int64))


@triton.jit(do_not_specialize=["span"])  # type: ignore[untyped-decorator]
def _narrow(  # type: ignore[no-untyped-def]
    logits,
    stride,
    words,
    vocab,
    span,
    state,
    stats,
    bins,
    tickets,
    LEVEL: tl.constexpr,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One more digit of the order of the last token that top_k (top_p, BY_MASS) keeps."""
    row, part, blocks = tl.program_id(0), tl.program_id(1), tl.cdiv(vocab, BLOCK)
    state += row * _STATE
    bins += row * _BINS
    border = tl.load(state + BY_MASS)  # Its digits so far.
    if border == _NO_BORDER:
        return
    last_of_top_k = tl.load(state)
    # What is below `lowest` is cut anyway; that saves most of the additions.
    lowest = tl.full([], -3.4028234663852886e38, tl.float32)
    if LEVEL == 0:
        if not BY_MASS:
            lowest = tl.maximum(lowest, tl.load(stats + row * _STATS + 3))
        elif last_of_top_k == _NO_BORDER:
            # All tokens below this together are less than what top_p cuts.
            least = libdevice.log((1.0 - _top_p(words, row)) / (2 * vocab))
            lowest = tl.maximum(lowest, least.to(tl.float32))
    for block in range(part * span, tl.minimum((part + 1) * span, blocks)):
        ids = block * BLOCK + tl.arange(0, BLOCK)
        value = _log_prob(logits, stride, words, stats, row, ids, vocab)
        taking, digit = _digit(_code(value), ids, border, LEVEL)
        taking &= value >= lowest
        if BY_MASS:
            taking &= _order(value, ids) <= last_of_top_k
        if tl.max(taking.to(tl.int32)) > 0:
            weight = (digit * 0 + 1).to(tl.int64)
            if BY_MASS:
                weight = tl.maximum((libdevice.exp(value) * _UNIT).to(tl.int64), 1)
            # Neighbouring digits lie in different cache lines: additions to one line are slow.
            digit = (digit % _GROUP) * _GROUP + digit // _GROUP
            low = tl.min(tl.where(taking, digit, _BINS))
            if low == tl.max(tl.where(taking, digit, -1)):
                tl.atomic_add(bins + low, tl.sum(tl.where(taking, weight, 0)), sem="relaxed")
            else:
                tl.atomic_add(bins + digit, weight, mask=taking, sem="relaxed")
    if _is_last(tickets, row, 1 + _LEVELS * BY_MASS + LEVEL):
        place = tl.arange(0, _GROUP)
        at = bins + place[:, None] * _GROUP + place[None, :]
        weights = tl.load(at)  # [low part of the digit, high part]
        tl.debug_barrier()
        tl.store(at, tl.zeros([_GROUP, _GROUP], tl.int64))
        left = tl.load(state + 2)
        if BY_MASS and LEVEL == 0:
            # What the top_k sum up to is what top_p counts in; else the row is normalised.
            mass = tl.sum(tl.sum(weights, 1)).to(tl.float64)
            mass = tl.where(last_of_top_k == _NO_BORDER, _UNIT, mass)
            left = tl.maximum((_top_p(words, row) * mass).to(tl.int64), 1)
        high, before = _find(tl.sum(weights, 0), left)
        left -= before
        low, before = _find(tl.sum(tl.where(place[None, :] == high, weights, 0), 1), left)
        tl.store(state + BY_MASS, border * _BINS + high * _GROUP + low)
        tl.store(state + 2, left - before)


@triton.jit(do_not_specialize=["span"])  # type: ignore[untyped-decorator]
def _weigh(  # type: ignore[no-untyped-def]
    logits,
    stride,
    words,
    vocab,
    span,
    state,
    stats,
    sums,
    tickets,
    BLOCK: tl.constexpr,
    PADDED: tl.constexpr,
):
    """The log of the sum of what is kept."""
    row, part, blocks = tl.program_id(0), tl.program_id(1), tl.cdiv(vocab, BLOCK)
    if tl.load(state + row * _STATE + 3) == 0:
        return
    top = -tl.load(stats + row * _STATS + 1)
    for block in range(part * span, tl.minimum((part + 1) * span, blocks)):
        ids = block * BLOCK + tl.arange(0, BLOCK)
        value = _log_prob(logits, stride, words, stats, row, ids, vocab)
        kept = _kept(value, ids, words, state, row, top)
        weight = tl.where(kept, libdevice.exp(value - top), 0.0).to(tl.float64)
        tl.store(sums + row * blocks + block, tl.sum(weight))
    if _is_last(tickets, row, 1 + 2 * _LEVELS):
        there = tl.arange(0, PADDED)
        weights = tl.load(sums + row * blocks + there, mask=there < blocks, other=0.0)
        tl.store(stats + row * _STATS + 2, libdevice.log(tl.sum(weights)).to(tl.float32))


@triton.jit  # type: ignore[untyped-decorator]
def _write(  # type: ignore[no-untyped-def]
    logits,
    stride,
    words,
    vocab,
    state,
    stats,
    picks,
    output,
    CUTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    line = output + row.to(tl.int64) * vocab
    if _temperature(words, row) == 0.0:
        point = tl.where(ids == tl.load(picks + row), 0.0, -float("inf"))
        tl.store(line + ids, point, mask=ids < vocab)
        return
    value = _processed(logits, stride, words, state, stats, row, ids, vocab, CUTS)
    tl.store(line + ids, value, mask=ids < vocab)


@triton.jit  # type: ignore[untyped-decorator]
def _race(  # type: ignore[no-untyped-def]
    logits,
    stride,
    words,
    vocab,
    state,
    stats,
    scores,
    winners,
    tickets,
    picks,
    CUTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """The token with the highest log prob - log(exponential)."""
    row, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    if _temperature(words, row) == 0.0:
        return
    ids = part * BLOCKS * 8 + tl.arange(0, BLOCKS * 8)
    score = _scores(logits, stride, words, state, stats, row, part, ids, vocab, CUTS, BLOCKS)
    best = tl.max(score)
    first = tl.min(tl.where(score == best, ids, vocab - 1))
    tl.store(scores + row * parts + part, best)
    tl.store(winners + row * parts + part, first)
    if _is_last(tickets, row, 2 + 2 * _LEVELS):
        there = tl.arange(0, PADDED)
        exists = there < parts
        bests = tl.load(scores + row * parts + there, mask=exists, other=-float("inf"))
        winner = tl.load(winners + row * parts + there, mask=exists, other=vocab)
        tl.store(picks + row, tl.min(tl.where(bests == tl.max(bests), winner, vocab - 1)))


@triton.jit  # type: ignore[untyped-decorator]
def _race_places(  # type: ignore[no-untyped-def]
    logits,
    stride,
    words,
    vocab,
    state,
    stats,
    places,
    tickets,
    candidates,
    CUTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
):
    """The COUNT tokens with the highest score; a greedy row's scores are its logits."""
    row, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    ids = part * BLOCKS * 8 + tl.arange(0, BLOCKS * 8)
    score = _load(logits, stride, row, ids, vocab)
    if _temperature(words, row) > 0.0:
        score = _scores(logits, stride, words, state, stats, row, part, ids, vocab, CUTS, BLOCKS)
    place = tl.arange(0, COUNT)
    found = _highest(_place(score, ids), COUNT)
    tl.store(places + (row * parts + part) * COUNT + place, found)
    if _is_last(tickets, row, 2 + 2 * _LEVELS):
        there = tl.arange(0, PADDED)
        exists = there < parts * COUNT
        joined = tl.load(places + row * parts * COUNT + there, mask=exists, other=_TAKEN)
        winners = (_highest(joined, COUNT) & _ID) ^ _ID
        tl.store(candidates + row * COUNT + place, winners)


@triton.jit  # type: ignore[untyped-decorator]
def _scores(  # type: ignore[no-untyped-def]
    logits,
    stride,
    words,
    state,
    stats,
    row,
    part,
    ids,
    vocab,
    CUTS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """log prob - log(exponential) of the tokens of one part of a row that is not greedy."""
    score = _processed(logits, stride, words, state, stats, row, ids, vocab, CUTS)
    if tl.max(score) > -float("inf"):  # Where nothing is kept no noise is made.
        score -= libdevice.log(_noise(words, row, part * BLOCKS, BLOCKS))
    return score


@triton.jit
def _place(score, ids):  # type: ignore[no-untyped-def]
    """A place in a race as an integer of 64 bits: high scores are high, then low ids."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)  # -0 equals 0.
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # Negative floats grow with their bits.
    return (ordered.to(tl.int64) << 32) | (ids ^ _ID).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def _highest(places, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The highest of some places that differ from each other, in order: [COUNT]."""
    turns = tl.arange(0, COUNT)
    found = tl.zeros([COUNT], tl.int64)
    for turn in range(COUNT):
        best = tl.max(places)
        found = tl.where(turns == turn, best, found)
        places = tl.where(places == best, _TAKEN, places)
    return found


@triton.jit
def _is_last(tickets, row, step):  # type: ignore[no-untyped-def]
    """Whether all other programs of the row have finished this step, and can be read."""
    tl.debug_barrier()
    ticket = tl.atomic_add(tickets + row * _TICKETS + step, 1, sem="acq_rel")
    return ticket == tl.num_programs(1) - 1


@triton.jit
def _find(weights, left):  # type: ignore[no-untyped-def]
    """The last place with weight that less than `left` comes before, and how much does."""
    place = tl.arange(0, _GROUP)
    before = tl.cumsum(weights, 0) - weights
    found = tl.max(tl.where((weights > 0) & (before < left), place, 0))
    return found, tl.sum(tl.where(place == found, before, 0))


@triton.jit
def _code(value):  # type: ignore[no-untyped-def]
    """A log prob as 27 bits, low is likely: the bits of a float that is never above 0.

    Only one token can have a log prob above -1/2, and one below -2^15 is a probability of 0 in any
    format: neither needs bits.
    """
    size = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.minimum(tl.maximum(size - _HALF, 0), _LOWEST)


@triton.jit
def _order(value, ids):  # type: ignore[no-untyped-def]
    """The rank as an integer of 48 bits: likely tokens first, equal ones by id."""
    return (_code(value).to(tl.int64) << _ID_BITS) | ids


@triton.jit  # type: ignore[untyped-decorator]
def _digit(code, ids, border, LEVEL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether the order begins with the digits of `border`, and its next digit; in 32 bits."""
    if LEVEL == 0:
        same, digit = code >= 0, code >> 15
    elif LEVEL == 1:
        same, digit = (code >> 15) == border.to(tl.int32), (code >> 3) & 0xFFF
    elif LEVEL == 2:
        same = (code >> 3) == border.to(tl.int32)
        digit = ((code & 7) << 9) | (ids >> 12)
    else:
        same = (code == (border >> 9).to(tl.int32)) & ((ids >> 12) == (border & 0x1FF).to(tl.int32))
        digit = ids & 0xFFF
    return same, digit


@triton.jit
def _kept(value, ids, words, state, row, top):  # type: ignore[no-untyped-def]
    state += row * _STATE
    ranked = _order(value, ids) <= tl.minimum(tl.load(state), tl.load(state + 1))
    return ranked & (value >= top + _log_min_p(words, row))


@triton.jit  # type: ignore[untyped-decorator]
def _processed(  # type: ignore[no-untyped-def]
    logits, stride, words, state, stats, row, ids, vocab, CUTS: tl.constexpr
):
    value = _log_prob(logits, stride, words, stats, row, ids, vocab)
    if CUTS:
        top = -tl.load(stats + row * _STATS + 1)
        kept = _kept(value, ids, words, state, row, top)
        cut = tl.where(kept, value - top - tl.load(stats + row * _STATS + 2), -float("inf"))
        value = tl.where(tl.load(state + row * _STATE + 3) == 0, value, cut)
    return value


@triton.jit
def _log_prob(logits, stride, words, stats, row, ids, vocab):  # type: ignore[no-untyped-def]
    """The log prob before any cut, rounded as `logits.py` rounds it."""
    logit = _load(logits, stride, row, ids, vocab)
    scaled = tl.div_rn(logit - tl.load(stats + row * _STATS), _temperature(words, row))
    return scaled - tl.load(stats + row * _STATS + 1)


@triton.jit
def _load(logits, stride, row, ids, vocab):  # type: ignore[no-untyped-def]
    line = logits + row.to(tl.int64) * stride
    return tl.load(line + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _noise(words, row, first_block, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Exponentials of 8 BLOCKS tokens, as `noise.exponentials` of the coupled stream (0)."""
    position = _long(words + row * _WORDS + 7)
    seed = _long(words + row * _WORDS + 5)
    return _exponentials_of(seed, position, position * 0, first_block, 0, BLOCKS)


@triton.jit
def _temperature(words, row):  # type: ignore[no-untyped-def]
    return tl.load(words + row * _WORDS).to(tl.float32, bitcast=True)


@triton.jit
def _top_p(words, row):  # type: ignore[no-untyped-def]
    return _long(words + row * _WORDS + 2).to(tl.float64, bitcast=True)


@triton.jit
def _log_min_p(words, row):  # type: ignore[no-untyped-def]
    return tl.load(words + row * _WORDS + 4).to(tl.float32, bitcast=True)
