"""Tokens drawn from logits, and the loop that feeds each drawn token to the next pass.

Both tiers draw: the target its own token at every row of a verification, the draft its guesses.
"""

import itertools
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from outrider.engine.rows import Draw, Drawn, Output, Rows, branch_places
from outrider.sampling import (
    RowParams,
    SparseRows,
    coupled_picks,
    coupled_scores,
    cpu_sampler,
    greedy_picks,
    mask_tokens,
    processed_log_probs,
    sample_sparse_rows,
    truncate_rows,
)
from outrider.types import GenerationSpec, SamplingParams


class Forward(Protocol):
    """What runs passes, and copies KV blocks between them."""

    @property
    def block_tokens(self) -> int:
        """Tokens of a KV block."""

    def forward(self, batch: Tokens[Rows]) -> Tensor:  # [logits rows of all, vocab] float32
        """Logits of the rows, in the order of the batch."""

    def copy_blocks(self, pairs: Tokens[tuple[int, int]]) -> None:
        """Copy the KV of whole blocks, of all layers: (from, to)."""


Pick = Callable[[Tensor, Tokens[tuple[SamplingParams, int]]], Tensor]
"""The coupled pick of each row: logits, and parameters and position of each, to [rows] int64."""


@torch.inference_mode()
def run(batch: Tokens[Rows], runner: Forward, pick: Pick | None = None) -> Output:
    """One pass over the batch, and the further ones that its draws ask for.

    With a `pick` of its own a runner whose logits are a part of the vocabulary draws what
    `is_pick` says.
    """
    pick = pick or picks_of
    computed = [rows for rows in batch if rows.token_ids]
    logits = runner.forward(computed) if computed else torch.empty(0)
    drawn = [Drawn() if rows.draw else None for rows in batch]
    chains = _start_chains(batch, drawn, logits, pick)
    going = chains + _start_branches(batch, drawn, logits, runner)
    while going := [chain for chain in going if chain.left > 0]:
        # Logits are valid until the next pass, so everything of the last one is drawn by now.
        passed = runner.forward([chain.next_rows() for chain in going])
        _draw(passed, [_Row(chain.draw, chain.drawn, chain.position) for chain in going], pick)
        for chain in going:
            chain.left -= 1
    return Output(logits, drawn)


_RunAhead = dict[tuple[int, int], Drawn]
"""Tokens of branches that run ahead, by entry (the id of its rows) and accepted guesses."""


@dataclass(slots=True)
class Chain:
    """Tokens that follow each other: the last one drawn, at `position`, is fed to the next pass."""

    draw: Draw
    drawn: Drawn
    blocks: Tokens[int]
    position: int
    left: int
    """Passes to come."""

    def next_rows(self) -> Rows:
        position, self.position = self.position, self.position + 1
        return Rows(self.drawn.token_ids[-1:], position, self.blocks, 1)


def start_sparse(
    batch: Tokens[Rows],
    own: Tokens[Drawn],
    likeliest: Tokens[list[int]],
    block_tokens: int,
) -> tuple[list[Drawn | None], list[tuple["Chain", tuple[int, int] | None]]]:
    """Of a batch that leaves distributions, once a guess at every row of logits is drawn (`own`),
    and if there are branches its `likeliest` tokens are known: what each entry has drawn, and where
    its draws go on, with the KV block to copy before."""
    drawn = [Drawn() if rows.draw else None for rows in batch]
    items = _entries(batch, drawn, branching=True)
    firsts = dict(zip(map(id, batch), _first_rows(batch), strict=True))
    ahead = {
        (id(rows), branch.num_accepted): own[firsts[id(rows)] + branch.num_accepted]
        for rows, draw, _ in items
        for branch in draw.branches
        if branch.run_ahead
    }
    going: list[tuple[Chain, tuple[int, int] | None]] = []
    for rows, draw, result in _entries(batch, drawn, branching=False):
        first = firsts[id(rows)]
        for each in own[first : first + rows.num_logits]:
            result.token_ids += each.token_ids
            result.distributions += each.distributions
        going.append((Chain(draw, result, rows.blocks, draw.base_len, draw.steps - 1), None))
    if items:
        rows_of = [
            list(likeliest[firsts[id(rows)] : firsts[id(rows)] + rows.num_logits])
            for rows, _, _ in items
        ]
        for number, place, token in _taken(items, ahead):
            rows_of[number][place] = [other for other in rows_of[number][place] if other != token]
        ranked = iter(itertools.chain.from_iterable(rows_of))
        going += _branch_chains(items, ranked, ahead, block_tokens)
    return drawn, going


def _first_rows(batch: Tokens[Rows]) -> list[int]:
    """Of each entry the first of its rows of logits among those of all."""
    return [0, *itertools.accumulate(rows.num_logits for rows in batch)][: len(batch)]


def is_pick(draw: Draw) -> bool:
    """Whether all it asks for are picks among all tokens: nothing is masked (min_tokens), cut off
    or ranked, and no distribution or log probability is looked at."""
    spec = draw.spec
    looks = spec.uses_distributions or spec.logprobs is not None
    ranked = draw.branches or draw.alternatives
    return not (bans(spec, draw.base_len) or looks or ranked or has_cuts(spec.sampling))


def has_cuts(sampling: SamplingParams) -> bool:
    """Whether tokens are cut off (top_k, top_p, min_p), which takes a look at all of them."""
    cuts = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0
    return cuts and not sampling.greedy


def _start_chains(
    batch: Tokens[Rows], drawn: Tokens[Drawn | None], logits: Tensor, pick: Pick
) -> list[Chain]:
    """Draw for the sequences themselves."""
    items = _entries(batch, drawn, branching=False)
    if items:
        _draw(
            _rows_of(batch, logits, [rows for rows, _, _ in items]),
            [
                _Row(draw, result, position)
                for rows, draw, result in items
                for position in rows.drawn_positions(draw)
            ],
            pick,
        )
    return [
        Chain(draw, result, rows.blocks, draw.base_len, draw.steps - 1)
        for rows, draw, result in items
    ]


def _start_branches(
    batch: Tokens[Rows], drawn: Tokens[Drawn | None], logits: Tensor, runner: Forward
) -> list[Chain]:
    """Each branch takes its token from the row that it branches off at."""
    items = _entries(batch, drawn, branching=True)
    if not items:
        return []
    asking = [item for item in items if not item[0].known]
    own_logits = _rows_of(batch, logits, [rows for rows, _, _ in asking])
    ahead = _run_ahead(own_logits, asking)
    ranked = iter(_candidates(own_logits, asking, ahead))
    chains = _branch_chains(items, ranked, ahead, runner.block_tokens)
    runner.copy_blocks([copied for _, copied in chains if copied])
    return [chain for chain, _ in chains]


def _branch_chains(
    items: Tokens[tuple[Rows, Draw, Drawn]],
    ranked: Iterator[list[int]],
    ahead: _RunAhead,
    block_tokens: int,
) -> list[tuple[Chain, tuple[int, int] | None]]:
    """How each branch goes on, and the KV block to copy before (from, to); `ranked` are the tokens
    that may follow at each row of those who have none known."""
    chains = []
    for rows, draw, result in items:
        candidates = rows.known or [next(ranked) for _ in range(rows.num_logits)]
        places = branch_places(rows, block_tokens)
        for branch, place in zip(draw.branches, places, strict=True):
            if branch.run_ahead:
                own = ahead[id(rows), branch.num_accepted]
            else:
                own = Drawn([candidates[branch.num_accepted][branch.rank]])
            result.branches.append(own)
            # A branch is a round of its own, for what its noise is keyed by.
            round_start = replace(draw, base_len=place.start + 1, branches=())
            chain = Chain(round_start, own, place.blocks, place.start, draw.steps)
            chains.append((chain, place.copied))
    return chains


def _entries(
    batch: Tokens[Rows], drawn: Tokens[Drawn | None], *, branching: bool
) -> list[tuple[Rows, Draw, Drawn]]:
    return [
        (rows, rows.draw, result)
        for rows, result in zip(batch, drawn, strict=True)
        if rows.draw is not None and result is not None and bool(rows.draw.branches) is branching
    ]


def _rows_of(batch: Tokens[Rows], logits: Tensor, chosen: Tokens[Rows]) -> Tensor:
    """The logits of some entries of the batch."""
    wanted_rows = sum([rows.num_logits for rows in chosen])
    if wanted_rows == len(logits):
        return logits
    if wanted_rows == 0:
        return logits[:0]
    parts = torch.split(logits, [rows.num_logits for rows in batch])
    wanted = {id(rows) for rows in chosen}
    return torch.cat([part for part, rows in zip(parts, batch, strict=True) if id(rows) in wanted])


def _run_ahead(
    logits: Tensor,  # [logits rows of all items, vocab]
    items: Tokens[tuple[Rows, Draw, Drawn]],
) -> _RunAhead:
    """Draw the tokens of branches that run ahead."""
    found: _RunAhead = {}
    chosen, drawing = [], []
    first = 0
    for entry, draw, _ in items:
        for branch in draw.branches:
            if branch.run_ahead:
                own = found[id(entry), branch.num_accepted] = Drawn()
                chosen.append(first + branch.num_accepted)
                # Another guess of the round at the base: noise of a round that starts here would
                # come again in the one that follows where the last guess before it is recovered.
                draw_one = replace(draw, branches=(), alternatives=0)
                drawing.append(_Row(draw_one, own, draw.base_len + branch.num_accepted))
        first += entry.num_logits
    if chosen:
        _draw(logits[chosen], drawing, picks_of)
    return found


def _candidates(
    logits: Tensor,  # [logits rows of all items, vocab]
    items: Tokens[tuple[Rows, Draw, Drawn]],
    ahead: _RunAhead,
) -> list[list[int]]:
    """For each row the tokens that may follow there, likeliest first, as far as a branch asks.

    What a sequence, or its branch that runs ahead, has at the place already is left out.
    """
    if not items:
        return []
    rows = [
        (draw.spec, draw.base_len + i) for entry, draw, _ in items for i in range(entry.num_logits)
    ]
    scores = _scores(masked(logits, rows), rows)
    firsts = [0, *itertools.accumulate(entry.num_logits for entry, _, _ in items)]
    taken = _taken(items, ahead)
    if taken:
        at = [firsts[number] + place for number, place, _ in taken]
        scores[at, [token for _, _, token in taken]] = -torch.inf
    most = 1 + max(branch.rank for _, draw, _ in items for branch in draw.branches)
    ranked: list[list[int]] = scores.topk(most).indices.tolist()
    return ranked


def _taken(items: Tokens[tuple[Rows, Draw, Drawn]], ahead: _RunAhead) -> list[tuple[int, int, int]]:
    """What a sequence, or its branch that runs ahead, has at a place already: the number of the
    item, the place among its rows of logits, the token."""
    found = []
    for number, (entry, _, _) in enumerate(items):
        standing = entry.token_ids[len(entry.token_ids) - entry.num_logits + 1 :]
        found += [(number, place, token) for place, token in enumerate(standing)]
        for place in range(entry.num_logits):
            if own := ahead.get((id(entry), place)):
                found.append((number, place, own.token_ids[0]))
    return found


def _scores(
    logits: Tensor,  # [rows, vocab] with what is banned at -inf
    rows: Tokens[tuple[GenerationSpec, int]],  # and the position that each decides about
) -> Tensor:  # [rows, vocab]
    """How likely each token follows. In `coupled` mode a token is as likely as its noise makes it:
    the target knows the same noise."""
    scores = logits.clone()
    drawing = [i for i, (spec, _) in enumerate(rows) if not spec.sampling.greedy]
    if drawing:
        chosen = [rows[i] for i in drawing]
        scores[drawing] = log_probs_of(logits[drawing], [(s.sampling, 1) for s, _ in chosen])
    noisy = [i for i in drawing if not rows[i][0].uses_distributions]
    if noisy:
        chosen = [rows[i] for i in noisy]
        scores[noisy] = coupled_scores(
            scores[noisy], [s.sampling.seed for s, _ in chosen], [place for _, place in chosen]
        )
    return scores


class _Row(NamedTuple):
    """One row of logits: whose it is, and which position of the log it decides about."""

    draw: Draw
    drawn: Drawn
    position: int


def _draw(logits: Tensor, rows: Tokens[_Row], pick: Pick) -> None:
    """Draw at each row; logits [rows, vocab]."""
    logits = masked(logits, [(row.draw.spec, row.position) for row in rows])
    coupled: list[int] = []
    sampled: list[int] = []
    for i, row in enumerate(rows):
        (sampled if row.draw.spec.uses_distributions else coupled).append(i)
    if coupled:
        chosen = [rows[i] for i in coupled]
        params = [(row.draw.spec.sampling, row.position) for row in chosen]
        of_chosen = logits[coupled] if sampled else logits
        picks = pick(of_chosen, params)
        _append(chosen, picks)
        _append_alternatives(chosen, picks, of_chosen)
    if sampled:
        _sample(logits[sampled] if coupled else logits, [rows[i] for i in sampled])


def picks_of(
    logits: Tensor,  # [rows, vocab]
    rows: Tokens[tuple[SamplingParams, int]],  # and the position that each decides about
) -> Tensor:  # [rows] int64
    """The coupled pick of each row, which for a greedy row is its argmax."""
    if cpu_sampler.takes(logits):
        return cpu_sampler.sample_rows(logits, cpu_sampler.pack_rows(rows))
    if all(sampling.greedy for sampling, _ in rows):
        return greedy_picks(logits)
    # Greedy rows are point masses here, so noise changes nothing about them.
    log_probs = log_probs_of(logits, [(sampling, 1) for sampling, _ in rows])
    return coupled_picks(log_probs, [s.seed for s, _ in rows], [position for _, position in rows])


def log_probs_of(
    logits: Tensor,  # [rows, vocab]
    specs: Tokens[tuple[SamplingParams, int]],  # and the number of rows of each, in order
) -> Tensor:  # [rows, vocab] float32
    """`processed_log_probs`, by the same kernels as the picks where there are kernels."""
    rows = [(sampling, 0) for sampling, count in specs for _ in range(count)]
    if logits.is_cuda:
        from outrider.sampling import cuda_sampler  # Needs Triton, which a CPU build lacks.

        params = cpu_sampler.pack_rows(rows).to(logits.device)
        return cuda_sampler.processed_rows(logits, params)
    if cpu_sampler.takes(logits):
        return cpu_sampler.processed_rows(logits, cpu_sampler.pack_rows(rows))
    return processed_log_probs(logits, RowParams.build(specs, logits.device))


def _sample(logits: Tensor, rows: Tokens[_Row]) -> None:
    log_probs = log_probs_of(logits, [(row.draw.spec.sampling, 1) for row in rows])
    truncated: SparseRows = truncate_rows(log_probs.exp())
    picks = sample_sparse_rows(
        truncated,
        [row.draw.spec.sampling.seed for row in rows],
        [row.draw.base_len for row in rows],
        [row.position for row in rows],
    )
    for row, distribution in zip(rows, truncated.unpack(), strict=True):
        row.drawn.distributions.append(distribution)
    _append(rows, picks)


def _append(rows: Tokens[_Row], picks: Tensor) -> None:
    for row, pick in zip(rows, picks.tolist(), strict=True):
        row.drawn.token_ids.append(pick)


def _append_alternatives(rows: Tokens[_Row], picks: Tensor, logits: Tensor) -> None:
    """Note what nearly was picked, where it is asked for; picks [rows], logits [rows, vocab]."""
    asking = [i for i, row in enumerate(rows) if row.draw.alternatives]
    if not asking:
        return
    chosen, picked = [rows[i] for i in asking], picks[asking]
    scores = _scores(logits[asking], [(row.draw.spec, row.position) for row in chosen])
    scores.scatter_(1, picked[:, None], torch.inf)  # First, even where all others are cut off.
    most = max(row.draw.alternatives for row in chosen)
    ranked: list[list[int]] = scores.topk(1 + most).indices.tolist()
    for row, (_, *others) in zip(chosen, ranked, strict=True):
        row.drawn.alternatives.append(others[: row.draw.alternatives])


def masked(
    logits: Tensor,  # [rows, vocab]
    rows: Tokens[tuple[GenerationSpec, int]],  # and the position that each decides about
) -> Tensor:
    """Ban stop ids at positions where min_tokens is not reached, as decoding one by one would."""
    indices: list[int] = []
    banned: list[int] = []
    for index, (spec, position) in enumerate(rows):
        if must_go_on(spec, position):
            indices += [index] * len(spec.stop_ids)
            banned += spec.stop_ids
    return mask_tokens(logits, indices, banned)


def bans(spec: GenerationSpec, position: int) -> bool:
    """Whether `masked` bans anything at this position of the log; if not, it does at none after."""
    return bool(spec.stop_ids) and must_go_on(spec, position)


def must_go_on(spec: GenerationSpec, position: int) -> bool:
    """Whether a token at this position of the log may not end the generation (min_tokens)."""
    return position < spec.prompt_len + spec.min_tokens
