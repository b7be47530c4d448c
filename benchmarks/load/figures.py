"""What the sessions of a load run amount to."""

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from machine import Machine

Sessions = list[dict[str, Any]]
"""As sessions.js tells of them; times in milliseconds."""

_SYSTEM_BLOCKS, _PREFIX_BLOCKS, _BLOCK = 2, 6, 32


def of_sessions(sessions: Sessions, seconds: float) -> dict[str, Any]:
    """Times in ms; rates a second. `stream_tokens_per_s` is that of a session from its first token
    on: what waiting for room has no part in."""
    done = [one for one in sessions if not one["fault"] and not one["refused"]]
    prompt = sum(one["prompt"] for one in done) or 1
    tokens = sum(len(one["ids"].split()) for one in done)
    return {
        "sessions": len(done),
        "faults": [f"{one['number']}: {one['fault']}" for one in sessions if one["fault"]][:20],
        "retries": sum(one["refusals"] for one in sessions),
        "seconds": round(seconds, 1),
        "tokens_per_s": round(tokens / seconds, 1),
        "prefix_hit_rate": round(sum(one["cached"] for one in done) / prompt, 3),
        # What one target with KV for everything would have had of them at most.
        "possible_hit_rate": round(_possible(done) / prompt, 3),
        "ttft_ms_p50": percentile([one["ttft_ms"] for one in done], 0.5),
        "ttft_ms_p99": percentile([one["ttft_ms"] for one in done], 0.99),
        "session_ms_p50": percentile([one["total_ms"] for one in done], 0.5),
        "session_ms_p99": percentile([one["total_ms"] for one in done], 0.99),
        "stream_tokens_per_s_p50": percentile([_speed(one) for one in done], 0.5),
        "tpot_ms_p50": round(1e3 / (percentile([_speed(one) for one in done], 0.5) or 1), 2),
    }


def of_refusals(sessions: Sessions) -> dict[str, Any]:
    """Why, how soon (ms), and when to come again (s)."""
    refused = [one for one in sessions if one["refused"]]
    after_ms = [one["last_try_ms"] for one in refused]
    retry_s = [one["retry_s"] for one in refused if one["retry_s"] is not None]
    why = Counter("".join(c for c in one["refused"] if not c.isdigit()) for one in refused)
    return {
        "refused": len(refused),
        "refused_of_arrived": round(len(refused) / (len(sessions) or 1), 3),
        "refused_why": dict(why.most_common(5)),
        "refused_codes": dict(Counter(one["code"] for one in refused)),
        "refused_ms_p50": percentile(after_ms, 0.5),
        "refused_ms_p99": percentile(after_ms, 0.99),
        "with_retry_info": len(retry_s),
        "retry_s_p50": percentile(retry_s, 0.5),
        "retry_s_max": max(retry_s, default=0.0),
    }


def of_client(crowd: dict[str, Any]) -> dict[str, Any]:
    """What a client of our own (crowd.py) had to do with it: how late it sent, how late its loop
    was, and the cores that it took."""
    late_ms = [one["late_ms"] for one in crowd["sessions"]]
    return {
        "sent_late_ms_p50": round(percentile(late_ms, 0.5), 1),
        "sent_late_ms_p99": round(percentile(late_ms, 0.99), 1),
        "loop_late_ms_p50": round(percentile(crowd["lags_ms"], 0.5), 1),
        "loop_late_ms_p99": round(percentile(crowd["lags_ms"], 0.99), 1),
        "cores": round(crowd["cpu_s"] / crowd["seconds"], 2),
    }


def over_time(memory: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    """MiB of each part before, after a quarter, a half, three quarters, and in the end."""
    last = len(memory) - 1
    return {name: [memory[i * last // 4][name] for i in range(5)] for name in memory[0]}


def told_keys(sessions: Sessions) -> list[str]:
    """The prompts of those that ran."""
    return sorted({one["key"] for one in sessions if one["ids"] and not one["fault"]})


def altered(sessions: Sessions, alone: Sessions) -> dict[str, Any]:
    """Sessions whose tokens are not those that the same prompt gave undisturbed."""
    right = {one["key"]: one["ids"] for one in alone if not one["fault"]}
    compared = [one for one in sessions if one["ids"] and not one["fault"]]
    return {
        "compared_with_undisturbed": len(compared),
        "prompts": len(right),
        "altered": sum(one["ids"] != right.get(one["key"]) for one in compared),
    }


def balance(machine: Machine) -> dict[str, Any]:
    """How evenly workers are used. The imbalance is the most sessions that a target had on
    average, over the mean of all."""
    sessions_at = {name: mean(used.sessions) for name, used in sorted(machine.used.items())}
    targets = [sessions_at[name] for name in machine.targets]
    return {
        "sessions_at": {name: round(value, 2) for name, value in sessions_at.items()},
        "busy": {name: round(mean(used.busy), 2) for name, used in sorted(machine.used.items())},
        "target_imbalance": round(max(targets) / (mean(targets) or 1), 2),
    }


def speeds(sessions: Sessions) -> dict[str, float]:
    """Tokens per second of those that ran: of the middle one, and of all in their time together."""
    ran = [one for one in sessions if one["ids"] and not one["fault"]]
    tokens = sum(len(one["ids"].split()) - 1 for one in ran)
    seconds = sum(one["total_ms"] - one["ttft_ms"] for one in ran) / 1000
    median = percentile([_speed(one) for one in ran], 0.5)
    return {"median": median or 1.0, "mean": tokens / seconds if seconds else 1.0}


def _speed(one: dict[str, Any]) -> float:
    seconds = max(one["total_ms"] - one["ttft_ms"], 1) / 1000
    return round((len(one["ids"].split()) - 1) / seconds, 1)


def _possible(sessions: Sessions) -> int:
    """Prompt tokens in whole blocks that came before in an earlier prompt."""
    seen: set[str] = set()
    tokens = 0
    for one in sorted(sessions, key=lambda one: one["number"]):
        rank = one["key"].partition("/")[0]
        system = f"system {int(rank) % 4}"
        for name, blocks in (
            (one["key"], _PREFIX_BLOCKS),
            (rank, _PREFIX_BLOCKS),
            (system, _SYSTEM_BLOCKS),
        ):
            if name in seen:
                tokens += blocks * _BLOCK
                break
        seen |= {one["key"], rank, system}
    return tokens


def mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def percentile(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(int(part * len(values)), len(values) - 1)] if values else 0.0
