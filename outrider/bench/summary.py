"""From answers to numbers: throughput, latency, acceptance, identity, where the time went."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.bench.runner import SystemRun
from outrider.bench.systems import RequestResult
from outrider.types import SpeculationStats


def summarise(run: SystemRun, plain: SystemRun | None) -> dict[str, Any]:
    """The entry of `run` in the report; `plain` is what its token ids are compared with."""
    results = run.results
    tokens = sum(len(result.token_ids) for result in results)
    stats = _stats(results)
    return {
        "system": run.system,
        "prompts": len(results),
        "tokens": tokens,
        "wall_s": run.wall_s,
        "tok_s": tokens / run.wall_s if run.wall_s > 0 else None,
        "ttft_ms": _spread([r.ttft_s for r in results]),
        "tpot_ms": _spread([r.tpot_s for r in results]),
        "acceptance_rate": stats.acceptance_rate,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "speculation": _counts(stats) if _told(results) else None,
        "identical_to_plain": _identical(results, plain.results) if plain else None,
        "per_category": _per_category(results),
        "time": _time(results, stats.rounds),
        "requests": [_request(result) for result in results],
    }


def ratios(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """tok_s of each system over that of plain and of transformers, where these were run.

    `paired_median_vs_plain` is the median over prompts of the same ratio per prompt.
    """
    by_name = {run["system"]: run for run in runs}
    found: dict[str, dict[str, float]] = {}
    for base in ("plain", "transformers"):
        if base in by_name and by_name[base]["tok_s"]:
            found[f"vs_{base}"] = {
                name: run["tok_s"] / by_name[base]["tok_s"]
                for name, run in by_name.items()
                if name != base and run["tok_s"]
            }
    if "plain" in by_name:
        found["paired_median_vs_plain"] = {
            name: _paired(run["requests"], by_name["plain"]["requests"])
            for name, run in by_name.items()
            if name != "plain"
        }
    return found


def of_best_fixed(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any] | None]:
    """By category, tok_s where the controller chose (`speculative`) over that of the best fixed
    length, plain decoding (k = 0) included, and which that was. Empty where nothing was fixed."""
    by_name = {run["system"]: run["per_category"] for run in runs}
    fixed = [name for name in by_name if name == "plain" or name.startswith("k=")]
    if "speculative" not in by_name or fixed in ([], ["plain"]):
        return {}
    return {
        category: _of_best(
            {name: by_name[name][category]["tok_s"] for name in fixed}, ours["tok_s"]
        )
        for category, ours in by_name["speculative"].items()
    }


def _of_best(fixed: dict[str, float | None], ours: float | None) -> dict[str, Any] | None:
    known = {name: rate for name, rate in fixed.items() if rate}
    if not known or not ours:
        return None
    best = max(known, key=lambda name: known[name])
    return {"ratio": ours / known[best], "best": best}


def _paired(mine: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> float:
    pairs = zip(mine, other, strict=True)
    known = [a["tok_s"] / b["tok_s"] for a, b in pairs if a["tok_s"] and b["tok_s"]]
    return float(np.median(known)) if known else 0.0


def _spread(seconds: Sequence[float | None]) -> dict[str, float] | None:
    """Milliseconds; None where no request had the number."""
    known = [value * 1000 for value in seconds if value is not None]
    if not known:
        return None
    p50, p99 = np.percentile(known, [50, 99])
    return {"p50": float(p50), "p99": float(p99), "mean": float(np.mean(known))}


def _told(results: Sequence[RequestResult]) -> bool:
    return any(result.usage is not None for result in results)


def _stats(results: Sequence[RequestResult]) -> SpeculationStats:
    usages = (result.usage for result in results)
    return sum((u.speculation for u in usages if u is not None), SpeculationStats())


def _counts(stats: SpeculationStats) -> dict[str, Any]:
    return {
        "rounds": stats.rounds,
        "proposed": stats.proposed,
        "accepted": stats.accepted,
        "recovered": stats.recovered,
        "bonus": stats.bonus,
        "plain": stats.plain,
        "dropped_proposals": stats.dropped_proposals,
        "fallback_rounds": stats.fallback_rounds,
        "buffer_hits": stats.buffer_hits,
        "buffer_misses": stats.buffer_misses,
        "proposed_by_position": list(stats.proposed_by_position),
        "accepted_by_position": list(stats.accepted_by_position),
    }


def _identical(mine: Sequence[RequestResult], plain: Sequence[RequestResult]) -> dict[str, int]:
    pairs = list(zip(mine, plain, strict=True))
    return {"equal": sum(a.token_ids == b.token_ids for a, b in pairs), "of": len(pairs)}


def _per_category(results: Sequence[RequestResult]) -> dict[str, dict[str, float | None]]:
    """tok_s here is that of one request: tokens over the summed times of the requests."""
    groups: dict[str, list[RequestResult]] = {}
    for result in results:
        groups.setdefault(result.category, []).append(result)
    return {category: _category(group) for category, group in groups.items()}


def _category(results: Sequence[RequestResult]) -> dict[str, float | None]:
    seconds = sum(result.total_s for result in results)
    stats = _stats(results)
    return {
        "prompts": len(results),
        "tok_s": sum(len(r.token_ids) for r in results) / seconds if seconds > 0 else None,
        "acceptance_rate": stats.acceptance_rate,
        "mean_acceptance_length": stats.mean_acceptance_length,
    }


def _time(results: Sequence[RequestResult], rounds: int) -> dict[str, float] | None:
    """Microseconds a round, and what orchestrator and gRPC add to the workers' time, in ms a round.

    Several generations at once wait for each other in the orchestrator, and that counts too. A
    target that goes on by itself works while its last reply travels: nothing is added then.
    """
    times = [result.usage.time for result in results if result.usage is not None]
    if not times or not rounds:
        return None
    waits = ("rounds_us", "draft_us", "verify_us")
    work = ("draft_compute_us", "verify_compute_us", "draft_worker_us", "verify_worker_us")
    total = {name: sum(getattr(time, name) for time in times) for name in waits + work}
    overhead_us = total["rounds_us"] - total["draft_worker_us"] - total["verify_worker_us"]
    per_round = {f"{name}_per_round": value / rounds for name, value in total.items()}
    return {**per_round, "overhead_ms_per_round": max(overhead_us / rounds / 1000, 0.0)}


def _request(result: RequestResult) -> dict[str, Any]:
    usage = result.usage
    return {
        "id": result.prompt_id,
        "category": result.category,
        "tokens": len(result.token_ids),
        "tok_s": len(result.token_ids) / result.total_s if result.total_s > 0 else None,
        "ttft_ms": None if result.ttft_s is None else result.ttft_s * 1000,
        "tpot_ms": None if result.tpot_s is None else result.tpot_s * 1000,
        "prompt_tokens": usage.prompt_tokens if usage else None,
        "cached_prompt_tokens": usage.cached_prompt_tokens if usage else None,
    }
